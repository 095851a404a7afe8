"""The protocol of eviction policies, which choose the cached blocks to evict first, and the policy least recently used.

A policy sees the findable blocks as the nodes of the index's tree (prefix_tree.py), and reads their parents and depths
there. A node is evictable while no sequence holds it. Calls take arrays of node ids, in chain order from the root. The
default policy is `ReuseDensity` (reuse_density.py); the comparison of policies is in
docs/decisions/0016-eviction-policy.md.

A sequence that uses a node uses its ancestors too. The descendants of an evictable node are therefore evictable, since
the same time or earlier. So an order by time, with the deepest first among equal times, never puts a node before its
descendants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .prefix_tree import Nodes, PrefixTree

Keys = npt.NDArray[np.uint64]
Ranks = npt.NDArray[np.float64]

# Of two nodes that became evictable at once the deeper ranks lower, in chains shorter than 2**24 blocks.
_DEEPEST = 2.0**-24


class EvictionPolicy(Protocol):
    """The events that the prefix index reports to a policy, and the questions that it asks.

    A policy may know only a part of the tree, which includes the descendants or the ancestors of each of its nodes.
    """

    def add(self, nodes: Nodes, keys: Keys) -> None:
        """`nodes`, in the tree already, are findable from now on and referenced.

        `keys` are 64 bits of the blocks' hashes, by which a policy may recognize blocks that it saw evicted.
        """

    def hit(self, nodes: Nodes) -> None:
        """A request found `nodes` and uses them."""

    def mark_evictable(self, nodes: Nodes) -> None:
        """`nodes` lost their last reference: they may be evicted from now on."""

    def mark_used(self, nodes: Nodes) -> None:
        """The evictable `nodes` are referenced again."""

    def victims(self, n: int) -> Nodes:
        """The nodes to evict next, in order: `n`, or all evictable ones. No node comes before its descendants. Read-only."""

    def remove(self, nodes: Nodes) -> None:
        """`nodes`, evictable or not, are no longer findable."""

    def ranks(self, nodes: Nodes) -> Ranks:
        """The rank of each of `nodes`: lower is evicted first; infinite for nodes that are not evictable."""


PolicyFactory = Callable[[PrefixTree], EvictionPolicy]  # makes a policy for the nodes of a tree


class Lru:
    """Evicts the nodes that became evictable longest ago; of nodes that did so at once the deepest first."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        # The number of the `mark_evictable` call; 0: referenced or unknown.
        self._evictable_since = np.zeros(tree.capacity, np.int64)
        self._num_calls = 0
        self._queue = EvictableQueue()

    def add(self, nodes: Nodes, keys: Keys) -> None:
        """Does nothing: a node is in no order before `mark_evictable`."""

    def hit(self, nodes: Nodes) -> None:
        """Does nothing: the order is that of `mark_evictable`, as a node is in use until its last holder ends."""

    def mark_evictable(self, nodes: Nodes) -> None:
        self._num_calls += 1
        self._evictable_since[nodes] = self._num_calls
        self._queue.append(deepest_first(self._tree, nodes), self._evictable_since)

    def mark_used(self, nodes: Nodes) -> None:
        self._evictable_since[nodes] = 0

    def victims(self, n: int) -> Nodes:
        return self._queue.first(n, self._evictable_since)

    def remove(self, nodes: Nodes) -> None:
        self._evictable_since[nodes] = 0

    def ranks(self, nodes: Nodes) -> Ranks:
        at = self._evictable_since[nodes]
        return np.where(at > 0, at - self._tree.depths[nodes] * _DEEPEST, np.inf)


class EvictableQueue:
    """Nodes in the order in which they became evictable. Nodes that left are dropped lazily.

    An entry is valid while its node's `evictable_since` is what it was when the entry was made; the number only grows
    from one marking to the next.
    """

    def __init__(self) -> None:
        self._entries = np.empty((2, 64), np.int64)  # nodes; their evictable_since
        self._start = self._end = 0

    def append(self, nodes: Nodes, evictable_since: Nodes) -> None:
        """Append `nodes` with their current `evictable_since`."""
        if self._end + len(nodes) > self._entries.shape[1]:
            self._make_room(len(nodes), evictable_since)
        end = self._end + len(nodes)
        self._entries[0, self._end : end] = nodes
        self._entries[1, self._end : end] = evictable_since[nodes]
        self._end = end

    def first(self, n: int, evictable_since: Nodes) -> Nodes:
        """The first `n` nodes with valid entries, or all."""
        length = n + 16  # a few may be invalid
        while True:
            stop = min(self._start + length, self._end)
            nodes, at = self._entries[:, self._start : stop]
            holds = evictable_since[nodes] == at
            num = int(np.count_nonzero(holds))
            if num < len(nodes):  # move valid entries up to the entries not read yet
                self._entries[:, stop - num : stop] = self._entries[:, self._start : stop][:, holds]
                self._start = stop - num
            if num >= n or stop == self._end:
                return self._entries[0, self._start : min(self._start + n, self._end)].copy()
            length *= 2

    def _make_room(self, num: int, evictable_since: Nodes) -> None:
        entries = self._entries[:, self._start : self._end]
        entries = entries[:, evictable_since[entries[0]] == entries[1]]
        self._end = entries.shape[1]
        self._entries = np.empty((2, 2 * (self._end + num)), np.int64)
        self._entries[:, : self._end] = entries
        self._start = 0


def deepest_first(tree: PrefixTree, nodes: Nodes) -> Nodes:
    """`nodes` sorted from the deepest up; stable for equal depths."""
    return nodes[np.argsort(-tree.depths[nodes], kind="stable")]
