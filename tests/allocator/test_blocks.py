"""The block allocator: exact on every call, equal to a naive one under random use."""

from __future__ import annotations

import itertools

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


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._references.__setitem__(7, 1),
        lambda pool: pool._references.__setitem__(1, 0),
        lambda pool: pool._references.__setitem__(10, 1),
        lambda pool: pool._free.__setitem__(0, True),
        lambda pool: pool._free.__setitem__(7, False),
        lambda pool: pool._free.__setitem__(10, True),
        lambda pool: pool._pins.__setitem__(0, 1),
        lambda pool: pool._pins.__setitem__(1, 1),
        lambda pool: setattr(pool, "_num_free", 4),
        lambda pool: setattr(pool, "_num_draining", 1),
        lambda pool: setattr(pool, "_in_flight", 1),
        lambda pool: setattr(pool, "_mapped", 11),
        lambda pool: setattr(pool, "_usable", 6),
        lambda pool: pool._extents.room.__setitem__(2, 1),
        lambda pool: pool._extents._states.__setitem__(1, 2),
        lambda pool: setattr(pool, "_at_hand", np.array([7])),
    ],
)
def test_invariants_notice_damage(damage):
    pool = BlockAllocator(12, blocks_per_extent=3, mapped=[0, 1, 2])
    pool.allocate(3)
    pool.check_invariants([np.array([1, 2, 3])])
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants()


# -- extents -----------------------------------------------------------------------------------------------------------


def test_blocks_come_from_the_fullest_extent():
    pool = BlockAllocator(16, blocks_per_extent=4)
    assert pool.allocate(12).tolist() == list(range(1, 13))
    pool.release([4, 5, 9, 10])  # extent 1 and 2 have two free blocks each, extent 3 three
    assert pool.allocate(1).tolist() == [4]
    pool.release([6, 7])
    assert pool.allocate(3).tolist() == [9, 10, 5], "extent 2 is the fullest; then 1, its lowest block first"
    assert pool.allocate(3).tolist() == [6, 7, 13]


def test_others_run_empty():
    """Blocks that come and go at random end up in few extents: there is always an empty one to give back."""
    rng, pool = np.random.default_rng(0), BlockAllocator(64 * 8, blocks_per_extent=8)
    held: list[int] = []
    for _ in range(2_000):
        if len(held) > 128 or (held and rng.random() < 0.45):
            pool.release([held.pop(int(rng.integers(len(held))))])
        else:
            held += pool.allocate(1).tolist()
    used = {block // 8 for block in held}
    assert len(used) < 64 / 2
    assert len(pool.plan_drain(64).extents) == (pool.available // 8)


def test_a_fixed_pool_gives_nothing_back():
    pool = BlockAllocator(5_000)
    assert len(pool.plan_drain(3).extents) == len(pool.drainable_extents) == len(pool.unmapped_extents) == 0
    assert sorted(pool.allocate(4_999).tolist()) == list(range(1, 5_000))
    with pytest.raises(BlockMisuse, match="cannot change"):
        pool.drain([1])


def test_extents_come_and_go():
    pool = BlockAllocator(16, blocks_per_extent=4, mapped=[2, 0])
    assert (pool.usable, pool.capacity, pool.available) == (7, 15, 7)
    assert (pool.mapped_extents.tolist(), pool.unmapped_extents.tolist()) == ([0, 2], [1, 3])
    assert pool.allocate(5).tolist() == [1, 2, 3, 8, 9]
    pool.map([3])
    assert pool.counts() == Counts(free=6, draining=0, live=5, cached=0, in_flight=0, mapped=11)
    pool.drain([2, 3])
    assert pool.counts() == Counts(free=0, draining=6, live=5, cached=0, in_flight=0, mapped=11)
    assert (pool.available, pool.usable) == (0, 3)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(1)
    with pytest.raises(BlockMisuse, match=r"blocks in use cannot lose their memory: 8, 9"):
        pool.unmap([2, 3])
    pool.release([8, 9])
    assert pool.counts().draining == 8
    pool.undrain([3])
    pool.unmap([2])
    assert pool.counts() == Counts(free=4, draining=0, live=3, cached=0, in_flight=0, mapped=7)
    pool.check_invariants()


@pytest.mark.parametrize(
    ("call", "extents", "message"),
    [
        ("map", [1], "extents \\[1\\] are open, not unmapped"),
        ("map", [3, 3], "named twice"),
        ("map", [4], "extents \\[4\\] cannot change: 1 .. 3 can"),
        ("map", [1.5], "extents are integers"),
        ("drain", [0], "extents \\[0\\] cannot change"),
        ("drain", [3], "are unmapped, not open"),
        ("drain", [1, 2], "are draining, not open"),
        ("undrain", [1], "are open, not draining"),
        ("unmap", [1], "are open, not draining"),
        ("unmap", [2, -1], "cannot change"),
    ],
)
def test_wrong_extents_raise_and_change_nothing(call, extents, message):
    pool = BlockAllocator(16, blocks_per_extent=4, mapped=[0, 1, 2])
    pool.allocate(4)
    pool.drain([2])
    before = pool.counts()
    with pytest.raises(BlockMisuse, match=message):
        getattr(pool, call)(extents)
    assert pool.counts() == before
    pool.check_invariants()


@pytest.mark.parametrize(
    "bad",
    [
        {"blocks_per_extent": 5},
        {"blocks_per_extent": 0},
        {"mapped": [0]},
        {"blocks_per_extent": 4, "mapped": [1]},
        {"blocks_per_extent": 4, "mapped": []},
        {"blocks_per_extent": 4, "mapped": [0, 4]},
        {"blocks_per_extent": 4, "mapped": [-1, 0]},
    ],
)
def test_sizes_are_checked(bad):
    with pytest.raises(ValueError, match="extent"):
        BlockAllocator(16, **bad)


def test_a_move_takes_references_along_and_pins_both_sides():
    pool = BlockAllocator(12, blocks_per_extent=4)
    pool.allocate(5)
    pool.retain([4])
    pool.release([1, 2])
    plan = pool.plan_drain(3)
    assert (plan.extents.tolist(), plan.moves.tolist()) == ([2, 1], [4, 5])
    pool.drain([1])
    assert pool.move([4, 5]).tolist() == [1, 2]
    assert pool.references([1, 2, 4, 5]).tolist() == [2, 1, 0, 0]
    assert pool.counts() == Counts(free=4, draining=2, live=3, cached=0, in_flight=2, mapped=11)
    with pytest.raises(BlockMisuse, match="cannot move"):
        pool.move([1])
    pool.release([2])
    assert pool.counts().in_flight == 3, "a copy is still to be written there"
    pool.unpin([1, 2, 4, 5])
    pool.unmap([1])
    assert pool.counts() == Counts(free=5, draining=0, live=2, cached=0, in_flight=0, mapped=7)
    pool.check_invariants([np.array([1]), np.array([1, 3])])


@pytest.mark.parametrize("sources", [[4, 4], [6], [1, 2]])
def test_what_cannot_move_stays(sources):
    pool = BlockAllocator(12, blocks_per_extent=4)
    pool.allocate(5)
    pool.pin([2])
    before = pool.counts()
    with pytest.raises(BlockMisuse, match="cannot move"):
        pool.move(sources)
    pool.allocate(6)
    with pytest.raises(NoFreeBlocks):
        pool.move([1])
    pool.release(range(6, 12))
    assert pool.counts() == before
    pool.check_invariants()


class Naive:
    """The allocator on dictionaries, block by block. A pool of one extent that is never given back, without `per`."""

    def __init__(self, num_blocks: int, per: int | None, mapped: set[int]) -> None:
        self.per = per or num_blocks
        self.num_extents = num_blocks // self.per
        self.open, self.draining = set(mapped), set()
        self.references: dict[int, int] = {}
        self.pins: dict[int, int] = {}

    @property
    def busy(self) -> set[int]:
        return set(self.references) | set(self.pins)

    def blocks(self, extents) -> set[int]:
        return {block for e in extents for block in range(e * self.per, (e + 1) * self.per)} - {0}

    def free(self, extent: int) -> set[int]:
        return self.blocks([extent]) - self.busy

    @property
    def num_free(self) -> int:
        return sum(len(self.free(e)) for e in self.open)

    def allocate(self, n: int) -> list[int]:
        ids = []
        for _ in range(n):
            _, extent = min((len(self.free(e)), e) for e in self.open if self.free(e))
            ids.append(min(self.free(extent)))
            self.references[ids[-1]] = 1
        return ids

    def counts(self) -> Counts:
        mapped = self.blocks(self.open | self.draining)
        live, in_flight = len(self.references), len(set(self.pins) - set(self.references))
        draining = len(self.blocks(self.draining) - self.busy)
        return Counts(len(mapped) - live - in_flight - draining, draining, live, 0, in_flight, len(mapped))

    def best_drain(self, most: int) -> tuple[int, int]:
        """(extents, blocks to move) of the best choice there is, by trying all."""
        found = (0, 0)
        may = [e for e in self.open if e and not self.blocks([e]) & set(self.pins)]
        for size in range(1, min(most, len(may)) + 1):
            for choice in itertools.combinations(may, size):
                moves = len(self.blocks(choice) & set(self.references))
                holes = sum(len(self.free(e)) for e in self.open - set(choice))
                if moves <= holes and (-size, moves) < (-found[0], found[1]):
                    found = (size, moves)
        return found


class AgainstNaive(RuleBasedStateMachine):
    """Random calls, right and wrong ones: every id, count and error is that of the naive allocator."""

    @initialize(data=st.data(), fixed=st.booleans(), per=st.integers(1, 6), num_extents=st.integers(2, 7))
    def start(self, data, fixed, per, num_extents):
        num_blocks = per * num_extents
        if fixed:
            self.pool, self.naive = BlockAllocator(num_blocks), Naive(num_blocks, None, {0})
        else:
            mapped = {0, *data.draw(st.sets(st.integers(0, num_extents - 1)))}
            self.pool = BlockAllocator(num_blocks, blocks_per_extent=per, mapped=mapped)
            self.naive = Naive(num_blocks, per, mapped)

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        if n > self.naive.num_free:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(n)
            return
        assert self.pool.allocate(n).tolist() == self.naive.allocate(n)

    @rule(ids=st.lists(st.integers(-1, 43), max_size=6), what=st.sampled_from(["retain", "release", "pin", "unpin"]))
    def touch(self, ids, what):
        references, pins = dict(self.naive.references), dict(self.naive.pins)
        legal = all(0 < i < self.pool.num_blocks for i in ids)
        for i in ids:
            if what in ("retain", "pin"):
                legal &= i in self.naive.references if what == "retain" else i in self.naive.busy
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
        self.naive.references = {i: n for i, n in references.items() if n}
        self.naive.pins = {i: n for i, n in pins.items() if n}

    @rule(data=st.data())
    def release_some(self, data):
        """Right calls more often than chance gives."""
        if self.naive.references:
            self.touch(data.draw(st.lists(st.sampled_from(sorted(self.naive.references)), unique=True)), "release")

    @rule(extents=st.lists(st.integers(-1, 7), max_size=3), what=st.sampled_from(["map", "drain", "undrain", "unmap"]))
    def change_extents(self, extents, what):
        naive = self.naive
        unmapped = set(range(naive.num_extents)) - naive.open - naive.draining
        start = {"map": unmapped, "drain": naive.open, "undrain": naive.draining, "unmap": naive.draining}[what]
        legal = set(extents) <= start - {0} and len(set(extents)) == len(extents)
        legal &= what != "unmap" or not naive.blocks(extents) & naive.busy
        if not legal:
            with pytest.raises(BlockMisuse):
                getattr(self.pool, what)(extents)
            return
        getattr(self.pool, what)(extents)
        naive.open |= set(extents) if what in ("map", "undrain") else set()
        naive.draining |= set(extents) if what == "drain" else set()
        naive.open -= set(extents) if what == "drain" else set()
        naive.draining -= set(extents) if what in ("undrain", "unmap") else set()

    @rule(most=st.integers(0, 8), carry_out=st.booleans())
    def compact(self, most, carry_out):
        naive = self.naive
        plan = self.pool.plan_drain(most)
        extents, moves = plan.extents.tolist(), plan.moves.tolist()
        assert (len(extents), len(moves)) == naive.best_drain(most)
        assert [block // naive.per for block in moves] == [
            e for e in extents for block in moves if block // naive.per == e
        ]
        assert set(moves) == naive.blocks(extents) & naive.busy
        unpinned = [e for e in naive.open - {0} if not naive.blocks([e]) & set(naive.pins)]
        assert len(extents) == min(most, naive.num_free // naive.per, len(unpinned)), "N free blocks give N blocks back"
        held = {e: len(naive.blocks([e]) & naive.busy) for e in unpinned}
        assert extents == sorted(unpinned, key=lambda e: (held[e], -e))[: len(extents)]
        if not carry_out:
            return
        self.pool.drain(plan.extents)
        naive.open -= set(extents)
        naive.draining |= set(extents)
        targets = self.pool.move(plan.moves).tolist()
        before = {block: naive.references.pop(block) for block in moves}
        naive.pins.update(dict.fromkeys(moves, 1))  # what moved away is busy while the others are placed
        assert targets == naive.allocate(len(moves))
        naive.references.update(dict(zip(targets, before.values(), strict=True)))
        naive.pins.update(dict.fromkeys(targets, 1))

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.counts() == self.naive.counts()
        assert sum(self.pool.counts()[:-1]) == self.pool.counts().mapped
        assert self.pool.available == self.naive.num_free
        assert self.pool.usable == len(self.naive.blocks(self.naive.open))
        assert self.pool.mapped_extents.tolist() == sorted(self.naive.open | self.naive.draining) or not self.elastic
        self.pool.check_invariants(np.full(n, i) for i, n in self.naive.references.items())

    @property
    def elastic(self) -> bool:
        return self.naive.num_extents > 1


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
