"""The engine's memory between steps: grows the pool ahead of need, gives back idle memory and serves the lease's recalls.

    before a step   the broker's messages ─► MemoryView ─► decide (decision.py) ─► PoolAction: the resize part of the next plan
    the step        maps, copies, unmaps (runner), each counted in the lease's record (LeasedArena)
    concurrently    the arena prepares extents for the next slice and frees unmapped ones: decision 0027
    after it        slices are learned (StepTimer), held bytes are reported, recalls are answered (LeaseReporter)

The lease's grant covers all bytes of the engine. `base` is what it holds besides KV; the pool may use the rest. `base`
counts up to the lease's initial max less the largest pool. The pool does not shrink for what the process holds beyond
that, such as a program's own data.

Memory goes back in this order: prepared extents, caches of libraries, the host tier if it is in the same memory, free extents,
compaction; for a recall sequences are preempted first, as many as it takes (preemption.py). While requests run extents leave in
slices, one per step, so that steps stay short.

Without a lease the pool does the same between its own bounds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ...allocator.arena import Arena
from ...allocator.errors import DriverError, GrantExceeded
from ...allocator.lease import Lease
from ...allocator.lease_record import HeldBounds
from ...allocator.leased_arena import LeasedArena
from ...allocator.sharded_lease import ShardedLease
from ...common.units import GIB, format_bytes
from .base_memory import BaseMemory
from .decision import ASK_EXPIRES_S, LOOK_S, DecisionState, MemoryView, PoolAction, decide, needs_step, wants_turn
from .lease_reporter import LeaseReporter, MemoryStats
from .pool_use import SchedulerPoolUse
from .step_timer import StepTimer

log = logging.getLogger(__name__)

REST_SLICE_BYTES = GIB  # of the host tier's memory, given back at a time
# Margin of forecasts (without a lease: 2): a leased pool can still grow, and the margins of all engines of a device add up
SHARED_DEVIATIONS = 1.0
READY_LIMIT_BYTES = GIB  # held but not mapped: freed in the background


class HostMemory(Protocol):
    """The memory of a host tier: see `HostPool`."""

    @property
    def mapped_bytes(self) -> int:
        """Host memory allocated now."""

    def give_back(self, num_bytes: int) -> None:
        """Free up to `num_bytes`, which must be unused."""


class EngineMemory:
    """Keeps one engine's pool within its lease. Used by one thread at a time, between steps.

    Args:
        arena: Of the pool; leased if there is a lease. It also works in the background from now on, so CUDA graphs must be
            captured before.
        base: What the process holds besides.
        lease: None without a broker.
        host: The host tier's memory, if there is one.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        pool: SchedulerPoolUse,
        arena: Arena,
        base: BaseMemory,
        *,
        lease: Lease | ShardedLease | None,
        host: HostMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now, extent_bytes, min_extents = clock(), arena.extent_bytes, pool.bounds.min_extents
        if lease is not None:
            # The minimum that is guaranteed covered what loading might take.
            lease.lower_min(min(lease.min_bytes, base.planned_bytes + min_extents * extent_bytes))
            if lease.max_bytes is not None:
                base.most_bytes = max(base.planned_bytes, lease.max_bytes - arena.num_extents * extent_bytes)
            pool.scheduler.state.forecast.deviations = SHARED_DEVIATIONS
        self.stats = MemoryStats()
        self._closed = threading.Event()
        self._arena = arena
        self._host = host
        self._clock = clock
        self._pool = pool
        self._timer = StepTimer(extent_bytes, extent_bytes // pool.scheduler.cache.pool.blocks_per_extent, now)
        self._state = DecisionState(needed_at=now)
        self._mapped_bytes = arena.mapped_bytes  # after the last step
        self._reporter = LeaseReporter(lease, base, arena, pool, stats=self.stats, clock=clock)
        self._reporter.measure_and_report(now)

    @property
    def lease(self) -> Lease | ShardedLease | None:
        """The engine's lease; None without a broker."""
        return self._reporter.lease

    # ---- before a step --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Decide what the next plan maps and unmaps. Call it before the step is scheduled."""
        self._receive()
        now = self._clock()
        self._timer.begin(now, in_use=self._pool.has_requests)
        self._release_prepared()
        view = self._view()
        self._limit(view.limit_extents)
        action = decide(view, now)
        if action.trim:
            self._state = action.state
            self._reporter.base.trim()
            self._reporter.measure_and_report(now)
            action = decide(self._view(), now)
        self._apply(action)

    def relieve(self) -> None:
        """Give back with the next plan what no request needs now: a step deferred chunks, perhaps for lack of memory."""
        self._state = replace(self._state, relieving=True)

    @property
    def wants_turn(self) -> bool:
        """Whether `prepare` must run before another step is planned. Handles the broker's messages."""
        self._receive()
        view = self._view()
        self._limit(view.limit_extents)
        return wants_turn(view, self._clock())

    @property
    def due(self) -> bool:
        """Whether memory work needs a step although no request does. Handles the broker's messages."""
        now = self._clock()
        self._receive()
        self._reporter.report_changes(self._release_prepared())
        view = self._view()
        self._limit(view.limit_extents)
        if view.over_recall <= 0:  # a recall of granted but unmapped memory needs no step
            self._reporter.answer(idle=self._is_idle(now), over_recall=0)
        return needs_step(view, now)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a message of the broker. Thread-safe. Raises LeaseClosed."""
        if self.lease is None:
            self._closed.wait(timeout_s)
        else:
            self._reporter.receive(self.lease.wait(timeout_s))

    def close(self) -> None:
        """Wake the threads in `wait` if there is no lease. A lease wakes them itself when it is closed."""
        self._closed.set()

    def _receive(self) -> None:
        """Handle the broker's messages."""
        if (lease := self._reporter.lease) is not None and (events := lease.poll()):
            self._reporter.receive(events)

    def _view(self) -> MemoryView:
        """Everything that a decision depends on."""
        bounds, timer, reporter = self._pool.bounds, self._timer, self._reporter
        return MemoryView(
            bounds,
            self._state,
            self._pool,
            max(1, timer.mapping.num_bytes // bounds.extent_bytes),
            timer.alone,
            reporter.base.num_bytes,
            reporter.snapshot(),
            0 if self._host is None else self._host.mapped_bytes,
            timer.used_at,
        )

    def _limit(self, num_extents: int) -> None:
        """Let the scheduler admit no request beyond `num_extents`."""
        scheduler = self._pool.scheduler
        cache = scheduler.cache
        blocks = min(cache.pool.capacity, num_extents * cache.pool.blocks_per_extent - 1)
        if blocks != scheduler.pool.limit_blocks:
            scheduler.pool.limit_blocks = blocks

    def _apply(self, action: PoolAction) -> None:
        """Do what was decided, in the order of `PoolAction`."""
        scheduler, self._state = self._pool.scheduler, action.state
        if action.rest_host:
            assert self._host is not None
            scheduler.cache.swapping.rest()  # drops the tier's contents, like cached prefixes on the device
            self._host.give_back(REST_SLICE_BYTES)
        if action.make_idle:
            scheduler.pool.make_idle(action.make_idle)
        if isinstance(self._arena, LeasedArena):
            self._arena.answers_at_bytes = None
        if action.give_back:
            self._give_back(action.give_back, at_once=action.at_once)
        if action.grow:
            scheduler.pool.grow(action.grow)
        if action.prepare is not None:
            self._prepare_extents(action.prepare)
        if action.ask is not None:
            assert self.lease is not None
            target, keep = (
                self._reporter.base.num_bytes + extents * self._pool.bounds.extent_bytes
                for extents in (action.ask, action.keep)
            )
            self.lease.ask(target, expires_s=ASK_EXPIRES_S, waiting_s=self._pool.waiting_s, keep_bytes=keep)
        elif action.withdraw_ask:
            self._withdraw_ask()

    def _give_back(self, num_extents: int, *, at_once: bool) -> None:
        """Give back `num_extents` with the next plan, or a slice of them. A recall for which that is all is answered there."""
        arena, lease, pool = self._arena, self.lease, self._pool.scheduler.pool
        recalled = lease is not None and lease.recall is not None and isinstance(arena, LeasedArena)
        if recalled:
            self._reporter.report()  # what is unneeded now: the answer comes before the step's report
        given = pool.give_back(num_extents if at_once else self._unmap_slice(num_extents))
        if recalled and given >= num_extents:
            assert lease is not None and isinstance(arena, LeasedArena)
            arena.answers_at_bytes = lease.held_bytes - given * arena.extent_bytes

    def _unmap_slice(self, num_extents: int) -> int:
        """Of `num_extents`, those to give back in the next step: a slice, with about a slice of block moves.

        Extents are indivisible, so up to half a slice more may move: slices that are never filled would take many more steps.
        """
        scheduler, extent_bytes = self._pool.scheduler, self._pool.bounds.extent_bytes
        if self._timer.alone or not scheduler.num_running:
            return num_extents
        cache = scheduler.cache
        plan = cache.resizer.plan_shrink(max(1, self._timer.unmapping.num_bytes // extent_bytes))
        most = max(1, 3 * self._timer.copying.num_bytes * cache.pool.blocks_per_extent // (2 * extent_bytes))
        if len(plan.moves) <= most:
            return min(num_extents, max(1, len(plan.extents)))
        too_far = plan.moves[most] // cache.pool.blocks_per_extent  # moves are ordered by extent
        return min(num_extents, max(1, plan.extents.tolist().index(too_far)))

    def _prepare_extents(self, num_extents: int) -> None:
        """Have the arena prepare memory for the next `num_extents` to map, in the background; it frees any surplus."""
        if not num_extents and self._arena.held.upper_bytes == self._arena.mapped_bytes:
            return
        try:
            self._arena.prepare(num_extents)
        except (DriverError, GrantExceeded) as error:  # GrantExceeded: the broker has just gone
            self._pause_preparing()
            log.info("KV pool: no memory is prepared ahead: %s", error)

    def _release_prepared(self) -> HeldBounds:
        """Free prepared extents during a recall, or if blocks are not short. Returns what the arena holds afterwards.

        Logs the arena's background failures.
        """
        held, lease = self._arena.held, self._reporter.lease
        if held.upper_bytes > self._arena.mapped_bytes:
            if lease is not None and lease.recall is not None:
                try:
                    self._arena.trim()
                except DriverError as error:  # the rest stays counted and is tried again
                    log.warning("KV pool: some unmapped memory was not released: %s", error)
            elif not self._pool.is_short:
                self._prepare_extents(0)
            held = self._arena.held
        for failure in self._arena.drain_failures():
            self._pause_preparing()
            log.warning("KV pool: in the background %s", failure)
        return held

    def _pause_preparing(self) -> None:
        self._state = replace(self._state, prepare_refused_at=self._clock())

    def _withdraw_ask(self) -> None:
        """Withdraw the last ask: no request needs more than is held."""
        assert self.lease is not None
        self.lease.ask(self.lease.held_bytes, expires_s=LOOK_S)

    # ---- after a step ---------------------------------------------------------------------------

    def after_step(self, waited_for: bool = True) -> None:
        """Account for what a step did to the pool: report it and answer a recall.

        A step that no caller has `waited_for` does not count as caller activity (`StepTimer.alone`).
        """
        held = self._release_prepared()
        now, stats = self._clock(), self._pool.scheduler.stats
        change = (mapped := self._arena.mapped_bytes) - self._mapped_bytes
        self._mapped_bytes = mapped
        self._timer.end(now, stats, waited_for=waited_for, mapped_bytes=change)
        if change:
            self.stats.grown_bytes += max(0, change)
            self.stats.given_back_bytes += max(0, -change)
            if not self._reporter.is_recalled:
                self._log_change(change, now)
        if stats.refused_resizes != self.stats.refused:
            self.stats.refused = stats.refused_resizes
            self._state = replace(self._state, map_refused_at=now)
        self._reporter.after_step(now, held, resized=change != 0)
        if self._state.asked_extents and not self._pool.is_short:
            self._state = replace(self._state, asked_extents=0)
            self._withdraw_ask()
        over_recall = 0 if self.lease is None or self.lease.recall is None else self._view().over_recall
        self._reporter.answer(idle=self._is_idle(now), over_recall=over_recall)

    def _log_change(self, change: int, now: float) -> None:
        """Log a change of the pool's bytes, outside a recall."""
        scheduler = self._pool.scheduler
        if change > 0:
            why = f"for {scheduler.num_running:,} requests that run and {scheduler.num_waiting:,} that wait"
        elif self._is_idle(now):
            why = f"which no request has needed for {self._pool.bounds.unneeded_s:g} s"
        else:
            why = "as the lease is limited, or the process has outgrown it"
        did = "grown" if change > 0 else "given back"
        size, now_mapped = format_bytes(abs(change)), format_bytes(self._mapped_bytes)
        log.info("KV pool: %s %s, %s; %s now", size, did, why, now_mapped)

    def _is_idle(self, now: float) -> bool:
        return self._view().is_idle(now)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats`."""
        stats, mapped_bytes = self.stats, self._arena.mapped_bytes
        return {
            "base_bytes": self._reporter.base.num_bytes,
            "kv_bytes": mapped_bytes,
            "ready_bytes": self._arena.held.upper_bytes - mapped_bytes,
            "map_slice_bytes": self._timer.mapping.num_bytes,  # most that a step maps while requests run
            "lease": self._reporter.lease_to_dict(),
            "recalls": stats.recalls,
            "recalled_bytes": stats.recalled_bytes,
            "grown_bytes": stats.grown_bytes,
            "given_back_bytes": stats.given_back_bytes,
            "refused_resizes": stats.refused,
            "lost_brokers": stats.lost_brokers,
        }
