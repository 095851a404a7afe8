"""The block allocator: which blocks of a pool are free, who refers to the others, which of them a copy still needs.

Three facts about a block are independent: references (block tables that hold it), a hash (it can be found as a prefix)
and pins (unfinished copies that read or write it). This class keeps references and pins; blocks gain hashes with the
prefix index, and extents come and go with the elastic pool, so `cached` and `draining` are zero until then.

    free ── allocate ──► live ── release, last reference ──► free
                          │ pin                        no pins ▲
                          ▼                                    │
                        live ── release, last reference ──► in flight ── unpin, last pin
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import BlockMisuse, NoFreeBlocks

BlockIds = npt.NDArray[np.int32]
NULL_BLOCK = 0


class Counts(NamedTuple):
    """Blocks by state. The null block is not counted; `mapped` is the sum of the others."""

    free: int
    draining: int
    live: int
    cached: int
    in_flight: int
    mapped: int


class BlockAllocator:
    """Hands out the blocks `1 .. num_blocks - 1`; block 0 is the null block, target of padding, never handed out.

    Every call is all or nothing: one that raises has changed nothing. Costs are those of a few array operations,
    however many blocks the pool has.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, the null block and one to use, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int32)
        self._pins = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # a stack; its top is at _num_free - 1
        self._num_free = num_blocks - 1
        self._in_flight = 0
        self._mark = np.empty(num_blocks, np.int32)  # scratch, to see an id given twice without sorting

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give at once."""
        return self._num_free

    @property
    def usable(self) -> int:
        """Blocks there are to hand out, in use or not."""
        return self.num_blocks - 1

    def counts(self) -> Counts:
        """Blocks by state. Read-only."""
        live = self.usable - self._num_free - self._in_flight
        return Counts(self._num_free, 0, live, 0, self._in_flight, self.usable)

    def references(self, ids: Iterable[int] | BlockIds) -> npt.NDArray[np.int32]:
        """How many block tables hold each of `ids`. Read-only."""
        return self._references[self._checked(ids)]

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks with one reference each. Raises NoFreeBlocks when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._num_free:
            raise NoFreeBlocks(n, self._num_free)
        top = self._num_free
        ids = self._free[top - n : top][::-1].copy()
        self._references[ids] = 1
        self._num_free = top - n
        return ids

    def retain(self, ids: Iterable[int] | BlockIds) -> None:
        """Add a reference to each of `ids`, which must be live. Raises BlockMisuse."""
        ids, times = self._counted(ids)
        if (self._references[ids] == 0).any():
            raise BlockMisuse(f"blocks without a reference cannot be shared: {_some(ids[self._references[ids] == 0])}")
        self._references[ids] += times

    def release(self, ids: Iterable[int] | BlockIds) -> None:
        """Drop a reference from each of `ids`; blocks without one become free, or in flight while pinned.

        Raises BlockMisuse for the null block, an id outside the pool, or more releases of a block than it has references.
        """
        ids, times = self._counted(ids)
        left = self._references[ids] - times
        if (left < 0).any():
            raise BlockMisuse(f"blocks released more often than they are held: {_some(ids[left < 0])}")
        self._references[ids] = left
        gone = ids[left == 0]
        pinned = self._pins[gone] > 0
        if pinned.any():
            self._in_flight += int(pinned.sum())
            gone = gone[~pinned]
        self._push(gone)

    def pin(self, ids: Iterable[int] | BlockIds) -> None:
        """Keep `ids` (live or in flight) from reuse while a copy reads or writes them. Raises BlockMisuse."""
        ids, times = self._counted(ids)
        idle = (self._references[ids] == 0) & (self._pins[ids] == 0)
        if idle.any():
            raise BlockMisuse(f"free blocks cannot be pinned: {_some(ids[idle])}")
        self._pins[ids] += times

    def unpin(self, ids: Iterable[int] | BlockIds) -> None:
        """The copy is done: drop a pin from each of `ids`. Raises BlockMisuse for more unpins than pins."""
        ids, times = self._counted(ids)
        left = self._pins[ids] - times
        if (left < 0).any():
            raise BlockMisuse(f"blocks unpinned more often than pinned: {_some(ids[left < 0])}")
        self._pins[ids] = left
        landed = ids[(left == 0) & (self._references[ids] == 0)]
        self._in_flight -= len(landed)
        self._push(landed)

    def check_invariants(self, tables: Iterable[BlockIds] | None = None) -> None:
        """Recompute every derived fact; with `tables`, also that references equal the tables that hold each block.

        Raises AssertionError naming what does not hold.
        """
        free = self._free[: self._num_free]
        assert 0 <= self._num_free <= self.usable, f"{self._num_free} free of {self.usable}"
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not len(free) or (free.min() > NULL_BLOCK and free.max() < self.num_blocks), (
            "a free id is outside the pool"
        )
        assert (self._references >= 0).all() and (self._pins >= 0).all(), "a negative count"
        assert self._references[NULL_BLOCK] == 0 and self._pins[NULL_BLOCK] == 0, "the null block is in use"
        assert not self._references[free].any() and not self._pins[free].any(), "a free block is held or pinned"
        in_flight = int(((self._references == 0) & (self._pins > 0)).sum())
        assert in_flight == self._in_flight, f"{in_flight} blocks are in flight, {self._in_flight} counted"
        live = int((self._references > 0).sum())
        assert live + in_flight + self._num_free == self.usable, f"{live} live + {in_flight} + {self._num_free} free"
        if tables is not None:
            held = np.zeros(self.num_blocks, np.int64)
            for table in tables:
                held += np.bincount(table, minlength=self.num_blocks)
            wrong = np.flatnonzero(held != self._references)
            assert not len(wrong), f"references differ from the tables at blocks {_some(wrong)}"

    def _push(self, ids: BlockIds) -> None:
        top = self._num_free
        self._free[top : top + len(ids)] = ids[::-1]
        self._num_free = top + len(ids)

    def _checked(self, ids: Iterable[int] | BlockIds) -> BlockIds:
        array = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
        if array.size and array.dtype.kind not in "iu":
            raise BlockMisuse(f"block ids are integers, got {array.dtype}")
        if array.size and (array.min() <= NULL_BLOCK or array.max() >= self.num_blocks):
            outside = array[(array <= NULL_BLOCK) | (array >= self.num_blocks)]
            raise BlockMisuse(f"not blocks to use (the pool has 1 .. {self.usable}): {_some(outside)}")
        return array.astype(np.int32, copy=False)

    def _counted(self, ids: Iterable[int] | BlockIds) -> tuple[BlockIds, BlockIds | int]:
        """Distinct ids, and how often each was given (1 when all are distinct)."""
        checked = self._checked(ids)
        order = np.arange(len(checked), dtype=np.int32)
        self._mark[checked] = order
        if (self._mark[checked] == order).all():
            return checked, 1
        distinct, times = np.unique(checked, return_counts=True)
        return distinct, times.astype(np.int32)


def _some(ids: npt.NDArray[np.integer]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, ... ({len(ids)} in all)" if len(ids) > 8 else shown
