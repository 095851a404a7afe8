"""The plans that are out, and the step that can be planned while one is.

    schedule ──► A ── schedule_ahead ──► A, B ── apply(A) ──► B ── schedule_ahead ──► B, C ── apply(B) ──► C ──► ...

Without the result of A, B can only be its plain continuation: a token more for each row that A gives one, unless that one is
sure to be its last. So it is not planned where more than that may be due: somebody is to be ended or can be seated, a prompt is
not whole, a row was left out by A, forks wait for a prompt that A computes, bytes move; nor where the next token of a row needs
what the host does not know yet (`Sampling.ahead_from`).

Whoever ends with the result of A, and has a row in B, is told at once, without what B gives. Its row and blocks stay its own
until the result of B is in: no row is taken by another one, and no block of who ended is free, while a plan names them.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index
from .plan import NO_ROWS, Plan
from .rows import Rows
from .running import Running


class PendingPlans:
    """Whose results are not in: no plan, the `first`, or that one and the one `behind` it. The scheduler mutates it.

    `is_ahead` says whether the first was behind another one when it was planned. Rows in `stale` have a chunk in the first that
    was planned behind one which gave nothing.
    """

    __slots__ = ("behind", "first", "is_ahead", "stale")

    def __init__(self) -> None:
        self.first: Plan | None = None
        self.behind: Plan | None = None
        self.is_ahead = False
        self.stale = NO_ROWS

    def shift(self, without: Index) -> None:
        """The result of the first is in; the chunks of the rows `without` gave nothing."""
        self.first, self.behind, self.is_ahead = self.behind, None, self.behind is not None
        self.stale = without if self.is_ahead else NO_ROWS

    def names(self, row: int) -> bool:
        """Whether a plan that is out computes something of `row`. Read-only."""
        return any(plan is not None and bool((plan.rows == row).any()) for plan in (self.first, self.behind))

    def check_invariants(self, running: Running) -> None:
        """Raises AssertionError naming what does not hold."""
        named = {row for plan in (self.first, self.behind) if plan is not None for row in plan.rows.tolist()}
        assert named <= {*running.by_row, *running.leaving}, "a row was given up which a plan that is out names"
        assert running.leaving <= named, "a row is still kept which no plan names any more"


def continuation(out: Plan, rows: Rows, running: Running) -> tuple[Index, Index] | None:
    """The rows of the step behind `out`, the only plan that is out, and how many tokens of each are known when its result is
    in. None where that has to be seen first, or nobody is sure to go on. Read-only.
    """
    if out.moves_memory or np.count_nonzero(out.samples) < len(out.samples):
        return None
    if len(running) != len(out.rows) - len(running.leaving):
        return None  # a row was left out: it is held, or waits for a copy
    on = running.decoding
    if running.prefilling:  # their last chunks
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
