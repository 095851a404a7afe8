"""A core without a model, whose extents come and go in any arena: also in one whose memory no test can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fakes import VOCAB, FakeRunner, continuation

from pagetide.allocator.arena import Arena
from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.errors import AllocatorError
from pagetide.cache.manager import CacheManager
from pagetide.cache.row_tables import RowTables
from pagetide.engine.core import EngineCore
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.plan import NO_EXTENTS, Plan
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

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
    pool = BlockAllocator(arena.num_extents * PER, blocks_per_extent=PER, mapped=arena.mapped_extents)
    cache = CacheManager(RowTables(pool, BLOCK_SIZE, _SEATS, _MAX_TOKENS))
    runner: Any = ExtentRunner(arena, _SEATS, cache.max_tokens)
    return EngineCore(Scheduler(cache, Limits(_SEATS, 8192, _MAX_TOKENS, forecast=False)), runner)


class SteppedEngine:
    """Steps of a core that a test makes, on a made-up clock. Those aborted, or cut by a limit, may have fewer tokens."""

    core: EngineCore
    arena: Arena

    def __init__(self) -> None:
        self.now = 100.0
        self.requests, self.finished = dict[str, Request](), dict[str, Finished]()
        self.aborted, self.cut = set[str](), set[str]()

    def add(self, name: str, length: int, new: int = 8) -> None:
        prompt = np.random.default_rng(len(self.requests)).integers(0, VOCAB, length).astype(np.int32)
        self.requests[name] = Request(name, prompt, Sampling(new), 0, float(len(self.requests)))
        self.core.add(self.requests[name])

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.core.abort(name)

    def settle(self) -> None:
        """Before a step is checked."""

    def step(self, seconds: float = 0.02) -> None:
        self.now += seconds
        emissions = self.core.step()
        self.settle()
        self.core.scheduler.check_invariants()
        self.cut |= {told["request_id"] for told in self.core.scheduler.decisions.to_list() if told["what"] == "cut"}
        assert set(self.core.scheduler.cache.pool.mapped_extents.tolist()) == self.arena.mapped_extents
        self.finished |= {end.request_id: end for end in emissions.finished}

    def steps(self, most: int, until: Callable[[], object] = lambda: False) -> None:
        for _ in range(most):
            if until():
                return
            self.step()

    def run(self) -> None:
        self.steps(2000, lambda: not self.core.has_work)
        for name, request in self.requests.items():
            end, expected = self.finished[name], continuation(request.prompt_token_ids, request.sampling)
            if name in (self.aborted if end.reason == "aborted" else self.cut):
                expected = expected[: len(end.token_ids)]
            assert end.reason == "length" or name in self.aborted, end
            assert end.token_ids.tolist() == expected
