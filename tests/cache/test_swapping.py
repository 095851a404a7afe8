"""Reclaiming cached blocks, with and without a host tier: what is evicted, what is demoted, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.eviction import Lru
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import Chain, PrefixHasher
from pagetide.cache.row_tables import RowTables


def cache_of(host_slots: int, **more) -> tuple[CacheManager, Chain]:
    """A cache of 10 usable blocks of 4 tokens, of which 5 are cached: those of the chain."""
    tables = RowTables(BlockAllocator(11), 4, 2, 64)
    cache = CacheManager(tables, PrefixHasher(4, b"seed"), host_slots=host_slots, eviction=Lru, **more)
    chain = cache.chain(np.arange(20, dtype=np.int32), None)
    assert cache.admit(0, 20, cache.lookup(chain, 0)) is not None
    cache.commit(0, chain, 20)
    cache.release(np.array([0]))
    cache.check_invariants()
    return cache, chain


@pytest.mark.parametrize("host_slots", [0, 2, 9])
@pytest.mark.parametrize("trees", [False, True])
def test_what_finds_no_slot_is_evicted(host_slots: int, trees: bool) -> None:
    cache, chain = cache_of(host_slots)
    victims = cache.index.victims(3)
    if trees:
        cache.swapping.reclaim_trees(victims[-1:])  # the third block, with the two behind it
    else:
        cache.swapping.reclaim(victims)
    cache.check_invariants()
    demoted = min(host_slots, 3)
    assert (cache.host.num_used, cache.swapping.evicted_blocks) == (demoted, 3 - demoted)
    assert cache.pool.counts().cached == 2
    hit = cache.lookup(chain, 20)
    assert (len(hit.blocks), len(hit.slots)) == (2, demoted)


@pytest.mark.parametrize("host_slots", [0, 9])
def test_the_bound_holds_with_and_without_a_host_tier(host_slots: int) -> None:
    cache, chain = cache_of(host_slots, max_cached_blocks=3)
    assert (cache.pool.counts().cached, cache.swapping.evicted_blocks) == (3, 0 if host_slots else 2)
    assert cache.lookup(chain, 20).num_tokens == (20 if host_slots else 12)
    cache.swapping.max_cached_blocks = 2
    with pytest.raises(AssertionError, match="3 blocks are cached, of 2 at most"):
        cache.check_invariants()
    cache.swapping.trim()
    cache.check_invariants()
