"""A front end's side of the queue: sends requests, and hands their recorded output to the readers that await it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from os import getpid
from typing import Any, TypeVar

import msgspec

from ..common.answer_memory import planned_bytes
from ..common.heartbeat import STILL_S
from ..common.host_memory import free_host_bytes
from ..engine.process.fair_threads import FairThreads
from ..server.choices import joined
from ..server.engine_client import EngineUnavailable, Generation, Observer, RequestFailed, check_depth
from ..server.engine_outputs import error_kind, prompt_end, tokenizer_facts
from ..server.messages import Accepted, Failed, ModelInfo, Piece, RequestEnd, Submit
from .errors import FleetError
from .links import QueueLink, QueueUnavailable
from .messages import FleetInfo, NewRequest, Record, Submission, decode_record
from .preparation import RequestPreparer
from .request_queue import CANCELLED

log = logging.getLogger(__name__)

AWAY_S = 30.0  # a request waits so long for a queue that is being restarted
AGAIN_S = 0.1
INFO_EVERY_S = 2.0
MODEL_S = 120.0  # the first worker has so long to load the model
# A closing client waits so long until the queue knows what it has cancelled and left
LEAVE_S = 5.0
PREPARING_THREADS = 3
ONE_ENGINE = "a fleet's workers are operated by `pagetide fleet`: "

Value = TypeVar("Value")


@dataclass(slots=True)
class Followed:
    """A request with records that are followed. `FleetClient` changes it.

    Attributes:
        beginning: Submits it.
        cancels: It is cancelled if it is dropped before it is accepted.
        number: The queue's; None until it is accepted.
        num_records: Records that have arrived.
        is_streamed: Pieces are given as they come; otherwise all with the end.
        num_returned: Continuations that are given, the best of those that ran.
    """

    generation: Generation
    beginning: asyncio.Task[None] | None = None
    cancels: bool = True
    number: int | None = None
    num_records: int = 0
    is_streamed: bool = True
    num_returned: int = 1
    has_scores: bool = False
    pieces: list[Piece] = field(default_factory=list)


class FleetClient:
    """An `EngineClient` with a fleet of engines. Make it with `start`; it belongs to one event loop."""

    is_durable = True

    def __init__(
        self,
        link: QueueLink,
        name: str,
        info: FleetInfo,
        preparer: RequestPreparer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self.preparer = preparer
        self.front = f"{socket.gethostname()}-{getpid()}-{secrets.token_hex(4)}"
        self._link = link
        self._info = info
        self._answers_bytes = planned_bytes(free_host_bytes())  # here; the queue has no more of one than this
        self._preparing = FairThreads(PREPARING_THREADS, 1, "pagetide-prepare")
        self._numbers = itertools.count()
        self._followed: dict[int, Followed] = {}  # by the generation's number
        self._by_number: dict[int, list[Followed]] = {}  # by the queue's number
        self._received: dict[int, list[bytes]] = {}  # all records, by the queue's number; perhaps before `_by_number`
        self._idle: set[int] = set()  # received and followed by none at the last look
        self._outgoing: list[tuple[NewRequest, asyncio.Future[Submission]]] = []
        self._has_outgoing = asyncio.Event()
        self._says_positions = False
        self._clock = clock
        self._answered_at = clock()  # the queue's last answer
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[None]] = set()  # those of `_tasks` that end what was dropped

    @classmethod
    async def start(cls, link: QueueLink, name: str | None = None) -> FleetClient:
        """A client of the queue behind `link`. Waits for the first worker. Raises EngineUnavailable."""
        info = await _retried(lambda: link.info(MODEL_S))
        if info is None:
            raise EngineUnavailable(f"no worker of the fleet has loaded the model within {MODEL_S:g} s")
        preparer = await asyncio.to_thread(RequestPreparer, info)
        client = cls(link, name or info.model.name, info, preparer)
        for work in (client._read(), client._send(), client._refresh()):
            client._keep(work)
        return client

    # -- EngineClient ------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; `max_seqs` are those of all workers."""
        model = self._info.model
        return ModelInfo(
            path=model.path, max_model_len=model.max_model_len, max_seqs=self._info.max_seqs,
            block_size=model.block_size, vocab_size=model.vocab_size, device="fleet", dtype=model.dtype,
            version=model.version, answers_bytes=self._answers_bytes, **tokenizer_facts(self.preparer.tokenizer),
        )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        """Whether requests can be submitted: not while the queue gives no answer for long."""
        return not self.ended.is_set() and self._clock() - self._answered_at < STILL_S

    @property
    def num_unfinished(self) -> int:
        """Requests of this front end that have not ended."""
        return len(self._followed)

    def submit(self, changed: asyncio.Event, observer: Observer | None = None, **request: Any) -> Generation:
        """Send a request: see `EngineClient.submit`."""
        if self.ended.is_set():
            raise EngineUnavailable(f"the connection to the fleet of {self.name} is closed")
        check_depth([request.get("params"), request.get("template"), request.get("messages")])
        generation = Generation(next(self._numbers), changed, observer)
        submit = Submit(number=generation.number, **request)
        params = submit.params
        followed = self._followed[generation.number] = Followed(
            generation,
            is_streamed=submit.streams,
            num_returned=int(params.get("n") or 1),
            has_scores=params.get("logprobs") is not None,
        )
        followed.beginning = self._keep(self._begin(followed, submit))
        return generation

    def follow(self, request: NewRequest, changed: asyncio.Event) -> Generation:
        """Send a prepared request; its output comes in pieces with all their scores. Raises EngineUnavailable."""
        if self.ended.is_set():
            raise EngineUnavailable(f"the connection to the fleet of {self.name} is closed")
        generation = Generation(next(self._numbers), changed)
        followed = self._followed[generation.number] = Followed(generation, has_scores=True)
        followed.beginning = self._keep(self._begin_prepared(followed, request))
        return generation

    def cancel(self, generation: Generation) -> None:
        """Abort a request, unless it has ended."""
        self._drop(generation, cancels=True)

    def leave(self, generation: Generation) -> None:
        """Follow a request no longer. It goes on."""
        self._drop(generation, cancels=False)

    async def call(self, method: str, *, tenant: str = "", **arguments: Any) -> Any:
        """See `EngineServer.calls`. What concerns one engine is refused. Raises RequestFailed or EngineUnavailable."""
        if method in ("tokenize", "detokenize"):
            return await self._prepared(partial(getattr(self.preparer, method), **arguments), tenant)
        if method == "cancel":
            response_id: str = arguments["response_id"]
            return await _retried(lambda: self._link.cancel(response_id, tenant, 0.0, CANCELLED))
        if method in ("stats", "fleet_metrics", "status"):
            status = await _retried(self._link.status)
            return status if method == "status" else status[method]
        hints = {"sleep": "stop workers with `pagetide fleet drain`", "wake_up": "add workers with `pagetide fleet add`"}
        raise RequestFailed("invalid", ONE_ENGINE + hints.get(method, f"{method} exists for a single engine only"))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Give the followed requests `drain_s` seconds, then follow no more. Requests go on in the fleet. Idempotent."""
        self.ended.set()
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._followed and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self._leaving:  # a request that is accepted only now is left in a further task
                    await asyncio.wait(self._leaving)
        await self.kill()

    async def kill(self) -> None:
        """Follow no more."""
        self.ended.set()
        error = EngineUnavailable(f"the connection to the fleet of {self.name} was closed; the request goes on there")
        for followed in list(self._followed.values()):
            followed.generation.take(error)
        self._followed.clear()
        self._by_number.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._preparing.shutdown)

    # -- requests that begin -----------------------------------------------------------------------------------------

    async def _begin(self, followed: Followed, submit: Submit) -> None:
        try:
            if submit.attach:
                asked = (self.front, submit.durable_id, submit.tenant, submit.fingerprint)
                answer = await _retried(lambda: self._link.attach(*asked))
                self._accept(followed, answer, None)
            else:
                submit = _named(submit)
                request = await self._prepared(lambda: self.preparer.of_submit(submit), submit.tenant)
                await self._begin_prepared(followed, request)
        except (RequestFailed, EngineUnavailable) as error:
            self._end(followed, error)

    async def _begin_prepared(self, followed: Followed, request: NewRequest) -> None:
        try:
            self._accept(followed, await self._submitted(request), request)
        except (RequestFailed, EngineUnavailable) as error:
            self._end(followed, error)

    async def _prepared(self, work: Callable[[], Value], tenant: str) -> Value:
        """The result of `work`, in a thread, in turns with other tenants. Raises RequestFailed."""
        try:
            result: Value = await asyncio.wrap_future(self._preparing.submit(work, tenant))
            return result
        except Exception as error:
            kind = error_kind(error)
            if kind == "internal":
                log.exception("a request cannot be prepared")
            raise RequestFailed(kind, str(error) or type(error).__name__) from error

    async def _submitted(self, request: NewRequest) -> Submission:
        answer: asyncio.Future[Submission] = asyncio.get_running_loop().create_future()
        self._outgoing.append((request, answer))
        self._has_outgoing.set()
        return await answer

    def _accept(self, followed: Followed, answer: Submission, request: NewRequest | None) -> None:
        """Follow a request that the queue has accepted. Raises RequestFailed."""
        generation = followed.generation
        if answer.number is None:
            raise RequestFailed(answer.kind, answer.error)
        followed.number = answer.number
        known = answer.request or request
        assert known is not None
        generation.created, generation.is_attached = int(known.created), answer.request is not None
        if generation.number not in self._followed:  # it was dropped meanwhile
            self._leave_later(answer.number, cancels=followed.cancels and not generation.is_attached)
            return
        self._by_number.setdefault(answer.number, []).append(followed)
        # A call to leave it may have been under way: the next read says that it is followed
        if generation.is_attached:
            self._says_positions = True
        end = prompt_end(getattr(self.preparer, "tokenizer", None), known.prompt_token_ids)
        generation.take(Accepted(generation.number, known.prompt_token_ids, known.max_new_tokens, end))
        self._take(followed, self._received.get(answer.number, []))

    async def _send(self) -> None:
        """Submit requests; those that come during a call go together with the next one."""
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            batch, self._outgoing = self._outgoing, []
            try:
                answers = await self._submit_all([request for request, _ in batch])
            except Exception as error:
                if not isinstance(error, EngineUnavailable | RequestFailed):
                    log.exception("requests cannot be submitted")
                    error = RequestFailed("internal", str(error))
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), found in zip(batch, answers, strict=True):
                if not answer.done():
                    answer.set_result(found)

    async def _submit_all(self, requests: list[NewRequest]) -> list[Submission]:
        def again() -> None:  # the queue may have accepted them before it ended
            requests[:] = [msgspec.structs.replace(request, may_exist=True) for request in requests]

        return await _retried(lambda: self._link.submit(self.front, requests), again)

    # -- records -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Hand new records to the generations, until the client is closed."""
        is_away = False
        while True:
            positions = None
            if self._says_positions:  # consumed here: it may be set again while this read waits
                self._says_positions = False
                positions = {number: len(self._received.get(number, ())) for number in self._by_number}
            try:
                deliveries = await self._link.read(self.front, positions)
            except (FleetError, QueueUnavailable) as error:
                if not is_away:
                    log.warning("the queue is away, and is waited for: %s", error)
                is_away = self._says_positions = True
                await asyncio.sleep(AGAIN_S)
                continue
            is_away, self._answered_at = False, self._clock()
            for number, (position, records) in deliveries.records.items():
                received = self._received.setdefault(number, [])
                if position > len(received):  # an answer was lost: the next read says what is here
                    self._says_positions = True
                    continue
                received += records[len(received) - position :]
                for followed in self._by_number.get(number, [])[:]:
                    self._take(followed, received)
            for number in deliveries.unknown:
                for followed in self._by_number.get(number, [])[:]:
                    self._end(followed, EngineUnavailable("the fleet's queue does not know this request any more"))

    def _take(self, followed: Followed, received: list[bytes]) -> None:
        """Take in what is new of all the records that were received."""
        for data in received[followed.num_records :]:
            followed.num_records += 1
            self._give(followed, decode_record(data))

    def _give(self, followed: Followed, record: Record) -> None:
        if isinstance(record, Failed):
            self._end(followed, RequestFailed(record.kind, record.error))
        elif isinstance(record, RequestEnd):
            self._end(followed, _whole(followed, record))
        elif followed.is_streamed:
            followed.pieces.append(record)
            followed.generation.take(record if followed.has_scores else _without_scores(record))
        else:
            followed.pieces.append(record)

    def _end(self, followed: Followed, end: RequestEnd | Exception) -> None:
        self._forget(followed)
        followed.generation.take(end)

    def _forget(self, followed: Followed) -> None:
        self._followed.pop(followed.generation.number, None)
        if followed.number is not None and (each := self._by_number.get(followed.number)) is not None:
            if followed in each:
                each.remove(followed)
            if not each:
                del self._by_number[followed.number]

    def _drop(self, generation: Generation, cancels: bool) -> None:
        followed = self._followed.get(generation.number)
        if followed is None:
            return
        self._forget(followed)
        followed.cancels = cancels
        generation.settle()
        if followed.number is None:  # `_accept` leaves it
            if followed.beginning is not None:
                _hold(followed.beginning, self._leaving)
        elif followed.number not in self._by_number:
            self._leave_later(followed.number, cancels)

    def _leave_later(self, number: int, cancels: bool) -> None:
        _hold(self._keep(self._leave(number, cancels)), self._leaving)

    async def _leave(self, number: int, cancels: bool) -> None:
        await _retried(lambda: self._link.leave(self.front, [number], cancels))
        if number in self._by_number:  # followed again meanwhile, which this call may have undone
            self._says_positions = True

    # -- state -------------------------------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(INFO_EVERY_S)
            idle = self._received.keys() - self._by_number.keys()
            for number in self._idle & idle:
                del self._received[number]
            self._idle = idle
            try:
                self._info = await self._link.info(0.0) or self._info
            except QueueUnavailable:
                continue

    def _keep(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.is_set():
            log.error("a task of the fleet's client failed", exc_info=error)


def _hold(task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
    """Keep a task in `tasks` until it is done."""
    if not task.done():
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _retried(call: Callable[[], Awaitable[Value]], again: Callable[[], None] = lambda: None) -> Value:
    """The result of `call`, repeated for AWAY_S while the queue is away; `again` before each repetition."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + AWAY_S
    while True:
        try:
            return await call()
        except QueueUnavailable as error:
            if loop.time() > deadline:
                raise EngineUnavailable(f"the fleet's queue is away: {error}") from error
            await asyncio.sleep(AGAIN_S)
            again()


def _named(submit: Submit) -> Submit:
    """A submission with an id."""
    return submit if submit.durable_id else msgspec.structs.replace(submit, durable_id=f"req-{secrets.token_hex(12)}")


def _without_scores(piece: Piece) -> Piece:
    return piece if piece.scores is None else msgspec.structs.replace(piece, scores=None)


def _mean_logprob(piece: Piece) -> float:
    """The score for `best_of`, as the engine's: the mean of a whole continuation's log-probabilities."""
    if piece.finish_reason not in ("stop", "length") or not piece.scores:
        return -math.inf
    return math.fsum(score.logprob or 0.0 for score in piece.scores) / len(piece.scores)


def _whole(followed: Followed, end: RequestEnd) -> RequestEnd:
    """The end of a request, with its whole continuations unless they were streamed, the best first."""
    by_index: dict[int, list[Piece]] = {}
    for piece in followed.pieces:
        by_index.setdefault(piece.index, []).append(piece)
    whole = [joined(pieces) for _, pieces in sorted(by_index.items())]
    generated = sum(len(piece.token_ids) for piece in whole)
    if followed.is_streamed:
        return msgspec.structs.replace(end, pieces=[], num_generated=generated)
    if len(whole) > followed.num_returned:
        whole.sort(key=_mean_logprob, reverse=True)
        whole = [msgspec.structs.replace(piece, index=place) for place, piece in enumerate(whole[: followed.num_returned])]
    if not followed.has_scores:
        whole = [_without_scores(piece) for piece in whole]
    return msgspec.structs.replace(end, pieces=whole, num_generated=generated)
