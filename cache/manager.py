"""The cache manager: assigns KV-cache blocks to the scheduler's rows and takes them back.

The scheduler calls the cache through this class and its parts, and numbers the rows. The tables of a row cover its first
`lengths * block_size` tokens, those of layers with a window only the last of them (layer_groups.py). A call that fails
changes nothing.

With a hasher, later requests with the same prefix find full blocks of computed tokens (prefix_index.py):

    lookup, admit    find a cached prefix; the new row shares its blocks
    commit           make the computed blocks of a row findable; equal blocks already cached replace the row's own
    release          drop a row's references; a findable block without references stays cached until its space is
                     needed (eviction.py) or more than `max_cached_blocks` blocks are cached

With a host tier, an evicted block is first copied to a host slot (demoted), if that is worth the copy and a slot is
available. A later hit copies it back (promotes it), if that is worth it too (swapping.py). Releasing the row of a
preempted sequence therefore swaps the sequence out, as far as its space is needed.

With windows:

    release_passed   give up the blocks that no later token reads
    reach            extend the tables of windows for the next chunk of a prompt
    advance          both, for decodes at a block border
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from ..allocator.errors import NoFreeBlocks
from ..allocator.pool_view import PoolView
from .block_table import BlockCopies, BlockTables, Index, Int32, TableUpdate, merged
from .cache_events import CacheEventLog
from .eviction import Lru, PolicyFactory
from .layer_groups import LayerGroup, blocks_to_hold, most_slots_in
from .prefix_hash import Chain, NullHasher, PrefixHasher
from .prefix_index import PrefixHit, PrefixIndex
from .prefix_tree import NONE
from .resizing import PoolResizer
from .reuse_density import ReuseDensity
from .row_tables import RowTables
from .swapping import Swapping
from .window_blocks import WindowBlocks

# Of a full pool each decode step evicts a few blocks. An eviction takes some 0.2 ms, however few they are, so it is done
# for several steps at once.
_EVICTED_SHARE = 64
_SPARE_NODES = 4  # of the index for each block and slot, where nodes have no bytes; more than those of sequences
_KEPT_ENDS = 64  # tokens; the least from the end of a prompt up behind which requests find what windows read


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """The result of an extend, a fork or an admission: new entries of each block table, and blocks to copy first, if any.

    After an admission or a fork, `num_computed` tokens are computed already. `waits`: the next plan copies to or from
    the admitted row's blocks concurrently with its chunks, so none of the row's own chunks may be in that plan.
    """

    tables: tuple[TableUpdate, ...]
    copies: BlockCopies | None = None
    num_computed: int = 0
    waits: bool = False


class CacheManager:
    """Block tables for `num_rows` rows of at most `max_tokens` tokens each, from a pool of `num_blocks` blocks.

    `groups` are the groups of layers, those without a window first. With a `hasher` prefixes are cached. `eviction` makes
    the eviction policy. At most `max_cached_blocks` blocks without references stay cached (None: no limit). `host_slots` is
    the number of slots of the host tier, which evicts the oldest entries first. `events` is the prefix index's log.

    With `blocks_per_extent` the pool is elastic: the extents in `mapped` (None: all) have memory at the start.

    `max_tokens` is the effective limit of a row: no more than the whole pool holds when all of it is mapped.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, *,
        groups: Sequence[LayerGroup] = (LayerGroup(),), blocks_per_extent: int | None = None,
        mapped: Iterable[int] | None = None, hasher: PrefixHasher | None = None,
        eviction: PolicyFactory = ReuseDensity, max_cached_blocks: int | None = None, host_slots: int = 0,
        events: CacheEventLog | None = None,
    ) -> None:  # fmt: skip
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        if hasher is not None and hasher.block_size != block_size:
            raise ValueError(
                f"prefixes are cached in blocks as large as the hasher's ({hasher.block_size} tokens), not {block_size}"
            )
        if host_slots and hasher is None:
            raise ValueError("a host tier keeps what the prefix cache finds again: it needs a hasher")
        if max_cached_blocks is not None and (hasher is None or max_cached_blocks < 0):
            raise ValueError(f"max_cached_blocks bounds a prefix cache, which needs a hasher, got {max_cached_blocks}")
        self.block_size = block_size
        self._shape = (num_blocks, block_size, num_rows, max_tokens)
        self._blocks_per_extent = blocks_per_extent
        most_slots = most_slots_in(groups, num_blocks - 1, block_size, -(-max_tokens // block_size))
        # Of one row; the newest token needs no slot in the cache yet.
        self.max_tokens = min(max_tokens, most_slots * block_size + 1)
        self._allocator = BlockAllocator(num_blocks, blocks_per_extent=blocks_per_extent, mapped=mapped)
        self.pool: PoolView = self._allocator
        slots = host_slots + (host_slots > 0)  # slot 0 is never used
        max_slots = -(-self.max_tokens // block_size)
        num_nodes = 0 if hasher is None else _most_nodes(groups, num_blocks + slots, block_size, num_rows, max_slots)
        self.row_tables = RowTables(groups, self._allocator, num_rows, max_slots, block_size, num_nodes)
        self.tables = self.row_tables.with_bytes
        self._anchor, self._anchors = self.row_tables.anchor, self.row_tables.anchors
        self._eviction = eviction
        self._bytes_at = np.arange(num_blocks, dtype=np.int32)  # where a block's bytes are until the next plan is done
        self._committed = np.zeros(num_rows, np.int64)  # blocks of each row that are findable, or never will be
        self.index = PrefixIndex(
            hasher or NullHasher(block_size), self._anchors.num_blocks, Lru if hasher is None else eviction,
            num_slots=slots, host_eviction=Lru, groups=[group for group, _ in self.row_tables.others],
            num_window_blocks=num_blocks, capacity=num_nodes, events=events,
        )  # fmt: skip
        self.swapping = Swapping(
            self.index, self._allocator, self._anchors, host_slots, self._bytes_at, max_cached_blocks
        )
        self.host = self.swapping.host
        self.resizer = PoolResizer(
            self._allocator, self.tables, self.index, self.swapping, self._bytes_at, self.row_tables.anchor_has_bytes
        )

    def rebuilt(self, mapped: Iterable[int] | None = None) -> CacheManager:
        """A new, empty manager of the same pool, to replace this one after an error in its bookkeeping.

        `mapped` are the extents that have memory, as the arena reports them; None: those of the bookkeeping.
        """
        if self._blocks_per_extent is None:
            extents = None
        else:
            extents = self.pool.mapped_extents.tolist() if mapped is None else mapped
        return CacheManager(
            *self._shape, groups=self.row_tables.groups, blocks_per_extent=self._blocks_per_extent, mapped=extents,
            hasher=self.index.hasher if self.index.capacity else None, eviction=self._eviction,
            max_cached_blocks=self.swapping.max_cached_blocks, host_slots=self.host.capacity, events=self.index.events,
        )  # fmt: skip

    def blocks_for(self, tokens: int) -> int:
        """Blocks in all tables together that a sequence of `tokens` tokens holds, once the last of them is computed."""
        return blocks_to_hold(self.row_tables.groups, -(-tokens // self.block_size), self.block_size)

    def extend(self, rows: Index, upto: Index) -> Extension | None:
        """Extend the tables of `rows` (distinct) to cover `upto[i]` tokens each; None, and no change, if blocks are short."""
        wanted = (upto + (self.block_size - 1)) // self.block_size
        return self._extend(self.row_tables.every, rows, wanted)

    def _extend(
        self, tables: Sequence[BlockTables], rows: Index, wanted: Index, hit: PrefixHit | None = None
    ) -> Extension | None:
        """Extend `tables` of `rows` to `wanted[i]` entries; None, and no change, if blocks are short."""
        if len(tables) == 1 and (table := tables[0]) is not self.row_tables.without_bytes:  # as always without groups
            need = np.maximum(wanted - table.lengths[rows], 0)
            total = int(need.sum())
            try:
                blocks = self._allocate(table.num_tables * total, hit)
            except NoFreeBlocks:
                return None
            updates = table.append(rows, need, blocks.reshape(table.num_tables, total))
            return Extension(updates if len(self.tables) == 1 else self.row_tables.updates({table: updates}))
        needs = [np.maximum(wanted - table.lengths[rows], 0) for table in tables]
        totals = [int(need.sum()) for need in needs]
        counts = [table.num_tables * total for table, total in zip(tables, totals, strict=True)]
        no_bytes = counts[0] if tables[0] is self.row_tables.without_bytes else 0
        try:
            blocks = self._allocate(sum(counts) - no_bytes, hit)
        except NoFreeBlocks:
            return None
        anchors = self._anchors.allocate(no_bytes) if no_bytes else blocks[:0]
        changed, first = {}, 0
        for table, need, total, count in zip(tables, needs, totals, counts, strict=True):
            if table is self.row_tables.without_bytes:
                table.append(rows, need, anchors[None])
                continue
            own = blocks[first : first + count].reshape(table.num_tables, total)
            changed[table] = table.append(rows, need, own)
            first += count
        return Extension(self.row_tables.updates(changed))

    # -- groups that read a part of a sequence -----------------------------------------------------------------------

    def release_passed(self, rows: Index, computed: Index) -> None:
        """Release the blocks of `rows` that no token from `computed[i]` on reads. They stay findable until evicted."""
        for window, (group, table) in zip(self.index.windows, self.row_tables.others, strict=True):
            if group.window is None:
                continue
            starts = group.first_read(computed) // self.block_size
            before = table.starts[rows]
            behind = np.flatnonzero(starts > before)
            if len(behind):
                self._release_entries(window, table, rows[behind], before[behind], starts[behind])
        self.swapping.trim()

    def advance(self, rows: Index, computed: Index) -> Extension | None:
        """Release what `release_passed` does, and extend the tables of `rows` (distinct) by one block of tokens each; returns
        None without extending any if blocks are short.

        A block that is passed becomes the new one of its table, if no other row has it and it is not findable. So most decodes
        of a window need no block.
        """
        reused, num_fresh = [], len(rows) * (self._anchor.num_tables if self.row_tables.anchor_has_bytes else 0)
        for window, (group, table) in zip(self.index.windows, self.row_tables.others, strict=True):
            starts = table.starts[rows]
            passed = group.first_read(computed) // self.block_size - starts
            own = (passed == 1) & self._allocator.are_sole(table.blocks[0, rows, starts])
            released = np.flatnonzero((passed > 0) & ~own)
            if len(released):
                ends = starts[released] + passed[released]
                self._release_entries(window, table, rows[released], starts[released], ends)
                starts[released] = ends
                self.swapping.trim()
            reused.append((starts, own))
            num_fresh += table.num_tables * (len(rows) - int(np.count_nonzero(own)))
        try:
            fresh = self._allocate(num_fresh)
        except NoFreeBlocks:
            return None
        ones = np.ones(len(rows), np.int64)
        if not self.row_tables.anchor_has_bytes:
            self._anchor.append(rows, ones, self._anchors.allocate(len(rows))[None])
            updates: list[TableUpdate] = []
        else:
            updates = list(self._anchor.append(rows, ones, fresh[None, : len(rows)]))
            fresh = fresh[len(rows) :]
        for (_, table), (starts, own) in zip(self.row_tables.others, reused, strict=True):
            blocks = table.blocks[:, rows, starts]
            lacking = np.flatnonzero(~own)
            if len(lacking):
                taken = table.num_tables * len(lacking)
                blocks[:, lacking] = fresh[:taken].reshape(table.num_tables, -1)
                fresh = fresh[taken:]
            table.starts[rows] = starts + own
            updates += table.append(rows, ones, blocks)
        return Extension(tuple(updates))

    def _release_entries(
        self, window: WindowBlocks, table: BlockTables, rows: Index, starts: Index, ends: Index
    ) -> None:
        """Release the entries of `rows` from `starts[i]` to `ends[i]`, with which their tables begin."""
        held = ends - starts
        if len(rows) == 1:
            blocks = table.blocks[:, int(rows[0]), int(starts[0]) : int(ends[0])]
        else:
            slots = np.arange(int(held.sum())) + np.repeat(starts - np.cumsum(held) + held, held)
            blocks = table.blocks[:, np.repeat(rows, held), slots]
        table.starts[rows] = ends
        if len(self._allocator.release(blocks.ravel())):
            self._wait_for_eviction(window, blocks, passed=True)

    def _wait_for_eviction(self, window: WindowBlocks, blocks: Int32, passed: bool) -> None:
        """Queue those of the released `blocks` [tables, n] that are findable and have no reference."""
        nodes = window.blocks[0].node_at[blocks[0]].astype(np.int64)
        nodes = nodes[nodes != NONE]
        if not passed:  # from the end of a sequence up, so that a hit becomes shorter
            nodes = nodes[::-1]
        _, first = np.unique(nodes, return_index=True)
        nodes = nodes[np.sort(first)]
        nodes = nodes[self.pool.references(window.blocks[0].of_node[nodes]) == 0]
        window.mark_evictable(nodes, passed)

    def reach(self, row: int, upto: int, room: int) -> tuple[int, tuple[TableUpdate, ...]]:
        """Extend the tables of windows of `row` for a chunk that ends at `upto` tokens, or before.

        Of more than one entry, at most `room` blocks are taken. Returns the tokens that the tables reach, at most `upto`, and
        the table entries. The tables without a window have theirs from the row's admission on.
        """
        tables = [table for table in self.row_tables.every if table.lengths[row] * self.block_size < upto]
        if not tables:
            return upto, ()
        each = sum(table.num_tables for table in tables)
        have = int(tables[0].lengths[row])  # of all of them: they were extended together
        more = min(self.pool.available, max(room, each)) // each
        wanted = min(-(-upto // self.block_size), have + more)
        if wanted == have:
            return have * self.block_size, ()
        extension = self._extend(tables, np.array([row]), np.array([wanted]))
        assert extension is not None, "so many blocks were available"
        return min(upto, wanted * self.block_size), extension.tables

    def fork(self, parent: int, child: int, num_tokens: int, upto: int | None = None) -> Extension | None:
        """Share the first `num_tokens` tokens of row `parent` with row `child` (empty), and make room for `upto` (None:
        no more) in the tables without a window.

        Full blocks are shared; a partly filled block is copied. Returns None, and changes nothing, if blocks are short.
        The parent's tokens must be computed by plans that are done, and `can_fork` must hold.
        """
        full, rest = divmod(num_tokens, self.block_size)
        slots = -(-max(num_tokens, upto or 0) // self.block_size)
        if self.row_tables.blocks_to_extend(slots - full, bool(rest)) > self.pool.available:
            return None
        shared: dict[BlockTables, tuple[TableUpdate, ...]] = {}
        for group, table in self.row_tables.all:
            first = group.first_read(num_tokens) // self.block_size
            blocks = table.blocks[:, parent, first:full].copy()
            (self._anchors if table is self._anchor else self._allocator).retain(blocks.ravel())
            table.starts[child] = table.lengths[child] = first
            shared[table] = table.append(np.array([child]), np.array([full - first]), blocks)
        extension = self._extend_new(child, slots, full + bool(rest))
        self._committed[child] = min(int(self._committed[parent]), full)
        copies = None
        if rest:
            pairs = [(t.blocks[:, parent, full], t.blocks[:, child, full]) for t in self.tables]
            sources, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
            copies = BlockCopies(self._bytes_at[sources], targets)
        return Extension(merged([self.row_tables.updates(shared), extension]), copies, num_computed=num_tokens)

    def _extend_new(
        self, row: int, slots: int, slots_of_windows: int, hit: PrefixHit | None = None
    ) -> tuple[TableUpdate, ...]:
        """Extend the tables of a new `row` to `slots` entries, those of windows to fewer. There must be enough blocks."""
        updates = []
        for group, table in self.row_tables.all:
            wanted = np.array([slots if group.window is None else slots_of_windows])
            extension = self._extend([table], np.array([row]), wanted, hit)
            assert extension is not None, "enough blocks were available"
            updates.append(extension.tables)
        return merged(updates)

    # -- what rows hold ----------------------------------------------------------------------------------------------

    def release(self, rows: Index) -> None:
        """Release the blocks of `rows` (distinct) and empty their tables."""
        blocks = self._anchor.of_all(rows)[0]
        evictable = self._anchors.release(blocks)
        for i in self.swapping.demotion.sample(len(rows)):
            self.swapping.demotion.left(self._anchor.of(int(rows[i]))[0])
        if len(evictable):
            self.index.mark_evictable(evictable if len(rows) == 1 else _in_order(evictable, blocks))
        self._anchor.release(rows)
        for window, (_, table) in zip(self.index.windows, self.row_tables.others, strict=True):
            blocks = table.of_all(rows)
            if len(self._allocator.release(blocks.ravel())):
                self._wait_for_eviction(window, blocks, passed=False)
            table.release(rows)
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
        """Blocks that `admit` and the chunk after it take from `available`: new ones, and found ones without references."""
        needed = self.blocks_for(upto)
        if not hit.num_tokens:
            return needed
        if self.row_tables.anchor_has_bytes:
            needed -= int(np.count_nonzero(self.pool.references(hit.blocks)))
        for window in self.index.windows:
            nodes = self.index.windows.read_next(window, hit.nodes)
            nodes = nodes[window.have(nodes, on_host=False)]
            needed -= int(np.count_nonzero(self.pool.references(window.blocks_of(nodes).ravel())))
        return needed

    def admit(self, row: int, upto: int, hit: PrefixHit, name: str = "") -> Extension | None:
        """Assign `hit` to `row` (empty) and extend it to `upto` tokens; None, and no change, if blocks are short.

        The tables of windows are extended by `reach`, chunk by chunk. The tail kept for `name` is swapped in too, if it
        follows the tokens found. After a successful admission nothing is kept for `name` any more.
        """
        if self.needed(upto, hit) > self.pool.available:
            return None
        owed, returns = self.host.num_owed, self.swapping.suspended.resume(name)
        num_tail = self.swapping.suspended.tail_behind(name, hit)
        tables = self._assign(row, upto, hit, num_tail)
        blocks = self._anchor.blocks[0, row]
        self.swapping.admitted(hit, blocks, returns)
        full = len(hit.nodes)
        tail = [table.blocks[:, row, full] for table in self.tables] if num_tail else [blocks[:0]]
        self.swapping.suspended.take_tail(name, np.concatenate(tail))
        waits = self.host.num_owed > owed or self._is_arriving(row, full)
        return Extension(tables, num_computed=hit.num_tokens + num_tail, waits=waits)

    def _is_arriving(self, row: int, full: int) -> bool:
        """Whether the next plan copies to one of the first `full` blocks of `row`."""
        return any(
            self.host.is_arriving(table.blocks[:, row, int(table.starts[row]) : full].ravel()) for table in self.tables
        )

    def _assign(self, row: int, upto: int, hit: PrefixHit, num_tail: int) -> tuple[TableUpdate, ...]:
        """Assign `hit` to `row` (empty), with room for `upto` tokens; there must be enough blocks. Returns the table
        entries.
        """
        one = np.array([row])
        num_nodes, num_blocks = len(hit.nodes), len(hit.blocks)
        self.index.keep_branch(hit)
        changed: dict[BlockTables, tuple[TableUpdate, ...]] = {}
        if num_blocks:
            taken = self._anchors.retain(hit.blocks)
            if len(taken):
                self.index.mark_used(taken)
            changed[self._anchor] = self._anchor.append(one, np.array([num_blocks]), hit.blocks[None])
        read = [self.index.windows.read_next(window, hit.nodes) for window in self.index.windows]
        there = [window.have(nodes, on_host=False) for window, nodes in zip(self.index.windows, read, strict=True)]
        for window, nodes, on_device in zip(self.index.windows, read, there, strict=True):
            self._allocator.retain(window.blocks_of(nodes[on_device]).ravel())
            window.mark_used(nodes[on_device])
        returning = []
        for window, (_, table), nodes, on_device in zip(
            self.index.windows, self.row_tables.others, read, there, strict=True
        ):
            fresh = self._allocate(table.num_tables * int(np.count_nonzero(~on_device)), hit)
            blocks = np.empty((table.num_tables, len(nodes)), np.int32)
            blocks[:, on_device] = window.blocks_of(nodes[on_device])
            blocks[:, ~on_device] = fresh.reshape(table.num_tables, -1)
            table.starts[row] = table.lengths[row] = num_nodes - len(nodes)
            changed[table] = table.append(one, np.array([len(nodes)]), blocks)
            returning.append((window, nodes[~on_device], blocks[:, ~on_device]))
        slots = -(-upto // self.block_size)
        extension = self._extend_new(row, slots, num_nodes + bool(num_tail), hit)
        if len(hit.slots):
            self.swapping.promote(hit.slots, self._anchor.blocks[0, row, num_blocks:num_nodes])
        for window, nodes, blocks in returning:
            if len(nodes):
                self.swapping.promote_window_blocks(window, nodes, blocks)
        if num_nodes:
            self.index.accept(hit)
            self._committed[row] = num_nodes
        if not self.row_tables.anchor_has_bytes:
            changed.pop(self._anchor, None)
        return merged([self.row_tables.updates(changed) if num_nodes else (), extension])

    def commit(self, row: int, chain: Chain, num_tokens: int, is_prompt: bool = False) -> tuple[TableUpdate, ...]:
        """Make the full blocks of `row`'s first `num_tokens` tokens findable.

        These tokens are computed, and are those of `chain`; `is_prompt`: they are all of a prompt, which may come again.
        Returns the changed table entries.
        """
        updates = self._commit(row, chain, num_tokens // self.block_size)
        if is_prompt and self.row_tables.has_windows:
            self._keep_end(row, num_tokens)
        return updates

    def _keep_end(self, row: int, num_tokens: int) -> None:
        """Keep the window blocks that are read behind any of the last of `num_tokens` tokens of `row`: half a window, or 64.

        The next turn of a chat may render the end of a template otherwise, and nodes are evicted from the end up.
        """
        full = min(num_tokens // self.block_size, int(self._committed[row]))
        for window, (group, _) in zip(self.index.windows, self.row_tables.others, strict=True):
            before = num_tokens - max(_KEPT_ENDS, (group.window or 0) // 2)
            before = max(0, before) // self.block_size * self.block_size
            blocks = self._anchor.blocks[0, row, group.first_read(before) // self.block_size : full]
            nodes = self.index.blocks.node_at[blocks].astype(np.int64)
            window.keep(nodes[nodes != NONE])

    def _commit(self, row: int, chain: Chain, full: int) -> tuple[TableUpdate, ...]:
        """Make the first `full` blocks of `row` findable."""
        first = int(self._committed[row])
        if full <= first or not self.index.capacity:
            return ()
        self._make_nodes(full - first)
        blocks = self._anchor.blocks[0, row, :full]
        places = self.index.register(chain, blocks, first)
        found = places.blocks
        upto = first + len(found)
        own = blocks[first:upto].copy()
        self._committed[row] = full if upto == full else self._anchor.blocks.shape[2]
        self.swapping.registered(own[found == own], places.slots)
        changed: dict[BlockTables, tuple[TableUpdate, ...]] = {}
        taken, new = self._share(self._anchors, self._anchor, row, np.arange(first, upto), own[None], found[None])
        if len(taken):
            self.index.mark_used(taken)
        if new and self.row_tables.anchor_has_bytes:
            changed[self._anchor] = new
        for window, (_, table) in zip(self.index.windows, self.row_tables.others, strict=True):
            start = max(first, int(table.starts[row]))
            if start >= upto:
                continue
            nodes = self.index.blocks.nodes_in(found[start - first :])
            own = table.blocks[:, row, start:upto].copy()
            window_found, replaced = self.index.windows.attach(window, nodes, own)
            self.swapping.replaced(replaced)
            taken, new = self._share(self._allocator, table, row, np.arange(start, upto), own, window_found)
            window.mark_used(nodes[window_found[0] != own[0]])
            if new:
                changed[table] = new
        return self.row_tables.updates(changed) if changed else ()

    def _share(
        self, allocator: BlockAllocator, table: BlockTables, row: int, slots: Index, own: Int32, found: Int32
    ) -> tuple[BlockIds, tuple[TableUpdate, ...]]:
        """Publish those of `own` [tables, slots] that were registered; replace the others in `row` by `found`, known before.

        Returns the blocks that had no reference before, and the table entries.
        """
        known = np.flatnonzero(found[0] != own[0])
        if not len(known):
            allocator.publish(own.ravel())
            return own[0, :0], ()
        allocator.publish(np.delete(own, known, axis=1).ravel())
        taken = allocator.retain(found[:, known].ravel())
        allocator.release(own[:, known].ravel())
        return taken, table.replace(row, slots[known], found[:, known])

    def _make_nodes(self, num: int) -> None:
        """Let the index have room for `num` more nodes, where they need not lie in blocks."""
        if not self.row_tables.anchor_has_bytes:
            lacking = self.index.num_nodes + num - self.index.capacity
            if lacking > 0:
                self.swapping.evict_nodes(max(lacking, self.index.capacity // _EVICTED_SHARE))

    def reset(self) -> None:
        """Forget all cached prefixes. Rows keep their blocks."""
        self.swapping.reset(self.index.reset())
        self._committed[:] = self._anchor.blocks.shape[2]  # their parents are no longer findable
        self._committed[self._anchor.lengths == 0] = 0

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
            self.swapping.make_room(lacking, 0 if self.host.demotes else num_cached // _EVICTED_SHARE, hit)
        return self._allocator.allocate(n)

    # -- the host tier -------------------------------------------------------------------------------------------

    def keep_for(self, name: str, row: int, chain: Chain, num_tokens: int) -> None:
        """Record that sequence `name` leaves `row` and will return.

        The first `num_tokens` tokens, those of `chain`, are computed and committed. The last, partly filled block is
        kept, unless no slot is available or the blocks before it are not all findable.
        """
        full, rest = divmod(num_tokens, self.block_size)
        keeps = rest and self._committed[row] == full
        tail = [table.blocks[:, row, full] for table in self.tables] if keeps else [self._anchor.blocks[0, row, :0]]
        self.swapping.suspended.keep(name, chain, num_tokens, np.concatenate(tail))

    def set_swap_costs(self, *, least_chance: float, promotes: bool) -> None:
        """Set which swaps are worth their cost from now on.

        `least_chance` is the probability of reuse from which demoting a block is worth it (1 or more: never); `promotes`
        says whether promoting is.
        """
        self.host.least_chance, self.host.promotes = least_chance, promotes

    def check_invariants(self) -> None:
        """Recompute every derived fact from the tables. Raises AssertionError naming what does not hold."""
        findable = self.index.blocks.used
        tables = [t.of(int(row)).ravel() for t in self.tables for row in np.flatnonzero(t.lengths)]
        if self.row_tables.anchor_has_bytes:
            self._allocator.check_invariants(tables, np.concatenate((findable, self.index.windows.blocks)))
        else:
            self._allocator.check_invariants(tables, self.index.windows.blocks)
            rows = np.flatnonzero(self._anchor.lengths)
            self._anchors.check_invariants([self._anchor.of(int(row))[0] for row in rows], findable)
        self.index.check_invariants()
        self.swapping.check_invariants(findable)
        self.row_tables.check_invariants()
        for window in self.index.windows:
            blocks = window.blocks_of(window.nodes)
            idle = (self.pool.references(blocks.ravel()) == 0).reshape(blocks.shape)
            assert (idle == idle[:1]).all(), "a node's window blocks are not all in use, or not"
            waits = window.evictable(window.nodes)
            assert (waits == idle[0]).all(), "window blocks without a reference wait for no eviction, or others do"


def _most_nodes(groups: Sequence[LayerGroup], num_places: int, block_size: int, num_rows: int, max_slots: int) -> int:
    """The most nodes of an index of window blocks in `num_places` blocks and slots.

    Where no layer reads all tokens, a sequence has a node for each block of its tokens, but window blocks for its last
    ones only: there are nodes for as many sequences of `max_slots` blocks as have window blocks or rows, and some more.
    """
    if groups[0].window is None:
        return num_places
    per_place = -(-max_slots // blocks_to_hold(groups, max_slots, block_size))
    return min(num_places * per_place, num_rows * max_slots) + num_places * _SPARE_NODES


def _in_order(some: BlockIds, blocks: BlockIds) -> BlockIds:
    """`some` of `blocks`, in the order of their first occurrence in `blocks`."""
    places = np.flatnonzero(np.isin(blocks, some))
    _, first = np.unique(blocks[places], return_index=True)
    return blocks[places[np.sort(first)]]
