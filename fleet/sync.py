"""A running fleet for programs without an event loop: `SyncFleet`, the calls of `LLM` that `pagetide run` needs."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.sampling_params import SamplingParams
from ..common.on_error import OnError
from ..engine.requests.inputs import Prompt
from ..engine.requests.outputs import RequestOutput
from .api import Fleet
from .call import CallOptions
from .client import MODEL_S
from .errors import FleetError
from .links import QueueUnavailable
from .messages import FleetInfo, FleetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Requests of a file that wait in the queue, of which all callers without an API key share the places
MOST_AHEAD = 1000

Value = TypeVar("Value")


def model_of_fleet(address: str, name: str) -> FleetModel:
    """The model of a running fleet; waits for its first worker. Raises FleetError."""
    from .cluster import RayLink, connect

    link = RayLink(connect(address, name))
    try:
        info: FleetInfo | None = asyncio.run(link.info(MODEL_S))
    except QueueUnavailable as error:
        raise FleetError(f"the fleet's queue is away: {error}") from error
    if info is None:
        raise FleetError(f"no worker of the fleet has loaded the model within {MODEL_S:g} s: `pagetide fleet status`")
    return info.model


class SyncFleet:
    """A connected `Fleet` on an event loop in a thread of its own. The constructor blocks. Use it as a context manager.

    Raises FleetError and ModelNotFound.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagetide-fleet", daemon=True)
        self._thread.start()
        with OnError(self.close):
            self._client = self._wait(fleet.connect())
            self._num_preemptions = self._count_preemptions()

    def generate_each(
        self, pairs: Iterable[tuple[Prompt, SamplingParams]], name_of: Callable[[], str]
    ) -> Iterator[RequestOutput]:
        """As `LLM.generate_each`. `name_of` is called after each pair, and names its request: see `CallOptions`."""
        pending: deque[Future[RequestOutput]] = deque()
        try:
            for prompt, params in pairs:
                pending.append(self._begin(self._fleet.outcome(prompt, params, CallOptions(name=name_of()))))
                while pending and (len(pending) >= self._look_ahead() or pending[0].done()):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for one in pending:
                one.cancel()

    def render(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """See `LLM.render`."""
        return self._wait(self._fleet.render(messages, **template_options))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """See `LLM.tokenizer`."""
        return self._fleet.tokenizer

    @property
    def model(self) -> FleetModel:
        """The workers' model."""
        return self._client.preparer.model

    def stats(self) -> dict[str, Any]:
        """See `Fleet.stats`; with `preemptions` of all workers since this object was made."""
        return {**self._wait(self._fleet.stats()), "preemptions": self._count_preemptions() - self._num_preemptions}

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._fleet.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> SyncFleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look_ahead(self) -> int:
        most = self._client.info.max_seqs
        return max(1, most + min(most, MOST_AHEAD))

    def _count_preemptions(self) -> int:
        return sum(int(worker["preemptions"]) for worker in self._wait(self._fleet.stats())["workers"])

    def _begin(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Value]) -> Value:
        return self._begin(work).result()
