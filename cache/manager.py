"""The cache manager: gives rows of the scheduler the blocks they need, and takes them back.

The only class of the cache that the scheduler sees. Rows are the scheduler's; a row's table covers its first
`lengths * block_size` tokens. Calls are all or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, Counts
from ..allocator.errors import NoFreeBlocks
from .block_table import BlockCopies, BlockTables, Index, Int32, TableUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """What an extend or a fork changed: the new table entries of each group, and the blocks to copy first, if any."""

    tables: tuple[TableUpdate, ...]
    copies: BlockCopies | None = None


class CacheManager:
    """Block tables for `num_rows` rows of at most `max_tokens` tokens each, out of a pool of `num_blocks` blocks.

    The attribute `max_tokens` is what a row can really come to: no more than the whole pool holds.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, *, num_groups: int = 1
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self._shape = (num_blocks, block_size, num_rows, max_tokens, num_groups)
        in_pool = (num_blocks - 1) // num_groups * block_size
        self.max_tokens = min(max_tokens, in_pool + 1)  # of one row; the newest token needs no place yet
        self.allocator = BlockAllocator(num_blocks)
        self.tables = tuple(BlockTables(num_rows, -(-self.max_tokens // block_size)) for _ in range(num_groups))

    def renewed(self) -> CacheManager:
        """An empty manager of the same pool, to go on with when this one's bookkeeping broke."""
        *shape, num_groups = self._shape
        return CacheManager(*shape, num_groups=num_groups)

    @property
    def available(self) -> int:
        """Blocks that can be had at once. Read-only."""
        return self.allocator.available

    @property
    def usable(self) -> int:
        """Blocks of the pool, used or not; the null block is not counted."""
        return self.allocator.usable

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

    def release(self, row: int) -> None:
        """Give up the blocks of `row` and empty its tables."""
        for table in self.tables:
            self.allocator.release(table.of(row))
            table.lengths[row] = 0

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
