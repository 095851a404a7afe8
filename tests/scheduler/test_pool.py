"""The pool grows and gives extents back while requests run: exact numbers, and the same tokens as ever."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.plan import InvalidCallOrder, Result
from pagetide.scheduler.request import PromptTooLong


def elastic(num_extents: int, num_mapped: int | None = None, per: int = 4, **more) -> World:
    """A world of `num_extents` extents of `per` blocks of 4 tokens."""
    return World(num_extents * per - 1, 4, blocks_per_extent=per, num_mapped=num_mapped, **more)


def half_done() -> World:
    """Seven requests began, three of them have ended: 16 live blocks and 15 free ones all over eight extents of four."""
    world = elastic(8)
    for i in range(7):
        world.add(f"r{i}", 13, max_new=3 if i % 2 else 16, arrival=float(i))
    for _ in range(3):
        world.step()
    assert (world.used, world.cache.pool.available) == (16, 15)
    return world


def resized(world: World) -> tuple[list[int], list[int]]:
    """The extents that the last plan mapped and unmapped."""
    resize = world.plans[-1].resize
    return resize.map.tolist(), resize.unmap.tolist()


def test_growth_is_part_of_the_next_plan_and_true_after_it():
    world = elastic(4, num_mapped=1)
    assert not world.scheduler.has_work
    assert world.scheduler.pool.grow(2) == 2
    assert world.scheduler.has_work
    assert (world.cache.pool.usable, world.scheduler.pool.num_extents) == (3, 3)
    plan = world.schedule()
    assert (len(plan.rows), plan.resize.map.tolist(), plan.resize.unmap.tolist()) == (0, [1, 2], [])
    assert not plan.is_empty
    assert world.cache.pool.usable == 3, "not before it is mapped"
    world.finish(plan)
    assert (world.cache.pool.usable, world.scheduler.stats.grown_extents) == (11, 2)
    assert not world.scheduler.has_work
    assert world.scheduler.pool.grow(5) == 1, "no more are reserved"
    world.step()
    assert world.scheduler.pool.grow(1) == 0


def test_giving_back_preempts_the_last_in_order_and_no_more_than_it_must():
    world = elastic(8)
    for i, priority in enumerate([0, 1, 0, 0]):
        world.add(f"r{i}", 21, max_new=20, arrival=float(i), priority=priority)  # 6 blocks each
    world.step()
    assert (world.used, world.cache.pool.available, world.scheduler.pool.idle_extents) == (24, 7, 1)
    world.scheduler.pool.make_idle(3)
    assert world.scheduler.pool.give_back(3) == 3
    assert world.waiting_ids == ["r1"], "of the lowest priority, though not the youngest"
    assert world.cache.pool.available == 1
    world.scheduler.pool.make_idle(1)
    assert world.scheduler.pool.give_back(1) == 1
    assert world.waiting_ids == ["r3", "r1"]
    world.step()
    assert len(resized(world)[1]) == 4
    world.scheduler.pool.grow(4)
    world.run()
    assert world.scheduler.stats.preemptions >= 2
    world.check_outputs()
    world.check_empty()


def test_who_was_preempted_to_give_back_does_not_return_in_that_step():
    world = elastic(8, max_seqs=3)
    world.add("a", 21, max_new=20, arrival=0.0)  # 6 blocks
    world.add("b", 41, max_new=20, arrival=1.0)  # 11 blocks
    world.step()
    world.scheduler.pool.make_idle(4)
    assert world.scheduler.pool.give_back(4) == 4
    world.add("c", 5, max_new=2, arrival=2.0)
    world.step()
    assert (world.waiting_ids, world.cache.pool.available) == (["b", "c"], 9)
    world.add("first", 5, max_new=2, priority=-1)
    world.step()
    assert world.waiting_ids == ["b", "c"], "from the next one on it is as ever"
    world.scheduler.pool.grow(4)
    world.complete()


def test_what_was_made_idle_goes_slice_by_slice_and_to_no_newcomer():
    world = elastic(8)
    world.add("a", 21, max_new=30, arrival=0.0)  # 6 blocks of 31
    world.step()
    world.add("b", 37, max_new=2, arrival=1.0)  # 10 blocks, of which 9 are left in the end
    for left in (4, 3, 2, 1):
        world.scheduler.pool.make_idle(left)
        assert world.scheduler.pool.give_back(1) == 1
        world.step()
        assert world.waiting_ids == ["b"], "it would be computed for one step, and preempted in the next"
    assert world.scheduler.stats.preemptions == 0
    assert world.scheduler.pool.idle_extents == 2
    world.add("first", 9, max_new=2, priority=-1)
    world.step()
    assert world.waiting_ids == ["b"]
    assert "first" in world.started
    world.scheduler.pool.grow(4)
    world.complete()


def test_what_was_made_idle_and_not_given_back_can_be_had_a_step_later():
    world = elastic(8)
    world.add("a", 21, max_new=30, arrival=0.0)
    world.step()
    world.add("b", 61, max_new=2, arrival=1.0)  # 16 blocks of the 25 that are free
    world.scheduler.pool.make_idle(5)
    world.step()
    assert world.waiting_ids == ["b"]
    world.step()
    assert world.waiting_ids == [], "it is not forgotten that it may fit now"
    world.complete()


def test_aborted_requests_blocks_are_given_back_before_anyone_is_preempted():
    world = elastic(5)
    world.add("a", 21, max_new=8, arrival=0.0)
    world.add("b", 33, max_new=20, arrival=1.0)
    world.step()
    world.scheduler.abort("b")
    world.scheduler.pool.make_idle(3)
    assert world.scheduler.pool.give_back(3) == 3
    assert world.scheduler.stats.preemptions == 0
    world.run()
    assert world.finished["b"].reason == "aborted"


def test_a_fixed_pool_is_never_resized():
    world = World(usable=15, block_size=4)
    world.add("a", 20, max_new=10)
    world.step()
    world.scheduler.pool.make_idle(3)
    assert world.scheduler.pool.give_back(3) == world.scheduler.pool.grow(3) == 0
    assert world.scheduler.stats.preemptions == 0
    assert not world.schedule().moves_memory


def test_growth_that_was_not_planned_yet_is_called_off_first():
    world = elastic(6, num_mapped=4)
    world.scheduler.pool.grow(2)
    assert world.scheduler.pool.give_back(3) == 3
    world.step()
    assert resized(world) == ([], [3])
    world.scheduler.pool.grow(1)
    world.scheduler.pool.give_back(1)
    assert not world.scheduler.has_work


def test_extents_on_their_way_out_are_kept_first():
    world = half_done()
    assert world.scheduler.pool.give_back(3) == 3
    assert world.scheduler.pool.grow(2) == 2
    assert world.cache.pool.usable == 31 - 4
    plan = world.schedule()
    assert (len(plan.resize.map), len(plan.resize.unmap), plan.copies is None) == (0, 1, False)
    world.finish(plan)
    assert (world.cache.pool.counts().mapped, world.cache.pool.counts().in_flight) == (27, 0)
    world.complete()


def test_the_pool_is_resized_between_steps_only():
    world = elastic(4)
    plan = world.schedule()
    for call in (world.scheduler.pool.grow, world.scheduler.pool.give_back, world.scheduler.pool.make_idle):
        with pytest.raises(InvalidCallOrder, match="plan 0 is out"):
            call(1)
    world.finish(plan)
    for call in (world.scheduler.pool.grow, world.scheduler.pool.give_back, world.scheduler.pool.make_idle):
        with pytest.raises(ValueError, match="-1 extents"):
            call(-1)


@pytest.mark.parametrize("wrong", [{"mapped": [2]}, {"mapped": [3]}, {"unmapped": [2]}])
def test_a_result_must_be_about_the_plans_extents(wrong):
    world = elastic(6, num_mapped=2)
    world.scheduler.pool.grow(2)
    plan = world.schedule()
    named = {name: np.array(extents) for name, extents in wrong.items()}
    with pytest.raises(InvalidCallOrder, match="did not name"):
        world.scheduler.apply(plan, Result(plan.step_id, plan.rows, plan.rows, **named))
    world.finish(plan)


def test_refused_is_only_what_the_reserved_pool_cannot_hold():
    world = elastic(4, num_mapped=1)
    world.add("fits the reserve", 60, max_new=1)
    with pytest.raises(PromptTooLong, match=r"61 tokens need 16 blocks .* has 15"):
        world.add("never", 61)
    world.step()
    assert world.scheduler.starving
    world.scheduler.pool.grow(3)
    world.complete()


def test_the_last_one_waits_for_growth_and_ends_at_the_reserved_capacity():
    world = elastic(4, num_mapped=2)
    world.add("a", 20, max_new=100)
    while not world.scheduler.starving:
        world.step()
    assert world.finished == {}
    assert (world.scheduler.num_running, world.waiting_ids, world.used) == (0, ["a"], 0)
    assert len(world.emitted["a"]) == 7 * 4 - 20 + 1
    assert world.scheduler.pool.wanted_blocks() >= 8
    for _ in range(2):
        assert world.scheduler.pool.grow(1) == 1
        while world.scheduler.has_work and not world.scheduler.starving:
            world.step()
    end = world.finished["a"]
    assert (end.reason, len(end.token_ids), end.num_preemptions) == ("length", 15 * 4 - 20 + 1, 2)


def test_the_last_one_ends_where_the_limit_says_that_it_may_never_go_on():
    world = elastic(4, num_mapped=2)
    world.scheduler.pool.limit_blocks = 7
    world.add("a", 20, max_new=100)
    world.run()
    end = world.finished["a"]
    assert (end.reason, len(end.token_ids), end.num_preemptions) == ("length", 7 * 4 - 20 + 1, 0)


def test_limit_below_use():
    """Scenario 63: deferred with the overage, no admission, converges, applied; raised again it works, up to the reserve."""
    world = elastic(8)
    for i in range(4):
        world.add(f"r{i}", 21, max_new=4 + 6 * i, arrival=float(i))  # 6 blocks each
    world.step()
    for _ in range(64):
        world.scheduler.state.forecast.observe(1000, 1000)  # they all run on to the end
    world.scheduler.pool.limit_blocks = 11
    assert world.scheduler.pool.excess_extents == 5
    world.add("late", 9, max_new=5, arrival=9.0)
    while world.scheduler.pool.excess_extents:
        spare = (world.cache.pool.usable - world.scheduler.pool.running_blocks()) // 4
        world.scheduler.pool.give_back(min(world.scheduler.pool.excess_extents, max(0, spare)))
        world.step()
        assert "late" not in world.started or world.used <= 11
        assert world.scheduler.stats.preemptions == 0
    assert set(world.finished) == {"r0", "r1", "r2"}, "it was applied when enough had ended"
    assert world.cache.pool.counts().mapped <= 11
    assert world.scheduler.pool.grow(5) == 0, "the limit is reached"
    while "late" not in world.started:
        world.step()
    world.run()
    world.scheduler.pool.limit_blocks = 10**9
    assert (world.scheduler.pool.limit_blocks, world.scheduler.pool.grow(100)) == (31, 5)
    world.step()
    assert world.cache.pool.usable == 31
    world.check_outputs()


def test_who_needs_more_than_the_limit_waits_aside():
    world = elastic(8)
    world.scheduler.pool.limit_blocks = 10
    world.add("big", 50, max_new=3, arrival=0.0)
    world.add("small", 17, max_new=3, arrival=1.0)
    world.add("gone", 60, max_new=3, arrival=2.0)
    world.step()
    assert (world.started, world.waiting_ids) == (["small"], ["big", "gone"])
    while not world.scheduler.starving:
        world.step()
    assert world.scheduler.has_work
    world.scheduler.abort("gone")
    world.step()
    assert world.finished["gone"].reason == "aborted"
    world.scheduler.pool.limit_blocks = 31
    assert not world.scheduler.starving
    world.complete(but=("gone",))
    with pytest.raises(ValueError, match="negative"):
        world.scheduler.pool.limit_blocks = -1


def test_wanted_blocks_covers_the_next_step_and_the_peak():
    world = elastic(64, num_mapped=1, per=8, max_seqs=4)
    scheduler = world.scheduler
    assert scheduler.pool.wanted_blocks() == 0
    world.add("a", 20, max_new=40)
    assert -(-(20 + 20) // 4) <= scheduler.pool.wanted_blocks() <= -(-(20 + 40) // 4), "between half of max_new and all of it"
    for i in range(7):
        world.add(f"r{i}", 20, max_new=40)
    four = scheduler.pool.wanted_blocks()
    assert 4 * 10 <= four <= 4 * 15, "as many as there are rows"
    scheduler.pool.grow(-(-(four + 1) // 8))
    world.step()
    while scheduler.num_running < 4:
        world.step()
        assert scheduler.pool.wanted_blocks() <= four + 2
    running = scheduler.rows.known[:4]
    assert scheduler.pool.wanted_blocks() >= int((-(-running // 4)).sum())
    scheduler.pool.grow(64)
    world.run()
    assert scheduler.pool.wanted_blocks() == 0
    world.check_outputs()


def test_wanted_blocks_ends_at_the_capacity():
    world = elastic(4, num_mapped=1)
    for i in range(50):
        world.add(f"r{i}", 40, max_new=40)
    assert world.scheduler.pool.wanted_blocks() == 15


def test_growing_to_what_is_wanted_never_starves():
    world = elastic(40, num_mapped=1, max_seqs=6, forecast=True)
    rng = np.random.default_rng(3)
    for i in range(40):
        world.add(f"r{i}", int(rng.integers(1, 60)), max_new=int(rng.integers(1, 60)), arrival=float(i))
    while world.scheduler.has_work:
        wanted = -(-(world.scheduler.pool.wanted_blocks() + 1) // 4)  # extents, with the null block
        world.scheduler.pool.grow(max(0, wanted - world.scheduler.pool.num_extents))
        world.step()
        assert len(world.plans[-1].rows) or world.plans[-1].resize
    world.check_outputs()
    assert world.cache.pool.usable < 40 * 4 - 1, "what nobody wants is not mapped"


def test_a_broken_scheduler_goes_on_with_the_same_extents():
    world = elastic(6, num_mapped=3)
    world.add("a", 20, max_new=12)
    world.step()
    world.scheduler.pool.limit_blocks = 19
    world.scheduler.pool.grow(1)
    world.schedule()
    fresh, _ = world.scheduler.rebuilt("broke", mapped=frozenset({0, 1, 2, 3}))
    assert (fresh.cache.pool.usable, fresh.pool.limit_blocks) == (15, 19)
    fresh, _ = world.scheduler.rebuilt("broke")
    assert (fresh.cache.pool.usable, fresh.pool.num_extents) == (11, 3)
    fresh.check_invariants()


@pytest.mark.parametrize("kept", [{}, {"caching": True}, {"host_slots": 20}], ids=["nothing", "prefixes", "a host tier"])
def test_blocks_that_a_copy_holds_count_for_whom_they_come_free(kept):
    """A victim's blocks have just moved, and are free with the next plan: no second victim, the needy one waits a step."""
    caching = bool(kept)
    world = World(15, block_size=4, blocks_per_extent=4, **{"caching": caching} | kept)
    for name, prompt, new, arrival in (("a", 12, 30, 0), ("h", 8, 1, 0.5), ("b", 22, 30, 1), ("y", 6, 30, 3)):
        world.add(name, prompt, new, arrival=arrival)
    world.step()
    world.cache.reset()
    assert world.scheduler.pool.give_back(1) == 1
    plan = world.schedule()
    assert world.scheduler.stats.preemptions == 1 and world.waiting_ids == ["y"]
    assert plan.copies is not None and len(plan.rows) == 1, "b decodes, a waits for a block that is copied to"
    world.finish(plan)
    plan = world.schedule()
    assert len(plan.rows) == 2
    world.finish(plan)
    world.scheduler.pool.grow(1)
    world.complete()


@pytest.mark.parametrize(
    ("forecast", "max_new", "gone", "new"),
    [(False, 30, ("gone", "a", "b"), (18, 2)), (True, 3, ("gone", "b"), (13, 8))],  # 5 blocks; up to 6, beside 3 of a
    ids=["limit", "forecast"],
)
def test_blocks_in_flight_are_room_for_a_newcomer(forecast, max_new, gone, new):
    """Blocks have moved whose sequences end before the copies are made: they come free with these, and a newcomer that the
    limit leaves room for, or that can grow in the pool as it is then, computes in the same step.
    """
    world = elastic(3, forecast=forecast)
    for name in ("gone", "a", "b"):
        world.add(name, 9, max_new=max_new)  # 3 blocks each
    world.step()
    world.abort("gone")
    assert (world.scheduler.pool.give_back(1), world.scheduler.pool.grow(1)) == (1, 1), "the blocks move, the extent stays"
    for name in gone[1:]:
        world.abort(name)
    if not forecast:
        world.scheduler.pool.limit_blocks = 5
    world.add("new", *new)
    plan = world.schedule()
    counts = world.cache.pool.counts()
    assert (world.cache.pool.usable, counts.in_flight, len(plan.copies.sources)) == (11, 4, 2)
    assert [new.request_id for new in plan.admitted.values()] == ["new"]
    assert forecast or world.used == 5
    world.finish(plan)
    world.complete(but=gone)


def test_a_limit_may_be_set_while_a_plan_is_pending():
    world = World(31, block_size=4, blocks_per_extent=4)
    world.add("a", 8)
    plan = world.schedule()
    world.scheduler.pool.limit_blocks = 11
    assert (world.scheduler.pool.limit_blocks, world.scheduler.pool.excess_extents) == (11, 5)
    world.finish(plan)
    world.run()


def test_blocks_are_withheld_until_they_are_given_back_or_a_step_is_planned():
    world = World(31, block_size=4, blocks_per_extent=4)
    pool, state = world.scheduler.pool, world.scheduler.state
    pool.make_idle(3)
    assert (state.withheld_blocks, state.admits) == (12, True), "nothing had to be preempted"
    assert pool.give_back(2) == 2
    assert state.withheld_blocks == 4 and pool.is_resizing
    world.step()
    assert state.withheld_blocks == 0 and not pool.is_resizing
    world.add("first", 14, max_new=9, arrival=0.0)
    world.add("a", 40, arrival=1.0)
    world.step()
    pool.make_idle(4)
    assert world.waiting_ids == ["a"] and not state.admits, "it would be preempted again"
    pool.reopen_admission()
    assert state.admits and state.withheld_blocks == 0
    pool.make_idle(5)
    assert world.waiting_ids == ["first", "a"] and state.admits, "what is left after the blocks withheld is for the first"
