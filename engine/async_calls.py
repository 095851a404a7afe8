"""The calls that the asyncio APIs share: `AsyncLLM`, over an engine of this process, and `Fleet`, over engines of others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..api.arguments import explains_arguments
from ..api.sampling_params import SamplingParams
from ..common.on_error import OnError
from ..scheduler.request import RequestRejected
from .requests.inputs import Message, Prompt, PromptInput, Prompts, check_count, paired, text_of
from .requests.intake import RequestIntake
from .requests.outputs import RequestOutput, StreamChunk, refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[RequestIntake], list[PromptInput]]
Pair = tuple[Prompt, SamplingParams | None]
Params = SamplingParams | Sequence[SamplingParams] | None


class AsyncCall(Protocol):
    """The caller's side of a call. Closing or collecting it aborts unfinished requests."""

    @property
    def over(self) -> bool:
        """Whether no more results follow."""

    @property
    def requests(self) -> tuple[AsyncRequestHandle, ...]:
        """Handles to the queued, unfinished continuations."""

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, with those of continuations that `best_of` leaves out."""

    async def first(self) -> Any:
        """Wait for the outputs, or for a stream's first chunks. Await it once. Raises as `AsyncCalls.generate`."""

    async def next(self) -> list[StreamChunk]:
        """Wait for the next chunks; none if the call was closed meanwhile."""

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""


class AsyncCalls(ABC):
    """What callers of an asyncio API do, over `AsyncCall`s."""

    def __init_subclass__(cls) -> None:
        """Each API has the calls under its own name, for its documentation and its errors."""
        for name in ("generate", "chat", "stream", "stream_chat", "generate_each"):
            if name not in vars(cls):
                setattr(cls, name, explains_arguments(f"{cls.__name__}.{name}")(getattr(cls, name)))

    @abstractmethod
    def _call(self, encode: Encode, priority: int, cache_salt: str | None, interval: int | None = None) -> AsyncCall:
        """Begin a call: a stream with an `interval`. Raises EngineClosed."""

    @abstractmethod
    async def _num_ahead(self) -> int:
        """Prompts that `generate_each` takes ahead unless it is told: twice the sequences that can run."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer: see `LLM.tokenizer`."""

    @abstractmethod
    async def stop(self, timeout_s: float | None = 0.0) -> None:
        """Abort all requests and refuse new ones."""

    async def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt: see `LLM.generate`. Cancellation aborts the requests.

        Raises:
            RequestRejected: a prompt cannot be served; nothing of the call is started then.
            EngineClosed: the engine is stopped, or being drained.
        """
        return await self._outputs(encoder(prompts, sampling_params), priority, cache_salt)

    def begin(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> AsyncCall:
        """As `generate`, for a caller that asks how much was generated, also when it ends early: `first` gives the outputs.
        Raises EngineClosed.
        """
        return self._call(encoder(prompts, sampling_params), priority, cache_salt)

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
        return await self._outputs(_chat_encoder(messages, sampling_params, template_options), priority, cache_salt)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncStream:
        """Stream the output in chunks of at least `stream_interval` tokens: see `LLM.stream`.

        Reading the first chunk queues the requests. They advance whether the stream is read or not: a slow reader gets all new
        tokens as one chunk. Reading raises as `generate`.
        """
        return self._stream(encoder(prompts, sampling_params), stream_interval, priority, cache_salt)

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
        return self._stream(_chat_encoder(messages, sampling_params, template_options), stream_interval, priority, cache_salt)

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

        Yields an output once it and all earlier ones are complete, also while waiting for the next prompt. `look_ahead` is
        twice the sequences that can run unless it is given.
        """
        if look_ahead is not None:
            check_count("look_ahead", look_ahead)
        return self._each(_paired(prompts, sampling_params), look_ahead, priority, cache_salt)

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _outputs(self, encode: Encode, priority: int, cache_salt: str | None) -> list[RequestOutput]:
        call = self._call(encode, priority, cache_salt)
        try:
            outputs: list[RequestOutput] = await call.first()
            return outputs
        finally:
            call.close()

    def _stream(self, encode: Encode, interval: int, priority: int, cache_salt: str | None) -> AsyncStream:
        check_count("stream_interval", interval)
        return AsyncStream(partial(self._call, encode, priority, cache_salt, interval))

    async def _each(
        self, pairs: AsyncGenerator[Pair, None], look_ahead: int | None, priority: int, cache_salt: str | None
    ) -> AsyncIterator[RequestOutput]:
        room = asyncio.Semaphore(look_ahead or await self._num_ahead())
        taken: asyncio.Queue[tuple[Prompt, AsyncCall] | None] = asyncio.Queue()

        async def take() -> None:
            try:
                async with aclosing(pairs):
                    await room.acquire()
                    async for prompt, params in pairs:
                        encode = partial(RequestIntake.encode_one, prompt=prompt, params=params)
                        taken.put_nowait((prompt, self._call(encode, priority, cache_salt)))
                        await room.acquire()
            finally:
                taken.put_nowait(None)

        taking = asyncio.create_task(take())
        try:
            while (first := await taken.get()) is not None:
                yield await self._outcome(*first)
                room.release()
            await taking  # raises what the source raised
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)  # the source is no longer read after this
            while not taken.empty():
                if (left := taken.get_nowait()) is not None:
                    left[1].close()

    async def _outcome(self, prompt: Prompt, call: AsyncCall) -> RequestOutput:
        """The output of one prompt of `generate_each`: a refused one has an output with finish reason "error"."""
        try:
            (output,) = await call.first()
        except RequestRejected as error:
            return refused(text_of(prompt), str(error), self.tokenizer is not None)
        finally:
            call.close()
        return output  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class AsyncRequestHandle:
    """A handle to an unfinished continuation, or beam search, of a stream: continuation `number` of prompt `index`."""

    request_id: str
    index: int
    number: int
    _export: Callable[[], Awaitable[dict[str, Any]]] = field(repr=False)

    async def export(self) -> dict[str, Any]:
        """End the request here and return it as data for another process: see `RequestHandle.export`.

        Chunks that the stream has already taken can still be read from it.
        """
        return await self._export()


class AsyncStream(AsyncIterator[StreamChunk]):
    """An async iterator over the chunks of requests, for one task. Closing or collecting it aborts unfinished requests."""

    def __init__(self, submit: Callable[[], AsyncCall]) -> None:
        self._submit = submit
        self._submission: AsyncCall | None = None
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


def _read(given: Any) -> Any:
    """Read an iterator into a list on the caller's thread; return other values unchanged."""
    return list(given) if isinstance(given, Iterator) else given


def encoder(prompts: Any, params: Any) -> Encode:
    """The function that encodes prompts, with iterators read now."""
    return partial(RequestIntake.encode, prompts=_read(prompts), params=_read(params))


def _chat_encoder(messages: Any, params: Params, template_options: Mapping[str, Any]) -> Encode:
    """The function that encodes conversations, with iterators read now."""
    messages, params, options = _read(messages), _read(params), dict(template_options)
    return lambda intake: intake.encode(intake.render(messages, options), params)


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
