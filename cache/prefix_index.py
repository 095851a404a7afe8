"""The prefix index: which full blocks of tokens are cached, after which prefix, and where each of them lies.

A node is one findable block of tokens after its whole prefix. It lies in exactly one place: a block of the device, or a
slot of the host tier. The parent of a node on the device is on the device. The parent of a findable node is findable.

    lookup                 register                mark_evictable               evict
    (read-only)   nothing ─────────► findable, in use ─────────► findable, evictable ─────────► nothing
                                            ▲        mark_used           │ │                  ▲
                                            ├────────────────────────────┘ │ demote           │ evict_slots
                                            └───────────── promote ─── findable, on the host ─┘

A node is evictable while no sequence references it. The policy chooses the next node to evict (eviction.py); what hints retain
goes last (retention.py). What other
groups of layers have computed for a node's tokens is in their window blocks (window_blocks.py): a hit ends at the last node
behind which each group has those that are read next. Reasons: docs/decisions/0017-prefix-index.md, 0053-groups-of-layers.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..allocator.blocks import BlockIds
from ..allocator.errors import BlockMisuse
from ..allocator.pool_view import format_ids
from .block_table import Index, Int32
from .cache_events import BlockBatch, CacheEventLog
from .digest_table import DigestTable, leading, num_new
from .eviction import Lru, PolicyFactory, Ranks
from .node_places import NOWHERE, BlockPlaces, Ids, NodePlaces, as_index
from .prefix_hash import Chain, Digests, PrefixHasher, Root
from .prefix_tree import NONE, Nodes, PrefixTree
from .retention import RetainedPrefixes, Retention
from .window_blocks import WindowBlocks, WindowBlocksOfGroups


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit:
    """The longest findable prefix of a chain: first `blocks` of the device, then `slots` of the host tier.

    Of `matched`, the nodes of the chain's tokens, `nodes` are the first ones, up to where every group can go on. Valid until
    the index changes.
    """

    num_tokens: int
    blocks: BlockIds
    slots: Int32
    nodes: Nodes
    matched: Nodes


@dataclass(frozen=True, slots=True, eq=False)
class IndexEntry:
    """A findable block: its place in the chain (0: the first), how often requests found it, and its tokens."""

    depth: int
    hits: int
    tokens: Int32


NO_HIT = PrefixHit(0, np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class PrefixIndex:
    """Finds prefixes among the blocks `0 .. num_blocks - 1` of the device and the slots `0 .. num_slots - 1` of the host.

    `eviction` makes the policy that orders the nodes on the device, `host_eviction` that of the nodes on the host. `windows`
    are the blocks of other groups that belong to nodes. There is room for as many nodes as these have the capacity for (None:
    for a node in each block and each slot); with a capacity of 0 nothing is ever found.

    A call that raises BlockMisuse changes nothing. Each call costs a few array operations over the given blocks,
    whatever the pool's size.
    """

    def __init__(
        self,
        hasher: PrefixHasher,
        num_blocks: int,
        eviction: PolicyFactory,
        *,
        num_slots: int = 0,
        host_eviction: PolicyFactory = Lru,
        windows: WindowBlocksOfGroups | None = None,
    ) -> None:
        if num_blocks < 1 or num_slots < 0:
            raise ValueError(f"an index of {num_blocks} blocks and {num_slots} slots has no use")
        if windows is None:
            windows = WindowBlocksOfGroups((), hasher.block_size, num_blocks, num_slots, num_blocks + num_slots)
        self.hasher = hasher
        self.events: CacheEventLog | None = None
        self._num_blocks = num_blocks
        self._num_slots = num_slots
        self.windows = windows
        self.capacity = windows.capacity  # the largest number of nodes
        self._tree = PrefixTree(self.capacity)
        self.retained = self._policy = RetainedPrefixes(self._tree, eviction(self._tree), num_blocks)
        self._host_policy = host_eviction(self._tree if num_slots else PrefixTree(0))
        self._clear()

    def report_to(self, events: CacheEventLog) -> None:
        """Log in `events` from now on what becomes findable and what does not stay so. Nothing is findable yet."""
        self.events = events
        events.add_cleared()

    def _clear(self) -> None:
        num_blocks, num_slots, capacity = self._num_blocks, self._num_slots, self.capacity
        self._table = DigestTable(capacity)
        self._tokens = np.empty((capacity, self.hasher.block_size), np.int32)
        self._roots: dict[Root, int] = {}  # nodes without a parent
        self._salts: dict[int, bytes | None] = {}  # of the roots
        self._evictable = np.zeros(capacity, np.bool_)
        self._hits = np.zeros(capacity, np.int32)  # by `accept`, since the node was added
        # Each node in use is in one of these.
        self.blocks = NodePlaces("blocks", num_blocks, capacity)
        self.slots = NodePlaces("slots", num_slots, capacity)
        self.windows.clear()
        self._unused = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: the first `capacity - num_nodes`
        self.num_nodes = 0
        if self.events is not None:
            self.events.add_cleared()

    # -- requests ------------------------------------------------------------------------------------------------

    def lookup(self, chain: Chain, max_tokens: int) -> PrefixHit:
        """The longest findable prefix of `chain` of at most `max_tokens` tokens. Read-only except for the chain's hashes.

        Tokens, salts and parents are compared: colliding digests give a shorter hit, never a wrong one.
        """
        _check_hasher(chain, self.hasher)
        most = min(max_tokens // self.hasher.block_size, chain.num_blocks)
        # Most misses miss the first block: these need no hashes.
        if most < 1 or chain.root not in self._roots:
            return NO_HIT
        nodes = self._table.find(chain.digests(most))
        nodes = nodes[: self._num_true(chain, nodes[: leading(nodes != NONE)], 0, None)]
        return self._hit(nodes, nodes)

    def on_device(self, hit: PrefixHit) -> PrefixHit:
        """The part of `hit` for which nothing is on the host."""
        return self._hit(hit.nodes[: len(hit.blocks)], hit.matched, on_host=False)

    def without_state(self, hit: PrefixHit, num_blocks: int) -> PrefixHit:
        """The hit of the first `num_blocks` blocks for a sequence that has a state of its own behind them; `hit`, what a new
        one may begin with, if not so many are found.
        """
        nodes = hit.matched[:num_blocks]
        if len(nodes) < num_blocks or self.windows.num_readable(nodes, on_host=True, with_states=False) < num_blocks:
            return hit
        return PrefixHit(num_blocks * self.hasher.block_size, *self.places_of(nodes), nodes, hit.matched)

    def blocks_saved(self, window: WindowBlocks, node: int) -> int:
        """Blocks of tokens up to `node` behind the last of its ancestors with window blocks of the group `window`."""
        path = self._tree.path_to(node)
        before = np.flatnonzero(window.have(path[:-1]))
        return len(path) - (int(before[-1]) + 1 if len(before) else 0)

    def places_of(self, nodes: Nodes) -> tuple[BlockIds, Int32]:
        """The blocks and slots of `nodes`, part of a chain in its order."""
        blocks = self.blocks.of_node[nodes]
        on_device = leading(blocks != NONE)
        return blocks[:on_device], self.slots.of_node[nodes[on_device:]]

    def _hit(self, nodes: Nodes, matched: Nodes, on_host: bool = True) -> PrefixHit:
        """The hit of `nodes`, the first ones of `matched`, or of fewer if a group lacks window blocks behind the last."""
        if self.windows:
            nodes = nodes[: self.windows.num_readable(nodes, on_host)]
        return PrefixHit(len(nodes) * self.hasher.block_size, *self.places_of(nodes), nodes, matched)

    def accept(self, hit: PrefixHit) -> None:
        """Count the hit, and report to the policy that a request uses those nodes of `hit` that are on the device now."""
        self._hits[hit.nodes] += 1
        self._policy.hit(hit.nodes[self.blocks.have(hit.nodes)])

    def unbranched_behind(self, block: int) -> BlockIds:
        """The blocks of the device behind `block`, findable there, down to the first behind which none or several follow."""
        return self.blocks.of_node[self._tree.unbranched_behind(int(self.blocks.node_at[block]))]

    def path_to(self, block: int) -> BlockIds:
        """The blocks of the device of the prefix that ends with `block`, findable there."""
        return self.blocks.of_node[self._tree.path_to(int(self.blocks.node_at[block]))]

    def is_chain(self, nodes: Nodes) -> bool:
        """Whether `nodes` are all blocks of a prefix, from its root on."""
        return not len(nodes) or np.array_equal(self._tree.path_to(int(nodes[-1])), nodes)

    def retain(self, blocks: BlockIds, retention: Retention, now: float) -> None:
        """Retain the first of `blocks`, of a chain from its root that a sequence uses, as far as they are findable."""
        nodes = self.blocks.node_at[blocks]
        self.retained.retain(nodes[: leading(nodes != NONE)].astype(np.int64), retention, now)

    def retained_until(self, blocks: Ids) -> npt.NDArray[np.float64]:
        """The time until which hints retain each of `blocks`; 0: no hint, or nothing is findable there."""
        nodes = self.blocks.node_at[as_index(blocks)]
        return np.where(nodes == NONE, 0.0, self.retained.until[nodes])

    def keep_branch(self, hit: PrefixHit) -> None:
        """Where requests share a prefix up to the end of `hit.matched` and go different ways then, keep what is read there."""
        if self.windows and len(hit.matched) and len(self._tree.children(hit.matched[-1:])):
            self.windows.keep_end(hit.matched)

    def register(self, chain: Chain, blocks: BlockIds, first: int) -> BlockPlaces:
        """Make `blocks[first:]` findable, which hold the computed tokens of the chain's blocks `first .. len(blocks) - 1`.

        `blocks[:first]` are the blocks before them in the sequence's table. The returned `blocks` are those that are
        findable now, from `first` on. Where one differs from the sequence's own, a node of the same tokens existed already:
        the caller puts the returned block into the table, with a reference (`mark_used` it if it had none), and
        releases its own. If fewer are returned, the others stay unregistered. The returned `slots` are free: their
        contents are in blocks of this sequence now.

        Raises BlockMisuse when one of the blocks is findable as something else.
        """
        _check_hasher(chain, self.hasher)
        if not 0 <= first <= len(blocks) <= chain.num_blocks:
            raise ValueError(
                f"asked to register blocks {first} to {len(blocks)} of a chain that has {chain.num_blocks} full ones"
            )
        parent = int(self.blocks.node_at[blocks[first - 1]]) if first else None
        if parent == NONE or first == len(blocks) or not self.capacity:
            return NOWHERE
        own = blocks[first:]
        digests = chain.digests(len(blocks))
        if parent is not None and (self._table.digests[parent] != digests[first - 1]).any():
            raise BlockMisuse(f"block {blocks[first - 1]} can be found, and not as block {first - 1} of this chain")
        digests = digests[first:]
        nodes = self._table.find(digests)
        num_existing = leading(nodes != NONE)
        existing = nodes[: self._num_true(chain, nodes[:num_existing], first, parent)]
        fresh = slice(len(existing), len(existing))
        if len(existing) == num_existing:
            # Nodes further on that exist belong to another prefix.
            num_fresh = min(num_new(digests[num_existing:], nodes[num_existing:]), self.capacity - self.num_nodes)
            fresh = slice(num_existing, num_existing + num_fresh)
        returned = np.flatnonzero(self.blocks.of_node[existing] == NONE)
        self.blocks.check_free(np.concatenate((own[returned], own[fresh])))
        slots = self.slots.of_node[existing[returned]]
        if len(returned):
            self._promote(existing[returned], own[returned])
        if fresh.stop > fresh.start:
            above = int(existing[-1]) if len(existing) else parent
            added = self._add(chain, first + fresh.start, above, own[fresh], digests[fresh])
            existing = np.concatenate((existing, added))
        return BlockPlaces(self.blocks.of_node[existing], slots)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def mark_evictable(self, blocks: Ids) -> None:
        """Mark `blocks`, findable, as evictable: they lost their last reference.

        Each chain's blocks come in order, with all descendants.
        """
        nodes = self.blocks.nodes_in(blocks)
        if self._evictable[nodes].any():
            raise BlockMisuse("blocks that are not in use cannot lose their last reference")
        self._evictable[nodes] = True
        self._policy.mark_evictable(nodes)

    def mark_used(self, blocks: Ids) -> None:
        """Mark `blocks`, findable and evictable, as referenced again. They are the first part of a chain, in its order."""
        nodes = self.blocks.nodes_in(blocks)
        self._check_evictable(nodes)
        self._evictable[nodes] = False
        self._policy.mark_used(nodes)

    def findable(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """Which of `blocks` are findable as nodes."""
        found: npt.NDArray[np.bool_] = self.blocks.node_at[as_index(blocks)] != NONE
        return found

    def entry_in(self, block: int) -> IndexEntry | None:
        """What is findable in `block` of the device, for watchers; None if nothing is."""
        places = [p for window in self.windows for p in window.blocks]
        if self._num_blocks == self.windows.num_window_blocks:  # nodes and window blocks lie in the same blocks
            places.append(self.blocks)
        node = max((int(p.node_at[block]) for p in places), default=NONE)
        if node == NONE:
            return None
        return IndexEntry(int(self._tree.depths[node]), int(self._hits[node]), self._tokens[node].copy())

    def snapshot(self, nodes: Nodes | None = None) -> BlockBatch:
        """The findable blocks of `nodes`; None: of all, parents before children."""
        if nodes is None:
            nodes = self._table.contents()
            nodes = nodes[np.argsort(self._tree.depths[nodes], kind="stable")]
        parents = self._tree.parents_of(nodes)
        is_root = parents == NONE
        digests = self._table.digests
        salts = {at: self._salts[int(nodes[at])] for at in np.flatnonzero(is_root).tolist()}
        return BlockBatch(
            digests[nodes],
            digests.take(parents, axis=0, mode="clip"),
            is_root,
            self._tokens[nodes],
            self.slots.have(nodes),
            {at: salt for at, salt in salts.items() if salt is not None},
        )

    # -- eviction --------------------------------------------------------------------------------------------------

    def victims(self, n: int) -> BlockIds:
        """The next `n` evictable blocks to evict, in order; fewer only if fewer are evictable. Read-only."""
        return self.blocks.of_node[self._policy.victims(n)[:n]]

    def host_victims(self, n: int) -> Int32:
        """The next `n` slots of the host tier to evict, in order; fewer only if fewer are in use. Read-only."""
        return self.slots.of_node[self._host_policy.victims(n)[:n]]

    def ranks(self, blocks: Ids) -> Ranks:
        """The policy's rank of each of `blocks`, findable: lower is evicted first."""
        return self._policy.ranks(self.blocks.nodes_in(blocks))

    def with_descendants(self, blocks: Ids) -> BlockIds:
        """`blocks`, findable and evictable, with all their descendants on the device; descendants come first.

        For blocks that did not come from `victims`.
        """
        nodes = self._tree.with_descendants(self.blocks.nodes_in(blocks))
        nodes = nodes[self.blocks.have(nodes)]
        left, roots_first = set(nodes.tolist()), []
        for node in nodes.tolist():
            path = []
            while node in left:
                left.remove(node)
                path.append(node)
                node = int(self._tree.parents[node])
            roots_first += path[::-1]
        return self.blocks.of_node[np.array(roots_first[::-1], np.int64)]

    def evict(self, blocks: Ids) -> BlockPlaces:
        """Forget `blocks`, findable and evictable, and all their descendants. Returns the places of all of them."""
        return self._evict(self.blocks.nodes_in(blocks))

    def evict_slots(self, slots: Ids) -> BlockPlaces:
        """Forget the nodes in `slots` and all their descendants. Returns the places of all of them."""
        return self._evict(self.slots.nodes_in(slots))

    def reset(self) -> BlockPlaces:
        """Forget everything. Sequences keep their blocks; what they compute later stays unregistered."""
        nodes = self._table.contents()
        places = self._leave_places(nodes)
        self._clear()
        return places

    # -- the host tier -----------------------------------------------------------------------------------------------

    def demote(self, blocks: Ids, slots: Ids) -> None:
        """Move the nodes in `blocks` (evictable, in the order of `victims`) to `slots`. Their window blocks stay.

        Raises BlockMisuse if a descendant would be left on the device, or a slot is in use.
        """
        nodes, to = self.blocks.nodes_in(blocks), as_index(slots)
        if len(to) != len(nodes):
            raise ValueError(f"{len(nodes)} blocks need as many slots, got {len(to)}")
        self._check_evictable(nodes)
        self.slots.check_free(to)
        # A descendant on the device has its parent there, so checking the children suffices.
        children = self._tree.children(nodes)
        if not np.isin(children[self.blocks.have(children)], nodes).all():
            raise BlockMisuse("blocks cannot leave the device while something behind them stays there")
        self.blocks.remove(nodes)
        self.slots.put(nodes, to)
        self._policy.remove(nodes)
        nodes = nodes[::-1]  # roots first
        self._host_policy.add(nodes, self._table.digests[nodes, 0])
        self._host_policy.mark_evictable(nodes)
        if self.events is not None:
            self.events.add_moved(self.snapshot(nodes))

    def promote(self, slots: Ids, blocks: Ids) -> None:
        """Move the nodes in `slots` (part of a chain, in its order) to `blocks`, which a request holds.

        Raises BlockMisuse if the first one's parent is not on the device, or a block is findable already.
        """
        nodes, to = self.slots.nodes_in(slots), as_index(blocks)
        if len(to) != len(nodes):
            raise ValueError(f"{len(nodes)} slots need as many blocks, got {len(to)}")
        self.blocks.check_free(to)
        parents = self._tree.parents_of(nodes)
        inner = parents[:1][parents[:1] != NONE]
        if not self.blocks.have(inner).all() or (parents[1:] != nodes[:-1]).any():
            raise BlockMisuse("slots come back to the device in the order of a chain, behind what is there")
        self._promote(nodes, to)

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recompute the incremental state. Raises AssertionError naming what does not hold."""
        nodes = self._table.contents()
        assert len(nodes) == self.num_nodes == len(set(nodes.tolist())), "nodes and digests do not match"
        unused = self._unused[: self.capacity - self.num_nodes].tolist()
        assert sorted([*unused, *nodes.tolist()]) == list(range(self.capacity)), "a node is lost, or twice in use"
        on_device = self.blocks.have(nodes)
        assert (on_device != self.slots.have(nodes)).all(), "a node lies in no place, or in two"
        self.blocks.check_invariants(nodes[on_device])
        self.slots.check_invariants(nodes[~on_device])
        self._tree.check_invariants(nodes)
        for window in self.windows:
            window.check_invariants(nodes)
        parents = self._tree.parents_of(nodes)
        roots = set(nodes[parents == NONE].tolist())
        named = {(salt, self._tokens[root].tobytes()): root for root, salt in self._salts.items()}
        assert roots == set(self._salts) and named == self._roots, "roots and salts do not match"
        inner, parents = nodes[parents != NONE], parents[parents != NONE]
        assert (~self.blocks.have(inner) | self.blocks.have(parents)).all(), "a block behind a slot"
        assert (self._evictable[inner] | ~self._evictable[parents]).all(), "a block in use behind one that is not"
        assert self._evictable[nodes[~on_device]].all(), "what lies on the host is in use"
        self.retained.check_invariants(nodes[on_device & self._evictable[nodes]])
        assert np.count_nonzero(self._evictable) == np.count_nonzero(self._evictable[nodes]), "an evictable node is missing"
        for leaf in np.setdiff1d(nodes, parents).tolist():
            path = self._tree.path_to(leaf)
            chain = self.hasher.chain(self._tokens[path].ravel(), self._salts[int(path[0])])
            assert (self._table.digests[path] == chain.digests(len(path))).all(), "a digest is not that of its tokens"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _num_true(self, chain: Chain, nodes: Nodes, first: int, parent: int | None) -> int:
        """How many leading `nodes` are the true successors of `parent` in `chain` from block `first` on."""
        if not len(nodes):
            return 0
        theirs = self._tree.parents[nodes]
        if theirs[0] != parent if parent is not None else nodes[0] != self._roots.get(chain.root):
            return 0
        same = self._tokens.take(nodes, axis=0) == chain.blocks(first + len(nodes))[first:]
        follows = theirs[1:] == nodes[:-1]
        if same.all() and follows.all():
            return len(nodes)
        return min(leading(same.all(axis=1)), 1 + leading(follows))

    def _add(self, chain: Chain, first: int, parent: int | None, blocks: BlockIds, digests: Digests) -> Nodes:
        """Make new nodes in `blocks`, in use, for the chain's blocks from `first` on."""
        left = self.capacity - self.num_nodes - len(blocks)
        nodes = self._unused[left : left + len(blocks)][::-1].astype(np.int64)
        self.num_nodes += len(nodes)
        self._tokens[nodes] = chain.blocks(first + len(nodes))[first:]
        self._hits[nodes] = 0
        self.blocks.put(nodes, blocks)
        self.slots.of_node[nodes] = NONE
        self.windows.add(nodes)
        self._tree.add_chain(parent, nodes)
        if parent is None:
            self._roots[chain.root] = root = int(nodes[0])
            self._salts[root] = chain.salt
        self._table.insert(nodes, digests)
        self._policy.add(nodes, digests[:, 0])
        if self.events is not None:
            self.events.add_stored(self.snapshot(nodes))
        return nodes

    def _promote(self, nodes: Nodes, blocks: BlockIds | Index) -> None:
        """Move host nodes `nodes` to `blocks`, where they are in use."""
        self._host_policy.remove(nodes)
        self.slots.remove(nodes)
        self.blocks.put(nodes, blocks)
        self._evictable[nodes] = False
        self._policy.add(nodes, self._table.digests[nodes, 0])
        if self.events is not None:
            self.events.add_moved(self.snapshot(nodes))

    def _evict(self, nodes: Nodes) -> BlockPlaces:
        nodes = self._tree.with_descendants(nodes)
        self._check_evictable(nodes)
        places = self._leave_places(nodes)
        self._evictable[nodes] = False
        if self.events is not None:
            self.events.add_removed(self._table.digests[nodes])
        self._table.remove(nodes)
        for root in self._tree.remove(nodes).tolist():
            del self._roots[self._salts.pop(root), self._tokens[root].tobytes()]
        left = self.capacity - self.num_nodes
        self._unused[left : left + len(nodes)] = nodes
        self.num_nodes -= len(nodes)
        return places

    def _leave_places(self, nodes: Nodes) -> BlockPlaces:
        """Take `nodes` and their window blocks out of their places and policies. Returns the places."""
        on_device = self.blocks.have(nodes)
        if on_device.all() and not self.windows:
            self._policy.remove(nodes)
            return BlockPlaces(self.blocks.remove(nodes), NOWHERE.slots)
        above, below = nodes[on_device], nodes[~on_device]
        self._policy.remove(above)
        self._host_policy.remove(below)
        window_blocks, slots = self.windows.evict(nodes)
        return BlockPlaces(self.blocks.remove(above), np.concatenate((self.slots.remove(below), slots)), window_blocks)

    def _check_evictable(self, nodes: Nodes) -> None:
        evictable = self._evictable[nodes]
        if not evictable.all():
            used = nodes[~evictable]
            shown = format_ids(self.blocks.of_node[used])
            raise BlockMisuse(f"blocks in use, or something behind a block is: {shown}")


def _check_hasher(chain: Chain, hasher: PrefixHasher) -> None:
    if chain.hasher is not hasher:
        raise ValueError("the chain's hashes are another hasher's; make chains by this index's `hasher`")
