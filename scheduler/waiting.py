"""The queue: who waits for a row, in which order, and who waits for something else first.

Order is that of arrival, with AGING_S seconds of a head start for each step of priority: (arrival + AGING_S * priority). Two
that wait both grow older, so their order never changes, and a low priority is no longer overtaken by those that came so much
later than itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from .sequence import Sequence

AGING_S = 30.0  # seconds of waiting that outweigh a step of priority


class Waiting:
    """Sequences without a row. `queue` is in order; the scheduler reads it and changes it by the methods alone.

    Apart from it are those `aside`, who need more blocks than the pool may have at present, and the forks that wait for
    their leader's prompt: `Sequence.forks`.
    """

    def __init__(self) -> None:
        self.queue: list[Sequence] = []
        self._aside: list[Sequence] = []
        self._num_behind = 0  # forks behind leaders

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside) + self._num_behind

    def __iter__(self) -> Iterator[Sequence]:
        """All but the forks behind their leaders, in order."""
        return iter(sorted(self.queue + self._aside, key=_age))

    def add(self, sequence: Sequence) -> int:
        """Put `sequence` into the queue. Returns its place."""
        place = bisect.bisect(self.queue, _age(sequence), key=_age)
        self.queue.insert(place, sequence)
        return place

    def put_behind(self, sequence: Sequence, leader: Sequence) -> None:
        """A fork, new or at `queue`'s head, waits until the prompt of `leader` is computed."""
        leader.forks.append(sequence)
        self._num_behind += 1

    def release_forks(self, leader: Sequence) -> None:
        """Who waited for `leader` waits for a row."""
        self._num_behind -= len(leader.forks)
        for fork in leader.forks:
            self.add(fork)
        leader.forks = []

    def hand_over_forks(self, leader: Sequence) -> None:
        """`leader` ended before its prompt was computed: the first of its forks computes it, for the others too."""
        first, *others = leader.forks
        leader.forks = []
        first.leader = None
        first.forks += others
        for fork in others:
            fork.leader = first
        self._num_behind -= 1
        self.add(first)

    def put_aside(self, place: int) -> None:
        """Who stands at `place` of the queue needs more than may come."""
        self._aside.append(self.queue.pop(place))

    def call_back(self) -> None:
        """Who was put aside may be served now."""
        for sequence in self._aside:
            self.add(sequence)
        self._aside.clear()

    def remove(self, sequence: Sequence) -> None:
        """`sequence` does not wait any more, wherever it did."""
        place = bisect.bisect_left(self.queue, _age(sequence), key=_age)
        leader = sequence.leader
        if place < len(self.queue) and self.queue[place] is sequence:
            del self.queue[place]
        elif leader is not None and sequence in leader.forks:
            leader.forks.remove(sequence)
            self._num_behind -= 1
        else:
            self._aside.remove(sequence)


def _age(sequence: Sequence) -> tuple[float, int, float, int]:
    request = sequence.request
    return request.arrival + AGING_S * request.priority, request.priority, request.arrival, sequence.number
