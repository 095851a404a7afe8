"""Victim selection: which sequence to preempt, by the blocks it frees and the cost of restoring them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager
from .cost import Seconds, SwapCost
from .outcome import Decisions
from .rows import Rows
from .sequence import Sequence


class Victims:
    """Ranks running sequences for preemption. Without a host tier `cost` may be None, and scheduling order decides."""

    def __init__(self, cache: CacheManager, rows: Rows, cost: SwapCost | None) -> None:
        self._cache = cache
        self._rows = rows
        self._cost = cost

    def by_worth(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Running `sequences` in the order of their worth; the last one is preempted first.

        The victim has, in this order: the lowest priority, no earlier preemption, the lowest cost per block to swap or
        recompute (whichever is cheaper), the latest place in order. Without a host tier it is the last in order.
        """
        running = sorted(sequences)
        if self._cache.host is None or self._cost is None:
            return running
        won, _, seconds = self._at_stake(running)
        per_block = np.full(len(running), np.inf)
        np.divide(np.minimum(*seconds), won, out=per_block, where=won > 0)
        priority = np.array([s.request.priority for s in running])
        spared = np.array([s.preemptions == 0 for s in running])
        return [running[i] for i in np.lexsort((np.arange(len(running)), -per_block, spared, priority))]

    def _at_stake(self, sequences: list[Sequence]) -> tuple[Index, Index, tuple[Seconds, Seconds]]:
        """What preempting each sequence wins and loses: blocks that no other row has, the tokens computed in them, and
        the seconds to swap and to compute those tokens.
        """
        assert self._cost is not None
        rows = np.array([s.row for s in sequences], np.int64)
        won = self._cache.sole_blocks(rows)
        shared = (self._cache.held_blocks(rows) - won) // len(self._cache.tables)
        tokens = np.maximum(self._rows.computed[rows] - shared * self._cache.block_size, 0)
        return won, tokens, self._cost.victims_s(tokens)

    def explain(self, victims: list[Sequence], step: int, decisions: Decisions) -> None:
        """Record what preempting `victims` wins and loses; of more than 64 only the last 64."""
        if self._cost is None:
            return
        victims = victims[-64:]
        won, tokens, (swap_s, compute_s) = self._at_stake(victims)
        host = self._cache.host
        slots = host.num_slots if host is not None and host.demotes else 0
        for i, victim in enumerate(victims):
            request = victim.request
            decisions.preempted(
                step, request.request_id, request.priority, int(won[i]), int(tokens[i]),
                float(swap_s[i]) if slots >= won[i] else None, float(compute_s[i]),
            )  # fmt: skip
