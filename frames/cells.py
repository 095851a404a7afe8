"""The cells of a pool at a step border: the state and the owner of every block, as arrays, and their changes as text.

A cell is the state of a block in 16 bits, so that a million blocks are two megabytes:

    0 .. 5        `BlockState`: unmapped, free, draining, cached (or pinned, and in no row), in flight, the null block
    16 + row      live, and held by the sequence in `row`; of several the one that is served first
    | SHARED      several rows hold it

Rows from MOST_ROWS - 1 on share one value. Changed cells are written as runs of equal cells, each a record of 8 bytes (first
block, length - 1, value), in base64.
"""

from __future__ import annotations

import binascii

import numpy as np
import numpy.typing as npt

from ..allocator.pool_view import BlockState
from ..cache.block_table import BlockTables, Index
from ..scheduler.state import SchedulerState

Cells = npt.NDArray[np.uint16]  # [num_blocks]

FIRST_ROW = 16  # the cell of row 0
SHARED = 0x8000
MOST_ROWS = SHARED - FIRST_ROW
_RUN = np.dtype([("first", "<u4"), ("length", "<u2"), ("value", "<u2")])  # the length less 1
_MOST_OF_RUN = 65_536  # cells


class CellReader:
    """Reads the cells of a pool of `num_blocks` blocks, frame after frame, in the same memory: fresh pages cost more."""

    def __init__(self, num_blocks: int) -> None:
        self.cells: Cells = np.zeros(num_blocks, np.uint16)  # as read last
        self._next: Cells = np.zeros(num_blocks, np.uint16)
        self._mask = np.empty(num_blocks, np.bool_)
        self._places = np.empty(0, np.int64)
        self._blocks = np.empty(0, np.int32)
        self._owners = np.empty(0, np.uint16)
        self._index = np.empty(0, np.int64)

    def read(self, state: SchedulerState, served_last_first: Index) -> tuple[Cells, Cells]:
        """The cells now, and those read before; valid until the next call.

        `served_last_first` are the rows with a sequence, the one that is served first at the end.
        """
        before, cells = self.cells, self._next
        pool = state.cache.pool
        pool.states(cells, self._mask)
        for table in state.cache.tables:
            self._write_owners(cells, table, served_last_first)
        pinned = state.cache.pins.references(state.cache.index)
        if len(pinned):  # those that no row has
            np.copyto(cells, np.uint16(BlockState.CACHED), where=np.equal(cells, BlockState.LIVE, out=self._mask))
        if state.cache.row_tables.num_shared:
            shared = pool.are_shared(self._mask)
            blocks, times = np.unique(pinned, return_counts=True)
            shared[blocks] = pool.references(blocks) - times > 1
            np.bitwise_or(cells, np.uint16(SHARED), out=cells, where=shared)
        self.cells, self._next = cells, before
        return cells, before

    def _write_owners(self, cells: Cells, table: BlockTables, rows: Index) -> None:
        """Write the cell of each of `rows` to its blocks; of several rows with a block the last one stays."""
        lengths = table.held(rows)
        rows, lengths = rows[lengths > 0], lengths[lengths > 0]
        total = int(lengths.sum())
        if not total:
            return
        if total > len(self._places):
            self._places, self._blocks = np.empty(2 * total, np.int64), np.empty(2 * total, np.int32)
            self._owners = np.empty(2 * total, np.uint16)
            self._index = np.empty(2 * total, np.int64)
        places, blocks, owners = self._places[:total], self._blocks[:total], self._owners[:total]
        index = self._index[:total]
        starts = np.cumsum(lengths) - lengths
        # Both are sums of their steps: within a row, and from the end of a row to the start of the next one.
        firsts = rows * table.blocks.shape[2] + table.starts[rows]
        places.fill(1)
        places[starts] = np.diff(firsts, prepend=0)
        places[starts[1:]] -= lengths[:-1] - 1
        np.cumsum(places, out=places)
        values = np.minimum(rows, MOST_ROWS - 1) + FIRST_ROW
        owners.fill(0)
        owners[starts] = np.diff(values, prepend=0).astype(np.uint16)  # modulo 2**16
        np.cumsum(owners, dtype=np.uint16, out=owners)
        for of_table in table.blocks:
            np.take(of_table.reshape(-1), places, out=blocks, mode="clip")
            # Numpy's fastest type of index: six times as fast as int32 for a million blocks
            np.copyto(index, blocks)
            cells[index] = owners


def encode_changes(cells: Cells, before: Cells) -> str:
    """The runs of `cells` where they differ from `before`, both [num_blocks], lowest first."""
    changed = np.flatnonzero(cells != before)
    if not len(changed):
        return ""
    values = cells[changed]
    begins = np.empty(len(changed), np.bool_)
    begins[0] = True
    np.logical_or(changed[1:] != changed[:-1] + 1, values[1:] != values[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(changed))
    firsts, values = changed[starts], values[starts]
    if lengths.max() > _MOST_OF_RUN:
        firsts, lengths, values = _split(firsts, lengths, values)
    runs = np.empty(len(firsts), _RUN)
    runs["first"], runs["length"], runs["value"] = firsts, lengths - 1, values
    return binascii.b2a_base64(runs.tobytes(), newline=False).decode("ascii")


def apply_changes(runs: str, cells: Cells) -> None:
    """Write what `encode_changes` gave into `cells` [num_blocks]."""
    for first, length, value in np.frombuffer(binascii.a2b_base64(runs, strict_mode=True), _RUN).tolist():
        cells[first : first + length + 1] = value


def _split(firsts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same runs, none longer than _MOST_OF_RUN."""
    pieces = -(-lengths // _MOST_OF_RUN)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a run
    lengths = np.minimum(np.repeat(lengths, pieces) - number * _MOST_OF_RUN, _MOST_OF_RUN)
    return np.repeat(firsts, pieces) + number * _MOST_OF_RUN, lengths, np.repeat(values, pieces)
