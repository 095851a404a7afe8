"""The size of an engine's pool, and what its requests need of it by the scheduler's forecasts, in extents."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...scheduler.scheduler import Scheduler
from .decision import PoolBounds

WORTH_KEEPING = 0.5  # from this share of prompts' tokens found on, cached prefixes stay beside requests of other engines
_LOOKUPS = 16  # prompts by which that share is measured


class SchedulerPoolUse:
    """The pool of a scheduler, now and by forecast. Read-only.

    Args:
        scheduler: Returns the current scheduler; a fault replaces it.
        clock: Seconds, that of requests' arrivals.
    """

    def __init__(
        self, scheduler: Callable[[], Scheduler], bounds: PoolBounds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bounds = bounds
        self._scheduler = scheduler
        self._clock = clock
        self._counted = (0, 0, 0)  # prompts, tokens and found tokens when reuse was last judged
        self._reuse_share = 1.0

    @property
    def scheduler(self) -> Scheduler:
        """The current scheduler."""
        return self._scheduler()

    @property
    def num_extents(self) -> int:
        """Extents with memory after the next plan."""
        return self.scheduler.pool.num_extents

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        scheduler = self.scheduler
        return bool(scheduler.num_running or scheduler.num_waiting)

    @property
    def has_running(self) -> bool:
        """Whether any request is running."""
        return self.scheduler.num_running > 0

    @property
    def is_short(self) -> bool:
        """Whether blocks may soon be short: a request waits, or fewer blocks are free than sequences run."""
        scheduler = self.scheduler
        return bool(scheduler.num_waiting or scheduler.cache.pool.num_free < scheduler.num_running)

    @property
    def idle_extents(self) -> int:
        """Extents that could be given back now, without a preemption."""
        return self.scheduler.pool.idle_extents

    @property
    def running_extents(self) -> int:
        """Extents that running requests are forecast to need; with fewer one of them is preempted soon."""
        scheduler = self.scheduler
        return _extents_for(scheduler, scheduler.pool.running_blocks())

    @property
    def wanted_extents(self) -> int:
        """Extents that running and waiting requests are forecast to need; 0 without any."""
        scheduler = self.scheduler
        blocks = scheduler.pool.wanted_blocks()
        return _extents_for(scheduler, blocks) if blocks else 0

    @property
    def cached_extents(self) -> int:
        """Extents for the cached blocks that no request uses."""
        pool = self.scheduler.cache.pool
        return -(-(pool.available - pool.num_free) // pool.blocks_per_extent)

    @property
    def waiting_s(self) -> float:
        """Seconds for which the first request in the queue has waited; 0 without one."""
        queue = self.scheduler.state.waiting.queue
        return max(0.0, self._clock() - queue[0].request.arrival) if queue else 0.0

    @property
    def unneeded_extents(self) -> tuple[int, int]:
        """Extents that could be given back now and no running request is forecast to need: (free, kept for cached prefixes).

        Blocks in use may have to move out of them first. Prefixes of which prompts find nothing count as free.
        """
        unneeded = max(0, min(self.num_extents - max(self.bounds.min_extents, self.running_extents), self.idle_extents))
        kept = min(unneeded, self.cached_extents) if self.reuse_share else 0
        return unneeded - kept, kept

    @property
    def is_reused(self) -> bool:
        """Whether prompts find enough of their tokens for cached prefixes to stay beside requests of other engines."""
        return self.reuse_share >= WORTH_KEEPING

    @property
    def reuse_share(self) -> float:
        """The share of prompts' tokens that were cached, of the last _LOOKUPS to twice as many prompts; 1 before."""
        lookups, (number, tokens, hits) = self.scheduler.stats.prefix_lookups, self._counted
        if lookups.number >= number + _LOOKUPS:
            self._reuse_share = (lookups.hit_tokens - hits) / max(1, lookups.tokens - tokens)
            self._counted = (lookups.number, lookups.tokens, lookups.hit_tokens)
        return self._reuse_share


def _extents_for(scheduler: Scheduler, blocks: int) -> int:
    """Extents for `blocks` and the null block."""
    return -(-(blocks + 1) // scheduler.cache.pool.blocks_per_extent)
