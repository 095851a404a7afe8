"""The size of an engine's pool, and what its requests need of it by the scheduler's forecasts, in extents."""

from __future__ import annotations

from collections.abc import Callable

from ...scheduler.scheduler import Scheduler
from .decision import PoolBounds


class SchedulerPoolUse:
    """The pool of a scheduler, now and by forecast. Read-only.

    Args:
        scheduler: Returns the current scheduler; a fault replaces it.
    """

    def __init__(self, scheduler: Callable[[], Scheduler], bounds: PoolBounds) -> None:
        self.bounds = bounds
        self._scheduler = scheduler

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
    def free_extents(self) -> int:
        """Extents that no request is forecast to need; blocks in use may have to move out of them first."""
        return max(0, self.num_extents - max(self.bounds.min_extents, self.wanted_extents))


def _extents_for(scheduler: Scheduler, blocks: int) -> int:
    """Extents for `blocks` and the null block."""
    return -(-(blocks + 1) // scheduler.cache.pool.blocks_per_extent)
