"""Swapping as the scheduler decides it (scenarios D): what leaves the device, what comes back, and that nobody stands still."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits


def pressed(usable: int, host_slots: int, **more) -> World:
    return World(usable, caching=True, host_slots=host_slots, **more)


def fill(world: World, num: int, prompt: int, new: int) -> None:
    for i in range(num):
        world.add(f"r{i}", prompt, new, arrival=float(i))


def test_blocks_whose_place_is_not_needed_never_travel() -> None:
    """The victim's blocks leave one by one, as the other grows."""
    world = pressed(8, 16)
    fill(world, 2, 63, 40)
    stats, demoted = world.scheduler.stats, []
    while "r0" not in world.finished:
        world.step()
        demoted.append(stats.demoted_blocks)
    assert sorted(set(demoted)) == [0, 1, 2, 3], "one for each block that the other came to need"
    world.complete()
    assert (stats.preemptions, stats.recomputed_tokens, stats.computed_tokens) == (1, 0, 2 * (63 + 39))
    assert stats.promoted_blocks > 0, "it comes back whole, with the block that is partly filled"


def test_no_host_tier_decides_as_before() -> None:
    """D 35. Nor does one that is never worth it."""
    outcomes = []
    for slots, cost in ((0, None), (50, SwapCost(1 << 40, 16))):
        world = pressed(20, slots, cost=cost)
        fill(world, 12, 70, 40)
        world.complete()
        stats = world.scheduler.stats
        assert stats.demoted_blocks == stats.promoted_blocks == 0 and stats.preemptions
        outcomes.append(
            [
                (p.rows.tolist(), p.starts.tolist(), p.lengths.tolist(), [a.request_id for a in p.admitted.values()])
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
    rows = {str(world.scheduler.rows.request_ids[row]): row for row in world.scheduler.state.by_row}
    tables = world.cache.tables[0]
    shared = tables.of(rows["old"])[0, :3].tolist()
    assert tables.of(rows["young"])[0, :3].tolist() == shared and world.used == 6
    world.run_until_preempted()
    while world.scheduler.num_waiting:
        assert world.scheduler.stats.demoted_blocks <= 2, "what is shared stays, as the other one holds it"
        plan = world.schedule()
        if not plan.admitted:
            world.finish(plan)
    (row,) = plan.admitted
    assert tables.of(row)[0, :3].tolist() == shared, "still the very blocks"
    world.finish(plan)
    world.complete()
    assert world.scheduler.stats.recomputed_tokens == 0


def test_no_storm_at_four_times_the_capacity() -> None:
    """C 30, and harder: nothing is computed twice."""
    world = pressed(100, 400)
    fill(world, 60, 40, 60)
    world.complete()
    often = [end.num_preemptions for end in world.finished.values()]
    assert sum(often) and sum(n > 1 for n in often) <= 0.1 * len(often) and max(often) <= 5
    assert world.scheduler.stats.recomputed_tokens == 0


def test_a_scheduler_of_a_host_tier_must_know_the_cost() -> None:
    with pytest.raises(ValueError, match="what swapping costs"):
        Scheduler(pressed(8, 16).cache, Limits(2, 64, 64))


def test_a_renewed_scheduler_has_an_empty_host_tier() -> None:
    world = pressed(8, 16)
    fill(world, 2, 60, 30)
    world.run_until_preempted()
    fresh, emissions = world.scheduler.rebuilt("broke")
    assert len(emissions.finished) == 2
    assert fresh.cache.host is not world.cache.host and fresh.cache.host.num_used == 0
    fresh.check_invariants()
