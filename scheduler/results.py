"""Results of steps: sampled tokens are appended, finished sequences end, and memory takes its new state."""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager
from .cost import SwapCost
from .errors import InvalidCallOrder
from .outcome import Stats, StepOutputs
from .plan import NO_ROWS, Bool, ChunkLogprobs, Plan, Result
from .plan_builder import PendingPlans
from .pool import ElasticPool
from .preemption import Preemption
from .rows import Rows
from .running import Running
from .sequence import Sequence
from .sequence_table import SequenceTable
from .waiting import Waiting


class ResultProcessor:
    """Applies the results of plans. It mutates all its arguments."""

    def __init__(
        self, cache: CacheManager, rows: Rows, running: Running, waiting: Waiting, plans: PendingPlans,
        sequences: SequenceTable, preemption: Preemption, pool: ElasticPool, cost: SwapCost | None, stats: Stats,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._rows = rows
        self._running = running
        self._waiting = waiting
        self._plans = plans
        self._sequences = sequences
        self._preemption = preemption
        self._pool = pool
        self._cost = cost  # of swapping and computing
        self._stats = stats
        self._weigh()

    def apply(self, plan: Plan, result: Result) -> StepOutputs:
        """Apply the result of the oldest pending plan, and return the outputs of the step.

        Raises InvalidCallOrder, with no change, if the result does not belong to it.
        """
        if plan is not self._plans.first or result.step_id != plan.step_id or len(result.counts) != len(plan.rows):
            raise InvalidCallOrder(f"the result of step {result.step_id} does not belong to the plan that is out first")
        if len(self._plans.stale) or len(result.failed_blocks):
            result = self._deferring(plan, result)
        sampled, tokens = self._sampled_rows(plan, result), result.tokens
        if plan.moves_memory:
            self._apply_memory(plan, result)
        if self._cost is not None:
            self._cost.observe(plan, result)
            self._weigh()
        if self._plans.is_ahead:  # without planning ahead, this plan would have been made after these aborts
            self._sequences.end_aborted()
        rows, finishing = self._rows, self._running.finishing
        if finishing:  # ended sequences get no token of this plan
            stays = ~np.isin(sampled, list(finishing))
            sampled, tokens = sampled[stays], tokens[stays]
        deferred = self._advance(plan, result)
        ended = rows.append(sampled, tokens) >= rows.limit[sampled]
        ended |= rows.may_stop(tokens)
        request_ids: list[str] = rows.request_ids[sampled].tolist()
        self._stats.generated_tokens += len(request_ids)
        scores = tuple([self._scored(plan, part) for part in result.scores])
        self._plans.shift(deferred)
        prefilled = self._running.prefilling
        if prefilled:
            self._release_forks(self._running.promote())
        candidates = tuple([(str(rows.request_ids[plan.rows[c.index]]), c) for c in result.candidates])
        if candidates:
            self._release_forks(self._running.pause(plan.rows[[c.index for c in result.candidates]]))
        for failure in result.failures:
            if (row := int(plan.rows[failure.index])) not in finishing:
                self._sequences.end(self._running.by_row[row], "error", failure.message)
        if len(result.complete):
            for row in plan.rows[result.complete].tolist():
                ended[sampled == row] = False
                self._sequences.end(self._running.by_row[row], "stop")
        if np.count_nonzero(ended):
            for i in np.flatnonzero(ended):
                self._end_if_due(self._running.by_row[int(sampled[i])], int(tokens[i]))
        self._sequences.end_aborted()
        for sequence in prefilled:
            # Sharing others' blocks frees the sequence's own. The pending plan reads these before a later plan writes
            # to them.
            self._running.commit(sequence)
        if done := [row for row in finishing if not self._plans.names(row)]:
            self._running.release_finished(done)
        if len(result.failed_blocks):
            self._preemption.recompute(result.failed_blocks)
        finished = self._sequences.take_finished()
        return StepOutputs(plan.step_id, request_ids, tokens.tolist(), finished, scores, candidates)

    def _sampled_rows(self, plan: Plan, result: Result) -> Index:
        """Rows that got a token. Raises InvalidCallOrder if the counts differ from what the plan asked for."""
        got = result.counts == 1
        if np.count_nonzero(got) == len(got) == np.count_nonzero(plan.samples):  # takes a third of the time of `all`
            return plan.rows
        without = np.zeros(len(got), np.bool_)
        without[[f.index for f in result.failures]] = True
        without[result.deferred] = True
        expected: Bool = plan.samples & ~without & ~self._rows.steered[plan.rows]
        if (result.counts != expected).any():
            raise InvalidCallOrder(f"step {plan.step_id}: one token was due from each chunk that samples, and no other")
        return plan.rows[expected]

    def _advance(self, plan: Plan, result: Result) -> Index:
        """Mark the chunks of `plan` as computed, except deferred ones. Returns the rows of the deferred chunks."""
        computed = self._rows.computed
        if not len(result.deferred):
            computed[plan.rows] = plan.starts + plan.lengths
            return NO_ROWS
        deferred = plan.rows[result.deferred]
        before = computed[deferred]
        computed[plan.rows] = plan.starts + plan.lengths
        computed[deferred] = before
        return deferred

    def _deferring(self, plan: Plan, result: Result) -> Result:
        """`result` with chunks of invalid input deferred: an earlier plan gave no output, or a copy failed."""
        unsound = np.append(self._plans.stale, self._cache.row_tables.rows_with(result.failed_blocks))
        return result.deferring(np.flatnonzero(np.isin(plan.rows, unsound)))

    def _scored(self, plan: Plan, scores: ChunkLogprobs) -> tuple[str, ChunkLogprobs]:
        """The request id of `scores`, with them; records how much of the prompt has log-probabilities now."""
        sequence = self._running.by_row[int(plan.rows[scores.index])]
        last = min(scores.first + len(scores.ranks), len(sequence.request.prompt_token_ids)) - 1
        sequence.scored = max(sequence.scored, last)
        return sequence.request.request_id, scores

    def _apply_memory(self, plan: Plan, result: Result) -> None:
        """Apply the memory part of `result` to the pool and the host tier."""
        self._stats.moved_blocks += self._pool.apply_resize(plan, result)
        if len(result.lost_slots):
            self._cache.swapping.lost(result.lost_slots)
        if len(result.failed_slots):
            self._cache.swapping.forget_slots(result.failed_slots)
        self._waiting.look_again()
        self._stats.grown_extents += len(result.mapped)
        self._stats.given_back_extents += len(result.unmapped)
        self._stats.refused_resizes += result.refused is not None

    def _release_forks(self, leaders: list[Sequence]) -> None:
        """Queue the forks of `leaders`: the prompt that they share is computed."""
        for sequence in leaders:
            if sequence.forks:
                self._waiting.release_forks(sequence)
                self._waiting.look_again()

    def _weigh(self) -> None:
        """Pass the current worth of swapping to the host tier."""
        if self._cache.host.capacity and self._cost is not None:
            self._cache.set_swap_costs(least_chance=self._cost.least_chance, promotes=self._cost.promotes)

    def _end_if_due(self, sequence: Sequence, token: int) -> None:
        sampling, row = sequence.request.sampling, sequence.row
        generated = self._rows.known[row] - self._rows.prompt[row]
        if token in sampling.stop_token_ids and generated >= sampling.min_new_tokens:
            self._sequences.end(sequence, "stop")
        elif self._rows.known[row] >= self._rows.limit[row]:
            self._sequences.end(sequence, "length")
