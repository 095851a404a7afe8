"""Pinned prefixes: chains of the prefix index with blocks that stay on the device although no request uses them.

A pin holds a reference to each of its blocks, as a row does, so they are live: not evicted, and moved when their extent is
given back. Of windows and states it holds what the token behind its last block reads. It is opened before its prompt is
computed, which counts its blocks, and holds them once they are findable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from .block_table import Int32
from .prefix_index import PrefixIndex
from .prefix_tree import Nodes

_NO_NODES: Nodes = np.empty(0, np.int64)
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class _Pin:
    """Blocks in all tables, and nodes, that it is to hold; nodes that it holds, and those with window blocks, by group."""

    num_blocks: int
    num_nodes: int
    nodes: Nodes
    of_windows: Sequence[Nodes] = ()


class PinnedPrefixes:
    """Pins, by name, of blocks of `pool`.

    Attributes:
        anchors: The blocks of the index's nodes: those of `pool`, or places without bytes.
        num_blocks: Blocks of `pool` held, each counted once.
        num_lost: Pins that `end_newest` and `end_with` have ended.
    """

    def __init__(self, pool: BlockAllocator) -> None:
        self.anchors = pool
        self.num_blocks = self.num_lost = 0
        self._pool = pool
        self._pins: dict[str, _Pin] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_promised(self) -> int:
        """Blocks held, and those of pins that hold none yet."""
        return self.num_blocks + sum(pin.num_blocks for pin in self._pins.values() if not len(pin.nodes))

    @property
    def nodes(self) -> list[Nodes]:
        """The nodes of each pin."""
        return [pin.nodes for pin in self._pins.values()]

    def references(self, index: PrefixIndex) -> BlockIds:
        """The blocks of the pool that pins hold, as often as they do."""
        return np.concatenate((_NO_BLOCKS, *(self._blocks_of(pin, index) for pin in self._pins.values())))

    def num_held(self, name: str) -> int:
        """Blocks of tokens that pin `name` holds; 0 once it has ended."""
        return len(self._pins[name].nodes) if name in self._pins else 0

    def has_nodes_for(self, num_nodes: int, index: PrefixIndex) -> bool:
        """Whether pins may hold `num_nodes` besides theirs. Of nodes without bytes they hold half of the index's at most."""
        promised = sum(len(pin.nodes) or pin.num_nodes for pin in self._pins.values())
        return self.anchors is self._pool or promised + num_nodes <= index.capacity // 2

    def num_among(self, nodes: Nodes) -> int:
        """How many of `nodes` are pinned."""
        return int(np.isin(nodes, np.concatenate((_NO_NODES, *self.nodes))).sum())

    def open(self, name: str, num_blocks: int, num_nodes: int) -> None:
        """Begin pin `name`, which is to hold `num_blocks` in all tables, and that many nodes."""
        assert name not in self._pins, f"{name} is open"
        self._pins[name] = _Pin(num_blocks, num_nodes, _NO_NODES)

    def hold(self, name: str, blocks: BlockIds, index: PrefixIndex) -> None:
        """Let pin `name` hold the first of `blocks`, of a chain from its root that a row holds, as many as are findable, and as
        every group can go on behind.

        No effect if the pin has ended, or holds blocks.
        """
        pin = self._pins.get(name)
        if pin is None or len(pin.nodes):
            return
        findable = index.findable(blocks)
        nodes = index.blocks.nodes_in(blocks if findable.all() else blocks[: int(findable.argmin())])
        pin.nodes = nodes = nodes[: index.windows.num_readable(nodes, on_host=False)]
        self.anchors.retain(index.blocks.of_node[nodes])
        pin.of_windows = [index.windows.read_next(window, nodes) for window in index.windows]
        for window, of_window in zip(index.windows, pin.of_windows, strict=True):
            self._pool.retain(window.blocks_of(of_window).ravel())
            window.mark_used(of_window)
        self.num_blocks = len(np.unique(self.references(index)))

    def end(self, name: str, index: PrefixIndex) -> bool:
        """End pin `name`: its blocks stay findable until they are evicted. Returns whether it was there."""
        pin = self._pins.pop(name, None)
        if pin is not None and len(pin.nodes):
            evictable = self.anchors.release(index.blocks.of_node[pin.nodes])
            if len(evictable):
                index.mark_evictable(evictable)
            for window, nodes in zip(index.windows, pin.of_windows, strict=True):
                self._pool.release((blocks := window.blocks_of(nodes)).ravel())
                window.mark_evictable(nodes[self._pool.references(blocks[0]) == 0][::-1], passed=False)
            self.num_blocks = len(np.unique(self.references(index)))
        return pin is not None

    def end_newest(self, index: PrefixIndex) -> str:
        """End the newest pin, which there is. Returns its name."""
        name = next(reversed(self._pins))
        self.end(name, index)
        self.num_lost += 1
        return name

    def end_with(self, blocks: Int32, index: PrefixIndex) -> None:
        """End the pins that hold one of `blocks`, of the pool."""
        for name in [name for name, pin in self._pins.items() if np.isin(self._blocks_of(pin, index), blocks).any()]:
            self.end(name, index)
            self.num_lost += 1

    def check_invariants(self, index: PrefixIndex) -> None:
        """Check that each pin holds a chain from its root, on the device. Raises AssertionError."""
        for name, pin in self._pins.items():
            assert len(self._blocks_of(pin, index)) <= pin.num_blocks, f"{name} holds more than it was opened for"
            assert len(pin.nodes) <= pin.num_nodes, f"{name} holds more nodes than it was opened for"
            assert index.is_chain(pin.nodes), f"{name} holds no chain"
            assert index.windows.num_readable(pin.nodes, on_host=False) == len(pin.nodes), f"{name} lacks what is read next"
            assert (index.blocks.of_node[pin.nodes] >= 0).all(), f"{name} holds a block that is not on the device"
        assert self.num_blocks == len(set(self.references(index).tolist())), "pinned blocks"

    def _blocks_of(self, pin: _Pin, index: PrefixIndex) -> BlockIds:
        """The blocks of the pool that `pin` holds."""
        blocks = [index.blocks.of_node[pin.nodes]] if self.anchors is self._pool else [_NO_BLOCKS]
        blocks += [window.blocks_of(nodes).ravel() for window, nodes in zip(index.windows, pin.of_windows, strict=False)]
        return np.concatenate(blocks)
