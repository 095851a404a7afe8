"""The findable blocks of a group of layers that is not the index's first: for some nodes, one in each of its tables.

The tree of the prefix index (prefix_index.py) has a node for each block of tokens. What a group with a window has computed
for that block belongs to the node as long as it is kept: its *window blocks*, one per table, which are found, used and evicted
together. A prefix can be used up to a block behind which every group has the window blocks that the next token reads.

Window blocks without a reference wait in one of two queues:

    passed   a sequence went on beyond their window: only a request that leaves its prompt just there would read them. They
             are evicted before anything else
    kept     the end of a prompt and the end of a sequence, where a next one may go on, and places where requests have left a
             common prefix. They go with their node, or when nothing else is left
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..allocator.blocks import BlockIds
from .block_table import Index, Int32
from .eviction import EvictableQueue
from .layer_groups import LayerGroup
from .node_places import NodePlaces
from .prefix_tree import NONE, Nodes

_NONE: Int32 = np.empty(0, np.int32)


def num_readable(have: Sequence[tuple[LayerGroup, npt.NDArray[np.bool_]]], block_size: int, num_blocks: int) -> int:
    """The most of the first `num_blocks` blocks of tokens of a chain behind which every group has what is read next; `have`
    says for each group which of these blocks it has.
    """
    lengths = np.arange(num_blocks + 1)
    good = np.ones(num_blocks + 1, np.bool_)
    for group, of_group in have:
        missing = np.where(of_group, -1, lengths[:-1])
        good[1:] &= np.maximum.accumulate(missing) < first_block_read(group, lengths[1:], block_size)
    return int(np.flatnonzero(good)[-1])


def first_block_read(group: LayerGroup, num_blocks: Index, block_size: int) -> Index:
    """The number of the first block of tokens that is read of `group` by the token behind so many blocks."""
    return group.first_read(num_blocks * block_size) // block_size


class WindowBlocks:
    """Window blocks of `group`: on the device among `num_blocks` blocks, on the host among `num_slots` slots, for
    nodes below `capacity`.

    Arrays of window blocks are [tables, nodes].
    """

    def __init__(self, group: LayerGroup, num_blocks: int, num_slots: int, capacity: int) -> None:
        self.group = group
        self.blocks = tuple(NodePlaces("blocks", num_blocks, capacity) for _ in range(group.num_tables))
        self.slots = tuple(NodePlaces("slots", num_slots, capacity) for _ in range(group.num_tables))
        # Running number of the last queueing; 0: referenced, or no window blocks.
        self._since = np.zeros(capacity, np.int64)
        self._num_queued = 0
        self._passed, self._kept, self._on_host = EvictableQueue(), EvictableQueue(), EvictableQueue()
        self._has_passed = np.zeros(capacity, np.bool_)  # whether window blocks that wait for eviction are passed ones
        self._keeps = np.zeros(capacity, np.bool_)  # requests may leave a common prefix behind these

    def add(self, nodes: Nodes) -> None:
        """`nodes` are new, and have no window blocks."""
        for places in (*self.blocks, *self.slots):
            places.of_node[nodes] = NONE
        self._since[nodes] = 0
        self._keeps[nodes] = False

    def have(self, nodes: Nodes, on_host: bool = True) -> npt.NDArray[np.bool_]:
        """Which of `nodes` have window blocks on the device, or, with `on_host`, anywhere."""
        found = self.blocks[0].have(nodes)
        return found | self.slots[0].have(nodes) if on_host else found

    def have_slots(self, nodes: Nodes) -> npt.NDArray[np.bool_]:
        """Which of `nodes` have their window blocks on the host."""
        return self.slots[0].have(nodes)

    def blocks_of(self, nodes: Nodes) -> BlockIds:
        """The device's window blocks of `nodes`, which have some."""
        return np.stack([places.of_node[nodes] for places in self.blocks])

    def slots_of(self, nodes: Nodes) -> Int32:
        """The host's window blocks of `nodes`, which have some."""
        return np.stack([places.of_node[nodes] for places in self.slots])

    def put(self, nodes: Nodes, blocks: BlockIds) -> None:
        """`blocks` are the window blocks of `nodes`, which have none; a sequence holds them."""
        for places, of_table in zip(self.blocks, blocks, strict=True):
            places.put(nodes, of_table)

    def keep(self, nodes: Nodes) -> None:
        """Requests may leave a common prefix behind `nodes`: do not evict their window blocks first."""
        self._keeps[nodes] = True
        moved = nodes[self._has_passed[nodes] & (self._since[nodes] > 0)]
        if len(moved):
            self.mark_evictable(moved, passed=False)

    def keeps(self, nodes: Nodes) -> npt.NDArray[np.bool_]:
        """Behind which of `nodes` requests may leave a common prefix: any that has a state, or blocks that all tokens read."""
        if self.group.is_state or self.group.window is None:
            return np.ones(len(nodes), np.bool_)
        return self._keeps[nodes]

    def mark_evictable(self, nodes: Nodes, passed: bool) -> None:
        """The window blocks of `nodes` lost their last reference: because a sequence went on (`passed`), or ended.

        They are in the order in which they may go.
        """
        keeps = self._keeps[nodes] if passed else np.ones(len(nodes), np.bool_)
        self._has_passed[nodes] = ~keeps
        for queue, of_queue in ((self._kept, nodes[keeps]), (self._passed, nodes[~keeps])):
            if len(of_queue):
                self._enter(queue, of_queue)

    def mark_used(self, nodes: Nodes) -> None:
        """The window blocks of `nodes` are referenced again."""
        self._since[nodes] = 0

    def passed(self, n: int) -> Nodes:
        """The next `n` nodes to take passed window blocks from; fewer only if fewer have some."""
        return self._passed.first(n, self._since)

    def kept(self, n: int) -> Nodes:
        """The next `n` nodes to take other window blocks from; fewer only if fewer have some without a reference."""
        return self._kept.first(n, self._since)

    def ranks(self, nodes: Nodes) -> npt.NDArray[np.float64]:
        """Of passed window blocks the order in which they go, all below 0; of others infinite."""
        ranks = np.full(len(nodes), np.inf)
        is_passed = self._has_passed[nodes] & (self._since[nodes] > 0)
        ranks[is_passed] = -1.0 / self._since[nodes[is_passed]]
        return ranks

    def evict(self, nodes: Nodes) -> tuple[BlockIds, Int32]:
        """Take the window blocks of those of `nodes` that have some. Returns the blocks and slots that held them."""
        blocks = [places.remove(nodes[places.have(nodes)]) for places in self.blocks]
        slots = [places.remove(nodes[places.have(nodes)]) for places in self.slots]
        self._since[nodes] = 0
        return np.concatenate(blocks), np.concatenate(slots)

    def evict_slots(self, nodes: Nodes) -> Int32:
        """Take the window blocks on the host from those of `nodes` that have some there. Returns their slots."""
        nodes = nodes[self.have_slots(nodes)]
        self._since[nodes] = 0
        return np.concatenate([places.remove(nodes) for places in self.slots])

    def demote(self, nodes: Nodes, slots: Int32) -> BlockIds:
        """Move the window blocks of `nodes`, all on the device, to `slots`. Returns the blocks."""
        blocks = np.stack([places.remove(nodes) for places in self.blocks])
        for places, of_table in zip(self.slots, slots, strict=True):
            places.put(nodes, of_table)
        self._since[nodes] = 0
        return blocks

    def stay_on_host(self, nodes: Nodes) -> None:
        """Those of `nodes`, which are on the device, that have window blocks on the host keep them until slots are short."""
        nodes = nodes[self.have_slots(nodes)]
        self._has_passed[nodes] = False
        if len(nodes):
            self._enter(self._on_host, nodes)

    def go_with(self, nodes: Nodes) -> None:
        """`nodes` are on the host: what they have there goes with them."""
        self._since[nodes[self.have_slots(nodes)]] = 0

    def promote(self, nodes: Nodes, blocks: BlockIds) -> Int32:
        """Move the window blocks of `nodes`, all on the host, to `blocks`, which a sequence holds. Returns the slots."""
        slots = np.stack([places.remove(nodes) for places in self.slots])
        self.put(nodes, blocks)
        self._since[nodes] = 0
        return slots

    def host_victims(self, n: int) -> Nodes:
        """The next `n` nodes to take window blocks on the host from, of those that are on the device themselves."""
        return self._on_host.first(n, self._since)

    def nodes_in(self, places: tuple[NodePlaces, ...], ids: Int32) -> Nodes:
        """The nodes with a window block in one of `ids`, which are `places` of this group or not."""
        nodes = np.concatenate([of_table.node_at[ids] for of_table in places])
        return np.unique(nodes[nodes != NONE]).astype(np.int64)

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """Move the window block in `sources[i]`, if it is one, to `targets[i]`."""
        for places in self.blocks:
            places.move(sources, targets)

    @property
    def nodes(self) -> Nodes:
        """The nodes with window blocks on the device. Looks at all blocks."""
        places = self.blocks[0]
        return places.node_at[places.used].astype(np.int64)

    def check_invariants(self, nodes: Nodes) -> None:
        """Check the window blocks of `nodes`, those in use. Raises AssertionError."""
        on_device, on_host = self.blocks[0].have(nodes), self.have_slots(nodes)
        assert not (on_device & on_host).any(), "window blocks lie in two places"
        for places, have in (*((p, on_device) for p in self.blocks), *((p, on_host) for p in self.slots)):
            assert (places.have(nodes) == have).all(), "a node has window blocks in some tables only"
            places.check_invariants(nodes[have])
        assert not self._since[nodes[~on_device & ~on_host]].any(), "window blocks that are not there wait for eviction"

    def evictable(self, nodes: Nodes) -> npt.NDArray[np.bool_]:
        """Which of `nodes` have window blocks that wait for eviction."""
        waiting: npt.NDArray[np.bool_] = self._since[nodes] > 0
        return waiting

    def _enter(self, queue: EvictableQueue, nodes: Nodes) -> None:
        first, self._num_queued = self._num_queued + 1, self._num_queued + len(nodes)
        self._since[nodes] = np.arange(first, first + len(nodes))
        queue.append(nodes, self._since)


class WindowBlocksOfGroups:
    """The window blocks of each of `groups`: its items, in their order. A node stands for `block_size` tokens.

    They lie in the blocks `0 .. num_blocks - 1` and the slots `0 .. num_slots - 1`, and belong to nodes below `capacity`.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, num_blocks: int, num_slots: int, capacity: int) -> None:
        self.groups, self.num_window_blocks, self.capacity = groups, num_blocks, capacity
        self._block_size, self._num_slots = block_size, num_slots
        self.clear()

    def clear(self) -> None:
        """Forget all window blocks."""
        self._each = tuple(WindowBlocks(g, self.num_window_blocks, self._num_slots, self.capacity) for g in self.groups)

    def __iter__(self) -> Iterator[WindowBlocks]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    @property
    def blocks(self) -> BlockIds:
        """The blocks with window blocks. Looks at all blocks."""
        return np.concatenate([_NONE, *(places.used for one in self._each for places in one.blocks)])

    @property
    def slots(self) -> Int32:
        """The slots with window blocks. Looks at all slots."""
        return np.concatenate([_NONE, *(places.used for one in self._each for places in one.slots)])

    def num_blocks(self, nodes: Nodes) -> Index:
        """The blocks of the window blocks that each of `nodes` has on the device."""
        blocks = np.zeros(len(nodes), np.int64)
        for one in self._each:
            blocks += one.have(nodes, on_host=False) * one.group.num_tables
        return blocks

    def num_readable(self, nodes: Nodes, on_host: bool, with_states: bool = True) -> int:
        """The most of the leading `nodes`, a chain from its root, behind which every group has what is read next; with
        `on_host` also on the host, and unless `with_states` but for states.
        """
        groups = [one for one in self._each if with_states or not one.group.is_state]
        return num_readable([(one.group, one.have(nodes, on_host)) for one in groups], self._block_size, len(nodes))

    def worth_keeping(self, nodes: Nodes, is_end: bool) -> list[tuple[Index, BlockIds]]:
        """What is on the device, of each group, that requests may read which begin with some of `nodes`, a chain from its root:
        the numbers of such nodes, and their window blocks [tables, n]. `is_end`: a sequence may end behind the last node.
        """
        found = []
        for one in self._each:
            wanted = one.keeps(nodes)
            if is_end and len(nodes):
                wanted[int(self._first_read(one, np.array([len(nodes)]))[0]) :] = True
            numbers = np.flatnonzero(wanted & one.have(nodes, on_host=False))
            found.append((numbers, one.blocks_of(nodes[numbers])))
        return found

    def read_next(self, one: WindowBlocks, nodes: Nodes) -> Nodes:
        """The last of `nodes`, a chain from its root, of which the token behind them reads window blocks of group `one`."""
        return nodes[int(self._first_read(one, np.array([len(nodes)]))[0]) :]

    def keep_end(self, nodes: Nodes) -> None:
        """Keep what the token behind `nodes`, a chain from its root, reads: requests leave a common prefix there."""
        for one in self._each:
            one.keep(self.read_next(one, nodes))

    def add(self, nodes: Nodes) -> None:
        """`nodes` are new, and have no window blocks."""
        for one in self._each:
            one.add(nodes)

    def attach(self, one: WindowBlocks, nodes: Nodes, blocks: BlockIds) -> tuple[BlockIds, Int32]:
        """Let `blocks` [tables, nodes] of a sequence be the window blocks of those of `nodes` that have none on the device.

        Returns the blocks that the nodes have now, and the slots of those on the host that they replace. Where blocks differ
        from the sequence's own, the caller treats them as the blocks that `PrefixIndex.register` returns.
        """
        slots = one.evict_slots(nodes)
        fresh = ~one.have(nodes)
        for places, of_table in zip(one.blocks, blocks, strict=True):
            places.check_free(of_table[fresh])
        one.put(nodes[fresh], blocks[:, fresh])
        return one.blocks_of(nodes), slots

    def evict(self, nodes: Nodes) -> tuple[BlockIds, Int32]:
        """Take all window blocks of `nodes`. Returns the blocks and slots that held them."""
        found = [one.evict(nodes) for one in self._each]
        blocks, slots = zip(*found, strict=True) if found else ((), ())
        return np.concatenate([_NONE, *blocks]), np.concatenate([_NONE, *slots])

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """Move the window block in `sources[i]`, if it is one, to `targets[i]`."""
        for one in self._each:
            one.move(sources, targets)

    def ranks(self, blocks: BlockIds, worth: npt.NDArray[np.float64]) -> None:
        """Write the rank of each of `blocks` that is a window block to `worth` [num_blocks]: lower is evicted first."""
        for one in self._each:
            for places in one.blocks:
                window_blocks = blocks[places.node_at[blocks] != NONE]
                worth[window_blocks] = one.ranks(places.node_at[window_blocks])

    def _first_read(self, one: WindowBlocks, num_nodes: Index) -> Index:
        """The number of the first block that is read by the token behind so many blocks."""
        return first_block_read(one.group, num_nodes, self._block_size)
