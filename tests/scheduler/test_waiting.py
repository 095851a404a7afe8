"""Who waits for a row: order, aging, who may pass whom."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from fakes import World

from pagetide.scheduler.admission import MOST_PASSES, MOST_TRIED
from pagetide.scheduler.waiting import AGING_S


def test_a_step_of_priority_weighs_as_much_as_some_seconds_of_waiting() -> None:
    world = World(64, max_seqs=1)
    world.add("first", 8, 2)
    world.step()
    world.add("low", 8, 2, priority=1, arrival=10.0)
    world.add("later", 8, 2, priority=0, arrival=10.0 + AGING_S - 1)
    world.add("much later", 8, 2, priority=0, arrival=10.0 + AGING_S + 1)
    assert world.waiting_ids == ["later", "low", "much later"]
    world.run()
    assert world.started == ["first", "later", "low", "much later"]


def test_a_stream_of_high_priority_does_not_starve_a_low_one() -> None:
    world = World(8, block_size=16, max_seqs=2)
    world.add("low", 100, 20, priority=2, arrival=0.0)
    for second in range(200):
        world.add(f"high{second}", 100, 2, arrival=float(second))
        world.step()
        if "low" in world.started:
            break
    assert 2 * AGING_S - 5 <= second, "it is of low priority"
    world.complete()
    assert "low" in world.started[: int(2 * AGING_S) + 5]


def reading_world() -> tuple[World, Any]:
    """A request waits for its read from disk, which goes on."""
    world = World(64, caching=True)
    world.cache.disk = Mock()
    read = world.cache.disk.begin.return_value = Mock(is_over=False)
    world.add("reads", 40, 2)
    world.step()
    assert world.started == []
    assert not read.stop.called
    return world, read


def test_what_is_read_for_an_aborted_request_is_read_no_further() -> None:
    world, read = reading_world()
    world.scheduler.abort("reads")
    world.step()
    read.stop.assert_called_once_with()
    assert not world.scheduler.has_work


def test_a_request_goes_on_without_its_read_if_the_disk_tier_has_failed() -> None:
    world, read = reading_world()
    world.cache.disk, read.is_over = None, True
    world.run()
    assert world.started == ["reads"]
    assert read.stop.called


NOT_ASKED = {"expected": None, "margin": None, "in_steps": None}


def big_and_small(usable: int = 10) -> World:
    """One runs in 4 of the blocks; a big one, of 8, waits at the head."""
    world = World(usable, block_size=4, max_seqs=64)
    world.add("runs", 13, 200)
    world.step()
    world.add("big", 32, 2, arrival=1.0)
    return world


def test_who_waits_and_who_passes_is_told_with_the_numbers() -> None:
    world = big_and_small()
    world.add("small", 4, 2, arrival=2.0)
    world.step()
    began = world.plans[-1].step_id
    while world.scheduler.num_running == 2:
        world.step()
    world.step()
    wait, passed = world.scheduler.explain()
    assert (wait.pop("since_step"), passed.pop("step")) == (began, began)
    assert wait.pop("step") == world.plans[-1].step_id, "considered again once the small one has ended"
    assert wait == {"what": "wait", "request_id": "big", "needed": 8, "room": 6, "usable": 10, **NOT_ASKED}
    assert passed == {"what": "pass", "request_id": "small", "needed": 1, "passed": ["big"]}


def test_who_would_fit_but_for_the_growth_of_others_is_told_so() -> None:
    world = World(16, block_size=4, forecast=True)
    world.add("runs", 16, 40)
    world.step()
    world.add("late", 30, 20, arrival=1.0)
    world.step()
    (told,) = world.scheduler.explain()
    numbers = [told[name] for name in ("what", "request_id", "needed", "room", "usable")]
    assert numbers == ["wait", "late", 8, 11, 16]
    assert 16 < told["expected"] <= 14 + 13 and 0 < told["margin"] < told["expected"] and 0 < told["in_steps"] <= 39
    world.complete()


def test_small_ones_for_whom_a_step_has_no_tokens_left_pass_in_the_next_one() -> None:
    world = World(10, block_size=4, max_seqs=64, max_step_tokens=10)
    world.add("runs", 13, 200)
    world.step()
    world.step()
    world.add("big", 32, 2, arrival=1.0)
    for i in range(4):
        world.add(f"small{i}", 3, 20, arrival=2.0 + i)
    world.step()
    assert world.started == ["runs", "small0", "small1", "small2"]
    world.step()
    assert world.started[4:] == ["small3"], "nobody ended meanwhile"


def test_who_needs_more_than_half_as_much_does_not_pass() -> None:
    world = big_and_small()
    world.add("not so small", 17, 2, arrival=2.0)
    world.step()
    assert world.started == ["runs"]
    world.add("half", 8, 2, arrival=3.0)
    world.step()
    assert world.started == ["runs", "half"]


def test_nobody_is_passed_without_end() -> None:
    world = big_and_small()
    for i in range(3 * MOST_PASSES):
        world.add(f"small{i}", 4, 1, arrival=2.0 + i)
        world.step()
    assert world.scheduler.num_running == 1 or "big" in world.started
    passed = world.started.index("big") - 1 if "big" in world.started else len(world.started) - 1
    assert passed == MOST_PASSES
    world.scheduler.abort("runs")
    world.complete(but=("runs",))
    assert world.started.index("big") == 1 + MOST_PASSES, "when it can, it is the next"


def test_only_the_next_few_are_tried() -> None:
    world = big_and_small()
    for i in range(MOST_TRIED + 1):
        world.add(f"big{i}", 32, 2, arrival=2.0 + i)
    world.add("small", 4, 2, arrival=99.0)
    world.step()
    assert world.started == ["runs"]
    world.scheduler.abort("big0")
    world.scheduler.abort("big1")
    world.step()
    assert world.started == ["runs", "small"]


@pytest.mark.parametrize("caching", [False, True])
def test_who_was_preempted_is_not_passed(caching: bool) -> None:
    world = World(8, block_size=4, max_seqs=64, caching=caching)
    world.add("a", 13, 18, arrival=0.0)
    world.add("b", 13, 18, arrival=1.0)
    world.run_until_preempted()
    assert world.waiting_ids == ["b"]
    world.add("small", 1, 1, arrival=2.0)
    while "a" not in world.finished:
        world.step()
        assert "small" not in world.started
    world.run()
    assert world.started == ["a", "b", "b", "small"]
    world.check_outputs()
