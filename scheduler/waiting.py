"""The waiting queue: its order, and the sequences that wait for something other than a row.

The order is arrival + AGING_S * priority: each step of priority is a head start of AGING_S seconds. Two waiting
sequences age equally, so their order never changes, and much later arrivals do not overtake a low priority.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection

from .request import Sequence, SequenceStatus

AGING_S = 30.0  # seconds of waiting equal to one step of priority


class Waiting:
    """Sequences without a row. `queue` is in order; the scheduler reads it and changes it through the methods only.

    Four kinds wait outside `queue`: `deferred` sequences, which need more blocks than the pool may have at present; those for
    which blocks are read from disk (`reading`); forks that wait for their leader's prompt (`Sequence.forks`); and beams that
    wait for a move. `is_blocked` says whether admission refused the sequences that it tried, and nothing changed since.
    """

    def __init__(self) -> None:
        self.queue: list[Sequence] = []
        self.deferred: list[Sequence] = []
        self.reading: list[Sequence] = []
        self.is_blocked = False

    @property
    def has_candidates(self) -> bool:
        """Whether a sequence waits for a row and may fit, as far as is known."""
        return bool(self.queue) and not self.is_blocked

    def look_again(self) -> None:
        """Let admission retry refused sequences: something changed, so they may fit now."""
        self.is_blocked = False

    def add(self, sequence: Sequence) -> int:
        """Insert `sequence` into the queue. Returns its place."""
        sequence.set_status(SequenceStatus.WAITING)
        place = bisect.bisect(self.queue, age(sequence), key=age)
        self.queue.insert(place, sequence)
        return place

    def defer(self, place: int) -> None:
        """Move the sequence at `place` out of the queue: it needs more blocks than the limit."""
        sequence = self.queue.pop(place)
        sequence.set_status(SequenceStatus.DEFERRED)
        self.deferred.append(sequence)

    def wait_for_read(self, sequence: Sequence) -> None:
        """Let a sequence without a row wait for what is read from disk."""
        sequence.set_status(SequenceStatus.READING)
        self.reading.append(sequence)

    def requeue_read(self, patience_s: float) -> None:
        """Queue the sequences for which all is read. Waits up to `patience_s` for the first one."""
        for sequence in self.reading.copy():
            if (read := sequence.read) is not None and patience_s:
                read.wait(patience_s)
                patience_s = 0.0
            if read is None or read.is_over:
                self.remove(sequence)
                self.add(sequence)
                self.look_again()

    def requeue_deferred(self) -> None:
        """Queue the deferred sequences again: the limit has changed."""
        for sequence in self.deferred:
            self.add(sequence)
        self.deferred.clear()
        self.look_again()

    def wait_for_move(self, sequence: Sequence) -> None:
        """Let a beam without a row wait until a move names it."""
        if sequence.status is not SequenceStatus.WAITING_FOR_MOVE:
            self.remove(sequence)
            sequence.set_status(SequenceStatus.WAITING_FOR_MOVE)

    def requeue_moved(self, sequence: Sequence) -> None:
        """Queue a beam that has its next token. It may share the blocks of its leader."""
        if sequence.leader is not None:
            sequence.leader.forks[sequence] = None
        self.add(sequence)

    def wait_for_prompt(self, fork: Sequence, leader: Sequence) -> None:
        """Let a fork without a row wait until the prompt of `leader` is computed."""
        self.remove(fork)
        fork.leader = leader
        leader.forks[fork] = None
        fork.set_status(SequenceStatus.WAITING_FOR_PROMPT)

    def release_forks(self, leader: Sequence) -> None:
        """Queue the forks that wait for the prompt of `leader`, which is computed: all of its forks may fit now."""
        if leader.forks:
            self.look_again()
        for fork in leader.forks:
            if fork.status is SequenceStatus.WAITING_FOR_PROMPT:
                self.add(fork)

    def detach_fork(self, fork: Sequence) -> None:
        """Let `fork` compute its tokens without a leader, or find them in the prefix cache."""
        if fork.leader is not None:
            fork.leader.forks.pop(fork, None)
            fork.leader = None
        if fork.status is SequenceStatus.WAITING_FOR_PROMPT:
            self.add(fork)

    def hand_over_forks(self, leader: Sequence, heir: Sequence | None) -> None:
        """Reassign the forks of `leader`, which ended before all of them were admitted, to `heir`.

        Without an heir the first fork computes the prompt for the others. Forks that end with their first token cannot
        share it and compute it themselves.
        """
        forks, leader.forks = list(leader.forks), {}
        if heir is None:
            short = [fork for fork in forks if fork.request.sampling.max_new_tokens == 1]
            heir, *forks = [fork for fork in forks if fork.request.sampling.max_new_tokens > 1] or short[:1]
            for fork in {**dict.fromkeys(short), heir: None}:
                self.detach_fork(fork)
        for fork in forks:
            if heir.is_computed or fork.status is SequenceStatus.WAITING_FOR_PROMPT:
                fork.leader = heir
                heir.forks[fork] = None
            else:
                self.wait_for_prompt(fork, heir)
        if heir.is_computed:
            self.release_forks(heir)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence` from the queue, the deferred ones and its leader's forks. Its status is yet to change.

        What is being read for it is read no further: others wait for theirs.
        """
        if sequence.leader is not None:
            sequence.leader.forks.pop(sequence, None)
        if sequence.status is SequenceStatus.WAITING:
            place = bisect.bisect_left(self.queue, age(sequence), key=age)
            assert self.queue[place] is sequence
            del self.queue[place]
        elif sequence.status is SequenceStatus.DEFERRED:
            self.deferred.remove(sequence)
        elif sequence.status is SequenceStatus.READING:
            self.reading.remove(sequence)
            if sequence.read is not None:
                sequence.read.stop()

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """Check that the containers agree with the status of all `sequences` that have not ended.

        Raises AssertionError naming what does not hold.
        """
        by_status = defaultdict(list)
        for sequence in sequences:
            by_status[sequence.status].append(sequence)
            for fork in sequence.forks:
                assert fork.leader is sequence, f"{_name(fork)} is listed with a sequence that is not its leader"
                assert not (fork.is_running or fork.has_ended), f"{_name(fork)} is listed as a waiting fork"
        assert self.queue == sorted(by_status[SequenceStatus.WAITING], key=age), "the queue has others, or is unordered"
        assert set(self.deferred) == set(by_status[SequenceStatus.DEFERRED]), "other sequences are deferred"
        assert len(self.deferred) == len(set(self.deferred)), "a sequence is deferred twice"
        assert set(self.reading) == set(by_status[SequenceStatus.READING]), "other sequences wait for reads"
        for fork in by_status[SequenceStatus.WAITING_FOR_PROMPT]:
            leader = fork.leader
            assert leader is not None and fork in leader.forks, f"{_name(fork)} waits, but its leader does not know it"
            assert leader in sequences, f"{_name(fork)} waits for a leader that has ended"
            assert not leader.is_computed, f"{_name(fork)} waits for a prompt that is computed"


def _name(sequence: Sequence) -> str:
    return f"{sequence.request.request_id!r} ({sequence.status.value})"


def age(sequence: Sequence) -> tuple[float, int, float, int]:
    """The place of a waiting sequence: the lowest is served first."""
    request = sequence.request
    return request.arrival + AGING_S * request.priority, request.priority, request.arrival, sequence.number
