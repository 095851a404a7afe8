"""Who gives way, how often, and how all come back: the same scenarios for computing again, for a cache, and for swapping."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World, continuation

from pagetide.scheduler.plan import Plan
from pagetide.scheduler.preemption import by_worth, preempt, preempt_until
from pagetide.scheduler.request import Sampling

KEPT = {"computed again": {}, "cached": {"caching": True}, "swapped": {"caching": True, "host_slots": 2000}}
every_way = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def preempted(world: World, plan: Plan) -> list[dict]:
    """The decisions to preempt that led to `plan`."""
    return [d for d in world.scheduler.explain() if d["what"] == "preempt" and d["step"] == plan.step_id]


@every_way
@pytest.mark.parametrize("prompt", [14, 15, 16])
def test_length_after_resume(kept: dict, prompt: int) -> None:
    """C 27: 5 tokens, preempted after 2, or as near as a block's border lets it: the rest is sampled, and no more."""
    world = World(8, block_size=4, **kept)
    world.add("a", prompt, max_new=12, arrival=0.0)
    world.add("b", prompt, max_new=5, arrival=1.0)
    world.run_until_preempted()
    before = len(world.emitted["b"])
    assert (world.waiting_ids, before) == (["b"], 17 - prompt)
    world.run()
    first, *_, last = [new for plan in world.plans for new in plan.admitted.values() if new.request_id == "b"]
    assert len(first.prompt_token_ids) == len(last.prompt_token_ids) == len(first.token_ids) == prompt
    assert len(last.token_ids) == prompt + before, "it comes back with what was sampled"
    end = world.finished["b"]
    assert (end.reason, len(end.token_ids), end.num_preemptions) == ("length", 5, 1)
    assert world.emitted["b"][:before] == continuation(world.requests["b"].prompt_token_ids, Sampling(before))
    world.check_outputs()
    world.check_empty()
    stats = world.scheduler.stats
    assert stats.computed_tokens - stats.recomputed_tokens == 2 * prompt + 11 + 4, "each entry counts once"


@every_way
def test_no_second_victim_for_a_covered_need(kept: dict) -> None:
    """Four rows need a block each at once, and so does the youngest, which holds six: it alone goes."""
    world = World(22, **kept)
    for i in range(4):
        world.add(f"r{i}", 4 * 16 - 5, max_new=12, arrival=float(i))
    world.add("young", 6 * 16 - 5, max_new=12, arrival=9.0)
    while not world.scheduler.stats.preemptions:
        assert "young" not in world.finished
        plan = world.schedule()
        victims = [d["request_id"] for d in preempted(world, plan)]
        assert world.scheduler.num_running == 5 - len(victims)
        world.finish(plan)
    assert victims == ["young"]
    world.complete()


def shared_world() -> World:
    """Six requests that run, of 2 to 7 blocks; the last two share all full blocks of their prompt with the first."""
    world = World(60, block_size=4, forecast=False)
    for i in range(4):
        world.add(f"r{i}", 9 + 5 * i, max_new=40, arrival=float(i))
    for i in (4, 5):
        world.add(f"r{i}", world.requests["r0"].prompt_token_ids, max_new=40, arrival=float(i), fork_of="r0")
    while world.scheduler.num_running < 6:
        world.step()
    return world


@pytest.mark.parametrize("need", [0, 1, 4, 9, 12, 20])
def test_as_many_victims_at_once_as_one_by_one(need: int) -> None:
    world, naive = shared_world(), shared_world()
    wanted = world.cache.pool.available + need
    state, pool = world.scheduler.state, world.cache.pool
    assert preempt_until(state, lambda: wanted - pool.available, state.by_row) <= 0
    state = naive.scheduler.state
    while naive.cache.pool.available < wanted:
        preempt(state, by_worth(state, state.by_row.values())[-1:])
    assert world.waiting_ids == naive.waiting_ids
    assert (need > 0) == bool(world.waiting_ids) == world.scheduler.state.has_preempted
    world.complete()


def test_a_need_that_cannot_be_met_leaves_the_spared() -> None:
    world = shared_world()
    state, pool = world.scheduler.state, world.cache.pool
    left = preempt_until(state, lambda: 1000 - pool.available, state.by_row, spared=2)
    assert left == 1000 - pool.available and world.waiting_ids == ["r2", "r3", "r4", "r5"]
    assert not state.admits
    world.complete()


def check_step(world: World) -> None:
    """A step in which no victim is one too many, and nobody is seated before an older one of its priority that comes back."""
    before = set(world.started)
    plan = world.schedule()
    victims, counts = preempted(world, plan), world.cache.pool.counts()
    if victims:
        last = victims[-1]
        lacked = last["tokens"] % world.cache.block_size == 0  # a block itself
        left = counts.free + counts.cached + counts.in_flight
        assert left < last["blocks_won"] + lacked, f"{left} blocks are left: {last['request_id']} need not have gone"
    seated = [world.requests[new.request_id] for new in plan.admitted.values()]
    back = [r.arrival for r in seated if r.request_id in before and not r.priority]
    assert back == sorted(back), "a younger one came back first"
    for name in before.intersection(world.waiting_ids):
        passed = world.requests[name]
        assert not [r for r in seated if r.priority == passed.priority and r.arrival > passed.arrival], f"{name} was passed"
    world.finish(plan)


@pytest.mark.parametrize(("kept", "forecast"), [(KEPT["swapped"], True), ({}, False)], ids=["swapped", "whatever fits"])
def test_no_storm_and_the_order_of_return(kept: dict, forecast: bool) -> None:
    """C 30, C 32: 200 requests that all fit to begin with, and come to 1.3 times the capacity."""
    rng = np.random.default_rng(30)
    lengths = np.column_stack((rng.integers(20, 120, 200), rng.integers(56, 64, 200))).tolist()
    usable = int(sum(-(-(prompt + new - 1) // 16) for prompt, new in lengths) / 1.3)
    world = World(usable, max_step_tokens=20_000, forecast=forecast, **kept)
    for i, (prompt, new) in enumerate(lengths):
        world.add(f"r{i}", prompt, max_new=new, arrival=float(i), priority=i % 7 == 3)
    while world.scheduler.has_work:
        check_step(world)
    world.check_outputs()
    world.check_empty()
    often = [end.num_preemptions for end in world.finished.values()]
    assert sum(often) > 20, "hardly anything was forced out"
    assert max(often) <= 5 and sum(n > 1 for n in often) <= 20
