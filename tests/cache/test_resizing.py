"""A pool that grows and shrinks while rows hold blocks: exact moves, and every row finds its own tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.cache.state_tables import tables_for


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_row_may_come_to_what_the_reserved_pool_holds():
    cache = CacheManager(RowTables(BlockAllocator(16, blocks_per_extent=4, mapped=[0]), 4, 2, 1024))
    assert (cache.pool.capacity, cache.pool.usable, cache.pool.available, cache.max_tokens) == (15, 3, 3, 61)
    assert cache.extend(rows(0), rows(13)) is None
    cache.resizer.grow([2])
    assert (cache.pool.mapped_extents.tolist(), cache.pool.unmapped_extents.tolist()) == ([0, 2], [1, 3])
    assert cache.extend(rows(0), rows(13)).tables[0].blocks.tolist() == [1, 2, 3, 8]


def test_a_shrink_evicts_with_descendants_and_counts_what_it_evicts():
    cache = CacheManager(RowTables(BlockAllocator(8, blocks_per_extent=4), 4, 2, 64), PrefixHasher(4, b"seed"))
    chain = cache.chain(np.arange(25, dtype=np.int32), None)
    assert cache.admit(0, 25, cache.lookup(chain, 24)) is not None
    cache.commit(0, chain, 25)
    cache.release(rows(0))
    before = cache.pool.counts()
    assert (before.cached, before.free) == (6, 1)
    plan = cache.resizer.plan_shrink(1)
    assert (plan.extents.tolist(), len(plan.evictions)) == ([1], 3)
    assert cache.pool.counts() == before, "a plan changes nothing"
    shrink = cache.resizer.shrink(1)
    assert shrink is not None
    assert cache.swapping.evicted_blocks == before.cached - cache.index.num_nodes >= 3
    assert cache.lookup(chain, 24).num_tokens == 4 * cache.index.num_nodes, "what is left is the beginning"
    if shrink.copies is not None:
        cache.resizer.moved(shrink.copies)
    cache.resizer.unmapped(shrink.extents)
    cache.check_invariants()


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
        pool = BlockAllocator(per * num_extents, blocks_per_extent=per, mapped=mapped)
        self.cache = CacheManager(tables_for((LayerGroup(groups),), pool, 4, 5, 64))
        self.memory = np.full((per * num_extents, 4), UNMAPPED)  # a token's number in each slot of a block
        self.by_extent = self.memory.reshape(num_extents, -1)
        self.by_extent[sorted(mapped)] = UNWRITTEN
        self.tokens: dict[int, list[list[int]]] = {}  # by row, of each group
        self.shrinks, self.writes = [], []
        self.number = 0
        for row, length in enumerate(lengths):
            self.extend(row, length)

    def table(self, number, row):
        return [blocks for table in self.cache.tables for blocks in table.of(row)][number]

    def execute(self):
        """Copies, in the order they were asked for; then memory goes; then what the step computes is written."""
        for shrink in self.shrinks:
            if shrink.copies is not None:
                self.memory[shrink.copies.targets] = self.memory[shrink.copies.sources]
                self.cache.resizer.moved(shrink.copies)
            self.cache.resizer.unmapped(shrink.extents)
            self.by_extent[shrink.extents] = UNMAPPED
        for row, group, position in self.writes:
            if row in self.tokens:
                block = self.table(group, row)[position // 4]
                assert self.memory[block, 0] != UNMAPPED, "wrote to memory that is gone"
                self.memory[block, position % 4] = self.tokens[row][group][position]
        self.shrinks, self.writes = [], []

    @rule(row=st.integers(0, 4), more=st.integers(1, 20))
    def extend(self, row, more):
        lists = self.tokens.get(row, [[] for _ in range(self.cache.row_tables.num_tables)])
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
        if fork is None:
            partly = len(self.tokens[parent][0]) % 4 != 0
            assert partly and self.cache.pool.available < self.cache.row_tables.num_tables
        else:
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
        shrink = self.cache.resizer.shrink(n)
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
        self.cache.resizer.grow(extents)

    @precondition(lambda self: any(shrink.copies is None for shrink in self.shrinks))
    @rule()
    def change_ones_mind(self):
        shrink = next(shrink for shrink in self.shrinks if shrink.copies is None)
        self.shrinks.remove(shrink)
        self.cache.resizer.keep(shrink.extents)

    @rule()
    def step(self):
        self.execute()
        assert (self.cache.pool.counts().draining, self.cache.pool.counts().in_flight) == (0, 0)
        for row, lists in self.tokens.items():
            for group, tokens in enumerate(lists):
                assert self.memory[self.table(group, row)].ravel()[: len(tokens)].tolist() == tokens
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
            self.cache.release(np.array(sorted(self.tokens), np.int32))
            assert self.cache.pool.counts().free == self.cache.pool.counts().mapped


TestElastic = Elastic.TestCase
TestElastic.settings = settings(stateful_step_count=50)
