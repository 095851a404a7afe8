"""Host memory goes back when nobody has been there to need it for long, and comes again with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from broker_rig import wait_until
from engines import TinyEngine, blocks_needed, prompts
from families import VOCAB, tiny

from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry
from pagetide.cache.storage import Storage
from pagetide.engine.execution.host_pool import NONE, HostPool
from pagetide.engine.memory.engine_memory import UNMAP_SLICE_BYTES, EngineMemory
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
        self.core.memory = self.memory = EngineMemory(
            lambda: self.core.scheduler, self.engine.arena, min_extents=self.engine.arena.num_extents,
            base_bytes=lambda: 0, reserve_bytes=0, weights_bytes=0, trim=lambda: None, lease=None, idle_s=IDLE_S,
            host=self.pool, clock=lambda: self.now,
        )  # fmt: skip

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


def test_a_slice_at_a_time_the_highest_first() -> None:
    geometry = Geometry.from_config(tiny("llama").config, block_size=16, dtype="float32").with_extents(64 << 10)
    per = geometry.blocks_per_extent
    pool = HostPool(geometry, 6 * geometry.extent_bytes)
    arena = HostArena(1, geometry.extent_bytes)
    arena.map([0])
    storage = Storage(geometry, arena)
    for extent in 0, 2, 5:
        pool.swap(storage, np.array([1], np.int32), np.array([extent * per + 1], np.int32))
    pool.give_back(1)
    assert pool._extents.mapped == {0, 2}
    pool.give_back(UNMAP_SLICE_BYTES)
    assert pool.mapped_bytes == 0
    pool.swap(storage, np.array([1], np.int32), np.array([1], np.int32))
    pool.swap(storage, NONE, NONE, np.array([1], np.int32), np.array([2], np.int32))
    assert pool.mapped_bytes == geometry.extent_bytes
    pool.close()
    arena.close()


def test_an_idle_engine_holds_no_host_memory() -> None:
    """The demo model. It swaps, rests, and swaps again, with the tokens of an engine that never does."""
    texts = [f"{number}: " + "the tide comes in and goes out again. " * 6 for number in range(10)]
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    options = {"share": False, "kv_memory": "2MiB", "block_size": 4, "max_seqs": 16}
    with LLM("demo", share=False) as llm:
        expected = [output.token_ids for output in llm.generate(texts, params)]
    with LLM("demo", host_kv_memory="64MiB", idle_s=0.2, **options) as llm:
        before = 0
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(texts, params)] == expected
            swapped = llm.stats()["host_tier"]["swapped_out_bytes"]
            assert swapped > before
            before = swapped
            wait_until(lambda: llm.stats()["host_tier"]["bytes"] == 0, "the host's memory to go back")
            assert llm.stats()["host_tier"]["used_blocks"] == 0
