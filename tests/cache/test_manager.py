"""The cache manager: tables, forks and releases, against sets and lists."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.cache.eviction import Lru
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_extend_covers_tokens_by_whole_blocks():
    cache = CacheManager(65, 16, 4, 1024)
    extension = cache.extend(rows(2), rows(50))
    assert extension is not None
    (update,) = extension.tables
    assert (update.rows.tolist(), update.slots.tolist(), update.blocks.tolist()) == (
        [2] * 4,
        [0, 1, 2, 3],
        [1, 2, 3, 4],
    )
    assert len(cache.extend(rows(2), rows(64)).tables[0].blocks) == 0
    assert cache.extend(rows(2), rows(65)).tables[0].slots.tolist() == [4]
    cache.release(np.array([2]))
    assert cache.pool.counts().live == 0


def test_extend_many_rows_at_once_keeps_each_rows_order():
    cache = CacheManager(65, 4, 4, 64)
    cache.extend(rows(0), rows(5))
    update = cache.extend(rows(0, 1, 3), rows(13, 3, 9)).tables[0]
    assert update.rows.tolist() == [0, 0, 1, 3, 3, 3]
    assert update.slots.tolist() == [2, 3, 0, 0, 1, 2]
    assert cache.tables[0].of(0)[0].tolist() == [1, 2, 3, 4]
    assert cache.tables[0].of(3)[0].tolist() == [6, 7, 8]
    cache.check_invariants()


def test_extend_is_all_or_nothing():
    cache = CacheManager(9, 16, 2, 1024)
    cache.extend(rows(0), rows(48))
    assert cache.extend(rows(0, 1), rows(64, 90)) is None
    assert (cache.pool.available, cache.tables[0].lengths.tolist()) == (5, [3, 0])
    assert len(cache.extend(rows(1), rows(80)).tables[0].blocks) == 5


def test_short_names_the_rows_at_a_border():
    cache = CacheManager(9, 4, 3, 64)
    cache.extend(rows(0, 1), rows(4, 8))
    assert cache.row_tables.short(rows(0, 1, 2), rows(5, 8, 0)).tolist() == [0]


def test_groups_have_tables_of_their_own():
    cache = CacheManager(9, 4, 2, 64, groups=(LayerGroup(2),))
    extension = cache.extend(rows(0), rows(6))
    first, second = (update.blocks.tolist() for update in extension.tables)
    assert (len(first), len(second), len(set(first + second))) == (2, 2, 4)
    assert cache.blocks_for(6) == 4
    assert cache.extend(rows(1), rows(9)) is None
    cache.release(np.array([0]))
    assert cache.pool.available == 8


def test_fork_shares_full_blocks_and_copies_the_last():
    cache = CacheManager(17, 4, 4, 64)
    cache.extend(rows(0), rows(10))
    parent = cache.tables[0].of(0)[0].tolist()
    for child in (1, 2):
        fork = cache.fork(0, child, 10)
        assert fork.copies.sources.tolist() == [parent[2]]
        assert fork.copies.targets.tolist() == [cache.tables[0].of(child)[0][2]]
        assert cache.tables[0].of(child)[0][:2].tolist() == parent[:2]
    assert cache.pool.references(parent).tolist() == [3, 3, 1]
    assert cache.pool.counts().live == 5
    cache.check_invariants()
    cache.release(np.array([0]))
    assert (cache.pool.counts().live, cache.pool.references(parent[:2]).tolist()) == (4, [2, 2])
    cache.release(np.array([1]))
    cache.release(np.array([2]))
    assert cache.pool.counts().live == 0


def test_fork_at_a_border_copies_nothing_and_a_full_pool_forks_nothing():
    cache = CacheManager(4, 4, 4, 64)
    cache.extend(rows(0), rows(10))
    assert cache.fork(0, 1, 10) is None
    assert cache.tables[0].lengths.tolist() == [3, 0, 0, 0]
    fork = cache.fork(0, 1, 8)
    assert fork.copies is None
    assert cache.tables[0].of(1)[0].tolist() == cache.tables[0].of(0)[0][:2].tolist()
    cache.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_conservation_under_fuzz(seed):
    """20,000 random operations on 32 blocks against plain lists of ids."""
    rng, cache, num_rows = np.random.default_rng(seed), CacheManager(33, 4, 8, 128), 8
    tables: dict[int, list[int]] = {}
    tokens: dict[int, int] = {}
    for _ in range(5_000):
        row, kind = int(rng.integers(num_rows)), rng.random()
        if row in tables and kind < 0.3:
            cache.release(np.array([row]))
            del tables[row], tokens[row]
        elif row in tables and kind < 0.5 and len(tables) < num_rows:
            child = next(r for r in range(num_rows) if r not in tables)
            fork = cache.fork(row, child, tokens[row])
            partly = tokens[row] % 4 != 0
            assert (fork is None) == (partly and 32 == len({b for t in tables.values() for b in t}))
            if fork is not None:
                tables[child], tokens[child] = cache.tables[0].of(child)[0].tolist(), tokens[row]
                assert tables[child][: tokens[row] // 4] == tables[row][: tokens[row] // 4]
        else:
            upto = min(tokens.get(row, 0) + int(rng.integers(1, 20)), 128)
            need = -(-upto // 4) - len(tables.get(row, []))
            free = 32 - len({b for t in tables.values() for b in t})
            extension = cache.extend(rows(row), rows(upto))
            assert (extension is None) == (need > free)
            if extension is not None:
                tables[row] = tables.get(row, []) + extension.tables[0].blocks.tolist()
                tokens[row] = upto
        cache.check_invariants()
        assert {r: cache.tables[0].of(r)[0].tolist() for r in tables} == tables
    for row in list(tables):
        cache.release(np.array([row]))
    assert cache.pool.counts().free == 32


@pytest.mark.parametrize("mapped", [None, [0, 3]])
def test_renewed_keeps_the_pools_extents(mapped):
    cache = CacheManager(16, 4, 3, 64, blocks_per_extent=4, mapped=[0, 1])
    cache.extend(rows(0), rows(16))
    fresh = cache.rebuilt(mapped)
    assert fresh.pool.mapped_extents.tolist() == (mapped or [0, 1])
    assert fresh.pool.counts().live == 0
    assert CacheManager(16, 4, 3, 64).rebuilt([0]).pool.usable == 15, "a pool without extents is mapped as a whole"


def test_without_a_hasher_nothing_is_ever_found():
    cache = CacheManager(16, 4, 3, 64)
    chain = cache.chain(np.arange(9, dtype=np.int32), None)
    for row in (0, 1):
        hit = cache.lookup(chain, 8)
        assert (hit.num_tokens, cache.needed(9, hit)) == (0, 3)
        extension = cache.admit(row, 9, hit, str(row))
        assert (extension.num_computed, extension.waits) == (0, False)
        assert cache.commit(row, chain, 9) == ()
        cache.keep_for(str(row), row, chain, 9)
        cache.check_invariants()
    cache.reset()
    cache.forget(np.array([9, 10], np.int32))
    cache.release(rows(0, 1))
    cache.check_invariants()
    assert (cache.index.capacity, cache.index.num_nodes, cache.host.capacity) == (0, 0, 0)
    assert cache.swapping.evicted_blocks == 0
    assert (cache.pool.counts().free, cache.host.take_swaps()) == (15, None)
    assert cache.rebuilt().index.capacity == 0


def test_a_large_cache_gives_up_blocks_for_several_steps_at_once():
    """Decode steps need a block now and then: of 640 cached blocks 10 go at once, those that would go first anyway."""
    cache = CacheManager(641, 4, 4, 2560, hasher=PrefixHasher(4, b"seed"), eviction=Lru)
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
