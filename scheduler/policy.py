"""Who is admitted: a forecast of how many blocks the running sequences will come to need.

A request that fits now, but whose neighbours are about to grow, will only push one of them out again. So a request is
admitted when its prompt fits and the pool would also hold the highest point of everybody's expected growth.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index


def peak_blocks(known: Index, to_come: Index, block_size: int) -> int:
    """The most blocks held at one time by sequences of `known` tokens that each gain one token a step, `to_come` in all.

    Just before the sequence with the k-th most tokens to come leaves, the k that are left have grown as much as it.
    """
    order = np.argsort(-to_come)
    alive = np.arange(1, len(order) + 1)
    tokens = np.cumsum(known[order]) + alive * to_come[order]
    return int(np.max(-(-tokens // block_size) + alive // 2))  # and half a block of rounding up for each


class OutputForecast:
    """Learns which share of `max_new_tokens` is really generated, from the sequences that ended.

    Starts from the guess that half of it is, which weighs as much as one observation; the last 64 or so count.
    """

    def __init__(self, share: float = 0.5, memory: int = 64) -> None:
        self.share = share
        self._memory = memory
        self._seen = 1

    def observe(self, generated: int, allowed: int) -> None:
        """A sequence ended by itself after `generated` of at most `allowed` tokens."""
        self._seen = min(self._seen + 1, self._memory)
        self.share += (generated / allowed - self.share) / self._seen

    def to_come(self, generated: Index, allowed: Index) -> Index:
        """Tokens each sequence is expected to generate yet: the learned share of what it may still."""
        to_come: Index = np.ceil((allowed - generated) * self.share).astype(np.int64)
        return to_come
