"""Results of steps: sampled tokens are appended, finished sequences end, and memory takes its new state."""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index
from .errors import InvalidCallOrder
from .outcome import StepOutputs
from .plan import NO_ROWS, Bool, ChunkLogprobs, Plan, Result
from .pool import ElasticPool
from .preemption import recompute
from .sequence import Sequence
from .state import SchedulerState


def apply(state: SchedulerState, pool: ElasticPool, plan: Plan, result: Result) -> StepOutputs:
    """Apply the result of the oldest pending plan, and return the outputs of the step.

    Raises InvalidCallOrder, with no change, if the result does not belong to it.
    """
    if plan is not state.plans.first or result.step_id != plan.step_id or len(result.counts) != len(plan.rows):
        raise InvalidCallOrder(f"the result of step {result.step_id} does not belong to the plan that is out first")
    if len(state.plans.stale) or len(result.failed_blocks):
        result = _deferring(state, plan, result)
    sampled, tokens = _sampled_rows(state, plan, result), result.tokens
    if plan.moves_memory:
        _apply_memory(state, pool, plan, result)
    if state.cost is not None:
        state.cost.observe(plan, result)
        state.weigh()
    if state.plans.is_ahead:  # without planning ahead, this plan would have been made after these aborts
        state.end_aborted()
    rows, finishing = state.rows, state.finishing
    if finishing:  # ended sequences get no token of this plan
        stays = ~np.isin(sampled, list(finishing))
        sampled, tokens = sampled[stays], tokens[stays]
    deferred = _advance(state, plan, result)
    ended = rows.append(sampled, tokens) >= rows.limit[sampled]
    ended |= rows.may_stop(tokens)
    request_ids: list[str] = rows.request_ids[sampled].tolist()
    state.stats.generated_tokens += len(request_ids)
    scores = tuple([_scored(state, plan, part) for part in result.scores])
    state.plans.shift(deferred)
    prefilled = state.prefilling
    if prefilled:
        _release_forks(state, state.promote())
    candidates = tuple([(str(rows.request_ids[plan.rows[c.index]]), c) for c in result.candidates])
    if candidates:
        _release_forks(state, state.pause(plan.rows[[c.index for c in result.candidates]]))
    for failure in result.failures:
        if (row := int(plan.rows[failure.index])) not in finishing:
            state.end(state.by_row[row], "error", failure.message)
    if len(result.complete):
        for row in plan.rows[result.complete].tolist():
            ended[sampled == row] = False
            state.end(state.by_row[row], "stop")
    if np.count_nonzero(ended):
        for i in np.flatnonzero(ended):
            _end_if_due(state, state.by_row[int(sampled[i])], int(tokens[i]))
    state.end_aborted()
    for sequence in prefilled:
        # Sharing others' blocks frees the sequence's own. The pending plan reads these before a later plan writes
        # to them.
        state.commit(sequence)
    state.release_finished()
    if len(result.failed_blocks):
        recompute(state, result.failed_blocks)
    finished = state.take_finished()
    return StepOutputs(plan.step_id, request_ids, tokens.tolist(), finished, scores, candidates)


def _sampled_rows(state: SchedulerState, plan: Plan, result: Result) -> Index:
    """Rows that got a token. Raises InvalidCallOrder if the counts differ from what the plan asked for."""
    got = result.counts == 1
    if np.count_nonzero(got) == len(got) == np.count_nonzero(plan.samples):  # takes a third of the time of `all`
        return plan.rows
    without = np.zeros(len(got), np.bool_)
    without[[f.index for f in result.failures]] = True
    without[result.deferred] = True
    expected: Bool = plan.samples & ~without & ~state.rows.steered[plan.rows]
    if (result.counts != expected).any():
        raise InvalidCallOrder(f"step {plan.step_id}: one token was due from each chunk that samples, and no other")
    return plan.rows[expected]


def _advance(state: SchedulerState, plan: Plan, result: Result) -> Index:
    """Mark the chunks of `plan` as computed, except deferred ones. Returns the rows of the deferred chunks."""
    computed = state.rows.computed
    if not len(result.deferred):
        computed[plan.rows] = plan.starts + plan.lengths
        return NO_ROWS
    deferred = plan.rows[result.deferred]
    before = computed[deferred]
    computed[plan.rows] = plan.starts + plan.lengths
    computed[deferred] = before
    return deferred


def _deferring(state: SchedulerState, plan: Plan, result: Result) -> Result:
    """`result` with chunks of invalid input deferred: an earlier plan gave no output, or a copy failed."""
    unsound = np.append(state.plans.stale, state.cache.row_tables.rows_with(result.failed_blocks))
    return result.deferring(np.flatnonzero(np.isin(plan.rows, unsound)))


def _scored(state: SchedulerState, plan: Plan, scores: ChunkLogprobs) -> tuple[str, ChunkLogprobs]:
    """The request id of `scores`, with them; records how much of the prompt has log-probabilities now."""
    sequence = state.by_row[int(plan.rows[scores.index])]
    last = min(scores.first + len(scores.ranks), len(sequence.request.prompt_token_ids)) - 1
    sequence.scored = max(sequence.scored, last)
    return sequence.request.request_id, scores


def _apply_memory(state: SchedulerState, pool: ElasticPool, plan: Plan, result: Result) -> None:
    """Apply the memory part of `result` to the pool and the host tier."""
    state.stats.moved_blocks += pool.apply_resize(plan, result)
    if len(result.lost_slots):
        state.cache.swapping.lost(result.lost_slots)
    if len(result.failed_slots):
        state.cache.swapping.forget_slots(result.failed_slots)
    state.waiting.look_again()
    state.stats.grown_extents += len(result.mapped)
    state.stats.given_back_extents += len(result.unmapped)
    state.stats.refused_resizes += result.refused is not None


def _release_forks(state: SchedulerState, leaders: list[Sequence]) -> None:
    """Queue the forks of `leaders`: the prompt that they share is computed."""
    for sequence in leaders:
        if sequence.forks:
            state.waiting.release_forks(sequence)
            state.waiting.look_again()


def _end_if_due(state: SchedulerState, sequence: Sequence, token: int) -> None:
    sampling, row = sequence.request.sampling, sequence.row
    generated = state.rows.known[row] - state.rows.prompt[row]
    if token in sampling.stop_token_ids and generated >= sampling.min_new_tokens:
        state.end(sequence, "stop")
    elif state.rows.known[row] >= state.rows.limit[row]:
        state.end(sequence, "length")
