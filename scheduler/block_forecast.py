"""Forecast of the most blocks that sequences will hold at one time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager
from .length_forecast import ForecastPeak, LengthForecast
from .rows import Rows
from .sequence import Sequence


class ExpectedBlocks:
    """Converts the forecast of output lengths to blocks of the pool, for `running` rows and newcomers. Read-only."""

    def __init__(self, cache: CacheManager, rows: Rows, lengths: LengthForecast) -> None:
        self._cache = cache
        self._rows = rows
        self._lengths = lengths

    def peak(self, running: Index, newcomers: list[Sequence]) -> ForecastPeak:
        """Forecast peak of blocks for the running rows and the newcomers (at least one sequence), less shared blocks."""
        rows = self._rows
        known = np.array([len(s.tokens) for s in newcomers], np.int64)
        prompt = np.array([len(s.request.prompt_token_ids) for s in newcomers], np.int64)
        limit = np.array(
            [rows.limit_of(int(p), s.request.sampling) for p, s in zip(prompt, newcomers, strict=True)], np.int64
        )
        generated = np.append(rows.known[running] - rows.prompt[running], known - prompt)
        allowed = np.append(rows.limit[running] - rows.prompt[running], limit - prompt)
        peak = self._lengths.peak(np.append(rows.known[running], known), generated, allowed, self._cache.block_size)
        return replace(peak, blocks=peak.blocks * len(self._cache.tables) - self._cache.shared)

    def needed(self, running: Index, newcomers: list[Sequence]) -> int:
        """The forecast, but at least the blocks of all tokens now, and at most the pool's capacity."""
        known = [*self._rows.known[running].tolist(), *(len(s.tokens) for s in newcomers)]
        if not known:
            return 0
        now = sum(self._cache.blocks_for(tokens) for tokens in known) - self._cache.shared
        return min(max(now, self.peak(running, newcomers).blocks), self._cache.pool.capacity)
