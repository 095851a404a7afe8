"""Requests that are suspended, and go on with another scheduler, cache and pool."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeDisk, World

from pagetide.cache.layer_groups import LayerGroup, state_group


def test_requests_go_on_from_what_was_kept() -> None:
    world = World(20, 4, caching=True, host_slots=20)
    world.add("a", 21, 12)
    for _ in range(6):
        world.step()
    world.nap()
    world.complete()
    assert world.scheduler.stats.computed_tokens == 12 - 6 + 2, "the newest token, and those of the partly filled block"
    assert world.scheduler.state.by_id == {}


def test_requests_are_suspended_while_none_runs() -> None:
    world = World(20, 4, caching=True, host_slots=8)
    world.nap()
    world.add("a", 10, 3)
    world.nap()
    world.complete()


def test_a_request_that_was_refused_is_refused_again() -> None:
    """The log of decisions is another one."""
    world = World(10, 4, caching=True, host_slots=10)
    for number in range(3):
        world.add(f"{number}", 21, 40 - 21 - 3, arrival=float(number))
    for _ in range(3):
        world.step()
    for _ in range(3):
        world.nap()
        world.step()
        world.step()
    assert [decision["request_id"] for decision in world.scheduler.explain() if decision["what"] == "wait"] == ["1"]
    world.complete()


@pytest.mark.parametrize("groups", [(LayerGroup(), state_group(3)), (state_group(3),), (LayerGroup(), LayerGroup(1, 8))])
def test_with_windows_or_states_all_is_computed_again(groups: tuple[LayerGroup, ...]) -> None:
    world = World(60, 4, caching=True, host_slots=30, groups=groups)
    world.add("a", 21, 12)
    world.add("b", 9, 30)
    for _ in range(6):
        world.step()
    world.nap()
    world.complete()


def test_a_prefix_that_others_share_replaces_no_longer_part_that_was_kept() -> None:
    """One waits on in a second turn, in which another one has computed the beginning of its tokens."""
    world = World(12, 4, max_seqs=1, caching=True, host_slots=12)
    prompt = world.prompt(29)
    world.add("long", prompt, 8, arrival=1.0)
    world.step()
    world.add("short", prompt[:13], 20, arrival=0.0)
    kept = []
    for _ in range(2):
        world.nap()
        kept.append(world.scheduler.state.by_id["long"].kept)
        world.step()
    assert kept[0] is kept[1] is not None and len(kept[0].places) == 7
    world.complete()


def test_a_beam_that_goes_on_from_another_ones_tokens_has_nothing_kept() -> None:
    world = World(40, 4, caching=True, host_slots=40)
    world.add_family("beams", 9, 3, 24)
    while len(next(iter(world.family_of.values())).tokens["beams"]) < 20:
        world.step()
    world.nap()
    state = world.scheduler.state
    moved, source = sorted(state.by_id.values(), key=lambda one: one.kept is None)[:2]
    assert moved.kept is not None
    state.waiting.wait_for_move(moved)
    state.move_beam(moved, source, 5)
    assert moved.kept is None


def test_the_tier_of_the_next_engine_leaves_room_for_what_was_kept_until_it_is_used() -> None:
    world = World(20, 4, max_seqs=1, caching=True, host_slots=8)
    world.add("a", 21, 12)
    world.add("b", 21, 12, arrival=1.0)
    for _ in range(3):
        world.step()
    world.nap()
    kept = world.scheduler.state.by_id["a"].kept
    assert kept is not None and len(kept.store) == 5
    assert (world.cache.host.num_free, world.cache.host.num_withheld, world.cache.host.num_available) == (8, 5, 3)
    del kept
    world.nap()
    assert world.scheduler.state.by_id["a"].kept is not None, "what is kept stays, in one bound"
    world.complete()
    assert (world.cache.host.num_withheld, world.cache.host.num_available) == (0, world.cache.host.num_free)


@pytest.mark.parametrize(("host_slots", "num_read"), [(0, 5), (3, 2)])
def test_what_was_not_kept_is_read_from_disk(host_slots: int, num_read: int) -> None:
    disk = FakeDisk(np.random.default_rng(0))
    world = World(20, 4, caching=True, host_slots=host_slots, disk=disk)
    world.add("a", 21, 12)
    for _ in range(3):
        world.step()
    world.nap()
    world.complete()
    assert disk.num_read == num_read and world.scheduler.stats.disk_tokens == 4 * num_read
