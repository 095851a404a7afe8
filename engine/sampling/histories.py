"""What is remembered of running rows, for as long as it is asked for: their tokens, and numbers by token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .logits import Bool, Int32, Int64, Rows, index

_NO_LINE = -1


class Histories:
    """The tokens so far, prompt included, of the rows that keep them. Not safe for concurrent use."""

    def __init__(self) -> None:
        self._tokens: dict[int, Int64] = {}  # with room behind them
        self._known: dict[int, int] = {}

    def keep(self, row: int, token_ids: Int32) -> None:
        """From now on keep the tokens of `row`, which are `token_ids` so far."""
        self._known[row] = len(token_ids)
        self._tokens[row] = np.concatenate([token_ids.astype(np.int64), np.zeros(64, np.int64)])

    def drop(self, rows: Rows) -> None:
        """Forget `rows`."""
        for row in rows.tolist() if self._known else ():
            self._known.pop(row, None)
            self._tokens.pop(row, None)

    def of(self, row: int) -> Int64:
        """int64[known]: the tokens of a row that keeps them. Read-only, valid until the next one."""
        return self._tokens[row][: self._known[row]]

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        """A token more for each of `rows` that keeps them."""
        if not self._known:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if (known := self._known.get(row)) is not None:
                if known == len(self._tokens[row]):
                    self._tokens[row] = np.concatenate([self._tokens[row], np.zeros(known, np.int64)])
                self._tokens[row][known] = token
                self._known[row] = known + 1


class Lines:
    """A line of a number for each token of the vocabulary, for each row that takes one. Not safe for concurrent use."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty((0, vocab_size), dtype=dtype, device=device)  # [lines, vocab]
        self._line = np.full(num_rows, _NO_LINE, np.int64)
        self._free: list[int] = []

    def take(self, row: int) -> Tensor:
        """A line of zeros for `row`, [vocab], to be written to. The row has none yet."""
        if not self._free:
            old = len(self.data)
            grown = self.data.new_empty((max(1, 2 * old), self.data.shape[1]))
            grown[:old] = self.data
            self.data = grown
            self._free = list(range(len(grown) - 1, old - 1, -1))
        self._line[row] = line = self._free.pop()
        return self.data[line].zero_()

    def drop(self, rows: Rows) -> None:
        """Take the lines of `rows` back; those without one are fine."""
        lines = self._line[rows]
        self._free.extend(lines[lines != _NO_LINE].tolist())
        self._line[rows] = _NO_LINE
        if self._free and len(self._free) == len(self.data):
            self._free = []
            self.data = self.data.new_empty((0, self.data.shape[1]))

    def held(self, rows: Rows) -> Bool:
        """bool[n]: which of `rows` have a line."""
        return self._line[rows] != _NO_LINE

    def nonzero(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """(place in `rows`, token id, number) of all that is not 0 in the lines of `rows`, which have one."""
        lines = self.data[index(self._line[rows], self.data)]
        places, ids = lines.nonzero(as_tuple=True)
        return places, ids, lines[places, ids]

    def mark(self, rows: Rows, tokens: Int64) -> None:
        """Set `tokens[i]` in the line of `rows[i]`, if it has one."""
        lines, ids = self._held(rows, tokens)
        if len(lines):
            self.data[lines, ids] = True

    def count(self, rows: Rows, tokens: Int64) -> None:
        """Count `tokens[i]` in the line of `rows[i]`, if it has one."""
        lines, ids = self._held(rows, tokens)
        if len(lines):
            self.data[lines, ids] += 1

    def _held(self, rows: Rows, tokens: Int64) -> tuple[Tensor, Tensor]:
        lines = self._line[rows]
        held = lines != _NO_LINE
        return index(lines[held], self.data), index(tokens[held], self.data)
