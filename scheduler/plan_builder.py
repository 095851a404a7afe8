"""Plan building: the order of a step's chunks, pending plans, and planning a step before the result of the previous one.

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

from ..cache.block_table import BlockCopies, Index, merged
from ..cache.manager import CacheManager
from .cost import SwapCost
from .errors import InvalidCallOrder
from .outcome import Decisions, Stats
from .plan import NO_RESIZE, NO_ROWS, Bool, Plan, Resize, given_tokens
from .rows import Rows
from .running import Running
from .sequence import Sequence


class PendingPlans:
    """Plans without a result: none, the `first`, or the `first` and the one `behind` it.

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

    def check_turn(self) -> None:
        """Raise InvalidCallOrder while a plan is pending: it refers to the present blocks and extents."""
        if self.first is not None:
            raise InvalidCallOrder(f"plan {self.first.step_id} is out: this is done between steps")

    def names(self, row: int) -> bool:
        """Whether a pending plan computes a chunk of `row`."""
        return any(plan is not None and bool((plan.rows == row).any()) for plan in (self.first, self.behind))

    def check_invariants(self, running: Running) -> None:
        """Raises AssertionError naming what does not hold."""
        named = {row for plan in (self.first, self.behind) if plan is not None for row in plan.rows.tolist()}
        assert named <= {*running.by_row, *running.finishing}, "a row was given up which a plan that is out names"
        assert set(running.finishing) <= named, "a row is still kept which no plan names any more"


def continuation(out: Plan, rows: Rows, running: Running) -> tuple[Index, Index] | None:
    """Rows of the step after `out`, the only pending plan, and their known tokens once its result is in.

    None if the result is needed first, or if no row is sure to continue.
    """
    if out.moves_memory or np.count_nonzero(out.samples) < len(out.samples):
        return None
    if len(running) != len(out.rows) - len(running.finishing):
        return None  # `out` left a row out: it is paused, or waits for a copy
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


class PlanBuilder:
    """Builds plans from the chosen chunks and all changes since the last plan, and updates `stats` and `decisions`.

    It takes the pending changes of `running` and `cache`.
    """

    def __init__(
        self, cache: CacheManager, rows: Rows, running: Running, cost: SwapCost | None, num_rows: int, stats: Stats,
        decisions: Decisions,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._rows = rows
        self._running = running
        self._cost = cost
        self._stats = stats
        self._decisions = decisions
        self._evicted = 0  # evicted blocks of the cache that are reported already
        self._ones = np.ones(num_rows, np.int64)
        self._trues = np.ones(num_rows, np.bool_)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def step(
        self, decodes: Index, chunks: list[tuple[Sequence, int]], resize: Resize, moves: list[BlockCopies]
    ) -> Plan:  # fmt: skip
        """Plan one token for each row of `decodes`, and the given number of tokens for each sequence of `chunks`.

        The plan also executes `resize` and the `moves` of blocks out of the extents to unmap.
        """
        rows, n = decodes, len(decodes)
        lengths, samples = self._ones[:n], self._trues[:n]
        self._stats.planned(n + sum([length for _, length in chunks]))
        if chunks:
            chunks.sort(key=lambda chunk: chunk[1] > 1)  # chunks of one token come first
            rows = np.append(decodes, np.array([s.row for s, _ in chunks]))
            lengths = np.append(lengths, np.array([length for _, length in chunks]))
            samples = self._rows.computed[rows] + lengths == self._rows.known[rows]
        return self._build(rows, self._rows.computed[rows], lengths, samples, resize, moves)

    def ahead(self, rows: Index, known: Index) -> Plan:
        """Plan one token for each of `rows`, which have `known` tokens once the pending plan is done."""
        n = len(rows)
        self._stats.planned(n)
        return self._build(rows, known - 1, self._ones[:n], self._trues[:n], NO_RESIZE, [])

    def _build(
        self, rows: Index, starts: Index, lengths: Index, samples: Bool, resize: Resize, moves: list[BlockCopies]
    ) -> Plan:  # fmt: skip
        stats, changes = self._stats, self._running.take_changes()
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
            swaps=self._cache.host.take_swaps(alone=not moves and not resize),
            given=given_tokens(changes.given),
        )
        if plan.swaps is not None or self._cache.swapping.evicted_blocks != self._evicted:
            self._count_swaps(plan)
        if changes:
            counts = self._cache.pool.counts()
            stats.peak_used_blocks = max(stats.peak_used_blocks, counts.live + counts.in_flight)
        stats.steps += 1
        return plan

    def _count_swaps(self, plan: Plan) -> None:
        demoted = 0
        if plan.swaps is not None:
            demoted = len(plan.swaps.out_slots)
            self._stats.demoted_blocks += demoted
            self._stats.promoted_blocks += len(plan.swaps.in_slots)
        evicted = self._cache.swapping.evicted_blocks - self._evicted
        self._evicted += evicted
        if (demoted or evicted) and self._cost is not None:
            compute_s = self._cost.compute_s(self._cache.block_size)
            chances = self._cache.swapping.demotion.chances
            self._decisions.gave_up(plan.step_id, demoted, evicted, self._cost.swap_s(1), compute_s, chances)


def joined(copies: list[BlockCopies]) -> BlockCopies | None:
    """All of `copies` as one simultaneous copy; None for none."""
    if len(copies) <= 1:
        return copies[0] if copies else None
    return BlockCopies(*(np.concatenate([getattr(c, name) for c in copies]) for name in ("sources", "targets")))
