"""The cache manager: assigns KV-cache blocks to the scheduler's rows and takes them back.

The scheduler calls the cache through this class and its parts, and numbers the rows. The table of a row covers its first
`lengths * block_size` tokens. A call that fails changes nothing.

With a hasher, later requests with the same prefix find full blocks of computed tokens (prefix_index.py):

    lookup, admit    find a cached prefix; the new row shares its blocks
    commit           make the computed blocks of a row findable; equal blocks already cached replace the row's own
    release          drop a row's references; a findable block without references stays cached until its space is
                     needed (eviction.py) or more than `max_cached_blocks` blocks are cached

With a host tier, an evicted block is first copied to a host slot (demoted), if that is worth the copy and a slot is
available. A later hit copies it back (promotes it), if that is worth it too (swapping.py). Releasing the row of a
preempted sequence therefore swaps the sequence out, as far as its space is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from ..allocator.errors import NoFreeBlocks
from ..allocator.pool_view import PoolView
from .block_table import BlockCopies, BlockTables, Index, Int32, TableUpdate
from .eviction import Lru, PolicyFactory
from .prefix_hash import Chain, NullHasher, PrefixHasher
from .prefix_index import PrefixHit, PrefixIndex
from .resizing import PoolResizer
from .reuse_density import ReuseDensity
from .swapping import Swapping

# Of a full pool each decode step evicts a few blocks. An eviction takes some 0.2 ms, however few they are, so it is done
# for several steps at once.
_EVICTED_SHARE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """The result of an extend, a fork or an admission: the new table entries of each group, and blocks to copy first, if any.

    After an admission or a fork, `num_computed` tokens are computed already. `waits`: the next plan copies to or from
    the admitted row's blocks concurrently with its chunks, so none of the row's own chunks may be in that plan.
    """

    tables: tuple[TableUpdate, ...]
    copies: BlockCopies | None = None
    num_computed: int = 0
    waits: bool = False


class CacheManager:
    """Block tables for `num_rows` rows of at most `max_tokens` tokens each, from a pool of `num_blocks` blocks.

    With a `hasher` prefixes are cached; this needs a single group. `eviction` makes the eviction policy. At most
    `max_cached_blocks` blocks without references stay cached (None: no limit). `host_slots` is the number of slots of
    the host tier, which evicts the oldest entries first.

    With `blocks_per_extent` the pool is elastic: the extents in `mapped` (None: all) have memory at the start.

    `max_tokens` is the effective limit of a row: no more than the whole pool holds when all of it is mapped.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, *, num_groups: int = 1,
        blocks_per_extent: int | None = None, mapped: Iterable[int] | None = None,
        hasher: PrefixHasher | None = None, eviction: PolicyFactory = ReuseDensity,
        max_cached_blocks: int | None = None, host_slots: int = 0,
    ) -> None:  # fmt: skip
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        if hasher is not None and (num_groups > 1 or hasher.block_size != block_size):
            raise ValueError(
                f"prefixes are cached in one group of blocks as large as the hasher's ({hasher.block_size} tokens), "
                f"not in {num_groups} of {block_size}"
            )
        if host_slots and hasher is None:
            raise ValueError("a host tier keeps what the prefix cache finds again: it needs a hasher")
        if max_cached_blocks is not None and (hasher is None or max_cached_blocks < 0):
            raise ValueError(f"max_cached_blocks bounds a prefix cache, which needs a hasher, got {max_cached_blocks}")
        self.block_size = block_size
        self._shape = (num_blocks, block_size, num_rows, max_tokens)
        self._blocks_per_extent = blocks_per_extent
        in_pool = (num_blocks - 1) // num_groups * block_size
        self.max_tokens = min(max_tokens, in_pool + 1)  # of one row; the newest token needs no slot in the cache yet
        self._allocator = BlockAllocator(num_blocks, blocks_per_extent=blocks_per_extent, mapped=mapped)
        self.pool: PoolView = self._allocator
        self.tables = tuple(BlockTables(num_rows, -(-self.max_tokens // block_size)) for _ in range(num_groups))
        self._eviction = eviction
        self._bytes_at = np.arange(num_blocks, dtype=np.int32)  # where a block's bytes are until the next plan is done
        self._committed = np.zeros(num_rows, np.int64)  # blocks of each row that are findable, or never will be
        self.index = PrefixIndex(
            hasher or NullHasher(block_size), num_blocks, Lru if hasher is None else eviction,
            num_slots=host_slots + (host_slots > 0), host_eviction=Lru,  # slot 0 is never used
            capacity=0 if hasher is None else None,
        )  # fmt: skip
        self.swapping = Swapping(self.index, self._allocator, host_slots, self._bytes_at, max_cached_blocks)
        self.host = self.swapping.host
        self.resizer = PoolResizer(self._allocator, self.tables, self.index, self.swapping, self._bytes_at)

    def rebuilt(self, mapped: Iterable[int] | None = None) -> CacheManager:
        """A new, empty manager of the same pool, to replace this one after an error in its bookkeeping.

        `mapped` are the extents that have memory, as the arena reports them; None: those of the bookkeeping.
        """
        if self._blocks_per_extent is None:
            extents = None
        else:
            extents = self.pool.mapped_extents.tolist() if mapped is None else mapped
        return CacheManager(
            *self._shape, num_groups=len(self.tables), blocks_per_extent=self._blocks_per_extent, mapped=extents,
            hasher=self.index.hasher if self.index.capacity else None, eviction=self._eviction,
            max_cached_blocks=self.swapping.max_cached_blocks, host_slots=self.host.capacity,
        )  # fmt: skip

    @property
    def shared(self) -> int:
        """Blocks saved by sharing: table entries minus distinct live blocks."""
        return int(sum(table.lengths.sum() for table in self.tables)) - self.pool.counts().live

    def blocks_for(self, tokens: int) -> int:
        """Blocks in all groups together that a sequence of `tokens` tokens holds."""
        return -(-tokens // self.block_size) * len(self.tables)

    def short(self, rows: Index, upto: Index) -> Index:
        """The `rows` with tables that do not reach `upto[i]` tokens."""
        return rows[upto > self.tables[0].lengths[rows] * self.block_size]

    def extend(self, rows: Index, upto: Index, hit: PrefixHit | None = None) -> Extension | None:
        """Extend the tables of `rows` (distinct) to cover `upto[i]` tokens each; None, and no change, if blocks are short.

        `hit` is the prefix of a row that is being admitted: the contents of its slots are not evicted.
        """
        wanted = (upto + (self.block_size - 1)) // self.block_size
        needs = [np.maximum(wanted - table.lengths[rows], 0) for table in self.tables]
        totals = [int(need.sum()) for need in needs]
        try:
            blocks = self._allocate(sum(totals), hit)
        except NoFreeBlocks:
            return None
        updates, first = [], 0
        for table, need, total in zip(self.tables, needs, totals, strict=True):
            updates.append(_append(table, rows, need, blocks[first : first + total]))
            first += total
        return Extension(tuple(updates))

    def fork(self, parent: int, child: int, num_tokens: int, upto: int | None = None) -> Extension | None:
        """Share the first `num_tokens` tokens of row `parent` with row `child` (empty), and make room for `upto` (None:
        no more).

        Full blocks are shared; a partly filled block is copied. Returns None, and changes nothing, if blocks are short.
        The parent's tokens must be computed by plans that are done.
        """
        full, rest = divmod(num_tokens, self.block_size)
        num_fresh = self.blocks_for(num_tokens if upto is None else upto) // len(self.tables) - full
        try:
            fresh = self._allocate(num_fresh * len(self.tables)).reshape(len(self.tables), num_fresh)
        except NoFreeBlocks:
            return None
        updates, sources = [], []
        for table, own in zip(self.tables, fresh, strict=True):
            blocks = table.of(parent)[: full + bool(rest)].copy()
            self._allocator.retain(blocks[:full])
            sources.append(blocks[full:])
            blocks = np.append(blocks[:full], own)
            updates.append(_append(table, np.array([child]), np.array([len(blocks)]), blocks))
        self._committed[child] = min(int(self._committed[parent]), full)
        copies = BlockCopies(self._bytes_at[np.concatenate(sources)], fresh[:, 0].copy()) if rest else None
        return Extension(tuple(updates), copies, num_computed=num_tokens)

    def held_blocks(self, rows: Index) -> Index:
        """Blocks in the tables of each of `rows`, all groups together."""
        held: Index = sum((table.lengths[rows] for table in self.tables), np.zeros(len(rows), np.int64))
        return held

    def sole_blocks(self, rows: Index) -> Index:
        """Blocks that only this row holds, for each of `rows`: what releasing the row gains."""
        if not self.shared:
            return self.held_blocks(rows)
        sole = np.zeros(len(rows), np.int64)
        for table in self.tables:
            lengths = table.lengths[rows]
            alone = self.pool.references(table.of_all(rows)) == 1
            sole += np.bincount(np.repeat(np.arange(len(rows)), lengths), alone, len(rows)).astype(np.int64)
        return sole

    def release(self, rows: Index) -> None:
        """Release the blocks of `rows` (distinct) and empty their tables."""
        for table in self.tables:
            blocks = table.of_all(rows)
            evictable = self._allocator.release(blocks)
            for i in self.swapping.demotion.sample(len(rows)):
                self.swapping.demotion.left(table.of(int(rows[i])))
            if len(evictable):
                self.index.mark_evictable(evictable if len(rows) == 1 else _in_order(evictable, blocks))
            table.lengths[rows] = 0
        self._committed[rows] = 0
        self.swapping.trim()

    # -- prefixes ------------------------------------------------------------------------------------------------

    def chain(self, tokens: Int32, salt: bytes | None) -> Chain:
        """The hash chain of `tokens` for lookups within `salt` (None: no salt)."""
        return self.index.hasher.chain(tokens, salt)

    def lookup(self, chain: Chain, max_tokens: int) -> PrefixHit:
        """The longest prefix of `chain`, of at most `max_tokens` tokens, that is cached. Read-only."""
        return self.swapping.worth_promoting(self.index.lookup(chain, max_tokens))

    def needed(self, upto: int, hit: PrefixHit) -> int:
        """Blocks that `admit` takes from `available`: new blocks, and found blocks without references."""
        evictable = np.count_nonzero(self.pool.references(hit.blocks) == 0) if len(hit.blocks) else 0
        return self.blocks_for(upto) - len(hit.blocks) + int(evictable)

    def admit(self, row: int, upto: int, hit: PrefixHit, name: str = "") -> Extension | None:
        """Assign `hit` to `row` (empty) and extend it to `upto` tokens; None, and no change, if blocks are short.

        The tail kept for `name` is swapped in too, if it follows the tokens found. After a successful admission nothing
        is kept for `name` any more.
        """
        if self.needed(upto, hit) > self.pool.available:
            return None
        owed, returns = self.host.num_owed, self.swapping.stop_waiting(name)
        tables = self._assign(row, upto, hit)
        num_tail = self.swapping.admitted(name, hit, self.tables[0].blocks[row], returns)
        waits = self.host.num_owed > owed or self.host.is_arriving(hit.blocks)
        return Extension(tables, num_computed=hit.num_tokens + num_tail, waits=waits)

    def _assign(self, row: int, upto: int, hit: PrefixHit) -> tuple[TableUpdate, ...]:
        """Assign `hit` to `row` (empty), with room for `upto` tokens; there must be enough blocks. Returns the table
        entries.
        """
        one = np.array([row])
        found: tuple[TableUpdate, ...] = ()
        num_blocks, num_slots = len(hit.blocks), len(hit.slots)
        if num_blocks:
            taken = self._allocator.retain(hit.blocks)
            if len(taken):
                self.index.mark_used(taken)
            found = (_append(self.tables[0], one, np.array([num_blocks]), hit.blocks),)
        extension = self.extend(one, np.array([upto]), hit)
        assert extension is not None, "enough blocks were available"
        if hit.num_tokens:
            if num_slots:
                self.swapping.promote(hit.slots, self.tables[0].blocks[row, num_blocks : num_blocks + num_slots])
            self.index.accept(hit)
            self._committed[row] = num_blocks + num_slots
        return merged([found, extension.tables])

    def commit(self, row: int, chain: Chain, num_tokens: int) -> tuple[TableUpdate, ...]:
        """Make the full blocks of `row`'s first `num_tokens` tokens findable.

        These tokens are computed, and are those of `chain`. Returns the changed table entries.
        """
        full, first = num_tokens // self.block_size, int(self._committed[row])
        if full <= first or not self.index.capacity:
            return ()
        table = self.tables[0]
        blocks = table.blocks[row, :full]
        places = self.index.register(chain, blocks, first)
        found = places.blocks
        own = blocks[first : first + len(found)]
        self._committed[row] = full if len(found) == full - first else table.blocks.shape[1]
        self.swapping.registered(own[found == own], places.slots)
        known = np.flatnonzero(found != own)
        if not len(known):
            self._allocator.publish(own)
            return ()
        self._allocator.publish(own[found == own])
        theirs, slots = found[known], first + known
        taken = self._allocator.retain(theirs)
        if len(taken):
            self.index.mark_used(taken)
        self._allocator.release(own[known])
        table.blocks[row, slots] = theirs
        return (TableUpdate(np.full(len(known), row), slots, theirs),)

    def reset(self) -> None:
        """Forget all cached prefixes. Rows keep their blocks."""
        places = self.index.reset()
        self._allocator.forget(places.blocks)
        self.swapping.reset(places.slots)
        self._committed[:] = self.tables[0].blocks.shape[1]  # their parents are no longer findable
        self._committed[self.tables[0].lengths == 0] = 0

    def rows_with(self, blocks: Int32) -> Index:
        """Rows with one of `blocks` in their tables, lowest first."""
        found = []
        for table in self.tables:
            rows, slots = table.entries(np.flatnonzero(table.lengths))
            found.append(rows[np.isin(table.blocks[rows, slots], blocks)])
        return np.unique(np.concatenate(found))

    def forget(self, blocks: Int32) -> None:
        """Forget `blocks`, which no table contains, and their cached descendants."""
        self.swapping.forget(np.unique(blocks))

    def _allocate(self, n: int, hit: PrefixHit | None = None) -> BlockIds:
        """Allocate `n` blocks; demote or evict cached blocks if needed. Raises NoFreeBlocks, and changes nothing then.

        With the `hit` of a row that is being admitted, the copies of demoted blocks may run concurrently with the next
        plan's chunks. Without a host tier at least a `1 / _EVICTED_SHARE` of the cached blocks is evicted at once.
        """
        lacking = n - self.pool.num_free
        if lacking > 0 and lacking <= (num_cached := self.pool.available - self.pool.num_free):
            least = 0 if self.host.demotes else num_cached // _EVICTED_SHARE
            while lacking > 0 and len(victims := self.index.victims(max(lacking, least))):
                self.swapping.reclaim(victims, hit)
                lacking = n - self.pool.num_free  # blocks that a pending copy reads become free later
        return self._allocator.allocate(n)

    # -- the host tier -------------------------------------------------------------------------------------------

    def keep_for(self, name: str, row: int, chain: Chain, num_tokens: int) -> None:
        """Record that sequence `name` leaves `row` and will return.

        The first `num_tokens` tokens, those of `chain`, are computed and committed. The last, partly filled block is
        kept, unless no slot is available or the blocks before it are not all findable.
        """
        full, rest = divmod(num_tokens, self.block_size)
        num_tail = 1 if rest and self._committed[row] == full else 0
        self.swapping.keep_for(name, chain, num_tokens, self.tables[0].blocks[row, full : full + num_tail])

    def set_swap_costs(self, *, least_chance: float, promotes: bool) -> None:
        """Set which swaps are worth their cost from now on.

        `least_chance` is the probability of reuse from which demoting a block is worth it (1 or more: never); `promotes`
        says whether promoting is.
        """
        self.host.least_chance, self.host.promotes = least_chance, promotes

    def check_invariants(self) -> None:
        """Recompute every derived fact from the tables. Raises AssertionError naming what does not hold."""
        every = np.arange(self.pool.num_blocks, dtype=np.int32)
        findable = every[self.index.findable(every)]
        tables = [t.of(int(row)) for t in self.tables for row in np.flatnonzero(t.lengths)]
        self._allocator.check_invariants(tables, findable)
        self.index.check_invariants()
        self.swapping.check_invariants(findable)


def merged(updates: list[tuple[TableUpdate, ...]]) -> tuple[TableUpdate, ...]:
    """Concatenate updates, in the order in which they happened, into one update per group."""
    updates = [update for update in updates if update]
    if len(updates) <= 1:
        return updates[0] if updates else ()
    return tuple(
        TableUpdate(*(np.concatenate([getattr(u, name) for u in group]) for name in ("rows", "slots", "blocks")))
        for group in zip(*updates, strict=True)
    )


def _in_order(some: BlockIds, blocks: BlockIds) -> BlockIds:
    """`some` of `blocks`, in the order of their first occurrence in `blocks`."""
    places = np.flatnonzero(np.isin(blocks, some))
    _, first = np.unique(blocks[places], return_index=True)
    return blocks[places[np.sort(first)]]


def _append(table: BlockTables, rows: Index, need: Index, blocks: Int32) -> TableUpdate:
    """Append the next `need[i]` of `blocks` to the table of `rows[i]`."""
    if len(blocks) == len(rows) and need.all():  # one block per row, as in decoding
        slots = table.lengths[rows]
        table.lengths[rows] = slots + 1
    else:
        slots = table.lengths[rows]
        table.lengths[rows] = slots + need
        rows = np.repeat(rows, need)
        ends = np.cumsum(need)  # end of each row's part of `blocks`
        slots = np.repeat(slots - ends + need, need) + np.arange(len(blocks))
    table.blocks[rows, slots] = blocks
    return TableUpdate(rows, slots, blocks)
