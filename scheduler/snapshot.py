"""The scheduler's bookkeeping at a step border, as arrays: the owner of every block, the rows, the waiting sequences.

A cell is the state of a block in 16 bits, so that a million blocks are two megabytes:

    0 .. 5        `BlockState`: unmapped, free, draining, cached, in flight, the null block
    16 + row      live, and held by the sequence in `row`; of several the one that is served first
    | SHARED      several rows hold it

Rows from MOST_ROWS - 1 on share one value.
"""

from __future__ import annotations

import heapq
from enum import IntEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..cache.block_table import BlockTables, Index
from .sequence import Sequence, SequenceStatus
from .state import SchedulerState
from .waiting import age

Cells = npt.NDArray[np.uint16]  # [num_blocks]

FIRST_ROW = 16  # the cell of row 0
SHARED = 0x8000
MOST_ROWS = SHARED - FIRST_ROW
_DEPENDENT = (SequenceStatus.WAITING_FOR_PROMPT, SequenceStatus.WAITING_FOR_MOVE)


class RowStatus(IntEnum):
    """What the sequence of a row does."""

    PREFILLING = 0
    DECODING = 1
    PAUSED = 2
    FINISHING = 3


def sequence_in(state: SchedulerState, row: int) -> Sequence | None:
    """The sequence of `row`, also while it finishes; None if the row is free."""
    return state.by_row.get(row) or state.finishing.get(row)


def row_statuses(state: SchedulerState) -> npt.NDArray[np.uint8]:
    """The `RowStatus` of each row [num_rows]; that of a free row is undefined."""
    statuses = np.zeros(len(state.rows.assigned), np.uint8)
    statuses[state.decoding] = RowStatus.DECODING
    if state.paused:
        statuses[list(state.paused)] = RowStatus.PAUSED
    if state.finishing:
        statuses[list(state.finishing)] = RowStatus.FINISHING
    return statuses


def first_waiting(state: SchedulerState, most: int) -> list[Sequence]:
    """The first `most` sequences without a row, in the order of service; last those that wait for another one."""
    waiting = state.waiting
    first = waiting.queue[:most]
    if waiting.deferred:
        first = heapq.nsmallest(most, first + waiting.deferred, key=age)
    if state.num_dependent and len(first) < most:
        dependent = (s for s in state.by_id.values() if s.status in _DEPENDENT)
        first += islice(dependent, min(state.num_dependent, most - len(first)))
    return first


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
        if state.cache.row_tables.num_shared:
            np.bitwise_or(cells, np.uint16(SHARED), out=cells, where=pool.are_shared(self._mask))
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
            np.copyto(index, blocks)  # numpy's fastest type of index: six times as fast as int32 for a million blocks
            cells[index] = owners


def cell_of(row: int) -> int:
    """The cell of a block that only `row` holds."""
    return FIRST_ROW + min(row, MOST_ROWS - 1)
