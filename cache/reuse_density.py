"""The default eviction policy: keep the blocks with the most expected hits per unit of space and time, learned from reuse.

Nodes are classified by how often they were used. For each class the policy learns the distribution of the time until
evictable nodes are used again. The worth of a class and an age is the best ratio, over all times to keep the node from
now on, of the probability of a use to the time that the node takes up space. (This is the Gittins index of the reuse
time; see also Beckmann and others, LHD, NSDI 2018.) Where every block is used again but too late, as in a loop larger
than the pool, this keeps the older blocks and evicts the younger, where least recently used would miss always.

Time is counted in nodes that become evictable, in slices of 1/16 of the capacity (at least 16 nodes). A node's age is
the number of slices since it became evictable. Evicted nodes are remembered by key for 8 capacities, so that the policy
sees reuse that came too late, and a returning node keeps its number of uses. What is learned decays with a half-life of
8 capacities. The prior for a node used u times is u / (u + 1) (the rule of succession), spread evenly over the orders
of magnitude of age. Rare classes borrow the shape of the reuse times of all classes. The prior weighs as much as a
quarter of a capacity of nodes.

Reasons and the comparison with others: docs/decisions/0016-eviction-policy.md.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from .eviction import EvictableQueue, Keys, Ranks, deepest_first
from .prefix_tree import Nodes, PrefixTree

SLICES = 16  # per capacity
MIN_SLICE_NODES = 16  # fewer have no significance
HORIZON = 8  # capacities: all ages beyond are equal
HALF_LIFE = 8  # capacities
WEIGHT_SLICES = 4  # the weight of the prior, in slices of nodes
NUM_CLASSES = 5  # used once, 2 or 3 times, 4 to 7, 8 to 15, more often
_MOST_USES = 2 ** (NUM_CLASSES - 1)
_CLASS_OF_USES = np.array([0, *(u.bit_length() - 1 for u in range(1, _MOST_USES + 1))], np.int64)
_OLD = -1  # stands for all slices beyond the horizon
_FEW = 8  # this many nodes are processed faster one by one than as arrays

Table = npt.NDArray[np.float64]
Turn = tuple[float, int, int, int]  # of a queue: density, negative age, class, slice; the lowest comes first


class ReuseDensity:
    """Evicts the evictable nodes with the fewest expected hits per space and time; descendants always before ancestors.

    Nodes of one class and slice go in the order of `Lru`. If a node's turn comes before all its descendants are
    evicted, it goes directly after the last of them.

    There is a queue for each class and slice. A queue in which all nodes wait for descendants is closed, and not read:
    none of its nodes can go before the last descendant of one has left.
    """

    def __init__(self, tree: PrefixTree) -> None:
        capacity = tree.capacity
        self._tree = tree
        self._children = np.zeros(capacity, np.int64)  # those that this policy knows
        self._key = np.zeros(capacity, np.uint64)
        self._uses = np.zeros(capacity, np.int64)
        self._class = np.zeros(capacity, np.int64)  # when it became evictable last
        self._slice = np.zeros(capacity, np.int64)  # when it became evictable last
        self._number = np.zeros(capacity, np.int64)  # order of marking; 0: not evictable
        self._gone = np.zeros(capacity, np.int64)  # scratch of `victims`: children chosen already
        self._num_evictable = 0  # since the start
        self._times = ReuseTimes(max(MIN_SLICE_NODES, capacity // SLICES))
        self._memory = _Memory(HORIZON * capacity)
        self._queues: dict[tuple[int, int], EvictableQueue] = {}  # by class and slice
        self._closed: set[tuple[int, int]] = set()  # those in which all nodes wait
        self._order: list[Turn] = []  # of the other queues

    def add(self, nodes: Nodes, keys: Keys) -> None:
        self._key[nodes] = keys
        parents = self._tree.parents_of(nodes)
        np.add.at(self._children, parents[parents >= 0], 1)
        self._uses[nodes] = 1
        found, uses, classes, slices = self._memory.recall(keys)
        if len(found):
            ages = self._times.now - slices
            recent = ages < self._times.horizon
            self._times.reused(classes[recent], ages[recent])
            self._uses[nodes[found[recent]]] = np.minimum(uses[recent] + 1, _MOST_USES)

    def hit(self, nodes: Nodes) -> None:
        self._uses[nodes] = np.minimum(self._uses[nodes] + 1, _MOST_USES)

    def mark_evictable(self, nodes: Nodes) -> None:
        if not len(nodes):
            return
        now = self._times.now
        nodes = deepest_first(self._tree, nodes)
        first, self._num_evictable = self._num_evictable + 1, self._num_evictable + len(nodes)
        self._number[nodes] = np.arange(first, first + len(nodes))
        classes = _CLASS_OF_USES[self._uses[nodes]]
        self._class[nodes] = classes
        self._slice[nodes] = now
        counts = np.bincount(classes, minlength=NUM_CLASSES)
        for kind in np.flatnonzero(counts).tolist():
            queue = self._opened(kind, now)
            queue.append(nodes[classes == kind] if counts[kind] < len(nodes) else nodes, self._number)
        if self._times.count_evictable(counts):
            self._merge_old()
            self._sort_queues()

    def mark_used(self, nodes: Nodes) -> None:
        ages = self._times.now - self._slice[nodes]
        recent = ages < self._times.horizon
        self._times.reused(self._class[nodes[recent]], ages[recent])
        self._number[nodes] = 0

    def remove(self, nodes: Nodes) -> None:
        are_evictable = self._number[nodes] > 0
        evictable = nodes if are_evictable.all() else nodes[are_evictable]
        self._memory.keep(self._key[evictable], self._uses[evictable], self._class[evictable], self._slice[evictable])
        self._number[nodes] = 0
        parents = self._tree.parents_of(nodes)
        parents = parents[parents >= 0]
        np.subtract.at(self._children, parents, 1)
        if self._closed:
            leaves = parents[(self._children[parents] == 0) & (self._number[parents] > 0)]
            for kind, since in zip(self._class[leaves].tolist(), self._slice[leaves].tolist(), strict=True):
                self._opened(kind, since if self._times.now - since < self._times.horizon else _OLD)

    def ranks(self, nodes: Nodes) -> Ranks:
        ages = np.minimum(self._times.now - self._slice[nodes], self._times.horizon)
        densities = self._times.densities.ravel()[self._class[nodes] * (self._times.horizon + 1) + ages]
        return np.where(self._number[nodes] > 0, densities, np.inf)

    def victims(self, n: int) -> Nodes:
        chosen: list[Nodes] = []
        num = at = 0
        while num < n and at < len(self._order):
            turn = self._order[at]
            queue = self._queues[turn[2:]]
            before, read, length = num, 0, n - num + _FEW
            while True:
                members = queue.first(length, self._number)
                following = self._following(members[read:], turn, n - num)
                chosen.append(following)
                num += len(following)
                if num >= n or len(members) < length:
                    break
                read, length = length, 2 * length
            if num > before:
                at += 1
                continue
            del self._order[at]  # all nodes wait, or have left
            if len(members):
                self._closed.add(turn[2:])
            else:
                del self._queues[turn[2:]]
        nodes = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        parents = self._tree.parents_of(nodes)
        self._gone[parents[parents >= 0]] = 0
        return nodes[:n]

    def _following(self, nodes: Nodes, turn: Turn, n: int) -> Nodes:
        """The nodes to evict when the queue of `turn` comes to its members `nodes`: these, and ancestors that waited for them.

        In order; at least `n`, or all there are.
        """
        if len(nodes) > 2 * _FEW:
            if not (self._gone[nodes] >= self._children[nodes]).any():
                return nodes[:0]
            if self._go_as_they_are(nodes, turn):
                return nodes
        gone, children, parents = self._gone.data, self._children.data, self._tree.parents.data
        order: list[int] = []
        for member in nodes.tolist():
            node = member
            while gone[node] >= children[node] and (node == member or self._waits(node, member, turn)):
                order.append(node)
                if len(order) >= n:
                    return np.array(order, np.int64)
                node = parents[node]
                if node < 0:
                    break
                gone[node] += 1
        return np.array(order, np.int64)

    def _go_as_they_are(self, nodes: Nodes, turn: Turn) -> bool:
        """Whether all of `nodes`, of the queue of `turn`, go in their order with no ancestor waiting. If so, counts them."""
        parents = self._tree.parents_of(nodes)
        inner = parents >= 0
        members, parents = nodes[inner], parents[inner]
        np.add.at(self._gone, parents, 1)
        if (self._gone[nodes] >= self._children[nodes]).all():
            kind, ages = turn[2], np.minimum(self._times.now - self._slice[parents], self._times.horizon)
            same_queue = (self._class[parents] == kind) & (ages == -turn[1])
            later = same_queue & (self._number[parents] > self._number[members])
            others = ~later & (self._gone[parents] >= self._children[parents])
            if not others.any() or not any(
                self._waits(*pair, turn) for pair in zip(parents[others].tolist(), members[others].tolist(), strict=True)
            ):
                return True
        np.subtract.at(self._gone, parents, 1)
        return False

    def _waits(self, node: int, member: int, turn: Turn) -> bool:
        """Whether `node`, without descendants left, had its turn before `member` of the queue of `turn`.

        If its turn is still to come, its queue is opened.
        """
        number = self._number.item(node)
        if not number:
            return False
        kind, since = self._class.item(node), self._slice.item(node)
        if self._times.now - since >= self._times.horizon:
            since = _OLD
        if (kind, since) == turn[2:]:
            return number < self._number.item(member)
        its = self._turn(kind, since)
        if its < turn:
            return True
        if self._closed:
            self._opened(*its[2:])
        return False

    def _opened(self, kind: int, since: int) -> EvictableQueue:
        """The queue of a class and slice, opened because one of its nodes may be evictable now."""
        key = (kind, since)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = EvictableQueue()
        elif key in self._closed:
            self._closed.remove(key)
        else:
            return queue
        insort(self._order, self._turn(kind, since))
        return queue

    def _turn(self, kind: int, since: int) -> Turn:
        age = self._times.horizon if since == _OLD else self._times.now - since
        return (self._times.densities.item(kind, age), -age, kind, since)

    def _merge_old(self) -> None:
        """Merge all slices beyond the horizon into one, in the order of time."""
        oldest = self._times.now - self._times.horizon
        for kind, since in sorted(key for key in self._queues if _OLD < key[1] <= oldest):
            self._closed.discard((kind, since))
            nodes = self._queues.pop((kind, since)).first(len(self._number), self._number)
            if len(nodes):
                self._closed.discard((kind, _OLD))
                self._queues.setdefault((kind, _OLD), EvictableQueue()).append(nodes, self._number)

    def _sort_queues(self) -> None:
        self._order = sorted(self._turn(*key) for key in self._queues if key not in self._closed)


class ReuseTimes:
    """Statistics of the time until evictable nodes are used again, by class, and the densities that follow from them.

    `now` is the current slice, of `slice_nodes` evictable nodes. `densities[class, age in slices]` are hits per node and
    slice; the last age stands for all beyond.
    """

    def __init__(self, slice_nodes: int) -> None:
        self.now = 1
        self.horizon = SLICES * HORIZON
        self._slice_nodes = slice_nodes
        self._in_slice = 0
        self._edges = _edges(self.horizon)  # bins of ages that widen with age
        bins = len(self._edges) - 1
        self._bin_of_age = np.repeat(np.arange(bins), np.diff(self._edges))
        # a node counts for a bin once it could have been reused half-way through it
        self._known_after = -(-(self._edges[:-1] + self._edges[1:]) // 2)
        self._num_evictable = np.zeros((NUM_CLASSES, self.horizon + 1))  # by slice, a ring buffer
        self._known = np.zeros((NUM_CLASSES, bins))
        self._reused = np.zeros((NUM_CLASSES, bins))
        self._fade = 0.5 ** (1 / (SLICES * HALF_LIFE))
        uses = 2.0 ** np.arange(NUM_CLASSES)
        self._chances = uses / (uses + 1)
        self._magnitudes = np.diff(np.log2(self._edges + 1)) / np.log2(self.horizon + 1) / 2
        self._ages = np.append(np.arange(self.horizon) + 0.5, self.horizon)
        self._middles = np.append((self._edges[:-1] + self._edges[1:]) / 2, self.horizon)
        self.densities = self._learn()

    def count_evictable(self, counts: npt.NDArray[np.int64]) -> bool:
        """Count evictable nodes per class. Returns whether a new slice began."""
        self._num_evictable[:, self.now % (self.horizon + 1)] += counts
        self._in_slice += int(counts.sum())
        if self._in_slice < self._slice_nodes:
            return False
        while self._in_slice >= self._slice_nodes:
            self._in_slice -= self._slice_nodes
            self._next_slice()
        self.densities = self._learn()
        return True

    def reused(self, classes: Nodes, ages: Nodes) -> None:
        """Count nodes of these classes that were used again after `ages` slices, each below the horizon."""
        np.add.at(self._reused, (classes, self._bin_of_age[ages]), 1.0)

    def _next_slice(self) -> None:
        self.now += 1
        ring = self.horizon + 1
        self._num_evictable[:, self.now % ring] = 0
        slices = self.now - self._known_after
        self._known += self._num_evictable[:, slices % ring] * (slices > 0)
        self._known *= self._fade
        self._reused *= self._fade

    def _learn(self) -> Table:
        """The densities, from the share of each class that was reused in each bin."""
        weight = self._slice_nodes * WEIGHT_SLICES
        all_classes = self._reused.sum(axis=0) + weight * self._magnitudes
        shape = all_classes / (self._known.sum(axis=0) + weight)
        shape /= shape.sum()
        shares = (self._reused + weight * np.outer(self._chances, shape)) / (self._known + weight)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
        none = np.zeros((NUM_CLASSES, 1))
        hits = np.hstack((none, np.cumsum(shares, axis=1)))  # up to each edge
        waiting = np.maximum(1.0 - (hits[:, :-1] + hits[:, 1:]) / 2, 1e-9) * np.diff(self._edges)
        room = np.hstack((none, np.cumsum(waiting, axis=1)))
        gain = hits[:, None, 1:] - hits[:, :-1, None]  # [class, bin now, bin kept to]
        cost = room[:, None, 1:] - room[:, :-1, None]
        best = np.divide(gain, cost, out=np.zeros_like(gain), where=cost > 0).max(axis=2)
        return np.vstack([np.interp(self._ages, self._middles, [*row, 0.0]) for row in best])


_NOTHING = (np.empty(0, np.int64),) * 4


class _Memory:
    """Evicted nodes by key: uses, class and slice. A set-associative table; in a full set the oldest entry is replaced."""

    WAYS = 4  # entries of a set

    def __init__(self, size: int) -> None:
        sets = 1 << (-(-size // self.WAYS) - 1).bit_length()
        self._mask = np.uint64(sets - 1)
        # Filled, not just reserved: else the first eviction of thousands would wait a millisecond for page faults.
        self._keys = np.full((sets, self.WAYS), 0, np.uint64)
        self._facts = np.full((sets, self.WAYS), 0, np.int64)  # slice, uses, class; 0: empty

    def keep(self, keys: Keys, uses: Nodes, classes: Nodes, slices: Nodes) -> None:
        sets = (keys & self._mask).astype(np.int64)
        # Two keys of one call that fall into the same set share a place: the later one stays.
        places = sets * self.WAYS + self._facts.take(sets, axis=0).argmin(axis=1)
        self._keys.ravel()[places] = keys
        self._facts.ravel()[places] = (slices << 8) | (uses << 3) | classes

    def recall(self, keys: Keys) -> tuple[Nodes, Nodes, Nodes, Nodes]:
        """Which of `keys` are remembered, and their uses, classes and slices. They are forgotten."""
        sets = (keys & self._mask).astype(np.int64)
        same = np.flatnonzero(self._keys.take(sets, axis=0) == keys[:, None])
        if not len(same):
            return _NOTHING
        places = sets[same // self.WAYS] * self.WAYS + same % self.WAYS
        remembered = self._facts.ravel()[places] > 0
        found, first = np.unique(same[remembered] // self.WAYS, return_index=True)
        places = places[remembered][first]
        facts = self._facts.ravel()[places]
        self._facts.ravel()[places] = 0
        return found, (facts >> 3) & 31, facts & 7, facts >> 8


def _edges(horizon: int) -> Nodes:
    """Edges of the age bins, two per doubling: 0, 1, 2, 3, 4, 6, 8, 12 and so on."""
    edges = [0, 1, 2, 3]
    while edges[-1] < horizon:
        edges.append(2 * edges[-2])
    return np.array(edges, np.int64)
