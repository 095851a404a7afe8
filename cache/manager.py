"""The cache manager: gives rows of the scheduler the blocks they need, and takes them back.

The only class of the cache that the scheduler sees. Rows are the scheduler's; a row's table covers its first
`lengths * block_size` tokens. Calls are all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, Counts
from ..allocator.errors import NoFreeBlocks
from ..allocator.extents import ExtentIds
from .block_table import BlockCopies, BlockTables, Index, Int32, TableUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """What an extend or a fork changed: the new table entries of each group, and the blocks to copy first, if any."""

    tables: tuple[TableUpdate, ...]
    copies: BlockCopies | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Shrink:
    """What a shrink changed: in `extents` nothing is allocated any more, and what was live there has moved.

    Once `copies` are done, the memory of `extents` can go; the table entries hold from the start.
    """

    extents: ExtentIds
    tables: tuple[TableUpdate, ...] = ()
    copies: BlockCopies | None = None


class CacheManager:
    """Block tables for `num_rows` rows of at most `max_tokens` tokens each, out of a pool of `num_blocks` blocks.

    The attribute `max_tokens` is what a row can really come to: no more than the whole pool holds when all of it is
    mapped. With `blocks_per_extent` the pool is elastic: the extents `mapped` (None: all) have memory at the start, others
    come by `grow` and go by `shrink`, which is over when the caller says so by `moved` and `unmapped`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, *, num_groups: int = 1,
        blocks_per_extent: int | None = None, mapped: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self._shape = (num_blocks, block_size, num_rows, max_tokens)
        self._blocks_per_extent = blocks_per_extent
        in_pool = (num_blocks - 1) // num_groups * block_size
        self.max_tokens = min(max_tokens, in_pool + 1)  # of one row; the newest token needs no place yet
        self.allocator = BlockAllocator(num_blocks, blocks_per_extent=blocks_per_extent, mapped=mapped)
        self.tables = tuple(BlockTables(num_rows, -(-self.max_tokens // block_size)) for _ in range(num_groups))

    def renewed(self, mapped: Iterable[int] | None = None) -> CacheManager:
        """An empty manager of the same pool, to go on with when this one's bookkeeping broke.

        `mapped` are the extents that have memory, where somebody knows (the arena); None: those of the bookkeeping.
        """
        if self._blocks_per_extent is None:
            extents = None
        else:
            extents = self.allocator.mapped_extents.tolist() if mapped is None else mapped
        return CacheManager(
            *self._shape, num_groups=len(self.tables), blocks_per_extent=self._blocks_per_extent, mapped=extents
        )

    @property
    def available(self) -> int:
        """Blocks that can be had at once. Read-only."""
        return self.allocator.available

    @property
    def capacity(self) -> int:
        """Blocks there are when all of the pool is mapped; the null block is not counted."""
        return self.allocator.capacity

    @property
    def usable(self) -> int:
        """Blocks, used or not, of the extents that are mapped and do not drain; the null block is not counted."""
        return self.allocator.usable

    @property
    def blocks_per_extent(self) -> int:
        """Blocks that come and go together."""
        return self.allocator.blocks_per_extent

    @property
    def drainable_extents(self) -> ExtentIds:
        """Extents that `shrink` may choose from, as far as there are holes for what is live in them. Read-only."""
        return self.allocator.drainable_extents

    @property
    def mapped_extents(self) -> ExtentIds:
        """Extents with memory, lowest first, those included that are given back. Read-only."""
        return self.allocator.mapped_extents

    @property
    def unmapped_extents(self) -> ExtentIds:
        """Extents without memory, lowest first: those that can be mapped. Read-only."""
        return self.allocator.unmapped_extents

    def counts(self) -> Counts:
        """Blocks by state. Read-only."""
        return self.allocator.counts()

    def blocks_for(self, tokens: int) -> int:
        """Blocks, of all groups together, that a sequence of `tokens` tokens holds."""
        return -(-tokens // self.block_size) * len(self.tables)

    def short(self, rows: Index, upto: Index) -> Index:
        """Those of `rows` whose tables do not reach to `upto[i]` tokens. Read-only."""
        return rows[upto > self.tables[0].lengths[rows] * self.block_size]

    def extend(self, rows: Index, upto: Index) -> Extension | None:
        """Let the tables of `rows` (distinct) cover `upto[i]` tokens each; None, and no change, when blocks are short."""
        wanted = (upto + (self.block_size - 1)) // self.block_size
        needs = [np.maximum(wanted - table.lengths[rows], 0) for table in self.tables]
        totals = [int(need.sum()) for need in needs]
        try:
            blocks = self.allocator.allocate(sum(totals))
        except NoFreeBlocks:
            return None
        updates, first = [], 0
        for table, need, total in zip(self.tables, needs, totals, strict=True):
            updates.append(_append(table, rows, need, blocks[first : first + total]))
            first += total
        return Extension(tuple(updates))

    def fork(self, parent: int, child: int, num_tokens: int) -> Extension | None:
        """Give row `child` (empty) the parent's first `num_tokens` tokens: full blocks are shared, the partly filled one
        is copied to a block of its own. None, and no change, when no block is free for the copy.
        """
        full, rest = divmod(num_tokens, self.block_size)
        try:
            fresh = self.allocator.allocate(len(self.tables) if rest else 0)
        except NoFreeBlocks:
            return None
        updates, sources = [], []
        for group, table in enumerate(self.tables):
            blocks = table.of(parent)[: full + bool(rest)].copy()
            self.allocator.retain(blocks[:full])
            if rest:
                sources.append(blocks[full])
                blocks[full] = fresh[group]
            updates.append(_append(table, np.array([child]), np.array([len(blocks)]), blocks))
        copies = BlockCopies(np.array(sources, np.int32), fresh) if rest else None
        return Extension(tuple(updates), copies)

    def held_blocks(self, rows: Index) -> Index:
        """Blocks in the tables of each of `rows`, all groups together. Read-only."""
        held: Index = sum((table.lengths[rows] for table in self.tables), np.zeros(len(rows), np.int64))
        return held

    def release(self, rows: Index) -> None:
        """Give up the blocks of `rows` (distinct) and empty their tables."""
        for table in self.tables:
            self.allocator.release(table.of_all(rows))
            table.lengths[rows] = 0

    def grow(self, extents: Iterable[int]) -> None:
        """`extents` have memory now. Raises BlockMisuse unless all were unmapped."""
        self.allocator.map(extents)

    def shrink(self, num_extents: int) -> Shrink | None:
        """Begin to give up to `num_extents` extents back, without taking a block from anybody; None, and no change, when
        not one can be had.

        What is live in them moves into holes elsewhere: the tables name the new places at once, where the bytes are after the
        copies. Until `moved`, the blocks of both places are pinned; until `unmapped`, `keep` undoes the draining.
        """
        plan = self.allocator.plan_drain(num_extents)
        if not len(plan.extents):
            return None
        self.allocator.drain(plan.extents)
        if not len(plan.moves):
            return Shrink(plan.extents)
        targets = self.allocator.move(plan.moves)
        places = np.zeros(self.allocator.num_blocks, np.int32)  # block -> where it moved; the null block: nowhere
        places[plan.moves] = targets
        updates = tuple(_moved(table, places) for table in self.tables)
        return Shrink(plan.extents, updates, BlockCopies(plan.moves, targets))

    def moved(self, copies: BlockCopies) -> None:
        """The copies of a shrink are done."""
        self.allocator.unpin(np.concatenate((copies.sources, copies.targets)))

    def unmapped(self, extents: Iterable[int]) -> None:
        """The memory of `extents`, given back by `shrink`, is gone. Raises BlockMisuse where blocks are still in use."""
        self.allocator.unmap(extents)

    def keep(self, extents: Iterable[int]) -> None:
        """`extents`, given back by `shrink`, are not unmapped after all: their blocks can be had again."""
        self.allocator.undrain(extents)

    def check_invariants(self) -> None:
        """Recompute every derived fact from the tables. Raises AssertionError naming what does not hold."""
        self.allocator.check_invariants(t.of(int(row)) for t in self.tables for row in np.flatnonzero(t.lengths))


def _append(table: BlockTables, rows: Index, need: Index, blocks: Int32) -> TableUpdate:
    """Put `need[i]` of `blocks` behind the table of `rows[i]`."""
    if len(blocks) == len(rows) and need.all():  # a block each, as when decoding
        slots = table.lengths[rows]
        table.lengths[rows] = slots + 1
    else:
        slots = table.lengths[rows]
        table.lengths[rows] = slots + need
        rows = np.repeat(rows, need)
        ends = np.cumsum(need)  # of each row's stretch of `blocks`
        slots = np.repeat(slots - ends + need, need) + np.arange(len(blocks))
    table.blocks[rows, slots] = blocks
    return TableUpdate(rows, slots, blocks)


def _moved(table: BlockTables, places: Int32) -> TableUpdate:
    """Let every entry whose block moved name its new place."""
    rows, slots = table.entries(np.flatnonzero(table.lengths))
    blocks = places[table.blocks[rows, slots]]
    hits = np.flatnonzero(blocks)
    rows, slots, blocks = rows[hits], slots[hits], blocks[hits]
    table.blocks[rows, slots] = blocks
    return TableUpdate(rows, slots, blocks)
