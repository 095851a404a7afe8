"""The engine's memory between steps: grows the pool ahead of need, gives back idle memory and serves the lease's recalls.

    before a step   lease granted? recalled? limited?  ->  scheduler.grow / give_back: the resize part of the next plan
    the step        maps, copies, unmaps (runner), each counted in the lease's record (LeasedArena)
    concurrently    the arena prepares extents for the next slice and frees unmapped ones: decision 0027
    after it        held bytes are reported, recalls are answered

The lease's grant covers all bytes of the engine. `base` is what it holds besides KV (weights, libraries, workspaces); the pool
may use the rest. `base` counts up to the lease's initial max less the largest pool. What the process holds beyond that, such as
a program's own data, is not the engine's: other engines see it as an external process's memory, and the pool does not shrink
for it.

Memory goes back in this order: prepared extents, caches of libraries, the host tier if it is in the same memory, free extents,
compaction, and for a recall only, preemption (victims.py). While requests run this happens in slices, one per step, so that
steps stay short. The host tier's memory, with its contents, also goes back after a long time without requests.

Without a lease (`share` is off, or there is no broker) the pool does the same between its own bounds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...allocator.arena import Arena
from ...allocator.errors import DriverError, GrantExceeded
from ...allocator.lease import Denied, Event, Granted, Lease, Limited, Lost, Recalled, Rejoined, Withdrawn
from ...monitor.units import GIB, MIB, format_bytes
from ...scheduler.scheduler import Scheduler
from .step_timer import StepTimer

if TYPE_CHECKING:
    from ..execution.host_pool import HostPool  # imports torch

log = logging.getLogger(__name__)

UNMAP_SLICE_BYTES = GIB  # unmapped in a step besides; takes milliseconds
READY_LIMIT_BYTES = UNMAP_SLICE_BYTES  # held but not mapped: a whole unmapped slice is freed in the background
_LOOK_S = 0.02  # interval of demand forecasts while blocks are short
_FREE_S = 0.1  # interval of free-memory forecasts while requests run
_ASK_S = 0.25  # interval of repeated asks; each expires after four intervals
_BASE_S = 0.5  # interval of process memory measurements
_REFUSED_S = 0.5  # pause of mapping, or preparing, after the device refused memory
_TRIM_S = 2.0  # minimum interval of emptying caches while the process exceeds its grant
_TIDY_S = 0.5  # minimum interval of tidying the heap while there is work,
_TIDY_BYTES = 4 * MIB  # and the growth of the process that triggers it


@dataclass(slots=True)
class MemoryStats:
    """Counters and bytes since the start. Changed by `EngineMemory` only."""

    recalls: int = 0
    recalled_bytes: int = 0
    grown_bytes: int = 0
    given_back_bytes: int = 0
    refused: int = 0
    lost_brokers: int = 0


class EngineMemory:
    """Keeps one engine's pool within its lease. Used by one thread at a time, between steps.

    Args:
        scheduler: Returns the current scheduler; a fault replaces it.
        arena: Of the pool; leased if there is a lease. It also works in the background from now on, so CUDA graphs must be
            captured before.
        min_extents: Extents that only a recall may take.
        base_bytes: Measures what the process holds besides KV.
        reserve_bytes: Additional workspaces of a step.
        weights_bytes: Of the weights, for the report by class.
        trim: Empties caches of libraries and of the attention kernel.
        tidy: Returns free heap memory to the system if the device is the host; else None.
        lease: None without a broker.
        idle_s: Time after which unneeded extents, and without requests the host tier's memory, are given back.
        host: The host tier's memory; None without one.
        host_is_device: The pool is in host memory too.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Callable[[], Scheduler],
        arena: Arena,
        *,
        min_extents: int,
        base_bytes: Callable[[], int],
        reserve_bytes: int,
        weights_bytes: int,
        trim: Callable[[], None],
        tidy: Callable[[], None] | None = None,
        lease: Lease | None,
        idle_s: float,
        host: HostPool | None = None,
        host_is_device: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self.stats = MemoryStats()
        self._closed = threading.Event()
        self._scheduler = scheduler
        self._arena = arena
        self._extent_bytes = arena.extent_bytes
        self._min_extents = min_extents
        self._base_bytes_now = base_bytes
        self._weights_bytes = weights_bytes
        self._trim = partial(_tried, trim)
        self._tidy = None if tidy is None else partial(_tried, tidy)
        self._idle_s = idle_s
        self._host = host
        self._host_is_device = host_is_device
        self._clock = clock
        self._measured_bytes = base_bytes()
        self._unmeasured = False  # the last measurement failed
        self._planned_bytes = self._measured_bytes + reserve_bytes
        self._base_bytes = self._planned_bytes
        self._mapped_bytes = arena.mapped_bytes
        self._look_at = self._ask_at = self._base_at = self._free_at = self._grow_at = self._ready_at = 0.0
        self._trim_at = self._tidy_at = -math.inf  # earliest times of the next trim and tidy
        self._least_bytes: float = math.inf  # smallest measurement since the last of these
        self._asked = 0  # extents in the last ask; 0 after it was withdrawn
        self._told_free = 0  # extents last reported as free
        self._told_held = arena.held  # as last reported
        self._needed_at = clock()  # the last time that all mapped extents were needed
        self._relieving = False  # the next plan gives back what no request needs now
        self._timer = StepTimer(
            arena.extent_bytes, arena.extent_bytes // scheduler().cache.blocks_per_extent, self._needed_at
        )
        self._trimmed_for: int | None = None  # target of the recall for which caches were emptied
        # Of the running recall: its time, the bytes held then, `_counted`.
        self._recall_from: tuple[float, int, tuple[int, int]] | None = None
        self._most_base_bytes: float = math.inf
        if lease is not None:
            self._begin_lease(lease)
        self._report()

    def _begin_lease(self, lease: Lease) -> None:
        """Lower the guaranteed minimum to what is needed after loading, and bound what is counted beside the pool."""
        lease.lower_min(min(lease.min_bytes, self._planned_bytes + self._min_extents * self._extent_bytes))
        if lease.max_bytes is not None:
            pool_bytes = self._arena.num_extents * self._extent_bytes
            self._most_base_bytes = max(self._planned_bytes, lease.max_bytes - pool_bytes)

    # ---- before a step --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Decide what the next plan maps and unmaps. Call it before the step is scheduled."""
        now = self._clock()
        self._listen()
        self._let_go()
        scheduler = self._scheduler()
        self._limit(scheduler)
        self._timer.begin(now, in_use=_in_use(scheduler))
        if self._host_idle(scheduler):
            self._rest_host(scheduler)
        if self._relieving:
            self._relieving = False
            self._grow_at = self._ready_at = now + _REFUSED_S
            spare = min(self._spare(scheduler), scheduler.num_extents - self._min_extents)
            scheduler.give_back(max(0, spare))
            self._make_ready(0)
            return
        if self._recalled(scheduler) or self._shed_excess(scheduler):
            self._make_ready(0)
            return
        if self._short(scheduler) and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._grow(scheduler, now)
        elif now - self._needed_at >= self._idle_s and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._rest(scheduler, now)

    def relieve(self) -> None:
        """Give back with the next plan what no request needs now: a step deferred chunks, perhaps for lack of memory."""
        self._relieving = True

    @property
    def wants_turn(self) -> bool:
        """Whether `prepare` must run before another step is planned. Handles the broker's messages."""
        self._listen()
        scheduler, now = self._scheduler(), self._clock()
        self._limit(scheduler)
        if self._relieving or self._over_recall(scheduler) > 0 or self._host_idle(scheduler):
            return True
        if self._excess(scheduler) > 0 and scheduler.idle_extents:
            return True
        if now < self._look_at:
            return False
        may_grow = scheduler.num_extents < self._arena.num_extents and self._short(scheduler)
        return may_grow or now - self._needed_at >= self._idle_s

    @property
    def due(self) -> bool:
        """Whether memory work needs a step although no request does. Handles the broker's messages."""
        self._listen()
        scheduler = self._scheduler()
        self._limit(scheduler)
        self._let_go()
        if self._arena.held != self._told_held:
            self._tell()
        if self._over_recall(scheduler) > 0:
            return True
        self._answer()  # a recall of granted but unmapped memory needs no step
        if self._excess(scheduler) > 0 and scheduler.idle_extents:
            return True
        if self._host_idle(scheduler):
            return True
        may_rest = scheduler.num_extents > self._min_extents and self._clock() - self._needed_at >= self._idle_s
        return may_rest and scheduler.idle_extents > 0

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a message of the broker. Thread-safe. Raises LeaseClosed."""
        if self.lease is None:
            self._closed.wait(timeout_s)
        else:
            self._take_in(self.lease.wait(timeout_s))

    def close(self) -> None:
        """Wake the threads in `wait` if there is no lease. A lease wakes them itself when it is closed."""
        self._closed.set()

    def _listen(self) -> None:
        if self.lease is not None:
            self._take_in(self.lease.poll())

    def _take_in(self, events: tuple[Event, ...]) -> None:
        """Log and count the broker's messages. The lease has applied them."""
        assert self.lease is not None
        name = self.lease.name
        for event in events:
            if isinstance(event, Recalled):
                self.stats.recalls += 1
                self._recall_from = self._recall_from or (self._clock(), self.lease.held_bytes, self._counted())
                self.stats.recalled_bytes += max(0, self.lease.held_bytes - event.target_bytes)
                log.info(
                    "%s: recalled to %s; %s were granted, %s are held", name, format_bytes(event.target_bytes),
                    format_bytes(self.lease.granted_bytes), format_bytes(self.lease.held_bytes),
                )  # fmt: skip
            elif isinstance(event, Granted):
                self._look_at = 0.0  # the next `prepare` may grow the pool
                log.debug("%s: granted %s", name, format_bytes(event.granted_bytes))
            elif isinstance(event, Withdrawn):
                log.info("%s: the recall is withdrawn; %s granted", name, format_bytes(self.lease.granted_bytes))
                self._tell_outcome("withdrawn")
            elif isinstance(event, Limited):
                log.info("%s: limited to %s", name, format_bytes(event.max_bytes))
            elif isinstance(event, Lost):
                self.stats.lost_brokers += not event.refused
                what = "refuses the lease" if event.refused else "is gone"
                log.warning("%s: the broker %s (%s); the pool stays as it is", name, what, event.reason)
            elif isinstance(event, Rejoined):
                log.info("%s: a broker is back; %s granted", name, format_bytes(event.granted_bytes))
            elif isinstance(event, Denied):
                log.info("%s: the broker refused: %s", name, event.error)

    def _allowed_extents(self) -> int:
        """Extents that the lease allows now; without one, all. At least one, for the null block."""
        if self.lease is None:
            return self._arena.num_extents
        recall = self.lease.recall
        allowed = self.lease.granted_bytes if recall is None else min(self.lease.granted_bytes, recall.target_bytes)
        return self._extents_in(allowed)

    def _extents_in(self, total_bytes: int) -> int:
        """Extents of the largest pool with which the engine holds at most `total_bytes`, at least one."""
        return min(self._arena.num_extents, max(1, (total_bytes - self._base_bytes) // self._extent_bytes))

    def _limit(self, scheduler: Scheduler) -> None:
        """Limit the scheduler's admissions to the lease's max."""
        most = None if self.lease is None else self.lease.max_bytes
        extents = self._arena.num_extents if most is None else self._extents_in(most)
        blocks = min(scheduler.cache.capacity, extents * scheduler.cache.blocks_per_extent - 1)
        if blocks != scheduler.limit_blocks:
            scheduler.limit_blocks = blocks

    def _over_recall(self, scheduler: Scheduler) -> int:
        """Extents to give back for a recall; 0 or less if there is none, or if they are already being given back."""
        recall = None if self.lease is None else self.lease.recall
        return 0 if recall is None else scheduler.num_extents - self._extents_in(recall.target_bytes)

    def _recalled(self, scheduler: Scheduler) -> bool:
        """Serve a recall, one slice while requests run. Returns whether the pool is above its target."""
        over = self._over_recall(scheduler)
        if over <= 0:
            return False
        assert self.lease is not None and self.lease.recall is not None
        if self._trimmed_for != self.lease.recall.target_bytes:  # caches first: that costs no request
            self._trimmed_for = self.lease.recall.target_bytes
            self._trim()
            self._report()
            over = self._over_recall(scheduler)
            if over <= 0:
                return False
        if self._host is not None and self._host_is_device and self._host.mapped_bytes:
            self._rest_host(scheduler)  # the host tier is in the recalled memory
        scheduler.make_idle(over)
        scheduler.give_back(min(over, self._unmap_slice(scheduler)))
        return True

    def _shed_excess(self, scheduler: Scheduler) -> bool:
        """Give back idle extents above a limit, without preemption; the rest follows as requests end."""
        over = self._excess(scheduler)
        return over > 0 and scheduler.give_back(min(over, self._unmap_slice(scheduler))) > 0

    def _excess(self, scheduler: Scheduler) -> int:
        """Extents above a limit, or above the grant if the process has outgrown it by whole extents.

        Excludes extents that running requests are forecast to need: without these they would be preempted.
        """
        excess = scheduler.excess_extents
        if self.lease is not None and self.lease.connected:
            outgrown = (self.lease.held_bytes - self.lease.granted_bytes) // self._extent_bytes
            excess = max(excess, min(outgrown, scheduler.num_extents - self._min_extents))
        if excess and scheduler.num_running:
            excess = min(excess, self._spare(scheduler))
        return excess

    def _spare(self, scheduler: Scheduler) -> int:
        """Extents that running requests are not forecast to need; negative if they need more than there are."""
        return scheduler.num_extents - self._extents_for(scheduler, scheduler.running_blocks())

    def _map_slice(self, scheduler: Scheduler) -> int:
        """Extents that may be mapped in the next step: a slice while requests run, else all."""
        if self._timer.alone or not scheduler.num_running:
            return self._arena.num_extents
        return max(1, self._timer.mapping.num_bytes // self._extent_bytes)

    def _unmap_slice(self, scheduler: Scheduler) -> int:
        """Unneeded extents that may be given back in the next step: as many as require about a slice of block moves.

        Extents are indivisible, so up to half a slice more may move: slices that are never filled would take many more steps.
        """
        if self._timer.alone or not scheduler.num_running:
            return self._arena.num_extents
        cache = scheduler.cache
        plan = cache.plan_shrink(max(1, UNMAP_SLICE_BYTES // self._extent_bytes))
        most = max(1, 3 * self._timer.copying.num_bytes * cache.blocks_per_extent // (2 * self._extent_bytes))
        if len(plan.moves) <= most:
            return max(1, len(plan.extents))
        too_far = plan.moves[most] // cache.blocks_per_extent  # moves are ordered by extent
        return max(1, plan.extents.tolist().index(too_far))

    def _short(self, scheduler: Scheduler) -> bool:
        """Whether blocks may soon be short: a request waits, or fewer blocks are free than sequences run."""
        return bool(scheduler.num_waiting or scheduler.cache.num_free < scheduler.num_running)

    def _grow(self, scheduler: Scheduler, now: float) -> None:
        """Map what is forecast to be needed, within the grant. Ask the broker for the rest."""
        wanted = self._wanted_extents(scheduler)
        missing = wanted - scheduler.num_extents
        if missing >= 0:
            self._needed_at = now
        room = self._allowed_extents() - scheduler.num_extents
        coming = max(0, min(missing, room)) if now >= self._grow_at else 0
        mapping = min(coming, self._map_slice(scheduler))
        grown = scheduler.grow(mapping)
        following = min(coming - grown, mapping) if grown == mapping else 0  # fewer: a limit applies
        self._make_ready(grown + following if now >= self._ready_at else 0)
        if self.lease is None:
            return
        if missing > max(0, room):
            if wanted != self._asked or now >= self._ask_at:
                self._asked, self._ask_at = wanted, now + _ASK_S
                self.lease.ask(self._base_bytes + wanted * self._extent_bytes, expires_s=4 * _ASK_S)
        elif self._asked > wanted:
            self._take_back_ask()

    def _take_back_ask(self) -> None:
        """Withdraw the last ask: no request needs more than is held."""
        assert self.lease is not None
        self._asked = 0
        self.lease.ask(self.lease.held_bytes, expires_s=_LOOK_S)

    def _make_ready(self, num_extents: int) -> None:
        """Have the arena prepare memory for the next `num_extents` to map, in the background; it frees any surplus."""
        if not num_extents and self._arena.held.upper_bytes == self._arena.mapped_bytes:
            return
        try:
            self._arena.prepare(num_extents)
        except (DriverError, GrantExceeded) as error:  # GrantExceeded: the broker has just gone
            self._ready_at = self._clock() + _REFUSED_S
            log.info("KV pool: nothing is made ready: %s", error)

    def _let_go(self) -> None:
        """Free prepared extents during a recall, or if blocks are not short. Log the arena's background failures."""
        if self._arena.held.upper_bytes > self._arena.mapped_bytes:
            if self.lease is not None and self.lease.recall is not None:
                try:
                    self._arena.trim()
                except DriverError as error:  # the rest stays counted and is tried again
                    log.warning("KV pool: not all of what was unmapped went back: %s", error)
            elif not self._short(self._scheduler()):
                self._make_ready(0)
        for failure in self._arena.drain_failures():
            self._ready_at = self._clock() + _REFUSED_S
            log.warning("KV pool: in the background %s", failure)

    def _rest(self, scheduler: Scheduler, now: float) -> None:
        """Give back extents that no request has needed for `idle_s`."""
        wanted = max(self._min_extents, self._wanted_extents(scheduler))
        spare = scheduler.num_extents - wanted
        if spare <= 0:
            self._needed_at = now
        elif not scheduler.give_back(min(spare, self._unmap_slice(scheduler))):
            self._needed_at = now  # none of them is idle: try again after another `idle_s`

    def _host_idle(self, scheduler: Scheduler) -> bool:
        """Whether the host tier has memory and there has been no request for `idle_s`."""
        if self._host is None or not self._host.mapped_bytes or _in_use(scheduler):
            return False
        return self._clock() - self._timer.used_at >= self._idle_s

    def _rest_host(self, scheduler: Scheduler) -> None:
        """Give back a slice of the host tier's memory. The tier's contents are dropped, like cached prefixes on the device."""
        assert self._host is not None
        scheduler.cache.rest()
        self._host.give_back(UNMAP_SLICE_BYTES)

    def _wanted_extents(self, scheduler: Scheduler) -> int:
        """Extents for the forecast demand, plus one."""
        wanted = scheduler.wanted_blocks()
        extents = self._extents_for(scheduler, wanted) + 1 if wanted else self._min_extents
        return min(extents, self._arena.num_extents)

    def _extents_for(self, scheduler: Scheduler, blocks: int) -> int:
        """Extents for `blocks` and the null block."""
        return -(-(blocks + 1) // scheduler.cache.blocks_per_extent)

    # ---- after a step ---------------------------------------------------------------------------

    def after_step(self, waited_for: bool = True) -> None:
        """Account for what a step did to the pool: report it and answer a recall.

        A step that no caller has `waited_for` does not count as caller activity (`StepTimer.alone`).
        """
        self._let_go()
        mapped = self._arena.mapped_bytes
        now = self._clock()
        changed = mapped != self._mapped_bytes
        self._timer.end(
            now, waited_for=waited_for, moved_blocks=self._scheduler().stats.moved_blocks,
            mapped_bytes=mapped - self._mapped_bytes,
        )  # fmt: skip
        if changed:
            self.stats.grown_bytes += max(0, mapped - self._mapped_bytes)
            self.stats.given_back_bytes += max(0, self._mapped_bytes - mapped)
            if self._recall_from is None:
                self._tell_change(mapped)
            self._mapped_bytes = mapped
        if (refused := self._scheduler().stats.refused_resizes) != self.stats.refused:
            self.stats.refused = refused
            self._grow_at = now + _REFUSED_S
        if changed or now >= self._base_at or self._rests_untidy():
            self._base_at = now + _BASE_S
            self._report()
        elif self._arena.held != self._told_held:
            self._tell()
        elif self.lease is not None and (now >= self._free_at or not self._scheduler().num_running):
            self._free_at = now + _FREE_S
            if self._free_extents() != self._told_free:
                self._tell()
        if self._asked and self.lease is not None and not self._short(self._scheduler()):
            self._take_back_ask()
        self._answer()

    def _tell_change(self, mapped: int) -> None:
        scheduler = self._scheduler()
        if mapped > self._mapped_bytes:
            why = f"for {scheduler.num_running:,} requests that run and {scheduler.num_waiting:,} that wait"
        elif self._clock() - self._needed_at >= self._idle_s:
            why = f"which nobody has needed for {self._idle_s:g} s"
        else:
            why = "as the lease is limited, or the process has outgrown it"
        did = "grown" if mapped > self._mapped_bytes else "given back"
        log.info(
            "KV pool: %s %s, %s; %s now", format_bytes(abs(mapped - self._mapped_bytes)), did, why, format_bytes(mapped)
        )  # fmt: skip

    def _counted(self) -> tuple[int, int]:
        """The counters of a recall's costs: preemptions and moved blocks."""
        stats = self._scheduler().stats
        return stats.preemptions, stats.moved_blocks

    def _tell_outcome(self, what: str) -> None:
        """Log the outcome of a recall, or of several consecutive ones."""
        if self._recall_from is None or self.lease is None:
            return
        began, held, before = self._recall_from
        self._recall_from = None
        preemptions, moved = (now - then for now, then in zip(self._counted(), before, strict=True))
        log.info(
            "%s: recall %s after %.0f ms: %s given back, %s held; %d blocks moved, %d requests preempted", self.lease.name,
            what, (self._clock() - began) * 1e3, format_bytes(max(0, held - self.lease.held_bytes)),
            format_bytes(self.lease.held_bytes), moved, preemptions,
        )  # fmt: skip

    def _free_extents(self) -> int:
        """Extents that no request is forecast to need; blocks in use may have to move out of them first."""
        scheduler = self._scheduler()
        needed = max(self._min_extents, self._extents_for(scheduler, scheduler.wanted_blocks()))
        return max(0, scheduler.num_extents - needed)

    def _report(self) -> None:
        """Measure what is held and report it to the broker. If it has grown, tidy the heap and empty caches first.

        The heap keeps what steps have freed, and temporaries of varying sizes fragment it.
        """
        lease, now = self.lease, self._clock()
        measured = self._measure()
        due = now >= self._tidy_at or not self._scheduler().has_work
        if self._tidy is not None and measured > self._least_bytes + _TIDY_BYTES and due:
            self._tidy_at = now + _TIDY_S
            self._tidy()
            self._least_bytes = measured = self._measure()
        self._least_bytes = min(self._least_bytes, measured)
        self._base_bytes = self._counted_base(measured)
        outgrown = lease is not None and self._base_bytes + self._arena.held.upper_bytes > lease.granted_bytes
        if outgrown and self._base_bytes > self._planned_bytes and now >= self._trim_at:
            self._trim_at = now + _TRIM_S
            self._trim()
            self._least_bytes = measured = self._measure()
            self._base_bytes = self._counted_base(measured)
        self._tell()

    def _measure(self) -> int:
        """Bytes held besides the pool. If measuring fails, as without a free file descriptor, the last measurement."""
        try:
            self._measured_bytes, self._unmeasured = self._base_bytes_now(), False
        except Exception:
            if not self._unmeasured:
                log.warning("the memory of this process cannot be measured", exc_info=True)
            self._unmeasured = True
        return self._measured_bytes

    def _rests_untidy(self) -> bool:
        """Whether there is no work, and the heap has grown by more than _TIDY_BYTES."""
        if self._tidy is None or self._scheduler().has_work:
            return False
        return self._measure() > self._least_bytes + _TIDY_BYTES

    def _counted_base(self, measured_bytes: int) -> int:
        return int(min(max(self._planned_bytes, measured_bytes), self._most_base_bytes))

    def _tell(self) -> None:
        """Report to the broker what is held, by class, and how much of it can be freed without touching a request."""
        held_kv = self._told_held = self._arena.held
        if self.lease is None:
            return
        self._told_free = self._free_extents()
        free = self._told_free * self._extent_bytes
        weights = min(self._weights_bytes, self._base_bytes)
        held = {"weights": weights, "other": self._base_bytes - weights, "kv": held_kv.upper_bytes}
        self.lease.report(held, free, moving_bytes=held_kv.upper_bytes - held_kv.lower_bytes)
        if (total := sum(held.values())) > self.lease.granted_bytes:  # the process grew by other memory than KV
            self.lease.ask(total, expires_s=4 * _ASK_S)

    def _answer(self) -> None:
        """Return to the broker granted bytes that are not held: for a recall, for a limit, or when idle for `idle_s`."""
        if self.lease is None:
            return
        held, granted = self.lease.held_bytes, self.lease.granted_bytes
        recall, most = self.lease.recall, self.lease.max_bytes
        least = max(held, self.lease.min_bytes)  # a grant does not fall below
        if recall is not None:
            if held <= recall.target_bytes:
                self.lease.answer_unmapped(recall.target_bytes)
                self._tell_outcome("served")
        elif most is not None and granted > (keep := max(least, most)):
            self.lease.answer_unmapped(keep)
        elif granted > least and self._clock() - self._needed_at >= self._idle_s:
            self.lease.answer_unmapped(held)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats`."""
        lease = self.lease
        stats = self.stats
        return {
            "base_bytes": self._base_bytes,
            "kv_bytes": self._arena.mapped_bytes,
            "ready_bytes": self._arena.held.upper_bytes - self._arena.mapped_bytes,
            "map_slice_bytes": self._timer.mapping.num_bytes,  # most that a step maps while requests run
            "lease": None
            if lease is None
            else {
                "name": lease.name,
                "device": lease.device_uuid,
                "connected": lease.connected,
                "granted_bytes": lease.granted_bytes,
                "held_bytes": lease.held_bytes,
                "min_bytes": lease.min_bytes,
                "max_bytes": lease.max_bytes,
                "recall_target_bytes": None if lease.recall is None else lease.recall.target_bytes,
            },
            "recalls": stats.recalls,
            "recalled_bytes": stats.recalled_bytes,
            "grown_bytes": stats.grown_bytes,
            "given_back_bytes": stats.given_back_bytes,
            "refused_resizes": stats.refused,
            "lost_brokers": stats.lost_brokers,
        }


def _tried(free: Callable[[], None]) -> None:
    """Call `free`; log an exception instead of raising it."""
    try:
        free()
    except Exception:
        log.warning("memory that libraries keep could not be freed", exc_info=True)


def _in_use(scheduler: Scheduler) -> bool:
    """Whether any request is running or waiting."""
    return bool(scheduler.num_running or scheduler.num_waiting)
