"""Rates that are measured, and what follows from them: whether to swap, whom to preempt, and how it is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes import World

from pagetide.cache.host_tier import Swaps
from pagetide.scheduler.cost import START_BYTES_PER_S, START_TOKENS_PER_S, SwapCost
from pagetide.scheduler.plan import NO_ROWS, NO_TOKENS, Plan, Result
from pagetide.scheduler.preemption import by_worth

MIB = 1 << 20
ONE = np.array([3], np.int32)


def plan(lengths: list[int], swaps: Swaps | None = None) -> Plan:
    each = np.array(lengths, np.int64)
    return Plan(0, np.arange(len(each)), each * 0, each, each > 0, swaps=swaps)


def result(swapped: int = 0, swap_s: float = 0.0, compute_s: float = 0.0) -> Result:
    return Result(0, NO_ROWS, NO_TOKENS, swapped=swapped, swap_s=swap_s, compute_s=compute_s)


def swaps() -> Swaps:
    return Swaps(ONE, ONE, NO_TOKENS, NO_TOKENS)


def test_swapping_is_worth_it_while_two_copies_take_less_than_computing() -> None:
    def cost(bytes_per_s: float) -> SwapCost:
        return SwapCost(MIB, 16, bytes_per_s=bytes_per_s, tokens_per_s=1000)  # a block is computed in 16 ms

    assert (cost(132 * MIB).least_chance < 1, cost(132 * MIB).promotes) == (True, True)  # 15.2 ms
    assert (cost(120 * MIB).least_chance < 1, cost(120 * MIB).promotes) == (False, True)  # 16.7 ms, half to come back
    assert (cost(60 * MIB).least_chance, cost(60 * MIB).promotes) == (math.inf, False)
    assert cost(128 * MIB).swap_s(64) == 1.0
    assert cost(1.0).compute_s(500) == 0.5


def test_the_rarer_a_block_is_wanted_again_the_cheaper_its_copy_must_be() -> None:
    """Of ten copies out of 2 ms each one is wanted again: 20 ms, and 2 to come back, against 22 of computing."""
    cost = SwapCost(MIB, 22, bytes_per_s=500 * MIB, tokens_per_s=1000)
    assert cost.least_chance == pytest.approx(0.1)


def test_rates_are_measured() -> None:
    cost = SwapCost(MIB, 16)
    assert (cost.bytes_per_s, cost.tokens_per_s) == (START_BYTES_PER_S, START_TOKENS_PER_S)
    for _ in range(300):
        cost.observe(plan([1, 400], swaps()), result(swapped=50, swap_s=0.5, compute_s=0.2))
    assert cost.bytes_per_s == pytest.approx(100 * MIB, rel=0.02)
    assert cost.tokens_per_s == pytest.approx(2005, rel=0.02)


def test_decode_says_nothing_about_prefill_nor_does_who_did_not_measure() -> None:
    cost = SwapCost(MIB, 16)
    cost.observe(plan([1] * 256), result(compute_s=0.1))
    cost.observe(plan([1] * 256 + [200]), result(compute_s=0.1))
    cost.observe(plan([5]), result(compute_s=0.1))
    cost.observe(plan([500], swaps()), result())
    cost.observe(plan([]), result(compute_s=0.1))
    assert (cost.bytes_per_s, cost.tokens_per_s) == (START_BYTES_PER_S, START_TOKENS_PER_S)


def test_what_looked_too_dear_is_tried_again() -> None:
    """One slow copy must not end swapping for good: where nothing is copied, nothing is measured."""
    cost = SwapCost(MIB, 16)
    cost.observe(plan([1], swaps()), result(swapped=1, swap_s=5.0))
    assert cost.least_chance == math.inf
    for _ in range(20_000):
        cost.observe(plan([1]), result())
    assert cost.least_chance < 1


@pytest.mark.parametrize("wrong", [{"block_bytes": 0}, {"block_size": 0}, {"bytes_per_s": 0.0}, {"tokens_per_s": -1.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SwapCost(**{"block_bytes": 1, "block_size": 16, **wrong})


def test_of_equal_costs_the_youngest_goes() -> None:
    """C 25, with a host tier."""
    world = World(8, caching=True, host_slots=64)
    world.add("a", 63, 20, arrival=0.0)
    world.add("b", 63, 20, arrival=1.0)
    world.run_until_preempted()
    assert world.waiting_ids == ["b"]
    assert len(world.emitted["b"]) >= 1
    world.complete()
    assert world.scheduler.stats.recomputed_tokens == 0
    (why,) = [d for d in world.scheduler.explain() if d["what"] == "preempt"]
    assert (why["request_id"], why["blocks_won"], why["tokens"], why["chosen"], why["priority"]) == ("b", 4, 64, "swap", 0)
    assert 0 < why["swap_s"] < why["compute_s"]
    (back,) = [d for d in world.scheduler.explain() if d["what"] == "return"]
    assert (back["request_id"], back["had"], back["found"]) == ("b", 64, 64)


@pytest.mark.parametrize(
    ("priority", "order"), [(0, ["decodes", "young prompt"]), (1, ["young prompt", "decodes"])], ids=["by cost", "priority"]
)
def test_whom_it_costs_least_goes_first_and_a_lower_priority_whatever_it_costs(priority: int, order: list[str]) -> None:
    """A prompt just begun holds blocks for all of its tokens: 32 are computed for 7 blocks, against 14 for one."""
    world = World(12, caching=True, host_slots=64, max_chunk_tokens=16, cost=SwapCost(1, 16, bytes_per_s=10, tokens_per_s=1000))
    world.add("young prompt", 100, 40, arrival=0.0)
    world.step()
    world.add("decodes", 14, 90, arrival=1.0, priority=priority)
    world.step()
    ordered = by_worth(world.scheduler.state, world.scheduler.state.by_row.values())
    assert [s.request.request_id for s in ordered] == order


def test_only_the_last_decisions_are_kept_and_they_are_plain() -> None:
    world = World(9, caching=True, host_slots=64, max_seqs=4)
    for i in range(36):
        world.add(f"r{i}", 40, 40, arrival=float(i))
    world.complete()
    told = world.scheduler.explain()
    assert len(told) == 64 and {d["what"] for d in told} <= {"wait", "preempt", "return", "give up"}
    assert all(type(value) in (int, float, str, type(None)) for d in told for value in d.values())
    told[0].clear()
    assert world.scheduler.explain()[0]


def test_without_a_host_tier_the_choice_and_its_numbers_are_those_of_computing() -> None:
    """D 35."""
    plain, none = World(8), World(8, cost=SwapCost(1, 16, tokens_per_s=1000))
    for world in plain, none:
        for i in range(6):
            world.add(f"r{i}", 40 + i, 30, arrival=float(i))
        world.complete()
    assert plain.scheduler.stats == none.scheduler.stats
    why = next(d for d in none.scheduler.explain() if d["what"] == "preempt")
    assert (why["chosen"], why["swap_s"], why["compute_s"]) == ("compute", None, why["tokens"] / 1000)
