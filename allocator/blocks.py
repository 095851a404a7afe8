"""The block allocator: which blocks of a pool are free, who refers to the others, which of them a copy still needs.

Three facts about a block are independent: references (block tables that hold it), whether it is findable (the prefix index
has a hash of it) and pins (unfinished copies that read or write it). From them follows exactly one state:

    state      references  findable  pins
    free       0           no        0      in an extent that drains: draining
    live       >= 1        any       any
    cached     0           yes       0      in an extent that drains too, until it is moved or forgotten
    in flight  0           any       >= 1

    call              what it asks of each block     what becomes of it
    allocate          free                           live
    retain            live, or findable              live: a prefix hit, even while a copy reads the block or brings it
    release           live                           without a reference: in flight, cached or free (or draining), as above
    publish           live, not findable             the same, findable
    forget            findable                       not findable: a cached one is free (or draining)
    pin               live, cached or in flight      a cached one is in flight
    unpin             pinned                         without pins and references: cached or free (or draining)
    move, the source  live or cached, without pins   in flight, not findable: free (or draining) when unpinned
    move, the target  free                           live or in flight, and findable, as its source was; pinned

Blocks lie in extents (extents.py), which come (`map`) and go (`drain`, `unmap`) while others are in use. Each block is
taken from the extent that has the fewest free ones, so that others run empty; and what is live or cached in an extent can
be moved (`move`) into the holes of others, so that N free blocks always give N blocks' bytes back, up to one extent; where
they are too few, cached blocks can be forgotten for it (drain.py). Why it is so: docs/decisions/0012-elastic-blocks.md.
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
_FIXED_EXTENT = 1024  # blocks of an extent where nobody asks: what is free in one is found in 2 us
_NONE: BlockIndex = np.empty(0, np.int64)
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)
_ONE = np.uint32(1)  # of the type of `room`: np.add.at is ten times slower when it has to convert


class BlockCounts(NamedTuple):
    """Blocks by state. The null block is not counted; `mapped` is the sum of the others."""

    free: int
    draining: int
    live: int
    cached: int
    in_flight: int
    mapped: int


class BlockAllocator:
    """Hands out the blocks `1 .. num_blocks - 1`; block 0 is the null block, target of padding, never handed out.

    Block b lies in extent `b // blocks_per_extent`; `num_blocks` is a whole number of extents, of which `mapped` have
    memory at the start (None: all). Extent 0, where the null block is, is always mapped. With `blocks_per_extent` None a
    pool of any size is mapped as a whole and stays so.

    Every call is all or nothing: one that raises has changed nothing. Costs are those of a few array operations over the
    blocks in question and the extents, however many blocks the pool has; `plan_drain` and the check look at all.
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
        self._mark = np.empty(num_blocks, np.int32)  # scratch, to see an id given twice without sorting
        self._extents = Extents(num_extents, num_extents if fixed else 1, at_start)
        self._free = np.zeros(num_extents * per, np.bool_)  # or draining: mapped, not in use, not findable
        self._by_extent = self._free.reshape(num_extents, per)
        self._by_extent[at_start] = True
        self._free[NULL_BLOCK] = False
        self._free[num_blocks:] = False
        self._extents.room[at_start] = per
        self._extents.room[0] -= 1
        self._extents.room[-1] -= fixed * (num_extents * per - num_blocks)  # a fixed pool's last extent may be cut
        self._at_hand: BlockIndex = _NONE  # the free blocks of the fullest extent, until another becomes free
        self._extent_at_hand = 0
        self._mapped = self._usable = self._num_free = int(self._extents.room.sum())
        self._num_draining = 0
        self._num_findable = 0
        self._num_cached = 0
        self._in_flight = 0
        self._num_pinned = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give at once."""
        return self._num_free

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give once all cached ones are forgotten, as far as those do not drain."""
        cached = self._num_cached
        if cached and self._extents.num_draining:
            cached -= len(self._cached_of(occupied(self._extents.draining, self._by_extent)))
        return self._num_free + cached

    @property
    def pending_free_blocks(self) -> int:
        """Blocks in flight that are free or cached once the copies are done: those of extents that do not drain. Read-only."""
        if not self._in_flight:
            return 0
        in_flight = np.flatnonzero((self._pins > 0) & (self._references == 0))
        return int(np.count_nonzero(self._extents.are_open(in_flight // self.blocks_per_extent)))

    @property
    def capacity(self) -> int:
        """Blocks there would be to hand out if every extent were mapped."""
        return self.num_blocks - 1

    @property
    def usable(self) -> int:
        """Blocks there are to hand out, in use or not: those of the mapped extents that do not drain."""
        return self._usable

    @property
    def num_extents(self) -> int:
        """Extents of the pool, mapped or not."""
        return self._extents.num_extents

    @property
    def drainable_extents(self) -> ExtentIds:
        """Extents that may be given back when what is live in them is moved: mapped, without pins, not extent 0."""
        extents = self._extents.drainable
        if self._num_pinned:
            pinned = np.flatnonzero(self._pins) // self.blocks_per_extent
            extents = extents[~np.isin(extents, pinned)]
        return extents

    @property
    def mapped_extents(self) -> ExtentIds:
        """Extents with memory, the draining ones included, lowest first. Read-only."""
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
        """How many block tables hold each of `ids`. Read-only."""
        return self._references[self._checked(ids)]

    @property
    def cached_blocks(self) -> BlockIds:
        """The cached blocks of extents that do not drain: those that may be evicted. Looks at the whole pool. Read-only."""
        return np.flatnonzero(self._are_cached).astype(np.int32)

    def occupied(self, extents: Iterable[int]) -> BlockIds:
        """The blocks of `extents` that are live, cached or in flight, in the order of the extents. Read-only.

        Raises BlockMisuse unless all drain.
        """
        return occupied(self._extents.checked(extents, DRAINING), self._by_extent)

    # -- blocks --------------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks with one reference each. Raises NoFreeBlocks when fewer are free.

        Each is the lowest free one of the open extent with the fewest free blocks; of equal extents the lowest.
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

        Raises BlockMisuse for others.
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
        """Drop a reference from each of `ids`; blocks without one become free, in flight while pinned, else cached if findable.

        Returns the findable ones that have no reference any more, in the order given where each is given once. Raises
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
        """`ids` (live, distinct) can be found as prefixes from now on. Raises BlockMisuse, also for those that can already."""
        ids, times = self._counted(ids)
        wrong = (self._references[ids] == 0) | self._findable[ids] | (times != 1)
        if wrong.any():
            raise BlockMisuse(
                f"blocks not live, findable already or named twice cannot be published: {_some(ids[wrong])}"
            )
        self._findable[ids] = True
        self._num_findable += len(ids)

    def forget(self, ids: Iterable[int] | BlockIds) -> None:
        """`ids` (findable, distinct) cannot be found any more: cached ones are free. Raises BlockMisuse for others."""
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
        """Keep `ids` (live, cached or in flight) from reuse while a copy reads or writes them. Raises BlockMisuse."""
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
        """The copy is done: drop a pin from each of `ids`. Raises BlockMisuse for more unpins than pins."""
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
        """Give what refers to `sources` (live or cached, distinct, without pins) to as many free blocks. Returns these.

        References and findability go over. Both sides are pinned once, for the copy that the caller owes: `unpin` them when
        it is done. Until then the sources, and the targets of cached ones, are in flight. Raises NoFreeBlocks, or
        BlockMisuse for a block that cannot move.
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
        """`extents` have memory now: their blocks are free. Raises BlockMisuse unless all are unmapped."""
        ids = self._extents.map(extents)
        self._by_extent[ids] = True
        self._extents.room[ids] = self.blocks_per_extent
        self._at_hand = _NONE
        blocks = len(ids) * self.blocks_per_extent
        self._mapped += blocks
        self._usable += blocks
        self._num_free += blocks

    def plan_drain(self, num_extents: int, worth: Worth | None = None) -> DrainPlan:
        """The cheapest way to give back up to `num_extents` extents without taking a block from anybody. Read-only.

        With F free blocks, `F // blocks_per_extent` extents can go whichever they are: what is live or cached in them fits
        into the holes of the others. If that is enough, those with the least to move come first, of equals the highest, so
        that the mapped ones stay together. If it is not, and `worth` [num_blocks] says which cached blocks to keep longer
        (the higher; the entries of others mean nothing), as many cached blocks are evicted as holes are lacking, and no more.
        Then extents with the fewest live blocks come first; of equals those whose dearest cached block is worth least; of
        equals the highest. Evicted is what is worth least in these extents, and elsewhere only where that is too little.
        Extents with a pinned block cannot go, nor can extent 0.

        The caller forgets the evictions, and whatever cannot be found without them; drains the extents; and moves what is
        still `occupied` in them. Then no block in them is findable.
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
            if len(candidates):  # the extents are whole ones
                evictable = Evictable(cached.reshape(self._by_extent.shape), worth.reshape(self._by_extent.shape))
        return plan_drain(num_extents, candidates, self._by_extent, self._num_free, evictable)

    def drain(self, extents: Iterable[int]) -> None:
        """Allocate nothing in `extents` any more: what is free in them, or becomes free, is draining.

        Raises BlockMisuse unless all are mapped, do not drain yet, and may (extent 0 may not).
        """
        room = self._extents.room.copy()
        ids = self._extents.drain(extents)
        blocks = int(room[ids].sum())
        self._at_hand = _NONE
        self._num_free -= blocks
        self._num_draining += blocks
        self._usable -= len(ids) * self.blocks_per_extent

    def undrain(self, extents: Iterable[int]) -> None:
        """Keep `extents` after all: their draining blocks are free again. Raises BlockMisuse unless all drain."""
        ids = self._extents.undrain(extents)
        self._extents.room[ids] = room = np.count_nonzero(self._by_extent[ids], axis=1)
        self._num_free += int(room.sum())
        self._num_draining -= int(room.sum())
        self._at_hand = _NONE
        self._usable += len(ids) * self.blocks_per_extent

    def unmap(self, extents: Iterable[int]) -> None:
        """The memory of `extents` is gone. Raises BlockMisuse unless all drain and no block in them is in use."""
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
        """Recompute every derived fact. With `tables`, also that references equal the tables that hold each block; with
        `findable`, the blocks that the prefix index knows, also that just these can be found.

        Raises AssertionError naming what does not hold.
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

    # -- inside --------------------------------------------------------------------------------------------------

    def _take_fullest(self, n: int) -> BlockIndex:
        """`n` free blocks of the fullest extents, taken off their room. There must be as many."""
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
        """Of all blocks of the pool, which are cached and in an extent that does not drain."""
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
        """Blocks that nobody holds or pins any more are cached where they are findable, free or draining where not."""
        if self._num_findable:
            findable = self._findable[ids]
            self._num_cached += int(np.count_nonzero(findable))
            ids = ids[~findable]
        self._become_free(ids)

    def _become_free(self, ids: BlockIndex) -> None:
        """Blocks that are not in use any more, nor findable, are free, or draining where their extent drains."""
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
        if index.size and int((index - 1).view(np.uint64).max()) >= self.capacity:  # 0 - 1 is the highest there is
            outside = array[(index <= NULL_BLOCK) | (index > self.capacity)]
            raise BlockMisuse(f"not blocks to use (the pool has 1 .. {self.capacity}): {_some(outside)}")
        return index

    def _counted(self, ids: Iterable[int] | BlockIds) -> tuple[BlockIndex, BlockIds | int]:
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
