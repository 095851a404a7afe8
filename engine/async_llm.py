"""The engine for asyncio programs: `AsyncLLM`. One thread runs its steps; callers await results."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.arguments import explains_arguments, explains_names, takes
from ..api.sampling_params import SamplingParams
from ..cache.cache_events import CacheEvents
from ..common.on_error import OnError
from ..common.settings import checked, integer, lists_settings, setting
from ..frames.details import decoder, with_text
from ..frames.source import encode
from ..scheduler.errors import RequestRejected
from .config import EngineArguments, EngineConfig
from .errors import ConfigError, EngineClosed
from .requests.engine_thread import STATS_S, EngineThread, result_of
from .requests.inputs import Message, Prompt, PromptInput, Prompts, check_count, paired, text_of
from .requests.intake import RequestIntake
from .requests.manager import RequestManager
from .requests.outputs import RequestOutput, StreamChunk, refused
from .requests.pending_calls import PendingCall
from .requests.states import RequestState
from .watch import EngineWatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .build import ModelFacts

# Blocks of which the event loop makes plain data, some 2 ms; of more another thread does
MOST_ON_LOOP = 1024

Pair = tuple[Prompt, SamplingParams | None]
Params = SamplingParams | Sequence[SamplingParams] | None
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
class AsyncLLM:
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
        self.config = EngineConfig.of(arguments)
        self._manager = RequestManager(self.config)
        self._engine_thread = EngineThread(self._manager, "AsyncLLM", max_waiting, on_demand=False)
        weakref.finalize(self, self._engine_thread.forget).atexit = False  # engine_thread.py ends it at exit

    @explains_arguments("AsyncLLM.generate")
    async def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt: see `LLM.generate`. Cancellation aborts the requests.

        Raises:
            RequestRejected: a prompt cannot be served; nothing of the call is started then.
            EngineClosed: the engine is stopped, or being drained.
        """
        encode = partial(RequestIntake.encode, prompts=_read(prompts), params=_read(sampling_params))
        return await self._outputs(encode, priority, cache_salt)

    def begin(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> AsyncOutputs:
        """As `generate`, for a caller that asks how much was generated, also when it ends early. Raises EngineClosed."""
        encode = partial(RequestIntake.encode, prompts=_read(prompts), params=_read(sampling_params))
        return AsyncOutputs(_Submission(self, encode, priority, cache_salt, None))

    @explains_arguments("AsyncLLM.chat")
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: see `LLM.chat`. Raises as `generate`."""
        encode = _chat_encoder(messages, sampling_params, template_options)
        return await self._outputs(encode, priority, cache_salt)

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
        encode = partial(RequestIntake.encode, prompts=_read(prompts), params=_read(sampling_params))
        return AsyncStream(partial(_Submission, self, encode, priority, cache_salt, stream_interval, keep_logprobs))

    @explains_arguments("AsyncLLM.stream_chat")
    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> AsyncStream:
        """Like `chat`, but streams the answers: see `stream`."""
        check_count("stream_interval", stream_interval)
        encode = _chat_encoder(messages, sampling_params, template_options)
        return AsyncStream(partial(_Submission, self, encode, priority, cache_salt, stream_interval))

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

    @explains_arguments("AsyncLLM.generate_each")
    def generate_each(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        look_ahead: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue prompts from an iterable, async or not, which may be endless: see `LLM.generate_each`.

        Yields an output once it and all earlier ones are complete, also while waiting for the next prompt.
        """
        if look_ahead is None:
            look_ahead = 2 * self.config.max_seqs
        check_count("look_ahead", look_ahead)
        return self._each(_paired(prompts, sampling_params), look_ahead, priority, cache_salt)

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

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    @explains_arguments("AsyncLLM.tokenize")
    async def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The prompt token ids of `generate` for this prompt. Raises RequestRejected for an invalid prompt."""
        params = sampling_params or SamplingParams()
        return await _send(self._engine_thread.run_with_encoder, lambda: self._engine_thread.intake.tokenize(prompt, params))

    async def run_with_tokenizer(self, function: Callable[[PreTrainedTokenizerBase | None], Value]) -> Value:
        """The result of `function(tokenizer)`, called on a tokenizer's thread in turn with prompts. Raises what it raises."""
        result: Value = await _send(self._engine_thread.run_with_encoder, lambda: function(self.tokenizer))
        return result

    async def reset_prefix_cache(self) -> None:
        """Hide all blocks computed so far from later requests. Running requests keep their blocks."""
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

        Waiting callers get their outputs so far, with finish reason "aborted". Later calls raise EngineClosed.
        """
        try:
            if timeout_s is None or timeout_s > 0:
                with suppress(TimeoutError, EngineClosed):
                    async with asyncio.timeout(timeout_s):
                        await self.drain()
        finally:
            await _send(self._engine_thread.end)
            self._engine_thread.join()  # returns at once: the thread has resolved its last waiter

    def __repr__(self) -> str:
        """The model, where and how it runs, the size of its pool and its requests."""
        return f"AsyncLLM({self.config.model.name!r}, {self._engine_thread.describe()})"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- shared by the APIs --------------------------------------------------------------------------------------

    async def _outputs(
        self, encode: Callable[[RequestIntake], list[PromptInput]], priority: int, cache_salt: str | None
    ) -> list[RequestOutput]:
        submission = _Submission(self, encode, priority, cache_salt, None)
        try:
            return await submission.first()
        finally:
            submission.close()

    async def _each(
        self, pairs: AsyncGenerator[Pair, None], look_ahead: int, priority: int, cache_salt: str | None
    ) -> AsyncIterator[RequestOutput]:
        room = asyncio.Semaphore(look_ahead)
        taken: asyncio.Queue[tuple[Prompt, _Submission] | None] = asyncio.Queue()

        async def take() -> None:
            try:
                async with aclosing(pairs):
                    await room.acquire()
                    async for prompt, params in pairs:
                        encode = partial(RequestIntake.encode_one, prompt=prompt, params=params)
                        taken.put_nowait((prompt, _Submission(self, encode, priority, cache_salt, None)))
                        await room.acquire()
            finally:
                taken.put_nowait(None)

        taking = asyncio.create_task(take())
        try:
            while (first := await taken.get()) is not None:
                prompt, submission = first
                try:
                    (output,) = await submission.first()
                except RequestRejected as error:
                    output = refused(text_of(prompt), str(error), self.tokenizer is not None)
                finally:
                    submission.close()
                yield output
                room.release()
            await taking  # raises what the source raised
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)  # the source is no longer read after this
            while not taken.empty():
                if (left := taken.get_nowait()) is not None:
                    left[1].close()


@dataclass(frozen=True, slots=True)
class AsyncRequestHandle:
    """A handle to an unfinished continuation, or beam search, of a stream: continuation `number` of prompt `index`."""

    request_id: str
    index: int
    number: int
    _submission: _Submission = field(repr=False)
    _state: RequestState = field(repr=False)

    async def export(self) -> dict[str, Any]:
        """End the request here and return it as data for another process: see `RequestHandle.export`.

        Chunks that the stream has already taken can still be read from it.
        """
        llm = self._submission._llm
        data: dict[str, Any] = await _send(llm._engine_thread.run_with_engine, lambda engine: llm._manager.export(self._state))
        return data


class AsyncOutputs:
    """The outputs of a call, and how much it has generated. Closing or collecting it aborts unfinished requests."""

    def __init__(self, submission: _Submission) -> None:
        self._submission = submission

    async def outputs(self) -> list[RequestOutput]:
        """Wait for all outputs. Await it once. Raises as `AsyncLLM.generate`."""
        outputs: list[RequestOutput] = await self._submission.first()
        return outputs

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, with those of continuations that `best_of` leaves out."""
        return self._submission.num_generated

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        self._submission.close()


class AsyncStream(AsyncIterator[StreamChunk]):
    """An async iterator over the chunks of requests, for one task. Closing or collecting it aborts unfinished requests."""

    def __init__(self, submit: Callable[[], _Submission]) -> None:
        self._submit = submit
        self._submission: _Submission | None = None
        self._chunks: deque[StreamChunk] = deque()
        self._reading = self._closed = False

    async def __anext__(self) -> StreamChunk:
        if self._reading:
            raise RuntimeError("another task is reading this stream: create one for each")
        self._reading = True
        try:
            with OnError(self._close):
                while not self._chunks:
                    if self._closed or (self._submission is not None and self._submission.over):
                        raise StopAsyncIteration
                    chunks = await self._more()
                    if not self._closed:  # another task may have closed the stream meanwhile
                        self._chunks.extend(chunks)
                return self._chunks.popleft()
        finally:
            self._reading = False

    @property
    def requests(self) -> tuple[AsyncRequestHandle, ...]:
        """The unfinished continuations, ordered by prompt and number; one for each beam search.

        Empty until the requests are queued, which is certain once the first chunk has arrived.
        """
        submission = self._submission
        return () if submission is None else submission.requests

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, read or not."""
        return 0 if self._submission is None else self._submission.num_generated

    async def aclose(self) -> None:
        """Abort unfinished requests. Idempotent."""
        self._close()

    def _more(self) -> Any:
        if self._submission is None:
            self._submission = self._submit()
            return self._submission.first()
        return self._submission.next()

    def _close(self) -> None:
        self._closed = True
        self._chunks.clear()
        if self._submission is not None:
            self._submission.close()


class _Submission:
    """The caller's side of a call, created on the caller's loop. Closing or collecting it aborts the call.

    Raises EngineClosed.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        encode: Callable[[RequestIntake], list[PromptInput]],
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
            AsyncRequestHandle(state.request.request_id, state.group.index, state.number, self, state)
            for state in self._call.exportable
        )

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


def _read(given: Any) -> Any:
    """Read an iterator into a list on the caller's thread; return other values unchanged."""
    return list(given) if isinstance(given, Iterator) else given


def _chat_encoder(
    messages: Any, params: Params, template_options: dict[str, Any]
) -> Callable[[RequestIntake], list[PromptInput]]:
    """The function that encodes conversations, with iterators read now."""
    messages, params = _read(messages), _read(params)
    return lambda intake: intake.encode(intake.render(messages, template_options), params)


def _paired(
    prompts: Iterable[Prompt] | AsyncIterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> AsyncGenerator[Pair, None]:
    """As `paired`, but async; prompts of an async iterable are passed to it one by one."""
    if not isinstance(prompts, AsyncIterable):
        return _as_async(paired(prompts, params))
    came: deque[Prompt] = deque()
    return _fed(prompts, came, paired(iter(came.popleft, object()), params))


async def _as_async(pairs: Iterator[Pair]) -> AsyncGenerator[Pair, None]:
    for pair in pairs:
        yield pair


async def _fed(prompts: AsyncIterable[Prompt], came: deque[Prompt], pairs: Iterator[Pair]) -> AsyncGenerator[Pair, None]:
    async for prompt in prompts:
        came.append(prompt)
        yield next(pairs)
