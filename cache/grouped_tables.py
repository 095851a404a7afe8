"""The block tables of rows where layers are in groups, and windows give up the blocks that no later token reads.

What a group with a window has computed for a node of the prefix index belongs to that node as long as it is kept
(window_blocks.py). The index's first table, the anchor, is that of the layers that read all tokens. Where there are none, its
entries are places without bytes. Layers with states have a table more (state_tables.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from ..allocator.errors import NoFreeBlocks
from .block_table import NO_UPDATE, BlockTables, Index, Int32, TableUpdate, merged
from .layer_groups import LayerGroup, blocks_to_hold
from .prefix_index import PrefixHit, PrefixIndex
from .prefix_tree import NONE
from .row_tables import BlockMoves, Computed, RowTables, Updates
from .swapping import Swapping
from .window_blocks import WindowBlocks

_ANCHORS_PER_EXTENT = 1024  # an allocation looks at one extent
# Of the index for each block and slot, where nodes have no bytes; more than those of sequences
_SPARE_NODES = 4
# Tokens; the least from the end of a prompt up behind which requests find what windows read
_KEPT_ENDS = 64


class GroupedTables(RowTables):
    """The tables of all `groups`: the anchor, and those of `others`. All tables of a row reach as many tokens, but while its
    prompt is computed those of windows follow chunk by chunk.
    """

    def __init__(
        self, pool: BlockAllocator, block_size: int, num_rows: int, max_tokens: int, groups: tuple[LayerGroup, ...]
    ) -> None:
        super().__init__(pool, block_size, num_rows, max_tokens, groups)
        others = [group for group in groups if not group.is_state]
        self.num_tables = sum(group.num_tables for group in others)
        self._anchor_has_bytes = bool(others) and others[0].window is None  # some layer reads all tokens
        if self._anchor_has_bytes:
            first = others.pop(0)
            if first.num_tables > 1:
                others.insert(0, replace(first, num_tables=first.num_tables - 1))
        max_columns = self.anchor.blocks.shape[2]
        self.others = tuple((group, BlockTables(num_rows, max_columns, group.num_tables)) for group in others)
        self._all = ((LayerGroup(), self.anchor), *self.others)
        self._with_bytes = self._all if self._anchor_has_bytes else self.others
        self.with_bytes = tuple(table for _, table in self._with_bytes)

    @property
    def window_groups(self) -> list[LayerGroup]:
        return [group for group, _ in self.others]

    # -- what rows will hold -----------------------------------------------------------------------------------------

    def most_nodes(self, num_slots: int) -> int:
        """Where no layer reads all tokens, a sequence has a node for each block of its tokens, but window blocks for its last
        ones only: there are nodes for as many sequences of the greatest length as have window blocks or rows, and some more.
        """
        num_places = super().most_nodes(num_slots)
        if self._anchor_has_bytes:
            return num_places
        _, num_rows, max_columns = self.anchor.blocks.shape
        per_place = -(-max_columns // self.blocks_for(max_columns * self.block_size))
        return min(num_places * per_place, num_rows * max_columns) + num_places * _SPARE_NODES

    def provide_anchors(self, num_nodes: int) -> None:
        if not self._anchor_has_bytes:
            _, num_rows, max_columns = self.anchor.blocks.shape
            extents = -(-(1 + num_rows * max_columns + num_nodes) // _ANCHORS_PER_EXTENT)
            self.anchors = BlockAllocator(extents * _ANCHORS_PER_EXTENT, blocks_per_extent=_ANCHORS_PER_EXTENT)
            self.pins.anchors = self.anchors

    def blocks_for(self, tokens: int) -> int:
        return blocks_to_hold(self.groups, -(-tokens // self.block_size), self.block_size)

    def blocks_for_each(self, tokens: Index) -> Index:
        columns = -(-tokens // self.block_size)
        blocks = np.zeros(len(tokens), np.int64)
        for group in self.groups:
            most = group.most_columns(self.block_size)
            blocks += group.num_tables * (columns if most is None else np.minimum(columns, most))
        return blocks

    def needed(self, upto: int, hit: PrefixHit, index: PrefixIndex) -> int:
        needed = super().needed(upto, hit, index) if self._anchor_has_bytes else self.blocks_for(upto)
        if not hit.num_tokens:
            return needed
        for window, *_ in self._windows(index):
            nodes = index.windows.read_next(window, hit.nodes)
            nodes = nodes[window.have(nodes, on_host=False)]
            needed -= int(np.count_nonzero(self.pool.references(window.blocks_of(nodes).ravel())))
        return needed

    def can_fork(self, parent: int, num_tokens: int, computed: int) -> bool:
        has_all = (table.starts[parent] * self.block_size <= group.first_read(num_tokens) for group, table in self.others)
        return super().can_fork(parent, num_tokens, computed) and all(has_all)

    def shared_by_fork(self, num_tokens: int) -> int:
        full = num_tokens // self.block_size
        return sum(
            table.num_tables * (full - group.first_read(num_tokens) // self.block_size) for group, table in self._with_bytes
        )

    def in_all_tables(self, blocks: int, known: Index, left: Index) -> int:
        num_full = sum(group.num_tables for group in self.groups if group.window is None)
        columns = -(-known // self.block_size)
        share = max(0.0, (blocks - int(columns.sum())) / max(1, int((-(-left // self.block_size)).sum())))
        then = known + np.ceil(left * min(1.0, share)).astype(np.int64)
        of_full = num_full * int((-(-then // self.block_size)).sum())
        return blocks * num_full + int(self.blocks_for_each(then).sum()) - of_full

    # -- changes -----------------------------------------------------------------------------------------------------

    def extend(self, rows: Index, upto: Index, swapping: Swapping, hit: PrefixHit | None = None) -> Updates:
        return self._extend(rows, upto, upto, swapping, hit)

    def advance(self, rows: Index, upto: Index, computed: Computed, swapping: Swapping) -> Updates:
        """A block that is passed becomes the new one of its table, if no other row has it and it is not findable. So most
        decodes of a window need no block.
        """
        known = computed(rows)
        reused, num_fresh = [], len(rows) if self._anchor_has_bytes else 0
        for window, group, table in self._windows(swapping.index):
            starts = table.starts[rows]
            passed = group.first_read(known) // self.block_size - starts
            own = (passed == 1) & self.pool.are_sole(table.blocks[0, rows, starts])
            released = np.flatnonzero((passed > 0) & ~own)
            if len(released):
                ends = starts[released] + passed[released]
                self._release_entries(window, table, rows[released], starts[released], ends)
                starts[released] = ends
                swapping.trim()
            reused.append((starts, own))
            num_fresh += table.num_tables * (len(rows) - int(np.count_nonzero(own)))
        fresh = swapping.allocate(num_fresh)
        ones = np.ones(len(rows), np.int64)
        updates: list[TableUpdate] = []
        if self._anchor_has_bytes:
            updates += self.anchor.append(rows, ones, fresh[None, : len(rows)])
            fresh = fresh[len(rows) :]
        else:
            self.anchor.append(rows, ones, self.anchors.allocate(len(rows))[None])
        for (_, table), (starts, own) in zip(self.others, reused, strict=True):
            blocks = table.blocks[:, rows, starts]
            lacking = np.flatnonzero(~own)
            if len(lacking):
                taken = table.num_tables * len(lacking)
                blocks[:, lacking] = fresh[:taken].reshape(table.num_tables, -1)
                fresh = fresh[taken:]
            table.starts[rows] = starts + own
            updates += table.append(rows, ones, blocks)
        return tuple(updates)

    def reach(self, row: int, start: int, upto: int, room: int, swapping: Swapping) -> tuple[int, Updates, BlockMoves | None]:
        tables = [table for _, table in self._all if table.lengths[row] * self.block_size < upto]
        if not tables:
            return upto, (), None
        each = sum(table.num_tables for table in tables)
        have = int(tables[0].lengths[row])  # of all of them: they were extended together
        more = min(self.pool.available, max(room, each)) // each
        reached = min(upto, (have + more) * self.block_size)
        if reached == have * self.block_size:
            return reached, (), None
        one, upto_each = np.array([row]), np.array([reached])
        return reached, self._extend(one, upto_each, upto_each, swapping), None

    def release_passed(self, rows: Index, computed: Computed, swapping: Swapping) -> None:
        known = computed(rows)
        for window, group, table in self._windows(swapping.index):
            if group.window is None:
                continue
            starts = group.first_read(known) // self.block_size
            before = table.starts[rows]
            behind = np.flatnonzero(starts > before)
            if len(behind):
                self._release_entries(window, table, rows[behind], before[behind], starts[behind])
        swapping.trim()

    def fork(self, parent: int, child: int, num_tokens: int, upto: int, swapping: Swapping) -> Updates:
        full = num_tokens // self.block_size
        one = np.array([child])
        updates: list[TableUpdate] = []
        for group, table in self._all:
            first = group.first_read(num_tokens) // self.block_size
            blocks = table.blocks[:, parent, first:full].copy()
            (self.anchors if table is self.anchor else self.pool).retain(blocks.ravel())
            table.starts[child] = table.lengths[child] = first
            shared = table.append(one, np.array([full - first]), blocks)
            updates += shared if table in self.with_bytes else ()
        return merged([tuple(updates), self._extend(one, np.array([upto]), np.array([num_tokens]), swapping)])

    def begin(
        self, row: int, hit: PrefixHit, num_tail: int | None, upto: int, swapping: Swapping
    ) -> tuple[Updates, BlockMoves | None]:
        index, one, reads = swapping.index, np.array([row]), []
        shared = self._share_nodes(row, hit, index)
        updates = list(shared or (NO_UPDATE,)) if self._anchor_has_bytes else []
        for window, _, table in self._windows(index):
            nodes = index.windows.read_next(window, hit.nodes)
            on_device = window.have(nodes, on_host=False)
            self.pool.retain(window.blocks_of(nodes[on_device]).ravel())
            window.mark_used(nodes[on_device])
            reads.append((window, table, nodes, on_device))
        returning = []
        for window, table, nodes, on_device in reads:  # all that is found is in use: these allocations do not evict it
            fresh = swapping.allocate(table.num_tables * int(np.count_nonzero(~on_device)), hit)
            blocks = np.empty((table.num_tables, len(nodes)), np.int32)
            blocks[:, on_device] = window.blocks_of(nodes[on_device])
            blocks[:, ~on_device] = fresh.reshape(table.num_tables, -1)
            table.starts[row] = table.lengths[row] = len(hit.nodes) - len(nodes)
            updates += table.append(one, np.array([len(nodes)]), blocks)
            returning.append((window, nodes[~on_device], blocks[:, ~on_device]))
        tail = np.array([hit.num_tokens + (num_tail or 0)])
        extended = self._extend(one, np.array([upto]), tail, swapping, hit)
        self._promote_nodes(row, hit, swapping)
        for window, nodes, blocks in returning:
            if len(nodes):
                swapping.promote_window_blocks(window, nodes, blocks)
        return merged([tuple(updates), extended]), None

    def begin_at(
        self, row: int, start: int, upto: int, copied: Int32, swapping: Swapping
    ) -> tuple[list[BlockIds], Updates] | None:
        one, lacking = np.array([row]), []
        for _, group, table in self._windows(swapping.index):
            if np.isin(table.blocks[:, row, start : table.lengths[row]], copied).any():
                return None
            first = int(group.first_read(upto * self.block_size)) // self.block_size
            lacking.append((first, max(0, upto - max(first, int(table.lengths[row])))))
        try:
            fresh = swapping.allocate(sum(t.num_tables * num for (_, t), (_, num) in zip(self.others, lacking, strict=True)))
        except NoFreeBlocks:
            return None
        if np.isin(fresh, copied).any():
            self.pool.release(fresh)
            return None
        of_groups, updates = [], [NO_UPDATE] * self._anchor_has_bytes
        for (window, _, table), (first, num) in zip(self._windows(swapping.index), lacking, strict=True):
            length = int(table.lengths[row])
            if (passed := min(first, length)) > table.starts[row]:
                self._release_entries(window, table, one, table.starts[one], np.array([passed]))
            if length < first:
                table.starts[row] = table.lengths[row] = first
            blocks, fresh = fresh[: table.num_tables * num], fresh[table.num_tables * num :]
            updates += table.append(one, np.array([num]), blocks.reshape(table.num_tables, -1))
            of_groups.append(table.blocks[:, row, max(first, start) : upto].copy())
        swapping.trim()
        return of_groups, tuple(updates)

    def publish(self, row: int, first: int, findable: BlockIds, swapping: Swapping) -> Updates:
        upto, index = first + len(findable), swapping.index
        changed = {self.anchor: super().publish(row, first, findable, swapping)}
        for window, _, table in self._windows(index):
            start = max(first, int(table.starts[row]))
            if start >= upto:
                continue
            nodes = index.blocks.nodes_in(findable[start - first :])
            own = table.blocks[:, row, start:upto].copy()
            theirs, replaced = index.windows.attach(window, nodes, own)
            swapping.free_slots(replaced)
            _, changed[table] = self._publish(self.pool, table, row, start, own, theirs)
            window.mark_used(nodes[theirs[0] != own[0]])
        if not any(changed.get(table) for _, table in self._with_bytes):
            return ()
        return tuple(u for _, table in self._with_bytes for u in changed.get(table) or (NO_UPDATE,) * table.num_tables)

    def keep_ends(self, row: int, num_tokens: int, is_prompt: bool, index: PrefixIndex) -> None:
        """Behind a prompt half a window is kept, or 64 tokens: the next turn of a chat may render the end of a template
        otherwise, and nodes are evicted from the end up.
        """
        if not is_prompt:
            return
        for window, group, _ in self._windows(index):
            before = num_tokens - max(_KEPT_ENDS, (group.window or 0) // 2)
            before = max(0, before) // self.block_size * self.block_size
            first = group.first_read(before) // self.block_size
            blocks = self.anchor.blocks[0, row, first : num_tokens // self.block_size]
            nodes = index.blocks.node_at[blocks].astype(np.int64)
            window.keep(nodes[nodes != NONE])

    def release(self, rows: Index, index: PrefixIndex) -> None:
        super().release(rows, index)
        for window, _, table in self._windows(index):
            blocks = table.of_all(rows)
            if len(self.pool.release(blocks.ravel())):
                self._wait_for_eviction(window, blocks, passed=False)
            table.release(rows)

    def check_invariants(self, index: PrefixIndex) -> None:
        if self._anchor_has_bytes:
            super().check_invariants(index)
        else:
            self._check_pool(self.pool, self.with_bytes, index.windows.blocks, [self.pins.references(index)])
            pinned = [index.blocks.of_node[nodes] for nodes in self.pins.nodes]
            self._check_pool(self.anchors, (self.anchor,), index.blocks.used, pinned)
        for group, table in self._all:
            assert (table.starts <= table.lengths).all(), "a row that begins behind its end"
            assert (table.lengths <= self.anchor.lengths).all(), "a row with more than its first table"
            assert group.window is not None or not table.starts.any(), "a block is passed that all tokens read"
        for window in index.windows:
            blocks = window.blocks_of(window.nodes)
            idle = (self.pool.references(blocks.ravel()) == 0).reshape(blocks.shape)
            assert (idle == idle[:1]).all(), "a node's window blocks are not all in use, or not"
            waits = window.evictable(window.nodes)
            assert (waits == idle[0]).all(), "window blocks without a reference wait for no eviction, or others do"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _extend(
        self, rows: Index, upto: Index, upto_of_windows: Index, swapping: Swapping, hit: PrefixHit | None = None
    ) -> Updates:
        """Extend the tables of `rows` to cover `upto[i]` tokens each, those of windows to cover `upto_of_windows[i]`."""
        wanted, of_windows = -(-upto // self.block_size), -(-upto_of_windows // self.block_size)
        needs = [
            np.maximum((wanted if group.window is None else of_windows) - table.lengths[rows], 0) for group, table in self._all
        ]
        counts = [table.num_tables * int(need.sum()) for (_, table), need in zip(self._all, needs, strict=True)]
        no_bytes = 0 if self._anchor_has_bytes else counts[0]
        blocks = swapping.allocate(sum(counts) - no_bytes, hit)
        updates: list[TableUpdate] = []
        for (_, table), need, count in zip(self._all, needs, counts, strict=True):
            if table is self.anchor and not self._anchor_has_bytes:
                table.append(rows, need, self.anchors.allocate(count)[None])
                continue
            own, blocks = blocks[:count], blocks[count:]
            updates += table.append(rows, need, own.reshape(table.num_tables, -1))
        return tuple(updates)

    def _windows(self, index: PrefixIndex) -> list[tuple[WindowBlocks, LayerGroup, BlockTables]]:
        """The window blocks of each of the other groups, the group and its tables."""
        return [(window, *other) for window, other in zip(index.windows, self.others, strict=False)]

    def _release_entries(self, window: WindowBlocks, table: BlockTables, rows: Index, starts: Index, ends: Index) -> None:
        """Release the entries of `rows` from `starts[i]` to `ends[i]`, with which their tables begin."""
        held = ends - starts
        if len(rows) == 1:
            blocks = table.blocks[:, int(rows[0]), int(starts[0]) : int(ends[0])]
        else:
            columns = np.arange(int(held.sum())) + np.repeat(starts - np.cumsum(held) + held, held)
            blocks = table.blocks[:, np.repeat(rows, held), columns]
        table.starts[rows] = ends
        if len(self.pool.release(blocks.ravel())):
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
