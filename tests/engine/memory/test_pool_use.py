"""The pool in extents, over a real scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagetide.cache.manager import CacheManager
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Limits, Scheduler

PER, BLOCK_SIZE, EXTENTS = 4, 16, 16


def scheduler_with(mapped: int) -> Scheduler:
    cache = CacheManager(EXTENTS * PER, BLOCK_SIZE, 4, 1024, blocks_per_extent=PER, mapped=range(mapped))
    return Scheduler(cache, Limits(4, 8192, 1024, forecast=False))


def request(name: str, length: int) -> Request:
    return Request(name, np.arange(length, dtype=np.int32), Sampling(8), 0, 0.0)


def numbers(pool: SchedulerPoolUse) -> dict[str, Any]:
    names = (
        "num_extents", "has_requests", "has_running", "is_short", "idle_extents", "running_extents",
        "wanted_extents", "free_extents",
    )  # fmt: skip
    return {name: getattr(pool, name) for name in names}


def test_without_requests_all_but_the_minimum_is_free() -> None:
    scheduler = scheduler_with(6)
    assert numbers(SchedulerPoolUse(lambda: scheduler, 2)) == {
        "num_extents": 6, "has_requests": False, "has_running": False, "is_short": False, "idle_extents": 5,
        "running_extents": 1, "wanted_extents": 0, "free_extents": 4,
    }  # fmt: skip


def test_a_request_that_waits_makes_blocks_short_and_is_counted_with_the_null_block() -> None:
    scheduler = scheduler_with(6)
    pool = SchedulerPoolUse(lambda: scheduler, 2)
    scheduler.add(request("a", 8 * BLOCK_SIZE))
    assert (pool.has_requests, pool.has_running, pool.is_short) == (True, False, True)
    blocks = scheduler.pool.wanted_blocks()
    assert blocks >= 8
    assert pool.wanted_extents == -(-(blocks + 1) // PER) >= 3
    assert pool.free_extents == 6 - pool.wanted_extents
    scheduler.schedule()
    assert (pool.has_running, pool.is_short) == (True, False)
    assert pool.running_extents == -(-(scheduler.pool.running_blocks() + 1) // PER)


def test_what_grows_counts_at_once_and_free_extents_are_never_negative() -> None:
    scheduler = scheduler_with(2)
    pool = SchedulerPoolUse(lambda: scheduler, 2)
    scheduler.add(request("a", 30 * BLOCK_SIZE))
    assert pool.free_extents == 0
    scheduler.pool.grow(3)
    assert pool.num_extents == 5


def test_the_scheduler_may_be_replaced() -> None:
    schedulers = [scheduler_with(6)]
    pool = SchedulerPoolUse(lambda: schedulers[-1], 2)
    schedulers.append(scheduler_with(3))
    assert pool.num_extents == 3
