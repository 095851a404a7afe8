"""Plan building: the order of a step's chunks, and planning a step before the result of the previous one.

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

from ..cache.block_table import BlockCopies, Index, joined, merged
from .plan import NO_RESIZE, NO_ROWS, Bool, Plan, Resize, given_tokens
from .sequence import Sequence
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


class PlanBuilder:
    """Builds plans from the chosen chunks and all changes since the last plan. Takes the changes, and counts the step."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._evicted = 0  # evicted blocks of the cache that are reported already
        self._ones = np.ones(state.limits.num_rows, np.int64)
        self._trues = np.ones(state.limits.num_rows, np.bool_)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def step(
        self, decodes: Index, chunks: list[tuple[Sequence, int]], resize: Resize, moves: list[BlockCopies]
    ) -> Plan:  # fmt: skip
        """Plan one token for each row of `decodes`, and the given number of tokens for each sequence of `chunks`.

        The plan also executes `resize` and the `moves` of blocks out of the extents to unmap.
        """
        rows, n = decodes, len(decodes)
        lengths, samples = self._ones[:n], self._trues[:n]
        self._state.stats.planned(n + sum([length for _, length in chunks]))
        if chunks:
            chunks.sort(key=lambda chunk: chunk[1] > 1)  # chunks of one token come first
            rows = np.append(decodes, np.array([s.row for s, _ in chunks]))
            lengths = np.append(lengths, np.array([length for _, length in chunks]))
            samples = self._state.rows.computed[rows] + lengths == self._state.rows.known[rows]
        return self._build(rows, self._state.rows.computed[rows], lengths, samples, resize, moves)

    def ahead(self, rows: Index, known: Index) -> Plan:
        """Plan one token for each of `rows`, which have `known` tokens once the pending plan is done."""
        n = len(rows)
        self._state.stats.planned(n)
        return self._build(rows, known - 1, self._ones[:n], self._trues[:n], NO_RESIZE, [])

    def _build(
        self, rows: Index, starts: Index, lengths: Index, samples: Bool, resize: Resize, moves: list[BlockCopies]
    ) -> Plan:  # fmt: skip
        state = self._state
        stats, changes = state.stats, state.take_changes()
        plan = Plan(
            step_id=stats.steps,
            rows=rows,
            starts=starts,
            lengths=lengths,
            samples=samples,
            released=np.array(changes.released) if changes.released else NO_ROWS,
            admitted=tuple(changes.admitted),
            tables=merged(changes.tables),
            copies=joined(moves + changes.copies),
            resize=resize,
            swaps=state.cache.host.take_swaps(alone=not moves and not resize),
            given=given_tokens(changes.given),
        )
        if plan.swaps is not None or state.cache.swapping.evicted_blocks != self._evicted:
            self._count_swaps(plan)
        if changes:
            counts = state.cache.pool.counts()
            stats.peak_used_blocks = max(stats.peak_used_blocks, counts.live + counts.in_flight)
        stats.steps += 1
        return plan

    def _count_swaps(self, plan: Plan) -> None:
        state, demoted = self._state, 0
        if plan.swaps is not None:
            demoted = len(plan.swaps.out_slots)
            state.stats.demoted_blocks += demoted
            state.stats.promoted_blocks += len(plan.swaps.in_slots)
        evicted = state.cache.swapping.evicted_blocks - self._evicted
        self._evicted += evicted
        if (demoted or evicted) and state.cost is not None:
            compute_s = state.cost.compute_s(state.cache.block_size)
            chances = state.cache.swapping.demotion.chances
            state.decisions.gave_up(plan.step_id, demoted, evicted, state.cost.swap_s(1), compute_s, chances)
