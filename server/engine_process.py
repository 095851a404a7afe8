"""The process of one engine: loads a model, serves the server's requests, and ends with the connection to it.

    python -m pagetide.server.engine_process

The other end of the connection is `engine_client.RemoteEngine`.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import socket
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.sampling_params import SamplingParams
from ..common.child_process import parent_socket
from ..common.heartbeat import LOADING_S
from ..engine.errors import EngineClosed
from ..version import __version__
from .connection import SWITCH_S, MessageConnection
from .defaults import by_prompt_end, completed, template_options
from .engine_outputs import (
    Asleep,
    detokenized,
    error_kind,
    piece_of,
    prompt_end,
    request_end,
    scores,
    token_texts,
    tokenizer_facts,
    whole_piece,
    whole_scores,
)
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
    Start,
    StartFailed,
    Stop,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from ..engine.async_calls import AsyncCall, AsyncStream
    from ..engine.async_llm import AsyncLLM
    from ..engine.loading.mapped_weights import Level

log = logging.getLogger(__name__)

UNLIMITED_WAITING = 1 << 30  # the server bounds its queue


class EngineServer:
    """Serves the messages of one connection from one `AsyncLLM`.

    Args:
        load: Makes the engine from a model and its options; blocks meanwhile.
    """

    def __init__(self, load: Callable[[Start], AsyncLLM]) -> None:
        self._load = load
        self._start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._connection: MessageConnection[ToEngine]
        self._llm: AsyncLLM | None = None
        self._asleep: AsyncLLM | None = None
        self._watched: AsyncLLM | None = None  # `_llm`, until that has ended
        self._returns: asyncio.Event | None = None  # set when it is awake again that sleeps with its requests suspended
        self._num_beats = 0  # of this process
        self._changing = asyncio.Lock()  # sleeping, waking up
        self._told_leases: tuple[tuple[str, str], ...] = ()
        self._frozen: Callable[[], object | None] = _nothing  # the model that collections leave out, while it is there
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the number of the request or call
        self._outputs: dict[int, AsyncCall | AsyncStream] = {}  # of running requests, by number
        self._pieces: list[Piece] = []  # not sent yet
        self.calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "stats": lambda: self._awake().stats(),
            "explain": lambda request=None: self._awake().explain(request),
            "frame": self._frame,
            "block": lambda block, text=False: self._awake().block(block, text),
            "reset_prefix_cache": lambda: self._awake().reset_prefix_cache(),
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    async def run(self, end: socket.socket) -> None:
        """Load the model that the first message names, and serve until `Stop` or the end of the connection."""
        self._connection = await MessageConnection.open(end, ToEngine, self._receive, self._lost)
        start = await self._start
        try:
            self._llm = await asyncio.to_thread(self._load, start)
        except Exception as error:
            log.debug("the model cannot be loaded", exc_info=True)
            self._send(StartFailed(str(error), type(error).__name__))
            self._connection.close()
            return
        self._watched = self._llm
        self._tell(self._llm)
        beating = asyncio.create_task(self._beat())
        stop = await self._stop
        if self._llm is not None:
            await self._llm.stop(stop.drain_s)
        elif self._asleep is not None and self._returns is not None:
            self._returns.set()
            await self._asleep.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)  # their last messages
        beating.cancel()
        self._flush()
        self._connection.close()

    async def _beat(self) -> None:
        """Say that the engine is alive, for as long as it is. One that ends by itself ends this process."""
        while not self._stop.done():
            self._num_beats += 1
            try:
                self._send(self._alive())
            except EngineClosed as error:
                log.error("the engine has ended: %s", error.__cause__ or error)
                self._stop.set_result(Stop())
            await asyncio.sleep(BEAT_S)

    def _alive(self) -> Alive:
        """What `Alive` says now. Raises EngineClosed if the engine has ended and was not asked to."""
        if self._watched is not None:
            try:
                return Alive(*self._watched.heartbeat)
            except EngineClosed:
                if self._watched is self._llm:
                    raise
        return Alive(self._num_beats, LOADING_S if self._changing.locked() else 0.0)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._begin(message, self._generate(message))
            case Cancel():
                if (task := self._tasks.get(message.number)) is not None:
                    outputs = self._outputs.get(message.number)
                    self._send(Aborted(message.number, 0 if outputs is None else outputs.num_generated))
                    task.cancel()
            case Call():
                self._begin(message, self._call(message))
            case Start():
                self._start.set_result(message)
            case Stop():
                if not self._stop.done():
                    self._stop.set_result(message)

    def _lost(self) -> None:
        """The server is gone: end."""
        if not self._start.done():
            self._start.cancel()
        if not self._stop.done():
            self._stop.set_result(Stop())

    def _begin(self, message: Submit | Call, work: Any) -> None:
        from ..engine.process.fair_threads import OWNER

        number, context = message.number, contextvars.copy_context()
        context.run(OWNER.set, message.tenant)  # tokenizes in turns with other keys
        task = asyncio.get_running_loop().create_task(self._reported(number, work), context=context)
        self._tasks[number] = task
        # A task that is cancelled before its first step leaves its work unbegun, which Python would complain about.
        task.add_done_callback(lambda _: (work.close(), self._tasks.pop(number, None), self._outputs.pop(number, None)))

    async def _reported(self, number: int, work: Awaitable[None]) -> None:
        """Await `work`; an error becomes a `Failed` message."""
        try:
            await work
        except Exception as error:
            kind = error_kind(error)
            if kind == "internal":
                log.exception("request %d failed", number)
            self._send(Failed(number, kind, str(error) or type(error).__name__))

    def _send(self, message: Any) -> None:
        self._flush()
        self._connection.send(message)

    def _give(self, piece: Piece) -> None:
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._flush)  # after the other streams of this step
        self._pieces.append(piece)

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._connection.send(OutputPieces(pieces))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _awake(self) -> AsyncLLM:
        if self._llm is None:
            raise Asleep("the model is asleep: wake it up first (POST /wake_up)")
        return self._llm

    async def _serving(self) -> AsyncLLM:
        """The engine, once it is back if it sleeps with its requests suspended. Raises Asleep."""
        while self._llm is None and self._returns is not None and not self._returns.is_set():
            await self._returns.wait()
        return self._awake()

    async def _generate(self, submit: Submit) -> None:
        llm = await self._serving()
        params = SamplingParams(**submit.params)
        if submit.messages is not None:
            ids = await self._render(submit.messages, submit.template)
        else:
            ids = await llm.tokenize(submit.prompt or "" if submit.prompt is None else submit.prompt, params)
        llm = await self._serving()  # what is accepted is served, though the model falls asleep then
        params = completed(submit, params, len(ids), _info(llm).max_model_len, llm.facts.sampling.temperature)
        end = prompt_end(llm.tokenizer, ids) if submit.messages is not None else ""
        params = by_prompt_end(submit, params, end)
        self._send(Accepted(submit.number, ids, params.max_new_tokens, end))
        make = partial(scores, llm.tokenizer)
        prompts = [{"prompt_token_ids": ids, "label": submit.request_id, "retention": submit.retention}]
        if not submit.streams:
            call = llm.begin(prompts, params, priority=submit.priority, cache_salt=submit.cache_salt)
            self._outputs[submit.number] = call
            with closing(call):
                (output,) = await call.first()
            async for part in whole_scores(submit.number, output, make):
                self._send(part)
            pieces = [whole_piece(submit.number, i, one) for i, one in enumerate(output.completions)]
            self._send(request_end(submit.number, output, pieces, None, call.num_generated))
            return
        stream = llm.stream(prompts, params, priority=submit.priority, cache_salt=submit.cache_salt, keep_logprobs=False)
        self._outputs[submit.number] = stream
        async with aclosing(stream):
            async for chunk in stream:
                self._give(piece_of(submit.number, chunk, make))
                if chunk.output is not None:
                    async for part in whole_scores(submit.number, chunk.output, make):  # the prompt's
                        self._send(part)
                    self._send(request_end(submit.number, chunk.output, [], None, stream.num_generated))

    async def _render(self, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> list[int]:
        llm = self._awake()
        return await llm.render(messages, **template_options(llm.tokenizer, template))

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> None:
        self._send(CallResult(call.number, await self.calls[call.method](**call.arguments)))

    async def _tokenize(
        self,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
        texts: bool = False,
    ) -> dict[str, Any]:
        llm = await self._serving()
        if messages is not None:
            ids = await self._render(messages, template or {})
        else:
            ids = await llm.tokenize(prompt or "", SamplingParams(add_special_tokens=add_special_tokens))
        return {"tokens": ids, "texts": await llm.run_with_tokenizer(partial(token_texts, tokens=ids)) if texts else None}

    async def _detokenize(self, tokens: list[int]) -> str:
        llm = await self._serving()
        sizes = llm.facts.vocab_size, llm.facts.max_model_len
        return await llm.run_with_tokenizer(lambda tokenizer: detokenized(tokenizer, tokens, *sizes))

    async def _frame(self, full: bool = False) -> tuple[bytes, float]:
        """A frame for the page, and the CPU seconds that it took of the engine's thread."""
        llm = self._awake()
        before_s = llm.frame_s
        return await llm.frame(full), max(llm.frame_s - before_s, 0.0)

    async def _sleep(self, drain_s: float | None = None, level: Level = 1, suspends: bool = False) -> None:
        """End all requests within `drain_s`, or suspend them, and free the memory of the model: see `AsyncLLM.sleep`.
        Idempotent.
        """
        async with self._changing:
            if self._llm is not None:
                self._asleep, self._llm = self._llm, None  # refuses new requests meanwhile, or lets them wait
                self._returns = asyncio.Event() if suspends else None
                if self._frozen() is None:
                    gc.unfreeze()  # for the memory of the engine, or of the model, in cycles
            if self._asleep is not None:
                await self._asleep.sleep(level, drain_s, suspends=suspends)
                self._freeze(self._asleep.kept)
                if self._returns is not None and not suspends:
                    self._returns.set()  # to those that wait here, it sleeps as any other
            self._watched = None

    async def _wake_up(self) -> None:
        async with self._changing:
            if self._asleep is not None:
                await self._asleep.wake_up()
                self._llm = self._watched = self._asleep
                self._asleep = None
                if self._returns is not None:
                    self._returns.set()
                is_new = self._llm.kept is None or self._llm.kept is not self._frozen()  # loaded again, as it may have changed
                if is_new:
                    gc.freeze()  # as at the start: until the next sleep
                    self._frozen = _nothing
                if is_new or self._llm.facts.leases != self._told_leases:
                    self._tell(self._llm)

    def _tell(self, llm: AsyncLLM) -> None:
        info = _info(llm)
        self._told_leases = info.leases
        self._send(ModelReady(info))

    def _freeze(self, kept: object | None) -> None:
        """Leave what is there out of collections, unless it is out of them since an earlier sleep of the same model: each
        sleep would take 0.2 s longer.
        """
        if kept is None or kept is not self._frozen():
            gc.collect()  # what is garbage now would stay
            gc.freeze()
            self._frozen = _nothing if kept is None else weakref.ref(kept)


def _nothing() -> None:
    pass


def _info(llm: AsyncLLM) -> ModelInfo:
    facts = llm.facts
    return ModelInfo(
        path=str(llm.config.model.path),
        max_model_len=facts.max_model_len,
        max_seqs=llm.config.max_seqs,
        block_size=facts.block_size,
        vocab_size=facts.vocab_size,
        device=facts.device,
        dtype=facts.dtype,
        version=__version__,
        answers_bytes=facts.answers_bytes,
        weights_bytes=facts.weights_bytes,
        leases=facts.leases,
        **tokenizer_facts(llm.tokenizer),
    )


def load(start: Start) -> AsyncLLM:
    """Make the engine, which has the served name in messages and in `vram-monitor`. Raises what `AsyncLLM` raises."""
    from ..engine.async_llm import AsyncLLM
    from ..engine.config import resolve_model

    spec = resolve_model(start.model)
    llm = AsyncLLM(replace(spec, name=start.name or spec.name), max_waiting=UNLIMITED_WAITING, **start.options)
    gc.collect()
    # Collections would look at all objects of the libraries, and hold up all streams meanwhile
    gc.freeze()
    return llm


async def serve(end: socket.socket, load: Callable[[Start], AsyncLLM] = load) -> None:
    """Serve one connection to its end."""
    with suppress(asyncio.CancelledError):  # the server left before it named a model
        await EngineServer(load).run(end)


def main() -> int:
    """Serve the parent's connection."""
    end = parent_socket()
    sys.setswitchinterval(SWITCH_S)
    on_terminal = sys.stderr.isatty()
    line = ("%(asctime)s %(message)s", "%H:%M:%S") if on_terminal else ("%(asctime)s %(name)s %(levelname)s: %(message)s", None)
    logging.basicConfig(level=logging.INFO, format=line[0], datefmt=line[1])
    logging.getLogger("pagetide").setLevel(logging.INFO)
    asyncio.run(serve(end, _load_on_terminal if on_terminal else load))
    return 0


def _load_on_terminal(start: Start) -> AsyncLLM:
    """As `load`. What the pool does later is not logged: the terminal shows the server's requests then."""
    llm = load(start)
    logging.getLogger("pagetide").setLevel(logging.WARNING)
    return llm


if __name__ == "__main__":
    sys.exit(main())
