"""Builds plans from the chosen chunks and all changes since the last plan, and updates the counters."""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager, merged
from .cost import SwapCost
from .decisions import Decisions
from .outcome import Stats
from .plan import NO_ROWS, Bool, Plan, given_tokens
from .pool_size import PoolSize, joined
from .rows import Rows
from .running import Running
from .sequence import Sequence


class PlanBuilder:
    """Builds plans. It takes the pending changes of `running`, `size` and `cache`."""

    def __init__(
        self, cache: CacheManager, size: PoolSize, rows: Rows, running: Running, cost: SwapCost | None, seats: int
    ) -> None:  # fmt: skip
        self._cache = cache
        self._size = size
        self._rows = rows
        self._running = running
        self._cost = cost
        self._evicted = 0  # evicted blocks of the cache that are reported already
        self._ones = np.ones(seats, np.int64)
        self._trues = np.ones(seats, np.bool_)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def step(self, decodes: Index, chunks: list[tuple[Sequence, int]], stats: Stats, decisions: Decisions) -> Plan:
        """Plan one token for each row of `decodes`, and the given number of tokens for each sequence of `chunks`."""
        rows, n = decodes, len(decodes)
        lengths, samples = self._ones[:n], self._trues[:n]
        stats.computed_tokens += n
        if chunks:
            stats.computed_tokens += sum(length for _, length in chunks)
            chunks.sort(key=lambda chunk: chunk[1] > 1)  # chunks of one token come first
            rows = np.append(decodes, np.array([s.row for s, _ in chunks]))
            lengths = np.append(lengths, np.array([length for _, length in chunks]))
            samples = self._rows.computed[rows] + lengths == self._rows.known[rows]
        return self._draft(rows, self._rows.computed[rows], lengths, samples, stats, decisions)

    def ahead(self, rows: Index, known: Index, stats: Stats, decisions: Decisions) -> Plan:
        """Plan one token for each of `rows`, which have `known` tokens once the pending plan is done."""
        n = len(rows)
        stats.computed_tokens += n
        return self._draft(rows, known - 1, self._ones[:n], self._trues[:n], stats, decisions)

    def _draft(
        self, rows: Index, starts: Index, lengths: Index, samples: Bool, stats: Stats, decisions: Decisions
    ) -> Plan:  # fmt: skip
        changes = self._running.take_changes()
        resize, moves = self._size.take()
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
            self._count_swaps(plan, stats, decisions)
        if changes:
            counts = self._cache.pool.counts()
            stats.peak_used_blocks = max(stats.peak_used_blocks, counts.live + counts.in_flight)
        stats.steps += 1
        return plan

    def _count_swaps(self, plan: Plan, stats: Stats, decisions: Decisions) -> None:
        demoted = 0
        if plan.swaps is not None:
            demoted = len(plan.swaps.out_slots)
            stats.demoted_blocks += demoted
            stats.promoted_blocks += len(plan.swaps.in_slots)
        evicted = self._cache.swapping.evicted_blocks - self._evicted
        self._evicted += evicted
        if (demoted or evicted) and self._cost is not None:
            compute_s = self._cost.compute_s(self._cache.block_size)
            chances = self._cache.swapping.demotion.chances
            decisions.gave_up(plan.step_id, demoted, evicted, self._cost.swap_s(1), compute_s, chances)
