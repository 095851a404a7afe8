"""The table of all sequences that have not ended, by request id: they are created, aborted and ended here."""

from __future__ import annotations

import itertools

from ..cache.manager import CacheManager
from .forecast import LengthForecast
from .outcome import Ends, Finished
from .plan_builder import PendingPlans
from .request import Request
from .rows import Rows
from .running import Running
from .sequence import FinishReason, Sequence, SequenceStatus
from .waiting import Waiting


class SequenceTable:
    """Sequences by request id, and the ends that no step has reported yet.

    The scheduler reads `by_id`, `aborted` (to be ended as soon as possible) and `finished` (in order), and changes them
    through the methods only. An end mutates `running`, `waiting`, the cache, `forecast` and `ends`.
    """

    def __init__(
        self, cache: CacheManager, rows: Rows, running: Running, waiting: Waiting, plans: PendingPlans,
        forecast: LengthForecast, ends: Ends,
    ) -> None:  # fmt: skip
        self.by_id: dict[str, Sequence] = {}
        self.aborted: list[Sequence] = []
        self.finished: list[Finished] = []
        self._cache = cache
        self._rows = rows
        self._running = running
        self._waiting = waiting
        self._plans = plans
        self._forecast = forecast
        self._ends = ends
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self.by_id)

    def create(self, request: Request) -> Sequence:
        """Return a new sequence of a valid `request`. It is in the table, and still to be queued."""
        chain = self._cache.chain(request.token_ids, request.cache_salt)
        leader = None if request.fork_of is None else self.by_id[request.fork_of]
        sequence = Sequence(request, next(self._numbers), chain, leader)
        self.by_id[request.request_id] = sequence
        return sequence

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        """Request that a sequence be ended by `end_aborted`. False if it is unknown, ended or already aborted."""
        sequence = self._not_aborted(request_id)
        if sequence is None:
            return False
        sequence.abort_reason = reason
        self.aborted.append(sequence)
        return True

    def withdraw(self, request_id: str) -> Finished | None:
        """End a sequence now. Returns its `Finished`, reported here only; None if unknown, ended or already aborted."""
        sequence = self._not_aborted(request_id)
        if sequence is None:
            return None
        self.end(sequence, "aborted")
        return self.finished.pop()

    def end_aborted(self) -> None:
        """End the aborted sequences that have not ended otherwise."""
        for sequence in self.aborted:
            if sequence.abort_reason is not None and not sequence.has_ended:
                self.end(sequence, sequence.abort_reason)
        self.aborted.clear()

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End `sequence`. Its row and blocks are free, unless a pending plan refers to them."""
        request = sequence.request
        if sequence.row is not None and self._plans.names(sequence.row):
            self._running.finish(sequence, computed=error is None)
        else:
            if sequence.is_running:
                self._running.leave([sequence], computed=error is None)
            else:
                self._waiting.remove(sequence)
            sequence.set_status(SequenceStatus.FINISHED)
        if sequence.forks:
            self._hand_over_forks(sequence)
        self._cache.swapping.suspended.drop(request.request_id)
        self._waiting.look_again()
        prompt = len(request.prompt_token_ids)
        generated = sequence.tokens[prompt:]
        if reason in ("stop", "length"):
            self._forecast.observe(len(generated), self._rows.limit_of(prompt, request.sampling) - prompt)
        found, at = sequence.root.num_cached_tokens, sequence.root.admitted_at
        end = Finished(request.request_id, reason, generated, sequence.preemptions, error, found, at)
        self.finished.append(end)
        self._ends.add(request, end)
        del self.by_id[request.request_id]

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the ends that were not reported yet; they count as reported."""
        finished, self.finished = tuple(self.finished), []
        return finished

    def failed(self, error: str) -> tuple[Finished, ...]:
        """The unreported ends, and one with `error` for every other sequence."""
        ends = list(self.finished)
        ended = {end.request_id for end in ends}
        for request_id, sequence in self.by_id.items():
            if request_id not in ended:
                generated = self._running.tokens_of(sequence)[len(sequence.request.prompt_token_ids) :]
                found, at = sequence.root.num_cached_tokens, sequence.root.admitted_at
                ends.append(Finished(request_id, "error", generated, sequence.preemptions, error, found, at))
                self._ends.add(sequence.request, ends[-1])
        return tuple(ends)

    def check_invariants(self) -> None:
        """Check that every sequence is kept as its status says. Raises AssertionError naming what does not hold."""
        running = dict.fromkeys(self._running.by_row.values())
        for request_id, sequence in self.by_id.items():
            status = sequence.status
            assert sequence.request.request_id == request_id, f"{request_id!r} names another request"
            assert status is not SequenceStatus.NEW and not sequence.has_ended, f"{request_id!r} is {status.value}"
            assert sequence.is_running == (sequence in running), f"{request_id!r}, {status.value}, runs or does not"
            assert sequence.is_running == (sequence.row is not None), f"{request_id!r} is {status.value} in a row"
        assert set(running) <= set(self.by_id.values()), "a sequence runs that has ended"
        for sequence in self.aborted:
            assert sequence.abort_reason is not None, f"{sequence.request.request_id!r} is ended without a reason"
        self._waiting.check_invariants(self.by_id.values())

    def _not_aborted(self, request_id: str) -> Sequence | None:
        sequence = self.by_id.get(request_id)
        return None if sequence is None or sequence.abort_reason else sequence

    def _hand_over_forks(self, leader: Sequence) -> None:
        """Reassign the waiting forks of `leader`, which has ended, to a family member for the prompt."""
        # no other sequence has as many tokens
        for fork in [s for s in leader.forks if s.shares > len(s.request.prompt_token_ids)]:
            self._waiting.detach_fork(fork)
        if not leader.forks:
            return
        family = [s for s in self._running.by_row.values() if s.root is leader.root and s.is_computed]
        heir = family[0] if family else leader.leader
        if heir is not None and self.by_id.get(heir.request.request_id) is not heir:
            heir = None
        self._waiting.hand_over_forks(leader, heir)
