"""A running fleet for asyncio programs: `Fleet`, with the interface of `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.arguments import explains_arguments
from ..api.sampling_params import SamplingParams
from ..engine.async_calls import AsyncCall, AsyncCalls, Encode
from ..engine.errors import EngineClosed
from ..engine.requests.inputs import Message, Prompt
from ..engine.requests.intake import RequestIntake
from ..engine.requests.outputs import RequestOutput
from .call import CallOptions, CallState, FleetCall, public_error
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
    "pin_prefix": f"{_ONE_ENGINE}; workers pin prompts of `warm_prompts` in fleet.yaml",
    "unpin_prefix": f"{_ONE_ENGINE}; workers pin prompts of `warm_prompts` in fleet.yaml",
    "explain": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "frame": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "block": f"{_ONE_ENGINE}; `pagetide fleet status` shows their memory",
    "cache_events": "workers publish the events themselves: set kv_events in fleet.yaml",
    "cache_snapshot": "workers publish the events themselves: set kv_events in fleet.yaml",
    "config": "the engines have the settings of fleet.yaml; `facts` has those of the model",
}


class Fleet(AsyncCalls):
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

    Differences to `AsyncLLM`: workers report tokens every 20 ms, so a chunk has those of several steps. `logits_processors` are
    refused, as they are code. A stream has no `requests` to export. The workers do not show a prompt's `label`.
    `num_preemptions` is 0. Times are measured in this process. If the queue or a worker refuses a prompt (it is larger than
    their pools), other prompts of the call may have been started, and are aborted. `import_request`, `pause`, `resume`,
    `pin_prefix`, `reset_prefix_cache`, `explain`, `frame`, `block`, `cache_events` and `config` do not exist.

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

    async def outcome(self, prompt: Prompt, params: SamplingParams | None, options: CallOptions) -> RequestOutput:
        """The output of one prompt of `generate_each`: a refused one has an output with finish reason "error"."""
        encode = partial(RequestIntake.encode_one, prompt=prompt, params=params)
        return await self._outcome(prompt, self._begin(encode, options))

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
        """`tokenizer`, by vLLM's name. Connects."""
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

    def _call(self, encode: Encode, priority: int, cache_salt: str | None, interval: int | None = None) -> AsyncCall:
        return self._begin(encode, CallOptions(priority, cache_salt, interval))

    async def _num_ahead(self) -> int:
        return max(1, 2 * (await self._connected()).info.max_seqs)

    def _begin(self, encode: Encode, options: CallOptions) -> FleetCall:
        if self._closed is not None:
            raise EngineClosed(self._closed)
        state = CallState(options)
        task = self._calls[state] = asyncio.create_task(state.run(self._connected, encode))
        task.add_done_callback(lambda _: self._calls.pop(state, None))
        return FleetCall(state, task)


async def _started(open_link: Callable[[], QueueLink]) -> FleetClient:
    """A client of the queue behind the link. Raises EngineUnavailable, FleetError and ModelNotFound."""
    return await FleetClient.start(await asyncio.to_thread(open_link))


def _connect(address: str, name: str) -> QueueLink:
    """A link to the queue of a fleet on Ray. Blocks. Raises FleetError."""
    from .cluster import RayLink, connect

    return RayLink(connect(address, name))
