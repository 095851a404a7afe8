"""The two ends of a step: the plan of what was decided for it, and the application of its result.

    schedule ──► A ── schedule_ahead ──► A, B ── apply(A) ──► B ── schedule_ahead ──► B, C ── apply(B) ──► C ──► ...

Without the result of A, plan B can only continue A: one more token for each row that A samples, unless that token is
certainly the last. B is therefore not planned if more may be due: a sequence is to be ended or can be admitted, a
prompt is incomplete, A left a row out, forks wait for a prompt that A computes, or memory moves. Nor is it planned if
the next token of a row needs what the host does not know yet (`Sampling.ahead_from`).

A sequence that ends with the result of A but has a row in B is reported at once; its output of B is dropped. It keeps
its row and blocks until the result of B is in.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import BlockCopies, Index, Int32, joined, merged
from .outcome import StepOutputs
from .plan import NO_RESIZE, NO_ROWS, Bool, ChunkLogprobs, InvalidCallOrder, Plan, Resize, Result, given_tokens
from .pool import ElasticPool
from .preemption import recompute
from .request import Sequence
from .state import SchedulerState


def continuation(state: SchedulerState, out: Plan) -> tuple[Index, Index] | None:
    """Rows of the step after `out`, the only pending plan, and their known tokens once its result is in.

    None if the result is needed first, or if no row is sure to continue.
    """
    if out.moves_memory or np.count_nonzero(out.samples) < len(out.samples):
        return None
    if len(state.by_row) != len(out.rows) - len(state.finishing):
        return None  # `out` left a row out: it is paused, or waits for a copy
    rows, on = state.rows, state.decoding
    if state.prefilling:  # `out` computes their last chunks
        if any(sequence.forks for sequence in state.prefilling):
            return None
        on = np.append(on, np.array([sequence.row for sequence in state.prefilling]))
    known = rows.known[on] + 1
    stays = known < rows.limit[on]
    if np.count_nonzero(stays) < len(stays):
        on, known = on[stays], known[stays]
    if not len(on) or np.count_nonzero(rows.ahead_from[on] > known):
        return None
    return on, known


def plan_step(
    state: SchedulerState, decodes: Index, chunks: list[tuple[int, int]], resize: Resize, moves: list[BlockCopies]
) -> Plan:
    """Plan one token for each row of `decodes`, and the given number of tokens for each row of `chunks`.

    The plan also executes `resize`, the `moves` of blocks out of the extents to unmap, and the state's changes since the last
    plan, which it takes. Counts the step.
    """
    state.stats.planned(len(decodes) + sum([length for _, length in chunks]))
    rows, lengths, samples = decodes, state.rows.ones[: len(decodes)], state.rows.trues[: len(decodes)]
    if chunks:
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # chunks of one token come first
        rows = np.append(decodes, np.array([row for row, _ in chunks]))
        lengths = np.append(lengths, np.array([length for _, length in chunks]))
        samples = state.rows.computed[rows] + lengths == state.rows.known[rows]
    return _plan(state, rows, state.rows.computed[rows], lengths, samples, resize, moves)


def plan_ahead(state: SchedulerState, rows: Index, known: Index) -> Plan:
    """Plan one token for each of `rows`, which have `known` tokens once the pending plan is done. Takes the state's changes,
    and counts the step.
    """
    state.stats.planned(len(rows))
    return _plan(state, rows, known - 1, state.rows.ones[: len(rows)], state.rows.trues[: len(rows)], NO_RESIZE, [])


def apply_result(state: SchedulerState, pool: ElasticPool, plan: Plan, result: Result) -> StepOutputs:
    """Apply the result of the oldest pending plan, and return the outputs of the step.

    Raises InvalidCallOrder, with no change, if the result does not belong to it.
    """
    if plan is not state.plans.first or result.step_id != plan.step_id or len(result.counts) != len(plan.rows):
        raise InvalidCallOrder(f"the result of step {result.step_id} does not belong to the plan that is out first")
    failed_blocks = result.failed_blocks
    if len(state.plans.unknown):
        failed_blocks = np.append(failed_blocks, state.plans.unknown)
    if len(state.plans.stale) or len(failed_blocks):
        result = _deferring(state, plan, result, failed_blocks)
    sampled, tokens = _sampled_rows(state, plan, result), result.tokens
    if plan.moves_memory:
        _apply_memory(state, pool, plan, result)
    state.stats.computing_s += result.compute_s
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
    for leader in (*state.promote(), *state.forkable) if prefilled else ():
        state.waiting.release_forks(leader)
    candidates = tuple([(str(rows.request_ids[plan.rows[c.index]]), c) for c in result.candidates])
    if candidates:
        for leader in state.pause(plan.rows[[c.index for c in result.candidates]]):
            state.waiting.release_forks(leader)
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
    if len(failed_blocks):
        state.plans.unknown = _of_pending(state, failed_blocks)
        recompute(state, np.setdiff1d(failed_blocks, state.plans.unknown))
    finished = state.take_finished()
    return StepOutputs(plan.step_id, request_ids, tokens.tolist(), finished, scores, candidates)


def _plan(
    state: SchedulerState, rows: Index, starts: Index, lengths: Index, samples: Bool, resize: Resize, moves: list[BlockCopies]
) -> Plan:
    stats, changes = state.stats, state.take_changes()
    plan = Plan(
        step_id=stats.steps,
        rows=rows,
        starts=starts,
        lengths=lengths,
        samples=samples,
        released=np.array(changes.released) if changes.released else NO_ROWS,
        admitted=dict(changes.admitted),
        tables=merged(changes.tables),
        copies=joined(moves + changes.copies),
        resize=resize,
        swaps=state.cache.host.take_swaps(alone=not moves and not resize),
        given=given_tokens(changes.given),
        reads=tuple(changes.reads),
    )
    if plan.swaps is not None or state.cache.swapping.evicted_blocks != state.evicted_blocks:
        _count_swaps(state, plan)
    if changes:
        counts = state.cache.pool.counts()
        stats.peak_used_blocks = max(stats.peak_used_blocks, counts.live + counts.in_flight)
    stats.steps += 1
    return plan


def _count_swaps(state: SchedulerState, plan: Plan) -> None:
    demoted = 0
    if plan.swaps is not None:
        demoted = len(plan.swaps.out_slots)
        state.stats.demoted_blocks += demoted
        state.stats.promoted_blocks += len(plan.swaps.in_slots)
    evicted = state.cache.swapping.evicted_blocks - state.evicted_blocks
    state.evicted_blocks += evicted
    if (demoted or evicted) and state.cost is not None:
        compute_s = state.cost.compute_s(state.cache.block_size)
        chances = state.cache.swapping.offload_policy.chances
        state.decisions.gave_up(plan.step_id, demoted, evicted, state.cost.swap_s(1), compute_s, chances)


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
    deferred, ends = plan.rows[result.deferred], plan.starts + plan.lengths
    before = computed[deferred]
    computed[plan.rows] = ends
    computed[deferred] = before
    state.cache.row_tables.deferred(deferred, ends[result.deferred])
    return deferred


def _of_pending(state: SchedulerState, blocks: Int32) -> Int32:
    """Those of `blocks` in tables of rows that the pending plan names: their sequences are computed again behind it."""
    tables = state.cache.row_tables
    pending = [row for row in tables.rows_with(blocks).tolist() if state.plans.names(row)]
    held = [table.of(row).ravel() for table in tables.with_bytes for row in pending]
    found: Int32 = blocks[np.isin(blocks, np.concatenate([blocks[:0], *held]))]
    return found


def _deferring(state: SchedulerState, plan: Plan, result: Result, failed_blocks: Int32) -> Result:
    """`result` with chunks of invalid input deferred: an earlier plan gave no output, or a copy failed."""
    unsound = np.append(state.plans.stale, state.cache.row_tables.rows_with(failed_blocks))
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


def _end_if_due(state: SchedulerState, sequence: Sequence, token: int) -> None:
    sampling, row = sequence.request.sampling, sequence.row
    generated = state.rows.known[row] - state.rows.prompt[row]
    if token in sampling.stop_token_ids and generated >= sampling.min_new_tokens:
        state.end(sequence, "stop")
    elif state.rows.known[row] >= state.rows.limit[row]:
        state.end(sequence, "length")
