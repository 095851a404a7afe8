"""Swapping as the scheduler decides it (scenarios D): what leaves the device, what comes back, and that nobody stands still."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.scheduler import Limits, Scheduler


def pressed(usable: int, host_slots: int, **more) -> World:
    return World(usable, caching=True, host_slots=host_slots, **more)


def fill(world: World, num: int, prompt: int, new: int) -> None:
    for i in range(num):
        world.add(f"r{i}", prompt, new, arrival=float(i))


def test_a_preempted_sequence_comes_back_whole() -> None:
    """Its full blocks and the one that is partly filled: nothing is computed twice."""
    world = pressed(8, 16)
    fill(world, 2, 60, 30)
    world.run()
    world.check_outputs()
    world.check_empty()
    stats = world.scheduler.stats
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 0)
    assert stats.computed_tokens == 2 * (60 + 29)
    assert stats.promoted_blocks > 0


def test_blocks_whose_place_is_not_needed_never_travel() -> None:
    """The victim's blocks leave one by one, as the other grows."""
    world = pressed(8, 16)
    fill(world, 2, 63, 40)
    stats, demoted = world.scheduler.stats, []
    while "r0" not in world.finished:
        world.step()
        demoted.append(stats.demoted_blocks)
    assert sorted(set(demoted)) == [0, 1, 2, 3], "one for each block that the other came to need"
    world.run()
    world.check_outputs()
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 0)


def test_a_host_tier_that_is_full_falls_back_to_computing() -> None:
    """D 34. All six blocks of the victim are needed."""
    world = pressed(12, 4)
    world.add("old", 90, 100, arrival=0.0)
    world.add("young", 90, 20, arrival=1.0)
    while world.scheduler.has_work:
        world.step()
        assert world.cache.host.num_used <= 4
    world.check_outputs()
    stats = world.scheduler.stats
    assert stats.preemptions and stats.demoted_blocks and 0 < stats.recomputed_tokens < 97


def test_no_host_tier_decides_as_before() -> None:
    """D 35. Nor does one that is never worth it."""
    outcomes = []
    for slots, cost in ((0, None), (50, SwapCost(1 << 40, 16))):
        world = pressed(20, slots, cost=cost)
        fill(world, 12, 70, 40)
        world.run()
        world.check_outputs()
        stats = world.scheduler.stats
        assert stats.demoted_blocks == stats.promoted_blocks == 0 and stats.preemptions
        outcomes.append(
            [
                (p.rows.tolist(), p.starts.tolist(), p.lengths.tolist(), [a.request_id for a in p.admitted])
                for p in world.plans
            ]
        )
    assert outcomes[0] == outcomes[1]


def test_shared_blocks_stay() -> None:
    """D 37. The victim shares 3 of 5 blocks with one that runs: at most 2 leave, and it comes back to the same 3."""
    world = pressed(6, 16)
    prompt = world.prompt(49)
    world.add("old", prompt, 40, arrival=0.0)
    world.step()
    world.add("young", np.append(prompt[:48], world.prompt(25)), 20, arrival=1.0)
    world.step()
    rows = {str(world.scheduler.rows.request_ids[row]): row for row in world.scheduler._running.by_row}
    tables = world.cache.tables[0]
    shared = tables.of(rows["old"])[0, :3].tolist()
    assert tables.of(rows["young"])[0, :3].tolist() == shared and world.used == 6
    while not world.scheduler.stats.preemptions:
        world.step()
    while world.scheduler.num_waiting:
        assert world.scheduler.stats.demoted_blocks <= 2, "what is shared stays, as the other one holds it"
        plan = world.schedule()
        if not plan.admitted:
            world.finish(plan)
    (new,) = plan.admitted
    assert tables.of(new.row)[0, :3].tolist() == shared, "still the very blocks"
    world.finish(plan)
    world.run()
    world.check_outputs()
    assert world.scheduler.stats.recomputed_tokens == 0


@pytest.mark.parametrize("slots", [3, *(pytest.param(n, marks=pytest.mark.stress) for n in (20, 200))])
def test_everybody_gets_on(slots: int) -> None:
    """D 38. A hundred steps in which nobody runs, though somebody waits, never come."""
    world = pressed(16, slots, max_seqs=8)
    fill(world, 30, 100, 90)
    idle = 0
    for _ in range(20_000):
        if not world.scheduler.has_work:
            break
        world.step()
        idle = idle + 1 if world.scheduler.num_waiting and not world.scheduler.num_running else 0
        assert idle < 3
    world.check_outputs()
    world.check_empty()


def test_no_storm_at_four_times_the_capacity() -> None:
    """C 30, and harder: nothing is computed twice."""
    world = pressed(100, 400)
    fill(world, 60, 40, 60)
    world.run()
    world.check_outputs()
    often = [end.num_preemptions for end in world.finished.values()]
    assert sum(often) and sum(n > 1 for n in often) <= 0.1 * len(often) and max(often) <= 5
    assert world.scheduler.stats.recomputed_tokens == 0


def test_priorities_hold_with_a_host_tier() -> None:
    world = pressed(10, 50)
    world.add("low", 40, 60, priority=2, arrival=0.0)
    world.add("high", 40, 60, priority=0, arrival=1.0)
    world.add("middle", 40, 60, priority=1, arrival=2.0)
    world.run()
    world.check_outputs()
    assert world.finished["high"].num_preemptions == 0 < world.finished["low"].num_preemptions


def test_an_evicted_prefix_is_demoted_and_found_again() -> None:
    world = pressed(10, 30)
    prompts = [world.prompt(97) for _ in range(4)]
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            world.add(f"t{turn}p{i}", prompt, 1)
            world.run()
    world.check_outputs()
    stats = world.scheduler.stats
    assert stats.prefix_lookups.hit_tokens == 2 * 4 * 96, (
        "whatever was computed once is found, over three times the pool"
    )
    assert stats.promoted_blocks > 24


@pytest.mark.parametrize("running", [False, True], ids=["idle", "while others run"])
def test_a_reset_forgets_every_tier(running: bool) -> None:
    """B 21: what lies on the host is found no more, nor is what was about to leave."""
    world = pressed(10, 30)
    prompts = [world.prompt(65) for _ in range(4)]
    for i, prompt in enumerate(prompts):
        world.add(f"p{i}", prompt, 1)
        world.run()
    assert world.cache.host.num_used + world.cache.pool.counts().cached == 16 > world.cache.pool.counts().cached
    if running:
        world.add("r", 40, 30)
        world.step()
    world.cache.reset()
    assert (world.cache.host.num_used, world.cache.pool.counts().cached) == (0, 0)
    for i, prompt in enumerate(prompts):
        world.add(f"again{i}", prompt, 1)
        world.run()
    stats = world.scheduler.stats
    assert stats.prefix_lookups.hit_tokens == stats.promoted_blocks == 0
    world.check_outputs()
    world.check_empty()


def test_what_ended_requests_leave_behind_is_copied_no_longer_once_nobody_came_back_for_it() -> None:
    """Who was preempted comes back whole all the same."""
    cost = SwapCost(1, 16, bytes_per_s=700, tokens_per_s=1000)  # a block is computed in eleven times a copy
    world = pressed(150, 2_000, cost=cost, forecast=True)
    fill(world, 300, 40, 60)
    world.run()
    world.check_outputs()
    stats, learned = world.scheduler.stats, world.cache.swapping.demotion.chances
    assert 0 < cost.least_chance < 0.1 and learned[0] < 0.1
    assert stats.preemptions and stats.recomputed_tokens == 0
    assert 0 < stats.promoted_blocks < stats.demoted_blocks < world.cache.swapping.evicted_blocks
    last = [d for d in world.scheduler.explain() if d["what"] == "give up"][-1]
    assert (last["chance_new"], last["chance_found"]) == pytest.approx(learned, abs=0.05)


def test_what_waits_and_ends_gives_its_tail_up() -> None:
    world = pressed(8, 16)
    world.add("r0", 60, 30, arrival=0.0)
    world.add("r1", 57, 30, arrival=1.0)
    while not world.scheduler.stats.preemptions:
        world.step()
    assert list(world.cache.host.tails) == ["r1"]
    world.scheduler.abort("r1")
    world.step()
    assert not world.cache.host.tails
    world.run()
    assert world.finished["r1"].reason == "aborted"
    world.cache.reset()
    assert world.cache.host.num_used == 0


def test_a_scheduler_of_a_host_tier_must_know_the_cost() -> None:
    with pytest.raises(ValueError, match="what swapping costs"):
        Scheduler(pressed(8, 16).cache, Limits(2, 64, 64))


def test_a_renewed_scheduler_has_an_empty_host_tier() -> None:
    world = pressed(8, 16)
    fill(world, 2, 60, 30)
    while not world.scheduler.stats.preemptions:
        world.step()
    fresh, emissions = world.scheduler.rebuilt("broke")
    assert len(emissions.finished) == 2
    assert fresh.cache.host is not world.cache.host and fresh.cache.host.num_used == 0
    fresh.check_invariants()
