"""The host's state per row of a model runner: tokens, the sampling of its request, and faults of earlier steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ...cache.block_table import Index, Int32
from ...scheduler.plan import Plan
from ...scheduler.request import Request
from ..errors import Attempt, format_error
from ..sampling.follower import TokenFollower
from ..sampling.logprobs import LogprobRequests
from ..sampling.sampler import Sampler
from .parts import ChunkGroup, Computed

log = logging.getLogger(__name__)

MOST_LOSSES = 4
"""How often a fault may leave a sequence's states unknown, before the sequence gets further, until its request ends."""


# Of rows: failures, deferrals, and lost states; of requests, losses.
RowFaults = tuple[dict[int, str], dict[int, int], set[int], dict[str, tuple[int, int]]]


class RowStates:
    """Each row's tokens and sampling, changed by plans, and why its chunks cannot be computed.

    A row's sampling state is released later if its release raises, but before the row is used again. If it cannot be started,
    the row's chunks fail.
    """

    def __init__(self, sampler: Sampler | TokenFollower, num_rows: int, max_tokens: int) -> None:
        self.sampler = sampler
        self.logprob_requests = LogprobRequests(num_rows)
        self.tokens: Int32 = np.zeros((num_rows, max_tokens), np.int32)  # untouched pages take no memory
        self.has_candidates = np.zeros(num_rows, np.bool_)  # rows that return candidates to the scheduler (beam search)
        self._admitted: dict[int, Request] = {}  # by row: as it was admitted last
        self._unreleased: set[int] = set()  # released rows for which sampling state remains
        self._failures: dict[int, str] = {}  # by row: why its chunks cannot be computed
        self._deferred: dict[int, int] = {}  # by row: start of its deferred chunk, not computed since
        self._lost: set[int] = set()  # rows with layers' states that a fault left unknown
        # By request: how often it lost its states, and the most tokens that were behind them. Of the latest that lost any.
        self._losses: dict[str, tuple[int, int]] = {}

    @property
    def faulty(self) -> bool:
        """Whether some row failed or was deferred, so that `computable` and `computed` apply."""
        return bool(self._failures or self._deferred or self._lost)

    @property
    def faults(self) -> RowFaults:
        """What makes the rows `faulty`, and losses by request."""
        return self._failures, self._deferred, self._lost, self._losses

    def adopt(self, known: Sequence[RowFaults]) -> None:
        """Take the `faults` of all shards: a chunk that one of them cannot compute, none does."""
        for failures, deferred, lost, losses in known:
            for row, message in failures.items():
                self._failures.setdefault(row, message)
            self._deferred.update(deferred)
            self._lost |= lost
            for request_id, one in losses.items():
                self._losses[request_id] = max(one, self._losses.get(request_id, one))

    def apply(self, plan: Plan) -> None:
        """Apply the plan's changes: released and admitted rows, and given tokens."""
        if len(plan.released):
            self._release(plan.released)
        for row, new in plan.admitted.items():
            token_ids = new.token_ids
            self.tokens[row, : len(token_ids)] = token_ids
            self.has_candidates[row] = new.sampling.num_candidates > 0
            self._forget([row])
            self._admitted[row] = new
            self._start_sampling(row, len(token_ids))
        if (given := plan.given) is not None:
            self.tokens[given.rows, given.positions] = given.tokens
            with Attempt() as attempt:
                self.sampler.record_tokens(given.rows, given.tokens)
            if attempt.error is not None:
                why = "the sampler could not take %d given tokens; their rows start again"
                log.error(why, len(given.rows), exc_info=attempt.error)
                for row, position in zip(given.rows.tolist(), given.positions.tolist(), strict=True):
                    self._start_sampling(row, position + 1)

    def restart_sampling(self, part: ChunkGroup) -> None:
        """Undo what sampling has advanced for the chunks of `part`, before they are computed again."""
        ends = part.starts + part.lengths
        for row, known in zip(part.rows[part.samples].tolist(), ends[part.samples].tolist(), strict=True):
            self._start_sampling(row, known)

    def draws_on_device(self, rows: Index, at: Index) -> bool:
        """Whether the tokens `at` of `rows` can be sampled and left on the device. False for no rows."""
        if not len(rows) or self.has_candidates[rows].any() or self.logprob_requests.of_samples(rows, at):
            return False
        return self.sampler.plain(rows, at)

    def fail(self, rows: Index, message: str) -> None:
        """Let the chunks of `rows` fail until the rows are released or admitted again."""
        self._failures.update(dict.fromkeys(rows.tolist(), message))

    def lose(self, plan: Plan, rows: Index, message: str) -> None:
        """Defer the chunks of `rows` in `plan`, which have unknown states, until they are computed from the start.

        A request that loses its states MOST_LOSSES times before it gets further fails.
        """
        for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            if row in rows:
                request_id = self._admitted[row].request_id
                losses, furthest = self._losses.pop(request_id, (0, 0))
                if losses + 1 == MOST_LOSSES:
                    times = f"{MOST_LOSSES} times while the states of this sequence changed"
                    self._failures[row] = f"{message}; it came {times}, before token {max(start, furthest) + 1} was computed"
                    continue
                self._lost.add(row)
                self._losses[request_id] = losses + 1, max(start, furthest)
                if len(self._losses) > len(self.tokens):
                    del self._losses[next(iter(self._losses))]

    def apart(self, part: ChunkGroup) -> list[ChunkGroup]:
        """`part` in pieces: a request that has lost its states is computed alone until it gets further: a fault of another
        one would count as its own.
        """
        if not self._losses:
            return [part]
        is_suspect = np.array([self._admitted[row].request_id in self._losses for row in part.rows.tolist()], np.bool_)
        alone = [part[place : place + 1] for place in np.flatnonzero(is_suspect).tolist()]
        return [part[~is_suspect], *alone] if not is_suspect.all() else alone

    def lost(self, rows: Index) -> Index:
        """Those of `rows` with layers' states that are unknown."""
        return rows[np.isin(rows, list(self._lost))]

    def is_unsound(self, row: int) -> bool:
        """Whether chunks of `row` cannot be computed: it failed, or has lost its states."""
        return row in self._failures or row in self._lost

    def computable(self, plan: Plan, part: ChunkGroup, total: Computed) -> ChunkGroup:
        """`part` without failed or deferred chunks. Chunks of failed rows fail now; those of rows that lost their states, and
        those after a deferred chunk of their row, are deferred.
        """
        for chunk, row in zip(part.chunks.tolist(), part.rows.tolist(), strict=True):
            if row in self._failures:
                total.failures[chunk] = self._failures[row]
            elif row in self._lost:
                total.drop(chunk)
                total.deferred.add(chunk)
            elif plan.starts[chunk] > self._deferred.get(row, plan.starts[chunk]):
                total.deferred.add(chunk)
        left_out = [chunk in total.failures or chunk in total.deferred for chunk in part.chunks.tolist()]
        return part[~np.array(left_out)] if any(left_out) else part

    def defer_or_fail(self, plan: Plan, chunk: int, error: BaseException, total: Computed) -> None:
        """Handle a single token of `chunk` that could not be computed: first defer the chunk, the second time fail it."""
        row = int(plan.rows[chunk])
        total.drop(chunk)
        if row in self._deferred:
            log.error("request %s ends: its smallest step failed twice", self._admitted[row].request_id, exc_info=error)
            total.failures[chunk] = format_error(error)
        else:
            self._deferred[row] = int(plan.starts[chunk])
            total.deferred.add(chunk)

    def computed(self, plan: Plan, total: Computed) -> None:
        """Forget the deferrals and losses of rows with chunks that were computed, or have failed."""
        for chunk, row in enumerate(plan.rows.tolist()):
            if chunk not in total.deferred:
                self._deferred.pop(row, None)
                if self._losses:
                    request_id = self._admitted[row].request_id
                    if plan.starts[chunk] + plan.lengths[chunk] > self._losses.get(request_id, (0, 0))[1]:
                        self._losses.pop(request_id, None)

    def _release(self, rows: Index) -> None:
        """Release `rows`. Sampling state that cannot be released now is released before the row is reused."""
        self._forget(rows.tolist())
        self._unreleased.update(rows.tolist())
        with Attempt() as attempt:
            self._release_sampling(rows)
        if attempt.error is not None:
            log.error("what sampling keeps of %d rows could not be released", len(rows), exc_info=attempt.error)

    def _release_sampling(self, rows: Index) -> None:
        self.sampler.release(rows)
        self.logprob_requests.release(rows)
        self._unreleased.difference_update(rows.tolist())

    def _start_sampling(self, row: int, known: int) -> None:
        """(Re)start the sampling state of `row` from its first `known` tokens. If that raises twice, the row's chunks fail."""
        new = self._admitted[row]
        for _ in range(2):
            with Attempt() as attempt:
                if row in self._unreleased:
                    self._release_sampling(np.array([row]))
                num_prompt = len(new.prompt_token_ids)
                self.logprob_requests.admit(row, new.sampling, num_prompt)
                self.sampler.admit(row, new.sampling, self.tokens[row, :known], num_prompt)
            if attempt.error is None:
                return
            log.error("request %s: its sampling could not be started", new.request_id, exc_info=attempt.error)
            failure = format_error(attempt.error)
        self._failures[row] = failure

    def _forget(self, rows: list[int]) -> None:
        """Clear the admissions and recorded errors of `rows`."""
        for row in rows:
            self._admitted.pop(row, None)
            self._failures.pop(row, None)
            self._deferred.pop(row, None)
            self._lost.discard(row)
