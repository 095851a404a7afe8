"""The waiting queue: its order, and the sequences that wait for something other than a row.

The order is arrival + AGING_S * priority: each step of priority is a head start of AGING_S seconds. Two waiting
sequences age equally, so their order never changes, and much later arrivals do not overtake a low priority.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from .sequence import Sequence

AGING_S = 30.0  # seconds of waiting equal to one step of priority


class Waiting:
    """Sequences without a row. `queue` is in order; the scheduler reads it and changes it through the methods only.

    `is_blocked` says whether admission refused the sequences that it tried, and nothing changed since.

    Three kinds wait outside `queue`: sequences `aside`, which need more blocks than the pool may have at present; forks
    that wait for their leader's prompt (`Sequence.forks`); and held sequences.
    """

    def __init__(self) -> None:
        self.queue: list[Sequence] = []
        self.is_blocked = False
        self._aside: list[Sequence] = []
        self._num_behind = 0  # forks behind leaders
        self._num_held = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside) + self._num_behind + self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences in order, except held ones and forks that wait for a prompt."""
        return iter(sorted(self.queue + self._aside, key=_age))

    @property
    def has_candidates(self) -> bool:
        """Whether a sequence waits for a row and may fit, as far as is known. Read-only."""
        return bool(self.queue) and not self.is_blocked

    def look_again(self) -> None:
        """Let admission retry refused sequences: something changed, so they may fit now."""
        self.is_blocked = False

    def hold(self, sequence: Sequence) -> None:
        """Count `sequence`, which is held, as waiting for its next token."""
        self._num_held += 1

    def let_go(self, sequence: Sequence) -> None:
        """Queue a held sequence that has its next token. It may share the blocks of its leader."""
        sequence.held = False
        self._num_held -= 1
        if sequence.leader is not None:
            sequence.leader.forks[sequence] = None
        self.add(sequence)

    def add(self, sequence: Sequence) -> int:
        """Insert `sequence` into the queue. Returns its place."""
        place = bisect.bisect(self.queue, _age(sequence), key=_age)
        self.queue.insert(place, sequence)
        return place

    def put_behind(self, sequence: Sequence, leader: Sequence) -> None:
        """Let a fork outside the queue wait until the prompt of `leader` is computed."""
        sequence.leader, sequence.behind = leader, True
        leader.forks[sequence] = None
        self._num_behind += 1

    def release_forks(self, leader: Sequence) -> None:
        """Queue the forks that wait for the prompt of `leader`, which is computed."""
        for fork in leader.forks:
            if fork.behind:
                fork.behind = False
                self._num_behind -= 1
                self.add(fork)

    def hand_over_forks(self, leader: Sequence, heir: Sequence | None, is_computed: bool) -> None:
        """Reassign the forks of `leader`, which ended before all of them were admitted, to `heir`.

        `is_computed` says whether the prompt of `heir` is computed. Without an heir the first fork computes the prompt
        for the others. Forks that end with their first token cannot share it and compute it themselves.
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
        """Let `fork` compute its prompt, or find it in the prefix cache."""
        fork.leader = None
        if fork.behind:
            fork.behind = False
            self._num_behind -= 1
            self.add(fork)

    def put_aside(self, place: int) -> None:
        """Move the sequence at `place` out of the queue: it needs more blocks than the limit."""
        self._aside.append(self.queue.pop(place))

    def call_back(self) -> None:
        """Queue the sequences put aside again."""
        for sequence in self._aside:
            self.add(sequence)
        self._aside.clear()

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence` from wherever it waits."""
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
