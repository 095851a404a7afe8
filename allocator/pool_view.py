"""The read-only view of a block pool: blocks and extents by state, and plans for giving extents back."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .drain import BlockIds, BlockIndex, DrainPlan, Evictable, Worth, occupied, plan_drain
from .errors import BlockMisuse
from .extents import DRAINING, ExtentIds, Extents

NULL_BLOCK = 0
# Blocks per extent by default: a free one in an extent is found in 2 us
_FIXED_EXTENT = 1024


class BlockState(IntEnum):
    """The state of a block, as `PoolView.states` gives it; the states are those of `BlockAllocator`."""

    UNMAPPED = 0
    FREE = 1
    DRAINING = 2
    CACHED = 3
    IN_FLIGHT = 4
    NULL = 5  # the null block
    LIVE = 6


class BlockCounts(NamedTuple):
    """Blocks by state, without the null block; `mapped` is the sum of the others."""

    free: int
    draining: int
    live: int
    cached: int
    in_flight: int
    mapped: int


class PoolView:
    """The state of a pool of `num_blocks` blocks. Read-only: `BlockAllocator` adds the methods that change it.

    Block b lies in extent `b // blocks_per_extent`. A query costs a few array operations at most, whatever the pool's
    size. `states`, `are_shared`, `plan_drain`, `cached_blocks` and `check_invariants` scan the pool; so do
    `pending_free_blocks` and `drainable_extents` while blocks are pinned.
    """

    def __init__(self, num_blocks: int, blocks_per_extent: int | None, mapped: Iterable[int] | None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, the null block and one to use, got {num_blocks}")
        fixed = blocks_per_extent is None
        per = min(num_blocks, _FIXED_EXTENT) if blocks_per_extent is None else blocks_per_extent
        if per < 1 or (num_blocks % per and not fixed):
            raise ValueError(f"{num_blocks} blocks are no whole number of extents of {per}")
        num_extents = -(-num_blocks // per)
        at_start = list(range(num_extents)) if mapped is None else sorted({int(extent) for extent in mapped})
        if fixed and mapped is not None:
            raise ValueError("a pool without blocks_per_extent is mapped as a whole: mapped has no meaning")
        if not at_start or at_start[0] != 0 or at_start[-1] >= num_extents:
            raise ValueError(f"mapped must be extent 0 and some of 1 .. {num_extents - 1}, got {at_start}")
        self.num_blocks = num_blocks
        self.blocks_per_extent = per
        self._references = np.zeros(num_blocks, np.int32)
        self._pins = np.zeros(num_blocks, np.int32)
        self._findable = np.zeros(num_blocks, np.bool_)
        self._extents = Extents(num_extents, num_extents if fixed else 1, at_start)
        self._free = np.zeros(num_extents * per, np.bool_)  # free or draining: mapped, not in use, not findable
        self._by_extent = self._free.reshape(num_extents, per)
        self._by_extent[at_start] = True
        self._free[NULL_BLOCK] = False
        self._free[num_blocks:] = False
        self._extents.room[at_start] = per
        self._extents.room[0] -= 1
        self._extents.room[-1] -= fixed * (num_extents * per - num_blocks)  # a fixed pool's last extent may be partial
        self._mapped = self._usable = self._num_free = int(self._extents.room.sum())
        self._num_draining = 0
        self._num_findable = 0
        self._num_cached = 0
        self._in_flight = 0
        self._num_pinned = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return now."""
        return self._num_free

    @property
    def available(self) -> int:
        """Blocks that `allocate` could return after forgetting all cached blocks outside draining extents."""
        cached = self._num_cached
        if cached and self._extents.num_draining:
            cached -= len(self._cached_of(occupied(self._extents.draining, self._by_extent)))
        return self._num_free + cached

    @property
    def pending_free_blocks(self) -> int:
        """Blocks in flight, outside draining extents, that become free or cached when their copies finish."""
        if not self._in_flight:
            return 0
        in_flight = np.flatnonzero((self._pins > 0) & (self._references == 0))
        return int(np.count_nonzero(self._extents.are_open(in_flight // self.blocks_per_extent)))

    @property
    def capacity(self) -> int:
        """Blocks that could be allocated if every extent were mapped."""
        return self.num_blocks - 1

    @property
    def usable(self) -> int:
        """Blocks of the mapped extents that do not drain."""
        return self._usable

    @property
    def num_extents(self) -> int:
        """Extents of the pool, mapped or not."""
        return self._extents.num_extents

    @property
    def drainable_extents(self) -> ExtentIds:
        """Extents that can be drained: mapped, not draining, without pinned blocks, not extent 0."""
        extents = self._extents.drainable
        if self._num_pinned:
            pinned = np.flatnonzero(self._pins) // self.blocks_per_extent
            extents = extents[~np.isin(extents, pinned)]
        return extents

    @property
    def mapped_extents(self) -> ExtentIds:
        """Extents with memory, including draining ones, lowest first."""
        return self._extents.mapped

    @property
    def unmapped_extents(self) -> ExtentIds:
        """Extents without memory, lowest first."""
        return self._extents.unmapped

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        live = self._mapped - self._num_free - self._num_draining - self._num_cached - self._in_flight
        return BlockCounts(self._num_free, self._num_draining, live, self._num_cached, self._in_flight, self._mapped)

    def states(
        self, out: npt.NDArray[np.unsignedinteger[Any]] | None = None, mask: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The `BlockState` of every block [num_blocks], by a few vector operations.

        It is written into `out`, if given, with `mask` as scratch, both [num_blocks]; else it is a new uint8 array.
        """
        states = np.empty(self.num_blocks, np.uint8) if out is None else out
        np.copyto(states, self._free[: self.num_blocks])  # FREE is 1
        per = self.blocks_per_extent
        for extent in self._extents.draining.tolist() if self._extents.num_draining else ():
            states[extent * per : (extent + 1) * per] *= np.uint8(BlockState.DRAINING)
        if self._num_findable:
            np.copyto(states, np.uint8(BlockState.CACHED), where=self._findable)  # unless it is live, or in flight
        np.copyto(states, np.uint8(BlockState.LIVE), where=np.greater(self._references, 0, out=mask))
        if self._in_flight:
            pinned = np.flatnonzero(self._pins)
            states[pinned[self._references[pinned] == 0]] = BlockState.IN_FLIGHT
        states[NULL_BLOCK] = BlockState.NULL
        return states

    def are_shared(self, out: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.bool_]:
        """A mask over all blocks [num_blocks]: those that several block tables hold. Written into `out`, if given."""
        return np.greater(self._references, 1, out=out)

    def are_sole(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Which of `ids` one block table holds, and no request can find: what it holds goes with that table's entry."""
        sole: npt.NDArray[np.bool_] = (self._references[ids] == 1) & ~self._findable[ids]
        return sole

    def references(self, ids: Iterable[int] | BlockIds) -> npt.NDArray[np.int32]:
        """The number of block tables that hold each of `ids`."""
        return self._references[self._checked(ids)]

    @property
    def cached_blocks(self) -> BlockIds:
        """The cached blocks outside draining extents, which may be evicted."""
        return np.flatnonzero(self._are_cached).astype(np.int32)

    def occupied(self, extents: Iterable[int]) -> BlockIds:
        """The blocks of `extents` that are live, cached or in flight, in the order of the extents.

        Raises BlockMisuse unless all drain.
        """
        return occupied(self._extents.checked(extents, DRAINING), self._by_extent)

    def plan_drain(self, num_extents: int, worth: Worth | None = None) -> DrainPlan:
        """The cheapest way to give back up to `num_extents` extents without taking a referenced block.

        With F free blocks, any `F // blocks_per_extent` extents can go: their live and cached blocks fit into the holes
        of the others. If that is enough, extents with the least to move come first, of equals the highest, so that the
        mapped ones stay together. Otherwise, if `worth` [num_blocks] gives the value of each cached block (higher: keep
        longer; other entries are ignored), exactly as many cached blocks are evicted as holes are missing. Then extents
        with the fewest live blocks come first; of equals those with the lowest maximum worth; of equals the highest.
        Evicted are the blocks of least worth in these extents, and in others only if those are too few. Extents with a
        pinned block cannot go, nor can extent 0.

        The caller forgets the evictions and every block unreachable without them, drains the extents, and moves what is
        still `occupied` in them.
        """
        if num_extents < 0:
            raise ValueError(f"cannot give back {num_extents} extents")
        candidates = self.drainable_extents
        evictable = None
        if worth is not None:
            if worth.shape != (self.num_blocks,):
                raise ValueError(f"worth has the shape {worth.shape}, and there are {self.num_blocks} blocks")
            cached = self._are_cached
            unknown = np.isnan(worth) & cached
            if unknown.any():
                raise ValueError(f"worth is no number for cached blocks {format_ids(np.flatnonzero(unknown))}")
            if len(candidates):  # the candidates are whole extents
                evictable = Evictable(cached.reshape(self._by_extent.shape), worth.reshape(self._by_extent.shape))
        return plan_drain(num_extents, candidates, self._by_extent, self._num_free, evictable)

    def check_invariants(self, tables: Iterable[BlockIds] | None = None, findable: BlockIds | None = None) -> None:
        """Recompute every derived fact. Raises AssertionError naming a violation.

        With `tables`, also check that references equal the tables that hold each block; with `findable`, the blocks
        that the prefix index knows, that exactly these are findable.
        """
        assert (self._references >= 0).all() and (self._pins >= 0).all(), "a negative count"
        extent_of = np.arange(self.num_blocks) // self.blocks_per_extent
        mapped = np.isin(extent_of, self.mapped_extents)
        draining = np.isin(extent_of, self._extents.draining)
        referenced, pinned = self._references > 0, self._pins > 0
        used = referenced | pinned | self._findable
        assert not used[NULL_BLOCK], "the null block is in use"
        mapped[NULL_BLOCK] = False
        wrong = np.flatnonzero(~mapped & used)
        assert not len(wrong), f"blocks without memory are in use: {format_ids(wrong)}"
        wrong = np.flatnonzero(self._free[: self.num_blocks] != (mapped & ~used))
        assert not len(wrong), f"blocks are wrongly free, or wrongly not: {format_ids(wrong)}"
        room = np.bincount(extent_of[mapped & ~used & ~draining], minlength=self.num_extents)
        assert (room == self._extents.room).all(), "an extent has another number of free blocks"
        assert self._num_pinned == int(pinned.sum()), f"{self._num_pinned} blocks counted as pinned"
        assert self._num_findable == int(self._findable.sum()), f"{self._num_findable} blocks counted as findable"
        cached = self._findable & ~referenced & ~pinned
        found = BlockCounts(
            free=int(room.sum()),
            draining=int((mapped & ~used & draining).sum()),
            live=int(referenced.sum()),
            cached=int(cached.sum()),
            in_flight=int((pinned & ~referenced).sum()),
            mapped=int(mapped.sum()),
        )
        assert found == self.counts(), f"there are {found}, counted {self.counts()}"
        assert sum(found[:-1]) == found.mapped, f"a block is in no state, or in two: {found}"
        assert self._usable == int((mapped & ~draining).sum()), f"{self._usable} blocks counted as usable"
        available = found.free + int((cached & ~draining).sum())
        assert available == self.available, f"{available} blocks are available, counted {self.available}"
        if findable is not None:
            wrong = np.setxor1d(findable, np.flatnonzero(self._findable))
            assert not len(wrong), f"blocks are findable here or in the index, not in both: {format_ids(wrong)}"
        if tables is not None:
            held = np.zeros(self.num_blocks, np.int64)
            for table in tables:
                held += np.bincount(table, minlength=self.num_blocks)
            wrong = np.flatnonzero(held != self._references)
            assert not len(wrong), f"references differ from the tables at blocks {format_ids(wrong)}"

    # -- internal ------------------------------------------------------------------------------------------------

    @property
    def _are_cached(self) -> npt.NDArray[np.bool_]:
        """A mask over all blocks: cached, and in an extent that does not drain."""
        cached: npt.NDArray[np.bool_] = self._findable & (self._references == 0)
        if self._num_pinned:
            cached &= self._pins == 0
        if self._extents.num_draining:
            cached.reshape(self._by_extent.shape)[self._extents.draining] = False
        return cached

    def _cached_of(self, ids: BlockIndex | BlockIds) -> BlockIndex:
        """Those of `ids` that are cached."""
        are_cached = self._findable[ids] & (self._references[ids] == 0)
        if self._num_pinned:
            are_cached &= self._pins[ids] == 0
        cached: BlockIndex = ids[are_cached]
        return cached

    def _checked(self, ids: Iterable[int] | BlockIds) -> BlockIndex:
        array = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
        if array.size and array.dtype.kind not in "iu":
            raise BlockMisuse(f"block ids are integers, got {array.dtype}")
        index = array.astype(np.int64)
        if index.size and int((index - 1).view(np.uint64).max()) >= self.capacity:  # 0 - 1 wraps to the maximum
            outside = array[(index <= NULL_BLOCK) | (index > self.capacity)]
            raise BlockMisuse(f"not blocks to use (the pool has 1 .. {self.capacity}): {format_ids(outside)}")
        return index


def format_ids(ids: npt.NDArray[np.integer]) -> str:
    """The first few of `ids`, for a message."""
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, ... ({len(ids)} in all)" if len(ids) > 8 else shown
