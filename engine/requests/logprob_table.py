"""Log-probabilities of consecutive tokens, stored in arrays and converted to objects on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from ...cache.block_table import Int32
from ...scheduler.plan import ChunkLogprobs, Float32
from .outputs import TokenLogprobs

_AT_ONCE = 4096  # likely tokens that become objects together


class LogprobEntries(Sequence[TokenLogprobs]):
    """Log-probabilities of tokens in arrays, some 8 bytes for each likely token; the objects are made when they are read.

    Equal to every sequence of equal entries.

    Args:
        leads: The first entry is None: a prompt's first token has no log-probability.
    """

    def __init__(self, token_ids: Int32, logprobs: Float32, ranks: Int32, leads: bool = False) -> None:
        self._token_ids, self._logprobs, self._ranks = token_ids, logprobs, ranks
        self._num_leading = int(leads)

    def __len__(self) -> int:
        return self._num_leading + len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, int):
            return next(iter(self[(at := range(len(self))[index]) : at + 1]))
        begin, end, step = index.indices(len(self))
        if step != 1:
            return tuple(self)[index]
        part = slice(max(begin - self._num_leading, 0), max(end - self._num_leading, 0))
        leads = begin == 0 < min(end, self._num_leading)
        return LogprobEntries(self._token_ids[part], self._logprobs[part], self._ranks[part], leads)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        if self._num_leading:
            yield None  # type: ignore[misc]
        step = max(1, _AT_ONCE // self._token_ids.shape[1])
        for begin in range(0, len(self._ranks), step):
            part = slice(begin, begin + step)
            arrays = self._token_ids[part], self._logprobs[part], self._ranks[part]
            for ids, logprobs, rank in zip(*(array.tolist() for array in arrays), strict=True):
                yield TokenLogprobs(ids[0], logprobs[0], rank, tuple(zip(ids[1:], logprobs[1:], strict=True)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


class LogprobTable:
    """Log-probabilities of a sequence's tokens from position `first` on. Mutated by `put` and `release`."""

    def __init__(self, first: int) -> None:
        self._first = first  # of those that are stored
        self._count = 0
        self._num_released = 0
        self._token_ids: Int32 = np.empty((0, 1), np.int32)
        self._logprobs: Float32 = np.empty((0, 1), np.float32)
        self._ranks: Int32 = np.empty(0, np.int32)

    def put(self, scores: ChunkLogprobs) -> None:
        """Store `scores` behind the stored entries, or over them: recomputed tokens are reported again."""
        begin = scores.first - self._first
        end, known = begin + len(scores.ranks), max(-begin, 0)  # `known` ones are released
        if end <= 0:
            return
        if end > len(self._ranks):
            self._grow(max(end, 2 * len(self._ranks)), scores.token_ids.shape[1])
        part = slice(max(begin, 0), end)
        self._token_ids[part], self._logprobs[part] = scores.token_ids[known:], scores.logprobs[known:]
        self._ranks[part] = scores.ranks[known:]
        self._count = max(self._count, end)

    def release(self, end: int) -> None:
        """Forget the entries before `end`, counted from the first token."""
        if (count := min(end - self._num_released, self._count)) <= 0:
            return
        kept = slice(count, self._count)
        self._token_ids, self._logprobs = self._token_ids[kept].copy(), self._logprobs[kept].copy()
        self._ranks = self._ranks[kept].copy()
        self._first, self._count, self._num_released = (self._first + count, self._count - count, self._num_released + count)

    @property
    def total(self) -> float | None:
        """The sum of the tokens' own log-probabilities; None if some are released."""
        return None if self._num_released else float(self._logprobs[: self._count, 0].sum(dtype=np.float64))

    def entries(self, begin: int, end: int) -> LogprobEntries:
        """The stored entries of `begin .. end`, counted from the first token. Later changes of the table leave them."""
        part = slice(max(begin - self._num_released, 0), max(min(end - self._num_released, self._count), 0))
        return LogprobEntries(self._token_ids[part].copy(), self._logprobs[part].copy(), self._ranks[part].copy())

    def all_after_none(self) -> LogprobEntries:
        """None, and all stored entries, which must not change any more."""
        part = slice(self._count)
        return LogprobEntries(self._token_ids[part], self._logprobs[part], self._ranks[part], leads=True)

    def _grow(self, capacity: int, width: int) -> None:
        ids, logprobs, ranks = self._token_ids, self._logprobs, self._ranks
        self._token_ids = np.empty((capacity, width), np.int32)
        self._logprobs = np.empty((capacity, width), np.float32)
        self._ranks = np.empty(capacity, np.int32)
        if self._count:
            held = slice(self._count)
            self._token_ids[held], self._logprobs[held], self._ranks[held] = ids[held], logprobs[held], ranks[held]
