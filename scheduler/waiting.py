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

    Apart from it are those `aside`, who need more blocks than the pool may have at present, the forks that wait for
    their leader's prompt: `Sequence.forks`, and those that are held.
    """

    def __init__(self) -> None:
        self.queue: list[Sequence] = []
        self._aside: list[Sequence] = []
        self._num_behind = 0  # forks behind leaders
        self._num_held = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside) + self._num_behind + self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        """All but the forks behind their leaders, in order."""
        return iter(sorted(self.queue + self._aside, key=_age))

    def hold(self, sequence: Sequence) -> None:
        """`sequence`, which is held, waits for its next token."""
        self._num_held += 1

    def let_go(self, sequence: Sequence) -> None:
        """A sequence that was held has its next token, and waits for a row; maybe for the blocks of its leader too."""
        sequence.held = False
        self._num_held -= 1
        if sequence.leader is not None:
            sequence.leader.forks[sequence] = None
        self.add(sequence)

    def add(self, sequence: Sequence) -> int:
        """Put `sequence` into the queue. Returns its place."""
        place = bisect.bisect(self.queue, _age(sequence), key=_age)
        self.queue.insert(place, sequence)
        return place

    def put_behind(self, sequence: Sequence, leader: Sequence) -> None:
        """A fork that does not wait yet waits until the prompt of `leader` is computed."""
        sequence.leader, sequence.behind = leader, True
        leader.forks[sequence] = None
        self._num_behind += 1

    def release_forks(self, leader: Sequence) -> None:
        """The prompt of `leader` is computed: who waited for that waits for a row."""
        for fork in leader.forks:
            if fork.behind:
                fork.behind = False
                self._num_behind -= 1
                self.add(fork)

    def hand_over_forks(self, leader: Sequence, heir: Sequence | None, is_computed: bool) -> None:
        """`leader` has ended before all its forks were seated. They are those of `heir` now, whose prompt may be computed;
        without one the first of them computes it, for the others too. Those that end with their first token cannot share it.
        """
        forks, leader.forks = list(leader.forks), {}
        if heir is None:
            short = [fork for fork in forks if fork.request.sampling.max_new_tokens == 1]
            heir, *forks = [fork for fork in forks if fork.request.sampling.max_new_tokens > 1] or short[:1]
            for fork in {**dict.fromkeys(short), heir: None}:
                self._let_begin_alone(fork)
        for fork in forks:
            fork.leader = heir
            if is_computed or fork.behind:
                heir.forks[fork] = None
            else:
                self.remove(fork)
                self.put_behind(fork, heir)
        if is_computed:
            self.release_forks(heir)

    def _let_begin_alone(self, fork: Sequence) -> None:
        """`fork` computes its prompt, or finds it where it is cached."""
        fork.leader = None
        if fork.behind:
            fork.behind = False
            self._num_behind -= 1
            self.add(fork)

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
        if sequence.leader is not None:
            sequence.leader.forks.pop(sequence, None)
        if sequence.held:
            self._num_held -= 1
            return
        if sequence.behind:
            sequence.behind = False
            self._num_behind -= 1
            return
        place = bisect.bisect_left(self.queue, _age(sequence), key=_age)
        if place < len(self.queue) and self.queue[place] is sequence:
            del self.queue[place]
        else:
            self._aside.remove(sequence)


def _age(sequence: Sequence) -> tuple[float, int, float, int]:
    request = sequence.request
    return request.arrival + AGING_S * request.priority, request.priority, request.arrival, sequence.number
