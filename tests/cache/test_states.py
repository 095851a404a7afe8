"""States in blocks: how many a sequence takes, where parts lie, and which states later requests find."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.cache.geometry import Geometry, GeometryError, LayerShape, StateShape
from pagetide.cache.layer_groups import LayerGroup, state_group
from pagetide.scheduler.cost import SwapCost

BLOCK = 4
GROUPS = (LayerGroup(), state_group(3))


def gated(layers: int, heads: int, channels: int, kv_heads: int, dtype: str = "bfloat16") -> Geometry:
    """As Qwen3.5: of four layers three have a convolution and a state of [heads, 128, 128], one K and V of 256 elements."""
    states = (StateShape("conv", 0, (channels, 4), dtype), StateShape("recurrent", 0, (heads, 128, 128), "float32"))
    recurrent, full = LayerShape(0, 0, 0, states=states), LayerShape(kv_heads, 256, 256)
    return Geometry(tuple(full if index % 4 == 3 else recurrent for index in range(layers)), 16, dtype)


@pytest.mark.parametrize(
    ("geometry", "block_bytes", "state_blocks"),
    [
        (gated(24, 16, 6144, 2), 192 << 10, 101),  # Qwen3.5-0.8B; in theory 100.5
        (gated(32, 32, 8192, 4), 512 << 10, 99),  # 4B and 9B; 99.0
        (gated(64, 48, 10240, 4), 1 << 20, 148),  # 27B; 147.8
    ],
)
def test_a_state_takes_little_more_blocks_than_it_has_bytes(geometry: Geometry, block_bytes: int, state_blocks: int) -> None:
    assert (geometry.payload_bytes, geometry.block_stride) == (block_bytes, block_bytes)
    assert geometry.groups == (LayerGroup(), state_group(state_blocks)) and geometry.num_tables == 1
    assert state_blocks * block_bytes <= 1.02 * geometry.state_bytes
    assert geometry.blocks_for_tokens(1) == 1 + state_blocks and geometry.blocks_for_tokens(160) == 10 + state_blocks


def test_parts_do_not_overlap_and_stay_within_their_blocks() -> None:
    for geometry in (gated(24, 16, 6144, 2), gated(8, 6, 100, 1, "float32")):
        taken = np.zeros((geometry.state_blocks, geometry.block_stride), np.int8)
        for place in geometry.state_places:
            size = place.state.num_bytes // len(place.blocks)
            for block, offset in zip(place.blocks, place.offsets, strict=True):
                assert offset + size <= geometry.payload_bytes
                taken[block, offset : offset + size] += 1
        assert taken.max() == 1 and taken.sum() == geometry.state_bytes


def test_without_k_and_v_a_block_holds_a_layers_state() -> None:
    states = (StateShape("conv", 0, (1536, 4), "float32"), StateShape("recurrent", 0, (1536, 16), "float32"))
    geometry = Geometry((LayerShape(0, 0, 0, states=states),) * 24, 16, "float32")
    assert (geometry.block_stride, geometry.state_blocks, geometry.num_tables) == (96 << 10, 30, 0)
    with pytest.raises(GeometryError, match="or a state"):
        Geometry((LayerShape(0, 0, 0),), 16, "float32")


def turns(world: World, *prompts: np.ndarray, new: int = 6) -> list[int]:
    """One request after the other; the tokens that each of them found."""
    found = []
    for number, prompt in enumerate(prompts, len(world.requests)):
        world.add(f"r{number}", prompt, new)
        world.run()
        world.check_outputs()
        found.append(world.finished[f"r{number}"].num_cached_tokens)
    return found


def test_the_end_of_a_prompt_and_where_prompts_part_are_found_again() -> None:
    world = World(200, BLOCK, caching=True, groups=GROUPS)
    first = world.prompt(22)
    answer = world.prompt(30)
    assert turns(world, first) == [0]
    assert turns(world, first) == [20]  # all full blocks
    longer = np.append(first, answer)
    assert turns(world, longer, longer) == [20, 48]  # behind the end of the shorter one, and then all
    document = world.prompt(40)
    asked = [np.append(document, world.prompt(5 + n)) for n in range(4)]
    # K and V are found behind the document, and no state: the second leaves one there, the third finds it.
    assert turns(world, *asked) == [0, 0, 40, 40]


def test_states_that_nothing_found_go_first() -> None:
    world = World(40, BLOCK, caching=True, groups=GROUPS)
    prompts = [world.prompt(22) for _ in range(7)]
    assert turns(world, prompts[0], prompts[0]) == [0, 20]
    turns(world, *prompts[1:])
    evicted = world.cache.swapping.evicted_blocks
    assert evicted > 0
    assert turns(world, prompts[0]) == [20], "what was found once is kept"
    assert turns(world, prompts[1]) == [0]


def test_states_that_leave_the_pool_are_found_on_the_host() -> None:
    world = World(40, BLOCK, caching=True, groups=GROUPS, host_slots=100)
    prompts = [world.prompt(22) for _ in range(7)]
    assert turns(world, *prompts) == [0] * 7
    demoted = world.scheduler.stats.demoted_blocks
    assert demoted > 0 and world.cache.swapping.evicted_blocks == 0
    assert turns(world, prompts[0], prompts[0], prompts[1]) == [20, 20, 20]
    assert world.scheduler.stats.promoted_blocks >= 3 * 3 and world.num_states_on_host


def test_a_state_on_the_host_is_read_by_many_rows_and_stays_there() -> None:
    world = World(60, BLOCK, caching=True, groups=GROUPS, host_slots=60)
    document = world.prompt(22)
    turns(world, document, *(world.prompt(90) for _ in range(2)))
    for n in range(3):
        world.add(f"again{n}", document, 4)
    world.complete()
    assert [world.finished[f"again{n}"].num_cached_tokens for n in range(3)] == [20] * 3


def test_a_preempted_sequence_returns_with_its_state() -> None:
    world = World(25, BLOCK, caching=True, groups=GROUPS, host_slots=60)
    for n in range(3):
        world.add(f"r{n}", 14, 20)
    world.complete()
    stats = world.scheduler.stats
    assert stats.preemptions and stats.recomputed_tokens == 0


@pytest.mark.parametrize(("share", "waits"), [(0.3, True), (0.45, False)])
def test_a_state_waits_for_its_sequence_if_copying_takes_less_time_than_computing(share: float, waits: bool) -> None:
    """A state of three blocks, there and back, for two blocks of tokens."""
    cost = SwapCost(1, BLOCK, bytes_per_s=1.0, tokens_per_s=BLOCK * share)
    world = World(15, BLOCK, caching=True, groups=GROUPS, host_slots=60, cost=cost)
    for n in range(3):
        world.add(f"r{n}", 7, 20)
    world.run_until_preempted()
    assert bool(world.cache.host.tails) == waits
    world.complete()


def test_a_pool_with_room_for_one_state_serves_hits_and_the_same_prompt_twice() -> None:
    """The end of the prompt is kept only where a row can have another state; who found one may have to compute all."""
    world = World(2 + 3 + 2, BLOCK, caching=True, groups=GROUPS)
    prompt = world.prompt(8)
    assert turns(world, prompt, prompt, new=4)[0] == 0
    world.check_empty()


@pytest.mark.parametrize("caching", [True, False])
def test_forks_begin_with_the_state_of_their_leader(caching: bool) -> None:
    """A chunk of the leader ends before the last token of the prompt."""
    for length in (22, 21, 1):  # 20 tokens are full blocks: the leader gives that state to others
        world = World(100, BLOCK, caching=caching, groups=GROUPS)
        prompt = world.prompt(length)
        for name in "abc":
            world.add(name, prompt, 9, fork_of=None if name == "a" else "a")
        world.complete()
        assert [world.runner.first_starts[name] for name in "abc"] == [0, length - 1, length - 1]


def test_a_moved_beam_begins_with_the_state_of_the_other_one() -> None:
    world = World(200, BLOCK, groups=GROUPS)
    world.add_family("f", 30, beams=3, max_new=20)
    world.complete()
    stats = world.scheduler.stats
    assert stats.forks > 5 and stats.computed_tokens <= 30 + 3 * 20, "no token is computed twice"


def test_a_pool_shrinks_under_states() -> None:
    world = World(47, BLOCK, caching=True, groups=GROUPS, blocks_per_extent=4)
    for n in range(4):
        world.add(f"r{n}", 12, 20)
    for _ in range(6):
        world.step()
    assert world.scheduler.pool.give_back(4) == 4
    world.complete()
    assert world.scheduler.stats.moved_blocks > 0
