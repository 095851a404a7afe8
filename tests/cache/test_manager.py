"""The cache manager: exact tables and answers. Its lives, with forks, against a memory: test_resizing.py."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.eviction import Lru
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.cache.state_tables import tables_for


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_extend_many_rows_at_once_keeps_each_rows_order():
    cache = CacheManager(RowTables(BlockAllocator(65), 4, 4, 64))
    cache.extend(rows(0), rows(5))
    update = cache.extend(rows(0, 1, 3), rows(13, 3, 9)).tables[0]
    assert update.rows.tolist() == [0, 0, 1, 3, 3, 3]
    assert update.columns.tolist() == [2, 3, 0, 0, 1, 2]
    assert cache.tables[0].of(0)[0].tolist() == [1, 2, 3, 4]
    assert cache.tables[0].of(3)[0].tolist() == [6, 7, 8]
    cache.check_invariants()


def test_short_names_the_rows_at_a_border():
    with pytest.raises(ValueError, match="block_size"):
        RowTables(BlockAllocator(9), 0, 3, 64)
    cache = CacheManager(RowTables(BlockAllocator(9), 4, 3, 64))
    cache.extend(rows(0, 1), rows(4, 8))
    assert cache.row_tables.short(rows(0, 1, 2), rows(5, 8, 0)).tolist() == [0]


@pytest.mark.parametrize(
    ("said", "hasher", "bad"),
    [
        ("the hasher's", PrefixHasher(16), {}),
        ("needs a hasher", None, {"host_slots": 3}),
        ("max_cached_blocks bounds a prefix cache", None, {"max_cached_blocks": 3}),
        ("max_cached_blocks .* got -1", PrefixHasher(4), {"max_cached_blocks": -1}),
    ],
)
def test_what_cannot_be_cached_is_refused(said, hasher, bad):
    with pytest.raises(ValueError, match=said):
        CacheManager(RowTables(BlockAllocator(9), 4, 2, 64), hasher, **bad)


def test_groups_have_tables_of_their_own():
    cache = CacheManager(tables_for((LayerGroup(2),), BlockAllocator(9), 4, 2, 64))
    extension = cache.extend(rows(0), rows(6))
    first, second = (update.blocks.tolist() for update in extension.tables)
    assert (len(first), len(second), len(set(first + second))) == (2, 2, 4)
    assert cache.blocks_for(6) == 4
    assert cache.extend(rows(1), rows(9)) is None
    cache.release(np.array([0]))
    assert cache.pool.available == 8


@pytest.mark.parametrize("mapped", [None, [0, 3]])
def test_renewed_keeps_the_pools_extents(mapped):
    cache = CacheManager(RowTables(BlockAllocator(16, blocks_per_extent=4, mapped=[0, 1]), 4, 3, 64))
    cache.extend(rows(0), rows(16))
    fresh = cache.rebuilt(mapped)
    assert fresh.pool.mapped_extents.tolist() == (mapped or [0, 1])
    assert fresh.pool.counts().live == 0
    fixed = CacheManager(RowTables(BlockAllocator(16), 4, 3, 64))
    assert fixed.rebuilt([0]).pool.usable == 15, "a pool without extents is mapped as a whole"


def test_a_large_cache_gives_up_blocks_for_several_steps_at_once():
    """Decode steps need a block now and then: of 640 cached blocks 10 go at once, those that would go first anyway."""
    cache = CacheManager(RowTables(BlockAllocator(641), 4, 4, 2560), PrefixHasher(4, b"seed"), eviction=Lru)
    tokens = np.arange(2560, dtype=np.int32)
    chain = cache.chain(tokens, None)
    assert cache.admit(0, 2560, cache.lookup(chain, 2560)) is not None
    cache.commit(0, chain, 2560)
    cache.release(rows(0))
    assert cache.pool.counts()[:4] == (0, 0, 0, 640)

    for step in range(1, 20):
        assert cache.extend(rows(1), rows(4 * step)) is not None
        evicted = 10 if step <= 10 else 19
        assert (cache.swapping.evicted_blocks, cache.pool.num_free) == (evicted, evicted - step)
    assert cache.lookup(chain, 2560).num_tokens == 2560 - 4 * 19
    cache.check_invariants()
