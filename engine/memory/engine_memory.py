"""The engine's memory between steps: the pool grows ahead of need, gives back when idle, and serves what the lease recalls.

    before a step   lease granted? recalled? limited?  ->  scheduler.grow / give_back: the resize part of the next plan
    the step        maps, copies, unmaps (runner), each counted in the lease's record (LeasedArena)
    beside it       the arena makes extents for the next slice, and gives back those that are unmapped: decision 0027
    after it        what is held is reported, recalls are answered

What a lease grants covers all bytes of the engine: `base` is what it holds besides KV (weights, libraries, workspaces), and
the pool may have what is left. What its process holds beyond what was promised for it, as a program that keeps data of its own
does, is not the engine's: others see it as a stranger's memory, and it takes nothing from the pool.

Bytes go back in this order: what is held ready, what libraries keep for later, the host tier where it lies in the same
memory, free extents, compaction, then somebody is preempted (victims.py), and that only for a recall. While requests run, all
of it happens in slices, one a step, so that no step takes long. The host tier's memory goes back too, with what lies there,
when there has been no request for long.

Without a lease (nobody to share with, or no broker) the pool does the same between its own bounds.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...allocator.arena import Arena
from ...allocator.errors import DriverError, GrantExceeded
from ...allocator.lease import Denied, Event, Granted, Lease, Limited, Lost, Recalled, Rejoined, Withdrawn
from ...monitor.units import GIB, MIB, format_bytes
from ...scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from ..execution.host_pool import HostPool  # which loads torch

log = logging.getLogger(__name__)

SLICE_BYTES = 16 * MIB  # mapped, or moved, in the first step that does so while requests run; see `Slice` for the next
UNMAP_SLICE_BYTES = GIB  # unmapped besides: milliseconds
READY_LIMIT_BYTES = UNMAP_SLICE_BYTES  # held and not mapped: all of such a slice is given back beside the step
_LOOK_S = 0.02  # how often demand is worked out while blocks are short
_FREE_S = 0.1  # how often it is worked out, while requests run, what could go
_ASK_S = 0.25  # how often an ask is repeated; it expires after four of these
_BASE_S = 0.5  # how often the process is measured
_REFUSED_S = 0.5  # how long nothing is mapped, or made ready, after the device said no
_ALONE_S = 0.05  # no step for so long: nobody waits for the next one
_TRIM_S = 2.0  # how often caches are emptied, at most, since the process has outgrown its grant
_TIDY_S = 0.5  # how often the heap is tidied, at most, while there is work,
_TIDY_BYTES = 4 * MIB  # and by how much the process has to have grown since


@dataclass(slots=True)
class MemoryStats:
    """Counters and bytes since the start. Changed by `EngineMemory` alone."""

    recalls: int = 0
    recalled_bytes: int = 0
    grown_bytes: int = 0
    given_back_bytes: int = 0
    refused: int = 0
    lost_brokers: int = 0


class Slice:
    """Bytes that one step may copy, or map, while requests run: as many as take the time that a step takes without.

    So a step takes twice as long for them, and what is done in slices takes twice as long as at once, whatever a step and a
    copy take on this machine. It learns from steps that had most of a slice to do.
    """

    SHARE = 1.0  # of a step's own time

    def __init__(self, least_bytes: int) -> None:
        self.num_bytes = SLICE_BYTES
        self._least_bytes = least_bytes

    def took(self, num_bytes: int, step_s: float, plain_s: float) -> None:
        """A step with so much to do took `step_s`, where one without takes `plain_s`."""
        if num_bytes < self.num_bytes // 2:
            return
        aim = num_bytes * self.SHARE * plain_s / max(step_s - plain_s, plain_s / 8, 1e-6)
        self.num_bytes = int(max(self._least_bytes, num_bytes / 2, min(aim, num_bytes * 2)))


class EngineMemory:
    """Keeps one engine's pool within its lease. Used by one thread at a time, between steps.

    Args:
        scheduler: Gives the scheduler; another one after a fault.
        arena: What the runner maps and unmaps. Leased, if there is a lease. From now on it works in the background too, so
            CUDA graphs are captured before.
        min_extents: Given back to nobody but by a recall.
        base_bytes: Measures what the process holds besides KV.
        reserve_bytes: What a step may take besides, in workspaces.
        weights_bytes: Of what it holds, the weights; for people.
        trim: Gives back what libraries, and the attention kernel, keep for later.
        tidy: Gives back what lies free in the heap, where the device is the host; None elsewhere.
        lease: None without a broker.
        idle_s: How long extents stay that nobody needs, and the host tier's memory without a request.
        host: The host tier's memory; None without one.
        host_is_device: The pool lies in host memory too.
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
        self._unmeasured = False  # the last time
        self._planned_bytes = self._measured_bytes + reserve_bytes
        self._base_bytes = self._planned_bytes
        self._mapped_bytes = arena.mapped_bytes
        self._look_at = self._ask_at = self._base_at = self._free_at = self._grow_at = self._ready_at = 0.0
        self._trim_at = self._tidy_at = -math.inf  # when these are due again for what has grown
        self._least_bytes: float = math.inf  # measured since either
        self._asked = 0  # extents, in the last ask; 0 when it was taken back
        self._told_free = 0  # extents that were reported free
        self._told_held = arena.held  # of the arena, when it was reported
        self._needed_at = self._used_at = clock()  # when all that is mapped was needed last; when a request was here
        self._in_use = False  # by a request, in the step that is prepared
        self._relieving = False  # in the next plan
        self._began_at = self._settled_at = -math.inf  # of the last step
        self._alone = True  # nobody made steps before the one that is prepared
        self._plain_s: deque[float] = deque(maxlen=16)  # what the last steps took that had nothing to copy or map
        self._moved_blocks = 0  # of the scheduler's counter, after the last step
        self._copying = Slice(arena.extent_bytes // scheduler().cache.blocks_per_extent)
        self._mapping = Slice(arena.extent_bytes)
        self._trimmed_for: int | None = None  # target of the recall for which caches were emptied
        self._recall_from: tuple[float, int, tuple[int, int]] | None = None  # when it came, what was held, `_counted`
        pool_bytes = arena.num_extents * self._extent_bytes
        most = None if lease is None else lease.max_bytes
        self._most_base_bytes = math.inf if most is None else max(self._planned_bytes, most - pool_bytes)
        if lease is not None:  # the promise covered what loading might have taken
            least = self._planned_bytes + min_extents * self._extent_bytes
            lease.lower_min(min(lease.min_bytes, least))
        self._report()

    # ---- before a step --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Decide what the next plan maps and unmaps."""
        now = self._began_at = self._clock()
        self._alone = now - self._settled_at >= _ALONE_S
        self._listen()
        self._let_go()
        scheduler = self._scheduler()
        self._limit(scheduler)
        self._in_use = _in_use(scheduler)
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
        """A step could not be computed, perhaps for want of memory: the next plan gives back what no request needs now."""
        self._relieving = True

    @property
    def wants_turn(self) -> bool:
        """Whether `prepare` has something to do before another step is planned. Takes in what the broker says."""
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
        """Whether a step is to be made for memory's sake though no request needs one. Takes in what the broker says."""
        self._listen()
        scheduler = self._scheduler()
        self._limit(scheduler)
        self._let_go()
        if self._arena.held != self._told_held:
            self._tell()
        if self._over_recall(scheduler) > 0:
            return True
        self._answer()  # a recall of what was granted and never mapped needs no step
        if self._excess(scheduler) > 0 and scheduler.idle_extents:
            return True
        if self._host_idle(scheduler):
            return True
        may_rest = scheduler.num_extents > self._min_extents and self._clock() - self._needed_at >= self._idle_s
        return may_rest and scheduler.idle_extents > 0

    def wait(self, timeout_s: float) -> None:
        """Wait for the broker to say something, but no longer. From any thread. Raises LeaseClosed."""
        if self.lease is None:
            self._closed.wait(timeout_s)
        else:
            self._take_in(self.lease.wait(timeout_s))

    def close(self) -> None:
        """Wake whoever waits, to find the engine closed. A lease does that itself when it is closed."""
        self._closed.set()

    def _listen(self) -> None:
        if self.lease is not None:
            self._take_in(self.lease.poll())

    def _take_in(self, events: tuple[Event, ...]) -> None:
        """Log and count what the broker said; what it means stands in the lease."""
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
                self._look_at = 0.0  # what somebody waits for is here
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
        """Extents that the lease allows now; all there are without one. The null block's stays always."""
        if self.lease is None:
            return self._arena.num_extents
        recall = self.lease.recall
        allowed = self.lease.granted_bytes if recall is None else min(self.lease.granted_bytes, recall.target_bytes)
        return self._extents_in(allowed)

    def _extents_in(self, total_bytes: int) -> int:
        """Extents of a pool with which the process holds at most so much."""
        return min(self._arena.num_extents, max(1, (total_bytes - self._base_bytes) // self._extent_bytes))

    def _limit(self, scheduler: Scheduler) -> None:
        """Let the scheduler admit nothing beyond what the lease may ever come to."""
        most = None if self.lease is None else self.lease.max_bytes
        extents = self._arena.num_extents if most is None else self._extents_in(most)
        blocks = min(scheduler.cache.capacity, extents * scheduler.cache.blocks_per_extent - 1)
        if blocks != scheduler.limit_blocks:
            scheduler.limit_blocks = blocks

    def _over_recall(self, scheduler: Scheduler) -> int:
        """Extents that a recall is after; 0 or less without one, or when they are on their way out."""
        recall = None if self.lease is None else self.lease.recall
        return 0 if recall is None else scheduler.num_extents - self._extents_in(recall.target_bytes)

    def _recalled(self, scheduler: Scheduler) -> bool:
        """Serve a recall: a slice of it while requests run. Returns whether there is one to serve."""
        over = self._over_recall(scheduler)
        if over <= 0:
            return False
        assert self.lease is not None and self.lease.recall is not None
        if self._trimmed_for != self.lease.recall.target_bytes:  # first what nobody notices
            self._trimmed_for = self.lease.recall.target_bytes
            self._trim()
            self._report()
            over = self._over_recall(scheduler)
            if over <= 0:  # that was enough
                return False
        if self._host is not None and self._host_is_device and self._host.mapped_bytes:
            self._rest_host(scheduler)  # it lies in the memory that somebody needs
        scheduler.make_idle(over)
        scheduler.give_back(min(over, self._unmap_slice(scheduler)))
        return True

    def _shed_excess(self, scheduler: Scheduler) -> bool:
        """Above a limit: what is idle goes, nobody is preempted, and the rest goes as requests end."""
        over = self._excess(scheduler)
        return over > 0 and scheduler.give_back(min(over, self._unmap_slice(scheduler))) > 0

    def _excess(self, scheduler: Scheduler) -> int:
        """Extents above a limit, or above the grant, where the process has outgrown it by whole extents beside its pool.

        Those that requests which run are going to need are none of them: they would be preempted for want of these.
        """
        excess = scheduler.excess_extents
        if self.lease is not None and self.lease.connected:
            outgrown = (self.lease.held_bytes - self.lease.granted_bytes) // self._extent_bytes
            excess = max(excess, min(outgrown, scheduler.num_extents - self._min_extents))
        if excess and scheduler.num_running:
            excess = min(excess, self._spare(scheduler))
        return excess

    def _spare(self, scheduler: Scheduler) -> int:
        """Extents that requests which run are not forecast to need; below 0 where they need more than there are."""
        return scheduler.num_extents - self._extents_for(scheduler, scheduler.running_blocks())

    def _map_slice(self, scheduler: Scheduler) -> int:
        """Extents that may be mapped in the next step: all, where nobody waits for its end."""
        if self._alone or not scheduler.num_running:
            return self._arena.num_extents
        return max(1, self._mapping.num_bytes // self._extent_bytes)

    def _unmap_slice(self, scheduler: Scheduler) -> int:
        """Extents, of those that nobody needs, that may go in the next step: so many that about a slice has to move.

        An extent goes as a whole, so it is up to half a slice more: a slice that is never filled would take ever more steps.
        """
        if self._alone or not scheduler.num_running:
            return self._arena.num_extents
        cache = scheduler.cache
        plan = cache.plan_shrink(max(1, UNMAP_SLICE_BYTES // self._extent_bytes))
        most = max(1, 3 * self._copying.num_bytes * cache.blocks_per_extent // (2 * self._extent_bytes))
        if len(plan.moves) <= most:
            return max(1, len(plan.extents))
        too_far = plan.moves[most] // cache.blocks_per_extent  # moves stand in the order of the extents
        return max(1, plan.extents.tolist().index(too_far))

    def _short(self, scheduler: Scheduler) -> bool:
        """Whether blocks may soon be short: somebody waits, or fewer are free than there are sequences."""
        return bool(scheduler.num_waiting or scheduler.cache.num_free < scheduler.num_running)

    def _grow(self, scheduler: Scheduler, now: float) -> None:
        """Map what is forecast to be needed, as far as it is granted; ask for the rest."""
        wanted = self._wanted_extents(scheduler)
        missing = wanted - scheduler.num_extents
        if missing >= 0:
            self._needed_at = now
        room = self._allowed_extents() - scheduler.num_extents
        coming = max(0, min(missing, room)) if now >= self._grow_at else 0
        mapping = min(coming, self._map_slice(scheduler))
        grown = scheduler.grow(mapping)
        following = min(coming - grown, mapping) if grown == mapping else 0  # else there is a limit
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
        """Nobody waits for more than there is any longer."""
        assert self.lease is not None
        self._asked = 0
        self.lease.ask(self.lease.held_bytes, expires_s=_LOOK_S)

    def _make_ready(self, num_extents: int) -> None:
        """Let the arena make the memory of the next extents to be mapped beside the step, and of no others."""
        if not num_extents and self._arena.held.upper_bytes == self._arena.mapped_bytes:
            return
        try:
            self._arena.prepare(num_extents)
        except (DriverError, GrantExceeded) as error:  # of a grant that ended with its broker this moment
            self._ready_at = self._clock() + _REFUSED_S
            log.info("KV pool: nothing is made ready: %s", error)

    def _let_go(self) -> None:
        """Keep nothing ready that a recall is after, or that nobody waits for."""
        if self._arena.held.upper_bytes > self._arena.mapped_bytes:
            if self.lease is not None and self.lease.recall is not None:
                try:
                    self._arena.trim()
                except DriverError as error:  # what it keeps is counted, and tried again
                    log.warning("KV pool: not all of what was unmapped went back: %s", error)
            elif not self._short(self._scheduler()):
                self._make_ready(0)
        for failure in self._arena.drain_failures():
            self._ready_at = self._clock() + _REFUSED_S
            log.warning("KV pool: in the background %s", failure)

    def _rest(self, scheduler: Scheduler, now: float) -> None:
        """Give back what nobody has needed for long."""
        wanted = max(self._min_extents, self._wanted_extents(scheduler))
        spare = scheduler.num_extents - wanted
        if spare <= 0:
            self._needed_at = now
        elif not scheduler.give_back(min(spare, self._unmap_slice(scheduler))):
            self._needed_at = now  # nothing of it is idle: look again after another while

    def _host_idle(self, scheduler: Scheduler) -> bool:
        """Whether the host tier has memory, and nobody has been here to need it for long."""
        if self._host is None or not self._host.mapped_bytes or _in_use(scheduler):
            return False
        return self._clock() - self._used_at >= self._idle_s

    def _rest_host(self, scheduler: Scheduler) -> None:
        """Give back a slice of the host tier's memory; what lies there is forgotten, as prefixes on the device are."""
        assert self._host is not None
        scheduler.cache.rest()
        self._host.give_back(UNMAP_SLICE_BYTES)

    def _wanted_extents(self, scheduler: Scheduler) -> int:
        """Extents for what is forecast, and one ahead of it."""
        wanted = scheduler.wanted_blocks()
        extents = self._extents_for(scheduler, wanted) + 1 if wanted else self._min_extents
        return min(extents, self._arena.num_extents)

    def _extents_for(self, scheduler: Scheduler, blocks: int) -> int:
        """Extents that hold so many blocks; the null block has a place too."""
        return -(-(blocks + 1) // scheduler.cache.blocks_per_extent)

    # ---- after a step ---------------------------------------------------------------------------

    def settle(self, waited_for: bool = True) -> None:
        """Take in what a step did to the pool: report it, answer a recall.

        Whoever takes in a step that nobody has `waited_for` does not count as one who makes steps.
        """
        self._let_go()
        mapped = self._arena.mapped_bytes
        now = self._clock()
        step_s = now - max(self._began_at, self._settled_at)  # one that was planned ahead was not prepared for
        if waited_for:
            self._settled_at = now
        if self._in_use:
            self._used_at = now
        changed = mapped != self._mapped_bytes
        self._learn(step_s, max(0, mapped - self._mapped_bytes), changed)
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
        """What a recall costs: preemptions, and blocks that moved."""
        stats = self._scheduler().stats
        return stats.preemptions, stats.moved_blocks

    def _tell_outcome(self, what: str) -> None:
        """Say what became of a recall, or of several that came one after the other."""
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

    def _learn(self, step_s: float, grown_bytes: int, changed: bool) -> None:
        """What the step's copying and mapping cost, for the size of the next slices."""
        moved = self._scheduler().stats.moved_blocks - self._moved_blocks
        self._moved_blocks += moved
        if self._alone:
            return
        if not changed and not moved:
            self._plain_s.append(step_s)
        elif self._plain_s:  # else nobody knows yet what a step takes
            plain_s = statistics.median(self._plain_s)
            if moved:
                moved_bytes = moved * self._extent_bytes // self._scheduler().cache.blocks_per_extent
                self._copying.took(moved_bytes, step_s, plain_s)
            elif grown_bytes:
                self._mapping.took(grown_bytes, step_s, plain_s)

    def _free_extents(self) -> int:
        """Extents that no request here is forecast to need; blocks in use may have to be moved out of them."""
        scheduler = self._scheduler()
        needed = max(self._min_extents, self._extents_for(scheduler, scheduler.wanted_blocks()))
        return max(0, scheduler.num_extents - needed)

    def _report(self) -> None:
        """Measure what is held, and tell the broker. What has grown is first made as little as it can be.

        The heap keeps what steps have freed, and temporaries of ever other sizes leave ever more holes in it.
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
        """What is held beside the pool; as it was measured last where it cannot be, as without a free file descriptor."""
        try:
            self._measured_bytes, self._unmeasured = self._base_bytes_now(), False
        except Exception:
            if not self._unmeasured:
                log.warning("the memory of this process cannot be measured", exc_info=True)
            self._unmeasured = True
        return self._measured_bytes

    def _rests_untidy(self) -> bool:
        """Whether the work is done, and the last step left more in the heap than is to stay there."""
        if self._tidy is None or self._scheduler().has_work:
            return False
        return self._measure() > self._least_bytes + _TIDY_BYTES

    def _counted_base(self, measured_bytes: int) -> int:
        return int(min(max(self._planned_bytes, measured_bytes), self._most_base_bytes))

    def _tell(self) -> None:
        """Tell the broker what is held, by class, and how much of it could go without touching a request."""
        held_kv = self._told_held = self._arena.held
        if self.lease is None:
            return
        self._told_free = self._free_extents()
        free = self._told_free * self._extent_bytes
        weights = min(self._weights_bytes, self._base_bytes)
        held = {"weights": weights, "other": self._base_bytes - weights, "kv": held_kv.upper_bytes}
        self.lease.report(held, free, moving_bytes=held_kv.upper_bytes - held_kv.lower_bytes)
        if (total := sum(held.values())) > self.lease.granted_bytes:  # the process grew in other ways than by KV
            self.lease.ask(total, expires_s=4 * _ASK_S)

    def _answer(self) -> None:
        """Say what is not held any more: what a recall or a limit is after, or what nobody has needed for long."""
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
            "map_slice_bytes": self._mapping.num_bytes,  # which a step maps at most while requests run
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
    """Free what can be freed; what raises frees nothing."""
    try:
        free()
    except Exception:
        log.warning("memory that libraries keep could not be freed", exc_info=True)


def _in_use(scheduler: Scheduler) -> bool:
    """Whether a request is here, running or waiting."""
    return bool(scheduler.num_running or scheduler.num_waiting)
