"""More is wanted than there is: nobody starves, no storm of preemptions, and what nobody wants again is not copied."""

from __future__ import annotations

import pytest
from fakes import World

from pagetide.scheduler.cost import SwapCost


@pytest.mark.parametrize("max_new", [512, *(pytest.param(n, marks=pytest.mark.stress) for n in (400, 10**4, 2**31 - 1))])
def test_no_storm_of_requests_that_run_to_the_context(max_new):
    """The forecast counts what a request can really come to, not what it was allowed."""
    world = World(usable=400, max_model_len=512, max_seqs=200, max_step_tokens=4096, forecast=True)
    for i in range(100):
        world.add(f"r{i}", 100 + i % 40, max_new=max_new, arrival=float(i))
    world.run()
    often = [end.num_preemptions for end in world.finished.values()]
    assert max(often) <= 5
    assert sum(n > 1 for n in often) <= 10
    assert world.scheduler.stats.recomputed_tokens < 0.2 * world.scheduler.stats.computed_tokens
    world.check_empty()


def fill(world: World, num: int, prompt: int, new: int) -> None:
    for i in range(num):
        world.add(f"r{i}", prompt, new, arrival=float(i))


@pytest.mark.parametrize("slots", [3, *(pytest.param(n, marks=pytest.mark.stress) for n in (20, 200))])
def test_everybody_gets_on(slots: int) -> None:
    """D 38. A hundred steps in which nobody runs, though somebody waits, never come."""
    world = World(16, caching=True, host_slots=slots, max_seqs=8)
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


def test_what_ended_requests_leave_behind_is_copied_no_longer_once_nobody_came_back_for_it() -> None:
    """Who was preempted comes back whole all the same."""
    cost = SwapCost(1, 16, bytes_per_s=700, tokens_per_s=1000)  # a block is computed in eleven times a copy
    world = World(150, caching=True, host_slots=2_000, cost=cost, forecast=True)
    fill(world, 300, 40, 60)
    world.complete()
    stats, learned = world.scheduler.stats, world.cache.swapping.offload_policy.chances
    assert 0 < cost.least_chance < 0.1 and learned[0] < 0.1
    assert stats.preemptions and stats.recomputed_tokens == 0
    assert 0 < stats.promoted_blocks < stats.demoted_blocks < world.cache.swapping.evicted_blocks
    last = [d for d in world.scheduler.explain() if d["what"] == "give up"][-1]
    assert (last["chance_new"], last["chance_found"]) == pytest.approx(learned, abs=0.05)
