"""A hash table from digests to nodes, in arrays: the 512 digests of a prompt are looked up at once.

    bucket = lower bits of the digest's first word              twice as many buckets as nodes, or more
    first[bucket] ──► node ── next[node] ──► node ──► none      nodes with digests in the same bucket

A dict of the same size takes five times the memory and stops for half a second while it grows to a million entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .prefix_hash import Digests
from .prefix_tree import NONE, Nodes


class DigestTable:
    """The digests of those nodes among `0 .. capacity - 1` that have been inserted. All digests in the table are distinct."""

    def __init__(self, capacity: int) -> None:
        num_buckets = 1 << (2 * capacity - 1).bit_length()
        self.digests = np.zeros((capacity, 2), np.uint64)  # mutated by `insert` alone
        self._first = np.full(num_buckets, NONE, np.int32)
        self._next = np.empty(capacity, np.int32)
        self._leaving = np.zeros(capacity + 1, np.bool_)  # scratch; the last entry stands for NONE
        self._lower = np.uint64(num_buckets - 1)

    def find(self, digests: Digests) -> Nodes:
        """The node of each of `digests` [n, 2], or NONE."""
        nodes = self._first[self._buckets(digests)].astype(np.int64)
        others = self._others(nodes, digests)
        while len(others):
            further = self._next[nodes[others]].astype(np.int64)
            nodes[others] = further
            others = others[self._others(further, digests[others])]
        return nodes

    def insert(self, nodes: Nodes, digests: Digests) -> None:
        """Insert `nodes` with `digests` [n, 2]. Both must be distinct and not in the table."""
        self.digests[nodes] = digests
        buckets = self._buckets(digests)
        while len(nodes):
            self._next[nodes] = self._first[buckets]
            self._first[buckets] = nodes
            # Of nodes with equal buckets only one is first: insert the others again.
            overwritten = self._first[buckets] != nodes
            nodes, buckets = nodes[overwritten], buckets[overwritten]

    def remove(self, nodes: Nodes) -> None:
        """Remove `nodes` from the table."""
        self._leaving[nodes] = True
        buckets = (self.digests.ravel().take(2 * nodes) & self._lower).astype(np.int64)
        at = self._first[buckets] = self._staying(self._first[buckets])
        while len(at := at[at != NONE]):
            following = self._next[at] = self._staying(self._next[at])
            at = following
        self._leaving[nodes] = False

    def contents(self) -> Nodes:
        """All nodes in the table, in no order. Raises AssertionError where a node is in the wrong place."""
        found = []
        at, buckets = self._first[self._first != NONE], np.flatnonzero(self._first != NONE)
        while len(at):
            assert (self._buckets(self.digests[at]) == buckets).all(), "a node in the wrong bucket"
            found.append(at)
            assert sum(map(len, found)) <= len(self._next), "nodes in a ring"
            at = self._next[at]
            at, buckets = at[at != NONE], buckets[at != NONE]
        return np.concatenate([np.empty(0, np.int64), *found]).astype(np.int64)

    def _buckets(self, digests: Digests) -> Nodes:
        return (digests[:, 0] & self._lower).astype(np.int64)

    def _others(self, nodes: Nodes, digests: Digests) -> Nodes:
        """Indices at which `nodes` has a node, not NONE, with a digest other than the given one."""
        theirs = self.digests.take(nodes, axis=0, mode="wrap")  # NONE reads another node's digest, which does not count
        differ = (theirs[:, 0] != digests[:, 0]) | (theirs[:, 1] != digests[:, 1])
        return np.flatnonzero(differ & (nodes != NONE))

    def _staying(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Each of `nodes`, or the next one in its list that is not being removed."""
        leaving = np.flatnonzero(self._leaving.take(nodes))
        while len(leaving):
            nodes[leaving] = following = self._next.take(nodes[leaving])
            leaving = leaving.compress(self._leaving.take(following))
        return nodes


def num_new(digests: Digests, nodes: Nodes) -> int:
    """The number of leading `digests` that are unknown and distinct from those before them. `nodes` is the result of `find`."""
    unknown = digests[: leading(nodes == NONE)]
    if distinct(unknown[:, 0]):
        return len(unknown)
    seen: set[tuple[int, ...]] = set()
    for digest in map(tuple, unknown.tolist()):
        if digest in seen:
            break
        seen.add(digest)
    return len(seen)


def leading(true: npt.NDArray[np.bool_]) -> int:
    """The number of true values before the first false one."""
    if not len(true):
        return 0
    first = int(true.argmin())
    return len(true) if true[first] else first


def distinct(values: npt.NDArray[np.integer]) -> bool:
    """Whether no two of `values` are equal."""
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()
