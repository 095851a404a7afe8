"""The request manager behind all APIs: queues requests, runs steps and delivers their tokens.

A caller that waits for output runs the next step under one lock; with `AsyncLLM`, one thread runs all steps. Outputs go to the
request groups they belong to (delivery.py); inputs come through intake.py: docs/decisions/0023-apis.md.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...allocator.errors import LeaseClosed
from ...common.units import format_bytes
from ...frames.recorder import INTERVAL_S
from ...frames.source import Frame
from ...scheduler.errors import RequestRejected
from ..config import EngineConfig
from ..errors import EngineClosed, ShardLost
from ..process.background import BackgroundThread
from ..process.fair_lock import FairLock
from ..process.fork import MakerProcess
from ..watch import EngineWatch, open_recorder
from .delivery import OutputDelivery
from .inputs import PromptInput, check_cache_salt
from .intake import RequestIntake
from .outputs import StreamChunk
from .states import RequestGroup, RequestState, ready_chunk

if TYPE_CHECKING:
    from ..build import Engine

log = logging.getLogger(__name__)
T = TypeVar("T")

STARVING_WAIT_S = 0.02
KEEPER_WAIT_S = 0.25
KEEPER_BUSY_WAIT_S = 0.06  # while memory work is left: callers' steps do it meanwhile
STEPPING_S = 0.05  # within this time after a caller's step, the next caller's step is expected to do the memory work
STATS_LOOK_S = 0.001  # interval of the attempts to take a briefly held lock
STATS_S = 0.02  # maximum age of the statistics when a step begins, for reads during the step


class RequestManager:
    """One engine and its pending requests. Thread-safe.

    Raises what `build` raises; nothing stays allocated then.
    """

    def __init__(self, config: EngineConfig) -> None:
        # It imports torch, which takes seconds: what is wrong with a configuration is said before.
        from ..build import build

        self._maker = MakerProcess()
        self.engine: Engine | None = build(config)
        try:
            self._recorder = open_recorder(self.engine, config)
        except BaseException:
            self.engine.close()
            raise
        self.lock = FairLock()
        self.paused = False  # no steps, not even for memory work
        # Called instead of `close` when a shard is lost between steps.
        self.on_lost: Callable[[ShardLost], None] | None = None
        self._cause: BaseException | None = None  # of the end, if it was not asked for
        self._last_frame: Frame | None = None  # of the recording, once the engine has ended
        self.delivery = OutputDelivery()
        self._to_abort: deque[RequestGroup] = deque()  # by the next step
        self._numbers = itertools.count()
        self._stepped_at = -math.inf  # end of the last step run for a caller
        self._keeper = BackgroundThread("pagetide-memory", partial(_keep_memory, weakref.ref(self)), KEEPER_WAIT_S)
        self.watch: EngineWatch | None = EngineWatch(self.engine)  # while it is open; used under the lock
        self._stats, self._stats_at = self._collect_stats(self.engine), self.engine.core.clock()
        self._keeper.start()
        if self._recorder is not None:
            record = partial(_record, weakref.ref(self), self._recorder.stopped)
            BackgroundThread("pagetide-record", record, KEEPER_WAIT_S).start()

    def open(self) -> Engine:
        """Return the engine. Raises EngineClosed once it is closed, and in a forked child."""
        self._maker.check()
        if self.engine is None:
            if self._cause is not None:
                raise EngineClosed(f"this LLM has ended: {self._cause}") from self._cause
            raise EngineClosed("this LLM is closed: create a new one")
        return self.engine

    def check_process(self) -> None:
        """Raise EngineClosed in a forked child."""
        self._maker.check()

    @property
    def is_here(self) -> bool:
        """False in a forked child: its parent has the engine."""
        return self._maker.is_current

    def close(self, cause: BaseException | None = None) -> None:
        """End all requests as aborted, or with the error `cause`, and free all memory. Idempotent.

        Raises EngineClosed in a forked child: the engine belongs to its parent.
        """
        with self.lock:
            self._end(cause)
        if self._recorder is not None:
            self._recorder.close(self._last_frame)
            self._recorder = self._last_frame = None  # its source refers to the engine
        if threading.current_thread() is not self._keeper:
            self._keeper.join()

    def _end(self, cause: BaseException | None) -> None:
        """End all requests and free the engine's memory. Idempotent. Call it under the lock."""
        engine, self.engine = self.engine, None
        if engine is None:
            return
        self._cause = cause
        self.watch = None
        try:
            self._end_all(engine, cause)
            self._last_frame = None if self._recorder is None else self._recorder.last()
        finally:
            engine.close()

    def _end_all(self, engine: Engine, cause: BaseException | None) -> None:
        """End every request group, even if the engine raises."""
        groups = self.delivery.groups
        if cause is not None:
            for group in dict.fromkeys(groups.values()):
                group.fail(cause)
        try:
            for request_id in list(groups):
                engine.core.abort(request_id, "aborted" if cause is None else "error")
            while engine.core.has_work or self.delivery.is_pending:
                self._advance(engine)
        finally:
            self._end_lost(engine, list(groups.values()))

    def stats(self) -> dict[str, Any]:
        """The engine's statistics. During a step, those from at most STATS_S before the step began."""
        until = time.monotonic() + STATS_S
        while (stats := self.stats_now()) is None and time.monotonic() < until:
            time.sleep(STATS_LOOK_S)
        return stats or self.last_stats()

    def stats_now(self) -> dict[str, Any] | None:
        """As `stats`, without waiting. None while the lock is held for an operation that is usually short."""
        self.open()
        if not self.lock.acquire(blocking=False):
            # `barred` is set while a step runs or a tool holds the engine.
            return None if self.lock.barred is None else self.last_stats()
        try:
            self._stats = self._collect_stats(self.open())
        finally:
            self.lock.release()
        return self.last_stats()

    def last_stats(self) -> dict[str, Any]:
        """A copy of the statistics that were collected last."""
        return copy.deepcopy(self._stats)

    def look(self, function: Callable[[EngineWatch], T]) -> T:
        """The result of `function` with the watched side of the engine, between two steps. Raises EngineClosed."""
        with self.lock:
            self.open()
            assert self.watch is not None
            return function(self.watch)

    def record(self) -> bool:
        """Record a frame if one is due. Returns whether the recording goes on."""

        def take(make: Callable[[], Frame]) -> Frame | None:
            with self.lock:
                return None if self.engine is None else make()

        recorder = self._recorder
        return recorder is not None and recorder.turn(take)

    def describe(self) -> str:
        """Device, dtype, size of the pool and requests, for a repr; "closed" for a closed engine."""
        try:
            stats = self.stats()
        except EngineClosed:
            return "closed"
        place, pool = f"device={stats['device']!r}, dtype={stats['dtype']!r}", format_bytes(stats["kv_bytes"])
        return f"{place}, KV pool {pool}, {stats['running']} running, {stats['waiting']} waiting"

    def _collect_stats(self, engine: Engine) -> dict[str, Any]:
        return {**engine.stats(), "threads": {self._keeper.name: self._keeper.to_dict()}}

    # -- requests in ---------------------------------------------------------------------------------------------

    @property
    def intake(self) -> RequestIntake:
        """Encodes and checks what callers pass in, for `submit`. Raises EngineClosed."""
        return RequestIntake(self.open(), self._numbers)

    def submit(
        self, inputs: Sequence[PromptInput], priority: int | None, cache_salt: str | None, streams: bool = False
    ) -> list[RequestGroup]:
        """Queue all prompts, or none if one is rejected.

        An imported request keeps its own salt, and with `priority` None its own priority. Constraints are compiled
        before the lock is taken.
        """
        check_cache_salt(cache_salt)
        for one in inputs:
            one.prepared.compile()
        with self.lock:
            intake = self.intake
            built = [intake.build(index, one, priority, cache_salt, streams) for index, one in enumerate(inputs)]
            for group, requests in built:
                for request in requests:
                    intake.engine.core.add(request)
                self.delivery.add(group, requests)
        return [group for group, _ in built]

    def export(self, state: RequestState) -> dict[str, Any]:
        """See `RequestHandle.export`."""
        with self.lock:
            engine = self.open()
            self.finish_pending_steps(engine)
            state.check_exportable()
            group, scheduler = state.group, engine.core.scheduler
            request_ids = group.requests_of(state)
            withdrawn = [end for one in request_ids if (end := scheduler.withdraw(one)) is not None]
            if not withdrawn:
                raise RequestRejected(
                    f"request {state.request.request_id} is at its end, which the next step tells: there is nothing left to "
                    "hand over"
                )
            self.delivery.remove(request_ids)
            handover = group.hand_over(state, withdrawn, engine.core.clock())
            if self.delivery.on_outputs is not None:
                self.delivery.on_outputs([], [group])
            return handover.to_dict(engine.plan.model, engine.encoder.vocab_size)

    def copies(self, groups: Iterable[RequestGroup]) -> list[dict[str, Any] | None]:
        """The data of `export` for each group of one request, which goes on here; None for others: see `RequestGroup.copy`."""
        with self.lock:
            engine = self.open()
            self.finish_pending_steps(engine)
            copies = [group.copy(engine.core.clock()) for group in groups]
        model, vocab_size = engine.plan.model, engine.encoder.vocab_size
        return [None if one is None else one.to_dict(model, vocab_size) for one in copies]

    # -- steps and delivery ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do. False once closed."""
        return self.engine is not None and bool(self.engine.core.has_work or self.delivery.is_pending or self._to_abort)

    def step(self) -> None:
        """Run one step of the engine and deliver its outputs. Raises EngineClosed, and ShardLost once all requests have
        ended.
        """
        with self.lock:
            engine = self.open()
            self._advance_for_caller(engine)
        _wait_if_starving(engine)

    def step_for(self, group: RequestGroup) -> None:
        """Run one step of the engine, unless another thread's step has already finished `group`."""
        with self.lock:
            engine = self.open() if not group.is_finished else None
            if engine is None or self._end_lost(engine, [group]):
                return
            with suppress(ShardLost):  # the group has ended with it
                self._advance_for_caller(engine)
        _wait_if_starving(engine)

    def next_chunk(self, states: list[RequestState], interval: int) -> StreamChunk | None:
        """Return a chunk of the first request state that has one ready (`ready_chunk`); else run a step and return None."""
        with self.lock:
            if (chunk := ready_chunk(states, interval)) is not None:
                return chunk
            engine = self.open()
            if self._end_lost(engine, (state.group for state in states)):
                return None
            with suppress(ShardLost):  # the groups have ended with it
                self._advance_for_caller(engine)
        _wait_if_starving(engine)
        return None

    def _end_lost(self, engine: Engine, groups: Iterable[RequestGroup]) -> bool:
        """End `groups` with an error if the engine has no work left that could end them. Returns whether it has none.

        An interrupt between a request's end and its delivery causes this. Call it under the lock.
        """
        if self.has_work:
            return False
        for group in groups:
            if not group.is_finished:
                self.delivery.remove(group.request_ids)
                group.end_lost(engine.core.clock())
        return True

    def finish_pending_steps(self, engine: Engine) -> None:
        """Complete the pending steps and deliver all their outputs. Call it under the lock."""
        while self.delivery.is_pending or engine.core.is_ahead:
            self._advance(engine, ahead=False)

    def abort(self, groups: Iterable[RequestGroup]) -> None:
        """Abort the unfinished of `groups`, and run steps until they have ended."""
        with self.lock:
            left = [group for group in groups if not group.is_finished]
            if self.engine is None or not left:
                return
            for group in left:
                _abort(self.engine, group)
            with suppress(ShardLost):
                while not all(group.is_finished for group in left) and not self._end_lost(self.engine, left):
                    self._advance(self.engine)

    def abort_later(self, groups: Iterable[RequestGroup]) -> None:
        """Let the next step abort the unfinished of `groups`. Never blocks."""
        self._to_abort.extend(group for group in groups if not group.is_finished)

    def abort_nowait(self, groups: Iterable[RequestGroup]) -> None:
        """Abort the unfinished of `groups`: now, or by the next step if the lock is held, perhaps by this very thread."""
        self.abort_later(groups)
        if self.is_here and self._to_abort and self.lock.acquire(blocking=False):
            try:
                with suppress(ShardLost):
                    while self.engine is not None and self._to_abort:
                        self._advance(self.engine)
            finally:
                self.lock.release()

    def _advance_for_caller(self, engine: Engine) -> None:
        """Run a step that a caller waits for."""
        try:
            self._advance(engine)
        finally:
            self._stepped_at = engine.core.clock()

    def _refresh_stats(self, engine: Engine) -> float:
        """Collect the statistics for reads during a step, if they are older than STATS_S. Returns the time."""
        now = engine.core.clock()
        if now - self._stats_at >= STATS_S:
            self._stats_at = now
            try:
                self._stats = self._collect_stats(engine)
            except Exception:  # readers get the previous statistics
                log.exception("the statistics could not be counted")
        return now

    def _advance(self, engine: Engine, ahead: bool = True) -> None:
        """Run one step and deliver its tokens and ends. After an interrupt the next call delivers the rest instead.

        Unless `ahead`, no next step is launched before this one's results are in (`EngineCore.catch_up`). Raises ShardLost,
        after it has closed the engine.
        """
        while self._to_abort:
            _abort(engine, self._to_abort.popleft())
        if not self.delivery.is_pending:
            self._refresh_stats(engine)
            self.lock.barred = threading.get_ident()  # calls from within a step raise: they would deadlock
            try:
                outputs = engine.core.step() if ahead else engine.core.catch_up()
            finally:
                self.lock.barred = None
            self.delivery.queue(outputs)
        self.delivery.deliver(engine.core, self._refresh_stats(engine))
        if (lost := engine.core.lost) is not None and self.engine is engine:
            self._end(lost)
            raise lost

    def _serve_memory(self) -> float | None:
        """Serve recalls and give back idle memory while no caller runs steps.

        Otherwise the callers' steps do it: libraries keep buffers for each thread that computes.

        Returns the longest wait for the broker, in seconds; None once closed.
        """
        with self.lock:
            if self.engine is None:
                return None
            if (lost := self.engine.core.lost) is not None:
                if self.on_lost is None:
                    self._end(lost)
                else:
                    self.on_lost(lost)  # its thread ends the engine
                return None
            if (memory := self.engine.core.memory) is None:
                return KEEPER_WAIT_S
            if memory.due and not self.paused:
                if self.engine.core.clock() - self._stepped_at < STEPPING_S:  # a caller's next step does it
                    return KEEPER_BUSY_WAIT_S
                self.finish_pending_steps(self.engine)
                self._advance(self.engine)
                return KEEPER_BUSY_WAIT_S if memory.due else KEEPER_WAIT_S
            return KEEPER_WAIT_S


def _wait_if_starving(engine: Engine) -> None:
    """If all work waits for the pool to grow, wait for the broker before the next step."""
    memory = engine.core.memory
    if memory is not None and engine.core.scheduler.starving:
        with suppress(LeaseClosed):  # the next step raises EngineClosed
            memory.wait(STARVING_WAIT_S)


def _keep_memory(reference: weakref.ref[RequestManager]) -> bool:
    """Do the engine's memory work once, then wait for a lease event. False once it is closed or garbage-collected."""
    manager = reference()
    if manager is None or (engine := manager.engine) is None:
        return False
    memory = engine.core.memory
    if memory is None and engine.team is None:
        return False
    wait_s = manager._serve_memory()
    if wait_s is None:
        return False
    del manager, engine  # during the wait this thread must not keep the engine alive
    if memory is None:
        time.sleep(wait_s)
        return True
    try:
        memory.wait(wait_s)
    except LeaseClosed:
        return False
    return True


def _record(reference: weakref.ref[RequestManager], stopped: threading.Event) -> bool:
    """Record a frame after the interval. False once the engine is closed or garbage-collected, or the recording has ended."""
    if stopped.wait(INTERVAL_S):
        return False
    manager = reference()
    return manager is not None and manager.record()


def _abort(engine: Engine, group: RequestGroup) -> None:
    for request_id in group.request_ids:
        engine.core.abort(request_id)
