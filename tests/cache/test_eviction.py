"""Eviction policies: exact orders, the same victims as naive ones under random use, no node before its descendants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetide.cache.eviction import EvictableQueue, EvictionPolicy, Lru
from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.reuse_density import HORIZON, NUM_CLASSES, SLICES, ReuseDensity, ReuseTimes, _Memory

CAPACITY = 48
POLICIES = [Lru, ReuseDensity]


def ids(*nodes: int) -> np.ndarray:
    return np.array(nodes, np.int64)


def add_chain(policy: EvictionPolicy, *nodes: int, parent: int | None = None, keys: list[int] | None = None) -> None:
    """Add a chain below `parent`, to the tree and to the policy."""
    policy._tree.add_chain(parent, ids(*nodes))
    policy.add(ids(*nodes), np.array([node + 1000 for node in nodes] if keys is None else keys, np.uint64))


def remove(policy: EvictionPolicy, *nodes: int) -> None:
    policy.remove(ids(*nodes))
    policy._tree.remove(ids(*nodes))


@pytest.mark.parametrize("make", POLICIES)
def test_the_chain_evictable_first_goes_first_and_its_deepest_node_before_the_others(make):
    policy = make(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1, 2)
    add_chain(policy, 3, 4, 5)
    policy.mark_evictable(ids(0, 1, 2))
    policy.mark_evictable(ids(3, 4, 5))
    assert policy.victims(4).tolist() == [2, 1, 0, 5]
    assert policy.victims(4).tolist() == [2, 1, 0, 5]
    assert policy.victims(99).tolist() == [2, 1, 0, 5, 4, 3]
    assert policy.victims(0).tolist() == []


@pytest.mark.parametrize("make", POLICIES)
def test_a_prefix_used_again_goes_last(make):
    """Scenario B 14: A ends, B ends, A's prompt runs again and ends."""
    policy = make(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1, 2)
    policy.mark_evictable(ids(0, 1, 2))
    add_chain(policy, 3, 4, 5)
    policy.mark_evictable(ids(3, 4, 5))
    policy.hit(ids(0, 1, 2))
    policy.mark_used(ids(0, 1, 2))
    policy.mark_evictable(ids(0, 1, 2))
    assert policy.victims(2).tolist() == [5, 4]


@pytest.mark.parametrize("make", POLICIES)
def test_only_evictable_nodes_go(make):
    policy = make(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1, 2, 3)
    assert policy.victims(4).tolist() == []
    policy.mark_evictable(ids(2, 3))
    assert policy.victims(4).tolist() == [3, 2]
    policy.mark_used(ids(2))
    remove(policy, 3)
    assert policy.victims(4).tolist() == []
    assert policy.ranks(ids(0, 2)).tolist() == [np.inf, np.inf]


def test_lru_goes_by_the_end_of_a_use_not_by_its_begin():
    policy = Lru(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1)
    add_chain(policy, 2, 3)
    policy.mark_evictable(ids(2, 3))  # began later, ended first
    policy.mark_evictable(ids(0, 1))
    assert policy.victims(4).tolist() == [3, 2, 1, 0]
    assert np.argsort(policy.ranks(ids(0, 1, 2, 3))).tolist() == [3, 2, 1, 0]


def test_reuse_density_gives_up_once_used_nodes_before_older_ones_used_twice():
    policy = ReuseDensity(PrefixTree(CAPACITY))
    add_chain(policy, 0, 1)
    policy.mark_evictable(ids(0, 1))
    policy.hit(ids(0))
    policy.mark_used(ids(0))
    policy.mark_evictable(ids(0))
    add_chain(policy, 2, 3)
    policy.mark_evictable(ids(2, 3))
    assert policy.victims(4)[-1] == 0
    assert policy.ranks(ids(0))[0] > policy.ranks(ids(2))[0]


def test_reuse_density_knows_again_what_it_saw_evicted():
    policy = ReuseDensity(PrefixTree(CAPACITY))
    add_chain(policy, 0)
    policy.mark_evictable(ids(0))
    remove(policy, 0)
    add_chain(policy, 7, keys=[1000])  # the same key
    add_chain(policy, 1)
    policy.mark_evictable(ids(7))
    policy.mark_evictable(ids(1))
    assert policy.victims(2).tolist() == [1, 7]


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
    policy.mark_evictable(ids(2))
    if make is ReuseDensity:
        assert policy.victims(3).tolist() == [2, 0], "worth more than its parent, which waits for it"


def test_a_loop_larger_than_the_pool_is_kept_in_part():
    """Chains of 4 nodes used in turn, twice as many as there is room for: least recently used hits nothing."""
    assert hits_in_a_loop(Lru(PrefixTree(256))) == 0
    assert hits_in_a_loop(ReuseDensity(PrefixTree(256))) > 0.25 * 4 * 128 * 20


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


def hits_in_a_loop(policy: EvictionPolicy) -> int:
    free = list(range(256))
    where: dict[int, int] = {}  # block -> node
    block_of: dict[int, int] = {}
    hits = 0
    for turn in range(128 * 40):
        chain = [4 * (turn % 128) + i for i in range(4)]
        found = 0
        while found < 4 and chain[found] in where:
            found += 1
        nodes = [where[block] for block in chain[:found]]
        policy.hit(ids(*nodes))
        policy.mark_used(ids(*nodes))
        hits += found if turn >= 128 * 20 else 0
        if len(free) < 4 - found:
            for node in policy.victims(4 - found - len(free)).tolist():
                remove(policy, node)
                del where[block_of.pop(node)]
                free.append(node)
        for block in chain[found:]:
            node = free.pop()
            add_chain(policy, node, parent=nodes[-1] if nodes else None, keys=[block + 1])
            where[block], block_of[node] = node, block
            nodes.append(node)
        policy.mark_evictable(ids(*nodes))
    return hits


def test_a_queue_drops_what_left_and_keeps_its_order():
    evictable_since = np.zeros(1000, np.int64)
    queue, expected = EvictableQueue(), []
    rng = np.random.default_rng(0)
    for call in range(1, 400):
        nodes = rng.choice(1000, rng.integers(1, 40), replace=False)
        evictable_since[nodes] = call
        queue.append(nodes, evictable_since)
        expected = [node for node in expected if node not in set(nodes.tolist())] + nodes.tolist()
        gone = set(rng.choice(1000, rng.integers(1, 40), replace=False).tolist())
        evictable_since[list(gone)] = 0
        expected = [node for node in expected if node not in gone]
        n = int(rng.integers(0, 100))
        assert queue.first(n, evictable_since).tolist() == expected[:n]
    assert queue.first(1000, evictable_since).tolist() == expected


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


class Naive:
    """The order of a policy, recomputed from scratch over all evictable nodes. What was learned is the policy's own."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.parent: dict[int, int] = {}
        self.evictable: dict[int, tuple[int, int]] = {}  # node -> call, slice
        self.uses: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.calls = 0

    def depth(self, node: int) -> int:
        return 0 if self.parent[node] < 0 else 1 + self.depth(self.parent[node])

    def rank(self, node: int) -> tuple[float, ...]:
        call, at = self.evictable[node]
        if isinstance(self.policy, Lru):
            return (call, -self.depth(node))
        times = self.policy._times
        age = min(times.now - at, times.horizon)
        kind = self.kind[node]
        return (times.densities[kind, age], -age, kind, call, -self.depth(node))

    def victims(self) -> list[int]:
        children = {node: sum(1 for p in self.parent.values() if p == node) for node in self.parent}
        order: list[int] = []
        waiting: set[int] = set()
        for node in sorted(self.evictable, key=self.rank):
            waiting.add(node)
            while node in waiting and not children[node]:
                waiting.remove(node)
                order.append(node)
                node = self.parent[node]
                if node >= 0:
                    children[node] -= 1
        return order


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_victims_are_those_of_a_naive_policy(make, data):
    """Requests over a small tree of blocks, several at a time, that end in any order."""
    policy = make(PrefixTree(CAPACITY))
    if make is ReuseDensity:  # slices of 3 nodes, so that a short life crosses many; and no two keys share a place
        policy._times = ReuseTimes(3)
        policy._memory = _Memory(4096)
        policy._sort_queues()
    naive = Naive(policy)
    free = list(range(CAPACITY))[::-1]
    node_of: dict[tuple[int, ...], int] = {}
    path_of: dict[int, tuple[int, ...]] = {}
    holders: dict[int, int] = {}
    running: list[list[int]] = []
    remembered: dict[tuple[int, ...], tuple[int, int]] = {}

    key_of: dict[tuple[int, ...], int] = {}

    def key(path: tuple[int, ...]) -> int:
        return key_of.setdefault(path, len(key_of) + 1)

    def end(nodes: list[int]) -> None:
        gone = []
        for node in nodes:
            holders[node] -= 1
            if not holders[node]:
                gone.append(node)
        now = policy._times.now if make is ReuseDensity else 0
        naive.calls += bool(gone)
        for node in gone:
            naive.evictable[node] = (naive.calls, now)
            naive.kind[node] = min(naive.uses[node].bit_length() - 1, NUM_CLASSES - 1)
        if gone:
            policy.mark_evictable(ids(*gone))

    for _ in range(data.draw(st.integers(1, 60))):
        if running and data.draw(st.booleans()):
            end(running.pop(data.draw(st.integers(0, len(running) - 1))))
        else:
            path = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
            prefixes = [path[: i + 1] for i in range(len(path))]
            nodes = [node_of[p] for p in prefixes if p in node_of]
            policy.hit(ids(*nodes))
            evictable = [node for node in nodes if node in naive.evictable]
            policy.mark_used(ids(*evictable))
            for node in nodes:
                naive.uses[node] = min(naive.uses[node] + 1, 16)
                naive.evictable.pop(node, None)
                holders[node] += 1
            need = len(path) - len(nodes) - len(free)
            if need > 0:
                evicted = policy.victims(need).tolist()
                assert evicted == naive.victims()[:need]
                if len(evicted) < need:
                    end(nodes)
                    continue
                for node in evicted:
                    remembered[path_of[node]] = (naive.uses[node], naive.evictable[node][1])
                remove(policy, *evicted)
                for node in evicted:
                    assert node not in naive.parent.values()
                    del node_of[path_of.pop(node)], naive.evictable[node], naive.parent[node], naive.uses[node]
                    free.append(node)
            new = [free.pop() for _ in prefixes[len(nodes) :]]
            parents = [*nodes, *new][len(nodes) - 1 : -1] if nodes else [-1, *new[:-1]]
            if new:
                keys = [key(p) for p in prefixes[len(nodes) :]]
                add_chain(policy, *new, parent=nodes[-1] if nodes else None, keys=keys)
            for node, parent, p in zip(new, parents, prefixes[len(nodes) :], strict=True):
                uses, at = remembered.pop(p, (0, 0))
                if make is ReuseDensity and uses and policy._times.now - at >= policy._times.horizon:
                    uses = 0
                naive.parent[node], naive.uses[node], holders[node] = parent, min(uses + 1, 16), 1
                node_of[p], path_of[node] = node, p
            running.append([*nodes, *new])
        expected = naive.victims()
        for n in (1, 3, CAPACITY):
            assert policy.victims(n).tolist() == expected[:n]
