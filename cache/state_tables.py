"""The block tables of rows where layers have states, beside or instead of K and V.

A row has one table more, of the blocks with its state, from its admission on. A step changes the state in place, so a state
that others find is no row's: a hit copies it, a fork copies its parent's, and a row that goes on from one that it has given
away gets a copy. States are kept where prompts part, and behind the last full block that a row begins with: `reach` cuts chunks
there. With a host tier the state of a preempted sequence waits there with its partly filled last block, and so do states that
others find.
"""

from __future__ import annotations

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from ..allocator.errors import NoFreeBlocks
from .block_table import NO_UPDATE, BlockTables, Index, Int32, TableUpdate
from .grouped_tables import GroupedTables
from .layer_groups import LayerGroup
from .prefix_index import NO_HIT, PrefixHit, PrefixIndex
from .prefix_tree import NONE
from .row_tables import BlockMoves, Computed, RowTables, Updates
from .swapping import Swapping
from .window_blocks import WindowBlocks


def tables_for(
    groups: tuple[LayerGroup, ...], pool: BlockAllocator, block_size: int, num_rows: int, max_tokens: int
) -> RowTables:
    """The tables of `num_rows` rows for layers in `groups`, those without a window first and that of states last, out of
    `pool`.
    """
    if groups == (LayerGroup(),):
        return RowTables(pool, block_size, num_rows, max_tokens)
    kind = StateTables if groups[-1].is_state else GroupedTables
    return kind(pool, block_size, num_rows, max_tokens, groups)


class StateTables(GroupedTables):
    """The tables of `groups`, and that of states, the last of them: one for each row, whatever the number of its tokens."""

    def __init__(
        self, pool: BlockAllocator, block_size: int, num_rows: int, max_tokens: int, groups: tuple[LayerGroup, ...]
    ) -> None:
        super().__init__(pool, block_size, num_rows, max_tokens, groups)
        self._group = groups[-1]
        self._table = BlockTables(num_rows, self._group.num_tables)
        self.with_bytes += (self._table,)
        self._stops: dict[int, list[int]] = {}  # by row: where states are to be kept, in tokens
        # By row: the end of a deferred chunk; before it some layers' states may be behind more tokens than others'.
        self._unsure: dict[int, int] = {}

    @property
    def window_groups(self) -> list[LayerGroup]:
        return [*super().window_groups, self._group]

    def column_of(self, row: int, block: int) -> int | None:
        return None if block in self._table.of(row) else super().column_of(row, block)

    def tail_of(self, row: int, num_tokens: int) -> BlockIds:
        full, rest = divmod(num_tokens, self.block_size)
        of_kv = [table.blocks[:, row, full] for table in self.with_bytes[:-1] if rest]
        return np.concatenate([*of_kv, self._table.of(row)[0]])

    def may_keep_tail(self, row: int, num_tokens: int, index: PrefixIndex) -> bool:
        """A state that belongs to a node is found there."""
        is_nodes = self._states(index).blocks[0].node_at[self._table.of(row)[0, 0]] != NONE
        return num_tokens > 0 and not is_nodes and num_tokens >= self._unsure.get(row, 0)

    def deferred(self, rows: Index, ends: Index) -> None:
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self._unsure[row] = max(end, self._unsure.get(row, 0))

    def needed(self, upto: int, hit: PrefixHit, index: PrefixIndex) -> int:
        """A found state is copied, and may not be evicted for that."""
        idle = np.count_nonzero(self.pool.references(self._found(hit, index).ravel()) == 0)
        return super().needed(upto, hit, index) + int(idle)

    def can_fork(self, parent: int, num_tokens: int, computed: int) -> bool:
        """A state is that behind all computed tokens: the other row begins with a copy of it, before its parent goes on."""
        is_behind = num_tokens == computed > 0 and num_tokens >= self._unsure.get(parent, 0)
        return is_behind and super().can_fork(parent, num_tokens, computed)

    # -- changes -----------------------------------------------------------------------------------------------------

    def extend(self, rows: Index, upto: Index, swapping: Swapping, hit: PrefixHit | None = None) -> Updates:
        return self._and_state(super().extend(rows, upto, swapping, hit))

    def advance(self, rows: Index, upto: Index, computed: Computed, swapping: Swapping) -> Updates:
        return self._and_state(super().advance(rows, upto, computed, swapping))

    def reach(self, row: int, start: int, upto: int, room: int, swapping: Swapping) -> tuple[int, Updates, BlockMoves | None]:
        own, moves = self._own_state(row, swapping)
        upto = min([upto, *(stop for stop in self._stops.get(row, ()) if stop > start)])
        reached, updates, _ = super().reach(row, start, upto, room, swapping)
        return reached, self._and_state(updates, own), moves

    def begin(
        self, row: int, hit: PrefixHit, num_tail: int | None, upto: int, swapping: Swapping
    ) -> tuple[Updates, BlockMoves | None]:
        index, num_blocks = swapping.index, self._group.num_tables
        found = self._found(NO_HIT if num_tail is not None else hit, index)
        if found.size:  # not to be evicted for the blocks of this row
            self.pool.retain(found.ravel())
            self._states(index).mark_used(hit.nodes[-1:])
        updates, _ = super().begin(row, hit, num_tail, upto, swapping)
        fresh = swapping.allocate(num_blocks, hit)
        (own,) = self._table.append(np.array([row]), np.array([num_blocks]), fresh[None])
        full = (upto - 1) // self.block_size
        if index.capacity:
            stops = {min(len(hit.matched), full), full}
            self._stops[row] = [stop * self.block_size for stop in stops if stop > len(hit.nodes)]
        if len(hit.nodes) and num_tail is None:  # it was found once: requests may go different ways behind it
            self._states(index).keep(hit.nodes[-1:])
            if not found.size:
                swapping.copy_state_in(self._states(index), hit.nodes[-1:], self._table.of(row))
            elif len(self.pool.release(found.ravel())):
                self._states(index).mark_evictable(hit.nodes[-1:], passed=False)
        return self._and_state(updates, own), (found[:, 0], fresh) if found.size else None

    def fork(self, parent: int, child: int, num_tokens: int, upto: int, swapping: Swapping) -> Updates:
        updates, num_blocks = super().fork(parent, child, num_tokens, upto, swapping), self._group.num_tables
        (own,) = self._table.append(np.array([child]), np.array([num_blocks]), swapping.allocate(num_blocks)[None])
        return self._and_state(updates, own)

    def begin_at(
        self, row: int, start: int, upto: int, copied: Int32, swapping: Swapping
    ) -> tuple[list[BlockIds], Updates] | None:
        own = self._table.of(row).T.copy()
        begun = None if np.isin(own, copied).any() else super().begin_at(row, start, upto, copied, swapping)
        if begun is None:
            return None
        behind = upto * self.block_size  # the state there is kept as well
        self._stops[row] = [behind, *(stop for stop in self._stops.get(row, ()) if stop > behind)]
        return [*begun[0], own], self._and_state(begun[1])

    def publish(self, row: int, first: int, findable: BlockIds, swapping: Swapping) -> Updates:
        return self._and_state(super().publish(row, first, findable, swapping))

    def keep_ends(self, row: int, num_tokens: int, is_prompt: bool, index: PrefixIndex) -> None:
        """The state of `row` is kept with the node of its last token, if `reach` has cut a chunk there."""
        super().keep_ends(row, num_tokens, is_prompt, index)
        if num_tokens not in self._stops.get(row, ()):
            return
        self._stops[row].remove(num_tokens)  # once: later the state may be behind some tokens of a chunk that was deferred
        states, last = self._states(index), self.anchor.blocks[0, row, num_tokens // self.block_size - 1]
        nodes = index.blocks.node_at[[last]].astype(np.int64)
        if nodes[0] != NONE and not states.have(nodes)[0]:
            blocks = self._table.of(row).T.copy()
            index.windows.attach(states, nodes, blocks)
            self.pool.publish(blocks.ravel())

    def release(self, rows: Index, index: PrefixIndex) -> None:
        super().release(rows, index)
        rows = rows[self._table.lengths[rows] > 0]
        if not len(rows):
            return
        blocks = self._table.of_all(rows).reshape(len(rows), -1).T
        if len(self.pool.release(blocks.ravel())):
            self._wait_for_eviction(self._states(index), blocks, passed=True)
        self._table.release(rows)
        for row in rows.tolist():
            self._stops.pop(row, None)
            self._unsure.pop(row, None)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _and_state(self, updates: Updates, own: TableUpdate = NO_UPDATE) -> Updates:
        """The entries of the other tables, and `own`, those of the state's; nothing if no table changes."""
        if not updates and own is NO_UPDATE:
            return ()
        return (*(updates or (NO_UPDATE,) * self.num_tables), own)

    def _states(self, index: PrefixIndex) -> WindowBlocks:
        """The states that belong to nodes."""
        *_, states = index.windows
        return states

    def _found(self, hit: PrefixHit, index: PrefixIndex) -> BlockIds:
        """The blocks of the state behind `hit`, [num_blocks, 1]; [num_blocks, 0] if it is empty, or has none on the device."""
        states, last = self._states(index), hit.nodes[-1:]
        return states.blocks_of(last[states.have(last, on_host=False)])

    def _own_state(self, row: int, swapping: Swapping) -> tuple[TableUpdate, BlockMoves | None]:
        """Let the state of `row` be no node's: the row gets a copy, or the node loses it if there is no room for two.

        Returns the table entries and the blocks to copy.
        """
        states, blocks = self._states(swapping.index), self._table.of(row)[0].copy()
        node = states.blocks[0].node_at[blocks[:1]].astype(np.int64)
        if node[0] == NONE:
            return NO_UPDATE, None
        try:
            fresh = swapping.allocate(len(blocks))
        except NoFreeBlocks:
            self.pins.end_with(blocks, swapping.index)
            swapping.trim()
            swapping.forget_window_blocks(states, node)
            return NO_UPDATE, None
        (update,) = self._table.replace(row, np.arange(len(blocks)), fresh[None])
        if len(self.pool.release(blocks)):  # else a pin holds it
            states.mark_evictable(node, passed=True)
        return update, (blocks, fresh)
