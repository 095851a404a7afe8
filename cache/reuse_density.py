"""The default eviction policy: keep what promises the most hits for the room it takes, by what was learned from reuse.

A prefix that was hit is worth more than one that never was, one hit ten times more than one hit once; how much more, and
for how long, differs from load to load. So nodes fall into classes by how often they were used, and for each class
the policy learns how long parked nodes lie until they are used again. From that follows what a node of a class and an age
is worth: the best ratio, over all the times it might be kept from now on, of the chance of a use to the time that it takes up
room. (The Gittins index of the reuse time; Beckmann and others, LHD, NSDI 2018, estimate the same density without
the choice of the time.) Where everything is used again but too late, as in a loop larger than the pool, this keeps the older
and gives up the younger, where least recently used would lose all; where reuse comes soon or never, it is least recently used.

Time is counted in nodes parked, in slices of 1/16 of the capacity (of 16 nodes at least); a node's age is the slices since
it was parked. What was evicted is remembered by key for as long as ages count (8 capacities), so that reuse is seen that came
too late, and a node that comes back keeps its number of uses. What is learned fades with a half-life of 8 capacities. Before
anything is known, a node used u times is used again with probability u / (u + 1) (the rule of succession), at an age
of any order of magnitude alike; then classes that are rarely seen borrow the shape of the reuse times of all. What is
expected weighs as much as a quarter of a capacity of nodes.

Why this one, and what others gave: docs/decisions/0016-eviction-policy.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .eviction import Keys, Nodes, ParkedQueue, Ranks, deepest_first, set_depths

SLICES = 16  # of a capacity
MIN_SLICE_NODES = 16  # fewer say nothing
HORIZON = 8  # capacities: ages beyond are all the same
HALF_LIFE = 8  # capacities
WEIGHT_SLICES = 4  # slices of nodes that what is expected weighs as much as
NUM_CLASSES = 5  # used once, 2 or 3 times, 4 to 7, 8 to 15, more often
_MOST_USES = 2 ** (NUM_CLASSES - 1)
_CLASS_OF_USES = np.array([0, *(u.bit_length() - 1 for u in range(1, _MOST_USES + 1))], np.int64)

Table = npt.NDArray[np.float64]


class ReuseDensity:
    """The parked node goes first that promises the fewest hits per room and time; never before its descendants.

    In order of that density; of the same class and slice as `Lru` has it. A node whose turn comes while others stand behind
    it waits for the last of them and follows it at once. `capacity` is the number of nodes, ids `0 .. capacity - 1`.
    """

    def __init__(self, capacity: int) -> None:
        self._depth = np.zeros(capacity, np.int64)
        self._parent = np.zeros(capacity, np.int64)
        self._children = np.zeros(capacity, np.int64)
        self._key = np.zeros(capacity, np.uint64)
        self._uses = np.zeros(capacity, np.int64)
        self._class = np.zeros(capacity, np.int64)  # when it was parked last
        self._slice = np.zeros(capacity, np.int64)  # when it was parked last
        self._parked_at = np.zeros(capacity, np.int64)  # number of the call of `park`; 0: not parked
        self._gone = np.zeros(capacity, np.int64)  # scratch of `victims`: children chosen already
        self._num_calls = 0
        self._times = ReuseTimes(max(MIN_SLICE_NODES, capacity // SLICES))
        self._memory = _Memory(HORIZON * capacity)
        self._queues: dict[tuple[int, int], ParkedQueue] = {}  # by class and slice
        self._order: list[tuple[int, int]] = []  # the keys that there may be, lowest density first
        self._sort_queues()

    def add(self, nodes: Nodes, parents: Nodes, keys: Keys) -> None:
        set_depths(self._depth, nodes, parents)
        self._parent[nodes] = parents
        self._key[nodes] = keys
        self._children[nodes] = 0
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

    def park(self, nodes: Nodes) -> None:
        if not len(nodes):
            return
        self._num_calls += 1
        self._parked_at[nodes] = self._num_calls
        now = self._times.now
        nodes = deepest_first(self._depth, nodes)
        classes = _CLASS_OF_USES[self._uses[nodes]]
        self._class[nodes] = classes
        self._slice[nodes] = now
        counts = np.bincount(classes, minlength=NUM_CLASSES)
        for kind in np.flatnonzero(counts).tolist():
            queue = self._queues.setdefault((kind, now), ParkedQueue())
            queue.append(nodes[classes == kind] if counts[kind] < len(nodes) else nodes, self._parked_at)
        if self._times.parked(counts):
            self._merge_old()
            self._sort_queues()

    def take(self, nodes: Nodes) -> None:
        ages = self._times.now - self._slice[nodes]
        recent = ages < self._times.horizon
        self._times.reused(self._class[nodes[recent]], ages[recent])
        self._parked_at[nodes] = 0

    def remove(self, nodes: Nodes) -> None:
        parked = nodes[self._parked_at[nodes] > 0]
        self._memory.keep(self._key[parked], self._uses[parked], self._class[parked], self._slice[parked])
        self._parked_at[nodes] = 0
        parents = self._parent[nodes]
        np.subtract.at(self._children, parents[parents >= 0], 1)

    def ranks(self, nodes: Nodes) -> Ranks:
        ages = np.minimum(self._times.now - self._slice[nodes], self._times.horizon)
        densities = self._times.densities[self._class[nodes], ages]
        return np.where(self._parked_at[nodes] > 0, densities, np.inf)

    def victims(self, n: int) -> Nodes:
        chosen: list[Nodes] = []
        num = 0
        waiting: set[int] = set()
        for key in self._order:
            if num >= n:
                break
            queue = self._queues.get(key)
            read, length = 0, n - num
            while queue is not None and num < n:
                members = queue.first(length, self._parked_at)
                following = self._leaves_first(members[read:], waiting)
                chosen.append(following)
                num += len(following)
                if len(members) < length:
                    if not len(members):
                        del self._queues[key]
                    break
                read, length = len(members), 2 * length
        nodes = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        parents = self._parent[nodes]
        self._gone[parents[parents >= 0]] = 0
        return nodes[:n]

    def _leaves_first(self, nodes: Nodes, waiting: set[int]) -> Nodes:
        """Those of `nodes`, in order, that have no child left, and who waits for them; the others wait."""
        parents = self._parent[nodes]
        if not waiting:
            with_parent = parents[parents >= 0]
            np.add.at(self._gone, with_parent, 1)
            if (self._gone[nodes] >= self._children[nodes]).all():
                return nodes
            np.subtract.at(self._gone, with_parent, 1)
        gone, children, parent_of = self._gone, self._children, self._parent
        order: list[int] = []
        for node in nodes.tolist():
            waiting.add(node)
            while node in waiting and gone[node] >= children[node]:
                waiting.remove(node)
                order.append(node)
                node = int(parent_of[node])
                if node >= 0:
                    gone[node] += 1
        return np.array(order, np.int64)

    def _merge_old(self) -> None:
        """All slices beyond the horizon are one, -1, in the order of time."""
        oldest = self._times.now - self._times.horizon
        for kind, at in sorted(key for key in self._queues if 0 <= key[1] <= oldest):
            queue = self._queues.pop((kind, at))
            nodes = queue.first(len(self._parked_at), self._parked_at)
            self._queues.setdefault((kind, -1), ParkedQueue()).append(nodes, self._parked_at)

    def _sort_queues(self) -> None:
        now, densities = self._times.now, self._times.densities
        keys = {*self._queues, *((kind, now) for kind in range(NUM_CLASSES)), *((k, -1) for k in range(NUM_CLASSES))}
        age = {key: self._times.horizon if key[1] < 0 else now - key[1] for key in keys}
        self._order = sorted(keys, key=lambda key: (densities[key[0], age[key]], -age[key], key[0]))


class ReuseTimes:
    """What is known of how long parked nodes lie until they are used again, by class; and the densities that follow.

    `now` is the current slice, of `slice_nodes` nodes parked. `densities[class, age in slices]` are hits per node and
    slice; the last age stands for all beyond.
    """

    def __init__(self, slice_nodes: int) -> None:
        self.now = 1
        self.horizon = SLICES * HORIZON
        self._slice_nodes = slice_nodes
        self._in_slice = 0
        self._edges = _edges(self.horizon)  # ages are told apart by bins that grow with age
        bins = len(self._edges) - 1
        self._bin_of_age = np.repeat(np.arange(bins), np.diff(self._edges))
        # a node counts for a bin once it could have been reused half-way through it
        self._known_after = -(-(self._edges[:-1] + self._edges[1:]) // 2)
        self._num_parked = np.zeros((NUM_CLASSES, self.horizon + 1))  # by slice, a ring
        self._known = np.zeros((NUM_CLASSES, bins))
        self._reused = np.zeros((NUM_CLASSES, bins))
        self._fade = 0.5 ** (1 / (SLICES * HALF_LIFE))
        uses = 2.0 ** np.arange(NUM_CLASSES)
        self._chances = uses / (uses + 1)
        self._magnitudes = np.diff(np.log2(self._edges + 1)) / np.log2(self.horizon + 1) / 2
        self._ages = np.append(np.arange(self.horizon) + 0.5, self.horizon)
        self._middles = np.append((self._edges[:-1] + self._edges[1:]) / 2, self.horizon)
        self.densities = self._learn()

    def parked(self, counts: npt.NDArray[np.int64]) -> bool:
        """So many nodes of each class were parked. Returns whether a new slice began."""
        self._num_parked[:, self.now % (self.horizon + 1)] += counts
        self._in_slice += int(counts.sum())
        if self._in_slice < self._slice_nodes:
            return False
        while self._in_slice >= self._slice_nodes:
            self._in_slice -= self._slice_nodes
            self._next_slice()
        self.densities = self._learn()
        return True

    def reused(self, classes: Nodes, ages: Nodes) -> None:
        """Nodes of these classes were used again after `ages` slices, each below the horizon."""
        np.add.at(self._reused, (classes, self._bin_of_age[ages]), 1.0)

    def _next_slice(self) -> None:
        self.now += 1
        ring = self.horizon + 1
        self._num_parked[:, self.now % ring] = 0
        slices = self.now - self._known_after
        self._known += self._num_parked[:, slices % ring] * (slices > 0)
        self._known *= self._fade
        self._reused *= self._fade

    def _learn(self) -> Table:
        """Densities from the shares of each class that were reused in each bin."""
        weight = self._slice_nodes * WEIGHT_SLICES
        all_classes = self._reused.sum(axis=0) + weight * self._magnitudes
        shape = all_classes / (self._known.sum(axis=0) + weight)
        shape /= shape.sum()
        shares = (self._reused + weight * np.outer(self._chances, shape)) / (self._known + weight)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
        none = np.zeros((NUM_CLASSES, 1))
        hits = np.hstack((none, np.cumsum(shares, axis=1)))  # until each edge
        waiting = np.maximum(1.0 - (hits[:, :-1] + hits[:, 1:]) / 2, 1e-9) * np.diff(self._edges)
        room = np.hstack((none, np.cumsum(waiting, axis=1)))
        gain = hits[:, None, 1:] - hits[:, :-1, None]  # [class, bin now, bin kept to]
        cost = room[:, None, 1:] - room[:, :-1, None]
        best = np.divide(gain, cost, out=np.zeros_like(gain), where=cost > 0).max(axis=2)
        return np.vstack([np.interp(self._ages, self._middles, [*row, 0.0]) for row in best])


class _Memory:
    """Nodes that were evicted, by key: uses, class and slice. In a full set of places the oldest makes room."""

    WAYS = 4  # places of a set

    def __init__(self, size: int) -> None:
        sets = 1 << (-(-size // self.WAYS) - 1).bit_length()
        self._mask = np.uint64(sets - 1)
        self._keys = np.zeros((sets, self.WAYS), np.uint64)
        self._facts = np.zeros((sets, self.WAYS), np.int64)  # slice, uses, class; 0: empty

    def keep(self, keys: Keys, uses: Nodes, classes: Nodes, slices: Nodes) -> None:
        sets = keys & self._mask
        ways = self._facts[sets].argmin(axis=1)  # two of one call that meet here share a place: the later stays
        self._keys[sets, ways] = keys
        self._facts[sets, ways] = (slices << 8) | (uses << 3) | classes

    def recall(self, keys: Keys) -> tuple[Nodes, Nodes, Nodes, Nodes]:
        """Which of `keys` are remembered, and their uses, classes and slices. They are forgotten."""
        sets = keys & self._mask
        found, ways = np.nonzero((self._keys[sets] == keys[:, None]) & (self._facts[sets] > 0))
        found, first = np.unique(found, return_index=True)
        sets, ways = sets[found], ways[first]
        facts = self._facts[sets, ways]
        self._facts[sets, ways] = 0
        return found, (facts >> 3) & 31, facts & 7, facts >> 8


def _edges(horizon: int) -> Nodes:
    """Edges of bins of ages, two to each doubling: 0, 1, 2, 3, 4, 6, 8, 12 and so on."""
    edges = [0, 1, 2, 3]
    while edges[-1] < horizon:
        edges.append(2 * edges[-2])
    return np.array(edges, np.int64)
