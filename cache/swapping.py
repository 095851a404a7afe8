"""Eviction and demotion of blocks, promotion back to the device, and the state of waiting sequences.

Blocks that leave the pool are demoted to slots (host_tier.py) if that is worth it (host_offload.py) and slots are
available; older slots are evicted for them. The other blocks are evicted. A hit in a slot is promoted to a block of the
new row. What is kept for preempted sequences is in suspended.py.

With several groups of layers, window blocks that windows have passed leave first, then nodes with their window blocks, then
other window blocks without a reference (window_blocks.py). Where no layer reads all tokens, nodes have no bytes, and only
window blocks leave. A state goes to slots with its node or before it, if copying it takes less time than computing the tokens
that it saves, by the chance that it is used again; a row that finds it there gets a copy.
"""

from __future__ import annotations

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from .block_table import Int32
from .host_offload import HostOffloadPolicy, Mask
from .host_tier import HostTier
from .node_places import BlockPlaces
from .prefix_index import PrefixHit, PrefixIndex
from .prefix_tree import Nodes
from .suspended import SuspendedSequences
from .window_blocks import WindowBlocks

# Of a full pool each decode step evicts a few blocks. An eviction takes some 0.2 ms, however few they are, so it is done
# for several steps at once.
_EVICTED_SHARE = 64
_NO_SLOTS: Int32 = np.empty(0, np.int32)
_NO_SLOTS.flags.writeable = False


class Swapping:
    """Reclaims blocks of `allocator` that `index` finds: evicts them or swaps them out to a host tier.

    The tier has `num_slots` slots, which may be 0. At most `max_cached_blocks` blocks without references stay cached
    (None: no limit). `bytes_at` is the manager's: where each block's bytes are until the next plan is done. `anchors` are
    the blocks of the index's nodes: those of `allocator`, or, where no layer reads all tokens, places without bytes.

    Callers of the cache manager may read all attributes, and call `rest`, `forget_slots` and `lost`. The rows' tables call
    `allocate`, `trim` and what moves window blocks to the device.
    """

    def __init__(
        self,
        index: PrefixIndex,
        allocator: BlockAllocator,
        anchors: BlockAllocator,
        num_slots: int,
        bytes_at: Int32,
        max_cached_blocks: int | None = None,
    ) -> None:
        self.host = HostTier(num_slots)
        self.offload_policy = HostOffloadPolicy(anchors.num_blocks, num_slots)
        self.max_cached_blocks = max_cached_blocks
        self.evicted_blocks = 0  # since the start, to make room or to respect the bound
        self.index = index
        self._allocator = allocator
        self._anchors = anchors
        self._nodes_have_bytes = anchors is allocator
        self._bytes_at = bytes_at
        self.suspended = SuspendedSequences(index, self.host, self.offload_policy, bytes_at, self._take_slots)

    # -- blocks that leave and return --------------------------------------------------------------------------------

    def allocate(self, n: int, hit: PrefixHit | None = None) -> BlockIds:
        """Allocate `n` blocks; demote or evict cached blocks if needed. Raises NoFreeBlocks, and changes nothing then.

        With the `hit` of a row that is being admitted, the copies of demoted blocks may run concurrently with the next
        plan's chunks. Without a host tier at least a `1 / _EVICTED_SHARE` of the cached blocks is evicted at once.
        """
        lacking = n - self._allocator.num_free
        if lacking > 0 and lacking <= (num_cached := self._allocator.available - self._allocator.num_free):
            self.make_room(lacking, 0 if self.host.demotes else num_cached // _EVICTED_SHARE, hit)
        return self._allocator.allocate(n)

    def make_room(self, num_blocks: int, least: int = 0, hit: PrefixHit | None = None) -> None:
        """Demote or evict cached blocks until `num_blocks` more are free, or none is left: `least` at once, where it matters.

        `hit` is the prefix of a row that is being admitted: the contents of its slots stay there.
        """
        wanted = self._allocator.num_free + num_blocks
        while (lacking := wanted - self._allocator.num_free) > 0 and self._evict_passed(lacking, hit):
            pass
        while (lacking := wanted - self._allocator.num_free) > 0:  # blocks that a pending copy reads become free later
            victims = self.index.victims(max(lacking, least)) if self._nodes_have_bytes else _NO_SLOTS
            if not len(victims):
                break
            if self.index.windows:  # a node's window blocks go with it: fewer nodes are enough
                sizes = np.cumsum(1 + self.index.windows.num_blocks(self.index.blocks.nodes_in(victims)))
                victims = victims[: int(np.searchsorted(sizes, max(lacking, least))) + 1]
            self.reclaim(victims, hit)
        while (lacking := wanted - self._allocator.num_free) > 0 and self._reclaim_kept(lacking, hit):
            pass

    def reclaim(self, victims: BlockIds, hit: PrefixHit | None = None) -> None:
        """Demote those of `victims` that are worth it and find a slot; evict the others.

        `victims` are in the order of `PrefixIndex.victims`; if slots are short the last ones are demoted. `hit` is as for
        `make_room`.
        """
        if not self.host.demotes:
            self.evicted_blocks += self._evict(victims)
            return
        worth = self.offload_policy.worth(victims, self.host.least_chance)
        if not worth.all():
            self.evicted_blocks += self._evict(victims[~worth])
            victims = victims[worth]
            victims = victims[self.index.findable(victims)]  # without descendants of an evicted block
        nodes = self.index.blocks.nodes_in(victims)
        for window in self.index.windows:
            if window.group.is_state:
                having = nodes[window.have(nodes, on_host=False)]
                self.evicted_blocks += self.forget_window_blocks(window, having[~self._worth_of_states(window, having)])
        sizes = 1 + self.index.windows.num_blocks(nodes)
        slots = self._take_slots(int(sizes.sum()), hit)
        from_last = np.cumsum(sizes[::-1])
        num_left = len(victims) - int(np.searchsorted(from_last, len(slots), "right"))
        used = int(sizes[num_left:].sum())
        self.host.free(slots[used:])
        self.evicted_blocks += self._evict(victims[:num_left])
        if num_left < len(victims):
            self._demote(victims[num_left:], nodes[num_left:], slots[:used], hit)

    def make_nodes(self, n: int) -> None:
        """Let the index have room for `n` more nodes, which may lack it where they need not lie in blocks."""
        lacking = self.index.num_nodes + n - self.index.capacity
        if lacking > 0:
            self.evicted_blocks += self._evict(self.index.victims(max(lacking, self.index.capacity // _EVICTED_SHARE)))

    def trim(self) -> None:
        """Demote or evict cached blocks beyond `max_cached_blocks`: the least valuable first, descendants before ancestors."""
        if self.max_cached_blocks is None:
            return
        # Blocks in flight did not count as cached: count again.
        while (excess := self._allocator.counts().cached - self.max_cached_blocks) > 0:
            self.make_room(excess)

    def reclaim_trees(self, roots: BlockIds) -> None:
        """Demote or evict `roots`, without references: nodes with all descendants, and window blocks with their node's."""
        for window in self.index.windows:
            self.forget_window_blocks(window, window.nodes_in(window.blocks, roots))
        if not self._nodes_have_bytes:
            return
        roots = roots[self.index.findable(roots)]
        self.reclaim(self.index.with_descendants(roots) if self.host.demotes else roots)

    def worth_promoting(self, hit: PrefixHit) -> PrefixHit:
        """`hit`, without its slots if promoting them is not worth it."""
        if self.host.promotes or not (len(hit.slots) or self.index.windows):
            return hit
        return self.index.on_device(hit)

    def promote(self, slots: Int32, blocks: BlockIds) -> None:
        """Move the contents of `slots`, found after the blocks of a row, to the row's `blocks`."""
        nodes = self.index.slots.nodes_in(slots)
        self.index.promote(slots, blocks)
        self.offload_policy.returned(slots, blocks)
        self._allocator.publish(blocks)
        self.host.queue_swap_in(slots, blocks.copy())
        for window in self.index.windows:
            window.stay_on_host(nodes)

    def promote_window_blocks(self, window: WindowBlocks, nodes: Nodes, blocks: BlockIds) -> None:
        """Move the window blocks of `nodes` from the host to `blocks` [tables, nodes] of a row."""
        slots = window.promote(nodes, blocks)
        self._allocator.publish(blocks.ravel())
        self.host.queue_swap_in(slots.ravel(), blocks.ravel())

    def copy_state_in(self, window: WindowBlocks, node: Nodes, blocks: BlockIds) -> None:
        """Copy the state of `node` [1], on the host, to `blocks` [tables, 1] of a row. It stays there."""
        self.host.queue_swap_in(window.slots_of(node).ravel(), blocks.ravel(), keeps=True)
        if self.index.blocks.have(node).all():
            window.stay_on_host(node)  # used last

    def registered(self, blocks: BlockIds, slots: Int32) -> None:
        """`blocks` are findable from now on. The first of them, recomputed, lay in `slots` until now, which are freed."""
        self.offload_policy.registered(blocks, slots)
        self.host.free(slots)
        for window in self.index.windows if len(slots) else ():
            window.stay_on_host(self.index.blocks.nodes_in(blocks[: len(slots)]))

    def forget_window_blocks(self, window: WindowBlocks, nodes: Nodes) -> int:
        """Forget the window blocks of `nodes`; the nodes stay. Returns the number of blocks."""
        blocks, slots = window.evict(nodes)
        return self._forget_places(BlockPlaces(_NO_SLOTS, slots, blocks))

    def free_slots(self, slots: Int32) -> None:
        """Free `slots`, which the index does not know any more."""
        if len(slots):
            self.offload_policy.forgotten(slots)
            self.host.free(slots)

    def admitted(self, hit: PrefixHit, blocks: BlockIds, returns: bool) -> None:
        """Account for an admission with the prefix `hit` into `blocks`; `returns`: the sequence was preempted before."""
        self.host.resting = False
        if hit.num_tokens and not returns:  # else no new request found it
            self.offload_policy.found(blocks[: len(hit.blocks) + len(hit.slots)])

    # -- the tier as a whole -----------------------------------------------------------------------------------------

    def reset(self, places: BlockPlaces) -> None:
        """Forget everything after a reset of the index: the contents of `places`, waiting sequences and tails."""
        self._forget_places(places)
        self.suspended.reset()

    def rest(self) -> None:
        """Empty the tier, so that it needs no memory. It stays unused until a row is admitted."""
        self._forget_slots(self._used_slots)
        self.suspended.drop_tails()
        self.host.rest()

    def forget(self, blocks: BlockIds) -> None:
        """Forget `blocks`, which no table contains, without demoting them: nodes with their descendants, and window blocks."""
        for window in self.index.windows:
            self.forget_window_blocks(window, window.nodes_in(window.blocks, blocks))
        if self._nodes_have_bytes:
            self._evict(blocks[self.index.findable(blocks)])
        self.forget_slots(self.host.owed(blocks))

    def forget_slots(self, slots: Int32) -> None:
        """Forget the contents of `slots`, to which a copy has failed, and tails there."""
        self.suspended.drop_tails(slots)
        self._forget_slots(slots)

    def lost(self, slots: Int32) -> None:
        """Forget the contents of `slots`, to which a plan was to copy, and retire them: there was no memory for them."""
        self.forget_slots(slots)
        self.host.retire(slots)

    def check_invariants(self, findable: BlockIds) -> None:
        """Check the tier; `findable` are the blocks that the index knows. Raises AssertionError."""
        if self.max_cached_blocks is not None:
            cached = self._allocator.counts().cached
            assert cached <= self.max_cached_blocks, f"{cached} blocks are cached, of {self.max_cached_blocks} at most"
        self.host.check_invariants(self._used_slots)
        self.offload_policy.check_invariants(findable, self.index.slots.used, self.suspended.wanted())

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _demote(self, blocks: BlockIds, nodes: Nodes, slots: Int32, hit: PrefixHit | None) -> None:
        """Move `nodes`, in `blocks`, to the first `slots`, and their window blocks to the others."""
        ours, slots = slots[: len(blocks)], slots[len(blocks) :]
        self.index.demote(blocks, ours)
        self.offload_policy.demoted(blocks, ours)
        self._swap_out(blocks, ours, hit)
        for window in self.index.windows:
            window.go_with(nodes)
            having = nodes[window.have(nodes, on_host=False)]
            num = len(having) * window.group.num_tables
            self._demote_window_blocks(window, having, slots[:num], hit)
            slots = slots[num:]

    def _demote_window_blocks(self, window: WindowBlocks, nodes: Nodes, slots: Int32, hit: PrefixHit | None) -> None:
        blocks = window.demote(nodes, slots.reshape(window.group.num_tables, -1))
        self._swap_out(blocks.ravel(), slots, hit)

    def _swap_out(self, blocks: BlockIds, slots: Int32, hit: PrefixHit | None) -> None:
        """Let the next plan copy `blocks`, which are free now, to `slots`.

        It does so concurrently with its chunks if a row that is admitted with `hit` gets all of them. Window blocks of a node
        go together, and so more blocks than the row needs.
        """
        self._allocator.forget(blocks)
        beside = hit is not None and not self.index.windows
        self.host.queue_swap_out(self._bytes_at[blocks], slots, beside=beside)

    def _evict_passed(self, num_blocks: int, hit: PrefixHit | None) -> bool:
        """Evict passed window blocks, or demote passed states, at least `num_blocks` if there are so many. Returns whether
        there were some.
        """
        for window in self.index.windows:
            if len(nodes := window.passed(-(-num_blocks // window.group.num_tables))):
                if window.group.is_state and self.host.demotes:
                    nodes = self._without_demoted(window, nodes, self._worth_of_states(window, nodes), hit)
                self.evicted_blocks += self.forget_window_blocks(window, nodes)
                return True
        return False

    def _reclaim_kept(self, num_blocks: int, hit: PrefixHit | None) -> bool:
        """Demote or evict other window blocks without a reference. Returns whether there were some."""
        for window in self.index.windows:
            tables = window.group.num_tables
            nodes = window.kept(-(-num_blocks // tables))
            if not len(nodes):
                continue
            if window.group.is_state and self.host.demotes:
                nodes = self._without_demoted(window, nodes, self._worth_of_states(window, nodes), hit)
            elif not self._nodes_have_bytes and self.host.demotes:
                worth = self.offload_policy.worth(self.index.blocks.of_node[nodes], self.host.least_chance)
                nodes = self._without_demoted(window, nodes, worth, hit)
            self.evicted_blocks += self.forget_window_blocks(window, nodes)
            return True
        return False

    def _without_demoted(self, window: WindowBlocks, nodes: Nodes, worth: Mask, hit: PrefixHit | None) -> Nodes:
        """Demote the window blocks of those of `nodes` that are `worth` it, as far as there are slots. Returns the others."""
        tables, demoted = window.group.num_tables, nodes[worth]
        slots = self._take_slots(len(demoted) * tables, hit)
        demoted = demoted[len(demoted) - len(slots) // tables :]
        self.host.free(slots[len(demoted) * tables :])
        if len(demoted):
            self._demote_window_blocks(window, demoted, slots[: len(demoted) * tables], hit)
            window.stay_on_host(demoted)
        return nodes[~np.isin(nodes, demoted)]

    def _worth_of_states(self, window: WindowBlocks, nodes: Nodes) -> Mask:
        """Which of `nodes`, on the device, have states that are worth demoting. A state takes the copies of all its blocks, and
        saves the tokens behind the state before it. The plan that puts one there cannot copy it out.
        """
        saved = np.array([self.index.blocks_saved(window, node) for node in nodes.tolist()], float)
        cost = window.group.num_tables * self.host.copy_share
        least = np.full(len(nodes), np.inf)
        np.divide(cost, saved - cost, out=least, where=saved > cost)
        are_put = self.host.are_put(window.blocks_of(nodes)).any(axis=0)
        return self.offload_policy.worth(self.index.blocks.of_node[nodes], least) & ~are_put

    def _take_slots(self, n: int, hit: PrefixHit | None = None) -> Int32:
        """Take up to `n` slots, evicting slots other than those of `hit` if needed; none if demoting is not worth it."""
        if not n or not self.host.demotes:
            return _NO_SLOTS
        self.offload_policy.taking(n, self.host.num_slots)
        for window in self.index.windows:
            lacking = n - self.host.num_available
            if lacking > 0 and len(nodes := window.host_victims(-(-lacking // window.group.num_tables))):
                if hit is not None:
                    nodes = nodes[~np.isin(nodes, hit.nodes)]
                self.forget_window_blocks(window, nodes)
        lacking = n - self.host.num_available
        if lacking > 0:
            keep = _NO_SLOTS if hit is None else hit.slots
            victims = self.index.host_victims(lacking + len(keep))
            victims = victims[~np.isin(victims, keep)][:lacking]
            if len(victims):
                self._forget_places(self.index.evict_slots(victims))
        return self.host.take(min(n, self.host.num_available))

    def _evict(self, blocks: BlockIds) -> int:
        """Forget `blocks`, which have no references, and their descendants. Returns the number of blocks forgotten."""
        return self._forget_places(self.index.evict(blocks)) if len(blocks) else 0

    @property
    def _used_slots(self) -> Int32:
        return np.concatenate((self.index.slots.used, self.index.windows.slots))

    def _forget_slots(self, slots: Int32) -> None:
        """Forget the contents of those of `slots` that have some, and descendants of nodes there."""
        for window in self.index.windows:
            self.forget_window_blocks(window, window.nodes_in(window.slots, slots))
        self._forget_places(self.index.evict_slots(np.intersect1d(slots, self.index.slots.used)))

    def _forget_places(self, places: BlockPlaces) -> int:
        """Free `places`, which the index does not know any more. Returns the number of blocks."""
        self._anchors.forget(places.blocks)
        if len(places.window_blocks):
            self._allocator.forget(places.window_blocks)
        self.free_slots(places.slots)
        return len(places.blocks) + len(places.window_blocks)
