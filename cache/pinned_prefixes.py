"""Pinned prefixes: chains of the prefix index with blocks that stay on the device although no request uses them.

A pin holds a reference to each of its blocks, as a row does, so they are live: not evicted, and moved when their extent is
given back. It is opened before its prompt is computed, which counts its blocks, and holds them once they are findable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from .block_table import Int32
from .prefix_index import PrefixIndex
from .prefix_tree import Nodes

_NO_NODES: Nodes = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class _Pin:
    """Blocks that it is to hold, and the nodes of those that it holds."""

    num_blocks: int
    nodes: Nodes


class PinnedPrefixes:
    """Pins, by name, of blocks of `pool`.

    Attributes:
        num_blocks: Blocks held, each counted once.
        num_lost: Pins that `end_newest` and `end_with` have ended.
    """

    def __init__(self, pool: BlockAllocator) -> None:
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
        """The blocks of all pins, as often as pins hold them."""
        return index.blocks.of_node[np.concatenate((_NO_NODES, *self.nodes))]

    def num_held(self, name: str) -> int:
        """Blocks that pin `name` holds; 0 once it has ended."""
        return len(self._pins[name].nodes) if name in self._pins else 0

    def num_among(self, nodes: Nodes) -> int:
        """How many of `nodes` are pinned."""
        return int(np.isin(nodes, np.concatenate((_NO_NODES, *self.nodes))).sum())

    def open(self, name: str, num_blocks: int) -> None:
        """Begin pin `name`, which is to hold `num_blocks`."""
        assert name not in self._pins, f"{name} is open"
        self._pins[name] = _Pin(num_blocks, _NO_NODES)

    def hold(self, name: str, blocks: BlockIds, index: PrefixIndex) -> None:
        """Let pin `name` hold the first of `blocks`, of a chain from its root that a row holds, as far as they are findable.

        No effect if the pin has ended, or holds blocks.
        """
        pin = self._pins.get(name)
        if pin is None or len(pin.nodes):
            return
        findable = index.findable(blocks)
        blocks = blocks[: pin.num_blocks] if findable.all() else blocks[: min(pin.num_blocks, int(findable.argmin()))]
        self._pool.retain(blocks)
        pin.nodes = index.blocks.nodes_in(blocks)
        self._count()

    def end(self, name: str, index: PrefixIndex) -> bool:
        """End pin `name`: its blocks stay findable until they are evicted. Returns whether it was there."""
        pin = self._pins.pop(name, None)
        if pin is not None and len(pin.nodes):
            evictable = self._pool.release(index.blocks.of_node[pin.nodes])
            if len(evictable):
                index.mark_evictable(evictable)
            self._count()
        return pin is not None

    def end_newest(self, index: PrefixIndex) -> str:
        """End the newest pin, which there is. Returns its name."""
        name = next(reversed(self._pins))
        self.end(name, index)
        self.num_lost += 1
        return name

    def end_with(self, blocks: Int32, index: PrefixIndex) -> None:
        """End the pins that hold one of `blocks`."""
        for name in [name for name, pin in self._pins.items() if np.isin(index.blocks.of_node[pin.nodes], blocks).any()]:
            self.end(name, index)
            self.num_lost += 1

    def check_invariants(self, index: PrefixIndex) -> None:
        """Check that each pin holds a chain from its root, on the device. Raises AssertionError."""
        for name, pin in self._pins.items():
            assert len(pin.nodes) <= pin.num_blocks, f"{name} holds more than it was opened for"
            assert index.is_chain(pin.nodes), f"{name} holds no chain"
            assert (index.blocks.of_node[pin.nodes] >= 0).all(), f"{name} holds a block that is not on the device"
        assert self.num_blocks == len({node for pin in self._pins.values() for node in pin.nodes.tolist()}), "pinned blocks"

    def _count(self) -> None:
        self.num_blocks = len(np.unique(np.concatenate((_NO_NODES, *self.nodes))))
