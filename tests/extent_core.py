"""A core without a model, whose extents come and go in any arena: also in one whose memory no test can read."""

from __future__ import annotations

from typing import Any

from fakes import FakeRunner

from pagetide.allocator.arena import Arena
from pagetide.allocator.errors import AllocatorError
from pagetide.cache.manager import CacheManager
from pagetide.engine.core import EngineCore
from pagetide.scheduler.plan import NO_EXTENTS, Plan
from pagetide.scheduler.scheduler import Limits, Scheduler

BLOCK_SIZE, PER = 16, 4  # tokens of a block, blocks of an extent
_SEATS, _MAX_TOKENS = 8, 1024


class ExtentRunner(FakeRunner):
    """A `FakeRunner` whose extents come and go in an arena too."""

    def __init__(self, arena: Arena, num_rows: int, max_tokens: int) -> None:
        extents, mapped = arena.num_extents, tuple(arena.mapped_extents)
        super().__init__(extents * PER, BLOCK_SIZE, num_rows, max_tokens, num_extents=extents, mapped=mapped)
        self.arena = arena

    @property
    def mapped_extents(self) -> frozenset[int]:
        return self.arena.mapped_extents

    def _map(self, plan: Plan) -> dict[str, Any]:
        try:
            self.arena.map(plan.resize.map.tolist())
        except AllocatorError as error:
            return {"mapped": NO_EXTENTS, "refused": str(error)}
        return super()._map(plan)

    def _move_memory(self, plan: Plan) -> dict[str, Any]:
        moved = super()._move_memory(plan)
        self.arena.unmap(moved["unmapped"].tolist())
        return moved


def core_in_extents(arena: Arena) -> EngineCore:
    """What is mapped is the pool at the start. Requests are admitted by what they may come to need."""
    cache = CacheManager(
        arena.num_extents * PER, BLOCK_SIZE, _SEATS, _MAX_TOKENS, blocks_per_extent=PER, mapped=arena.mapped_extents
    )
    runner: Any = ExtentRunner(arena, _SEATS, cache.max_tokens)
    return EngineCore(Scheduler(cache, Limits(_SEATS, 8192, _MAX_TOKENS, forecast=False)), runner)
