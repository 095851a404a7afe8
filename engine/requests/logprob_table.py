"""Log-probabilities of consecutive tokens, stored in arrays and converted to objects on demand."""

from __future__ import annotations

import numpy as np

from ...cache.block_table import Int32
from ...scheduler.plan import ChunkLogprobs, Float32
from .outputs import TokenLogprobs


class LogprobTable:
    """Log-probabilities of a sequence's tokens from position `first` on. Mutated by `put`."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._count = 0
        self._token_ids: Int32 = np.empty((0, 1), np.int32)
        self._logprobs: Float32 = np.empty((0, 1), np.float32)
        self._ranks: Int32 = np.empty(0, np.int32)

    def put(self, scores: ChunkLogprobs) -> None:
        """Store `scores` behind the stored entries, or over them: recomputed tokens are reported again."""
        begin = scores.first - self._first
        end = begin + len(scores.ranks)
        if end > len(self._ranks):
            self._grow(max(end, 2 * len(self._ranks)), scores.token_ids.shape[1])
        self._token_ids[begin:end], self._logprobs[begin:end] = scores.token_ids, scores.logprobs
        self._ranks[begin:end] = scores.ranks
        self._count = max(self._count, end)

    @property
    def total(self) -> float:
        """The sum of the tokens' own log-probabilities."""
        return float(self._logprobs[: self._count, 0].sum(dtype=np.float64))

    def entries(self, begin: int, end: int) -> tuple[TokenLogprobs, ...]:
        """The stored entries of `begin .. end`, counted from the first token."""
        part = slice(begin, min(end, self._count))
        lines = zip(
            self._token_ids[part].tolist(), self._logprobs[part].tolist(), self._ranks[part].tolist(), strict=True
        )
        return tuple(
            TokenLogprobs(ids[0], logprobs[0], rank, tuple(zip(ids[1:], logprobs[1:], strict=True)))
            for ids, logprobs, rank in lines
        )

    def _grow(self, capacity: int, width: int) -> None:
        ids, logprobs, ranks = self._token_ids, self._logprobs, self._ranks
        self._token_ids = np.empty((capacity, width), np.int32)
        self._logprobs = np.empty((capacity, width), np.float32)
        self._ranks = np.empty(capacity, np.int32)
        if self._count:
            held = slice(self._count)
            self._token_ids[held], self._logprobs[held], self._ranks[held] = ids[held], logprobs[held], ranks[held]
