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

With a disk tier (disk_index.py), committed blocks are also written to files; `put` gives a new row what was read of them.

With windows:

    release_passed   give up the blocks that no later token reads
    reach            extend the tables of windows for the next chunk of a prompt
    advance          both, for decodes at a block border
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..allocator.blocks import BlockIds
from ..allocator.errors import NoFreeBlocks
from ..allocator.pool_view import PoolView
from .block_table import BlockBytes, BlockCopies, Index, Int32, TableUpdate, merged
from .cache_events import CacheEventLog
from .disk_index import KeptPrefixes
from .eviction import Lru, PolicyFactory
from .prefix_hash import Chain, NullHasher, PrefixHasher
from .prefix_index import PrefixHit, PrefixIndex
from .resizing import PoolResizer
from .retention import Retention
from .reuse_density import ReuseDensity
from .row_tables import BlockMoves, Computed, RowTables
from .swapping import Swapping
from .window_blocks import WindowBlocksOfGroups, first_block_read

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """The result of an extend, a fork or an admission: new entries of each block table, and blocks to copy first, if any.

    After an admission or a fork, `num_computed` tokens are computed already, once `read` is in its blocks. `waits`: the next
    plan copies to or from the admitted row's blocks concurrently with its chunks, so none of the row's own chunks may be in
    that plan.
    """

    tables: tuple[TableUpdate, ...]
    copies: BlockCopies | None = None
    num_computed: int = 0
    waits: bool = False
    read: BlockBytes | None = None


class CacheManager:
    """Assigns the blocks of `tables` (state_tables.tables_for) to rows.

    With a `hasher` prefixes are cached. `eviction` makes the eviction policy. At most `max_cached_blocks` blocks without
    references stay cached (None: no limit). `host_slots` is the number of slots of the host tier, which evicts the oldest
    entries first. `events` is the prefix index's log.
    """

    def __init__(
        self,
        tables: RowTables,
        hasher: PrefixHasher | None = None,
        *,
        eviction: PolicyFactory = ReuseDensity,
        max_cached_blocks: int | None = None,
        host_slots: int = 0,
        events: CacheEventLog | None = None,
    ) -> None:
        size = tables.block_size
        if hasher is not None and hasher.block_size != size:
            raise ValueError(f"prefixes are cached in blocks as large as the hasher's ({hasher.block_size} tokens), not {size}")
        if host_slots and hasher is None:
            raise ValueError("a host tier keeps what the prefix cache finds again: it needs a hasher")
        if max_cached_blocks is not None and (hasher is None or max_cached_blocks < 0):
            raise ValueError(f"max_cached_blocks bounds a prefix cache, which needs a hasher, got {max_cached_blocks}")
        self.block_size, self.max_tokens = size, tables.max_tokens
        self.pool: PoolView = tables.pool
        slots = host_slots + (host_slots > 0)  # slot 0 is never used
        num_nodes = 0 if hasher is None else tables.most_nodes(slots)
        tables.provide_anchors(num_nodes)
        self.row_tables = tables
        self.tables = tables.with_bytes
        self.pins = tables.pins
        self._eviction = eviction
        # Where each block's bytes are until the next plan is done.
        self._bytes_at = np.arange(self.pool.num_blocks, dtype=np.int32)
        # Blocks of each row that are findable, or never will be.
        self._committed = np.zeros(len(tables.lengths), np.int64)
        self.index = PrefixIndex(
            hasher or NullHasher(size),
            tables.anchors.num_blocks,
            Lru if hasher is None else eviction,
            num_slots=slots,
            windows=WindowBlocksOfGroups(tables.window_groups, size, self.pool.num_blocks, slots, num_nodes),
        )
        if events is not None:
            self.index.report_to(events)
        self.swapping = Swapping(self.index, tables.pool, tables.anchors, host_slots, self._bytes_at, max_cached_blocks)
        self.host = self.swapping.host
        self.resizer = PoolResizer(tables, self.swapping, self._bytes_at)
        self.disk: KeptPrefixes | None = None  # the tier below; assigned before the first use

    def rebuilt(self, mapped: Iterable[int] | None = None) -> CacheManager:
        """A new, empty manager of the same pool, to replace this one after an error in its bookkeeping.

        `mapped` are the extents that have memory, as the arena reports them; None: those of the bookkeeping.
        """
        manager = CacheManager(
            self.row_tables.emptied(self.row_tables.pool.emptied(mapped)),
            self.index.hasher if self.index.capacity else None,
            eviction=self._eviction,
            max_cached_blocks=self.swapping.max_cached_blocks,
            host_slots=self.host.capacity,
            events=self.index.events,
        )
        manager.disk = self.disk
        manager.pins.num_lost = self.pins.num_lost + len(self.pins)
        return manager

    def blocks_for(self, tokens: int) -> int:
        """Blocks in all tables together that a sequence of `tokens` tokens holds, once the last of them is computed."""
        return self.row_tables.blocks_for(tokens)

    def blocks_to_pin(self, tokens: int) -> int:
        """The most blocks in all tables together that a pin of the first `tokens` tokens of a prompt holds."""
        return self.blocks_for(tokens // self.block_size * self.block_size)

    # -- what rows hold ----------------------------------------------------------------------------------------------

    def extend(self, rows: Index, upto: Index) -> Extension | None:
        """Extend the tables of `rows` (distinct) to cover `upto[i]` tokens each; None, and no change, if blocks are short."""
        try:
            return Extension(self.row_tables.extend(rows, upto, self.swapping))
        except NoFreeBlocks:
            return None

    def advance(self, rows: Index, upto: Index, computed: Computed) -> Extension | None:
        """Release what `release_passed` does, and extend the tables of `rows` (distinct), each at a block border, to `upto[i]`
        tokens, one more than it has; returns None without extending any if blocks are short.
        """
        try:
            return Extension(self.row_tables.advance(rows, upto, computed, self.swapping))
        except NoFreeBlocks:
            return None

    def release_passed(self, rows: Index, computed: Computed) -> None:
        """Release the blocks of `rows` that no token behind the computed ones reads. They stay findable until evicted.

        `computed` gives the tokens of each of some rows that are computed; it is only called where windows pass blocks.
        """
        self.row_tables.release_passed(rows, computed, self.swapping)

    def reach(self, row: int, start: int, upto: int, room: int) -> tuple[int, Extension]:
        """Extend the tables of windows of `row` for a chunk from `start` that ends at `upto` tokens, or before.

        Of more than one entry, at most `room` blocks are taken. Returns the tokens that the tables reach, at most `upto`, and
        the table entries. The tables without a window have theirs from the row's admission on. With states, the chunk ends
        where one is to be kept.
        """
        reached, updates, moves = self.row_tables.reach(row, start, upto, room, self.swapping)
        return reached, Extension(updates, self._copies(moves))

    def still_due(self, copies: BlockCopies) -> BlockCopies | None:
        """The `copies` to targets that rows hold, as rows may have been released since; None for none."""
        held = self.pool.references(copies.targets) > 0
        if held.all():
            return copies
        return BlockCopies(copies.sources[held], copies.targets[held]) if held.any() else None

    def _copies(self, moves: BlockMoves | None) -> BlockCopies | None:
        """The copies of a state, which the next plan does before anything else writes to blocks."""
        if moves is None:
            return None
        copies = BlockCopies(self._bytes_at[moves[0]], moves[1])
        self.swapping.trim()  # the sources may count as cached now
        return copies

    def fork(self, parent: int, child: int, num_tokens: int, upto: int | None = None) -> Extension | None:
        """Share the first `num_tokens` tokens of row `parent` with row `child` (empty), and make room for `upto` (None:
        no more) in the tables without a window.

        Full blocks are shared; a partly filled block and a state are copied. Returns None, and changes nothing, if blocks are
        short. The parent's tokens must be computed by plans that are done, and `can_fork` must hold.
        """
        upto = max(num_tokens, upto or 0)
        if self.blocks_for(upto) - self.row_tables.shared_by_fork(num_tokens) > self.pool.available:
            return None
        updates = self.row_tables.fork(parent, child, num_tokens, upto, self.swapping)
        self._committed[child] = min(int(self._committed[parent]), num_tokens // self.block_size)
        sources, targets = (self.row_tables.tail_of(row, num_tokens) for row in (parent, child))
        copies = BlockCopies(self._bytes_at[sources], targets) if len(sources) else None
        return Extension(updates, copies, num_computed=num_tokens)

    def release(self, rows: Index) -> None:
        """Release the blocks of `rows` (distinct) and empty their tables."""
        for i in self.swapping.offload_policy.sample(len(rows)):
            self.swapping.offload_policy.left(self.row_tables.anchor.of(int(rows[i]))[0])
        self.row_tables.release(rows, self.index)
        self._committed[rows] = 0
        self.swapping.trim()

    # -- prefixes ------------------------------------------------------------------------------------------------

    def chain(self, tokens: Int32, salt: bytes | None) -> Chain:
        """The hash chain of `tokens` for lookups within `salt` (None: no salt)."""
        return self.index.hasher.chain(tokens, salt)

    def lookup(self, chain: Chain, max_tokens: int, name: str = "") -> PrefixHit:
        """The longest prefix of `chain`, of at most `max_tokens` tokens, that is cached, or kept for `name`. Read-only."""
        hit = self.swapping.worth_promoting(self.index.lookup(chain, max_tokens))
        return self.swapping.suspended.hit_of(name, hit, max_tokens)

    def bytes_at(self, blocks: Int32) -> Int32:
        """Where the bytes of `blocks` are until the next plan is done."""
        return self._bytes_at[blocks]

    def bytes_of(self, chain: Chain, num_tokens: int) -> Int32:
        """Where the bytes of the blocks of the first `num_tokens` tokens of `chain` lie between two steps, as far as they are
        found: in a block, or, below 0, in that slot of the host tier. None where some layers have windows or states.
        """
        if self.row_tables.window_groups:
            return self._bytes_at[:0]
        hit = self.index.lookup(chain, num_tokens)
        leaving = self.host.leaving(hit.slots)
        return np.concatenate((self._bytes_at[hit.blocks], np.where(leaving, leaving, -hit.slots)))

    def worth_keeping(self, chain: Chain, num_blocks: int) -> tuple[BlockIds, list[tuple[Index, BlockIds]]]:
        """What of the first `num_blocks` blocks of `chain` on the device is worth keeping below: the blocks, as many of the
        first as are there, and of each other group what `WindowBlocksOfGroups.worth_keeping` says.
        """
        nodes = self.index.lookup(chain, num_blocks * self.block_size).matched
        blocks, _ = self.index.places_of(nodes)
        is_end = chain.num_blocks <= num_blocks + 1  # the newest tokens are not computed yet
        return blocks, self.index.windows.worth_keeping(nodes[: len(blocks)], is_end)

    def put(
        self, row: int, extension: Extension, blocks_of: tuple[Chain, int, int], data: npt.NDArray[np.uint8], copied: Int32
    ) -> Extension:
        """`extension`, of the admission of `row`, with bytes from elsewhere: its blocks (chain, first, end), as many as `data`
        has, and what other groups have there (`KeptPrefixes.finish`).

        They add nothing unless they continue what the row has, and there are blocks for them. No block of `copied` gets any:
        the plan copies from these.
        """
        (chain, first, upto), (start, rest) = blocks_of, divmod(extension.num_computed, self.block_size)
        groups, anchor = self.index.windows.groups, self.row_tables.anchor
        upto = min(upto, first + len(data)) if not groups else upto if len(data) else first
        if rest or first > start or start >= upto:
            return extension
        blocks = [anchor.blocks[:, row, start:upto].copy()] if anchor in self.row_tables.with_bytes else []
        if (groups and extension.waits) or any(np.isin(of_anchor, copied).any() for of_anchor in blocks):
            return extension
        if not groups:
            self.host.note_put(blocks[0][0])
            put = BlockBytes(blocks[0][0], data[start - first :])
            return replace(extension, num_computed=upto * self.block_size, read=put)
        begun = self.row_tables.begin_at(row, start, upto, copied, self.swapping)
        if begun is None:
            return extension
        reads = [first] * len(blocks)
        reads += [max(first, int(first_block_read(group, np.array([upto]), self.block_size)[0])) for group in groups]
        blocks += begun[0]
        data = np.concatenate(_parts_of(data, reads, upto, blocks))
        # The plan puts the bytes there before anything reads them, so that others may find them now, and the state stays.
        tables = merged([extension.tables, begun[1], self.commit(row, chain, upto * self.block_size)])
        targets = np.concatenate([of_group.ravel() for of_group in blocks])
        held = self.pool.references(targets) > 0  # the others were there already
        self.host.note_put(targets[held])
        put, copies = BlockBytes(targets[held], data[held]), None  # the state is read, and not copied
        return replace(extension, tables=tables, copies=copies, num_computed=upto * self.block_size, read=put)

    def needed(self, upto: int, hit: PrefixHit) -> int:
        """Blocks that `admit` and the chunk after it take from `available`: new ones, and found ones without references."""
        return self.row_tables.needed(upto, hit, self.index)

    def admit(self, row: int, upto: int, hit: PrefixHit, name: str = "") -> Extension | None:
        """Assign `hit` to `row` (empty) and extend it to `upto` tokens; None, and no change, if blocks are short.

        The tables of windows are extended by `reach`, chunk by chunk. The tail kept for `name` is swapped in too, if it
        follows the tokens found. After a successful admission nothing is kept for `name` any more.
        """
        if self.needed(upto, hit) > self.pool.available:
            return None
        owed, returns = self.host.num_owed, self.swapping.suspended.resume(name)
        num_tail, full = self.swapping.suspended.tail_behind(name, hit), len(hit.nodes)
        self.index.keep_branch(hit)
        updates, moves = self.row_tables.begin(row, hit, num_tail, upto, self.swapping)
        if full:
            self.index.accept(hit)
            self._committed[row] = full
        self.swapping.admitted(hit, self.row_tables.anchor.blocks[0, row], returns)
        num_computed = hit.num_tokens + (num_tail or 0)
        tail = self._bytes_at[:0] if num_tail is None else self.row_tables.tail_of(row, num_computed)
        self.swapping.suspended.take_tail(name, tail)
        waits = self.host.num_owed > owed or self._is_arriving(row, full)
        return Extension(updates, self._copies(moves), num_computed=num_computed, waits=waits)

    def _is_arriving(self, row: int, full: int) -> bool:
        """Whether the next plan copies to one of the first `full` blocks of `row`."""
        return any(self.host.is_arriving(table.blocks[:, row, int(table.starts[row]) : full].ravel()) for table in self.tables)

    def commit(self, row: int, chain: Chain, num_tokens: int, is_prompt: bool = False) -> tuple[TableUpdate, ...]:
        """Make the full blocks of `row`'s first `num_tokens` tokens findable.

        These tokens are computed, and are those of `chain`; `is_prompt`: they are all of a prompt, which may come again.
        Returns the changed table entries.
        """
        updates = self._commit(row, chain, num_tokens // self.block_size)
        self.row_tables.keep_ends(row, num_tokens, is_prompt, self.index)
        return updates

    def retain(self, row: int, chain: Chain, num_tokens: int, retention: Retention, now: float) -> None:
        """Retain the full blocks of `row`'s first `num_tokens` tokens, those of `chain`, here and on disk as a hint says. They
        are committed.
        """
        if self.disk is not None:
            self.disk.committed(chain, num_tokens // self.block_size, retention)
        if retention.num_tokens is not None:
            num_tokens = min(num_tokens, retention.num_tokens)
        self.index.retain(self._full_blocks(row, num_tokens), retention, now)

    def open_pin(self, name: str, tokens: int) -> None:
        """Begin pin `name` of the first `tokens` tokens of a prompt."""
        self.pins.open(name, self.blocks_to_pin(tokens), tokens // self.block_size)

    def pin(self, row: int, num_tokens: int, name: str) -> None:
        """Let pin `name` hold the full blocks of `row`'s first `num_tokens` tokens, which are committed."""
        self.pins.hold(name, self._full_blocks(row, num_tokens), self.index)

    def unpin(self, name: str) -> bool:
        """End pin `name`. Returns whether it was there."""
        was_there = self.pins.end(name, self.index)
        self.swapping.trim()
        return was_there

    def end_newest_pin(self) -> None:
        """End the newest pin, of which there is one, as its blocks are needed."""
        before = self.pins.num_blocks
        name = self.pins.end_newest(self.index)
        log.warning("%s has ended: its blocks are needed, %d of %d stay pinned", name, self.pins.num_blocks, before)
        self.swapping.trim()

    def _full_blocks(self, row: int, num_tokens: int) -> Int32:
        blocks: Int32 = self.row_tables.anchor.blocks[0, row, : num_tokens // self.block_size]
        return blocks

    def _commit(self, row: int, chain: Chain, full: int) -> tuple[TableUpdate, ...]:
        """Make the first `full` blocks of `row` findable."""
        first = int(self._committed[row])
        if full <= first or not self.index.capacity:
            return ()
        self.swapping.make_nodes(full - first)
        blocks = self.row_tables.anchor.blocks[0, row]
        places = self.index.register(chain, blocks[:full], first)
        findable = places.blocks
        upto = first + len(findable)
        own = blocks[first:upto]
        self._committed[row] = full if upto == full else len(blocks)
        self.swapping.registered(own[findable == own], places.slots)
        if self.disk is not None and upto > first:
            self.disk.committed(chain, upto)
        return self.row_tables.publish(row, first, findable, self.swapping)

    def reset(self) -> None:
        """Forget all cached prefixes, and end all pins. Rows keep their blocks."""
        if self.disk is not None:
            self.disk.clear()
        while len(self.pins):
            self.pins.end_newest(self.index)
        self.swapping.reset(self.index.reset())
        self._committed[:] = self.row_tables.anchor.blocks.shape[2]  # their parents are no longer findable
        self._committed[self.row_tables.lengths == 0] = 0

    def forget(self, blocks: Int32) -> None:
        """Forget `blocks`, which no table contains, and their cached descendants. Pins that hold some of them end."""
        self.pins.end_with(blocks, self.index)
        self.swapping.forget(np.unique(blocks))
        self.swapping.trim()  # the other blocks of these pins may count as cached now

    # -- the host tier -------------------------------------------------------------------------------------------

    def keep_for(self, name: str, row: int, chain: Chain, num_tokens: int, arrived: bool = True) -> None:
        """Record that sequence `name` leaves `row` and will return.

        The first `num_tokens` tokens, those of `chain`, are computed and committed. The last, partly filled block and the state
        are kept, unless no slot is available, the blocks before are not all findable, or copies to some of the row's blocks are
        still to be planned (not `arrived`).
        """
        keeps = arrived and self._committed[row] == num_tokens // self.block_size
        keeps = keeps and self.row_tables.may_keep_tail(row, num_tokens, self.index)
        tail = self.row_tables.tail_of(row, num_tokens) if keeps else self._bytes_at[:0]
        self.swapping.suspended.keep(name, chain, num_tokens, tail)

    def set_swap_costs(self, *, least_chance: float, promotes: bool) -> None:
        """Set which swaps are worth their cost from now on.

        `least_chance` is the probability of reuse from which demoting a block is worth it (1 or more: never); `promotes`
        says whether promoting is.
        """
        self.host.least_chance, self.host.promotes = least_chance, promotes

    def check_invariants(self) -> None:
        """Recompute every derived fact from the tables. Raises AssertionError naming what does not hold."""
        self.row_tables.check_invariants(self.index)
        self.index.check_invariants()
        self.pins.check_invariants(self.index)
        self.swapping.check_invariants(self.index.blocks.used)


def _parts_of(data: npt.NDArray[np.uint8], reads: list[int], upto: int, blocks: list[BlockIds]) -> list[npt.NDArray[np.uint8]]:
    """What of `data`, read of each group for the blocks of tokens from `reads[i]` up to `upto` (`DiskIndex.to_read`), goes to
    its `blocks[i]` [tables, n]: of each table the last n.
    """
    parts, at = [], 0
    for begin, of_group in zip(reads, blocks, strict=True):
        tables, num = of_group.shape
        part = data[at : at + tables * (upto - begin)].reshape(tables, upto - begin, data.shape[1])
        parts.append(part[:, upto - begin - num :].reshape(tables * num, data.shape[1]))
        at += tables * (upto - begin)
    return parts
