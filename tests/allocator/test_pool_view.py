"""The read-only view of a pool: what it shows, and that no query changes the pool."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.errors import BlockMisuse
from pagetide.allocator.pool_view import BlockCounts, BlockState, PoolView, format_ids


def test_a_new_pool_is_free_where_it_is_mapped() -> None:
    pool = PoolView(12, 4, [0, 2])
    pool.check_invariants()
    assert (pool.capacity, pool.usable, pool.num_free, pool.available) == (11, 7, 7, 7)
    assert (pool.num_extents, pool.blocks_per_extent, pool.pending_free_blocks) == (3, 4, 0)
    assert (pool.mapped_extents.tolist(), pool.unmapped_extents.tolist()) == ([0, 2], [1])
    assert pool.drainable_extents.tolist() == [2], "extent 0 has the null block"
    assert pool.counts() == BlockCounts(free=7, draining=0, live=0, cached=0, in_flight=0, mapped=7)


def pool_in_all_states() -> BlockAllocator:
    """Blocks 1 to 3 are live, 4 and 5 cached, 6 and 7 in flight, 8 to 11 draining, 12 to 15 free."""
    pool = BlockAllocator(16, blocks_per_extent=4)
    blocks = pool.allocate(7)
    pool.publish(blocks[3:])
    pool.pin(blocks[5:])
    pool.release(blocks[3:])
    pool.drain([2])
    pool.check_invariants()
    return pool


def test_the_view_of_an_allocator_shows_every_state() -> None:
    pool: PoolView = pool_in_all_states()
    assert pool.counts() == BlockCounts(free=4, draining=4, live=3, cached=2, in_flight=2, mapped=15)
    assert (pool.num_free, pool.available, pool.pending_free_blocks, pool.usable) == (4, 6, 2, 11)
    assert pool.cached_blocks.tolist() == [4, 5]
    assert pool.references([1, 3, 4, 6, 12]).tolist() == [1, 1, 0, 0, 0]
    assert pool.drainable_extents.tolist() == [3], "a block of extent 1 is pinned, and extent 2 drains already"
    assert pool.occupied([2]).tolist() == []
    plan = pool.plan_drain(1)
    assert (plan.extents.tolist(), plan.moves.tolist(), plan.evictions.tolist()) == ([3], [], [])
    with pytest.raises(BlockMisuse, match="not draining"):
        pool.occupied([3])


def test_no_query_changes_the_pool() -> None:
    pool = pool_in_all_states()
    before = state(pool)
    for query in ("counts", "check_invariants"):
        getattr(pool, query)()
    for name, member in vars(PoolView).items():
        if isinstance(member, property):
            getattr(pool, name)
    pool.references([1, 4])
    pool.occupied([2])
    pool.plan_drain(3, np.zeros(pool.num_blocks))
    assert state(pool) == before


def state(pool: PoolView) -> dict[str, object]:
    facts = {**vars(pool), **{f"extents.{name}": fact for name, fact in vars(pool._extents).items()}}
    del facts["_extents"], facts["_mark"]  # the second is scratch
    return {name: fact.tolist() if isinstance(fact, np.ndarray) else fact for name, fact in facts.items()}


def test_a_message_names_a_few_ids() -> None:
    assert format_ids(np.array([3, 5])) == "3, 5"
    assert format_ids(np.arange(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ... (9 in all)"


def test_the_states_of_all_blocks() -> None:
    pool = pool_in_all_states()
    pool.retain([4])
    pool.unmap([2])
    expected = [5, 6, 6, 6, 6, 3, 4, 4, *[0] * 4, *[1] * 4]
    states = pool.states()
    assert states.tolist() == expected and states.dtype == np.uint8
    assert BlockState(states[6]) is BlockState.IN_FLIGHT
    out, mask = np.full(16, 77, np.uint16), np.ones(16, np.bool_)
    assert pool.states(out, mask) is out and out.tolist() == expected
    pool.drain([3])
    assert pool.states()[12:].tolist() == [BlockState.DRAINING] * 4
    pool.retain([1])
    assert np.flatnonzero(pool.are_shared()).tolist() == [1]
    assert pool.are_shared(mask) is mask and mask.sum() == 1


def test_the_states_of_a_fixed_pool_whose_last_extent_is_partial() -> None:
    pool = BlockAllocator(1500)
    pool.allocate(1200)
    counts = np.bincount(pool.states(), minlength=7)
    assert counts.tolist() == [0, 299, 0, 0, 0, 1, 1200]
