"""The prefix index: what single calls answer and refuse. Its lives, also of digests that collide: test_prefix_index_life.py."""

from __future__ import annotations

import numpy as np
import pytest
from prefix_fakes import OldestFirst

from pagetide.allocator.errors import BlockMisuse
from pagetide.cache.digest_table import DigestTable
from pagetide.cache.eviction import Lru, PolicyFactory
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex
from pagetide.cache.window_blocks import WindowBlocksOfGroups


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def index_of(*prompts: list[int], eviction: PolicyFactory = Lru) -> PrefixIndex:
    """The full blocks of `prompts`, of 16 tokens, lie in the blocks from 1 on; none is in use."""
    index, first = PrefixIndex(PrefixHasher(16), 20, eviction), 1
    for prompt in prompts:
        chain = index.hasher.chain(prompt)
        blocks = np.arange(first, first + chain.num_blocks, dtype=np.int32)
        index.mark_evictable(index.register(chain, blocks, 0).blocks)
        first += chain.num_blocks
    return index


def test_only_what_nobody_uses_is_evicted_and_only_what_is_used_becomes_evictable() -> None:
    index = index_of(words(0, 32))
    index.mark_used([1])
    for call in (index.evict, index.mark_used):
        with pytest.raises(BlockMisuse, match="in use"):
            call([1])
    assert index.evict([2]).blocks.tolist() == [2]
    index.mark_evictable([1])
    for call, blocks, said in (
        (index.mark_evictable, [1], "not in use"),
        (index.mark_evictable, [9], "found"),
        (index.evict, [1, 1], "named twice"),
    ):
        with pytest.raises(BlockMisuse, match=said):
            call(blocks)
    index.check_invariants()


def test_an_evictable_block_before_one_in_use_is_not_evicted() -> None:
    index = index_of(words(0, 32))
    index.mark_used([2])  # a caller's mistake: block 1 was left out
    with pytest.raises(BlockMisuse, match="in use"):
        index.evict([1])


def test_ranks_are_the_policys() -> None:
    ranks = index_of(words(0, 32), words(100, 16)).ranks([3, 1, 2]).tolist()
    assert sorted(ranks) == [ranks[2], ranks[1], ranks[0]]


def test_the_policy_hears_of_a_hit_once_it_is_accepted() -> None:
    index = index_of(words(0, 48), eviction=OldestFirst)
    hit = index.lookup(index.hasher.chain(words(0, 48)), 47)
    assert (hit.num_tokens, index.retained.policy.hits) == (32, [])
    index.accept(hit)
    assert [len(nodes) for nodes in index.retained.policy.hits] == [2]


def test_a_block_that_is_findable_as_something_else_is_refused() -> None:
    index = index_of(words(0, 48))
    chain = index.hasher.chain(words(500, 48))
    for blocks, first, said in (([10, 2], 0, "already"), ([10, 10], 0, "twice"), ([1, 10], 1, "not as block 0")):
        with pytest.raises(BlockMisuse, match=said):
            index.register(chain, np.array(blocks, np.int32), first)
    with pytest.raises(ValueError, match="3 full ones"):
        index.register(chain, np.array([10, 11, 12, 13], np.int32), 0)
    with pytest.raises(ValueError, match="another hasher"):
        index.lookup(PrefixHasher(16).chain(words(0, 48)), 48)
    index.check_invariants()


def test_construction_is_checked() -> None:
    with pytest.raises(ValueError, match="no use"):
        PrefixIndex(PrefixHasher(16), 0, Lru)
    assert PrefixIndex(PrefixHasher(16), 10, Lru, num_slots=2).capacity == 12


def test_an_index_without_room_registers_only_the_first_blocks() -> None:
    hasher, blocks = PrefixHasher(16), np.array([3, 5, 7], np.int32)
    for capacity in (0, 2, 3):
        index = PrefixIndex(hasher, 10, Lru, windows=WindowBlocksOfGroups((), 16, 10, 0, capacity))
        chain = hasher.chain(words(0, 48))
        assert index.register(chain, blocks, 0).blocks.tolist() == blocks[:capacity].tolist()
        assert index.num_nodes == index.capacity == capacity
        assert index.lookup(chain, 48).blocks.tolist() == blocks[:capacity].tolist()
        assert index.findable(np.arange(10)).sum() == capacity
        index.check_invariants()


def test_an_index_of_capacity_0_allows_every_call_that_names_nothing() -> None:
    index, none = (
        PrefixIndex(PrefixHasher(16), 10, Lru, windows=WindowBlocksOfGroups((), 16, 10, 0, 0)),
        np.empty(0, np.int64),
    )
    assert (len(index.victims(5)), len(index.host_victims(5)), len(index.slots.used)) == (0, 0, 0)
    for places in (index.evict(none), index.evict_slots(none), index.reset()):
        assert (len(places.blocks), len(places.slots)) == (0, 0)
    index.blocks.move(np.array([1, 2]), np.array([3, 4]))
    index.mark_evictable(none)
    index.mark_used(none)
    index.check_invariants()


def test_a_digest_table_is_a_dict_of_digests() -> None:
    rng = np.random.default_rng(0)
    table, naive = DigestTable(300), dict[tuple[int, ...], int]()
    unused = list(range(300))
    for _ in range(300):
        fresh = np.array(unused[: rng.integers(0, 40)], np.int64)
        digests = rng.integers(0, 2**64, (len(fresh), 2), np.uint64)
        digests[:, 0] &= np.uint64(15)  # all in a few slots
        table.insert(fresh, digests)
        naive |= dict(zip(map(tuple, digests.tolist()), fresh.tolist(), strict=True))
        known = np.array(list(naive), np.uint64).reshape(-1, 2)
        assert table.find(known).tolist() == list(naive.values())
        assert (table.find(known + np.uint64(16)) == -1).all()
        gone = [digest for digest in naive if rng.random() < 0.1]
        table.remove(np.array([naive.pop(digest) for digest in gone], np.int64))
        assert sorted(table.contents().tolist()) == sorted(naive.values())
        unused = [node for node in range(300) if node not in set(naive.values())]
