"""Slots of the host tier, and what the cache manager does with them. Slot and block ids are exact."""

from __future__ import annotations

import numpy as np
import pytest
from row_cache import A, B, C, RowCache

from pagetide.cache.host_tier import HostTier, Swaps


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def copies(swaps: Swaps | None) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Block -> slot, block -> block, slot -> block."""

    def pairs(sources: np.ndarray, targets: np.ndarray) -> dict[int, int]:
        return dict(zip(sources.tolist(), targets.tolist(), strict=True))

    if swaps is None:
        return {}, {}, {}
    back = {} if swaps.back is None else pairs(swaps.back.sources, swaps.back.targets)
    return pairs(swaps.out_blocks, swaps.out_slots), back, pairs(swaps.in_slots, swaps.in_blocks)


def test_slots_are_given_from_the_lowest_and_used_ones_again_first() -> None:
    tier = HostTier(5)
    assert tier.take(2).tolist() == [1, 2]
    assert tier.take(1).tolist() == [3]
    tier.free(ids(2))
    assert (tier.take(2).tolist(), tier.num_used, tier.num_free) == ([2, 4], 4, 1)
    with pytest.raises(ValueError, match="2 slots are asked for, 1 are free"):
        tier.take(2)
    with pytest.raises(ValueError, match="0 slots or more"):
        HostTier(-1)


def test_a_plan_takes_each_copy_once() -> None:
    tier = HostTier(5)
    assert tier.take_swaps() is None
    tier.queue_swap_out(ids(7, 8), tier.take(2))
    assert copies(tier.take_swaps()) == ({7: 1, 8: 2}, {}, {})
    assert tier.take_swaps() is None
    tier.queue_swap_in(ids(2, 1), ids(9, 4))
    assert copies(tier.take_swaps()) == ({}, {}, {2: 9, 1: 4})
    assert tier.take_swaps() is None and tier.num_free == 5


def test_a_slot_that_is_read_is_nobodys_until_a_plan_has_it() -> None:
    tier = HostTier(2)
    tier.queue_swap_out(ids(7, 8), tier.take(2))
    tier.take_swaps()
    tier.queue_swap_in(ids(1), ids(9))
    assert tier.num_free == 0
    tier.check_invariants(ids(2))
    tier.take_swaps()
    assert tier.take(1).tolist() == [1]


def test_only_the_last_copy_to_a_slot_is_owed_and_none_to_one_that_was_freed() -> None:
    tier = HostTier(2)
    tier.queue_swap_out(ids(7, 8), tier.take(2))
    tier.free(ids(1, 2))
    tier.queue_swap_out(ids(9), tier.take(1))
    assert copies(tier.take_swaps()) == ({9: 2}, {}, {})
    tier.queue_swap_out(ids(5), tier.take(1))
    tier.free(ids(1))
    assert tier.take_swaps() is None, "all was called off"


def test_what_is_wanted_before_it_left_goes_straight_to_its_new_block() -> None:
    tier = HostTier(3)
    tier.queue_swap_out(ids(7), tier.take(1))
    tier.take_swaps()
    tier.queue_swap_out(ids(8), tier.take(1))
    tier.queue_swap_in(ids(1, 2), ids(3, 4))
    assert tier.num_free == 2, "slot 2, where nothing is written"
    assert copies(tier.take_swaps()) == ({}, {8: 4}, {1: 3})
    assert tier.num_free == 3


def test_copies_that_no_chunk_depends_on_come_last_and_may_be_done_beside_the_chunks() -> None:
    tier = HostTier(9)
    tier.queue_swap_out(ids(7, 8), tier.take(2), beside=True)
    tier.queue_swap_out(ids(5, 6), tier.take(2))
    tier.queue_swap_out(ids(9), tier.take(1), beside=True)
    swaps = tier.take_swaps()
    assert (swaps.out_blocks.tolist(), swaps.out_slots.tolist()) == ([5, 6, 7, 8, 9], [3, 4, 1, 2, 5])
    assert (swaps.num_before, swaps.any_beside) == (2, True)
    tier.queue_swap_in(ids(3), ids(11))
    assert tier.is_arriving(ids(2, 11)) and not tier.is_arriving(ids(2, 12))
    swaps = tier.take_swaps()
    assert (swaps.num_before, swaps.any_beside) == (0, True), "what comes in is there when the plan is over"
    assert not tier.is_arriving(ids(11))
    slot = tier.take(1)
    tier.queue_swap_out(ids(7), slot, beside=True)
    swaps = tier.take_swaps(alone=False)
    assert (swaps.num_before, swaps.any_beside) == (1, False), "the plan moves blocks as well"
    both = tier.take(2)
    tier.queue_swap_out(ids(7, 8), both, beside=True)
    tier.queue_swap_in(both[:1], ids(12))
    assert tier.is_arriving(ids(12))
    swaps = tier.take_swaps()
    assert (swaps.back.sources.tolist(), swaps.back.targets.tolist()) == ([7], [12])
    assert (swaps.out_blocks.tolist(), swaps.num_before) == ([8], 1), "12 may be the very block that leaves"


def test_slots_without_memory_retire_with_those_nobody_had() -> None:
    tier = HostTier(10)
    tier.take(4)
    tier.free(ids(1, 3, 4))
    tier.retire(ids(3, 4))
    assert (tier.num_slots, tier.num_free, tier.num_used) == (2, 1, 1)
    assert tier.take(1).tolist() == [1]


def test_a_tier_without_slots_demotes_nothing() -> None:
    tier = HostTier(0)
    assert (tier.capacity, tier.num_slots, tier.num_free, tier.num_used, tier.demotes) == (0, 0, 0, 0, False)
    assert tier.take(0).tolist() == [] and tier.take_swaps() is None
    tier.rest()
    tier.retire(ids(1))
    tier.check_invariants(ids())
    assert HostTier(1).demotes


class Cache(RowCache):
    def swaps(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        got = copies(self.manager.host.take_swaps())
        self.manager.check_invariants()
        return got


def test_what_is_evicted_comes_back_from_its_slots() -> None:
    cache = Cache(9, 8)
    assert cache.run(A) == 0  # blocks 1 to 5, of which 1 to 4 stay findable
    assert cache.run(B) == 0  # 5 to 9
    assert cache.swaps() == ({}, {}, {})
    assert cache.begin(0, C) == 0  # 9, and A's, the deepest first
    assert cache.swaps() == ({4: 1, 3: 2, 2: 3, 1: 4}, {}, {})
    cache.end(0, C)
    assert cache.manager.host.num_used == 4
    assert cache.begin(0, A) == 16
    out, back, in_ = cache.swaps()
    assert sorted(in_) == [1, 2, 3, 4] and not back
    assert [in_[slot] for slot in (4, 3, 2, 1)] == cache.manager.tables[0].of(0)[0][:4].tolist(), "in the order of the table"
    assert len(out) == 4 and not set(out.values()) & set(in_), "B's blocks leave, to other slots"


def test_the_slots_of_a_hit_are_not_taken_for_what_makes_room_for_it() -> None:
    cache = Cache(5, 4)
    cache.run(A)
    cache.run(B)
    cache.swaps()
    assert cache.begin(0, A) == 16, "B's blocks leave, and all slots are A's"
    out, _, in_ = cache.swaps()
    assert (len(out), len(in_)) == (0, 4)
    assert cache.manager.swapping.evicted_blocks == 4


def test_a_tail_comes_back_behind_all_that_was_before_it() -> None:
    cache = Cache(9, 8)
    tokens = A[:14]  # 3 full blocks and 2 tokens in block 4
    cache.begin(0, tokens)
    cache.end(0, tokens, "a")
    assert cache.swaps() == ({4: 1}, {}, {})
    assert cache.begin(0, A, "a") == 14
    assert cache.swaps() == ({}, {}, {1: int(cache.manager.tables[0].of(0)[0][3])})
    assert cache.manager.host.num_used == 0 and not cache.manager.host.tails


def test_a_tail_is_of_no_use_where_something_else_was_found_before_it() -> None:
    cache = Cache(9, 8)
    cache.begin(0, A[:14])
    cache.end(0, A[:14], "a")
    cache.swaps()
    cache.run(A)  # somebody computes block 4 as a whole
    assert cache.begin(0, A, "a") == 16
    assert cache.swaps() == ({}, {}, {}) and not cache.manager.host.tails
    cache.end(0, A)
    cache.begin(1, A[:14])
    cache.end(1, A[:14], "b")
    cache.manager.reset()
    assert cache.manager.host.num_used == 0
    assert cache.begin(0, A, "b") == 0


def test_a_tail_is_dropped_with_its_copy() -> None:
    cache = Cache(9, 8)
    cache.begin(0, A[:14])
    cache.end(0, A[:14], "a")
    cache.manager.swapping.suspended.drop("a")
    cache.manager.swapping.suspended.drop("nobody")
    assert cache.swaps() == ({}, {}, {})
    cache.begin(0, A[:12])
    cache.end(0, A[:12], "full")
    assert not cache.manager.host.tails, "nothing is partly filled"


def test_what_is_computed_again_needs_no_slot() -> None:
    cache = Cache(5, 8)
    cache.run(A)
    cache.run(B)
    cache.swaps()
    cache.manager.set_swap_costs(least_chance=0.0, promotes=False)
    assert cache.begin(0, A) == 0, "bringing it back is not worth it"
    assert cache.manager.host.num_used == 8
    cache.end(0, A)
    assert cache.manager.host.num_used == 4, "B's"
    cache.manager.set_swap_costs(least_chance=0.0, promotes=True)
    assert cache.run(A) == 16


def test_a_shrink_demotes_before_it_moves() -> None:
    cache = Cache(11, 8, blocks_per_extent=4)
    cache.run(A)
    cache.run(B)
    cache.begin(0, C[:9])
    shrink = cache.manager.resizer.shrink(2)
    assert shrink is not None and len(shrink.extents) == 2
    out, _, _ = cache.swaps()
    assert len(out) == 8
    if shrink.copies is not None:
        cache.manager.resizer.moved(shrink.copies)
    cache.manager.resizer.unmapped(shrink.extents)
    cache.manager.check_invariants()
    cache.manager.resizer.grow(shrink.extents)
    assert cache.begin(1, B) == 16
    assert sorted(cache.swaps()[2].values()) == sorted(cache.manager.tables[0].of(1)[0][:4].tolist())


def test_a_block_that_moves_leaves_from_where_its_bytes_are() -> None:
    """Between the shrink and the step that copies, a moved block's bytes are where they were."""
    cache = Cache(15, 8, blocks_per_extent=4)
    cache.begin(0, B)  # blocks 1 to 5
    cache.begin(1, A[:6])  # 6 and 7
    cache.manager.release(np.array([0]))
    shrink = cache.manager.resizer.shrink(3)
    assert shrink is not None and shrink.copies is not None
    assert (shrink.copies.sources.tolist(), shrink.copies.targets.tolist()) == ([6, 7], [1, 2])
    cache.end(1, A[:6], "a")
    assert cache.swaps() == ({7: 1}, {}, {})
    cache.manager.resizer.moved(shrink.copies)
    cache.manager.resizer.keep(shrink.extents)
    assert cache.begin(1, A, "a") == 6


def test_lost_slots_are_forgotten_and_retired() -> None:
    cache = Cache(5, 20)
    cache.begin(0, A[:14])
    cache.end(0, A[:14], "a")
    cache.run(B)
    out, _, _ = cache.swaps()
    assert len(out) == 4
    cache.manager.swapping.lost(np.array(list(out.values()), np.int32))
    cache.manager.check_invariants()
    assert cache.manager.host.num_slots == 0 and not cache.manager.host.tails
    assert cache.begin(0, A, "a") == 0
    assert cache.manager.rebuilt().host.num_slots == 20


def test_a_tree_leaves_from_its_ends() -> None:
    """Blocks that somebody else chose take along what stands behind them, and none goes before its descendants."""
    cache = Cache(30, 8)
    for tokens in A, [*A[:8], *B[:9]], [*A[:12], *C[:5]]:
        cache.run(tokens)
    index = cache.manager.index
    root = int(index.lookup(cache.manager.chain(np.array(A, np.int32), None), 4).blocks[0])
    order = index.with_descendants([root]).tolist()
    assert len(order) == len(set(order)) == index.num_nodes == 7 and order[-1] == root
    parents = {block: int(index._tree.parents[index.blocks.node_at[block]]) for block in order}
    places = {int(index.blocks.node_at[block]): i for i, block in enumerate(order)}
    assert all(places[parent] > i for i, (_, parent) in enumerate(parents.items()) if parent >= 0)
    assert index.with_descendants([root, order[0]]).tolist()[-1] == root
