"""Who gives way, how often, and how all come back: the same scenarios for computing again, for a cache, and for swapping."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World, continuation

from pagetide.scheduler.plan import Plan
from pagetide.scheduler.request import Sampling

KEPT = {"computed again": {}, "cached": {"caching": True}, "swapped": {"caching": True, "host_slots": 2000}}
every_way = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def until_preempted(world: World) -> None:
    while not world.scheduler.stats.preemptions:
        world.step()


def preempted(world: World, plan: Plan) -> list[dict]:
    """The decisions to preempt that led to `plan`."""
    return [d for d in world.scheduler.explain() if d["what"] == "preempt" and d["step"] == plan.step_id]


# ---- one victim --------------------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("prompt", [14, 15, 16])
def test_length_after_resume(kept: dict, prompt: int) -> None:
    """C 27: 5 tokens, preempted after 2, or as near as a block's border lets it: the rest is sampled, and no more."""
    world = World(8, block_size=4, **kept)
    world.add("a", prompt, max_new=12, arrival=0.0)
    world.add("b", prompt, max_new=5, arrival=1.0)
    until_preempted(world)
    before = len(world.emitted["b"])
    assert (world.scheduler.waiting_ids, before) == (["b"], 17 - prompt)
    first, *_, last = [new for plan in run(world) for new in plan.admitted if new.request_id == "b"]
    assert (first.num_prompt, len(first.token_ids)) == (last.num_prompt, len(first.token_ids)) == (prompt, prompt)
    assert len(last.token_ids) == prompt + before, "it comes back with what was sampled"
    end = world.finished["b"]
    assert (end.reason, len(end.token_ids), end.num_preemptions) == ("length", 5, 1)
    assert world.emitted["b"][:before] == continuation(world.requests["b"].prompt_token_ids, Sampling(before))
    world.check_outputs()
    world.check_empty()
    stats = world.scheduler.stats
    assert stats.computed_tokens - stats.recomputed_tokens == 2 * prompt + 11 + 4, "each entry counts once"


def run(world: World) -> list[Plan]:
    """To the end. Returns all plans there were."""
    world.run()
    return world.plans


@every_way
def test_alone_in_the_pool_it_ends_at_the_capacity(kept: dict) -> None:
    """C 29: nothing can be evicted, and nobody is there to give way."""
    world = World(4, **kept)
    world.add("old", 30, max_new=2)
    world.run()
    world.add("a", 40, max_new=100)
    world.run(most=60)
    end = world.finished["a"]
    assert (end.reason, len(end.token_ids), end.num_preemptions) == ("length", 4 * 16 - 40 + 1, 0)
    assert end.token_ids.tolist() == continuation(world.requests["a"].prompt_token_ids, Sampling(25))
    world.check_empty()


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
    world.run()
    world.check_outputs()


# ---- many ------------------------------------------------------------------------------------------------------------


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
    seated = [world.requests[new.request_id] for new in plan.admitted]
    back = [r.arrival for r in seated if r.request_id in before and not r.priority]
    assert back == sorted(back), "a younger one came back first"
    for name in before.intersection(world.scheduler.waiting_ids):
        passed = world.requests[name]
        assert not [r for r in seated if r.priority == passed.priority and r.arrival > passed.arrival], (
            f"{name} was passed"
        )
    world.finish(plan)


@pytest.mark.parametrize(
    ("kept", "forecast"), [*((kept, True) for kept in KEPT.values()), ({}, False)], ids=[*KEPT, "whatever fits"]
)
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


@every_way
def test_who_was_preempted_returns_before_younger_ones_and_the_oldest_first(kept: dict) -> None:
    """C 32, by name."""
    world = World(12, **kept)
    for i in range(3):
        world.add(f"old{i}", 60, max_new=80, arrival=float(i))
    for i in range(3):
        world.add(f"young{i}", 60, max_new=20, arrival=10.0 + i)
    world.run()
    world.check_outputs()
    order = world.started
    assert order[:5] == ["old0", "old1", "old2", "old1", "old2"]
    assert order.index("young0") > max(i for i, name in enumerate(order) if name == "old2")
    assert order.index("young0") < order.index("young1") < order.index("young2")


@every_way
def test_all_were_preempted_and_the_head_does_not_fit(kept: dict) -> None:
    """D 38: a step later somebody runs, in what is left of the pool; the one too large for it waits until it grows."""
    world = World(47, blocks_per_extent=4, **kept)
    world.add("large", 400, max_new=30, arrival=0.0)
    for i in range(3):
        world.add(f"r{i}", 60, max_new=30, arrival=1.0 + i)
    for _ in range(5):
        world.step()
    world.scheduler.pool.make_idle(11)
    assert world.scheduler.num_running == 0 and world.scheduler.num_waiting == 4
    world.scheduler.pool.limit_blocks = 15
    world.scheduler.pool.give_back(world.scheduler.pool.excess_extents)
    for _ in range(3):
        world.step()
    assert world.scheduler.num_running > 0 and world.scheduler.waiting_ids[0] == "large"
    while {"r0", "r1", "r2"} - set(world.finished):
        world.step()
    world.scheduler.pool.limit_blocks = 47
    world.scheduler.pool.grow(8)
    world.run()
    world.check_outputs()


# ---- aborts ----------------------------------------------------------------------------------------------------------

STATES = [
    "waiting", "between chunks", "decoding", "while its chunk runs", "while its decode runs", "preempted",
    "while it leaves", "half of it elsewhere", "while it comes back", "back",
]  # fmt: skip


@every_way
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(kept: dict, state: str) -> None:
    """H 59: its blocks, slots and row are there again for the next step; one end; the others do not notice."""
    world = World(9, max_chunk_tokens=20, max_seqs=2, **kept)
    world.add("a", 50, max_new=45, arrival=0.0)
    world.add("b", 60, max_new=30, arrival=1.0)
    world.add("c", 10, max_new=10, arrival=2.0)
    target = "c" if state == "waiting" else "b"
    plan = bring_to(world, state)
    told = list(world.emitted.get(target, []))
    assert world.scheduler.abort(target)
    if plan is not None:
        emissions = world.finish(plan)
        told += [t for name, t in zip(emissions.request_ids, emissions.tokens, strict=True) if name == target]
    held_by(world, world.schedule(), target)
    assert (world.finished[target].reason, world.finished[target].token_ids.tolist()) == ("aborted", told)
    assert world.scheduler.abort(target) is False
    world.run()
    world.check_outputs(but=(target,))
    world.check_empty()
    assert target not in world.started[len(world.plans) :]
    world.cache.reset()
    assert world.cache.pool.counts().free == 9
    assert world.cache.host.num_used == 0


def bring_to(world: World, state: str) -> Plan | None:
    """Run until b is (or c waits) in `state`. Returns the plan that is out, if it is to be in the middle of a step."""
    if state == "waiting":
        return None
    if state in ("between chunks", "while its chunk runs"):
        world.step()
        assert "b" not in world.emitted
        return world.schedule() if state == "while its chunk runs" else None
    if state in ("decoding", "while its decode runs"):
        while len(world.emitted.get("b", [])) < 3:
            world.step()
        return world.schedule() if state == "while its decode runs" else None
    while not world.scheduler.stats.preemptions:
        plan = world.schedule()
        if world.scheduler.stats.preemptions and state == "while it leaves":
            return plan
        world.finish(plan)
    assert "b" in world.scheduler.waiting_ids
    if state == "half of it elsewhere":
        for _ in range(20):
            world.step()
        assert "b" in world.scheduler.waiting_ids
    if state in ("while it comes back", "back"):
        while True:
            plan = world.schedule()
            if any(new.request_id == "b" for new in plan.admitted):
                break
            world.finish(plan)
        if state == "while it comes back":
            return plan
        world.finish(plan)
    return None


def held_by(world: World, plan: Plan, gone: str) -> None:
    """Nobody holds more than those who run need, in the step that follows; nor does anything wait on the host for `gone`."""
    world.finish(plan)
    assert gone not in world.scheduler.waiting_ids
    running = [n for n in world.requests if n not in world.finished and n not in world.scheduler.waiting_ids]
    written = {n: world.known(n) - 1 for n in running}  # all but the newest token have a place
    assert world.used == sum(world.cache.blocks_for(max(n, len(world.requests[name].prompt_token_ids)))
                             for name, n in written.items())  # fmt: skip
    assert gone not in world.cache.host.tails


# ---- ends at the borders of blocks -----------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("end", ["stop id", "max_new", "min_new"])
@pytest.mark.parametrize("total", [15, 16, 17, 19, 20, 21])
def test_ends_hold_at_block_borders_under_preemption(kept: dict, end: str, total: int) -> None:
    """L 81: prompt and output together end one token before a block's border, at it, and one behind it."""
    world = World(8, block_size=4, max_seqs=8, max_model_len=64, **kept)
    new = total - 10
    prompt = unrepeated(10, new)
    expected = continuation(prompt, Sampling(new))
    sampling = {
        "stop id": {"max_new": 40, "stop_token_ids": (expected[-1], 5_000)},
        "max_new": {"max_new": new, "stop_token_ids": (5_000,)},
        "min_new": {"max_new": 40, "min_new_tokens": new, "stop_token_ids": (expected[1], expected[-1])},
    }[end]  # the second token is a stop id too, but comes too early
    world.add("older", 15, max_new=12, arrival=0.0)
    world.add("a", prompt, arrival=1.0, **sampling)
    until_preempted(world)
    assert world.scheduler.waiting_ids == ["a"] and len(world.emitted["a"]) == 3
    world.run()
    assert world.finished["a"].token_ids.tolist() == expected
    assert world.finished["a"].reason == ("length" if end == "max_new" else "stop")
    world.check_outputs()
    world.check_empty()


def unrepeated(length: int, new: int) -> np.ndarray:
    """A prompt whose continuation of `new` tokens has none twice."""
    for seed in range(1000):
        prompt = np.random.default_rng(seed).integers(0, 900, length).astype(np.int32)
        if len(set(continuation(prompt, Sampling(new)))) == new:
            return prompt
    raise AssertionError("every continuation repeats a token")
