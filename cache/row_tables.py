"""The block tables of rows: what each row holds, and what of it other rows hold too.

Where all layers read all tokens, a row has one table (`RowTables`). With groups of layers it has several, and those of windows
give blocks back (grouped_tables.py). With states it has one more (state_tables.py, where `tables_for` makes one of the three).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from .block_table import BlockTables, Index, Int32, TableUpdate, merged
from .layer_groups import LayerGroup, most_columns_in
from .pinned_prefixes import PinnedPrefixes
from .prefix_index import PrefixHit, PrefixIndex
from .swapping import Swapping

Updates = tuple[TableUpdate, ...]
BlockMoves = tuple[BlockIds, BlockIds]  # sources and targets
Computed = Callable[[Index], Index]  # of rows: the tokens that are computed and that nothing behind them computes again


class RowTables:
    """A table of each of `num_rows` rows, with a block of `pool` for each `block_size` of its tokens.

    `max_tokens` is the effective limit of a row: no more than the whole pool holds when all of it is mapped.

    Methods that change what rows hold name what else they change: `swapping` takes blocks, evicting cached ones if it must, and
    its index learns which blocks are in use. One that raises NoFreeBlocks has changed nothing, though blocks that windows have
    passed may be released.
    """

    num_tables = 1  # those that grow with the tokens of a row

    def __init__(
        self,
        pool: BlockAllocator,
        block_size: int,
        num_rows: int,
        max_tokens: int,
        groups: tuple[LayerGroup, ...] = (LayerGroup(),),
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        self.pool, self.block_size, self.groups = pool, block_size, groups
        most_columns = most_columns_in(groups, pool.capacity, block_size, -(-max_tokens // block_size))
        # Of one row; the newest token is not in the cache yet.
        self.max_tokens = min(max_tokens, most_columns * block_size + 1)
        # The prefix index has nodes for the blocks of this table.
        self.anchor = BlockTables(num_rows, -(-self.max_tokens // block_size))
        self.anchors = pool
        self.others: tuple[tuple[LayerGroup, BlockTables], ...] = ()  # the groups of other tables
        self.with_bytes: tuple[BlockTables, ...] = (self.anchor,)
        self.pins = PinnedPrefixes(pool)  # beside what rows hold

    def emptied(self, pool: BlockAllocator) -> RowTables:
        """The same tables without entries, for blocks of `pool`."""
        return type(self)(pool, self.block_size, len(self.anchor.lengths), self.max_tokens, self.groups)

    @property
    def window_groups(self) -> list[LayerGroup]:
        """The groups with blocks that belong to nodes of the index."""
        return []

    # -- what rows hold ----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Index:
        """The blocks of tokens that the tables of each row reach. Read-only."""
        return self.anchor.lengths

    @property
    def num_shared(self) -> int:
        """Blocks saved by sharing: table entries and pinned blocks minus distinct live blocks."""
        held = sum(int(table.lengths.sum() - table.starts.sum()) * table.num_tables for table in self.with_bytes)
        return held + self.pins.num_blocks - self.pool.counts().live

    def short(self, rows: Index, upto: Index) -> Index:
        """The `rows` with tables that do not reach `upto[i]` tokens."""
        return rows[upto > self.anchor.lengths[rows] * self.block_size]

    def held_blocks(self, rows: Index) -> Index:
        """Blocks in the tables of each of `rows`, all groups together."""
        held = np.zeros(len(rows), np.int64)
        for table in self.with_bytes:
            held += table.held(rows) * table.num_tables
        return held

    def sole_blocks(self, rows: Index) -> Index:
        """Blocks that only this row holds, for each of `rows`: what releasing the row gains."""
        if not self.num_shared:
            return self.held_blocks(rows)
        sole = np.zeros(len(rows), np.int64)
        for table in self.with_bytes:
            of_rows = np.repeat(np.arange(len(rows)), table.held(rows))
            for blocks in table.of_all(rows):
                sole += np.bincount(of_rows, self.pool.references(blocks) == 1, len(rows)).astype(np.int64)
        return sole

    def sole_tokens(self, rows: Index, computed: Index) -> Index:
        """Of the `computed[i]` tokens of each of `rows`, those in blocks that no other row holds."""
        if not self.num_shared:
            return computed
        of_rows = np.repeat(np.arange(len(rows)), self.anchor.held(rows))
        shared = np.bincount(of_rows, self.anchors.references(self.anchor.of_all(rows)[0]) > 1, len(rows))
        tokens: Index = np.maximum(computed - shared.astype(np.int64) * self.block_size, 0)
        return tokens

    def rows_with(self, blocks: Int32) -> Index:
        """Rows with one of `blocks` in their tables, lowest first."""
        found = []
        for table in self.with_bytes:
            rows, columns = table.entries(np.flatnonzero(table.lengths))
            found.append(rows[np.isin(table.blocks[:, rows, columns], blocks).any(axis=0)])
        return np.unique(np.concatenate(found))

    def column_of(self, row: int, block: int) -> int | None:
        """The column of `block` in the tables of `row`, which holds it; None: it holds a part of the row's state."""
        columns = [np.nonzero(table.of(row) == block)[1] + table.starts[row] for table in self.with_bytes]
        return int(np.concatenate(columns)[0])

    def tail_of(self, row: int, num_tokens: int) -> BlockIds:
        """The blocks of `row` that no node stands for where its first `num_tokens` tokens are computed: the partly filled last
        ones, and those of its state.
        """
        full, rest = divmod(num_tokens, self.block_size)
        return np.concatenate([self.anchor.blocks[:0, row, 0], *(t.blocks[:, row, full] for t in self.with_bytes if rest)])

    def may_keep_tail(self, row: int, num_tokens: int, index: PrefixIndex) -> bool:
        """Whether `tail_of` is of use to a row that goes on from there."""
        return num_tokens % self.block_size > 0

    def deferred(self, rows: Index, ends: Index) -> None:
        """Chunks of `rows` up to `ends[i]` tokens were not computed, or in a part of the layers only."""

    # -- what rows will hold -----------------------------------------------------------------------------------------

    def most_nodes(self, num_slots: int) -> int:
        """The most nodes that a prefix index of these tables has: one in each block, and in each of `num_slots` host slots."""
        return self.pool.num_blocks + num_slots

    def provide_anchors(self, num_nodes: int) -> None:
        """Let an index have `num_nodes` nodes beside the entries of all rows. While no row has any."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks in all tables together that a sequence of `tokens` tokens holds, once the last of them is computed."""
        return -(-tokens // self.block_size)

    def blocks_for_each(self, tokens: Index) -> Index:
        """`blocks_for` each of `tokens`."""
        return -(-tokens // self.block_size)

    def needed(self, upto: int, hit: PrefixHit, index: PrefixIndex) -> int:
        """Blocks that a new row with `hit` and the chunk after it take from those available: new ones, and found ones without
        references.
        """
        found = int(np.count_nonzero(self.pool.references(hit.blocks))) if len(hit.blocks) else 0
        return self.blocks_for(upto) - found

    def can_fork(self, parent: int, num_tokens: int, computed: int) -> bool:
        """Whether row `parent`, with `computed` tokens, holds what a row reads that shares the first `num_tokens` of them."""
        return num_tokens <= computed

    def shared_by_fork(self, num_tokens: int) -> int:
        """The blocks that a row shares that begins with the first `num_tokens` tokens of another one."""
        return num_tokens // self.block_size

    def in_all_tables(self, blocks: int, known: Index, left: Index) -> int:
        """Blocks in all tables of sequences that together have `blocks` in a table without a window.

        A sequence with `known` tokens now is taken to have `known + left` at most, and its share of the growth before that.
        """
        return blocks

    # -- changes -----------------------------------------------------------------------------------------------------

    def extend(self, rows: Index, upto: Index, swapping: Swapping, hit: PrefixHit | None = None) -> Updates:
        """Extend the tables of `rows` (distinct) to cover `upto[i]` tokens each. `hit`: as for `Swapping.allocate`."""
        need = np.maximum((upto + (self.block_size - 1)) // self.block_size - self.anchor.lengths[rows], 0)
        return self.anchor.append(rows, need, swapping.allocate(int(need.sum()), hit)[None])

    def advance(self, rows: Index, upto: Index, computed: Computed, swapping: Swapping) -> Updates:
        """`extend` for decodes, each at a block border; windows give up what `release_passed` would release."""
        return self.extend(rows, upto, swapping)

    def reach(self, row: int, start: int, upto: int, room: int, swapping: Swapping) -> tuple[int, Updates, BlockMoves | None]:
        """`CacheManager.reach`: the tokens reached, the table entries, and the blocks to copy. Here a row has the entries of
        its prompt from its admission on.
        """
        return upto, (), None

    def release_passed(self, rows: Index, computed: Computed, swapping: Swapping) -> None:
        """`CacheManager.release_passed`. Here every token is read by all behind it."""

    def fork(self, parent: int, child: int, num_tokens: int, upto: int, swapping: Swapping) -> Updates:
        """Share the full blocks of the first `num_tokens` tokens of row `parent` with row `child` (empty), and make room for
        `num_tokens`, and for `upto` in the tables without a window.
        """
        full = num_tokens // self.block_size
        blocks = self.anchor.blocks[:, parent, :full].copy()
        self.pool.retain(blocks.ravel())
        shared = self.anchor.append(np.array([child]), np.array([full]), blocks)
        return merged([shared, self.extend(np.array([child]), np.array([upto]), swapping)])

    def begin(
        self, row: int, hit: PrefixHit, num_tail: int | None, upto: int, swapping: Swapping
    ) -> tuple[Updates, BlockMoves | None]:
        """Let `row` (empty) begin with the blocks of `hit` and room for `upto` tokens; in tables of windows with what the next
        token reads, and room for the `num_tail` tokens of its tail (None: it has none). There must be enough blocks. What `hit`
        has on the host gets blocks too.

        Returns the table entries, and the blocks to copy: the state behind `hit`.
        """
        shared = self._share_nodes(row, hit, swapping.index)
        extended = self.extend(np.array([row]), np.array([upto]), swapping, hit)
        self._promote_nodes(row, hit, swapping)
        return merged([shared, extended]), None

    def begin_at(
        self, row: int, start: int, upto: int, copied: Int32, swapping: Swapping
    ) -> tuple[list[BlockIds], Updates] | None:
        """Let `row`, which has the first `start` blocks of its tokens, go on behind `upto` of them, which will be computed.

        Returns for each of `window_groups` its blocks [tables, n] that lack bytes then, up to that one, and the table entries.
        None, and no change, if blocks are short or some are among `copied`, of which copies are due. Here there are no groups.
        """
        return [], ()

    def publish(self, row: int, first: int, findable: BlockIds, swapping: Swapping) -> Updates:
        """Publish the blocks of `row` from entry `first` on: `findable` hold its tokens now, and take the
        places of other blocks of the row.
        """
        own = self.anchor.blocks[:, row, first : first + len(findable)].copy()
        taken, updates = self._publish(self.anchors, self.anchor, row, first, own, findable[None])
        if len(taken):
            swapping.index.mark_used(taken)
        return updates

    def keep_ends(self, row: int, num_tokens: int, is_prompt: bool, index: PrefixIndex) -> None:
        """Keep what requests may read that go on behind the `num_tokens` computed tokens of `row`: all of a prompt if
        `is_prompt`.
        """

    def release(self, rows: Index, index: PrefixIndex) -> None:
        """`CacheManager.release`."""
        blocks = self.anchor.of_all(rows)[0]
        evictable = self.anchors.release(blocks)
        if len(evictable):
            index.mark_evictable(evictable if len(rows) == 1 else _in_order(evictable, blocks))
        self.anchor.release(rows)

    def check_invariants(self, index: PrefixIndex) -> None:
        """Check entries and references. Raises AssertionError."""
        findable = np.concatenate((index.blocks.used, index.windows.blocks))
        self._check_pool(self.pool, self.with_bytes, findable, [self.pins.references(index)])
        assert not self.anchor.starts.any(), "a block is passed that all tokens read"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _share_nodes(self, row: int, hit: PrefixHit, index: PrefixIndex) -> Updates:
        if not len(hit.blocks):
            return ()
        taken = self.anchors.retain(hit.blocks)
        if len(taken):
            index.mark_used(taken)
        return self.anchor.append(np.array([row]), np.array([len(hit.blocks)]), hit.blocks[None])

    def _promote_nodes(self, row: int, hit: PrefixHit, swapping: Swapping) -> None:
        if len(hit.slots):
            swapping.promote(hit.slots, self.anchor.blocks[0, row, len(hit.blocks) : len(hit.nodes)])

    @staticmethod
    def _publish(
        allocator: BlockAllocator, table: BlockTables, row: int, first: int, own: Int32, findable: Int32
    ) -> tuple[BlockIds, Updates]:
        """Publish those of `own` [tables, columns] that were registered; replace the others in `row` by `findable`.

        Returns the blocks that had no reference before, and the table entries.
        """
        replaced = np.flatnonzero(findable[0] != own[0])
        if not len(replaced):
            allocator.publish(own.ravel())
            return own[0, :0], ()
        allocator.publish(np.delete(own, replaced, axis=1).ravel())
        taken = allocator.retain(findable[:, replaced].ravel())
        allocator.release(own[:, replaced].ravel())
        return taken, table.replace(row, first + replaced, findable[:, replaced])

    @staticmethod
    def _check_pool(
        pool: BlockAllocator, tables: tuple[BlockTables, ...], findable: Int32, pinned: Iterable[Int32] = ()
    ) -> None:
        of_rows = [t.of(int(row)).ravel() for t in tables for row in np.flatnonzero(t.lengths)]
        pool.check_invariants([*of_rows, *pinned], findable)


def _in_order(some: BlockIds, blocks: BlockIds) -> BlockIds:
    """`some` of `blocks`, in the order of their first occurrence in `blocks`."""
    places = np.flatnonzero(np.isin(blocks, some))
    _, first = np.unique(blocks[places], return_index=True)
    return blocks[places[np.sort(first)]]
