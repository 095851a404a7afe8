"""State of running rows: token histories, and one number per vocabulary token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .logits import Bool, Int32, Int64, Rows, index

_NO_LINE = -1


class Histories:
    """The tokens so far, prompt included, of the rows that keep them. Not safe for concurrent use."""

    def __init__(self) -> None:
        self._tokens: dict[int, Int64] = {}  # with spare room at the end
        self._known: dict[int, int] = {}

    def keep(self, row: int, token_ids: Int32) -> None:
        """Keep the tokens of `row` from now on; `token_ids` are its tokens so far."""
        self._known[row] = len(token_ids)
        self._tokens[row] = np.concatenate([token_ids.astype(np.int64), np.zeros(64, np.int64)])

    def drop(self, rows: Rows) -> None:
        """Forget `rows`."""
        for row in rows.tolist() if self._known else ():
            self._known.pop(row, None)
            self._tokens.pop(row, None)

    def of(self, row: int) -> Int64:
        """int64[known]: the tokens of a row that keeps them. Read-only, valid until the next token."""
        return self._tokens[row][: self._known[row]]

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        """Append a token to each of `rows` that keeps a history."""
        if not self._known:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if (known := self._known.get(row)) is not None:
                if known == len(self._tokens[row]):
                    self._tokens[row] = np.concatenate([self._tokens[row], np.zeros(known, np.int64)])
                self._tokens[row][known] = token
                self._known[row] = known + 1


class Lines:
    """One number per vocabulary token, for each row that takes such a line. Not safe for concurrent use."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty((0, vocab_size), dtype=dtype, device=device)  # [lines, vocab]
        self._line = np.full(num_rows, _NO_LINE, np.int64)
        self._free: list[int] = []

    def take(self, row: int) -> Tensor:
        """A line of zeros for `row`, [vocab], to be filled. The row must have none."""
        if not self._free:
            old = len(self.data)
            grown = self.data.new_empty((max(1, 2 * old), self.data.shape[1]))
            grown[:old] = self.data
            self.data = grown
            self._free = list(range(len(grown) - 1, old - 1, -1))
        self._line[row] = line = self._free.pop()
        return self.data[line].zero_()

    def drop(self, rows: Rows) -> None:
        """Free the lines of `rows`. Rows without one are fine."""
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
        """(place in `rows`, token id, number) of all non-zero entries of `rows`, which must have lines."""
        lines = self.data[index(self._line[rows], self.data)]
        places, ids = lines.nonzero(as_tuple=True)
        return places, ids, lines[places, ids]

    def mark(self, rows: Rows, tokens: Int64) -> None:
        """Set `tokens[i]` in the line of `rows[i]`, if it has one."""
        lines, ids = self._held(rows, tokens)
        if len(lines):
            self.data[lines, ids] = True

    def count(self, rows: Rows, tokens: Int64) -> None:
        """Increment `tokens[i]` in the line of `rows[i]`, if it has one."""
        lines, ids = self._held(rows, tokens)
        if len(lines):
            self.data[lines, ids] += 1

    def _held(self, rows: Rows, tokens: Int64) -> tuple[Tensor, Tensor]:
        lines = self._line[rows]
        held = lines != _NO_LINE
        return index(lines[held], self.data), index(tokens[held], self.data)
