"""The block allocator and its read-only view: exact on every call, equal to a naive one under random use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.drain import DrainPlan
from pagetide.allocator.errors import AllocatorError, BlockMisuse, NoFreeBlocks
from pagetide.allocator.pool_view import BlockCounts, BlockState, format_ids


def test_all_or_nothing():
    pool = BlockAllocator(9)
    pool.allocate(3)
    with pytest.raises(NoFreeBlocks, match="asked for 6 blocks, 5 are available"):
        pool.allocate(6)
    assert pool.counts() == BlockCounts(free=5, draining=0, live=3, cached=0, in_flight=0, mapped=8)
    assert len(set(pool.allocate(5).tolist())) == 5
    pool.release(range(1, 9))
    assert pool.counts().free == 8, "the last block is one like all others"


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


def test_a_fixed_pool_gives_nothing_back():
    pool = BlockAllocator(5_000)
    assert len(pool.plan_drain(3).extents) == len(pool.drainable_extents) == len(pool.unmapped_extents) == 0
    assert sorted(pool.allocate(4_999).tolist()) == list(range(1, 5_000))
    with pytest.raises(BlockMisuse, match="cannot change"):
        pool.drain([1])


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
        ("unmap", [2], "blocks in use cannot lose their memory: 8, 9"),
        ("occupied", [1], "are open, not draining"),
    ],
)
def test_wrong_extents_raise_and_change_nothing(call, extents, message):
    pool = BlockAllocator(16, blocks_per_extent=4, mapped=[0, 1, 2])
    assert pool.allocate(9).tolist() == list(range(1, 10))
    pool.release(range(5, 8))
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
        ("unpin", [2], "unpinned more often"),
        ("retain", [1, 4], "cannot be shared: 4"),
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


def pin(pool: BlockAllocator, ids: Sequence[int]) -> None:
    """Pin live blocks, as `move` does with both ends of its copies."""
    pool._pins[ids] = 1
    pool._num_pinned += len(ids)


def pool_of(per: int, extents: list[str]) -> tuple[BlockAllocator, np.ndarray]:
    """A pool drawn block by block: "L" live, "." free, "5" cached and worth 5, "p" cached and pinned, "0" the null block."""
    drawn = "".join(extents)
    pool = BlockAllocator(len(drawn), blocks_per_extent=per)
    pool.allocate(len(drawn) - 1)
    kinds = dict(enumerate(drawn[1:], start=1))
    pool.publish([b for b, kind in kinds.items() if kind not in "L."])
    pin(pool, [b for b, kind in kinds.items() if kind == "p"])
    pool.release([b for b, kind in kinds.items() if kind != "L"])
    worth = np.full(len(drawn), np.nan)
    for block, kind in kinds.items():
        worth[block] = float(kind) if kind.isdigit() else np.nan
    return pool, worth


def test_worth_is_checked():
    pool, worth = pool_of(4, ["0L.L", "5LLL"])
    for entries in (0, 4, 7, 9):
        with pytest.raises(ValueError, match=rf"worth has the shape \({entries},\), and there are 8 blocks"):
            pool.plan_drain(1, np.ones(entries))
    worth[4] = np.nan
    with pytest.raises(ValueError, match="worth is no number for cached blocks 4"):
        pool.plan_drain(1, worth)


def pool_in_all_states() -> BlockAllocator:
    """Blocks 1 to 3 are live, 4 and 5 cached, 6 and 7 in flight, 8 to 11 draining, 12 to 15 free."""
    pool = BlockAllocator(16, blocks_per_extent=4)
    blocks = pool.allocate(7)
    pool.publish(blocks[3:])
    pin(pool, blocks[5:])
    pool.release(blocks[3:])
    pool.drain([2])
    pool.check_invariants()
    return pool


def test_a_message_names_a_few_ids():
    assert format_ids(np.array([3, 5])) == "3, 5"
    assert format_ids(np.arange(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ... (9 in all)"


def test_the_states_of_all_blocks():
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


def test_the_states_of_a_fixed_pool_whose_last_extent_is_partial():
    pool = BlockAllocator(1500)
    pool.allocate(1200)
    counts = np.bincount(pool.states(), minlength=7)
    assert counts.tolist() == [0, 299, 0, 0, 0, 1, 1200]


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
        return BlockCounts(len(mapped) - live - cached - in_flight - draining, draining, live, cached, in_flight, len(mapped))


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

    @rule(ids=st.lists(st.integers(-1, 43), max_size=6), what=st.sampled_from(["retain", "release", "unpin"]))
    def touch(self, ids, what):
        naive = self.naive
        references, pins = dict(naive.references), dict(naive.pins)
        legal = all(0 < i < self.pool.num_blocks for i in ids)
        for i in ids:
            if what == "retain":
                legal &= i in set(naive.references) | naive.findable
                references[i] = references.get(i, 0) + 1
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
        if naive.num_extents > 1:
            mapped = naive.open | naive.draining
            assert self.pool.mapped_extents.tolist() == sorted(mapped)
            assert self.pool.unmapped_extents.tolist() == sorted(set(range(naive.num_extents)) - mapped)
            assert self.pool.drainable_extents.tolist() == naive.drainable
        assert self.pool.cached_blocks.tolist() == sorted(naive.evictable)
        in_flight = set(naive.pins) - set(naive.references)
        assert self.pool.pending_free_blocks == len(in_flight & naive.blocks(naive.open))
        every = range(1, self.pool.num_blocks)
        assert self.pool.references(every).tolist() == [naive.references.get(block, 0) for block in every]
        tables = (np.full(n, i) for i, n in naive.references.items())
        self.pool.check_invariants(tables, np.array(sorted(naive.findable), np.int32))


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(stateful_step_count=50)


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
