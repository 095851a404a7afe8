"""The block tables of all groups of layers: what each row holds, and what of it other rows hold too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..allocator.blocks import BlockAllocator
from .block_table import NO_UPDATE, BlockTables, Index, Int32, TableUpdate
from .layer_groups import LayerGroup

_ANCHORS_PER_EXTENT = 1024  # an allocation looks at one extent
_Updates = tuple[TableUpdate, ...]


class RowTables:
    """Tables for `num_rows` rows of up to `max_slots` blocks each, out of `allocator`.

    The `anchor` is the table of which the prefix index has a node for each block; `others` are the other groups, with their
    tables. Where no layer reads all tokens, the anchor's entries are places without bytes, of the allocator `anchors`: as many
    as all rows can have, and `num_spare` for the index.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], allocator: BlockAllocator, num_rows: int, max_slots: int, block_size: int,
        num_spare: int,
    ) -> None:  # fmt: skip
        first, *others = groups
        self.groups = tuple(groups)
        self.anchors = self._allocator = allocator
        if first.window is not None:
            others = [first, *others]
            extents = -(-(1 + num_rows * max_slots + num_spare) // _ANCHORS_PER_EXTENT)
            self.anchors = BlockAllocator(extents * _ANCHORS_PER_EXTENT, blocks_per_extent=_ANCHORS_PER_EXTENT)
        elif first.num_tables > 1:
            others = [replace(first, num_tables=first.num_tables - 1), *others]
        self._block_size = block_size
        self.anchor = BlockTables(num_rows, max_slots)
        self.others = tuple((group, BlockTables(num_rows, max_slots, group.num_tables)) for group in others)
        self.all = ((LayerGroup(), self.anchor), *self.others)
        self.every = tuple(table for _, table in self.all)
        self.anchor_has_bytes = self.anchors is allocator  # some layer reads all tokens
        self.without_bytes = None if self.anchor_has_bytes else self.anchor
        self.with_bytes = tuple(table for _, table in (self.all if self.anchor_has_bytes else self.others))
        self.num_tables = sum(table.num_tables for table in self.with_bytes)
        self.num_full_tables = sum(group.num_tables for group in groups if group.window is None)
        self.has_windows = any(group.window is not None for group in groups)

    # -- what rows hold ----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Index:
        """The blocks of tokens that the tables of each row reach. Read-only."""
        return self.anchor.lengths

    @property
    def num_shared(self) -> int:
        """Blocks saved by sharing: table entries minus distinct live blocks."""
        held = sum(int(table.lengths.sum() - table.starts.sum()) * table.num_tables for table in self.with_bytes)
        return held - self._allocator.counts().live

    def short(self, rows: Index, upto: Index) -> Index:
        """The `rows` with tables that do not reach `upto[i]` tokens."""
        return rows[upto > self.anchor.lengths[rows] * self._block_size]

    def held_blocks(self, rows: Index) -> Index:
        """Blocks in the tables of each of `rows`, all groups together."""
        held = np.zeros(len(rows), np.int64)
        for table in self.with_bytes:
            held += table.held(rows) * table.num_tables
        return held

    def sole_blocks(self, rows: Index) -> Index:
        """Blocks that only this row holds, for each of `rows`: what releasing the row gains."""
        if not self.num_shared:
            return self.held_blocks(rows)
        sole = np.zeros(len(rows), np.int64)
        for table in self.with_bytes:
            of_rows = np.repeat(np.arange(len(rows)), table.held(rows))
            for blocks in table.of_all(rows):
                sole += np.bincount(of_rows, self._allocator.references(blocks) == 1, len(rows)).astype(np.int64)
        return sole

    def sole_tokens(self, rows: Index, computed: Index) -> Index:
        """Of the `computed[i]` tokens of each of `rows`, those in blocks that no other row holds."""
        if not self.num_shared:
            return computed
        of_rows = np.repeat(np.arange(len(rows)), self.anchor.held(rows))
        shared = np.bincount(of_rows, self.anchors.references(self.anchor.of_all(rows)[0]) > 1, len(rows))
        tokens: Index = np.maximum(computed - shared.astype(np.int64) * self._block_size, 0)
        return tokens

    def rows_with(self, blocks: Int32) -> Index:
        """Rows with one of `blocks` in their tables, lowest first."""
        found = []
        for table in self.with_bytes:
            rows, slots = table.entries(np.flatnonzero(table.lengths))
            found.append(rows[np.isin(table.blocks[:, rows, slots], blocks).any(axis=0)])
        return np.unique(np.concatenate(found))

    def slot_of(self, row: int, block: int) -> int:
        """The place of `block` in the tables of `row`, which holds it."""
        places = [np.nonzero(table.of(row) == block)[1] + table.starts[row] for table in self.with_bytes]
        return int(np.concatenate(places)[0])

    # -- what rows will hold -----------------------------------------------------------------------------------------

    def blocks_for_each(self, tokens: Index) -> Index:
        """Blocks in all tables together that sequences of `tokens[i]` tokens hold, once the last of them is computed."""
        slots = -(-tokens // self._block_size)
        blocks = np.zeros(len(tokens), np.int64)
        for group in self.groups:
            most = group.most_slots(self._block_size)
            blocks += group.num_tables * (slots if most is None else np.minimum(slots, most))
        return blocks

    def blocks_to_extend(self, slots: int, slots_of_windows: int) -> int:
        """Blocks for so many more entries of a row, in the tables without a window and in those with one."""
        return sum(
            table.num_tables * (slots if group.window is None else slots_of_windows)
            for group, table in self.all
            if table is not self.anchor or self.anchor_has_bytes
        )

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether row `parent` still holds what a row that shares its first `num_tokens` tokens reads."""
        return all(
            table.starts[parent] * self._block_size <= group.first_read(num_tokens) for group, table in self.others
        )

    def shared_by_fork(self, num_tokens: int) -> int:
        """The blocks that a row shares that begins with the first `num_tokens` tokens of another one."""
        full = num_tokens // self._block_size
        return sum(
            table.num_tables * (full - group.first_read(num_tokens) // self._block_size)
            for group, table in self.all
            if table is not self.anchor or self.anchor_has_bytes
        )

    def updates(self, changed: Mapping[BlockTables, _Updates]) -> _Updates:
        """The updates of all tables with bytes, from those of the groups that have some."""
        updates: list[TableUpdate] = []
        for table in self.with_bytes:
            updates += changed.get(table, (NO_UPDATE,) * table.num_tables)
        return tuple(updates)

    def check_invariants(self) -> None:
        """Check starts and lengths. Raises AssertionError."""
        for group, table in self.all:
            assert (table.starts <= table.lengths).all(), "a row that begins behind its end"
            assert (table.lengths <= self.anchor.lengths).all(), "a row with more than its first table"
            assert group.window is not None or not table.starts.any(), "a block is passed that all tokens read"
