"""The calls that an engine thread serves: their prompts waiting for room, their requests, and their results."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from ..errors import EngineClosed
from .inputs import PromptInput
from .manager import RequestManager
from .outputs import RequestOutput, StreamChunk
from .states import RequestGroup, RequestState, ready_chunk

# Where a caller waits for a result: a future of its event loop, or one that blocks its thread.
Waiter = asyncio.Future[Any] | concurrent.futures.Future[Any]
Loop = asyncio.AbstractEventLoop | None  # None: callers that block their threads


def loop_of(waiter: Waiter) -> Loop:
    """The event loop of a waiter; None if it blocks a thread."""
    return waiter.get_loop() if isinstance(waiter, asyncio.Future) else None


class PendingCall:
    """One call of a caller. Mutated by the engine thread, except `cancelled`, which the caller sets.

    Args:
        waiter: Its result is all outputs or, for a stream, at least one chunk, or an error for the caller to raise.
            `EngineThread.want` registers the waiter for the next results. None: the caller does not wait yet.
        interval: Minimum tokens of a stream's chunk; None for no stream.
        keeps_logprobs: Completions of a stream have the log-probabilities of all its chunks.
    """

    def __init__(
        self,
        waiter: Waiter | None,
        priority: int | None,
        cache_salt: str | None,
        interval: int | None,
        keeps_logprobs: bool = True,
    ) -> None:
        self.loop = None if waiter is None else loop_of(waiter)
        self.waiter = waiter
        self.context = copy_context()  # of the caller, for its logits processors
        self.priority = priority
        self.cache_salt = cache_salt
        self.interval = interval
        self.keeps_logprobs = keeps_logprobs
        self.inputs: list[PromptInput] = []  # until the call is queued
        self.groups: tuple[RequestGroup, ...] = ()  # of all prompts, once the call is queued
        self.states: list[RequestState] = []  # of a stream: those that have not delivered their last chunk
        self.num_running = 0  # unfinished groups
        self.result: list[RequestOutput] | BaseException | None = None  # its last one, if its caller did not wait then
        self.cancelled = False  # the caller is gone
        self.over = False  # no more results follow

    @property
    def exportable(self) -> list[RequestState]:
        """The unfinished continuations, ordered by prompt and number; one for each beam search."""
        return [state for group in self.groups for state in group.exportable]

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return sum(group.num_generated for group in self.groups)

    def collect(self) -> list[RequestOutput] | list[StreamChunk]:
        """Take the results that are ready, perhaps none. Call it in the engine's thread, or after its end."""
        if self.interval is None:
            if self.num_running:
                return []
            self.over = True
            return [group.output for group in self.groups]
        chunks = []
        while (chunk := ready_chunk(self.states, self.interval)) is not None:
            chunks.append(chunk)
        self.over = not self.states
        return chunks


class Outbox:
    """Results for waiters, sent to each event loop in one call. For one thread."""

    def __init__(self) -> None:
        self._results: dict[Loop, list[tuple[Waiter, Any]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether all results have been sent."""
        return not self._results

    def put(self, waiter: Waiter, result: Any) -> None:
        """Resolve `waiter` with `result` at the next `send`."""
        self._results.setdefault(loop_of(waiter), []).append((waiter, result))

    def send(self) -> None:
        """Set the results, each on its loop. Those of closed loops are dropped."""
        by_loop, self._results = self._results, {}
        for loop, results in by_loop.items():
            if loop is None:
                _set_results(results)
                continue
            with suppress(RuntimeError):  # closed loop; `PendingCalls.cancel_lost` drops its calls
                loop.call_soon_threadsafe(_set_results, results)


def settle(waiter: Waiter, result: Any) -> None:
    """Resolve `waiter`, unless it is: cancelled, as its caller has sent `cancel` or `resume`, or resolved by its own thread."""
    with suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
        waiter.set_result(result)


def _set_results(results: list[tuple[Waiter, Any]]) -> None:
    for waiter, result in results:
        settle(waiter, result)


class PendingCalls:
    """The calls of one engine thread, from the arrival of their inputs to their last result. For that thread only.

    Args:
        max_waiting: Calls are submitted while fewer requests than this wait in the scheduler.
    """

    def __init__(self, manager: RequestManager, max_waiting: int, outbox: Outbox) -> None:
        self.is_draining = False  # no more calls are accepted
        self._manager = manager
        self._max_waiting = max_waiting
        self._outbox = outbox
        self._waiting: OrderedDict[PendingCall, None] = OrderedDict()  # for room, first come, first served
        self._open: dict[Loop, dict[PendingCall, None]] = {}  # calls that are not over
        self._call_of: dict[RequestGroup, PendingCall] = {}  # of unfinished groups
        self._ready: dict[PendingCall, None] = {}  # calls that may have results

    @property
    def num_waiting(self) -> int:
        """Calls that are not submitted yet."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether all calls are over."""
        return not (self._waiting or self._open or self._call_of or self._ready)

    @property
    def is_awaited(self) -> bool:
        """Whether the caller of some call blocks its thread for results."""
        return any(call.waiter is not None for call in self._open.get(None, ()))

    def arrive(self, call: PendingCall, inputs: list[PromptInput] | BaseException) -> None:
        """Queue a call with its inputs, or with the error in them."""
        if call.cancelled:
            return
        if isinstance(inputs, BaseException):
            self._give(call, inputs)
        elif self.is_draining:
            self._give(call, EngineClosed("this AsyncLLM is being drained: it accepts no new requests"))
        else:
            call.inputs = inputs
            self._open.setdefault(call.loop, {})[call] = None
            self._waiting[call] = None

    def submit_while_room(self) -> None:
        """Submit waiting calls while the scheduler has room."""
        engine = self._manager.engine
        while self._waiting and engine is not None and engine.core.scheduler.num_waiting < self._max_waiting:
            self._submit(self._waiting.popitem(last=False)[0])

    def submit(self, call: PendingCall, inputs: list[PromptInput]) -> None:
        """Submit a call at once, whatever waits."""
        if not call.cancelled:
            call.inputs = inputs
            self._open.setdefault(call.loop, {})[call] = None
            self._submit(call)

    def submit_all(self) -> None:
        """Submit all waiting calls."""
        while self._waiting:
            self._submit(self._waiting.popitem(last=False)[0])

    def note_outputs(self, updated: Iterable[RequestGroup], ended: Iterable[RequestGroup]) -> None:
        """Mark the calls that may have results: `updated` groups have new tokens, and requests of `ended` groups have ended.

        A group may occur several times.
        """
        call_of, ready = self._call_of, self._ready
        for group in updated:
            call = call_of.get(group)
            if call is not None and call.interval is not None:
                ready[call] = None
        for group in ended:
            call = call_of.get(group)
            if call is None:
                continue
            if group.is_finished:
                del call_of[group]
                call.num_running -= 1
            if call.interval is not None or not call.num_running:
                ready[call] = None

    def want(self, waiter: Waiter, call: PendingCall) -> None:
        """Give `waiter` the next results of `call`: an empty list if it was cancelled, the error if it was rejected."""
        if call.cancelled or call.result is not None:
            self._outbox.put(waiter, call.result or [])
            return
        call.waiter = waiter
        self._ready[call] = None

    def cancel(self, call: PendingCall) -> None:
        """Abort the unfinished requests of `call`, with the next step. Its waiter gets an empty result."""
        call.cancelled = True
        self._waiting.pop(call, None)
        self._manager.abort(call.groups)
        for group in call.groups:
            self._call_of.pop(group, None)
        self._give(call, [])

    def cancel_lost(self) -> None:
        """Cancel the calls of closed loops."""
        for loop in [loop for loop in self._open if loop is not None and loop.is_closed()]:
            for call in list(self._open[loop]):
                self.cancel(call)

    def give_results(self) -> None:
        """Put the results that are ready into the outbox."""
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        for call in ready:
            if (call.waiter is not None or call.interval is None) and (results := call.collect()):
                self._give(call, results)

    def end(self, error: Callable[[], BaseException]) -> None:
        """Forget all calls; those with a waiter get an error."""
        for call in [call for calls in self._open.values() for call in calls]:
            if call.waiter is not None:
                self._outbox.put(call.waiter, error())
        for held in (self._waiting, self._open, self._call_of, self._ready):
            held.clear()

    def _submit(self, call: PendingCall) -> None:
        inputs, call.inputs = call.inputs, []
        try:
            streams = call.interval is not None
            groups = self._manager.submit(inputs, call.priority, call.cache_salt, streams, call.context)
        except Exception as error:
            self._give(call, error)
            return
        call.groups = tuple(groups)
        call.states = [state for group in groups for state in group.states]
        for state in call.states:
            state.keeps_logprobs = call.keeps_logprobs
        call.num_running = len(groups)
        self._call_of.update((group, call) for group in groups)

    def _give(self, call: PendingCall, result: Any) -> None:
        """Resolve the waiter of `call`. A call that is over, was cancelled or gets an error is closed."""
        waiter, call.waiter = call.waiter, None
        if waiter is not None:
            self._outbox.put(waiter, result)
        elif not call.cancelled:
            call.result = result
        call.over |= isinstance(result, BaseException)
        if call.over or call.cancelled:
            self._ready.pop(call, None)
            calls = self._open.get(call.loop, {})
            calls.pop(call, None)
            if not calls:
                self._open.pop(call.loop, None)
