"""The block allocator: exact on every call, equal to a naive one under random use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagetide.allocator.blocks import NULL_BLOCK, BlockAllocator, Counts
from pagetide.allocator.errors import AllocatorError, BlockMisuse, NoFreeBlocks


def test_all_or_nothing():
    pool = BlockAllocator(9)
    pool.allocate(3)
    with pytest.raises(NoFreeBlocks, match="asked for 6 blocks, 5 are available"):
        pool.allocate(6)
    assert pool.counts() == Counts(free=5, draining=0, live=3, cached=0, in_flight=0, mapped=8)
    assert len(set(pool.allocate(5).tolist())) == 5


def test_ids_are_in_order_and_never_null():
    pool = BlockAllocator(6)
    assert pool.allocate(5).tolist() == [1, 2, 3, 4, 5]
    assert pool.available == 0


@pytest.mark.parametrize("ids", [[3, 3], [NULL_BLOCK], [99], [-1], [3, 0], [4]])
def test_wrong_release_raises_and_changes_nothing(ids):
    pool = BlockAllocator(9)
    pool.allocate(3)
    before = pool.counts()
    with pytest.raises(BlockMisuse):
        pool.release(ids)
    assert pool.counts() == before
    pool.check_invariants([np.array([1, 2, 3])])
    pool.release([1, 2, 3])
    assert sorted(pool.allocate(8).tolist()) == list(range(1, 9))


def test_double_free_raises():
    pool = BlockAllocator(4)
    ids = pool.allocate(1)
    pool.release(ids)
    with pytest.raises(BlockMisuse, match="released more often"):
        pool.release(ids)
    assert pool.available == 3


def test_shared_blocks_live_until_their_last_holder_ends():
    pool = BlockAllocator(9)
    ids = pool.allocate(3)
    pool.retain(ids)
    assert pool.references(ids).tolist() == [2, 2, 2]
    pool.release(ids)
    assert (pool.references(ids).tolist(), pool.counts().live) == ([1, 1, 1], 3)
    pool.release(ids)
    assert pool.counts().free == 8


def test_a_block_given_twice_counts_twice():
    pool = BlockAllocator(4)
    (b,) = pool.allocate(1)
    pool.retain([b, b])
    assert pool.references([b]).tolist() == [3]
    pool.release([b, b, b])
    assert pool.available == 3


def test_pins_keep_a_released_block_in_flight():
    pool = BlockAllocator(4)
    ids = pool.allocate(2)
    pool.pin(ids)
    pool.pin(ids[:1])
    pool.release(ids)
    assert pool.counts() == Counts(free=1, draining=0, live=0, cached=0, in_flight=2, mapped=3)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    pool.unpin(ids)
    assert pool.counts().in_flight == 1
    pool.unpin(ids[:1])
    assert pool.counts().free == 3
    with pytest.raises(BlockMisuse, match="unpinned more often"):
        pool.unpin(ids[:1])
    with pytest.raises(BlockMisuse, match="cannot be pinned"):
        pool.pin(ids)
    with pytest.raises(BlockMisuse, match="cannot be shared"):
        pool.retain(ids)


def test_exhaustion_and_misuse_are_different_errors():
    assert not issubclass(NoFreeBlocks, BlockMisuse)
    assert issubclass(NoFreeBlocks, AllocatorError)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        BlockAllocator(4).allocate(-1)
    with pytest.raises(BlockMisuse, match="integers"):
        BlockAllocator(4).release([1.5])
    for size in (1, 0, -3):
        with pytest.raises(ValueError, match="at least 2"):
            BlockAllocator(size)


def test_invariants_notice_damage():
    for damage in (
        lambda pool: pool._references.__setitem__(7, 1),
        lambda pool: pool._free.__setitem__(0, 7),
        lambda pool: pool._pins.__setitem__(0, 1),
        lambda pool: setattr(pool, "_num_free", 5),
        lambda pool: setattr(pool, "_in_flight", 1),
    ):
        pool = BlockAllocator(9)
        pool.allocate(2)
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_invariants()


class AgainstNaive(RuleBasedStateMachine):
    """Random calls, right and wrong ones, on the allocator and on dictionaries."""

    @initialize(size=st.integers(2, 40))
    def start(self, size):
        self.pool = BlockAllocator(size)
        self.references: dict[int, int] = {}
        self.pins: dict[int, int] = {}

    @property
    def busy(self) -> set[int]:
        return set(self.references) | set(self.pins)

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        free = self.pool.usable - len(self.busy)
        if n > free:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n).tolist()
        assert len(set(ids)) == n
        assert not set(ids) & self.busy
        assert all(0 < i < self.pool.num_blocks for i in ids)
        self.references.update(dict.fromkeys(ids, 1))

    @rule(ids=st.lists(st.integers(-1, 41), max_size=6), what=st.sampled_from(["retain", "release", "pin", "unpin"]))
    def touch(self, ids, what):
        references, pins = dict(self.references), dict(self.pins)
        legal = all(0 < i < self.pool.num_blocks for i in ids)
        for i in ids:
            if what in ("retain", "pin"):
                legal &= i in self.references if what == "retain" else i in self.busy
                book = references if what == "retain" else pins
                book[i] = book.get(i, 0) + 1
            else:
                book = references if what == "release" else pins
                legal &= book.get(i, 0) > 0
                book[i] = book.get(i, 0) - 1
        if not legal:
            with pytest.raises(BlockMisuse):
                getattr(self.pool, what)(ids)
            return
        getattr(self.pool, what)(ids)
        self.references = {i: n for i, n in references.items() if n}
        self.pins = {i: n for i, n in pins.items() if n}

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        counts = self.pool.counts()
        assert counts.live == len(self.references)
        assert counts.in_flight == len(set(self.pins) - set(self.references))
        assert sum(counts[:-1]) == counts.mapped == self.pool.usable
        self.pool.check_invariants(np.full(n, i) for i, n in self.references.items())


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
