"""The block allocator: tracks which blocks of a pool are free, referenced, cached, or pinned by copies.

Three facts about a block are independent: references (block tables that hold it), findability (the prefix index has its
hash) and pins (unfinished copies that read or write it). They determine exactly one state:

    state      references  findable  pins
    free       0           no        0      in an extent that drains: draining
    live       >= 1        any       any
    cached     0           yes       0      in a draining extent too, until it is moved or forgotten
    in flight  0           any       >= 1

    call              required state of each block   resulting state
    allocate          free                           live
    retain            live, or findable              live: a prefix hit, even while a copy reads or writes the block
    release           live                           without references: in flight, cached or free (or draining), as above
    publish           live, not findable             the same, findable
    forget            findable                       not findable: a cached one is free (or draining)
    pin               live, cached or in flight      a cached one is in flight
    unpin             pinned                         without pins and references: cached or free (or draining)
    move, the source  live or cached, without pins   in flight, not findable: free (or draining) when unpinned
    move, the target  free                           live or in flight, findable as its source was; pinned

Blocks lie in extents (extents.py), which come (`map`) and go (`drain`, `unmap`) while other extents are in use. Blocks
are allocated from the extent with the fewest free ones, so that other extents run empty. Live and cached blocks of an
extent can be moved (`move`) into holes of others, so N free blocks always return the memory of N blocks, rounded down
to whole extents. If there are too few holes, cached blocks can be forgotten instead (drain.py).
docs/decisions/0012-elastic-blocks.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .drain import BlockIds as BlockIds
from .drain import BlockIndex, DrainPlan, Evictable, Worth, occupied, plan_drain
from .errors import BlockMisuse, NoFreeBlocks
from .extents import DRAINING, ExtentIds, Extents

NULL_BLOCK = 0
_FIXED_EXTENT = 1024  # blocks per extent by default: a free one in an extent is found in 2 us
_NONE: BlockIndex = np.empty(0, np.int64)
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)
_ONE = np.uint32(1)  # same type as `room`: np.add.at is ten times slower when it converts


class BlockCounts(NamedTuple):
    """Blocks by state, without the null block; `mapped` is the sum of the others."""

    free: int
    draining: int
    live: int
    cached: int
    in_flight: int
    mapped: int


class BlockAllocator:
    """Allocates the blocks `1 .. num_blocks - 1`; block 0 is the null block, the target of padding, and is never allocated.

    Block b lies in extent `b // blocks_per_extent`. `num_blocks` is a whole number of extents, and the extents `mapped`
    have memory at the start (None: all). Extent 0, with the null block, is always mapped. If `blocks_per_extent` is
    None, a pool of any size is mapped permanently as a whole.

    Every call is all or nothing: a call that raises has changed nothing. A call costs a few array operations over its
    blocks and the extents, whatever the pool's size. `plan_drain`, `cached_blocks` and `check_invariants` scan the pool;
    so do `pending_free_blocks` and `drainable_extents` while blocks are pinned.
    """

    def __init__(
        self, num_blocks: int, *, blocks_per_extent: int | None = None, mapped: Iterable[int] | None = None
    ) -> None:
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
        self._mark = np.empty(num_blocks, np.int32)  # scratch: detects duplicate ids without sorting
        self._extents = Extents(num_extents, num_extents if fixed else 1, at_start)
        self._free = np.zeros(num_extents * per, np.bool_)  # free or draining: mapped, not in use, not findable
        self._by_extent = self._free.reshape(num_extents, per)
        self._by_extent[at_start] = True
        self._free[NULL_BLOCK] = False
        self._free[num_blocks:] = False
        self._extents.room[at_start] = per
        self._extents.room[0] -= 1
        self._extents.room[-1] -= fixed * (num_extents * per - num_blocks)  # a fixed pool's last extent may be partial
        self._at_hand: BlockIndex = _NONE  # cache: the free blocks of the fullest extent; cleared when a block is freed
        self._extent_at_hand = 0
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
        """Blocks in flight, outside draining extents, that become free or cached when their copies finish. Read-only."""
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
        """Blocks of the mapped extents that do not drain, in use or not."""
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
        """Extents with memory, including draining ones, lowest first. Read-only."""
        return self._extents.mapped

    @property
    def unmapped_extents(self) -> ExtentIds:
        """Extents without memory, lowest first. Read-only."""
        return self._extents.unmapped

    def counts(self) -> BlockCounts:
        """Blocks by state. Read-only."""
        live = self._mapped - self._num_free - self._num_draining - self._num_cached - self._in_flight
        return BlockCounts(self._num_free, self._num_draining, live, self._num_cached, self._in_flight, self._mapped)

    def references(self, ids: Iterable[int] | BlockIds) -> npt.NDArray[np.int32]:
        """The number of block tables that hold each of `ids`. Read-only."""
        return self._references[self._checked(ids)]

    @property
    def cached_blocks(self) -> BlockIds:
        """The cached blocks outside draining extents, which may be evicted. Scans the whole pool. Read-only."""
        return np.flatnonzero(self._are_cached).astype(np.int32)

    def occupied(self, extents: Iterable[int]) -> BlockIds:
        """The blocks of `extents` that are live, cached or in flight, in the order of the extents. Read-only.

        Raises BlockMisuse unless all drain.
        """
        return occupied(self._extents.checked(extents, DRAINING), self._by_extent)

    # -- blocks --------------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks with one reference each. Raises NoFreeBlocks if fewer are free.

        Each is the lowest free block of the open extent with the fewest free blocks; of equal extents the lowest.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._num_free:
            raise NoFreeBlocks(n, self._num_free)
        if n <= len(self._at_hand):
            ids, self._at_hand = self._at_hand[:n], self._at_hand[n:]
            self._extents.room[self._extent_at_hand] -= n
        else:
            ids = self._take_fullest(n)
        self._free[ids] = False
        self._references[ids] = 1
        self._num_free -= n
        return ids.astype(np.int32)

    def retain(self, ids: Iterable[int] | BlockIds) -> BlockIds:
        """Add a reference to each of `ids`, which must be live or findable. Returns those that had none before.

        Raises BlockMisuse for other blocks.
        """
        ids, times = self._counted(ids)
        idle = self._references[ids] == 0
        if not idle.any():
            self._references[ids] += times
            return _NO_BLOCKS
        first: BlockIndex = ids[idle]
        if not self._findable[first].all():
            raise BlockMisuse(f"blocks without a reference cannot be shared: {_some(first[~self._findable[first]])}")
        in_flight = int((self._pins[first] > 0).sum())
        self._in_flight -= in_flight
        self._num_cached -= len(first) - in_flight
        self._references[ids] += times
        return first.astype(np.int32)

    def release(self, ids: Iterable[int] | BlockIds) -> BlockIds:
        """Drop a reference from each of `ids`.

        A block left without references becomes in flight if pinned, else cached if findable, else free (or draining).
        Returns the findable blocks left without references, in the given order if each is given once. Raises
        BlockMisuse for the null block, an id outside the pool, or more releases of a block than it has references.
        """
        ids, times = self._counted(ids)
        left = self._references[ids] - times
        if (left < 0).any():
            raise BlockMisuse(f"blocks released more often than they are held: {_some(ids[left < 0])}")
        self._references[ids] = left
        gone = ids[left == 0]
        findable = gone[self._findable[gone]].astype(np.int32) if self._num_findable else _NO_BLOCKS
        if self._num_pinned:
            pinned = self._pins[gone] > 0
            self._in_flight += int(pinned.sum())
            gone = gone[~pinned]
        self._come_to_rest(gone)
        return findable

    def publish(self, ids: Iterable[int] | BlockIds) -> None:
        """Make `ids` (live, distinct) findable as prefixes. Raises BlockMisuse, also for blocks that already are."""
        ids, times = self._counted(ids)
        wrong = (self._references[ids] == 0) | self._findable[ids] | (times != 1)
        if wrong.any():
            raise BlockMisuse(
                f"blocks not live, findable already or named twice cannot be published: {_some(ids[wrong])}"
            )
        self._findable[ids] = True
        self._num_findable += len(ids)

    def forget(self, ids: Iterable[int] | BlockIds) -> None:
        """Make `ids` (findable, distinct) unfindable; cached ones become free. Raises BlockMisuse for other blocks."""
        ids, times = self._counted(ids)
        wrong = ~self._findable[ids] | (times != 1)
        if wrong.any():
            raise BlockMisuse(f"blocks that are not findable or named twice cannot be forgotten: {_some(ids[wrong])}")
        cached = self._cached_of(ids)
        self._findable[ids] = False
        self._num_findable -= len(ids)
        self._num_cached -= len(cached)
        self._become_free(cached)

    def pin(self, ids: Iterable[int] | BlockIds) -> None:
        """Protect `ids` (live, cached or in flight) from reuse while a copy reads or writes them. Raises BlockMisuse."""
        ids, times = self._counted(ids)
        first = self._pins[ids] == 0
        idle = ids[first & (self._references[ids] == 0)]
        if len(idle):
            if not self._findable[idle].all():
                raise BlockMisuse(f"free blocks cannot be pinned: {_some(idle[~self._findable[idle]])}")
            self._num_cached -= len(idle)
            self._in_flight += len(idle)
        self._num_pinned += int(first.sum())
        self._pins[ids] += times

    def unpin(self, ids: Iterable[int] | BlockIds) -> None:
        """Drop a pin from each of `ids` after the copy. Raises BlockMisuse for more unpins than pins."""
        ids, times = self._counted(ids)
        left = self._pins[ids] - times
        if (left < 0).any():
            raise BlockMisuse(f"blocks unpinned more often than pinned: {_some(ids[left < 0])}")
        self._pins[ids] = left
        unpinned = ids[left == 0]
        self._num_pinned -= len(unpinned)
        landed = unpinned[self._references[unpinned] == 0]
        self._in_flight -= len(landed)
        self._come_to_rest(landed)

    def move(self, sources: Iterable[int] | BlockIds) -> BlockIds:
        """Move `sources` (live or cached, distinct, unpinned) to free blocks, which are returned.

        References and findability go to the new blocks. Both sides are pinned once, for the copy that the caller must
        make: `unpin` them when it is done. Until then the sources, and the targets of cached ones, are in flight. Raises
        NoFreeBlocks, or BlockMisuse for a block that cannot move.
        """
        ids, times = self._counted(sources)
        references, findable = self._references[ids], self._findable[ids]
        stuck = ((references == 0) & ~findable) | (self._pins[ids] > 0) | (times != 1)
        if stuck.any():
            raise BlockMisuse(f"blocks that are free, pinned or named twice cannot move: {_some(ids[stuck])}")
        targets = self.allocate(len(ids))
        cached = int((references == 0).sum())
        self._references[targets], self._references[ids] = references, 0
        self._findable[targets], self._findable[ids] = findable, False
        self._pins[ids] = self._pins[targets] = 1
        self._num_pinned += 2 * len(ids)
        self._num_cached -= cached
        self._in_flight += len(ids) + cached
        return targets

    # -- extents -------------------------------------------------------------------------------------------------

    def map(self, extents: Iterable[int]) -> None:
        """Add `extents`, which have memory now: their blocks are free. Raises BlockMisuse unless all are unmapped."""
        ids = self._extents.map(extents)
        self._by_extent[ids] = True
        self._extents.room[ids] = self.blocks_per_extent
        self._at_hand = _NONE
        blocks = len(ids) * self.blocks_per_extent
        self._mapped += blocks
        self._usable += blocks
        self._num_free += blocks

    def plan_drain(self, num_extents: int, worth: Worth | None = None) -> DrainPlan:
        """The cheapest way to give back up to `num_extents` extents without taking a referenced block. Read-only.

        With F free blocks, any `F // blocks_per_extent` extents can go: their live and cached blocks fit into the holes
        of the others. If that is enough, extents with the least to move come first, of equals the highest, so that the
        mapped ones stay together. Otherwise, if `worth` [num_blocks] gives the value of each cached block (higher: keep
        longer; other entries are ignored), exactly as many cached blocks are evicted as holes are missing. Then extents
        with the fewest live blocks come first; of equals those with the lowest maximum worth; of equals the highest.
        Evicted are the blocks of least worth in these extents, and in others only if those are too few. Extents with a
        pinned block cannot go, nor can extent 0.

        The caller forgets the evictions and every block unreachable without them, drains the extents, and moves what is
        still `occupied` in them. After that no block in them is findable.
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
                raise ValueError(f"worth is no number for cached blocks {_some(np.flatnonzero(unknown))}")
            if len(candidates):  # the candidates are whole extents
                evictable = Evictable(cached.reshape(self._by_extent.shape), worth.reshape(self._by_extent.shape))
        return plan_drain(num_extents, candidates, self._by_extent, self._num_free, evictable)

    def drain(self, extents: Iterable[int]) -> None:
        """Stop allocating in `extents`: blocks that are free in them, or become free, are draining.

        Raises BlockMisuse unless all are open. Extent 0 may not drain, nor any extent of a pool without `blocks_per_extent`.
        """
        room = self._extents.room.copy()
        ids = self._extents.drain(extents)
        blocks = int(room[ids].sum())
        self._at_hand = _NONE
        self._num_free -= blocks
        self._num_draining += blocks
        self._usable -= len(ids) * self.blocks_per_extent

    def undrain(self, extents: Iterable[int]) -> None:
        """Reopen `extents`: their draining blocks are free again. Raises BlockMisuse unless all drain."""
        ids = self._extents.undrain(extents)
        self._extents.room[ids] = room = np.count_nonzero(self._by_extent[ids], axis=1)
        self._num_free += int(room.sum())
        self._num_draining -= int(room.sum())
        self._at_hand = _NONE
        self._usable += len(ids) * self.blocks_per_extent

    def unmap(self, extents: Iterable[int]) -> None:
        """Remove `extents`, which lose their memory. Raises BlockMisuse unless all drain and no block in them is in use."""
        ids = self._extents.checked(extents, DRAINING)
        used = occupied(ids, self._by_extent)
        if len(used):
            raise BlockMisuse(f"blocks in use cannot lose their memory: {_some(used)}")
        self._extents.unmap(ids)
        self._by_extent[ids] = False
        blocks = len(ids) * self.blocks_per_extent
        self._num_draining -= blocks
        self._mapped -= blocks

    # -- checks --------------------------------------------------------------------------------------------------

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
        assert not len(wrong), f"blocks without memory are in use: {_some(wrong)}"
        wrong = np.flatnonzero(self._free[: self.num_blocks] != (mapped & ~used))
        assert not len(wrong), f"blocks are wrongly free, or wrongly not: {_some(wrong)}"
        room = np.bincount(extent_of[mapped & ~used & ~draining], minlength=self.num_extents)
        assert (room == self._extents.room).all(), "an extent has another number of free blocks"
        if len(self._at_hand):
            fullest = self._extents.fullest()
            at_hand = np.flatnonzero(self._by_extent[fullest]) + fullest * self.blocks_per_extent
            assert fullest == self._extent_at_hand, "the blocks at hand are not of the fullest extent"
            assert np.array_equal(self._at_hand, at_hand), "the blocks at hand are not those of the fullest extent"
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
            assert not len(wrong), f"blocks are findable here or in the index, not in both: {_some(wrong)}"
        if tables is not None:
            held = np.zeros(self.num_blocks, np.int64)
            for table in tables:
                held += np.bincount(table, minlength=self.num_blocks)
            wrong = np.flatnonzero(held != self._references)
            assert not len(wrong), f"references differ from the tables at blocks {_some(wrong)}"

    # -- internal ------------------------------------------------------------------------------------------------

    def _take_fullest(self, n: int) -> BlockIndex:
        """Take `n` free blocks from the fullest extents and reduce their room. The pool must have `n`."""
        room, last = self._extents.room, self._extents.fullest()
        if n <= room[last]:
            free = np.flatnonzero(self._by_extent[last]) + last * self.blocks_per_extent
        else:
            extents = self._extents.fullest_with(n)
            free, last = self._at(extents, np.flatnonzero(self._by_extent[extents])), int(extents[-1])
            room[extents] = 0
        room[last] = len(free) - n
        self._at_hand, self._extent_at_hand = free[n:], last
        return free[:n]

    def _at(self, extents: ExtentIds, places: BlockIndex) -> BlockIndex:
        """The blocks at `places` of `extents` laid end to end."""
        which, offsets = np.divmod(places, self.blocks_per_extent)
        blocks: BlockIndex = extents[which] * self.blocks_per_extent + offsets
        return blocks

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

    def _come_to_rest(self, ids: BlockIndex) -> None:
        """Make blocks without references and pins cached if findable, else free or draining."""
        if self._num_findable:
            findable = self._findable[ids]
            self._num_cached += int(np.count_nonzero(findable))
            ids = ids[~findable]
        self._become_free(ids)

    def _become_free(self, ids: BlockIndex) -> None:
        """Make unused, unfindable blocks free, or draining if their extent drains."""
        if not len(ids):
            return
        self._free[ids] = True
        extents = ids // self.blocks_per_extent
        if self._extents.num_draining:
            extents = extents[self._extents.are_open(extents)]
            self._num_draining += len(ids) - len(extents)
        np.add.at(self._extents.room, extents, _ONE)
        self._num_free += len(extents)
        self._at_hand = _NONE

    def _checked(self, ids: Iterable[int] | BlockIds) -> BlockIndex:
        array = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
        if array.size and array.dtype.kind not in "iu":
            raise BlockMisuse(f"block ids are integers, got {array.dtype}")
        index = array.astype(np.int64)
        if index.size and int((index - 1).view(np.uint64).max()) >= self.capacity:  # 0 - 1 wraps to the maximum
            outside = array[(index <= NULL_BLOCK) | (index > self.capacity)]
            raise BlockMisuse(f"not blocks to use (the pool has 1 .. {self.capacity}): {_some(outside)}")
        return index

    def _counted(self, ids: Iterable[int] | BlockIds) -> tuple[BlockIndex, BlockIds | int]:
        """Distinct ids, and how often each was given (1 if all are distinct)."""
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
