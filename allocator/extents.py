"""The extents of a block pool: their states and how many free blocks each has.

    unmapped ── map ──► open ── drain ──► draining ── unmap ──► unmapped
                         ▲                   │
                         └──── undrain ──────┘

Blocks are allocated only in open extents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import BlockMisuse

ExtentIds = npt.NDArray[np.int64]
UNMAPPED, OPEN, DRAINING = 0, 1, 2
_NAMES = ("unmapped", "open", "draining")


class Extents:
    """States and free-block counts of `num_extents` extents; the first `num_fixed` never change.

    At the start the `mapped` extents are open and the others unmapped. `room[e]` is the number of free blocks of open
    extent `e`, and 0 for the others; the block allocator mutates it.
    """

    def __init__(self, num_extents: int, num_fixed: int, mapped: Iterable[int]) -> None:
        self.num_extents = num_extents
        self.num_fixed = num_fixed
        self.num_draining = 0
        self.room = np.zeros(num_extents, np.uint32)
        self._states = np.full(num_extents, UNMAPPED, np.uint8)
        self._states[list(mapped)] = OPEN
        self._numbers = np.arange(num_extents)

    @property
    def unmapped(self) -> ExtentIds:
        """Extents without memory, lowest first. Read-only."""
        return np.flatnonzero(self._states == UNMAPPED)

    @property
    def mapped(self) -> ExtentIds:
        """Extents with memory, open or draining, lowest first. Read-only."""
        return np.flatnonzero(self._states != UNMAPPED)

    @property
    def draining(self) -> ExtentIds:
        """Extents being given back, lowest first. Read-only."""
        return np.flatnonzero(self._states == DRAINING)

    @property
    def drainable(self) -> ExtentIds:
        """Open extents that may be given back, lowest first."""
        return np.flatnonzero(self._states[self.num_fixed :] == OPEN) + self.num_fixed

    def are_open(self, extents: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Which of `extents` are open. Read-only."""
        open_ones: npt.NDArray[np.bool_] = self._states[extents] == OPEN
        return open_ones

    def fullest(self) -> int:
        """The extent with the fewest free blocks, at least one; of equals the lowest."""
        return int((self.room - 1).argmin())  # 0 - 1 wraps to the maximum, so extents without room come last

    def fullest_with(self, num_blocks: int) -> ExtentIds:
        """The fullest extents, in that order, that together have `num_blocks` free blocks. There must be as many."""
        keys = (self.room - 1).astype(np.int64) * self.num_extents + self._numbers
        most = min(num_blocks, self.num_extents)  # each of the first ones has at least one
        keys = np.sort(np.partition(keys, most - 1)[:most])
        extents = keys % self.num_extents
        return extents[: int(np.searchsorted(np.cumsum(self.room[extents]), num_blocks)) + 1]

    def map(self, extents: Iterable[int]) -> ExtentIds:
        """Open unmapped extents, without room yet. Returns them. Raises BlockMisuse, with no change."""
        return self._turn(extents, UNMAPPED, OPEN)

    def drain(self, extents: Iterable[int]) -> ExtentIds:
        """Start draining open extents, and set their room to 0. Returns them. Raises BlockMisuse, with no change."""
        ids = self._turn(extents, OPEN, DRAINING)
        self.num_draining += len(ids)
        self.room[ids] = 0
        return ids

    def undrain(self, extents: Iterable[int]) -> ExtentIds:
        """Reopen draining extents, without room yet. Returns them. Raises BlockMisuse, with no change."""
        ids = self._turn(extents, DRAINING, OPEN)
        self.num_draining -= len(ids)
        return ids

    def unmap(self, extents: Iterable[int]) -> ExtentIds:
        """Mark draining extents as unmapped. Returns them. Raises BlockMisuse, with no change."""
        ids = self._turn(extents, DRAINING, UNMAPPED)
        self.num_draining -= len(ids)
        return ids

    def checked(self, extents: Iterable[int], state: int) -> ExtentIds:
        """`extents` as an array. Raises BlockMisuse unless they are distinct, changeable and in `state`."""
        ids = extents if isinstance(extents, np.ndarray) else np.asarray(list(extents))
        if len(ids) and ids.dtype.kind not in "iu":
            raise BlockMisuse(f"extents are integers, got {ids.dtype}")
        ids = ids.astype(np.int64, copy=False)
        if len(ids) and not self.num_fixed <= ids.min() <= ids.max() < self.num_extents:
            outside = ids[(ids < self.num_fixed) | (ids >= self.num_extents)]
            last = self.num_extents - 1
            raise BlockMisuse(f"extents {outside.tolist()} cannot change: {self.num_fixed} .. {last} can")
        if len(np.unique(ids)) != len(ids):
            raise BlockMisuse(f"an extent is named twice in {ids.tolist()}")
        wrong = ids[self._states[ids] != state]
        if len(wrong):
            now = sorted({_NAMES[s] for s in self._states[wrong]})
            raise BlockMisuse(f"extents {wrong.tolist()} are {' or '.join(now)}, not {_NAMES[state]}")
        return ids

    def _turn(self, extents: Iterable[int], old: int, new: int) -> ExtentIds:
        ids = self.checked(extents, old)
        self._states[ids] = new
        return ids
