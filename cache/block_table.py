"""Block tables: the ordered block ids of each row's sequence. A group of layers has one table or several per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]  # token ids, block ids
Index = npt.NDArray[np.int64]  # rows, positions, lengths: numpy's fastest index type


@dataclass(frozen=True, slots=True, eq=False)
class TableUpdate:
    """New entries of one table per row: `tables[rows[i], columns[i]] = blocks[i]`. Plain data, never modified."""

    rows: Index
    columns: Index
    blocks: Int32

    def without(self, rows: list[int]) -> TableUpdate:
        """The entries of all rows except `rows`."""
        others = ~np.isin(self.rows, rows)
        return TableUpdate(self.rows[others], self.columns[others], self.blocks[others])


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Whole blocks to copy on the device before a forward pass: block `sources[i]` to block `targets[i]`. Plain data."""

    sources: Int32
    targets: Int32


@dataclass(frozen=True, slots=True, eq=False)
class BlockBytes:
    """Bytes to put into blocks before a forward pass: `data[i]` [payload_bytes] into block `blocks[i]`. Plain data."""

    blocks: Int32
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """The bytes of a sequence's first blocks in host memory: those at `places` of `store`, uint8 [n, payload_bytes], which
    sequences share.
    """

    store: npt.NDArray[np.uint8]
    places: Index

    def data(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        """Those of the first `num_blocks` blocks, as many as are kept."""
        data: npt.NDArray[np.uint8] = self.store[self.places[:num_blocks]]
        return data


class BlockTables:
    """The tables of one group: `num_tables` for each of `num_rows` rows, of up to `max_blocks` blocks each.

    The tables of a row have the entries from `starts` up to `lengths`: blocks before were released, as nothing reads them any
    more. Other entries are undefined.
    """

    def __init__(self, num_rows: int, max_blocks: int, num_tables: int = 1) -> None:
        # [table, row, column]; its memory pages are touched only as rows grow
        self.blocks = np.zeros((num_tables, num_rows, max_blocks), np.int32)
        self.lengths = np.zeros(num_rows, np.int64)
        self.starts = np.zeros(num_rows, np.int64)

    @property
    def num_tables(self) -> int:
        """Tables of a row."""
        return len(self.blocks)

    def of(self, row: int) -> Int32:
        """The blocks of `row`, [num_tables, held]: a view, valid until the row changes."""
        return self.blocks[:, row, self.starts[row] : self.lengths[row]]

    def held(self, rows: Index) -> Index:
        """Entries of each of `rows` in each of its tables."""
        held: Index = self.lengths[rows] - self.starts[rows]
        return held

    def entries(self, rows: Index) -> tuple[Index, Index]:
        """The row and column indices of all entries of `rows`, in the order of `rows`."""
        starts, held = self.starts[rows], self.held(rows)
        of_rows = np.repeat(rows, held)
        return of_rows, np.arange(len(of_rows)) + np.repeat(starts - np.cumsum(held) + held, held)

    def of_all(self, rows: Index) -> Int32:
        """The blocks of `rows`, [num_tables, entries]: concatenated by row."""
        if len(rows) == 1:
            return self.of(int(rows[0]))
        of_rows, columns = self.entries(rows)
        blocks: Int32 = self.blocks[:, of_rows, columns]
        return blocks

    def append(self, rows: Index, need: Index, blocks: Int32) -> tuple[TableUpdate, ...]:
        """Append the next `need[i]` of `blocks` [num_tables, sum of need] to the tables of each `rows[i]` (distinct)."""
        columns = self.lengths[rows]
        self.lengths[rows] = columns + need
        if blocks.shape[1] != len(rows) or not need.all():  # not one block per row, as in decoding
            rows = np.repeat(rows, need)
            ends = np.cumsum(need)  # end of each row's part of `blocks`
            columns = np.repeat(columns - ends + need, need) + np.arange(blocks.shape[1])
        if len(blocks) == 1:  # as without groups
            self.blocks[0][rows, columns] = blocks[0]
            return (TableUpdate(rows, columns, blocks[0]),)
        updates = []
        for table, own in zip(self.blocks, blocks, strict=True):
            table[rows, columns] = own
            updates.append(TableUpdate(rows, columns, own))
        return tuple(updates)

    def replace(self, row: int, columns: Index, blocks: Int32) -> tuple[TableUpdate, ...]:
        """Put `blocks` [num_tables, len(columns)] into the `columns` of `row`."""
        self.blocks[:, row, columns] = blocks
        return tuple([TableUpdate(np.full(len(columns), row), columns, of_table) for of_table in blocks])

    def release(self, rows: Index) -> None:
        """Empty the tables of `rows`."""
        self.lengths[rows] = 0
        self.starts[rows] = 0


NO_UPDATE = TableUpdate(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))


def merged(updates: list[tuple[TableUpdate, ...]]) -> tuple[TableUpdate, ...]:
    """Concatenate updates, in the order in which they happened, into one update per table."""
    updates = [update for update in updates if update]
    if len(updates) <= 1:
        return updates[0] if updates else ()
    return tuple(
        TableUpdate(*(np.concatenate([getattr(u, name) for u in of_table]) for name in ("rows", "columns", "blocks")))
        for of_table in zip(*updates, strict=True)
    )


def joined(copies: list[BlockCopies]) -> BlockCopies | None:
    """All of `copies` as one simultaneous copy; None for none."""
    if len(copies) <= 1:
        return copies[0] if copies else None
    return BlockCopies(*(np.concatenate([getattr(c, name) for c in copies]) for name in ("sources", "targets")))
