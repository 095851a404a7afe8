"""The places of nodes: which node of the prefix index lies in which block of the device or slot of the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..allocator.blocks import BlockIds
from ..allocator.errors import BlockMisuse
from ..allocator.pool_view import format_ids
from .block_table import Index, Int32
from .prefix_tree import NONE, Nodes

Ids = Sequence[int] | BlockIds | Index


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlaces:
    """Blocks of the device and slots of the host tier, each in the order of the call that returns them.

    `window_blocks` are those that belong to nodes (window_blocks.py); `slots` are those of nodes and of window blocks.
    """

    blocks: BlockIds
    slots: Int32
    window_blocks: BlockIds = field(default_factory=lambda: _NO_BLOCKS)


_NO_BLOCKS: BlockIds = np.empty(0, np.int32)
NOWHERE = BlockPlaces(np.empty(0, np.int32), np.empty(0, np.int32))


class NodePlaces:
    """Which of the nodes `0 .. capacity - 1` lie in the places `0 .. num_places - 1`. `kind` is "blocks" or "slots".

    A place has one node at most. `of_node` is the place of each node in use, or NONE; `node_at` is the node in each place,
    or NONE. A call that raises BlockMisuse changes nothing.
    """

    def __init__(self, kind: str, num_places: int, capacity: int) -> None:
        self.of_node = np.empty(capacity, np.int32)
        self.node_at = np.full(num_places, NONE, np.int32)
        self._kind = kind
        self._mark = np.empty(num_places, np.int32)  # scratch: detects duplicate places without sorting

    @property
    def used(self) -> Int32:
        """The places with a node, lowest first. Looks at all places."""
        return np.flatnonzero(self.node_at != NONE).astype(np.int32)

    def have(self, nodes: Nodes) -> npt.NDArray[np.bool_]:
        """Which of `nodes` have a place here."""
        found: npt.NDArray[np.bool_] = self.of_node[nodes] != NONE
        return found

    def nodes_in(self, places: Ids) -> Nodes:
        """The node in each of `places`. Raises BlockMisuse if one is missing, or a place is named twice."""
        at = as_index(places)
        nodes = self.node_at[at].astype(np.int64)
        if (nodes == NONE).any() or not self._are_distinct(at):
            raise BlockMisuse(f"not all of {self._kind} {format_ids(at)} can be found, or one is named twice")
        return nodes

    def check_free(self, places: Int32 | Index) -> None:
        """Raise BlockMisuse if one of `places` has a node, or is named twice."""
        taken = places[self.node_at[places] != NONE]
        if len(taken) or not self._are_distinct(places):
            raise BlockMisuse(
                f"{self._kind} that can be found already, or are named twice, hold nothing new: {format_ids(taken)}"
            )

    def put(self, nodes: Nodes, places: Int32 | Index) -> None:
        """Put `nodes`, which have no place here, into `places`, which must be free."""
        self.of_node[nodes] = places
        self.node_at[places] = nodes

    def remove(self, nodes: Nodes) -> Int32:
        """Take `nodes` out of their places. Returns the places."""
        places: Int32 = self.of_node[nodes]
        self.node_at[places] = NONE
        self.of_node[nodes] = NONE
        return places

    def move(self, sources: Ids, targets: Ids) -> None:
        """Move the node in `sources[i]` to `targets[i]`. Ignores sources without a node. Raises BlockMisuse."""
        from_, to = as_index(sources), as_index(targets)
        nodes = self.node_at[from_]
        from_, to, nodes = from_[nodes != NONE], to[nodes != NONE], nodes[nodes != NONE]
        self.check_free(to)
        if not self._are_distinct(from_):
            raise BlockMisuse(f"one of {self._kind} {format_ids(from_)} is named twice; a block moves once")
        self.node_at[from_] = NONE
        self.node_at[to] = nodes
        self.of_node[nodes] = to

    def check_invariants(self, nodes: Nodes) -> None:
        """Check that exactly `nodes` lie here, each in one place. Raises AssertionError."""
        assert (self.node_at[self.of_node[nodes]] == nodes).all(), "a place names another node"
        assert np.count_nonzero(self.node_at != NONE) == len(nodes), "a place names a node that is not there"

    def _are_distinct(self, places: Int32 | Index) -> bool:
        order = np.arange(len(places), dtype=np.int32)
        self._mark[places] = order
        return bool((self._mark[places] == order).all())


def as_index(ids: Ids) -> Index:
    """`ids` as an array of the type that numpy indexes with fastest."""
    return np.asarray(ids, np.int64)
