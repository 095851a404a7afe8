"""What a prefix index stands between, made naive: a strict eviction policy, hashes that collide, a consumer of events."""

from __future__ import annotations

import numpy as np
from fakes import World

from pagetide.cache.cache_events import CacheEventLog, CacheEvents, StoredBlock
from pagetide.cache.eviction import EvictionPolicy, Keys, Ranks
from pagetide.cache.prefix_hash import Digests, PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex
from pagetide.cache.prefix_tree import Nodes, PrefixTree


def ids(*nodes: int) -> np.ndarray:
    return np.array(nodes, np.int64)


def add_chain(policy: EvictionPolicy, *nodes: int, parent: int | None = None, keys: list[int] | None = None) -> None:
    """Add a chain below `parent`, to the policy and to its tree."""
    policy._tree.add_chain(parent, ids(*nodes))
    policy.add(ids(*nodes), np.array([node + 1000 for node in nodes] if keys is None else keys, np.uint64))


def remove(policy: EvictionPolicy, *nodes: int) -> None:
    policy.remove(ids(*nodes))
    policy._tree.remove(ids(*nodes))


class OldestFirst:
    """A policy that is naive and strict: the node evictable longest ago goes first, of nodes evictable at once the deepest.

    It refuses whatever the protocol of eviction policies does not allow.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.depth: dict[int, int] = {}
        self.evictable: dict[int, int] = {}  # node -> when
        self.calls = 0
        self.hits: list[list[int]] = []

    def add(self, nodes: Nodes, keys: Keys) -> None:
        assert len(nodes) == len(keys)
        assert nodes.dtype == np.int64 and keys.dtype == np.uint64
        for node in nodes.tolist():
            assert node not in self.depth
            self.depth[node] = depth = self._num_ancestors(node)
            assert self.tree.depths[node] == depth

    def _num_ancestors(self, node: int) -> int:
        parent = int(self.tree.parents[node])
        return 0 if parent == -1 else 1 + self._num_ancestors(parent)

    def hit(self, nodes: Nodes) -> None:
        assert all(node in self.depth for node in nodes.tolist())
        self.hits.append(nodes.tolist())

    def mark_evictable(self, nodes: Nodes) -> None:
        self.calls += 1
        for node in nodes.tolist():
            assert node in self.depth and node not in self.evictable
            self.evictable[node] = self.calls

    def mark_used(self, nodes: Nodes) -> None:
        for node in nodes.tolist():
            del self.evictable[node]

    def victims(self, n: int) -> Nodes:
        order = sorted(self.evictable, key=lambda node: (self.evictable[node], -self.depth[node], node))
        return np.array(order[: n + 1], np.int64)  # more than asked for is allowed

    def remove(self, nodes: Nodes) -> None:
        for node in nodes.tolist():
            del self.depth[node]
            self.evictable.pop(node, None)

    def ranks(self, nodes: Nodes) -> Ranks:
        return np.array([self.evictable.get(node, self.calls + 1) for node in nodes.tolist()], np.float64)


class Watched(OldestFirst):
    """A real policy, whose victims these are, watched by the strict one."""

    def __init__(self, tree: PrefixTree, real: EvictionPolicy) -> None:
        super().__init__(tree)
        self.real = real

    def add(self, nodes: Nodes, keys: Keys) -> None:
        super().add(nodes, keys)
        self.real.add(nodes, keys)

    def hit(self, nodes: Nodes) -> None:
        super().hit(nodes)
        self.real.hit(nodes)

    def mark_evictable(self, nodes: Nodes) -> None:
        super().mark_evictable(nodes)
        self.real.mark_evictable(nodes)

    def mark_used(self, nodes: Nodes) -> None:
        super().mark_used(nodes)
        self.real.mark_used(nodes)

    def victims(self, n: int) -> Nodes:
        return self.real.victims(n)

    def remove(self, nodes: Nodes) -> None:
        super().remove(nodes)
        self.real.remove(nodes)

    def ranks(self, nodes: Nodes) -> Ranks:
        return self.real.ranks(nodes)


class WeakHasher(PrefixHasher):
    """Digests of a few bits."""

    def __init__(self, block_size: int, num_bits: int, secret: bytes | None = None) -> None:
        super().__init__(block_size, secret)
        self.mask = np.uint64((1 << num_bits) - 1)

    def digests(self, sums: Digests) -> Digests:
        return np.column_stack((super().digests(sums)[:, 0] & self.mask, np.zeros(len(sums), np.uint64)))


class EventCopy:
    """What a consumer knows. It is strict: an event that changes nothing, or without its parent, is an error."""

    def __init__(self) -> None:
        self.blocks: dict[int, StoredBlock] = {}

    def apply(self, events: CacheEvents) -> None:
        assert not events.lost
        if events.cleared:
            self.blocks.clear()
        assert len(set(events.removed)) == len(events.removed)
        for digest in events.removed:
            del self.blocks[digest]
        left = {block.digest for block in events.stored}
        for block in events.stored:
            left.remove(block.digest)
            assert block.parent not in left, "a block before its parent"
            before = self.blocks.get(block.digest)
            assert block.parent is None or block.parent in self.blocks, "a block without its parent"
            assert before is None or before.on_host != block.on_host, "nothing changed"
            self.blocks[block.digest] = block


def blocks_of(index: PrefixIndex) -> dict[int, StoredBlock]:
    found = list(index.snapshot().blocks())
    assert len({block.digest for block in found}) == len(found) == index.num_nodes
    return {block.digest: block for block in found}


class EventWatcher:
    """Reads the events at each look of a walk: they tell the blocks that can be found."""

    def __init__(self) -> None:
        self.copy = EventCopy()

    def __call__(self, world: World) -> None:
        index = world.cache.index
        if index.events is None:
            index.events = CacheEventLog()
            self.copy.apply(CacheEvents(list(index.snapshot().blocks()), cleared=True))
        self.copy.apply(index.events.take().events())
        assert self.copy.blocks == blocks_of(index)
