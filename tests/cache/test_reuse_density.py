"""The order of ReuseDensity at sizes at which it reads whole arrays, and what it need not read, against a naive one."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.reuse_density import ReuseDensity


def naive_victims(policy: ReuseDensity) -> list[int]:
    """All evictable nodes, sorted from scratch by what the policy knows of each; none before its children."""
    times = policy._times

    def place(node: int) -> tuple[float, ...]:
        kind, age = int(policy._class[node]), min(times.now - int(policy._slice[node]), times.horizon)
        return (times.densities[kind, age], -age, kind, policy._number[node])

    children, waiting, order = policy._children.tolist(), set(), []
    for node in sorted(np.flatnonzero(policy._number).tolist(), key=place):
        waiting.add(node)
        while node in waiting and not children[node]:
            waiting.remove(node)
            order.append(node)
            node = int(policy._tree.parents[node])
            if node >= 0:
                children[node] -= 1
    return order


class Life:
    """Requests over a tree of blocks, some at a time, in a full pool; an end marks as evictable what no other holds."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.tree = PrefixTree(capacity)
        self.policy = ReuseDensity(self.tree)
        self.rng = np.random.default_rng(seed)
        self.free = list(range(capacity))
        self.node_of: dict[tuple[int, ...], int] = {}
        self.path_of: dict[int, tuple[int, ...]] = {}
        self.holders: dict[int, int] = {}
        self.running: list[list[int]] = []

    def begin(self, path: tuple[int, ...]) -> None:
        prefixes = [path[: i + 1] for i in range(len(path))]
        held = [self.node_of[prefix] for prefix in prefixes if prefix in self.node_of]
        self.policy.hit(np.array(held, np.int64))
        self.policy.mark_used(np.array([node for node in held if not self.holders[node]], np.int64))
        for node in held:
            self.holders[node] += 1
        lacking = len(path) - len(held) - len(self.free)
        if lacking > 0:
            victims = self.policy.victims(lacking)
            assert victims.tolist() == naive_victims(self.policy)[:lacking]
            self.evict(victims.tolist())
        new = prefixes[len(held) :]
        if len(self.free) < len(new):
            return self.end(held)
        nodes = [self.free.pop() for _ in new]
        chain = held + nodes
        if nodes:
            keys = np.array([hash(prefix) & (2**64 - 1) for prefix in new], np.uint64)
            self.tree.add_chain(held[-1] if held else None, np.array(nodes))
            self.policy.add(np.array(nodes), keys)
        for node, prefix in zip(nodes, new, strict=True):
            self.node_of[prefix], self.path_of[node], self.holders[node] = node, prefix, 1
        self.running.append(chain)

    def end(self, nodes: list[int]) -> None:
        for node in nodes:
            self.holders[node] -= 1
        self.policy.mark_evictable(np.array([node for node in nodes if not self.holders[node]], np.int64))

    def evict(self, nodes: list[int]) -> None:
        self.policy.remove(np.array(nodes, np.int64))
        self.tree.remove(np.array(nodes, np.int64))
        for node in nodes:
            del self.node_of[self.path_of.pop(node)], self.holders[node]
            self.free.append(node)

    def recall(self) -> None:
        """Any evictable node goes, with all behind it, as when an extent is given back."""
        evictable = [node for node, num in self.holders.items() if not num]
        if evictable:
            path = self.path_of[evictable[self.rng.integers(len(evictable))]]
            self.evict([node for node, other in self.path_of.items() if other[: len(path)] == path])


@pytest.mark.parametrize(
    ("capacity", "fan", "length"), [(48, 3, 6), (200, 6, 30), (600, 50, 20), (1500, 30, 120)], ids=str
)
def test_the_victims_are_those_of_a_naive_policy_however_much_is_closed(capacity: int, fan: int, length: int) -> None:
    life = Life(capacity, seed=capacity)
    rng, most_closed = life.rng, 0
    for _ in range(1_500):
        event = rng.random()
        if life.running and event < 0.45:
            life.end(life.running.pop(rng.integers(len(life.running))))
        elif event < 0.5:
            life.recall()
        else:
            steps = [min(fan, int(rng.zipf(1.5))) if i < 4 else int(rng.random() < 0.05) for i in range(length)]
            life.begin(tuple(steps[: rng.integers(1, length + 1)]))
        if rng.random() < 0.1:
            n = int(rng.choice([1, 2, 9, 17, 40, capacity]))
            assert life.policy.victims(n).tolist() == naive_victims(life.policy)[:n]
        most_closed = max(most_closed, len(life.policy._closed))
    assert most_closed > 2, "no queue was closed: the life is too simple"


def test_a_closed_queue_is_read_again_when_the_last_behind_one_of_it_goes() -> None:
    tree = PrefixTree(64)
    policy = ReuseDensity(tree)
    tree.add_chain(None, np.array([0, 1]))
    policy.add(np.array([0, 1]), np.array([10, 11], np.uint64))
    policy.hit(np.array([1]))  # worth more than its parent, as a node that was known from before
    policy.mark_evictable(np.array([0, 1]))
    tree.add_chain(None, np.array([2]))
    policy.add(np.array([2]), np.array([12], np.uint64))
    policy.hit(np.array([2]))
    policy.mark_evictable(np.array([2]))
    assert policy.victims(1).tolist() == [1]
    assert policy._closed == {(0, 1)}
    assert policy.victims(3).tolist() == [1, 0, 2], "who waits in a closed queue follows at once"
    policy.remove(np.array([1]))
    assert not policy._closed
    assert policy.victims(3).tolist() == [0, 2]
