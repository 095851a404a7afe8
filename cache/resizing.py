"""Pool resizing: adds extents, and gives extents back while rows hold blocks in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..allocator.drain import DrainPlan
from ..allocator.extents import ExtentIds
from .block_table import BlockCopies, BlockTables, Int32, TableUpdate
from .row_tables import RowTables
from .swapping import Swapping


@dataclass(frozen=True, slots=True, eq=False)
class Shrink:
    """The result of a shrink: the drained `extents`, and the moves of the live blocks out of them.

    The table entries are valid at once. The memory of `extents` can be unmapped once `copies` are done.
    """

    extents: ExtentIds
    tables: tuple[TableUpdate, ...] = ()
    copies: BlockCopies | None = None


class PoolResizer:
    """Adds extents to the pool of `tables` (`grow`) and gives extents back (`shrink`).

    A shrink ends when the caller reports it by `moved` and `unmapped`. Moved blocks are replaced in `tables` and in the index
    of `swapping`.
    """

    def __init__(self, tables: RowTables, swapping: Swapping, bytes_at: Int32) -> None:
        self._nodes_have_bytes = tables.anchors is tables.pool
        self._allocator = tables.pool
        self._tables = tables.with_bytes
        self._index = swapping.index
        self._swapping = swapping
        self._bytes_at = bytes_at

    def grow(self, extents: Iterable[int]) -> None:
        """Add `extents`, which now have memory. Raises BlockMisuse unless all were unmapped."""
        self._allocator.map(extents)

    def shrink(self, num_extents: int) -> Shrink | None:
        """Begin to give back up to `num_extents` extents without preempting a row; None, and no change, if none can go.

        If the free blocks do not suffice, cached blocks are demoted or evicted.

        The source and target blocks are pinned until `moved`. `keep` undoes the draining until `unmapped`.
        """
        plan = self.plan_shrink(num_extents)
        if not len(plan.extents):
            return None
        moves = plan.moves
        if len(plan.evictions):
            self._swapping.reclaim_trees(plan.evictions)
        self._allocator.drain(plan.extents)
        if len(plan.evictions):
            moves = self._allocator.occupied(plan.extents)
        if not len(moves):
            return Shrink(plan.extents)
        targets = self._allocator.move(moves)
        self._bytes_at[targets] = moves
        if self._nodes_have_bytes:
            self._index.blocks.move(moves, targets)
            self._swapping.offload_policy.moved(moves, targets)
        self._index.windows.move(moves, targets)
        places = np.zeros(self._allocator.num_blocks, np.int32)  # block -> its new block; the null block: not moved
        places[moves] = targets
        updates = [update for table in self._tables for update in _moved(table, places)]
        return Shrink(plan.extents, tuple(updates), BlockCopies(moves, targets))

    def plan_shrink(self, num_extents: int) -> DrainPlan:
        """The extents and moves that `shrink` would choose."""
        plan = self._allocator.plan_drain(num_extents)
        if len(plan.extents) == num_extents or not self._allocator.counts().cached:
            return plan
        cached = self._allocator.cached_blocks
        worth = np.zeros(self._allocator.num_blocks)
        self._index.windows.ranks(cached, worth)
        if self._nodes_have_bytes:
            cached = cached[self._index.findable(cached)]
            worth[cached] = self._index.ranks(cached)
        return self._allocator.plan_drain(num_extents, worth)

    def moved(self, copies: BlockCopies) -> None:
        """Unpin the blocks of a shrink after its copies."""
        self._bytes_at[copies.targets] = copies.targets
        self._allocator.unpin(np.concatenate((copies.sources, copies.targets)))
        self._swapping.trim()  # targets may count as cached from now on

    def unmapped(self, extents: Iterable[int]) -> None:
        """Record that `extents`, drained by `shrink`, have no memory any more. Raises BlockMisuse if a block is still
        in use.
        """
        self._allocator.unmap(extents)

    def keep(self, extents: Iterable[int]) -> None:
        """Undo the draining of `extents`, which are not unmapped after all: their blocks are available again."""
        self._allocator.undrain(extents)


def _moved(table: BlockTables, places: Int32) -> list[TableUpdate]:
    """Replace moved blocks in every table entry by their new blocks."""
    rows, columns = table.entries(np.flatnonzero(table.lengths))
    updates = []
    for blocks in table.blocks:
        moved = places[blocks[rows, columns]]
        hits = np.flatnonzero(moved)
        updates.append(TableUpdate(rows[hits], columns[hits], moved[hits]))
        blocks[rows[hits], columns[hits]] = moved[hits]
    return updates
