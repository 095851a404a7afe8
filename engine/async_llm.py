"""The engine for asyncio programs: `AsyncLLM`. One thread runs its steps; callers await results."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.arguments import explains_arguments, explains_names, takes
from ..api.sampling_params import SamplingParams
from ..cache.cache_events import CacheEvents
from ..common.on_error import OnError
from ..common.settings import checked, integer, lists_settings, setting
from ..frames.source import encode
from .async_calls import AsyncCall, AsyncCalls, AsyncRequestHandle, AsyncStream, Encode, Params, encoder
from .config import EngineArguments, EngineConfig
from .errors import ConfigError, EngineClosed
from .requests.engine_thread import STATS_S, EngineThread, result_of
from .requests.inputs import Message, Prompt, Prompts, check_count
from .requests.intake import RequestIntake
from .requests.manager import RequestManager
from .requests.outputs import PinnedPrefix, StreamChunk
from .requests.pending_calls import PendingCall
from .requests.states import RequestState
from .requests.warm_prompts import compute_prompts, warm_up
from .watch import EngineWatch, decoder, with_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .build import ModelFacts
    from .executor import KeptModel
    from .loading.mapped_weights import Level

# Blocks of which the event loop makes plain data, some 2 ms; of more another thread does
MOST_ON_LOOP = 1024

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncArguments(EngineArguments):
    """The arguments of `AsyncLLM`."""

    max_waiting: int = setting(
        1024,
        integer(1),
        "While this many requests wait for a place in the running batch, further calls wait in a queue outside the scheduler, "
        "first come, first served. A call is admitted as a whole, so its prompts may exceed the limit",
    )


@lists_settings(AsyncArguments)
@explains_names("AsyncLLM")
class AsyncLLM(AsyncCalls):
    """A model and its paged KV cache, for any number of tasks, on event loops of any number of threads.

        async with AsyncLLM("demo") as llm:
            async for chunk in llm.stream("the tide"):
                print(chunk.text, end="")

    Args: see `AsyncArguments`.

    Raises:
        ModelNotFound, UnsupportedModel, NotEnoughMemory, ConfigError: see `LLM`.

    The constructor loads the model and blocks meanwhile: call it before the loop is busy, or with
    `asyncio.to_thread(AsyncLLM, ...)`. A call's requests are aborted if its task is cancelled or times out, if its stream is
    closed or garbage-collected, or if its loop is closed. The current step is the last that computes them; their blocks are
    free with the next one. `stop` the engine, or leave the context, to free the memory at a known time.
    """

    @takes("AsyncLLM", AsyncArguments)
    def __init__(self, arguments: AsyncArguments) -> None:
        max_waiting = checked(AsyncArguments, {"max_waiting": arguments.max_waiting}, ConfigError)["max_waiting"]
        self.config = replace(EngineConfig.of(arguments), sleeps=True)
        self._max_waiting = max_waiting
        self._kept: KeptModel | None = None  # while it sleeps: None if the model is loaded again
        self._sleeps = self._stopped = False
        self._changing = threading.Lock()  # held while it falls asleep or wakes up, by a thread that no cancelled call ends
        self._build()

    def _build(self) -> None:
        """Build the engine, and start its thread."""
        self._manager = RequestManager(self.config, self._kept)
        self._engine_thread = EngineThread(self._manager, "AsyncLLM", self._max_waiting, on_demand=False)
        self._forgetting = weakref.finalize(self, self._engine_thread.forget)
        self._forgetting.atexit = False  # engine_thread.py ends it at exit
        warm_up(self.config.warm_prompts, self._engine_thread, self._manager)

    def _go_on(self) -> None:
        """Build the next engine for requests that were suspended."""
        thread, manager = self._engine_thread, self._manager
        engine, recorder = manager.built(self._kept)
        try:
            # Behind the requests, prompts to warm up would wait for a row, and no message be read meanwhile.
            thread.ask(thread.go_on, engine, recorder, partial(compute_prompts, self.config.warm_prompts, manager))
        except BaseException:  # it was stopped meanwhile, say
            if recorder is not None:
                recorder.close()
            engine.close()
            raise

    @explains_arguments("AsyncLLM.stream")
    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        keep_logprobs: bool = True,
    ) -> AsyncStream:
        """Stream the output in chunks of at least `stream_interval` tokens: see `LLM.stream`.

        Without `keep_logprobs` the log-probabilities of a chunk are released when it is read: the completions have none, and
        requests with log-probabilities cannot be exported.

        Reading the first chunk queues the requests. They advance whether the stream is read or not: a slow reader gets all new
        tokens as one chunk. Reading raises as `generate`.
        """
        check_count("stream_interval", stream_interval)
        encode = encoder(prompts, sampling_params)
        return AsyncStream(partial(_Submission, self, encode, priority, cache_salt, stream_interval, keep_logprobs))

    @explains_arguments("AsyncLLM.import_request")
    def import_request(
        self,
        data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        stream_interval: int = 1,
        priority: int | None = None,
        keep_logprobs: bool = True,
    ) -> AsyncStream:
        """Continue an exported request: see `LLM.import_request`, and `stream`. Reading raises as `generate`."""
        check_count("stream_interval", stream_interval)
        parse = partial(RequestIntake.parse_exported, data=data)
        return AsyncStream(partial(_Submission, self, parse, priority, None, stream_interval, keep_logprobs))

    @explains_arguments("AsyncLLM.render")
    async def render(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt token ids of `chat` for this conversation. Raises RequestRejected as `chat` does."""
        (ids,) = await _send(
            self._engine_thread.run_with_encoder, lambda: self._engine_thread.intake.render([messages], template_options)
        )
        return ids

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model: its context, vocabulary, device, dtype and default sampling."""
        return self._engine_thread.open().facts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer: see `LLM.tokenizer`."""
        tokenizer: PreTrainedTokenizerBase | None = self._engine_thread.open().encoder.tokenizer
        return tokenizer

    @explains_arguments("AsyncLLM.tokenize")
    async def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The prompt token ids of `generate` for this prompt. Raises RequestRejected for an invalid prompt."""
        params = sampling_params or SamplingParams()
        return await _send(self._engine_thread.run_with_encoder, lambda: self._engine_thread.intake.tokenize(prompt, params))

    async def run_with_tokenizer(self, function: Callable[[PreTrainedTokenizerBase | None], Value]) -> Value:
        """The result of `function(tokenizer)`, called on a tokenizer's thread in turn with prompts. Raises what it raises."""
        result: Value = await _send(self._engine_thread.run_with_encoder, lambda: function(self.tokenizer))
        return result

    @explains_arguments("AsyncLLM.pin_prefix")
    async def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> PinnedPrefix:
        """Compute a prefix, unless it is cached, and keep it in memory until `unpin_prefix`: see `LLM.pin_prefix`."""
        thread = self._engine_thread
        (one,) = await _send(thread.run_with_encoder, lambda: thread.intake.encode_pin(prompt))
        with OnError(lambda: thread.unpin(one)):
            (output,) = await self._outputs(lambda _: [one], 0, cache_salt)
            pinned: PinnedPrefix = await _send(thread.run_with_engine, lambda _: thread.intake.pinned(one, output))
            return pinned

    async def unpin_prefix(self, prefix: PinnedPrefix) -> bool:
        """End a pin. Returns whether its blocks were pinned until now."""
        thread = self._engine_thread
        was_there: bool = await _send(thread.run_with_engine, lambda engine: engine.core.scheduler.cache.unpin(prefix.name))
        return was_there

    async def reset_prefix_cache(self) -> None:
        """Hide all blocks computed so far from later requests, and end all pins. Running requests keep their blocks."""
        await _send(self._engine_thread.run_with_engine, lambda engine: engine.core.scheduler.cache.reset())

    async def stats(self) -> dict[str, Any]:
        """The engine's state and counters: see `LLM.stats`."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._engine_thread.count(waiter)
        done, _ = await asyncio.wait([waiter], timeout=STATS_S)
        stats: dict[str, Any] = result_of(waiter.result()) if done else self._engine_thread.last_stats()
        return stats

    async def explain(self, request: str | None = None) -> list[dict[str, Any]]:
        """The last 64 scheduling decisions made while blocks were short: see `LLM.explain`."""
        return await _send(self._engine_thread.look, lambda watch: watch.explain(request))

    async def frame(self, full: bool = False) -> bytes:
        """The next frame of the engine's blocks and requests, a line of JSON: see `LLM.frame`."""
        return encode(await _send(self._engine_thread.look, lambda watch: watch.frame(full)))

    @property
    def frame_s(self) -> float:
        """CPU seconds that `frame` has taken of the engine's thread so far; 0 once the engine is stopped."""
        watch = self._manager.watch
        return 0.0 if watch is None else watch.frame_s

    @property
    def heartbeat(self) -> tuple[int, float]:
        """Beats of the thread that runs the steps, and the seconds that it may take to the next beat; 0 while it rests.

        For a watcher in another thread or process: if the beats stay the same for longer, the engine hangs. Raises
        EngineClosed once the thread has ended.
        """
        return self._engine_thread.heartbeat

    async def cache_events(self) -> CacheEvents:
        """The changes of the set of findable blocks since the last call: see `LLM.cache_events`."""
        pending = await _send(self._engine_thread.look, EngineWatch.cache_events)
        return await asyncio.to_thread(pending.events) if pending.num_blocks > MOST_ON_LOOP else pending.events()

    async def cache_snapshot(self) -> CacheEvents:
        """All findable blocks: see `LLM.cache_snapshot`."""
        found = await _send(self._engine_thread.look, EngineWatch.cache_snapshot)
        return CacheEvents(await asyncio.to_thread(lambda: list(found.blocks())), cleared=True)

    async def block(self, block: int, text: bool = False) -> dict[str, Any]:
        """The details of a block: see `LLM.block`."""
        details = await _send(self._engine_thread.look, lambda watch: watch.block(block))
        return await asyncio.to_thread(with_text, details, decoder(self.tokenizer) if text else None)

    # -- life cycle ----------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Run no steps until `resume` is called once for each pause. Returns when no step is running. Raises EngineClosed.

        Running requests keep their blocks and continue unchanged later; new calls are accepted and wait. Aborts take effect
        with the next step. Recalls of memory wait too, so keep pauses short if engines share a device. If cancelled before it
        returns, it pauses nothing.
        """
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._engine_thread.pause(waiter)
        with OnError(lambda: self._engine_thread.resume(waiter)):
            await _result(waiter)

    def resume(self) -> None:
        """End the oldest pause. Steps run again once no pause is left. Raises EngineClosed."""
        self._engine_thread.resume()

    async def drain(self) -> None:
        """Refuse new calls with EngineClosed, and return when all earlier calls have ended. Ends all pauses.

        This is irreversible: only `stop` is left to call. Raises EngineClosed.
        """
        await _send(self._engine_thread.drain)

    async def stop(self, timeout_s: float | None = 0.0) -> None:
        """Abort all requests, end the thread and free all memory. Idempotent.

        Args:
            timeout_s: Seconds to `drain` first, so that requests in flight can finish; None is no limit.

        Waiting callers get their outputs so far, with finish reason "aborted". Later calls raise EngineClosed. It waits for a
        `sleep` or `wake_up` that runs.
        """
        self._stopped = True
        try:
            await self._drained(timeout_s)
        finally:
            await _send(self._engine_thread.end)
            self._engine_thread.join()  # returns at once: the thread has resolved its last waiter
            if self._changing.locked() or self._sleeps or not self._engine_thread.ended:
                await asyncio.to_thread(self._forget)

    async def _drained(self, timeout_s: float | None) -> None:
        if timeout_s is None or timeout_s > 0:
            with suppress(TimeoutError, EngineClosed):
                async with asyncio.timeout(timeout_s):
                    await self.drain()

    async def sleep(self, level: Level = 1, timeout_s: float | None = 0.0, *, suspends: bool = False) -> None:
        """`stop`, and give the memory of the weights back, until `wake_up`. Idempotent; suspended requests end if it is called
        without `suspends`.

        Args:
            suspends: No request is aborted. All go on after `wake_up`, with the same tokens; their K and V are in the host
                tier (`host_kv_memory`) until then, as far as it has room and no layer has windows or states; the rest is
                read from disk or computed again. `timeout_s` is not waited for.
            level: On a CPU, 1 leaves the weights to the page cache, from which the system takes what it needs; 2 frees them,
                and waking reads them from disk. On CUDA both free the device's memory; 1 keeps a copy in pinned host memory,
                and 2 has it on disk. Over several devices both free everything.
            timeout_s: See `stop`.

        The first sleep on a CPU, and of level 2 on CUDA, writes the weights to an unnamed file in the folder of the disk cache,
        but those that on a CPU the checkpoint or the cache has as they are used. Where that cannot be done, and on CUDA where
        the host had no room for the copy (both logged), waking loads the model again. Calls of `sleep` and `wake_up` take
        turns, and go on if they are cancelled. Pins end, except that waking makes those of `warm_prompts` anew, and that one
        goes on if its prompt is suspended. Raises EngineClosed if the engine was stopped.
        """
        self._check_stopped()
        try:
            await self._drained(0.0 if suspends or self._sleeps else timeout_s)
        finally:
            await asyncio.to_thread(self._fall_asleep, level, suspends)

    async def wake_up(self) -> None:
        """Serve again after `sleep`, as a new engine with the same settings. Idempotent. What the engine needs at least is
        leased at once.

        Weights come back in the order of the layers while the first requests are computed; a checkpoint that has changed on
        disk meanwhile is loaded. Raises what the constructor raises: the engine sleeps on then. Raises EngineClosed if the
        engine was stopped.
        """
        self._check_stopped()
        await asyncio.to_thread(self._awake)

    @property
    def kept(self) -> object | None:
        """The model that stays in this process while its engine sleeps; None if waking up loads it again.

        Raises EngineClosed if the engine was stopped.
        """
        return self._kept if self._sleeps else self._engine_thread.open().kept

    def _fall_asleep(self, level: Level, suspends: bool) -> None:
        with self._changing:
            self._check_stopped()
            if not self._sleeps:
                thread = self._engine_thread
                self._kept = thread.open().kept
                if self._kept is not None:
                    self._kept.stays = True
                if suspends:
                    thread.ask(thread.suspend)
                    self._manager.end_recording()
                else:
                    thread.end()
                    thread.join()
                    self._forgetting.detach()
                self._sleeps = thread.may_wake = True
            elif self._manager.is_suspended and not suspends:
                self._engine_thread.end()
                self._engine_thread.join()
                self._forgetting.detach()
                self._engine_thread.may_wake = True
            if self._kept is not None and not self._kept.sleep(level):
                self._kept = None
                _collect()

    def _awake(self) -> None:
        with self._changing:
            self._check_stopped()
            if not self._sleeps:
                self._engine_thread.open()
                return
            try:
                self._go_on() if self._manager.is_suspended else self._build()
            except BaseException:
                if not self._manager.is_suspended:  # else no engine came to be
                    self._engine_thread.end()
                    self._engine_thread.join()
                    self._engine_thread.may_wake = True
                if self._kept is not None:
                    self._kept.sleep(self._kept.level)
                raise
            kept, self._kept, self._sleeps = self._kept, None, False
            if kept is not None:
                kept.stays = False
                if kept is not self._engine_thread.open().kept:  # it has been loaded again
                    del kept
                    _collect()

    def _forget(self) -> None:
        """Free a model that sleeps, or an engine that came to be meanwhile."""
        with self._changing:
            self._engine_thread.end()
            self._engine_thread.join()
            self._engine_thread.may_wake, self._kept = False, None
            _collect()

    def _check_stopped(self) -> None:
        """Raise EngineClosed if the engine was stopped, and in a forked child."""
        self._manager.check_process()
        if self._stopped:
            raise self._engine_thread.closed()

    def __repr__(self) -> str:
        """The model, where and how it runs, the size of its pool and its requests."""
        return f"AsyncLLM({self.config.model.name!r}, {self._engine_thread.describe()})"

    async def __aenter__(self) -> AsyncLLM:
        return self

    def _call(self, encode: Encode, priority: int, cache_salt: str | None, interval: int | None = None) -> AsyncCall:
        return _Submission(self, encode, priority, cache_salt, interval)

    async def _num_ahead(self) -> int:
        return 2 * self.config.max_seqs


def _collect() -> None:
    """Free a model that nothing refers to any more."""
    gc.unfreeze()  # a server has frozen it
    import torch

    from .executor import collect

    for kind in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
        collect(torch.device(kind))


class _Submission:
    """An `AsyncCall`, created on the caller's loop.

    Raises EngineClosed.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        encode: Encode,
        priority: int | None,
        cache_salt: str | None,
        interval: int | None,
        keeps_logprobs: bool = True,
    ) -> None:
        self._llm = llm  # keeps the engine alive
        self._closed = True
        self._waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._call = PendingCall(self._waiter, priority, cache_salt, interval, keeps_logprobs)
        llm._engine_thread.begin(self._call, encode)
        self._closed = False

    @property
    def over(self) -> bool:
        """Whether no more results follow."""
        return self._call.over

    @property
    def requests(self) -> tuple[AsyncRequestHandle, ...]:
        """Handles to the queued, unfinished continuations."""
        return tuple(
            AsyncRequestHandle(state.request.request_id, state.group.index, state.number, partial(self._export, state))
            for state in self._call.exportable
        )

    async def _export(self, state: RequestState) -> dict[str, Any]:
        data: dict[str, Any] = await _send(
            self._llm._engine_thread.run_with_engine, lambda engine: self._llm._manager.export(state)
        )
        return data

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self._call.num_generated

    async def first(self) -> Any:
        """Wait for the outputs, or for a stream's first chunks."""
        return await _result(self._waiter)

    async def next(self) -> list[StreamChunk]:
        """Wait for the next chunks; none if the call was closed meanwhile. Raises EngineClosed if the engine broke."""
        thread = self._llm._engine_thread
        chunks = await _send(thread.want, self._call)
        if not chunks and thread.ended and not self._closed:
            chunks = self._call.collect()
            if not chunks:
                raise thread.closed()
        return chunks

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._call.over:
                self._llm._engine_thread.cancel(self._call)

    __del__ = close


async def _send(message: Callable[..., None], *arguments: Any) -> Any:
    """Send a message to the engine thread and await its result."""
    waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    message(waiter, *arguments)
    return await _result(waiter)


async def _result(waiter: asyncio.Future[Any]) -> Any:
    """Await the result of `waiter`; raise it if it is an error."""
    return result_of(await waiter)
