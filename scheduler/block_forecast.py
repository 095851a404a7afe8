"""How many blocks sequences are expected to hold at the worst moment to come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..cache.block_table import Index
from ..cache.manager import CacheManager
from .length_forecast import ForecastPeak, LengthForecast
from .rows import Rows
from .sequence import Sequence


class ExpectedBlocks:
    """The forecast of output lengths in blocks of the pool: of who runs, in `running` rows, and of newcomers. Read-only."""

    def __init__(self, cache: CacheManager, rows: Rows, lengths: LengthForecast) -> None:
        self._cache = cache
        self._rows = rows
        self._lengths = lengths

    def peak(self, running: Index, newcomers: list[Sequence]) -> ForecastPeak:
        """The most blocks that whoever runs and the newcomers, one at least of both, are forecast to hold at one time, less
        what they share.
        """
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
        """The forecast for these, but no less than what all their tokens take now, and no more than there can be."""
        known = [*self._rows.known[running].tolist(), *(len(s.tokens) for s in newcomers)]
        if not known:
            return 0
        now = sum(self._cache.blocks_for(tokens) for tokens in known) - self._cache.shared
        return min(max(now, self.peak(running, newcomers).blocks), self._cache.capacity)
