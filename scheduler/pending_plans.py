"""Pending plans, and planning the next step before the result of the previous one.

    schedule ──► A ── schedule_ahead ──► A, B ── apply(A) ──► B ── schedule_ahead ──► B, C ── apply(B) ──► C ──► ...

Without the result of A, plan B can only continue A: one more token for each row that A samples, unless that token is
certainly the last. B is therefore not planned if more may be due: a sequence is to be ended or can be admitted, a
prompt is incomplete, A left a row out, forks wait for a prompt that A computes, or memory moves. Nor is it planned if
the next token of a row needs what the host does not know yet (`Sampling.ahead_from`).

A sequence that ends with the result of A but has a row in B is reported at once; its output of B is dropped. It keeps
its row and blocks until the result of B is in. No row or block of an ended sequence is reused while a plan refers to
it.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index
from .plan import NO_ROWS, Plan
from .rows import Rows
from .running import Running


class PendingPlans:
    """Plans without a result: none, the `first`, or the `first` and the one `behind` it. The scheduler mutates it.

    `is_ahead` says whether the first was planned by `schedule_ahead`, behind another plan. `stale` are the rows of the
    first that an earlier plan deferred: their chunks have invalid input.
    """

    __slots__ = ("behind", "first", "is_ahead", "stale")

    def __init__(self) -> None:
        self.first: Plan | None = None
        self.behind: Plan | None = None
        self.is_ahead = False
        self.stale = NO_ROWS

    def shift(self, without: Index) -> None:
        """Remove the first plan, which has its result; its chunks of the rows `without` gave nothing."""
        self.first, self.behind, self.is_ahead = self.behind, None, self.behind is not None
        self.stale = without if self.is_ahead else NO_ROWS

    def names(self, row: int) -> bool:
        """Whether a pending plan computes a chunk of `row`. Read-only."""
        return any(plan is not None and bool((plan.rows == row).any()) for plan in (self.first, self.behind))

    def check_invariants(self, running: Running) -> None:
        """Raises AssertionError naming what does not hold."""
        named = {row for plan in (self.first, self.behind) if plan is not None for row in plan.rows.tolist()}
        assert named <= {*running.by_row, *running.leaving}, "a row was given up which a plan that is out names"
        assert running.leaving <= named, "a row is still kept which no plan names any more"


def continuation(out: Plan, rows: Rows, running: Running) -> tuple[Index, Index] | None:
    """Rows of the step after `out`, the only pending plan, and their known tokens once its result is in.

    None if the result is needed first, or if no row is sure to continue. Read-only.
    """
    if out.moves_memory or np.count_nonzero(out.samples) < len(out.samples):
        return None
    if len(running) != len(out.rows) - len(running.leaving):
        return None  # `out` left a row out: it is held, or waits for a copy
    on = running.decoding
    if running.prefilling:  # `out` computes their last chunks
        if any(sequence.forks for sequence in running.prefilling):
            return None
        on = np.append(on, np.array([sequence.row for sequence in running.prefilling]))
    known = rows.known[on] + 1
    stays = known < rows.limit[on]
    if np.count_nonzero(stays) < len(stays):
        on, known = on[stays], known[stays]
    if not len(on) or np.count_nonzero(rows.ahead_from[on] > known):
        return None
    return on, known
