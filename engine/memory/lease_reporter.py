"""Reports an engine's bytes, by class, to its lease, answers the lease's recalls and limits, and logs the outcomes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...allocator.arena import Arena
from ...allocator.lease import Lease
from ...allocator.lease_events import Denied, Event, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn
from ...allocator.lease_record import HeldBounds
from ...allocator.sharded_lease import ShardedLease
from ...common.units import format_bytes
from .base_memory import BaseMemory
from .decision import ASK_EXPIRES_S, LeaseSnapshot
from .pool_use import SchedulerPoolUse

log = logging.getLogger(__name__)

_MEASURE_S = 0.5  # interval of process memory measurements
_FREE_S = 0.1  # interval of free-memory forecasts while requests run


@dataclass(slots=True)
class MemoryStats:
    """Counters and bytes since the start."""

    recalls: int = 0
    recalled_bytes: int = 0
    grown_bytes: int = 0
    given_back_bytes: int = 0
    refused: int = 0
    lost_brokers: int = 0


class _RecallStart(NamedTuple):
    """The state when a recall arrived: what it cost is counted from here."""

    at: float
    held_bytes: int
    preemptions: int
    moved_blocks: int


class LeaseReporter:
    """Keeps an engine's lease informed. Without a lease it only measures the process.

    Args:
        pool: What requests need of the pool.
        stats: Counts recalls and lost brokers here.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        lease: Lease | ShardedLease | None,
        base: BaseMemory,
        arena: Arena,
        pool: SchedulerPoolUse,
        *,
        stats: MemoryStats,
        clock: Callable[[], float],
    ) -> None:
        self.lease = lease
        self.base = base
        self.granted_at = -math.inf  # the last message with a grant
        self._arena = arena
        self._pool = pool
        self._stats = stats
        self._clock = clock
        self._measure_at = self._free_at = -math.inf  # earliest times of the next measurement and forecast
        self._reported_use = ((0, 0), 0, True)
        self._reported_held = arena.held
        self._recall: _RecallStart | None = None  # of the running recall, or of several consecutive ones

    @property
    def is_recalled(self) -> bool:
        """Whether the outcome of a recall is still to be logged."""
        return self._recall is not None

    # ---- messages of the broker -----------------------------------------------------------------

    def receive(self, events: tuple[Event, ...]) -> None:
        """Log and count the broker's messages. The lease has applied them. Thread-safe."""
        assert self.lease is not None
        name = self.lease.name
        for event in events:
            if isinstance(event, Recalled):
                self._begin_recall(event.target_bytes)
            elif isinstance(event, Granted):
                self.granted_at = self._clock()
                log.debug("%s: granted %s", name, format_bytes(event.granted_bytes))
            elif isinstance(event, Withdrawn):
                log.info("%s: recall withdrawn; %s granted", name, format_bytes(self.lease.granted_bytes))
                self._end_recall("withdrawn")
            elif isinstance(event, Limited):
                log.info("%s: limited to %s", name, format_bytes(event.max_bytes))
            elif isinstance(event, Lost):
                self._stats.lost_brokers += not event.refused
                what = "refuses the lease" if event.refused else "is gone"
                log.warning("%s: the broker %s (%s); the pool stays as it is", name, what, event.reason)
            elif isinstance(event, Rejoined):
                log.info("%s: reconnected to a broker; %s granted", name, format_bytes(event.granted_bytes))
            elif isinstance(event, Denied):
                log.info("%s: the broker refused: %s", name, event.error)

    def _begin_recall(self, target_bytes: int) -> None:
        assert self.lease is not None
        held_bytes, stats = self.lease.held_bytes, self._pool.scheduler.stats
        self._stats.recalls += 1
        self._stats.recalled_bytes += max(0, held_bytes - target_bytes)
        if self._recall is None:
            self._recall = _RecallStart(self._clock(), held_bytes, stats.preemptions, stats.moved_blocks)
        log.info(
            "%s: recalled to %s; %s were granted, %s are held",
            self.lease.name,
            format_bytes(target_bytes),
            format_bytes(self.lease.granted_bytes),
            format_bytes(held_bytes),
        )

    def _end_recall(self, outcome: str) -> None:
        """Log the outcome of a recall, or of several consecutive ones."""
        assert self.lease is not None
        if (start := self._recall) is None:
            return
        self._recall = None
        stats, held_bytes = self._pool.scheduler.stats, self.lease.held_bytes
        log.info(
            "%s: recall %s after %.0f ms: %s given back, %s held; %d blocks moved, %d requests preempted",
            self.lease.name,
            outcome,
            (self._clock() - start.at) * 1e3,
            format_bytes(max(0, start.held_bytes - held_bytes)),
            format_bytes(held_bytes),
            stats.moved_blocks - start.moved_blocks,
            stats.preemptions - start.preemptions,
        )

    # ---- reports --------------------------------------------------------------------------------

    def after_step(self, now: float, held: HeldBounds, *, resized: bool) -> None:
        """Report what has changed. `held` are the arena's bounds; after a step that `resized` the pool all is measured."""
        if resized or now >= self._measure_at or self._is_untidy_at_rest():
            self._measure_at = now + _MEASURE_S
            self.measure_and_report(now)
        elif held != self._reported_held:
            self.report()
        elif self.lease is not None and (now >= self._free_at or not self._pool.scheduler.num_running):
            self._free_at = now + _FREE_S
            if self._use() != self._reported_use:
                self.report()

    def report_changes(self, held: HeldBounds) -> None:
        """Report again if the arena's bounds have changed to `held`."""
        if held != self._reported_held:
            self.report()

    def measure_and_report(self, now: float) -> None:
        """Measure what the process holds, free some if it has grown, and report it."""
        lease = self.lease
        room_bytes = math.inf if lease is None else lease.granted_bytes - self._arena.held.upper_bytes
        self.base.update(now, has_work=self._pool.scheduler.has_work, room_bytes=room_bytes)
        self.report()

    def report(self) -> None:
        """Report to the broker what is held, by class, and how much of it no request needs."""
        held_kv = self._reported_held = self._arena.held
        if self.lease is None:
            return
        unneeded, num_waiting, reused = self._reported_use = self._use()
        free_bytes, kept_bytes = (extents * self._arena.extent_bytes for extents in unneeded)
        weights = min(self.base.weights_bytes, self.base.num_bytes)
        held = {"weights": weights, "other": self.base.num_bytes - weights, "kv": held_kv.upper_bytes}
        moving_bytes = held_kv.upper_bytes - held_kv.lower_bytes
        self.lease.report(held, free_bytes, kept_bytes, moving_bytes=moving_bytes, num_waiting=num_waiting, reused=reused)
        if (total := sum(held.values())) > self.lease.granted_bytes:  # the process grew by other memory than KV
            # An ask takes the last one's place: what requests need stays in it.
            needed = self.base.num_bytes + self._pool.wanted_extents * self._arena.extent_bytes
            self.lease.ask(max(total, needed), expires_s=ASK_EXPIRES_S, waiting_s=self._pool.waiting_s)

    def _use(self) -> tuple[tuple[int, int], int, bool]:
        """What a report says of the pool: extents free and kept, requests that wait, and whether prefixes are reused."""
        return self._pool.unneeded_extents, self._pool.scheduler.num_waiting, self._pool.is_reused

    def _is_untidy_at_rest(self) -> bool:
        """Whether there is no work, and the heap has grown enough to be tidied."""
        return not self._pool.scheduler.has_work and self.base.measure_untidy()

    # ---- answers --------------------------------------------------------------------------------

    def answer(self, *, idle: bool, over_recall: int) -> None:
        """Return granted bytes that are not held to the broker: for a recall, for a limit, or if the engine is `idle`.

        `over_recall` are the extents that are still to be given back for a recall.
        """
        if (lease := self.lease) is None:
            return
        held, granted, recall, most = lease.held_bytes, lease.granted_bytes, lease.recall, lease.max_bytes
        least = max(held, lease.min_bytes)  # a grant does not fall below
        if recall is None and lease.connected:
            self._end_recall("served")  # the arena has answered it
        if recall is not None:
            if held <= recall.target_bytes or (recall.spares_requests and over_recall <= 0):
                if held > recall.target_bytes:
                    self.report()  # requests use by now what the last report called unneeded
                lease.answer_unmapped(max(held, recall.target_bytes))
                self._end_recall("served")
        elif most is not None and granted > (keep := max(least, most)):
            lease.answer_unmapped(keep)
        elif idle and granted > least:
            lease.answer_unmapped(held)

    def snapshot(self) -> LeaseSnapshot | None:
        """The lease as decisions see it."""
        if (lease := self.lease) is None:
            return None
        return LeaseSnapshot(
            lease.granted_bytes,
            lease.held_bytes,
            self.granted_at,
            lease.max_bytes,
            None if (recall := lease.recall) is None else recall.target_bytes,
            recall is not None and recall.spares_requests,
            lease.connected,
        )

    def lease_to_dict(self) -> dict[str, Any] | None:
        """The lease as plain data."""
        if (lease := self.lease) is None:
            return None
        return {
            "name": lease.name,
            "device": lease.device_uuid,
            "connected": lease.connected,
            "granted_bytes": lease.granted_bytes,
            "held_bytes": lease.held_bytes,
            "min_bytes": lease.min_bytes,
            "max_bytes": lease.max_bytes,
            "recall_target_bytes": None if lease.recall is None else lease.recall.target_bytes,
        }
