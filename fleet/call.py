"""The requests of one call of `Fleet`: submitted together, followed by a task, and ended together."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..engine.async_calls import Encode
from ..engine.errors import EngineClosed
from ..engine.requests.inputs import PromptInput
from ..engine.requests.outputs import RequestOutput, StreamChunk
from ..scheduler.request import PromptTooLong, RequestRejected
from ..server.engine_client import EngineUnavailable, Generation, RequestFailed
from .client import FleetClient
from .errors import FleetError
from .links import QueueUnavailable
from .messages import NewRequest
from .outputs import PromptOutput
from .preparation import RequestPreparer


def public_error(error: Exception) -> Exception:
    """The error for callers: one that `AsyncLLM` raises, or FleetError."""
    if isinstance(error, RequestFailed):
        kinds = {"too_long": PromptTooLong, "invalid": RequestRejected, "conflict": RequestRejected}
        return kinds.get(error.kind, FleetError)(str(error))
    return FleetError(str(error)) if isinstance(error, EngineUnavailable | QueueUnavailable) else error


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How the prompts of a call are served.

    Attributes:
        interval: Minimum tokens of a stream's chunk; None for no stream.
        name: Names the call's only request for good: the same name in a later call gets the same output, and the request
            goes on when the call is closed. None: closing the call aborts its requests.
    """

    priority: int = 0
    cache_salt: str | None = None
    interval: int | None = None
    name: str | None = None

    def requests(self, preparer: RequestPreparer, encode: Encode) -> list[tuple[PromptInput, NewRequest]]:
        """Check and encode the prompts. Raises RequestRejected if one cannot be served."""
        found = []
        for prompt in encode(preparer.intake):
            params = prompt.params
            if self.interval is not None and params.num_started > (params.n or 1):
                raise RequestRejected(
                    f"best_of {params.best_of} cannot be streamed with n {params.n or 1}: which of them are given is known "
                    "when all have ended; use generate, or leave best_of out"
                )
            prompt.prepared.compile()
            request_id = new_id() if self.name is None else preparer.request_id(self.name)
            request = preparer.of_input(prompt, self.priority, self.cache_salt, request_id, self.name is not None)
            found.append((prompt, request))
        return found


def new_id() -> str:
    """An id that no other request has."""
    return f"req-{secrets.token_hex(12)}"


@dataclass(slots=True, eq=False)
class CallState:
    """The requests of a call and their outputs so far. Its task and `FleetCall` change it.

    Attributes:
        changed: Something has arrived from the queue.
        news: Outputs or `error` have changed.
        is_begun: All requests are accepted.
        error: Why the call failed.
    """

    options: CallOptions
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    generations: list[Generation] = field(default_factory=list)
    outputs: list[PromptOutput] = field(default_factory=list)
    is_begun: bool = False
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all requests have ended."""
        return self.is_begun and all(output.end is not None for output in self.outputs)

    async def run(self, connected: Callable[[], Awaitable[FleetClient]], encode: Encode) -> None:
        """Submit the requests and follow them to their ends. If cancelled, they are aborted, unless the call has a name."""
        client = None
        try:
            client = await connected()
            pairs = await asyncio.to_thread(self.options.requests, client.preparer, encode)
            self._follow(client, pairs)
            while not self.has_ended:
                await self.changed.wait()
                self.changed.clear()
                self._take(client, pairs)
                self.news.set()
        except Exception as error:
            self.error = public_error(error)
        finally:
            self.news.set()
            if client is not None:
                self._leave(client)

    def abort(self, closed: str) -> None:
        """End the call with the outputs so far; before its requests are accepted, with EngineClosed."""
        if not self.is_begun:
            self.error = self.error or EngineClosed(closed)
        for output in self.outputs:
            if output.end is None:
                output.abort(time.monotonic())
        self.news.set()

    def _follow(self, client: FleetClient, pairs: Sequence[tuple[PromptInput, NewRequest]]) -> None:
        now, has_tokenizer = time.monotonic(), client.preparer.tokenizer is not None
        for index, (prompt, request) in enumerate(pairs):
            self.outputs.append(PromptOutput(index, prompt, request, has_tokenizer, now))
            self.generations.append(client.follow(request, self.changed))

    def _take(self, client: FleetClient, pairs: Sequence[tuple[PromptInput, NewRequest]]) -> None:
        """Take in what has arrived. Raises the error of a request."""
        now = time.monotonic()
        for output, generation in zip(self.outputs, self.generations, strict=True):
            output.take(generation.read(), now)
            if generation.finished is not None:
                output.finish(generation.finished)
        if self._has_failed_before:
            self._begin_anew(client, pairs)
            return
        for generation in self.generations:
            if generation.error is not None:
                raise generation.error
        self.is_begun = all(generation.prompt_token_ids is not None for generation in self.generations)

    @property
    def _has_failed_before(self) -> bool:
        """Whether the call has found its named request, and that was cancelled or failed."""
        return self.options.name is not None and any(
            generation.is_attached and (generation.error is not None or output.has_failed)
            for output, generation in zip(self.outputs, self.generations, strict=True)
        )

    def _begin_anew(self, client: FleetClient, pairs: Sequence[tuple[PromptInput, NewRequest]]) -> None:
        """Submit the requests under ids of their own: what an id was used for stays."""
        for generation in self.generations:
            client.leave(generation)
        self.outputs.clear()
        self.generations.clear()
        self._follow(client, [(prompt, client.preparer.renamed(request, new_id())) for prompt, request in pairs])

    def _leave(self, client: FleetClient) -> None:
        for generation in self.generations:
            (client.cancel if self.options.name is None else client.leave)(generation)


class FleetCall:
    """An `AsyncCall`, created on the fleet's loop."""

    requests = ()  # handles of `AsyncStream`: a fleet exports nothing

    def __init__(self, state: CallState, task: asyncio.Task[None]) -> None:
        self._state = state
        self._task = task  # refers to the state, not to this object
        self._is_closed = False

    @property
    def over(self) -> bool:
        """Whether no more results follow."""
        return self._state.is_begun and all(output.is_told for output in self._state.outputs)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return sum(output.num_generated for output in self._state.outputs)

    async def _outputs(self) -> list[RequestOutput]:
        state = self._state
        while not state.has_ended and state.error is None:
            await state.news.wait()
            state.news.clear()
        if state.error is not None:
            raise state.error
        return [output.output for output in state.outputs]

    async def first(self) -> Any:
        """Wait for the outputs, or for a stream's first chunks."""
        return await (self._outputs() if self._state.options.interval is None else self.next())

    async def next(self) -> list[StreamChunk]:
        """Wait for the next chunks; none once the call is closed. Raises as `Fleet.generate`."""
        state, interval = self._state, self._state.options.interval or 1
        while True:
            state.news.clear()
            if state.is_begun and (chunks := [chunk for output in state.outputs for chunk in output.chunks(interval)]):
                return chunks
            if state.error is not None and not self._is_closed:
                raise state.error
            if self._is_closed or self._task.done():
                return []
            await state.news.wait()

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._state.news.set()
            self._task.cancel()

    def __del__(self) -> None:
        """Close it on its loop: it may be collected in any thread."""
        if not self._task.done():
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
