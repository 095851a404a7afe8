"""The server's side of an engine process: starts it, sends requests, and hands their output to their readers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from ..cache.retention import Retention
from ..common.answer_memory import MOST_UNREAD_BYTES, AnswerSize
from ..common.child_process import END_S, ChildProcess
from ..common.heartbeat import STILL_S, SilenceWatch
from .connection import CannotEncode, MessageConnection
from .messages import (
    BEAT_S,
    Aborted,
    Accepted,
    Alive,
    Call,
    CallResult,
    Cancel,
    Failed,
    ModelInfo,
    ModelReady,
    OutputPieces,
    Piece,
    RequestEnd,
    Score,
    Start,
    StartFailed,
    Stop,
    Submit,
    ToServer,
    WholeScores,
)

log = logging.getLogger(__name__)

ENGINE_MODULE = "pagetide.server.engine_process"
MOST_UNREAD_TOKENS = 16_384
MOST_DEPTH = 100  # of lists and objects in each other: parsers of schemas and templates recurse
KILL_AFTER_S = 10.0  # the process has this long to end after its last request
EXIT_LOOK_S = 0.01


class EngineUnavailable(Exception):
    """The engine cannot serve this now: its process has ended, or it is not loaded."""


class Detached(EngineUnavailable):
    """The server shuts down and leaves a durable request running."""


class RequestFailed(Exception):
    """The engine refused the request, or failed on it. `kind` is that of `messages.Failed`."""

    def __init__(self, kind: str, error: str) -> None:
        super().__init__(error)
        self.kind = kind

    @property
    def is_refusal(self) -> bool:
        """Whether the request is at fault, and not the engine."""
        return self.kind in ("invalid", "too_long", "conflict", "not_found", "cancelled")


class SlowReader(Exception):
    """The reader of a stream is too slow for its output."""


class LoadFailed(Exception):
    """The model cannot be loaded. `kind` is the name of the engine's error."""

    def __init__(self, kind: str, error: str) -> None:
        super().__init__(error)
        self.kind = kind


class Observer(Protocol):
    """Counts what streams deliver."""

    def first_token(self, seconds: float) -> None:
        """The first token of a prompt came so long after it was sent."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more tokens of a continuation came, each so long after the last."""


class Generation:
    """The output of one prompt as it arrives. Its `Batch` reads it.

    Attributes:
        created: When the request began, in seconds since 1970. A durable engine client sets it before `Accepted`.
        is_attached: The request was there before. A durable engine client sets it before `Accepted`.
        prompt_token_ids, max_new_tokens, prompt_end: Set once the prompt is tokenized.
        finished: Set once all output has arrived.
        error: Why the request failed.
        pieces: Output that has arrived and was not read.
        num_unread, unread_bytes: Tokens in `pieces`, and about their memory.
        grown: Called when `pieces` have grown by so many bytes.
        counts: Tokens of the output so far, by continuation.
        reasons: Why each continuation has ended.
        submitted_at, first_token_at, ended_at: Times of `time.monotonic`.
    """

    def __init__(self, number: int, changed: asyncio.Event, observer: Observer | None = None) -> None:
        self.created = int(time.time())
        self.is_attached = False
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.reasons: dict[int, str] = {}
        self._last_token_at: dict[int, float] = {}  # by continuation
        self._observer = observer
        self.number = number
        self.prompt_token_ids: list[int] | None = None
        self.max_new_tokens: int | None = None
        self.prompt_end = ""
        self.finished: RequestEnd | None = None
        self.error: Exception | None = None
        self.pieces: list[Piece] = []
        self.num_unread = self.unread_bytes = 0
        self.grown: Callable[[int], None] = lambda _: None
        self.counts: dict[int, int] = {}
        self._scores: dict[int | None, list[Score]] = {}  # of continuations and the prompt, until the end comes
        self._changed = changed
        self._num_generated = 0  # as the engine says at the end
        self._when_settled: list[Callable[[], None]] = []
        self.is_settled = False

    @property
    def num_generated(self) -> int:
        """Tokens generated for this prompt so far as is known, with those that `best_of` leaves out; exact once settled."""
        return max(self._num_generated, self.num_tokens)

    def settle(self, num_generated: int = 0) -> None:
        """The engine does nothing more for this prompt, and generated so many tokens. Idempotent."""
        self._num_generated = max(self._num_generated, num_generated)
        self.is_settled = True
        waiting, self._when_settled = self._when_settled, []
        for then in waiting:
            then()

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` once the engine has said how much it generated, or has ended."""
        if self.is_settled:
            then()
        else:
            self._when_settled.append(then)

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far, of all continuations."""
        return sum(self.counts.values())

    def take(self, message: Accepted | Piece | WholeScores | RequestEnd | Exception) -> None:
        """Take in what the engine says of this request."""
        match message:
            case Piece():
                self.pieces.append(message)
                self.num_unread += len(message.token_ids)
                self.unread_bytes += (num_bytes := message.num_bytes)
                self._count(message)
                if self._observer is not None and message.token_ids and not self.is_attached:
                    self._observe(self._observer, message.index, len(message.token_ids))
                self.grown(num_bytes)
            case Accepted():
                self.prompt_token_ids, self.max_new_tokens = message.prompt_token_ids, message.max_new_tokens
                self.prompt_end = message.prompt_end
            case WholeScores():
                self._scores.setdefault(message.index, []).extend(message.scores)
                return
            case RequestEnd():
                self.finished = self._with_scores(message)
                self.ended_at = time.monotonic()
                for piece in message.pieces:
                    self._count(piece)
                self.settle(message.num_generated)
            case Exception():
                self.error = message
                self.settle()
        self._changed.set()

    def _with_scores(self, end: RequestEnd) -> RequestEnd:
        """`end` with the scores that came before."""
        found, self._scores = self._scores, {}
        if not found:
            return end
        pieces = [msgspec.structs.replace(piece, scores=found.get(piece.index)) for piece in end.pieces]
        return msgspec.structs.replace(end, pieces=pieces, prompt_scores=found.get(None))

    def _count(self, piece: Piece) -> None:
        self.counts[piece.index] = self.counts.get(piece.index, 0) + len(piece.token_ids)
        if piece.finish_reason is not None:
            self.reasons[piece.index] = piece.finish_reason

    def _observe(self, observer: Observer, index: int, count: int) -> None:
        now = time.monotonic()
        last = self._last_token_at.get(index)
        self._last_token_at[index] = now
        if last is not None:
            observer.next_tokens((now - last) / count, count)
        elif self.first_token_at is None:
            self.first_token_at = now
            observer.first_token(now - self.submitted_at)

    def read(self) -> list[Piece]:
        """The output that has arrived since the last call."""
        pieces, self.pieces = self.pieces, []
        self.num_unread = self.unread_bytes = 0
        return pieces


class Batch:
    """The prompts of one HTTP request, for one reader. `cancel` it, also after errors.

    Args:
        most_unread, most_unread_bytes: Tokens, and their memory, that may wait for the reader; beyond it `read` raises
            SlowReader. A durable engine's output is kept elsewhere and may arrive at once: it has no such limit.

    Attributes:
        request_id: Of the HTTP request; the label of its requests in the engine.
        tenant: The name of its key.
        retention: How long its prompts are worth keeping.
        is_resumable: The client knows the id of the response and can ask for the rest of it elsewhere.
        is_kept: Durable requests go on when their reader leaves.
    """

    def __init__(
        self,
        engine: EngineClient,
        observer: Observer | None = None,
        most_unread: int = MOST_UNREAD_TOKENS,
        most_unread_bytes: int = MOST_UNREAD_BYTES,
    ) -> None:
        self.request_id = self.tenant = ""
        self.retention: Retention | None = None
        self.is_resumable = self.is_kept = False
        self._is_detached = False
        self._observer = observer
        self.generations: list[Generation] = []
        self._engine = engine
        self._most_unread = most_unread
        self._most_unread_bytes = most_unread_bytes
        self._unread_bytes = 0
        self._changed = asyncio.Event()

    @property
    def is_durable(self) -> bool:
        """Whether output is kept until its request has ended, sent or not."""
        return self._engine.is_durable

    def submit(self, **request: Any) -> None:
        """Send a prompt: see `EngineClient.submit`."""
        own: dict[str, Any] = {"tenant": self.tenant} if self.tenant else {}
        own |= {"retention": self.retention} if self.retention is not None else {}
        request = own | request | {"request_id": self.request_id}
        generation = self._engine.submit(self._changed, self._observer, **request)
        self.generations.append(generation)
        if not self._engine.is_durable:
            generation.grown = self._grow
            self._grow(generation.unread_bytes)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the outputs so far."""
        prompts = sum(len(one.prompt_token_ids or ()) for one in self.generations)
        return prompts, sum(one.num_generated for one in self.generations)

    @property
    def num_computed(self) -> int:
        """Tokens of the prompts and outputs of the requests that began here; exact once they are settled."""
        return sum(len(one.prompt_token_ids or ()) + one.num_generated for one in self.generations if not one.is_attached)

    @property
    def goes_on(self) -> bool:
        """Whether a request that is kept has not ended."""
        return any(map(self._goes_on, self.generations))

    @property
    def counted(self) -> list[Generation]:
        """The requests that began here and do not go on without their reader."""
        return [one for one in self.generations if not one.is_attached and not self._goes_on(one)]

    def _goes_on(self, generation: Generation) -> bool:
        return self.is_kept and generation.finished is None and generation.error is None

    async def accepted(self) -> None:
        """Wait until all prompts are tokenized. Raises RequestFailed or EngineUnavailable, and Detached after `detach`."""
        while any(generation.prompt_token_ids is None for generation in self.generations):
            await self._change()
        self._check()

    async def read(self) -> list[tuple[int, list[Piece]]]:
        """New output, with the number of its prompt; empty at the end. Raises as `accepted`, and SlowReader."""
        while True:
            self._changed.clear()
            self._check()
            num_unread = sum(generation.num_unread for generation in self.generations)
            if num_unread > self._most_unread and not self._engine.is_durable:
                raise SlowReader(f"the client left more than {self._most_unread:,} tokens unread")
            self._unread_bytes = 0
            new = [(i, one.read()) for i, one in enumerate(self.generations) if one.pieces]
            if new or all(generation.finished is not None for generation in self.generations):
                return new
            await self._changed.wait()

    async def whole(self) -> list[RequestEnd]:
        """The ends of all prompts. Raises as `accepted`."""
        while any(generation.finished is None for generation in self.generations):
            await self._change()
        self._check()
        return [one.finished for one in self.generations if one.finished is not None]

    async def take(self) -> list[tuple[deque[Piece], list[Score] | None]]:
        """The continuations of each prompt and its scores, once all have ended. They are
        kept here no longer. Raises as `accepted`.
        """
        ends = await self.whole()
        for one, end in zip(self.generations, ends, strict=True):
            one.finished = msgspec.structs.replace(end, pieces=[], prompt_scores=None)
        return [(deque(end.pieces), end.prompt_scores) for end in ends]

    def _grow(self, num_bytes: int) -> None:
        """Count output that has arrived. If the reader has left too much, end the requests and drop it, which cannot wait for
        the reader's next `read`.
        """
        self._unread_bytes += num_bytes
        if self._unread_bytes > self._most_unread_bytes:
            error = SlowReader(f"the client left more than {self._most_unread_bytes:,} bytes of output unread")
            for one in self.generations:
                self._engine.cancel(one)
                one.read()
                one.take(error)

    def detach(self) -> None:
        """End the reader; requests that the client can ask for again go on."""
        self.is_kept = self.is_kept or self.is_resumable
        self._is_detached = True
        self._changed.set()

    def cancel(self) -> None:
        """Abort what has not ended. Idempotent."""
        for generation in self.generations:
            self._engine.cancel(generation)

    def end(self) -> None:
        """Leave what is kept, and abort what else has not ended. Idempotent."""
        for generation in self.generations:
            (self._engine.leave if self.is_kept else self._engine.cancel)(generation)

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` once the engine has said how much it generated for each prompt, which is after `cancel` too."""
        left = sum(not generation.is_settled for generation in self.generations)
        if not left:
            then()
            return

        def settled() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for generation in [one for one in self.generations if not one.is_settled]:
            generation.when_settled(settled)

    async def _change(self) -> None:
        self._check()
        self._changed.clear()
        await self._changed.wait()

    def _check(self) -> None:
        for generation in self.generations:
            if generation.error is not None:
                raise generation.error
        if self._is_detached:
            raise Detached("the server shuts down; the request goes on if the client can ask for it again")


def answer_size(batch: Batch, params: Mapping[str, Any], num_sequences: int, streams: bool, max_model_len: int) -> AnswerSize:
    """What the answer to a request may come to have: before its prompts are sent without them, and without tokens that only
    the context bounds.

    Args:
        params: Arguments of `SamplingParams`.
        streams: The engine sends outputs as they come.
    """
    most, logprobs = params.get("max_new_tokens"), params.get("logprobs")
    if (params.get("best_of") or 1) > (params.get("n") or 1):
        logprobs = logprobs or 0  # the best are chosen by them
    rooms = [max(max_model_len - len(one.prompt_token_ids or ()), 0) for one in batch.generations]
    new = [
        room if one.max_new_tokens is None else min(one.max_new_tokens, room)
        for one, room in zip(batch.generations, rooms, strict=True)
    ]
    num_tokens = num_sequences // len(new) * sum(new) if new else num_sequences * min(most or 0, max_model_len)
    return AnswerSize(
        num_sequences,
        num_tokens,
        sum(len(one.prompt_token_ids or ()) for one in batch.generations),
        logprobs,
        params.get("prompt_logprobs"),
        streams and not batch.is_durable,
    )


class EngineClient(Protocol):
    """What serves requests for one model: an engine process, or a queue in front of several."""

    @property
    def name(self) -> str:
        """The model's name in messages."""

    @property
    def is_durable(self) -> bool:
        """Whether requests outlive this process: a request of the same `durable_id` gets all output from the first on."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model. Raises EngineUnavailable before it is loaded."""

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""

    @property
    def ended(self) -> asyncio.Event:
        """Set once the client can serve no more: another one is started."""

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""

    def submit(self, changed: asyncio.Event, observer: Observer | None = None, **request: Any) -> Generation:
        """Send a request: the fields of `messages.Submit`, without its number. Sets `changed` whenever something arrives.

        Raises EngineUnavailable, and RequestFailed if a value cannot be sent.
        """

    def cancel(self, generation: Generation) -> None:
        """Abort a request, unless it has ended."""

    def leave(self, generation: Generation) -> None:
        """Deliver no more of a request. One that is durable goes on, and is settled here at once; any other is aborted."""

    async def call(self, method: str, *, tenant: str = "", **arguments: Any) -> Any:
        """The result of a call for a tenant: see `EngineServer.calls`. Raises RequestFailed or EngineUnavailable."""

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give the running ones `drain_s` seconds, and end. Idempotent."""

    async def kill(self) -> None:
        """End at once."""


class RemoteEngine:
    """An engine in a process of its own. Make it with `start`."""

    is_durable = False

    def __init__(self, process: ChildProcess, name: str) -> None:
        self.name = name
        self.process = process
        self._info: ModelInfo | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Its waiter may have been interrupted: asyncio would print the error then.
        self._ready.add_done_callback(lambda ready: None if ready.cancelled() else ready.exception())
        self._numbers = itertools.count()
        self._generations: dict[int, Generation] = {}
        self._cancelled: dict[int, Generation] = {}  # until the engine says how much it generated
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._connection: MessageConnection[ToServer]
        self._stopping = False
        self._alive = Alive(0, 0.0)  # what the process has said last
        self._num_alive = 0
        self._silence = SilenceWatch(2 * BEAT_S)
        self._watching: asyncio.Task[None] | None = None
        self._hang = ""  # why the process was killed
        self.ended = asyncio.Event()

    @classmethod
    async def start(
        cls, model: str, options: dict[str, Any], *, name: str | None = None, program: Sequence[str] = ("-m", ENGINE_MODULE),
        environ: Mapping[str, str] | None = None, log: int | None = None,
    ) -> RemoteEngine:  # fmt: skip
        """Start the process and load the model. If cancelled, the process ends.

        Args:
            name: The model's name in messages; default `model`.
            program, environ, log: See `ChildProcess`.

        Raises LoadFailed or EngineUnavailable.
        """
        engine = cls(ChildProcess(program, environ=environ, log=log), name or model)
        try:
            engine._connection = await MessageConnection.open(engine.process.socket, ToServer, engine._receive, engine._lost)
            engine._connection.send(Start(model, options, engine.name))
            await engine._ready
            engine._watching = asyncio.create_task(engine._watch())
        except BaseException:
            await asyncio.shield(engine.kill())
            raise
        return engine

    @property
    def info(self) -> ModelInfo:
        """Facts about the model. Raises EngineUnavailable before it is loaded."""
        if self._info is None:
            raise EngineUnavailable(f"the model {self.name} is not loaded")
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether the process can serve."""
        return self._info is not None and not self.ended.is_set()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def look(self, now: float) -> None:
        """Kill the process if it hangs. To be called every BEAT_S with the time in seconds."""
        said, allowed_s = self._alive, self._alive.allowed_s or STILL_S
        silent_s = self._silence.look((said.allowed_s, said.beats) if said.allowed_s else self._num_alive, now)
        if silent_s > allowed_s and not self.ended.is_set():
            self._hang = f"hung: it was at work, and came no further for {allowed_s:.0f} s"
            log.error("the engine of %s hangs: no sign of progress for %.0f s; it is killed", self.name, allowed_s)
            self.process.kill()
            # The end of a process that a driver's call holds up is not waited for
            self._connection.abort()

    async def _watch(self) -> None:
        while not self.ended.is_set():
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(BEAT_S)

    def submit(self, changed: asyncio.Event, observer: Observer | None = None, **request: Any) -> Generation:
        """Send a request: see `EngineClient.submit`."""
        self._check()
        generation = Generation(next(self._numbers), changed, observer)
        self._send(Submit(number=generation.number, **request))
        self._generations[generation.number] = generation
        return generation

    def cancel(self, generation: Generation) -> None:
        """Abort a request, unless it has ended."""
        if self._generations.pop(generation.number, None) is not None and not self.ended.is_set():
            self._cancelled[generation.number] = generation
            self._connection.send(Cancel(generation.number))

    def leave(self, generation: Generation) -> None:
        """Abort a request, unless it has ended: it does not outlive its reader."""
        self.cancel(generation)

    async def call(self, method: str, *, tenant: str = "", **arguments: Any) -> Any:
        """The result of a call for a tenant: see `EngineServer.calls`. Raises RequestFailed or EngineUnavailable."""
        self._check()
        number = next(self._numbers)
        self._send(Call(number, method, arguments, tenant))
        result = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await result
        finally:
            self._calls.pop(number, None)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give the running ones `drain_s` seconds, and end the process. Idempotent."""
        if not self._stopping and not self.ended.is_set():
            self._stopping = True
            self._connection.send(Stop(drain_s))
        if not await self._exits(drain_s + KILL_AFTER_S):
            log.error("%s's engine did not exit; killing it", self.name)
            await self.kill()

    async def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        if not await self._exits(END_S):
            log.error("%s's engine, process %d, cannot be killed now", self.name, self.process.pid)
            self._lost()

    async def _exits(self, timeout_s: float) -> bool:
        """Wait for the end of the process. Returns False if it has not come in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.process.status is None:
                    await asyncio.sleep(EXIT_LOOK_S)
        return self.process.status is not None

    # -- messages ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended.is_set():
            raise EngineUnavailable(f"the engine of {self.name} has ended: {self._status()}")
        if self._stopping:
            raise EngineUnavailable(f"the engine of {self.name} is being stopped")

    def _send(self, message: Submit | Call) -> None:
        """Send a client's values. Raises RequestFailed if they cannot be sent."""
        if isinstance(message, Submit):
            check_depth([message.params, message.template, message.messages])
        else:
            check_depth([message.arguments.get("messages"), message.arguments.get("template")])
        try:
            self._connection.send(message)
        except CannotEncode as error:
            raise RequestFailed("invalid", str(error)) from error

    def _status(self) -> str:
        status = self.process.status
        if self._hang:
            return self._hang
        return "its connection broke" if status is None else f"status {status}"

    def _receive(self, message: ToServer) -> None:
        if isinstance(message, Aborted | RequestEnd | Failed) and message.number in self._cancelled:
            count = 0 if isinstance(message, Failed) else message.num_generated
            self._cancelled.pop(message.number).settle(count)
            return
        match message:
            case OutputPieces():
                for piece in message.pieces:
                    self._give(piece.number, piece)
            case Accepted() | WholeScores():
                self._give(message.number, message)
            case RequestEnd():
                self._give(message.number, message)
                self._generations.pop(message.number, None)
            case Failed() if message.number in self._generations:
                self._give(message.number, RequestFailed(message.kind, message.error))
                self._generations.pop(message.number, None)
            case Failed():
                self._answer(message.number, RequestFailed(message.kind, message.error))
            case CallResult():
                self._answer(message.number, message.value)
            case ModelReady():
                self._info = message.info
                if not self._ready.done():
                    self._ready.set_result(None)
            case Alive():
                self._alive, self._num_alive = message, self._num_alive + 1
            case StartFailed():
                self._ready.set_exception(LoadFailed(message.kind, message.error))

    def _give(self, number: int, message: Accepted | Piece | WholeScores | RequestEnd | Exception) -> None:
        generation = self._generations.get(number)
        if generation is not None:  # else it was cancelled
            generation.take(message)

    def _answer(self, number: int, value: Any) -> None:
        result = self._calls.pop(number, None)
        if result is None or result.done():
            return
        if isinstance(value, Exception):
            result.set_exception(value)
        else:
            result.set_result(value)

    def _lost(self) -> None:
        """The process is gone: everything that waits for it fails."""
        self.ended.set()
        why = self._hang or "ended while it served this request"
        error = EngineUnavailable(f"the engine of {self.name} {why}")
        for generation in self._generations.values():
            generation.take(error)
        self._generations.clear()
        for generation in self._cancelled.values():
            generation.settle()
        self._cancelled.clear()
        for number in list(self._calls):
            self._answer(number, error)
        if not self._ready.done():
            self._ready.set_exception(EngineUnavailable(f"the engine of {self.name} ended while it was loading"))


def check_depth(values: list[Any]) -> None:
    """Raise RequestFailed for values that are nested too deeply."""
    level = values
    for _ in range(MOST_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestFailed("invalid", f"objects may be nested {MOST_DEPTH} deep at most")
