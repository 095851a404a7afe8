"""Block tables: the ordered block ids of each row's sequence. There is one set of tables per group of layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]  # token ids, block ids
Index = npt.NDArray[np.int64]  # rows, positions, lengths: numpy's fastest index type


@dataclass(frozen=True, slots=True, eq=False)
class TableUpdate:
    """New entries of one group's block tables: `tables[rows[i], slots[i]] = blocks[i]`. Plain data, never modified."""

    rows: Index
    slots: Index
    blocks: Int32

    def without(self, rows: list[int]) -> TableUpdate:
        """The entries of all rows except `rows`."""
        others = ~np.isin(self.rows, rows)
        return TableUpdate(self.rows[others], self.slots[others], self.blocks[others])


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Whole blocks to copy on the device before a forward pass: block `sources[i]` to block `targets[i]`. Plain data."""

    sources: Int32
    targets: Int32


class BlockTables:
    """The tables of `num_rows` rows of up to `max_blocks` blocks each. Entries beyond a row's length are undefined."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.blocks = np.zeros((num_rows, max_blocks), np.int32)  # its memory pages are touched only as rows grow
        self.lengths = np.zeros(num_rows, np.int64)

    def of(self, row: int) -> Int32:
        """The blocks of `row`: a view, valid until the row changes."""
        return self.blocks[row, : self.lengths[row]]

    def entries(self, rows: Index) -> tuple[Index, Index]:
        """The row and slot indices of all entries of `rows`, in the order of `rows`."""
        lengths = self.lengths[rows]
        of_rows = np.repeat(rows, lengths)
        return of_rows, np.arange(len(of_rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def of_all(self, rows: Index) -> Int32:
        """The blocks of `rows`, concatenated."""
        if len(rows) == 1:
            return self.of(int(rows[0]))
        blocks: Int32 = self.blocks[self.entries(rows)]
        return blocks
