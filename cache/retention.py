"""Retention hints: prefixes that are evicted after all others, until a time. They bound no request: what is needed is evicted.

The retained nodes of a tree are closed upwards: the ancestors of one are retained at least as long. So they can go after all
others, in the order of the ends of their times and the deepest first among equal ones, and no node goes before its
descendants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .eviction import EvictionPolicy, Keys, Ranks
from .prefix_tree import Nodes, PrefixTree

LOOK_S = 1.0  # hints end up to so much late: each look reads an entry per node
_LAST = 2.0**40  # above the ranks of all policies


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the blocks of a prompt are worth keeping.

    Attributes:
        seconds: From the time when the prompt is computed, and from the end of its request.
        num_tokens: Of the prompt's beginning; None: all of it.
        owner: Its hints share `max_blocks`.
        max_blocks: That hints of the owner retain at the same time; None: no limit.

    Raises:
        ValueError: a value is not of its type, or negative.
    """

    seconds: float
    num_tokens: int | None = None
    owner: str = ""
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        counts = (self.num_tokens, self.max_blocks)
        if not isinstance(self.seconds, int | float) or not self.seconds >= 0:
            raise ValueError(f"seconds must be 0 or more, got {self.seconds!r:.80}")
        if any(one is not None and (not isinstance(one, int) or one < 0) for one in counts):
            raise ValueError(f"num_tokens and max_blocks must be None, or integers of 0 or more, got {counts!r:.80}")
        if not isinstance(self.owner, str):
            raise ValueError(f"owner must be a text, got {self.owner!r:.80}")


class RetainedPrefixes:
    """An eviction policy over another one, `policy`, which knows no retained node as evictable.

    Args:
        num_blocks: Of the device; half of them are retained at most.
    """

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy, num_blocks: int) -> None:
        self._tree = tree
        self.policy = policy
        self._most = num_blocks // 2
        self.until = np.zeros(tree.capacity, np.float64)  # by node; 0: not retained. Read-only
        self._held = np.zeros(tree.capacity, np.bool_)  # retained and evictable
        self._owner = np.zeros(tree.capacity, np.int64)  # of retained nodes
        self._owners: dict[str, int] = {}
        self._counts: list[int] = []  # nodes by owner
        self._next_look = math.inf

    @property
    def num_nodes(self) -> int:
        """Retained nodes."""
        return sum(self._counts)

    def retain(self, nodes: Nodes, retention: Retention, now: float) -> None:
        """Retain the first of `nodes`, a chain from its root that a sequence uses, as many as the bounds allow."""
        owner = self._owners.setdefault(retention.owner, len(self._owners))
        self._counts += [0] * (owner == len(self._counts))
        known = int(np.count_nonzero(self.until[nodes]))  # the first ones
        room = self._most - self.num_nodes
        if retention.max_blocks is not None:
            room = min(room, retention.max_blocks - self._counts[owner])
        nodes = nodes[: known + max(room, 0)]
        fresh = nodes[known:]
        self._owner[fresh] = owner
        self._counts[owner] += len(fresh)
        until = now + retention.seconds
        self.until[nodes] = np.maximum(self.until[nodes], until)
        self._next_look = min(self._next_look, until)

    def expire(self, now: float) -> None:
        """End the hints that are over."""
        if now < self._next_look:
            return
        over = np.flatnonzero((self.until > 0) & (self.until <= now))
        evictable = over[self._held[over]]
        self._forget(over)
        if len(evictable):
            self.policy.mark_evictable(evictable[np.argsort(self._tree.depths[evictable], kind="stable")])
        if self.num_nodes:
            first = float(self.until.min(where=self.until > 0, initial=math.inf))
            self._next_look = max(first, now + LOOK_S)
        else:
            self._next_look = math.inf

    def add(self, nodes: Nodes, keys: Keys) -> None:
        self.policy.add(nodes, keys)

    def hit(self, nodes: Nodes) -> None:
        self.policy.hit(nodes)

    def mark_evictable(self, nodes: Nodes) -> None:
        if self.num_nodes:
            retained = self.until[nodes] > 0
            self._held[nodes[retained]] = True
            nodes = nodes[~retained]
        self.policy.mark_evictable(nodes)

    def mark_used(self, nodes: Nodes) -> None:
        if self.num_nodes:
            held = self._held[nodes]
            self._held[nodes[held]] = False
            nodes = nodes[~held]
        self.policy.mark_used(nodes)

    def victims(self, n: int) -> Nodes:
        found = self.policy.victims(n)
        if len(found) >= n or not self.num_nodes:
            return found
        held = np.flatnonzero(self._held)
        order = np.lexsort((-self._tree.depths[held], self.until[held]))
        return np.concatenate((found, held[order][: n - len(found)]))

    def remove(self, nodes: Nodes) -> None:
        if self.num_nodes:
            self._forget(nodes[self.until[nodes] > 0])
        self.policy.remove(nodes)

    def ranks(self, nodes: Nodes) -> Ranks:
        ranks = self.policy.ranks(nodes)
        return np.where(self._held[nodes], _LAST, ranks) if self.num_nodes else ranks

    def check_invariants(self, evictable: Nodes) -> None:
        """`evictable` are all nodes that a request does not use, on the device. Raises AssertionError."""
        retained = np.flatnonzero(self.until)
        assert len(retained) == self.num_nodes <= self._most, "retained nodes are not counted, or too many"
        counts = np.bincount(self._owner[retained], minlength=len(self._counts)).tolist()
        assert counts == self._counts, "owners are not counted"
        parents = self._tree.parents_of(retained)
        inner = parents >= 0
        assert (self.until[parents[inner]] >= self.until[retained[inner]]).all(), "a node is retained longer than its parent"
        held = np.intersect1d(retained, evictable)
        assert np.flatnonzero(self._held).tolist() == held.tolist(), "retained nodes that are evictable are not held"

    def _forget(self, nodes: Nodes) -> None:
        """End the retention of `nodes`, which the policy does not know as evictable yet."""
        self.until[nodes] = 0.0
        self._held[nodes] = False
        for owner, count in enumerate(np.bincount(self._owner[nodes], minlength=len(self._counts)).tolist()):
            self._counts[owner] -= count
