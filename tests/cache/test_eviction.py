"""Eviction policies: exact orders, the same victims as naive ones under random use, no node before its descendants."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefix_fakes import add_chain, ids, remove

from pagetide.cache.eviction import Lru, PolicyFactory
from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.reuse_density import HORIZON, NUM_CLASSES, SLICES, ReuseDensity, ReuseTimes, _Memory

CAPACITY = 48
POLICIES = [Lru, ReuseDensity]


def test_a_node_waits_for_the_last_that_stands_behind_it_and_follows_at_once():
    policy = ReuseDensity(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1)
    policy.mark_evictable(ids(0, 1))
    for _ in range(4):
        policy.hit(ids(0, 1))
        policy.mark_used(ids(0, 1))
        policy.mark_evictable(ids(0, 1))
    add_chain(policy, 2)
    policy.mark_evictable(ids(2))
    policy._uses[0] = 1  # plant what the order of uses forbids: a parent worth less than its child
    policy.mark_used(ids(0))
    policy.mark_evictable(ids(0))
    assert policy.victims(1).tolist() == [2]
    assert policy.victims(3).tolist() == [2, 1, 0]


@pytest.mark.parametrize("make", POLICIES)
def test_a_parent_that_comes_after_its_child_goes_after_all_its_children(make):
    """In the host tier a block may come later than what stands behind it."""
    tree = PrefixTree(CAPACITY)
    policy = make(tree)
    tree.add_chain(None, ids(0, 1))
    tree.add_chain(0, ids(2))
    for nodes in ([1], [0, 2]):
        policy.add(ids(*nodes), np.array(nodes, np.uint64))
        policy.mark_evictable(ids(*nodes))
    assert policy.victims(3).tolist() == [1, 2, 0]
    policy.remove(ids(1))
    assert policy.victims(3).tolist() == [2, 0]
    policy.hit(ids(2))
    policy.mark_used(ids(2))
    assert np.isinf(policy.ranks(ids(2, 0))).tolist() == [True, False], "what is in use is worth more than all else"
    policy.mark_evictable(ids(2))
    if make is ReuseDensity:
        assert policy.victims(3).tolist() == [2, 0], "worth more than its parent, which waits for it"


def test_what_lies_longer_than_ages_count_goes_in_the_order_of_time():
    policy = ReuseDensity(PrefixTree(CAPACITY))
    for node in range(3):
        add_chain(policy, node)
        policy.mark_evictable(ids(node))
    add_chain(policy, 9)
    for _ in range(16 * SLICES * (HORIZON + 1)):
        policy.mark_evictable(ids(9))
        policy.mark_used(ids(9))
    policy.mark_evictable(ids(9))
    assert policy.victims(9).tolist() == [0, 1, 2, 9]
    assert policy.ranks(ids(0, 1, 2)).tolist() == [0, 0, 0]


def test_densities_fall_to_those_of_what_is_seen():
    times = ReuseTimes(16)
    before = times.densities.copy()
    assert before.shape == (NUM_CLASSES, SLICES * HORIZON + 1)
    assert (np.diff(before[:, 0]) > 0).all()  # the more uses, the more worth
    counts = np.zeros(NUM_CLASSES, np.int64)
    counts[0] = 16
    for _ in range(2 * SLICES * HORIZON):
        assert times.count_evictable(counts)
    assert (times.densities[0, :-1] < before[0, :-1] / 5).all()  # never reused
    assert (times.densities[:, -1] == 0).all()


@pytest.mark.parametrize("slices", [10, 20])
def test_ages_that_nobody_has_come_to_are_worth_no_less(slices: int) -> None:
    times = ReuseTimes(16)
    before = times.densities[0].copy()
    counts = np.zeros(NUM_CLASSES, np.int64)
    counts[0] = 16
    for _ in range(slices):
        times.count_evictable(counts)
    assert times.densities[0, slices // 4] < before[slices // 4] / 2, "none that lay so long was used again"
    later = slice(int(slices * 1.25), -1)  # its bin begins before, and its middle lies behind
    assert (times.densities[0, later] >= before[later]).all()


class Life:
    """Requests over a tree of blocks, some at a time, in a full pool; an end marks as evictable what no other holds.

    It knows the order of all evictable nodes from scratch; what was learned, the densities, is the policy's own.
    """

    def __init__(self, make: PolicyFactory, capacity: int, seed: int) -> None:
        self.tree = PrefixTree(capacity)
        self.policy: Any = make(self.tree)
        if isinstance(self.policy, ReuseDensity):
            self.policy._memory = _Memory(1 << 18)  # no two keys share a place
        self.rng = np.random.default_rng(seed)
        self.free = list(range(capacity))
        self.node_of: dict[tuple[int, ...], int] = {}
        self.path_of: dict[int, tuple[int, ...]] = {}
        self.key_of: dict[tuple[int, ...], int] = {}
        self.keys = itertools.count(1)
        self.parent: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.evictable: dict[int, tuple[int, int]] = {}  # node -> call, slice
        self.remembered: dict[tuple[int, ...], tuple[int, int]] = {}  # uses, slice
        self.running: list[list[int]] = []
        self.calls = 0

    @property
    def now(self) -> int:
        return self.policy._times.now if isinstance(self.policy, ReuseDensity) else 0

    def act(self, fan: int, length: int) -> None:
        event = self.rng.random()
        if self.running and event < 0.45:
            self.end(self.running.pop(self.rng.integers(len(self.running))))
        elif event < 0.5:
            self.give_back()
        else:
            steps = [min(fan, int(self.rng.zipf(1.5))) if i < 4 else int(self.rng.random() < 0.05) for i in range(length)]
            self.begin(tuple(steps[: self.rng.integers(1, length + 1)]))

    def begin(self, path: tuple[int, ...]) -> None:
        prefixes = [path[: i + 1] for i in range(len(path))]
        held = [self.node_of[prefix] for prefix in prefixes if prefix in self.node_of]
        self.policy.hit(ids(*held))
        self.policy.mark_used(ids(*(node for node in held if node in self.evictable)))
        for node in held:
            self.uses[node] = min(self.uses[node] + 1, 16)
            self.evictable.pop(node, None)
            self.holders[node] += 1
        lacking = len(path) - len(held) - len(self.free)
        if lacking > 0:
            victims = self.policy.victims(lacking).tolist()
            assert victims == self.victims()[:lacking]
            self.evict(victims)
        new = prefixes[len(held) :]
        if len(self.free) < len(new):
            return self.end(held)
        chain = held + [self.free.pop() for _ in new]
        keys = [self.key_of.setdefault(prefix, next(self.keys)) for prefix in new]
        if new:
            add_chain(self.policy, *chain[len(held) :], parent=held[-1] if held else None, keys=keys)
        for i, prefix in enumerate(new, len(held)):
            uses, at = self.remembered.pop(prefix, (0, 0))
            if isinstance(self.policy, Lru) or self.now - at >= self.policy._times.horizon:
                uses = 0
            node = self.node_of[prefix] = chain[i]
            self.path_of[node], self.parent[node] = prefix, chain[i - 1] if i else -1
            self.uses[node], self.holders[node] = min(uses + 1, 16), 1
        self.running.append(chain)

    def end(self, nodes: list[int]) -> None:
        for node in nodes:
            self.holders[node] -= 1
        gone = [node for node in nodes if not self.holders[node]]
        self.calls += 1
        self.evictable |= dict.fromkeys(gone, (self.calls, self.now))
        self.policy.mark_evictable(ids(*gone))

    def evict(self, nodes: list[int]) -> None:
        remove(self.policy, *nodes)
        for node in nodes:
            path = self.path_of.pop(node)
            self.remembered[path] = self.uses.pop(node), self.evictable.pop(node)[1]
            if self.rng.random() < 0.2:  # a memory of what was evicted forgets, parents before children too
                del self.remembered[path], self.key_of[path]
            del self.node_of[path], self.parent[node], self.holders[node]
            self.free.append(node)

    def give_back(self) -> None:
        """Any evictable node goes, with all behind it, as when an extent is given back."""
        if self.evictable:
            path = self.path_of[sorted(self.evictable)[self.rng.integers(len(self.evictable))]]
            self.evict([node for node, other in self.path_of.items() if other[: len(path)] == path])

    def rank(self, node: int) -> tuple[float, ...]:
        call, at = self.evictable[node]
        if isinstance(self.policy, Lru):
            return (call, -len(self.path_of[node]))
        times = self.policy._times
        age, kind = min(times.now - at, times.horizon), min(self.uses[node].bit_length() - 1, NUM_CLASSES - 1)
        return (times.densities[kind, age], -age, kind, call, -len(self.path_of[node]))

    def victims(self) -> list[int]:
        """All evictable nodes by their rank, and none before its children."""
        children, waiting, order = Counter(self.parent.values()), set(), []
        for node in sorted(self.evictable, key=self.rank):
            waiting.add(node)
            while node in waiting and not children[node]:
                waiting.remove(node)
                order.append(node)
                node = self.parent[node]
                children[node] -= 1
        return order


@pytest.mark.parametrize("make", POLICIES)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_victims_are_those_of_a_naive_policy(make, seed):
    life = Life(make, CAPACITY, seed)
    if make is ReuseDensity:  # slices of 3 nodes, so that a short life crosses many
        life.policy._times = ReuseTimes(3)
        life.policy._sort_queues()
    for _ in range(60):
        life.act(fan=3, length=6)
        expected = life.victims()
        for n in (1, 3, CAPACITY):
            assert life.policy.victims(n).tolist() == expected[:n]


@pytest.mark.parametrize(("capacity", "fan", "length", "seed"), [(200, 6, 30, 0), (600, 50, 20, 0), (1500, 30, 120, 0)])
def test_the_victims_are_those_of_a_naive_policy_however_much_is_closed(
    capacity: int, fan: int, length: int, seed: int
) -> None:
    """At sizes at which ReuseDensity reads whole arrays, and leaves what it need not read."""
    life, looks, most_closed = Life(ReuseDensity, capacity, seed), np.random.default_rng(seed), 0
    for _ in range(1_500):
        life.act(fan, length)
        if looks.random() < 0.1:
            n = int(looks.choice([1, 2, 9, 17, 40, capacity]))
            assert life.policy.victims(n).tolist() == life.victims()[:n]
        most_closed = max(most_closed, len(life.policy._closed))
    assert most_closed > 2, "no queue was closed: the life is too simple"
