"""Which cached blocks go first: the protocol of eviction policies, and least recently used.

A policy knows the findable blocks as nodes: small ints that the prefix index owns, each behind its parent, the block before
it. It is told what happens to them and says which of the parked ones (those that no sequence holds) go next. Calls take
arrays of node ids, a chain root first. The default policy is `ReuseDensity` (reuse_density.py); what was compared is in
docs/decisions/0016-eviction-policy.md.

Everybody who uses a node uses its ancestors too. So what stands behind a parked node is parked, since the same time or
before, and an order by time that puts the deepest of the same time first never names a node before its descendants.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Nodes = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Ranks = npt.NDArray[np.float64]

_DEEPEST = 2.0**-24  # of two nodes parked at once the deeper ranks lower, whatever chain is shorter than 2**24 blocks


class EvictionPolicy(Protocol):
    """What the prefix index tells a policy, and asks of it."""

    def add(self, nodes: Nodes, parents: Nodes, keys: Keys) -> None:
        """`nodes` can be found from now on and are referenced; `parents` are nodes, or -1 for a root.

        `keys` are 64 bits of the blocks' hashes, by which a policy may know again what it saw evicted.
        """

    def hit(self, nodes: Nodes) -> None:
        """A request found `nodes` and takes them."""

    def mark_evictable(self, nodes: Nodes) -> None:
        """`nodes` lost their last reference: they may be evicted from now on."""

    def take(self, nodes: Nodes) -> None:
        """The parked `nodes` are referenced again."""

    def victims(self, n: int) -> Nodes:
        """The parked nodes to evict next, in order: `n`, or all there are. No node comes before its descendants. Read-only."""

    def remove(self, nodes: Nodes) -> None:
        """`nodes`, parked or not, can no longer be found."""

    def ranks(self, nodes: Nodes) -> Ranks:
        """What each of `nodes` is worth: lower goes first; infinite for those that are not parked. Read-only."""


class Lru:
    """What was parked longest ago goes first, of nodes parked at once the deepest."""

    def __init__(self, capacity: int) -> None:
        self._depth = np.zeros(capacity, np.int64)
        self._parked_at = np.zeros(
            capacity, np.int64
        )  # number of the call of `mark_evictable`; 0: referenced, or unknown
        self._num_calls = 0
        self._queue = ParkedQueue()

    def add(self, nodes: Nodes, parents: Nodes, keys: Keys) -> None:
        set_depths(self._depth, nodes, parents)

    def hit(self, nodes: Nodes) -> None:
        """The order is that of `mark_evictable`: a node is used until its last holder ends."""

    def mark_evictable(self, nodes: Nodes) -> None:
        self._num_calls += 1
        self._parked_at[nodes] = self._num_calls
        self._queue.append(deepest_first(self._depth, nodes), self._parked_at)

    def take(self, nodes: Nodes) -> None:
        self._parked_at[nodes] = 0

    def victims(self, n: int) -> Nodes:
        return self._queue.first(n, self._parked_at)

    def remove(self, nodes: Nodes) -> None:
        self._parked_at[nodes] = 0

    def ranks(self, nodes: Nodes) -> Ranks:
        at = self._parked_at[nodes]
        return np.where(at > 0, at - self._depth[nodes] * _DEEPEST, np.inf)


class ParkedQueue:
    """Nodes in the order in which they were parked. Who leaves stays in it until somebody comes across.

    An entry holds as long as its node's `parked_at` is what it was when the entry was made; `parked_at` only grows from one
    parking to the next. Reading drops what no longer holds, so each entry is passed over once.
    """

    def __init__(self) -> None:
        self._entries = np.empty((2, 64), np.int64)  # nodes; their parked_at
        self._start = self._end = 0

    def append(self, nodes: Nodes, parked_at: Nodes) -> None:
        """Enter `nodes`, whose `parked_at` is that of now."""
        if self._end + len(nodes) > self._entries.shape[1]:
            self._make_room(len(nodes), parked_at)
        end = self._end + len(nodes)
        self._entries[0, self._end : end] = nodes
        self._entries[1, self._end : end] = parked_at[nodes]
        self._end = end

    def first(self, n: int, parked_at: Nodes) -> Nodes:
        """The first `n` nodes whose entries hold, or all."""
        length = n + 16  # a few may have gone
        while True:
            stop = min(self._start + length, self._end)
            nodes, at = self._entries[:, self._start : stop]
            holds = parked_at[nodes] == at
            num = int(np.count_nonzero(holds))
            if num < len(nodes):  # what holds moves up to what was not read
                self._entries[:, stop - num : stop] = self._entries[:, self._start : stop][:, holds]
                self._start = stop - num
            if num >= n or stop == self._end:
                return self._entries[0, self._start : min(self._start + n, self._end)].copy()
            length *= 2

    def _make_room(self, num: int, parked_at: Nodes) -> None:
        entries = self._entries[:, self._start : self._end]
        entries = entries[:, parked_at[entries[0]] == entries[1]]
        self._end = entries.shape[1]
        self._entries = np.empty((2, 2 * (self._end + num)), np.int64)
        self._entries[:, : self._end] = entries
        self._start = 0


def set_depths(depth: Nodes, nodes: Nodes, parents: Nodes) -> None:
    """Enter the depths of new `nodes`, roots first, behind `parents` (-1: none)."""
    starts = np.flatnonzero(parents[1:] != nodes[:-1]) + 1  # of the chains in `nodes`
    for start, stop in zip([0, *starts.tolist()], [*starts.tolist(), len(nodes)], strict=True):
        if start < stop:
            parent = int(parents[start])
            first = 0 if parent < 0 else int(depth[parent]) + 1
            depth[nodes[start:stop]] = np.arange(first, first + stop - start)


def deepest_first(depth: Nodes, nodes: Nodes) -> Nodes:
    """`nodes` sorted from the deepest up; of the same depth in the order given."""
    return nodes[np.argsort(-depth[nodes], kind="stable")]
