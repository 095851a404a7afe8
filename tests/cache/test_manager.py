"""The cache manager: tables, forks and releases, against sets and lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetide.cache.manager import CacheManager


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
    assert cache.tables[0].of(0).tolist() == [1, 2, 3, 4]
    assert cache.tables[0].of(3).tolist() == [6, 7, 8]
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
    assert cache.short(rows(0, 1, 2), rows(5, 8, 0)).tolist() == [0]


def test_groups_have_tables_of_their_own():
    cache = CacheManager(9, 4, 2, 64, num_groups=2)
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
    parent = cache.tables[0].of(0).tolist()
    for child in (1, 2):
        fork = cache.fork(0, child, 10)
        assert fork.copies.sources.tolist() == [parent[2]]
        assert fork.copies.targets.tolist() == [cache.tables[0].of(child)[2]]
        assert cache.tables[0].of(child)[:2].tolist() == parent[:2]
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
    assert cache.tables[0].of(1).tolist() == cache.tables[0].of(0)[:2].tolist()
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
                tables[child], tokens[child] = cache.tables[0].of(child).tolist(), tokens[row]
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
        assert {r: cache.tables[0].of(r).tolist() for r in tables} == tables
    for row in list(tables):
        cache.release(np.array([row]))
    assert cache.pool.counts().free == 32


# -- extents that come and go ------------------------------------------------------------------------------------------


def test_a_row_may_come_to_what_the_reserved_pool_holds():
    cache = CacheManager(16, 4, 2, 1024, blocks_per_extent=4, mapped=[0])
    assert (cache.pool.capacity, cache.pool.usable, cache.pool.available, cache.max_tokens) == (15, 3, 3, 61)
    assert cache.extend(rows(0), rows(13)) is None
    cache.grow([2])
    assert (cache.pool.mapped_extents.tolist(), cache.pool.unmapped_extents.tolist()) == ([0, 2], [1, 3])
    assert cache.extend(rows(0), rows(13)).tables[0].blocks.tolist() == [1, 2, 3, 8]


def test_shrink_moves_shared_blocks_in_every_table():
    cache = CacheManager(16, 4, 3, 64, blocks_per_extent=4)
    cache.extend(rows(0), rows(12))  # blocks 1 .. 3
    cache.extend(rows(1), rows(10))  # blocks 4 .. 6
    cache.fork(1, 2, 10)  # shares 4 and 5, copies 6 to 7
    cache.release(np.array([0]))
    shrink = cache.shrink(2)
    assert (shrink.extents.tolist(), shrink.copies) == ([3, 2], None)
    shrink = cache.shrink(1)
    assert shrink is None, "four live blocks and three holes"
    cache.keep([2])
    assert cache.shrink(1).extents.tolist() == [2]
    cache.unmapped([2, 3])
    cache.release(np.array([2]))  # block 7 goes, 4 and 5 are row 1's alone
    cache.fork(1, 2, 8)
    shrink = cache.shrink(1)
    assert shrink.extents.tolist() == [1]
    assert (shrink.copies.sources.tolist(), shrink.copies.targets.tolist()) == ([4, 5, 6], [1, 2, 3])
    (update,) = shrink.tables
    assert (update.rows.tolist(), update.slots.tolist(), update.blocks.tolist()) == (
        [1, 1, 1, 2, 2],
        [0, 1, 2, 0, 1],
        [1, 2, 3, 1, 2],
    )
    assert (cache.tables[0].of(1).tolist(), cache.tables[0].of(2).tolist()) == ([1, 2, 3], [1, 2])
    assert cache.pool.counts()._asdict() == {
        "free": 0, "draining": 1, "live": 3, "cached": 0, "in_flight": 3, "mapped": 7
    }  # fmt: skip
    cache.check_invariants()
    cache.moved(shrink.copies)
    cache.unmapped(shrink.extents)
    assert (cache.pool.counts().mapped, cache.pool.counts().live, cache.pool.mapped_extents.tolist()) == (3, 3, [0])
    cache.check_invariants()


def test_shrink_moves_blocks_of_every_group():
    cache = CacheManager(12, 4, 2, 64, num_groups=2, blocks_per_extent=3)
    cache.extend(rows(0), rows(12))  # blocks 1 .. 3 and 4 .. 6
    cache.extend(rows(1), rows(4))  # 7 and 8
    cache.release(np.array([0]))
    shrink = cache.shrink(3)
    assert (shrink.extents.tolist(), shrink.copies.sources.tolist()) == ([3, 1, 2], [7, 8])
    assert [update.rows.tolist() for update in shrink.tables] == [[1], [1]]
    assert [table.of(1).tolist() for table in cache.tables] == [[1], [2]]


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
    assert (cache.index.capacity, cache.index.num_nodes, cache.host.capacity, cache.evicted_blocks) == (0, 0, 0, 0)
    assert (cache.pool.counts().free, cache.take_swaps()) == (15, None)
    assert cache.rebuilt().index.capacity == 0


UNMAPPED, UNWRITTEN = -2, -1


class Elastic(RuleBasedStateMachine):
    """A cache over a memory whose extents come and go: each row finds its own tokens, wherever they were moved.

    As in a step, table entries hold at once, while copies, unmapping and writes wait until the step is executed.
    """

    @initialize(
        data=st.data(), per=st.integers(1, 4), num_extents=st.integers(3, 9), groups=st.integers(1, 2),
        lengths=st.lists(st.integers(1, 40), max_size=5),
    )  # fmt: skip
    def start(self, data, per, num_extents, groups, lengths):
        unmapped = data.draw(st.sets(st.integers(1, num_extents - 1)))
        mapped = set(range(num_extents)) - unmapped
        self.cache = CacheManager(per * num_extents, 4, 5, 64, num_groups=groups, blocks_per_extent=per, mapped=mapped)
        self.memory = np.full((per * num_extents, 4), UNMAPPED)  # a token's number in each slot of a block
        self.by_extent = self.memory.reshape(num_extents, -1)
        self.by_extent[sorted(mapped)] = UNWRITTEN
        self.tokens: dict[int, list[list[int]]] = {}  # by row, of each group
        self.shrinks, self.writes = [], []
        self.number = 0
        for row, length in enumerate(lengths):
            self.extend(row, length)

    def execute(self):
        """Copies, in the order they were asked for; then memory goes; then what the step computes is written."""
        for shrink in self.shrinks:
            if shrink.copies is not None:
                self.memory[shrink.copies.targets] = self.memory[shrink.copies.sources]
                self.cache.moved(shrink.copies)
            self.cache.unmapped(shrink.extents)
            self.by_extent[shrink.extents] = UNMAPPED
        for row, group, position in self.writes:
            if row in self.tokens:
                block = self.cache.tables[group].of(row)[position // 4]
                assert self.memory[block, 0] != UNMAPPED, "wrote to memory that is gone"
                self.memory[block, position % 4] = self.tokens[row][group][position]
        self.shrinks, self.writes = [], []

    @rule(row=st.integers(0, 4), more=st.integers(1, 20))
    def extend(self, row, more):
        lists = self.tokens.get(row, [[] for _ in self.cache.tables])
        upto = min(len(lists[0]) + more, self.cache.max_tokens - 1)
        need = self.cache.blocks_for(upto) - self.cache.blocks_for(len(lists[0]))
        if self.cache.extend(rows(row), rows(upto)) is None:
            assert need > self.cache.pool.available
            return
        for group, tokens in enumerate(lists):
            for position in range(len(tokens), upto):
                tokens.append(self.number)
                self.number += 1
                self.writes.append((row, group, position))
        self.tokens[row] = lists

    @rule(parent=st.integers(0, 4), child=st.integers(0, 4))
    def fork(self, parent, child):
        if parent not in self.tokens or child in self.tokens:
            return
        self.execute()  # a fork reads blocks: it has a step of its own here
        fork = self.cache.fork(parent, child, len(self.tokens[parent][0]))
        if fork is not None:
            if fork.copies is not None:
                self.memory[fork.copies.targets] = self.memory[fork.copies.sources]
            self.tokens[child] = [list(tokens) for tokens in self.tokens[parent]]

    @rule(row=st.integers(0, 4))
    def release(self, row):
        if self.tokens.pop(row, None) is not None:
            self.cache.release(np.array([row]))
            self.writes = [write for write in self.writes if write[0] != row]

    @rule(n=st.integers(1, 8))
    def shrink(self, n):
        available, pinned = self.cache.pool.available, bool(self.shrinks)
        usable = self.cache.pool.usable
        shrink = self.cache.shrink(n)
        got = 0 if shrink is None else len(shrink.extents)
        per = self.cache.pool.blocks_per_extent
        if not pinned:
            may = (usable + 1) // per - 1
            assert got == min(n, available // per, may)
        assert self.cache.pool.usable == usable - got * per
        if shrink is not None:
            self.shrinks.append(shrink)

    @precondition(lambda self: self.cache.pool.unmapped_extents.size)
    @rule(data=st.data())
    def grow(self, data):
        extents = data.draw(st.lists(st.sampled_from(self.cache.pool.unmapped_extents.tolist()), unique=True))
        self.by_extent[extents] = UNWRITTEN
        self.cache.grow(extents)

    @precondition(lambda self: any(shrink.copies is None for shrink in self.shrinks))
    @rule()
    def change_ones_mind(self):
        shrink = next(shrink for shrink in self.shrinks if shrink.copies is None)
        self.shrinks.remove(shrink)
        self.cache.keep(shrink.extents)

    @rule()
    def step(self):
        self.execute()
        assert (self.cache.pool.counts().draining, self.cache.pool.counts().in_flight) == (0, 0)
        for row, lists in self.tokens.items():
            for table, tokens in zip(self.cache.tables, lists, strict=True):
                assert self.memory[table.of(row)].ravel()[: len(tokens)].tolist() == tokens
        mapped = self.memory[:, 0] != UNMAPPED
        mapped[0] = False
        assert self.cache.pool.counts().mapped == mapped.sum()

    @invariant()
    def books_are_right(self):
        if hasattr(self, "cache"):
            self.cache.check_invariants()
            assert sum(self.cache.pool.counts()[:-1]) == self.cache.pool.counts().mapped

    def teardown(self):
        if hasattr(self, "cache"):
            self.step()


TestElastic = Elastic.TestCase
TestElastic.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
