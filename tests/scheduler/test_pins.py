"""Pinned prefixes: what they hold against others, what takes them, and that requests get what they would get without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import World

from pagetide.cache.layer_groups import LayerGroup, state_group
from pagetide.frames.cells import FIRST_ROW, SHARED, CellReader
from pagetide.scheduler.request import Request, RequestRejected, Sampling
from pagetide.scheduler.scheduler import PIN_WAIT_S

BLOCK = 4


def prompt_of(number: int, num_blocks: int) -> np.ndarray:
    """The tokens of a prompt: a block of its own in front, so that no two share a prefix."""
    return np.array([(37 * number + token) % 900 for token in range(BLOCK * num_blocks)], np.int32)


def pin_of(name: str, number: int, num_blocks: int) -> Request:
    """A request that pins a prompt."""
    return Request(name, prompt_of(number, num_blocks), Sampling(1), pin=name)


def pin(world: World, number: int, num_blocks: int) -> str:
    """Pin a prompt and compute it. Returns the pin's name."""
    name = f"pin {number} {num_blocks}"
    world.add_request(pin_of(name, number, num_blocks))
    world.run()
    world.scheduler.check_invariants()
    return name


def found(world: World, number: int, num_blocks: int) -> int:
    """The blocks of a prompt that a new request finds."""
    name = f"find {len(world.requests)}"
    world.add(name, np.append(prompt_of(number, num_blocks), 7).astype(np.int32), 1)
    world.run()
    cached = world.finished[name].num_cached_tokens
    assert cached is not None
    return cached // BLOCK


def crowd(world: World) -> None:
    """Requests that need the whole pool again and again."""
    for number in range(50, 56):
        for repeat in range(2):
            world.add(f"crowd {number}-{repeat}-{len(world.requests)}", prompt_of(number, 6), 9)
    world.run()
    world.check_outputs()


def pins_of(world: World) -> tuple[int, int, int]:
    pins = world.cache.pins
    return len(pins), pins.num_blocks, pins.num_lost


@pytest.mark.parametrize("more", [{}, {"host_slots": 16}, {"forecast": True}, {"max_cached": 0}])
def test_a_pinned_prefix_outlives_every_load_until_it_is_unpinned(more) -> None:
    world = World(24, BLOCK, caching=True, max_model_len=40, max_seqs=8, **more)
    name = pin(world, 1, 5)
    assert (pins_of(world), world.used, world.cache.pool.available) == ((1, 5, 0), 5, 19)
    crowd(world)
    assert found(world, 1, 5) == 5
    other = pin(world, 1, 7)
    assert (pins_of(world), world.used) == ((2, 7, 0), 7), "the blocks of both count once"
    assert world.cache.unpin(name)
    assert not world.cache.unpin(name)
    assert world.used == 7
    assert world.cache.unpin(other)
    assert (pins_of(world), world.used, world.cache.pool.available) == ((0, 0, 0), 0, 24)
    crowd(world)
    world.check_empty()


@pytest.mark.parametrize(
    ("groups", "held", "tokens"),
    [
        ((LayerGroup(2), LayerGroup(1, 9)), 2 * 5 + 2, 5), ((LayerGroup(1, 9),), 2, 5),
        ((LayerGroup(), state_group(2)), 4 + 2, 4), ((state_group(2),), 2, 4),
    ],
)  # fmt: skip
def test_of_windows_and_states_a_pin_holds_what_is_read_behind_it(groups, held: int, tokens: int) -> None:
    world = World(60, BLOCK, caching=True, max_model_len=40, max_seqs=8, groups=groups)
    name = pin(world, 1, 5)
    assert (pins_of(world), world.used) == ((1, held, 0), held)
    crowd(world)
    assert found(world, 1, 5) == tokens
    world.cache.forget(world.cache.pins.references(world.cache.index)[-1:])
    assert (pins_of(world), world.cache.unpin(name)) == ((0, 0, 1), False)
    world.check_empty()


def test_a_pin_leaves_room_for_the_longest_request_and_says_how_much_there_is() -> None:
    world = World(24, BLOCK, caching=True, max_model_len=40)
    first = pin(world, 1, 8)
    world.add_request(pin_of("to come", 2, 4))
    with pytest.raises(RequestRejected, match="takes 3 more blocks, and 2 may be pinned: of 24 blocks 12 are pinned"):
        world.add_request(pin_of("pin", 3, 3))
    world.scheduler.check(replace(pin_of("pin", 1, 8), prompt_token_ids=np.append(prompt_of(1, 8), prompt_of(4, 2)[:7])))
    world.add("longest", 39, 1)
    world.run()
    with pytest.raises(RequestRejected, match="full blocks of 4 tokens, and the prefix has 3"):
        world.add_request(replace(pin_of("pin", 3, 1), prompt_token_ids=prompt_of(3, 1)[:3]))
    world.cache.reset()
    assert pins_of(world) == (0, 0, 2)
    assert not world.cache.unpin(first)
    assert found(world, 1, 8) == 0
    world.check_empty()


def test_what_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(RequestRejected, match="leave prefix_caching on"):
        World(24, BLOCK, max_model_len=40).add_request(pin_of("pin", 1, 2))
    with pytest.raises(RequestRejected, match="the prefix has 4, of at least 5"):
        World(24, BLOCK, caching=True, max_model_len=40, groups=(state_group(2),)).add_request(pin_of("pin", 1, 1))
    world = World(60, BLOCK, caching=True, max_model_len=400, groups=(LayerGroup(1, 9),))
    most = world.cache.index.capacity // 2 // 90
    for number in range(most - 1):
        pin(world, number, 90)
    world.add_request(pin_of("to come", most - 1, 90))
    assert sum(map(len, world.cache.pins.nodes)) == 90 * (most - 1)
    with pytest.raises(RequestRejected, match="at most half of the"):
        world.add_request(pin_of("pin", most, 90))


def test_a_pin_that_has_ended_before_its_prompt_is_computed_holds_nothing() -> None:
    world = World(24, BLOCK, caching=True, max_model_len=40, max_step_tokens=8)
    world.add_request(pin_of("pin", 1, 5))
    world.step()
    assert world.cache.unpin("pin")
    world.complete()
    assert pins_of(world) == (0, 0, 0)


def test_extents_leave_with_pinned_blocks_moved_and_a_recall_ends_the_newest_pins_last() -> None:
    world = World(31, BLOCK, blocks_per_extent=4, caching=True, max_model_len=40)
    for number, num_blocks in ((1, 5), (2, 6), (3, 7)):
        pin(world, number, num_blocks)
    world.add("runs", 12, 8)
    world.step()
    world.scheduler.pool.make_idle(2)
    assert world.scheduler.pool.give_back(2) == 2
    world.run()
    assert (pins_of(world), world.cache.pool.usable) == ((3, 18, 0), 23)
    assert [found(world, number, num) for number, num in ((1, 5), (2, 6), (3, 7))] == [5, 6, 7]
    world.add("victim", 12, 27)
    world.step()
    world.scheduler.pool.make_idle(3)
    assert world.scheduler.pool.give_back(3) == 3
    assert (pins_of(world), world.waiting_ids) == ((2, 11, 1), ["victim"])
    world.scheduler.pool.grow(5)
    world.run()
    world.check_outputs()
    assert [found(world, number, num) for number, num in ((1, 5), (2, 6))] == [5, 6]
    world.scheduler.pool.limit_blocks = 16
    assert pins_of(world) == (1, 5, 2)


def test_where_the_pool_does_not_grow_pins_end_for_requests_that_wait() -> None:
    world = World(31, BLOCK, blocks_per_extent=4, num_mapped=4, caching=True, max_model_len=40)
    pin(world, 1, 5)
    pin(world, 2, 5)
    world.add("long", 35, 2)
    world.step()
    world.now = PIN_WAIT_S - 1
    world.step()
    assert pins_of(world) == (2, 10, 0)
    world.now = PIN_WAIT_S
    world.step()
    world.run()
    assert pins_of(world) == (1, 5, 1)
    world.check_outputs()


def test_watchers_see_pinned_blocks_as_cached_unless_a_row_holds_them() -> None:
    world, reader = World(24, BLOCK, caching=True, max_model_len=40), CellReader(25)
    pin(world, 1, 5)
    cells, _ = reader.read(world.scheduler.state, np.empty(0, np.int64))
    assert np.bincount(cells, minlength=7).tolist() == [0, 19, 0, 5, 0, 1, 0]
    world.add("r", np.append(prompt_of(1, 3), 5).astype(np.int32), 9)
    world.step()
    cells, _ = reader.read(world.scheduler.state, np.array([0]))
    assert [int((cells == value).sum()) for value in (3, FIRST_ROW, FIRST_ROW | SHARED)] == [2, 4, 0]
    world.run()


def test_a_block_whose_copy_has_failed_is_pinned_no_more() -> None:
    world = World(31, BLOCK, blocks_per_extent=4, caching=True, max_model_len=40)
    pin(world, 1, 5)
    pin(world, 2, 5)
    (nodes, _) = world.cache.pins.nodes
    world.cache.forget(world.cache.index.blocks.of_node[nodes[2:3]])
    world.scheduler.check_invariants()
    assert pins_of(world) == (1, 5, 1)
    assert (found(world, 1, 5), found(world, 2, 5)) == (2, 5)


@pytest.mark.parametrize("ends", ["unpinned", "reset"])
def test_a_request_that_does_not_fit_beside_a_pin_begins_once_it_ends(ends: str) -> None:
    world = World(31, BLOCK, blocks_per_extent=4, num_mapped=4, caching=True, max_model_len=40)
    name = pin(world, 1, 9)
    world.add("long", 35, 2)
    world.step()
    assert world.waiting_ids == ["long"]
    if ends == "unpinned":
        world.cache.unpin(name)
    else:
        world.cache.reset()
    world.step()
    assert world.waiting_ids == []
    world.complete()


def test_pins_of_a_broken_scheduler_are_lost() -> None:
    world = World(24, BLOCK, caching=True, max_model_len=40)
    name = pin(world, 1, 5)
    fresh, _ = world.scheduler.rebuilt("broke")
    assert (len(fresh.cache.pins), fresh.cache.pins.num_lost, fresh.cache.unpin(name)) == (0, 1, False)
    fresh.check_invariants()
