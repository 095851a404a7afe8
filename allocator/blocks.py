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
    unpin             pinned                         without pins and references: cached or free (or draining)
    move, the source  live or cached, without pins   in flight, not findable: free (or draining) when unpinned
    move, the target  free                           live or in flight, findable as its source was; pinned

Blocks lie in extents (extents.py), which come (`map`) and go (`drain`, `unmap`) while other extents are in use. Blocks
are allocated from the extent with the fewest free ones, so that other extents run empty. Live and cached blocks of an
extent can be moved (`move`) into holes of others, so N free blocks always return the memory of N blocks, rounded down
to whole extents. docs/decisions/0012-elastic-blocks.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .drain import BlockIds as BlockIds
from .drain import BlockIndex, occupied
from .errors import BlockMisuse, NoFreeBlocks
from .extents import DRAINING, ExtentIds
from .pool_view import PoolView, format_ids

_NONE: BlockIndex = np.empty(0, np.int64)
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)
_AT_HAND = 64  # blocks found at once at least: steps of decodes take a few each
_ONE = np.uint32(1)  # same type as `room`: np.add.at is ten times slower when it converts


class BlockAllocator(PoolView):
    """Allocates the blocks `1 .. num_blocks - 1`; block 0 is the null block, the target of padding, and is never allocated.

    `num_blocks` is a whole number of extents, and the extents `mapped` have memory at the start (None: all). Extent 0,
    with the null block, is always mapped. If `blocks_per_extent` is None, a pool of any size is mapped permanently as a
    whole.

    A call that raises has changed nothing.
    """

    def __init__(self, num_blocks: int, *, blocks_per_extent: int | None = None, mapped: Iterable[int] | None = None) -> None:
        super().__init__(num_blocks, blocks_per_extent, mapped)
        self._mark = np.empty(num_blocks, np.int32)  # scratch: detects duplicate ids without sorting
        self._at_hand: BlockIndex = _NONE  # cache: the next blocks to allocate; cleared when a block is freed
        self._extent_at_hand: int | None = None  # in which they lie; None: in several

    def emptied(self, mapped: Iterable[int] | None = None) -> BlockAllocator:
        """The same pool with all blocks free. The extents `mapped` have memory, if it is elastic (None: those of this pool)."""
        if self._extents.num_fixed > 1:  # mapped permanently, in several extents
            return BlockAllocator(self.num_blocks)
        extents = self.mapped_extents.tolist() if mapped is None else mapped
        return BlockAllocator(self.num_blocks, blocks_per_extent=self.blocks_per_extent, mapped=extents)

    # -- blocks --------------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks with one reference each. Raises NoFreeBlocks if fewer are free.

        Each is the lowest free block of the open extent with the fewest free blocks; of equal extents the lowest.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._num_free:
            raise NoFreeBlocks(n, self._num_free)
        if n > len(self._at_hand):
            ids = self._take_next(n)
        else:
            ids, self._at_hand = self._at_hand[:n], self._at_hand[n:]
            if self._extent_at_hand is None:
                np.subtract.at(self._extents.room, ids // self.blocks_per_extent, _ONE)
            else:
                self._extents.room[self._extent_at_hand] -= n
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
            raise BlockMisuse(f"blocks without a reference cannot be shared: {format_ids(first[~self._findable[first]])}")
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
            raise BlockMisuse(f"blocks released more often than they are held: {format_ids(ids[left < 0])}")
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
            raise BlockMisuse(f"blocks not live, findable already or named twice cannot be published: {format_ids(ids[wrong])}")
        self._findable[ids] = True
        self._num_findable += len(ids)

    def forget(self, ids: Iterable[int] | BlockIds) -> None:
        """Make `ids` (findable, distinct) unfindable; cached ones become free. Raises BlockMisuse for other blocks."""
        ids, times = self._counted(ids)
        wrong = ~self._findable[ids] | (times != 1)
        if wrong.any():
            raise BlockMisuse(f"blocks that are not findable or named twice cannot be forgotten: {format_ids(ids[wrong])}")
        cached = self._cached_of(ids)
        self._findable[ids] = False
        self._num_findable -= len(ids)
        self._num_cached -= len(cached)
        self._become_free(cached)

    def unpin(self, ids: Iterable[int] | BlockIds) -> None:
        """Drop a pin from each of `ids` after the copy. Raises BlockMisuse for more unpins than pins."""
        ids, times = self._counted(ids)
        left = self._pins[ids] - times
        if (left < 0).any():
            raise BlockMisuse(f"blocks unpinned more often than pinned: {format_ids(ids[left < 0])}")
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
            raise BlockMisuse(f"blocks that are free, pinned or named twice cannot move: {format_ids(ids[stuck])}")
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
            raise BlockMisuse(f"blocks in use cannot lose their memory: {format_ids(used)}")
        self._extents.unmap(ids)
        self._by_extent[ids] = False
        blocks = len(ids) * self.blocks_per_extent
        self._num_draining -= blocks
        self._mapped -= blocks

    # -- checks --------------------------------------------------------------------------------------------------

    def check_invariants(self, tables: Iterable[BlockIds] | None = None, findable: BlockIds | None = None) -> None:
        super().check_invariants(tables, findable)
        if num := len(self._at_hand):
            free = self._blocks_of(self._extents.fullest_with(num))
            assert np.array_equal(self._at_hand, free[:num]), "the blocks at hand are not the next ones to allocate"

    # -- internal ------------------------------------------------------------------------------------------------

    def _take_next(self, n: int) -> BlockIndex:
        """Take the next `n` free blocks from the fullest extents, and reduce their room. The pool must have `n`.

        Allocation makes the fullest extent fuller, so the order of the others stays until a block is freed.
        """
        room, last = self._extents.room, self._extents.fullest()
        if n <= room[last]:
            free = np.flatnonzero(self._by_extent[last]) + last * self.blocks_per_extent
        else:
            num = min(max(n, _AT_HAND), self._num_free)
            extents = self._extents.fullest_with(num)
            free, last = self._blocks_of(extents), int(extents[-1])
            if num > n:
                np.subtract.at(room, free[:n] // self.blocks_per_extent, _ONE)
                self._at_hand, self._extent_at_hand = free[n:], None
                return free[:n]
            room[extents] = 0
        room[last] = len(free) - n
        self._at_hand, self._extent_at_hand = free[n:], last
        return free[:n]

    def _blocks_of(self, extents: ExtentIds) -> BlockIndex:
        """The free blocks of `extents`, in their order."""
        return self._at(extents, np.flatnonzero(self._by_extent[extents]))

    def _at(self, extents: ExtentIds, places: BlockIndex) -> BlockIndex:
        """The blocks at `places` of `extents` laid end to end."""
        which, offsets = np.divmod(places, self.blocks_per_extent)
        blocks: BlockIndex = extents[which] * self.blocks_per_extent + offsets
        return blocks

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

    def _counted(self, ids: Iterable[int] | BlockIds) -> tuple[BlockIndex, BlockIds | int]:
        """Distinct ids, and how often each was given (1 if all are distinct)."""
        checked = self._checked(ids)
        order = np.arange(len(checked), dtype=np.int32)
        self._mark[checked] = order
        if (self._mark[checked] == order).all():
            return checked, 1
        distinct, times = np.unique(checked, return_counts=True)
        return distinct, times.astype(np.int32)
