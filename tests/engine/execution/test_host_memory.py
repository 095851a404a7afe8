"""Host memory goes back when nobody has been there to need it for long, and comes again with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import TinyEngine, blocks_needed, prompts
from families import VOCAB, tiny

from pagetide.engine.execution.host_pool import HostPool
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.scheduler.plan import Plan
from pagetide.scheduler.request import Sampling

LENGTHS = [16, 33, 64, 99, 130]
NEW = 40
IDLE_S = 5.0


class Kept:
    """A tiny engine under pressure, with a host tier and a memory whose clock is the test's."""

    def __init__(self) -> None:
        self.inputs = prompts(LENGTHS, VOCAB)
        usable = max(-(-(max(LENGTHS) + NEW) // 4), int(0.4 * blocks_needed(self.inputs, NEW, 4)))
        self.engine = TinyEngine(tiny("llama"), usable=usable, block_size=4, caching=True, host_slots=400)
        self.core = self.engine.core
        self.pool: HostPool = self.engine.host  # type: ignore[assignment]
        self.now = 100.0
        arena = self.engine.arena
        bounds = PoolBounds(arena.num_extents, arena.num_extents, arena.extent_bytes, IDLE_S)
        base = BaseMemory(lambda: 0, weights_bytes=0, reserve_bytes=0, trim=lambda: None)
        pool = SchedulerPoolUse(lambda: self.core.scheduler, bounds)
        self.core.memory = self.memory = EngineMemory(pool, arena, base, lease=None, host=self.pool, clock=lambda: self.now)

    def generate(self) -> list[list[int]]:
        return self.engine.generate(self.inputs, Sampling(NEW))


@pytest.fixture
def kept() -> Iterator[Kept]:
    one = Kept()
    yield one
    one.pool.close()
    one.engine.arena.close()


def test_memory_goes_back_once_there_was_no_request_for_long(kept: Kept) -> None:
    expected = kept.generate()
    stats, tier = kept.core.scheduler.stats, kept.core.scheduler.cache.host
    swapped = stats.demoted_blocks
    assert stats.preemptions and swapped and kept.pool.mapped_bytes and tier.num_used
    kept.now += IDLE_S - 0.1
    assert not kept.memory.due
    kept.now += 0.2
    assert kept.memory.due
    kept.core.step()
    assert (kept.pool.mapped_bytes, tier.num_used) == (0, 0) and not kept.memory.due
    kept.core.scheduler.check_invariants()
    assert kept.generate() == expected
    assert stats.demoted_blocks > swapped and kept.pool.mapped_bytes > 0


def test_whoever_waits_or_runs_keeps_it(kept: Kept) -> None:
    """However long it waits, and a step takes: time counts from the end of the last step with a request."""
    kept.generate()
    held = kept.pool.mapped_bytes
    begin = kept.core.runner.begin

    def slow(plan: Plan) -> Any:
        kept.now += 2 * IDLE_S
        return begin(plan)

    kept.core.runner.begin = slow  # type: ignore[method-assign]
    kept.engine.add("r", kept.inputs[0], Sampling(4))
    kept.now += 3 * IDLE_S
    assert not kept.memory.due
    kept.engine.run()
    assert kept.pool.mapped_bytes >= held and not kept.memory.due
    kept.now += IDLE_S
    assert kept.memory.due
