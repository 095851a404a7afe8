"""The block allocator: exact on every call, equal to a naive one under random use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.drain import DrainPlan
from pagetide.allocator.errors import AllocatorError, BlockMisuse, NoFreeBlocks
from pagetide.allocator.pool_view import NULL_BLOCK, BlockCounts


def test_all_or_nothing():
    pool = BlockAllocator(9)
    pool.allocate(3)
    with pytest.raises(NoFreeBlocks, match="asked for 6 blocks, 5 are available"):
        pool.allocate(6)
    assert pool.counts() == BlockCounts(free=5, draining=0, live=3, cached=0, in_flight=0, mapped=8)
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
    assert pool.counts() == BlockCounts(free=1, draining=0, live=0, cached=0, in_flight=2, mapped=3)
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
        lambda pool: pool._findable.__setitem__(0, True),
        lambda pool: pool._findable.__setitem__(7, True),
        lambda pool: pool._findable.__setitem__(10, True),
        lambda pool: setattr(pool, "_num_findable", 1),
        lambda pool: setattr(pool, "_num_cached", 1),
        lambda pool: pool.publish([1]) or pool.release([1, 2]) is None or pool._free.__setitem__(1, True),
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
    assert pool.counts() == BlockCounts(free=6, draining=0, live=5, cached=0, in_flight=0, mapped=11)
    pool.drain([2, 3])
    assert pool.counts() == BlockCounts(free=0, draining=6, live=5, cached=0, in_flight=0, mapped=11)
    assert (pool.available, pool.usable) == (0, 3)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(1)
    with pytest.raises(BlockMisuse, match=r"blocks in use cannot lose their memory: 8, 9"):
        pool.unmap([2, 3])
    pool.release([8, 9])
    assert pool.counts().draining == 8
    pool.undrain([3])
    pool.unmap([2])
    assert pool.counts() == BlockCounts(free=4, draining=0, live=3, cached=0, in_flight=0, mapped=7)
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
    assert pool.counts() == BlockCounts(free=4, draining=2, live=3, cached=0, in_flight=2, mapped=11)
    with pytest.raises(BlockMisuse, match="cannot move"):
        pool.move([1])
    pool.release([2])
    assert pool.counts().in_flight == 3, "a copy is still to be written there"
    pool.unpin([1, 2, 4, 5])
    pool.unmap([1])
    assert pool.counts() == BlockCounts(free=5, draining=0, live=2, cached=0, in_flight=0, mapped=7)
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


# -- findable blocks ---------------------------------------------------------------------------------------------------


def test_findable_blocks_stay_when_nobody_holds_them():
    pool = BlockAllocator(9)
    ids = pool.allocate(4)
    pool.retain([2])
    pool.publish([3, 1, 2])
    assert pool.release([4, 3, 2, 1]).tolist() == [3, 1], "4 is not findable, 2 still held"
    assert pool.counts() == BlockCounts(free=5, draining=0, live=1, cached=2, in_flight=0, mapped=8)
    assert (pool.num_free, pool.available) == (5, 7)
    with pytest.raises(NoFreeBlocks, match="asked for 6 blocks, 5 are available"):
        pool.allocate(6)
    assert pool.allocate(5).tolist() == [4, 5, 6, 7, 8], "cached blocks are not handed out"
    assert pool.retain([2, 3, 3]).tolist() == [3]
    assert pool.references(ids).tolist() == [0, 2, 2, 1]
    pool.forget([1, 2])
    assert pool.counts() == BlockCounts(free=1, draining=0, live=7, cached=0, in_flight=0, mapped=8)
    assert pool.release([2, 2]).tolist() == [], "it could no longer be found"
    assert pool.release([3, 3]).tolist() == [3]
    assert pool.allocate(2).tolist() == [1, 2]
    pool.check_invariants(findable=np.array([3]))


@pytest.mark.parametrize(
    ("call", "ids", "message"),
    [
        ("publish", [4], "cannot be published: 4"),
        ("publish", [3, 2], "cannot be published: 2"),
        ("publish", [1], "cannot be published: 1"),
        ("publish", [3, 3], "cannot be published: 3"),
        ("publish", [0], "not blocks to use"),
        ("forget", [1, 3], "cannot be forgotten: 3"),
        ("forget", [1, 1], "cannot be forgotten: 1"),
        ("forget", [9], "not blocks to use"),
        ("release", [1], "released more often"),
        ("retain", [1, 4], "cannot be shared: 4"),
        ("pin", [1, 4], "cannot be pinned: 4"),
        ("move", [1, 4], "cannot move: 4"),
        ("move", [1, 1], "cannot move: 1"),
    ],
)
def test_wrong_calls_on_findable_blocks_raise_and_change_nothing(call, ids, message):
    pool = BlockAllocator(9)
    pool.allocate(3)
    pool.publish([1, 2])
    pool.release([1])
    before = pool.counts()
    with pytest.raises(BlockMisuse, match=message):
        getattr(pool, call)(ids)
    assert pool.counts() == before == BlockCounts(free=5, draining=0, live=2, cached=1, in_flight=0, mapped=8)
    pool.check_invariants([np.array([2, 3])], findable=np.array([1, 2]))


def test_pins_keep_cached_blocks_from_being_reused():
    pool = BlockAllocator(5)
    pool.allocate(4)
    pool.publish([1, 2, 3])
    pool.pin([1])
    assert pool.release([1, 2, 3]).tolist() == [1, 2, 3], "a pin is no reference"
    pool.pin([2, 2])
    assert pool.counts() == BlockCounts(free=0, draining=0, live=1, cached=1, in_flight=2, mapped=4)
    assert pool.available == 1, "forgetting 1 and 2 would not make them free"
    pool.forget([2])
    pool.unpin([1, 2])
    assert pool.counts() == BlockCounts(free=0, draining=0, live=1, cached=2, in_flight=1, mapped=4)
    pool.unpin([2])
    assert pool.counts() == BlockCounts(free=1, draining=0, live=1, cached=2, in_flight=0, mapped=4)
    pool.pin([3])
    assert pool.retain([3]).tolist() == [3], "a hit on what a copy reads"
    assert pool.counts() == BlockCounts(free=1, draining=0, live=2, cached=1, in_flight=0, mapped=4)
    assert pool.release([3]).tolist() == [3]
    pool.unpin([3])
    pool.check_invariants([np.array([4])], findable=np.array([1, 3]))


def test_a_cached_block_moves_and_stays_findable():
    pool = BlockAllocator(12, blocks_per_extent=4)
    pool.allocate(6)
    pool.publish([3, 4, 5])
    pool.release([1, 2, 3, 5, 6])
    plan = pool.plan_drain(3)
    assert (plan.extents.tolist(), plan.moves.tolist(), plan.evictions.tolist()) == ([2, 1], [4, 5], [])
    pool.drain([1, 2])
    assert (pool.num_free, pool.available) == (2, 3), "5 drains: to forget it would not make it free"
    assert pool.counts().cached == 2
    assert pool.occupied([2, 1]).tolist() == [4, 5]
    assert pool.move([5, 4]).tolist() == [1, 2]
    assert pool.references([1, 2, 4, 5]).tolist() == [0, 1, 0, 0]
    assert pool.counts() == BlockCounts(free=0, draining=6, live=1, cached=1, in_flight=3, mapped=11)
    assert pool.retain([1]).tolist() == [1], "a hit on what the copy brings"
    pool.release([1])
    pool.check_invariants(findable=np.array([1, 2, 3]))
    pool.unpin([1, 2, 4, 5])
    assert pool.counts() == BlockCounts(free=0, draining=8, live=1, cached=2, in_flight=0, mapped=11)
    pool.unmap([1, 2])
    pool.check_invariants(findable=np.array([1, 2, 3]))


def test_a_findable_block_keeps_its_extent_mapped():
    pool = BlockAllocator(12, blocks_per_extent=4)
    pool.allocate(6)
    pool.publish([5, 4])
    pool.drain([1])
    pool.release(range(1, 7))
    assert pool.counts() == BlockCounts(free=7, draining=2, live=0, cached=2, in_flight=0, mapped=11)
    with pytest.raises(BlockMisuse, match="blocks in use cannot lose their memory: 4, 5"):
        pool.unmap([1])
    with pytest.raises(BlockMisuse, match="are open, not draining"):
        pool.occupied([2])
    assert pool.available == 7
    pool.undrain([1])
    assert pool.available == 11
    pool.drain([1])
    pool.forget([4, 5])
    pool.unmap([1])
    assert pool.counts() == BlockCounts(free=7, draining=0, live=0, cached=0, in_flight=0, mapped=7)


# -- giving back with evictions ----------------------------------------------------------------------------------------


def pool_of(per: int, extents: list[str]) -> tuple[BlockAllocator, np.ndarray]:
    """A pool drawn block by block: "L" live, "." free, "5" cached and worth 5, "p" cached and pinned, "0" the null block."""
    drawn = "".join(extents)
    pool = BlockAllocator(len(drawn), blocks_per_extent=per)
    pool.allocate(len(drawn) - 1)
    kinds = dict(enumerate(drawn[1:], start=1))
    pool.publish([b for b, kind in kinds.items() if kind not in "L."])
    pool.release([b for b, kind in kinds.items() if kind != "L"])
    pool.pin([b for b, kind in kinds.items() if kind == "p"])
    worth = np.full(len(drawn), np.nan)
    for block, kind in kinds.items():
        worth[block] = float(kind) if kind.isdigit() else np.nan
    return pool, worth


@pytest.mark.parametrize(
    ("extents", "asked", "plan"),
    [
        pytest.param(["0...", "55..", "6.7L", "88L."], 1, ([1], [4, 5], []), id="holes suffice"),
        pytest.param(["0...", "55..", "6.7L", "88L."], 2, ([1, 2], [5, 8, 10, 11], [4]), id="one hole is lacking"),
        pytest.param(["0LLL", "5555", "3333", "4444"], 1, ([2], [], [8, 9, 10, 11]), id="the least worth"),
        pytest.param(["0LLL", "5555", "4444", "4444"], 1, ([3], [], [12, 13, 14, 15]), id="of equals the highest"),
        pytest.param(["0LLL", "5555", "1119", "4444"], 1, ([3], [], [12, 13, 14, 15]), id="its dearest block counts"),
        pytest.param(["0LLL", "9999", "111L", "11LL"], 1, ([1], [], [4, 5, 6, 7]), id="fewest live first"),
        pytest.param(
            ["0LLL", "9999", "111L", "11LL"], 3, ([1, 2], [11], [8, 9, 10, 12, 4, 5, 6, 7]), id="as many as go"
        ),
        pytest.param(["0.LL", "1LLL", "9278", "LLLL"], 1, ([2], [8], [9, 10, 11]), id="holes take the dearest"),
        pytest.param(["05LL", "1LLL", "2LLL", "LLLL"], 1, ([], [], []), id="too little is cached"),
        pytest.param(["05LL", "1LLL", "2LL4", "LLLL"], 1, ([2], [9, 10], [4, 8, 11, 1]), id="evicted elsewhere too"),
        pytest.param(["05LL", "11LL", "3p.4", "6..."], 2, ([3, 1], [6, 7], [4, 5, 8, 12]), id="a pinned extent stays"),
        pytest.param(
            ["0777", "7777", "7777"], 2, ([2, 1], [], list(range(4, 12))), id="nothing moves, nothing more goes"
        ),
    ],
)
def test_what_is_evicted_for_whole_extents(extents, asked, plan):
    pool, worth = pool_of(4, extents)
    before = pool.counts()
    got = pool.plan_drain(asked, worth)
    assert (got.extents.tolist(), got.moves.tolist(), got.evictions.tolist()) == plan
    assert pool.counts() == before, "planning changes nothing"
    bare = pool.plan_drain(asked)
    assert (len(bare.extents), len(bare.evictions)) == (min(asked, pool.num_free // 4), 0), "nothing said what may go"


def test_whole_pages_come_back():
    """Scenario I 64: 8 cached blocks over 3 pages of 4; to evict 4 frees a page, and not one with a used block."""
    pool, worth = pool_of(4, ["0LLL", "1234", "78LL", "56LL"])
    plan = pool.plan_drain(1, worth)
    assert (plan.extents.tolist(), plan.moves.tolist(), plan.evictions.tolist()) == ([1], [], [4, 5, 6, 7])
    pool.forget(plan.evictions)
    pool.drain(plan.extents)
    pool.unmap(plan.extents)
    assert pool.counts() == BlockCounts(free=0, draining=0, live=7, cached=4, in_flight=0, mapped=11)


def test_more_forgotten_than_planned_leaves_less_to_move():
    pool, worth = pool_of(4, ["0..L", "1LLL", "92L8"])
    plan = pool.plan_drain(1, worth)
    assert (plan.extents.tolist(), plan.moves.tolist(), plan.evictions.tolist()) == ([2], [8, 10], [9, 11])
    pool.forget([*plan.evictions, 8])  # say, what was cached behind 9
    pool.drain(plan.extents)
    assert pool.move(pool.occupied(plan.extents)).tolist() == [1]
    pool.check_invariants(findable=np.array([4]))


def test_what_drains_already_is_not_counted_upon():
    pool, worth = pool_of(4, ["0LLL", "1111", "6LLL"])
    pool.drain([1])
    assert len(pool.plan_drain(1, worth).extents) == 0, "to forget 4 .. 7 would make no hole"
    pool.undrain([1])
    assert pool.plan_drain(1, worth).evictions.tolist() == [4, 5, 6, 7]


def test_worth_is_checked():
    pool, worth = pool_of(4, ["0L.L", "5LLL"])
    for entries in (0, 4, 7, 9):
        with pytest.raises(ValueError, match=rf"worth has the shape \({entries},\), and there are 8 blocks"):
            pool.plan_drain(1, np.ones(entries))
    worth[4] = np.nan
    with pytest.raises(ValueError, match="worth is no number for cached blocks 4"):
        pool.plan_drain(1, worth)


# -- against a naive allocator -----------------------------------------------------------------------------------------


class Naive:
    """The allocator on dictionaries, block by block. A pool of one extent that is never given back, without `per`."""

    def __init__(self, num_blocks: int, per: int | None, mapped: set[int]) -> None:
        self.per = per or num_blocks
        self.num_extents = num_blocks // self.per
        self.open, self.draining = set(mapped), set()
        self.references: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.findable: set[int] = set()

    @property
    def busy(self) -> set[int]:
        return set(self.references) | set(self.pins) | self.findable

    @property
    def cached(self) -> set[int]:
        return self.findable - set(self.references) - set(self.pins)

    @property
    def evictable(self) -> set[int]:
        return self.cached & self.blocks(self.open)

    def blocks(self, extents) -> set[int]:
        return {block for e in extents for block in range(e * self.per, (e + 1) * self.per)} - {0}

    def free(self, extent: int) -> set[int]:
        return self.blocks([extent]) - self.busy

    @property
    def num_free(self) -> int:
        return sum(len(self.free(e)) for e in self.open)

    @property
    def drainable(self) -> list[int]:
        return [e for e in sorted(self.open - {0}) if not self.blocks([e]) & set(self.pins)]

    def allocate(self, n: int) -> list[int]:
        ids = []
        for _ in range(n):
            _, extent = min((len(self.free(e)), e) for e in self.open if self.free(e))
            ids.append(min(self.free(extent)))
            self.references[ids[-1]] = 1
        return ids

    def move(self, sources: list[int]) -> list[int]:
        before = {block: self.references.pop(block, 0) for block in sources}
        self.pins.update(dict.fromkeys(sources, 1))  # what moved away is busy while the others are placed
        targets = self.allocate(len(sources))
        for (source, references), target in zip(before.items(), targets, strict=True):
            self.references[target] = references
            self.findable ^= {source, target} if source in self.findable else set()
        self.references = {i: n for i, n in self.references.items() if n}
        self.pins.update(dict.fromkeys(targets, 1))
        return targets

    def counts(self) -> BlockCounts:
        mapped = self.blocks(self.open | self.draining)
        live, cached = len(self.references), len(self.cached)
        in_flight, draining = len(set(self.pins) - set(self.references)), len(self.blocks(self.draining) - self.busy)
        return BlockCounts(
            len(mapped) - live - cached - in_flight - draining, draining, live, cached, in_flight, len(mapped)
        )


def check_plan(naive: Naive, most: int, worth: np.ndarray | None, plan: DrainPlan) -> None:
    """The plan is the documented one, and no other choice wins more extents; or evicts fewer blocks; or copies fewer."""
    extents, moves, evictions = plan.extents.tolist(), plan.moves.tolist(), plan.evictions.tolist()
    evictable = set() if worth is None else naive.evictable
    assert len(extents) == min(most, (naive.num_free + len(evictable)) // naive.per, len(naive.drainable))
    used = {e: len(naive.blocks([e]) & naive.busy) for e in naive.drainable}
    live = {e: len(naive.blocks([e]) & set(naive.references)) for e in naive.drainable}
    inside = naive.blocks(extents)
    if evictions:
        dearest = {e: max((worth[b] for b in evictable & naive.blocks([e])), default=-1) for e in used}
        order = sorted(used, key=lambda e: (live[e], dearest[e], -e))
        least = sorted(evictable, key=lambda b: (b not in inside, worth[b], b))[: len(evictions)]
        assert evictions == sorted(least, key=lambda b: (worth[b], b not in inside, b))
    else:
        order = sorted(used, key=lambda e: (used[e], -e))
    assert extents == order[: len(extents)]
    assert moves == [b for e in extents for b in sorted(naive.blocks([e]) & naive.busy - set(evictions))]

    possible = []  # (extents, fewest blocks to evict, the choice)
    for size in range(min(most, len(used)) + 1):
        for choice in itertools.combinations(used, size):
            lacking = sum(used[e] for e in choice) - sum(len(naive.free(e)) for e in naive.open - set(choice))
            if lacking <= len(evictable):
                possible.append((size, max(0, lacking), choice))
    size = max(size for size, _, _ in possible)
    fewest = min(lacking for n, lacking, _ in possible if n == size)
    assert (len(extents), len(evictions)) == (size, fewest)
    copied = live if evictions else used
    choices = [choice for n, lacking, choice in possible if (n, lacking) == (size, fewest)]
    assert sum(copied[e] for e in extents) == min(sum(copied[e] for e in choice) for choice in choices)


def carry_out(pool: BlockAllocator, naive: Naive, plan: DrainPlan, others: set[int]) -> None:
    """As the manager does: forget, drain, move what is left. `others` are forgotten too, as descendants are."""
    gone, extents = set(plan.evictions.tolist()) | others, set(plan.extents.tolist())
    pool.forget(sorted(gone))
    naive.findable -= gone
    pool.drain(plan.extents)
    naive.open -= extents
    naive.draining |= extents
    left = pool.occupied(plan.extents).tolist()
    assert left == [b for b in plan.moves.tolist() if b in naive.busy]
    assert pool.move(left).tolist() == naive.move(left)
    inside = naive.blocks(extents)
    assert not inside & (naive.findable | set(naive.references)), "all of it can go when the copies are done"


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
        naive = self.naive
        references, pins = dict(naive.references), dict(naive.pins)
        legal = all(0 < i < self.pool.num_blocks for i in ids)
        for i in ids:
            if what in ("retain", "pin"):
                legal &= i in (set(naive.references) | naive.findable if what == "retain" else naive.busy)
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
        told = getattr(self.pool, what)(ids)
        if what == "retain":
            assert set(told.tolist()) == set(ids) - set(naive.references)
        if what == "release":
            assert set(told.tolist()) == {i for i in ids if not references[i]} & naive.findable
            assert len(set(ids)) < len(ids) or told.tolist() == [i for i in ids if i in told]
        naive.references = {i: n for i, n in references.items() if n}
        naive.pins = {i: n for i, n in pins.items() if n}

    @rule(ids=st.lists(st.integers(-1, 43), max_size=3), what=st.sampled_from(["publish", "forget", "move"]))
    def find(self, ids, what):
        naive = self.naive
        may = {
            "publish": set(naive.references) - naive.findable,
            "forget": naive.findable,
            "move": (set(naive.references) | naive.findable) - set(naive.pins),
        }[what]
        if not set(ids) <= may or len(set(ids)) < len(ids):
            with pytest.raises(BlockMisuse):
                getattr(self.pool, what)(ids)
        elif what == "move":
            if len(ids) > naive.num_free:
                with pytest.raises(NoFreeBlocks):
                    self.pool.move(ids)
            else:
                assert self.pool.move(ids).tolist() == naive.move(ids)
        else:
            getattr(self.pool, what)(ids)
            naive.findable ^= set(ids)

    @rule(data=st.data(), what=st.sampled_from(["release", "retain", "unpin", "publish", "publish", "forget"]))
    def do_right(self, data, what):
        """Right calls more often than chance gives."""
        naive = self.naive
        may = {
            "release": set(naive.references), "retain": naive.findable, "unpin": set(naive.pins),
            "publish": set(naive.references) - naive.findable, "forget": naive.findable,
        }[what]  # fmt: skip
        if may:
            ids = data.draw(st.lists(st.sampled_from(sorted(may)), unique=True))
            (self.find if what in ("publish", "forget") else self.touch)(ids, what)

    @rule(left=st.integers(0, 4), data=st.data())
    def fill_with_cached(self, left, data):
        """All blocks but `left` hold something, and much of it is cached, as in a pool that has been in use for long."""
        naive = self.naive
        n = max(0, naive.num_free - left)
        taken = self.pool.allocate(n).tolist()
        assert taken == naive.allocate(n)
        self.find(taken, "publish")
        held = data.draw(st.sets(st.sampled_from(taken), max_size=4)) if taken else set()
        self.touch([b for b in taken if b not in held], "release")

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

    @rule(data=st.data(), most=st.integers(0, 8), evicting=st.booleans(), carries_out=st.booleans())
    def give_back(self, data, most, evicting, carries_out):
        size, naive = self.pool.num_blocks, self.naive
        worth = np.array(data.draw(st.lists(st.floats(0, 5), min_size=size, max_size=size))) if evicting else None
        plan = self.pool.plan_drain(most, worth)
        check_plan(naive, most, worth, plan)
        if carries_out:
            others = data.draw(st.sets(st.sampled_from(sorted(naive.findable)))) if len(plan.evictions) else set()
            carry_out(self.pool, naive, plan, others)

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        naive = self.naive
        assert self.pool.counts() == naive.counts()
        assert sum(self.pool.counts()[:-1]) == self.pool.counts().mapped
        assert (self.pool.num_free, self.pool.available) == (naive.num_free, naive.num_free + len(naive.evictable))
        assert self.pool.usable == len(naive.blocks(naive.open))
        assert self.pool.mapped_extents.tolist() == sorted(naive.open | naive.draining) or not self.elastic
        tables = (np.full(n, i) for i, n in naive.references.items())
        self.pool.check_invariants(tables, np.array(sorted(naive.findable), np.int32))

    @property
    def elastic(self) -> bool:
        return self.naive.num_extents > 1


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), per=st.integers(1, 5), num_extents=st.integers(2, 6), most=st.integers(0, 6))
def test_no_choice_of_extents_is_better(data, per, num_extents, most):
    """Pools of every kind, most of them full: plans that evict and move are compared with all that there are."""
    kinds = data.draw(st.sampled_from(["L123", "LLL123.", "123456789", "12....", "LLL1", "LL1234567.p"]))
    drawn = "0" + data.draw(st.text(kinds, min_size=per * num_extents - 1, max_size=per * num_extents - 1))
    pool, worth = pool_of(per, [drawn])
    naive = Naive(pool.num_blocks, per, set(range(num_extents)))
    naive.references = {b: 1 for b, kind in enumerate(drawn) if kind == "L"}
    naive.findable = {b for b, kind in enumerate(drawn) if b and kind not in "L."}
    naive.pins = {b: 1 for b, kind in enumerate(drawn) if kind == "p"}
    plan = pool.plan_drain(most, worth)
    check_plan(naive, most, worth, plan)
    others = data.draw(st.sets(st.sampled_from(sorted(naive.findable)))) if naive.findable else set()
    carry_out(pool, naive, plan, others)
    pool.unpin(sorted(naive.pins))
    pool.unmap(plan.extents)
    pool.check_invariants((np.array([b]) for b in naive.references), np.array(sorted(naive.findable), np.int32))
