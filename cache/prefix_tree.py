"""The tree of nodes: the parent and the depth of each node, and its children as a doubly linked list.

A root is the first block of a prefix. It has no parent, the depth 0, and is in no list.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Nodes = npt.NDArray[np.int64]  # small ints that the prefix index assigns to findable blocks
NONE = -1  # in arrays of node ids: no node

_WIDE = 64  # more nodes than this are followed faster as an array than one by one


class PrefixTree:
    """The links between the nodes `0 .. capacity - 1`; those of unused nodes are undefined.

    `parents` and `depths` are mutated by `add_chain` alone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents = np.empty(capacity, np.int32)
        self.depths = np.empty(capacity, np.int32)  # number of ancestors
        self._child = np.empty(capacity, np.int32)
        self._next = np.empty(capacity, np.int32)
        self._previous = np.empty(capacity, np.int32)
        self._num_children = np.empty(capacity, np.int32)
        self._chosen = np.zeros(capacity + 1, np.bool_)  # scratch; the last entry stands for NONE, never chosen
        # Single entries are read and written five times faster through these memoryviews than in the arrays.
        self._parent_at, self._depth_at, self._child_at = self.parents.data, self.depths.data, self._child.data
        self._next_at, self._previous_at = self._next.data, self._previous.data
        self._num_children_at = self._num_children.data

    def add_chain(self, parent: int | None, nodes: Nodes) -> None:
        """Add the chain `nodes` (at least one) below `parent`."""
        self.parents[nodes[1:]] = nodes[:-1]
        self._child[nodes[:-1]] = nodes[1:]
        self._child[nodes[-1]] = NONE
        self._num_children[nodes[:-1]] = 1
        self._num_children[nodes[-1]] = 0
        self._next[nodes] = self._previous[nodes] = NONE
        top = int(nodes[0])
        depth = 0 if parent is None else self._depth_at[parent] + 1
        self.depths[nodes] = np.arange(depth, depth + len(nodes))
        self._parent_at[top] = NONE if parent is None else parent
        if parent is not None:
            self._num_children_at[parent] += 1
            sibling = self._child_at[parent]
            self._next_at[top] = sibling
            self._child_at[parent] = top
            if sibling != NONE:
                self._previous_at[sibling] = top

    def parents_of(self, nodes: Nodes) -> Nodes:
        """The parents of `nodes`, NONE for roots."""
        return self.parents[nodes].astype(np.int64)

    def path_to(self, node: int) -> Nodes:
        """The ancestors of `node` from its root on, and `node`."""
        path = [node]
        while (parent := self._parent_at[path[-1]]) != NONE:
            path.append(parent)
        return np.array(path[::-1], np.int64)

    def unbranched_behind(self, node: int) -> Nodes:
        """The descendants of `node`, down to the first that has no child or several; none if `node` has."""
        behind = []
        while self._num_children_at[node] == 1:
            node = self._child_at[node]
            behind.append(node)
        return np.array(behind, np.int64)

    def with_descendants(self, nodes: Nodes) -> Nodes:
        """`nodes` (distinct), followed by their descendants that are not among them."""
        chosen = self._chosen
        chosen[nodes] = True
        children = np.count_nonzero(chosen.take(self.parents[nodes]))  # those among `nodes`
        found = [] if children == self._num_children[nodes].sum() else self._below(nodes)
        chosen[nodes] = False
        chosen[found] = False
        return np.concatenate((nodes, np.array(found, np.int64))) if found else nodes

    def children(self, nodes: Nodes) -> Nodes:
        """All direct children of `nodes`, in no order."""
        found, at = [np.empty(0, np.int64)], self._child[nodes]
        while len(at := at[at != NONE]):
            found.append(at.astype(np.int64))
            at = self._next[at]
        return np.concatenate(found)

    def remove(self, nodes: Nodes) -> Nodes:
        """Remove `nodes`, which include all their descendants. Returns the roots among them."""
        chosen = self._chosen
        chosen[nodes] = True
        tops = nodes[~chosen.take(self.parents[nodes])]  # the other nodes' lists are removed as a whole
        chosen[nodes] = False
        is_root = self.parents[tops] == NONE
        child, following, previous, number = self._child_at, self._next_at, self._previous_at, self._num_children_at
        for top in tops[~is_root].tolist():
            parent, before, after = self._parent_at[top], previous[top], following[top]
            number[parent] -= 1
            if before == NONE:
                child[parent] = after
            else:
                following[before] = after
            if after != NONE:
                previous[after] = before
        roots: Nodes = tops[is_root]
        return roots

    def check_invariants(self, nodes: Nodes) -> None:
        """Check that `nodes`, those in use, have consistent parents and children. Raises AssertionError."""
        children: dict[int, list[int]] = {node: [] for node in nodes.tolist()}
        for node, parent in zip(nodes.tolist(), self.parents[nodes].tolist(), strict=True):
            assert parent == NONE or parent in children, "a node without its parent"
            depth = 0 if parent == NONE else self._depth_at[parent] + 1
            assert self._depth_at[node] == depth, "a node is not one deeper than its parent"
            if parent != NONE:
                children[parent].append(node)
        for node, expected in children.items():
            linked: list[int] = []
            before, at = NONE, self._child_at[node]
            while at != NONE and len(linked) <= len(expected):
                assert self._previous_at[at] == before, "a list of children that is not the same both ways"
                linked.append(at)
                before, at = at, self._next_at[at]
            assert sorted(linked) == sorted(expected), "children and parents do not match"
            assert self._num_children_at[node] == len(expected), "a node has another number of children"

    def _below(self, nodes: Nodes) -> list[int]:
        """Choose and return all descendants of `nodes` that are not chosen yet, by whole levels while these are wide."""
        found: list[int] = []
        open_ends: list[int] = []  # nodes with children not visited yet
        firsts = self._child[nodes]
        while len(firsts := firsts[firsts != NONE]) > _WIDE:
            level, siblings = [], firsts
            while len(siblings) > _WIDE:
                fresh = siblings[~self._chosen[siblings]]
                self._chosen[fresh] = True
                level.append(fresh)
                siblings = self._next[siblings]
                siblings = siblings[siblings != NONE]
            self._choose(siblings.tolist(), found, open_ends)
            wide = np.concatenate(level)
            found += wide.tolist()
            firsts = self._child[wide]
        self._choose(firsts.tolist(), found, open_ends)
        while open_ends:
            at = self._child_at[open_ends.pop()]
            if at != NONE:
                self._choose([at], found, open_ends)
        return found

    def _choose(self, firsts: list[int], found: list[int], open_ends: list[int]) -> None:
        """Choose the nodes of `firsts` and the siblings after them that are not chosen yet."""
        chosen, following = self._chosen.data, self._next_at
        for at in firsts:
            while at != NONE:
                if not chosen[at]:
                    chosen[at] = True
                    found.append(at)
                    open_ends.append(at)
                at = following[at]
