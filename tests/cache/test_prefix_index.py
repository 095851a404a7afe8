"""The prefix index: scenarios of prefix caching with exact blocks, single calls, and digests that collide."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from prefix_fakes import OldestFirst, WeakHasher

from pagetide.allocator.errors import BlockMisuse
from pagetide.cache.digest_table import DigestTable
from pagetide.cache.eviction import Lru, PolicyFactory
from pagetide.cache.prefix_hash import Chain, PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex


class Request:
    """A sequence with its hashes and its table of blocks."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.table: list[int] = []
        self.num_done = 0  # blocks that have been hit or offered for registration
        self.num_hit_tokens = 0


class Pool:
    """Who holds which block, as naive as can be: what a cache manager does, without a model. Lowest free block first."""

    def __init__(
        self, num_blocks: int, block_size: int = 16, hasher: PrefixHasher | None = None,
        eviction: PolicyFactory = Lru,
    ) -> None:  # fmt: skip
        self.index = PrefixIndex(hasher or PrefixHasher(block_size), num_blocks, eviction)
        self.free = list(range(1, num_blocks))
        self.references = dict.fromkeys(self.free, 0)

    @property
    def num_cached(self) -> int:
        return sum(count == 0 for count in self.references.values()) - len(self.free)

    def hits(self, tokens: Iterable[int], salt: bytes | None = None) -> int:
        """Tokens that a prompt would find: at least one is left to compute."""
        chain = self.index.hasher.chain(list(tokens), salt)
        return self.index.lookup(chain, chain.num_tokens - 1).num_tokens

    def begin(self, tokens: Iterable[int], salt: bytes | None = None) -> Request:
        """A request takes what it finds, and blocks for the rest; nothing of the rest is computed yet."""
        request = Request(self.index.hasher.chain(list(tokens), salt))
        hit = self.index.lookup(request.chain, request.chain.num_tokens - 1)
        self.index.accept(hit)
        self.retain(hit.blocks.tolist())
        request.table += hit.blocks.tolist()
        request.num_done = len(hit.blocks)
        request.num_hit_tokens = hit.num_tokens
        self.cover(request)
        return request

    def cover(self, request: Request) -> None:
        size = self.index.hasher.block_size
        request.table += self.allocate(-(-request.chain.num_tokens // size) - len(request.table))

    def generate(self, request: Request, tokens: Iterable[int]) -> None:
        request.chain.append(list(tokens))
        self.cover(request)

    def computed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are in their blocks: the full ones become findable."""
        full = num_tokens // self.index.hasher.block_size
        places = self.index.register(request.chain, np.array(request.table[:full], np.int32), request.num_done)
        for i, block in enumerate(places.blocks.tolist(), request.num_done):
            if block != request.table[i]:
                self.retain([block])
                self.release([request.table[i]])
                request.table[i] = block
        request.num_done = full

    def end(self, request: Request, num_tokens: int | None = None) -> None:
        self.computed(request, request.chain.num_tokens if num_tokens is None else num_tokens)
        self.release(request.table)

    def run(self, tokens: Iterable[int], salt: bytes | None = None) -> int:
        """A request from beginning to end. Returns the tokens that it found."""
        request = self.begin(tokens, salt)
        self.end(request)
        return request.num_hit_tokens

    def allocate(self, n: int) -> list[int]:
        if n > len(self.free):
            self.free += self.index.evict(self.index.victims(n - len(self.free))).blocks.tolist()
        taken = sorted(self.free)[:n]
        assert len(taken) == n, "the pool is too small"
        for block in taken:
            self.free.remove(block)
            self.references[block] = 1
        return taken

    def retain(self, blocks: list[int]) -> None:
        self.index.mark_used([block for block in blocks if self.references[block] == 0])
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
        gone = [block for block in blocks if self.references[block] == 0]
        findable = self.index.findable(gone).tolist()
        self.index.mark_evictable([block for block, found in zip(gone, findable, strict=True) if found])
        self.free += [block for block, found in zip(gone, findable, strict=True) if not found]

    def check(self) -> None:
        self.index.check_invariants()


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# -- scenarios B of prefix caching ------------------------------------------------------------------------------------


def test_full_blocks_only_while_it_runs_and_after() -> None:  # 10
    pool = Pool(20)
    a = pool.begin(words(0, 55))
    assert a.table == [1, 2, 3, 4]
    pool.computed(a, 55)
    prompt = words(0, 48) + words(900, 5)
    b = pool.begin(prompt)
    assert (b.num_hit_tokens, b.table) == (48, [1, 2, 3, 5])
    pool.end(b)
    pool.end(a)
    assert (pool.num_cached, len(pool.free)) == (3, 16)
    b = pool.begin(prompt)
    assert (b.num_hit_tokens, b.table) == (48, [1, 2, 3, 4])
    pool.check()


def test_at_least_one_token_is_computed() -> None:  # 11
    pool = Pool(20)
    pool.run(words(0, 48))
    assert pool.hits(words(0, 48)) == 32
    assert pool.hits(words(0, 49)) == 48
    assert pool.hits(words(0, 16)) == 0
    assert pool.hits([]) == 0


def test_position_matters() -> None:  # 12
    x, y, z = words(0, 16), words(100, 16), words(200, 16)
    pool = Pool(20)
    pool.run(x + x)
    assert pool.index.num_nodes == 2
    assert pool.hits([*y, *x, 1]) == 0
    assert pool.hits([*x, *z, 1]) == 16
    assert pool.hits([*x, *x, 1]) == 32


def test_eviction_order() -> None:  # 14
    pool = Pool(11)
    a, b, c = words(0, 49), words(1000, 49), words(2000, 96)
    pool.run(a)
    assert pool.run(b) == 0
    assert pool.run(a) == 48
    assert (pool.num_cached, len(pool.free)) == (6, 4)
    assert pool.index.victims(9).tolist() == [6, 5, 4, 3, 2, 1]
    assert pool.begin(c).table == [5, 6, 7, 8, 9, 10]
    assert pool.hits(a) == 48
    assert pool.hits(b) == 16
    pool.check()


def test_only_written_blocks_hit() -> None:  # 16
    pool = Pool(20)
    a = pool.begin(words(0, 96))
    assert pool.hits(words(0, 96)) == 0
    pool.computed(a, 40)
    assert pool.hits(words(0, 96)) == 32
    b = pool.begin(words(0, 96))
    assert b.table[:2] == a.table[:2]
    pool.computed(a, 96)
    pool.computed(b, 96)
    assert b.table == a.table
    pool.check()


def test_duplicates_do_not_leak() -> None:  # 17
    pool = Pool(60)
    requests = [pool.begin(words(0, 50)) for _ in range(8)]
    for request in requests:
        pool.computed(request, 50)
        pool.check()
    assert all(request.table[:3] == requests[0].table[:3] for request in requests)
    assert len({request.table[3] for request in requests}) == 8
    for request in requests:
        pool.end(request)
    assert (pool.num_cached, len(pool.free)) == (3, 56)
    pool.free += pool.index.reset().blocks.tolist()
    assert len(pool.free) == 59
    assert pool.hits(words(0, 50)) == 0
    pool.check()


def test_key_spaces_share_nothing() -> None:  # 18
    salts = [None, b"", b"tenant", b"tenant2"]
    pool = Pool(20)
    for salt in salts:
        assert pool.run(words(0, 33), salt) == 0
    held = {}
    for salt in salts:
        request = pool.begin(words(0, 33), salt)
        assert request.num_hit_tokens == 32
        held[salt] = set(request.table[:2])
        pool.end(request)
    assert len(set.union(*held.values())) == 8
    assert set(pool.index.evict(pool.index.victims(2)).blocks.tolist()) == held[None]
    assert [pool.hits(words(0, 33), salt) for salt in salts] == [0, 32, 32, 32]
    pool.check()


def test_generated_tokens_are_found_by_the_second_turn() -> None:  # 19
    pool = Pool(20)
    request = pool.begin(words(0, 40))
    pool.computed(request, 40)
    pool.generate(request, words(500, 30))
    pool.end(request, 69)  # the last one was sampled and not computed
    assert pool.hits(words(0, 40) + words(500, 30) + words(700, 20)) == 64


def test_reset_leaves_the_running_ones_alone() -> None:  # 21
    pool = Pool(20)
    pool.run(words(900, 32))
    a = pool.begin(words(0, 40))
    pool.computed(a, 40)
    assert sorted(pool.index.reset().blocks.tolist()) == [1, 2, 3, 4]  # two of them in use
    pool.free += [1, 2]
    assert pool.hits(words(0, 40)) == 0
    table = list(a.table)
    pool.generate(a, words(500, 30))
    pool.end(a)  # its first blocks cannot be found, so the later ones are not either
    assert table == a.table[:3]
    assert (pool.num_cached, len(pool.free)) == (0, 19)
    assert pool.run(words(0, 40)) == 0
    assert pool.hits(words(0, 40)) == 32
    pool.check()


# -- single calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [[2], [2, 7], [7, 3, 2], [2, 3, 4, 5, 6, 7]])
def test_evicting_a_block_takes_what_stands_behind_it(named: list[int]) -> None:
    pool = Pool(20)
    pool.run(words(0, 64))
    pool.run(words(0, 32) + words(100, 32))
    pool.run(words(0, 32) + words(200, 16))
    pool.run(words(300, 32))
    assert sorted(pool.index.evict(named).blocks.tolist()) == [2, 3, 4, 5, 6, 7]
    assert pool.hits(words(0, 64)) == 16
    assert pool.hits(words(300, 33)) == 32
    pool.check()


def test_nothing_in_use_is_evicted_nor_what_it_stands_behind() -> None:
    pool = Pool(20)
    pool.run(words(0, 32))
    a = pool.begin(words(0, 32))
    with pytest.raises(BlockMisuse, match="in use"):
        pool.index.evict([1])
    with pytest.raises(BlockMisuse, match="in use"):
        pool.index.mark_used([1])
    assert pool.index.evict([2]).blocks.tolist() == [2]
    pool.free.append(2)
    pool.end(a)
    with pytest.raises(BlockMisuse, match="not in use"):
        pool.index.mark_evictable([1])
    with pytest.raises(BlockMisuse, match="found"):
        pool.index.mark_evictable([9])
    with pytest.raises(BlockMisuse, match="named twice"):
        pool.index.evict([1, 1])
    pool.check()


def test_an_evictable_block_before_one_in_use_is_not_evicted() -> None:
    pool = Pool(20)
    a = pool.begin(words(0, 32))
    pool.computed(a, 32)
    pool.index.mark_evictable([1])  # a caller's mistake: block 2 was left out
    with pytest.raises(BlockMisuse, match="in use"):
        pool.index.evict([1])
    pool.index.mark_used([1])
    pool.check()


def test_moved_blocks_are_found_where_they_are() -> None:
    pool = Pool(20)
    a = pool.begin(words(0, 40))
    pool.computed(a, 40)
    pool.index.blocks.move([1, 2, 3], [11, 12, 13])  # 3 is not full
    assert pool.index.findable([1, 2, 3, 11, 12, 13]).tolist() == [False, False, False, True, True, False]
    chain = pool.index.hasher.chain(words(0, 40))
    assert pool.index.lookup(chain, 40).blocks.tolist() == [11, 12]
    with pytest.raises(BlockMisuse, match="already"):
        pool.index.blocks.move([11], [12])
    with pytest.raises(BlockMisuse, match="moves once"):
        pool.index.blocks.move([11, 11], [5, 6])
    pool.check()


def test_ranks_are_the_policys() -> None:
    pool = Pool(20)
    pool.run(words(0, 32))
    pool.run(words(100, 16))
    ranks = pool.index.ranks([3, 1, 2]).tolist()
    assert sorted(ranks) == [ranks[2], ranks[1], ranks[0]]


def test_the_policy_hears_of_a_hit_once_it_is_accepted() -> None:
    pool = Pool(20, eviction=OldestFirst)
    policy = pool.index._policy
    pool.run(words(0, 48))
    assert pool.hits(words(0, 48)) == 32
    assert policy.hits == [[]]
    pool.begin(words(0, 48))
    assert len(policy.hits[-1]) == 2


def test_a_block_that_is_findable_as_something_else_is_refused() -> None:
    pool = Pool(20)
    pool.run(words(0, 48))
    chain = pool.index.hasher.chain(words(500, 48))
    with pytest.raises(BlockMisuse, match="already"):
        pool.index.register(chain, np.array([10, 2], np.int32), 0)
    with pytest.raises(BlockMisuse, match="twice"):
        pool.index.register(chain, np.array([10, 10], np.int32), 0)
    with pytest.raises(BlockMisuse, match="not as block 0"):
        pool.index.register(chain, np.array([1, 10], np.int32), 1)
    with pytest.raises(ValueError, match="3 full ones"):
        pool.index.register(chain, np.array([10, 11, 12, 13], np.int32), 0)
    with pytest.raises(ValueError, match="another hasher"):
        pool.index.lookup(PrefixHasher(16).chain(words(0, 48)), 48)
    pool.check()


def test_construction_is_checked() -> None:
    with pytest.raises(ValueError, match="no use"):
        PrefixIndex(PrefixHasher(16), 0, Lru)
    with pytest.raises(ValueError, match="policy"):
        PrefixIndex(PrefixHasher(16), 10, Lru, num_slots=2)
    assert PrefixIndex(PrefixHasher(16), 10, Lru, num_slots=2, host_eviction=Lru).capacity == 12


def test_an_index_without_room_registers_only_the_first_blocks() -> None:
    hasher, blocks = PrefixHasher(16), np.array([3, 5, 7], np.int32)
    for capacity in (0, 2, 3):
        index = PrefixIndex(hasher, 10, Lru, capacity=capacity)
        chain = hasher.chain(words(0, 48))
        assert index.register(chain, blocks, 0).blocks.tolist() == blocks[:capacity].tolist()
        assert index.num_nodes == index.capacity == capacity
        assert index.lookup(chain, 48).blocks.tolist() == blocks[:capacity].tolist()
        assert index.findable(np.arange(10)).sum() == capacity
        index.check_invariants()


def test_an_index_of_capacity_0_allows_every_call_that_names_nothing() -> None:
    index, none = PrefixIndex(PrefixHasher(16), 10, Lru, capacity=0), np.empty(0, np.int64)
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


# -- digests that collide -------------------------------------------------------------------------------------------------


def test_when_all_digests_are_the_same_only_the_first_block_is_ever_found() -> None:
    pool = Pool(30, hasher=WeakHasher(16, 0))
    a = pool.begin(words(0, 48))
    pool.computed(a, 48)
    assert a.table == [1, 2, 3]
    assert pool.index.findable([1, 2, 3]).tolist() == [True, False, False]
    assert pool.run(words(100, 48)) == 0  # its first block stays unregistered
    assert pool.run(words(0, 48), b"salt") == 0
    assert pool.hits([*words(0, 16), 7]) == 16
    assert pool.hits([*words(0, 15), 7, 7]) == 0
    pool.end(a)
    assert (pool.num_cached, len(pool.free)) == (1, 28)
    pool.check()


@pytest.mark.parametrize("num_bits", [1, 3, 6, 10])
def test_whatever_collides_a_hit_holds_the_prompts_own_tokens(num_bits: int) -> None:
    rng = np.random.default_rng(num_bits)
    pool = Pool(40, 2, WeakHasher(2, num_bits, b"seed"))
    content: dict[int, tuple[bytes | None, tuple[int, ...]]] = {}
    found = 0
    for _ in range(1500):
        tokens = tuple(rng.integers(0, 3, rng.integers(1, 15)).tolist())
        salt = (None, b"")[rng.integers(2)]
        request = pool.begin(tokens, salt)
        found += request.num_hit_tokens
        for i, block in enumerate(request.table):
            prefix = salt, tokens[: 2 * (i + 1)]
            if 2 * i < request.num_hit_tokens:
                assert content[block] == prefix
            content[block] = prefix
        pool.end(request)
    assert found
    pool.check()
