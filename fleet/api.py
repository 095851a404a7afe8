"""A running fleet for asyncio programs: `Fleet`, with the interface of `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..api.arguments import explains_arguments
from ..api.sampling_params import SamplingParams
from ..engine.async_llm import AsyncOutputs, AsyncStream, Pair, Params
from ..engine.errors import EngineClosed
from ..engine.requests.inputs import Message, Prompt, Prompts, check_count, paired, text_of
from ..engine.requests.intake import RequestIntake
from ..engine.requests.outputs import RequestOutput, refused
from ..scheduler.errors import RequestRejected
from .call import CallOptions, CallState, Encode, FleetCall, public_error
from .client import FleetClient
from .config import DEFAULT_NAME, LOCAL
from .errors import FleetError
from .links import QueueLink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.build import ModelFacts

Value = TypeVar("Value")

STOPPED = "this Fleet is stopped: create a new one"
DRAINING = "this Fleet is being drained: it accepts no new requests"
_ONE_ENGINE = "the engines of a fleet are in other processes, and a request may move between them"
# Attributes of `AsyncLLM` that a fleet does not have, and what to do instead.
_ABSENT = {
    "import_request": f"{_ONE_ENGINE} by itself; to continue exported data use LLM or AsyncLLM",
    "pause": "its workers run for all its clients; `pagetide fleet drain` ends one of them",
    "resume": "its workers run for all its clients",
    "reset_prefix_cache": "its workers run for all its clients; give requests another cache_salt",
    "explain": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "frame": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "block": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "cache_events": "workers publish the events themselves: set kv_events in fleet.yaml",
    "cache_snapshot": "workers publish the events themselves: set kv_events in fleet.yaml",
    "config": "the engines have the settings of fleet.yaml; `facts` has those of the model",
}


class Fleet:
    """A fleet that runs already, for any number of tasks of one event loop.

        async with Fleet() as fleet:
            async for chunk in fleet.stream("the tide"):
                print(chunk.text, end="")

    The calls, their arguments and their results are those of `AsyncLLM`, and the tokens are those of one engine with the
    workers' settings. A request goes on when its worker dies, from its last recorded token. What this process asked for is
    aborted as `AsyncLLM` does it: when a task is cancelled, a stream is closed or the Fleet is stopped. Requests of a process
    that dies go on in the fleet, without a reader.

    Args:
        address: Of the Ray cluster, as `pagetide fleet status --address` takes it; "local": the fleet of this machine.
        name: Of the fleet.

    The constructor returns at once. `async with`, or the first call, connects, waits for the first worker and loads the
    model's tokenizer, which has to be on this machine; `tokenizer` and `facts` need that to have happened.

    Differences to `AsyncLLM`: `logits_processors` are refused, as they are code. A stream has no `requests` to export. The
    workers do not show a prompt's `label`. `num_preemptions` is 0. Times are measured in this process. If the queue or a worker
    refuses a prompt (it is larger than their pools), other prompts of the call may have been started, and are aborted.
    `import_request`, `pause`, `resume`, `reset_prefix_cache`, `explain`, `frame`, `block`, `cache_events` and `config` do not
    exist.

    Raises:
        FleetError: in every call: the fleet cannot be reached, or failed on the request.
        RequestRejected: a prompt cannot be served; nothing of the call is started then.
        EngineClosed: this Fleet is stopped, or being drained. The fleet itself goes on.
    """

    def __init__(self, address: str = LOCAL, name: str = DEFAULT_NAME) -> None:
        self.address = address
        self.name = name
        self._open_link: Callable[[], QueueLink] = partial(_connect, address, name)
        self._starting: asyncio.Task[FleetClient] | None = None
        self._client: FleetClient | None = None
        self._closed: str | None = None  # why calls are refused
        self._calls: dict[CallState, asyncio.Task[None]] = {}

    # -- requests ----------------------------------------------------------------------------------------------------

    @explains_arguments("Fleet.generate")
    async def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt: see `AsyncLLM.generate`. Cancellation aborts the requests."""
        return await self._outputs(_encoder(prompts, sampling_params), CallOptions(priority, cache_salt))

    def begin(
        self, prompts: Prompts, sampling_params: Params = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> AsyncOutputs:
        """As `generate`, for a caller that asks how much was generated: see `AsyncLLM.begin`. Raises EngineClosed."""
        call = self._call(_encoder(prompts, sampling_params), CallOptions(priority, cache_salt))
        return AsyncOutputs(cast(Any, _Whole(call)))

    @explains_arguments("Fleet.chat")
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: see `AsyncLLM.chat`."""
        encode = _chat_encoder(messages, sampling_params, template_options)
        return await self._outputs(encode, CallOptions(priority, cache_salt))

    @explains_arguments("Fleet.stream")
    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncStream:
        """Stream the output in chunks of at least `stream_interval` tokens: see `AsyncLLM.stream`.

        Workers report tokens every 20 ms, so a chunk has those of several steps.
        """
        return self._stream(_encoder(prompts, sampling_params), stream_interval, priority, cache_salt)

    @explains_arguments("Fleet.stream_chat")
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
        encode = _chat_encoder(messages, sampling_params, template_options)
        return self._stream(encode, stream_interval, priority, cache_salt)

    @explains_arguments("Fleet.generate_each")
    def generate_each(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        look_ahead: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue prompts from an iterable, async or not, which may be endless: see `AsyncLLM.generate_each`.

        `look_ahead` is twice the sequences that all workers can run unless it is given.
        """
        if look_ahead is not None:
            check_count("look_ahead", look_ahead)
        if isinstance(prompts, AsyncIterable):
            pairs = _pairs_as_they_come(prompts, sampling_params)
        else:
            pairs = _as_async(paired(prompts, sampling_params))
        return self._each(pairs, look_ahead, CallOptions(priority, cache_salt))

    async def outcome(self, prompt: Prompt, params: SamplingParams | None, options: CallOptions) -> RequestOutput:
        """The output of one prompt of `generate_each`: a refused one has an output with finish reason "error"."""
        call = self._call(_one_encoder(prompt, params), options)
        try:
            (output,) = await call.outputs()
            return output
        except RequestRejected as error:
            return refused(text_of(prompt), str(error), self.tokenizer is not None)
        finally:
            call.close()

    # -- the model ---------------------------------------------------------------------------------------------------

    @explains_arguments("Fleet.render")
    async def render(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt token ids of `chat` for this conversation. Raises RequestRejected as `chat` does."""
        client = await self._connected()
        return await asyncio.to_thread(client.preparer.render, messages, template_options)

    @explains_arguments("Fleet.tokenize")
    async def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The prompt token ids of `generate` for this prompt. Raises RequestRejected for an invalid prompt."""
        client = await self._connected()
        return await asyncio.to_thread(client.preparer.intake.tokenize, prompt, sampling_params or SamplingParams())

    @property
    def facts(self) -> ModelFacts:
        """Facts about the workers' model; `device` is "fleet". Raises FleetError before the Fleet is connected."""
        from ..engine.build import ModelFacts  # imports torch

        preparer = self._ready.preparer
        model = preparer.model
        return ModelFacts(
            model.max_model_len, model.vocab_size, model.block_size, "fleet", model.dtype, preparer.sampling,
            tuple(model.eos_token_ids), model.bos_token_id, model.num_tables, model.layout,
        )  # fmt: skip

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer: see `LLM.tokenizer`. Raises FleetError before the Fleet is connected."""
        tokenizer: PreTrainedTokenizerBase | None = self._ready.preparer.tokenizer
        return tokenizer

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """`tokenizer`, by vLLM's name."""
        await self._connected()
        return self.tokenizer

    async def stats(self) -> dict[str, Any]:
        """The fleet's state and counters: `model`, `workers`, `queue`, `journal`, `front_ends`, and `stats` of each worker."""
        client = await self._connected()
        try:
            status: dict[str, Any] = await client.call("status")
        except Exception as error:
            raise self._public(error) from error
        return {name: value for name, value in status.items() if name != "fleet_metrics"}

    # -- life cycle --------------------------------------------------------------------------------------------------

    async def connect(self) -> FleetClient:
        """Connect, if that has not happened yet. Returns the connection. Raises FleetError, ModelNotFound, EngineClosed."""
        return await self._connected()

    async def drain(self) -> None:
        """Refuse new calls with EngineClosed, and return when all earlier calls have ended. Irreversible."""
        self._closed = self._closed or DRAINING
        while self._calls:
            await asyncio.wait(list(self._calls.values()))

    async def stop(self, timeout_s: float | None = 0.0) -> None:
        """Abort all requests of this Fleet, and disconnect. The fleet goes on. Idempotent.

        Args:
            timeout_s: Seconds to `drain` first, so that requests in flight can finish; None is no limit.

        Waiting callers get their outputs so far, with finish reason "aborted". Later calls raise EngineClosed.
        """
        if timeout_s is None or timeout_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.drain()
        self._closed = STOPPED
        tasks = list(self._calls.values())
        for state in list(self._calls):
            state.abort(STOPPED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await (await self._starting).stop()

    def __repr__(self) -> str:
        """The address, the name and the model."""
        model = "not connected" if self._client is None else self._client.preparer.model.name
        return f"Fleet({self.address!r}, {self.name!r}, {self._closed or model})"

    async def __aenter__(self) -> Fleet:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised AttributeError: its own error
            return object.__getattribute__(self, name)
        said = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"'Fleet' object has no attribute {name!r}{said}", name=name, obj=self)

    # -- shared by the APIs ------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> FleetClient:
        if self._closed == STOPPED:
            raise EngineClosed(STOPPED)
        if self._client is None:
            raise FleetError("this Fleet is not connected yet: use `async with`, or await connect()")
        return self._client

    async def _connected(self) -> FleetClient:
        """The connection, made by the first call. Raises FleetError, EngineClosed."""
        if self._closed == STOPPED:
            raise EngineClosed(STOPPED)
        if self._starting is None:
            self._starting = asyncio.create_task(_started(self._open_link))
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this Fleet belongs to another event loop: make one for each loop")
        starting = self._starting
        try:
            self._client = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise EngineClosed(STOPPED) from None
            raise
        except Exception as error:
            if self._starting is starting:
                self._starting = None  # a later call tries again
            raise self._public(error) from error
        return self._client

    def _public(self, error: Exception) -> Exception:
        return EngineClosed(STOPPED) if self._closed == STOPPED else public_error(error)

    def _call(self, encode: Encode, options: CallOptions) -> FleetCall:
        """Begin a call. Raises EngineClosed."""
        if self._closed is not None:
            raise EngineClosed(self._closed)
        state = CallState(options)
        task = self._calls[state] = asyncio.create_task(state.run(self._connected, encode))
        task.add_done_callback(lambda _: self._calls.pop(state, None))
        return FleetCall(state, task)

    async def _outputs(self, encode: Encode, options: CallOptions) -> list[RequestOutput]:
        call = self._call(encode, options)
        try:
            return await call.outputs()
        finally:
            call.close()

    def _stream(self, encode: Encode, interval: int, priority: int, cache_salt: str | None) -> AsyncStream:
        check_count("stream_interval", interval)
        options = CallOptions(priority, cache_salt, interval)
        return AsyncStream(cast(Any, partial(self._call, encode, options)))

    async def _each(
        self, pairs: AsyncGenerator[Pair, None], look_ahead: int | None, options: CallOptions
    ) -> AsyncIterator[RequestOutput]:
        client = await self._connected()
        room = asyncio.Semaphore(look_ahead or max(1, 2 * client.info.max_seqs))
        taken: asyncio.Queue[asyncio.Task[RequestOutput] | None] = asyncio.Queue()

        async def take() -> None:
            try:
                async with aclosing(pairs):
                    await room.acquire()
                    async for prompt, params in pairs:
                        taken.put_nowait(asyncio.create_task(self.outcome(prompt, params, options)))
                        await room.acquire()
            finally:
                taken.put_nowait(None)

        taking = asyncio.create_task(take())
        try:
            while (first := await taken.get()) is not None:
                try:
                    yield await first
                finally:
                    first.cancel()
                room.release()
            await taking  # raises what the source raised
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)  # the source is no longer read after this
            left = [one for _ in range(taken.qsize()) if (one := taken.get_nowait()) is not None]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class _Whole:
    """A call as `AsyncOutputs` reads it: its first result is all outputs."""

    def __init__(self, call: FleetCall) -> None:
        self._call = call
        self.first, self.close = call.outputs, call.close

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self._call.num_generated


async def _started(open_link: Callable[[], QueueLink]) -> FleetClient:
    """A client of the queue behind the link. Raises EngineUnavailable, FleetError and ModelNotFound."""
    return await FleetClient.start(await asyncio.to_thread(open_link))


def _connect(address: str, name: str) -> QueueLink:
    """A link to the queue of a fleet on Ray. Blocks. Raises FleetError."""
    from .cluster import RayLink, connect

    return RayLink(connect(address, name))


def _read(given: Any) -> Any:
    """Read an iterator into a list on the caller's thread; return other values unchanged."""
    return list(given) if isinstance(given, Iterator) else given


def _encoder(prompts: Any, params: Any) -> Encode:
    """The function that encodes prompts, with iterators read now."""
    return partial(RequestIntake.encode, prompts=_read(prompts), params=_read(params))


def _one_encoder(prompt: Prompt, params: SamplingParams | None) -> Encode:
    return partial(RequestIntake.encode_one, prompt=prompt, params=params)


def _chat_encoder(messages: Any, params: Params, template_options: Mapping[str, Any]) -> Encode:
    messages, params, options = _read(messages), _read(params), dict(template_options)
    return lambda intake: intake.encode(intake.render(messages, options), params)


async def _as_async(pairs: Iterator[Pair]) -> AsyncGenerator[Pair, None]:
    for pair in pairs:
        yield pair


async def _pairs_as_they_come(
    prompts: AsyncIterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> AsyncGenerator[Pair, None]:
    came: deque[Prompt] = deque()
    pairs = paired(iter(came.popleft, object()), params)
    async for prompt in prompts:
        came.append(prompt)
        yield next(pairs)
