"""Preemption: which sequences to preempt, by the blocks this frees and the cost of restoring them, and how.

A preempted sequence loses its row and blocks, keeps its tokens, and waits at its old place in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cache.block_table import Index, Int32
from ..cache.manager import CacheManager
from .cost import Seconds, SwapCost
from .outcome import Decisions, Stats
from .rows import Rows
from .running import Running
from .sequence import Sequence, SequenceStatus
from .waiting import Waiting


class Preemption:
    """Ranks and preempts running sequences. Without a host tier `cost` may be None, and scheduling order decides.

    It mutates `running`, `waiting`, the sequences, `stats` and `decisions`.
    """

    def __init__(
        self, cache: CacheManager, rows: Rows, running: Running, waiting: Waiting, cost: SwapCost | None, stats: Stats,
        decisions: Decisions,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._rows = rows
        self._running = running
        self._waiting = waiting
        self._cost = cost
        self._stats = stats
        self._decisions = decisions

    def by_worth(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Running `sequences` in the order of their worth; the last one is preempted first.

        The victim has, in this order: the lowest priority, no earlier preemption, the lowest cost per block to swap or
        recompute (whichever is cheaper), the latest place in order.
        """
        running = sorted(sequences)
        if not self._cache.host.capacity or self._cost is None:
            return running
        won, _, seconds = self._at_stake(running)
        per_block = np.full(len(running), np.inf)
        np.divide(np.minimum(*seconds), won, out=per_block, where=won > 0)
        priority = np.array([s.request.priority for s in running])
        spared = np.array([s.preemptions == 0 for s in running])
        return [running[i] for i in np.lexsort((np.arange(len(running)), -per_block, spared, priority))]

    def preempt(self, victims: list[Sequence]) -> None:
        """Preempt `victims`: they lose rows and blocks, keep their tokens and wait at their old places in the queue."""
        self._stats.preemptions += len(victims)
        self._explain(victims)
        for sequence in victims:
            sequence.preemptions += 1
        self._requeue(victims, keep_tails=True)

    def recompute(self, blocks: Int32) -> None:
        """Requeue sequences that hold one of `blocks` (of unknown contents); drop the blocks from the prefix cache."""
        rows = self._cache.row_tables.rows_with(blocks).tolist()
        if rows:
            self._requeue([self._running.by_row[row] for row in rows], computed=False)
        self._cache.forget(blocks)

    def _requeue(self, sequences: list[Sequence], computed: bool = True, keep_tails: bool = False) -> None:
        """Take rows and blocks back; the sequences wait at their old places. `computed` blocks stay findable."""
        for sequence in sequences:
            sequence.refusal = 0
            sequence.computed = int(self._rows.computed[sequence.row])
            self._stats.recomputed_tokens += sequence.computed  # reduced on readmission by what is found
        self._running.leave(sequences, computed, keep_tails)
        self._waiting.look_again()
        for sequence in sequences:
            if sequence.status is SequenceStatus.PAUSED:
                self._waiting.wait_for_move(sequence)
            else:
                self._waiting.add(sequence)

    def _at_stake(self, sequences: list[Sequence]) -> tuple[Index, Index, tuple[Seconds, Seconds]]:
        """What preempting each sequence wins and loses: blocks that no other row has, the tokens computed in them, and
        the seconds to swap and to compute those tokens.
        """
        assert self._cost is not None
        rows = np.array([s.row for s in sequences], np.int64)
        won = self._cache.row_tables.sole_blocks(rows)
        tokens = self._cache.row_tables.sole_tokens(rows, self._rows.computed[rows])
        return won, tokens, self._cost.victims_s(tokens, self._cache.row_tables.blocks_for_each(tokens))

    def _explain(self, victims: list[Sequence]) -> None:
        """Record what preempting `victims` wins and loses; of more than 64 only the last 64."""
        if self._cost is None:
            return
        victims = victims[-64:]
        won, tokens, (swap_s, compute_s) = self._at_stake(victims)
        host = self._cache.host
        slots = host.num_slots if host.demotes else 0
        for i, victim in enumerate(victims):
            request = victim.request
            self._decisions.preempted(
                self._stats.steps, request.request_id, request.priority, int(won[i]), int(tokens[i]),
                float(swap_s[i]) if slots >= won[i] else None, float(compute_s[i]),
            )  # fmt: skip
