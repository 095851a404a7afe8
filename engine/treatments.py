"""What is done to the logits of rows that ask for it: biases, penalties, banned words, a minimum length.

Each is what transformers' `generate` does under the same name, but for frequency and presence penalties, which are OpenAI's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..scheduler.request import Sampling
from .histories import Histories, Lines
from .logits import LARGEST, Bool, Int32, Int64, Rows, index

_Words = tuple[Int64, Int64]  # n words of one length: all but their last ids [n, length - 1], and these [n]
_GLANCE = 64  # logits that nearly always show that something is left in a row


class Treatment(Protocol):
    """One thing that may be done to logits, with what rows ask of it and what it remembers of them."""

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        """(Re)start `row`, which asks for nothing now. Its tokens so far are `token_ids` [known], prompt first.

        Returns whether it asks for this treatment.
        """

    def release(self, rows: Rows) -> None:
        """Forget `rows`: they ask for nothing. Those that never did are fine."""

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        """bool[n]: which of `rows` ask for it, whose next tokens stand at `positions`."""

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        """Treat `x[places]`, float32 [len(places), vocab], the logits of `rows`, in place. They all ask for it."""

    def took(self, rows: Rows, tokens: Int64) -> None:
        """`rows` go on with `tokens`, which is remembered where it matters."""


class Bias:
    """Logit bias: numbers that are added."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._asked = np.zeros(num_rows, np.bool_)
        self._bias: dict[int, tuple[Int64, npt.NDArray[np.float32]]] = {}
        self._vocab_size = vocab_size

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        if bias := [(i, b) for i, b in sampling.logit_bias if i < self._vocab_size]:
            ids, values = zip(*bias, strict=True)
            self._bias[row] = np.array(ids, np.int64), np.clip(values, -LARGEST, LARGEST).astype(np.float32)
            self._asked[row] = True
        return bool(bias)

    def release(self, rows: Rows) -> None:
        _forget(self._asked, self._bias, rows)

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        return self._asked[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        each = [self._bias[row] for row in rows.tolist()]
        of_row = index(np.repeat(places, [len(ids) for ids, _ in each]), x)
        ids = index(np.concatenate([ids for ids, _ in each]), x)
        x[of_row, ids] += torch.from_numpy(np.concatenate([values for _, values in each])).to(x.device)

    def took(self, rows: Rows, tokens: Int64) -> None:
        pass


class Repetition:
    """Repetition penalty of what is in prompt or output (Keskar et al., CTRL, 2019): positive logits are divided, negative ones
    multiplied.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._penalty = np.ones(num_rows, np.float32)
        self.seen = Lines(num_rows, vocab_size, torch.bool, device)

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        if sampling.repetition_penalty == 1.0:
            return False
        self._penalty[row] = min(sampling.repetition_penalty, LARGEST)
        line = self.seen.take(row)
        line[index(token_ids[token_ids < len(line)], line)] = True
        return True

    def release(self, rows: Rows) -> None:
        self.seen.drop(rows)

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        return self.seen.held(rows)

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        who, ids, _ = self.seen.nonzero(rows)
        penalty = torch.from_numpy(self._penalty[rows]).to(x.device)[who]
        of_row = index(places, x)[who]
        values = x[of_row, ids]
        x[of_row, ids] = torch.where(values < 0, values * penalty, values / penalty)

    def took(self, rows: Rows, tokens: Int64) -> None:
        self.seen.mark(rows, tokens)


class Frequency:
    """Frequency and presence penalties of what is in the output: a number for each time, and a number for once or more."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._penalties = np.zeros((num_rows, 2), np.float32)  # frequency, presence
        self._counts = Lines(num_rows, vocab_size, torch.int32, device)

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        if not (sampling.frequency_penalty or sampling.presence_penalty):
            return False
        self._penalties[row] = sampling.frequency_penalty, sampling.presence_penalty
        line = self._counts.take(row)
        output = token_ids[num_prompt:]
        counts = np.bincount(output[output < len(line)], minlength=len(line)).astype(np.int32)
        line.copy_(torch.from_numpy(counts))
        return True

    def release(self, rows: Rows) -> None:
        self._counts.drop(rows)

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        return self._counts.held(rows)

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        who, ids, counts = self._counts.nonzero(rows)
        frequency, presence = torch.from_numpy(self._penalties[rows]).to(x.device)[who].unbind(-1)
        x[index(places, x)[who], ids] -= frequency * counts + presence

    def took(self, rows: Rows, tokens: Int64) -> None:
        self._counts.count(rows, tokens)


class BadWords:
    """Sequences that are not to be generated: the last token of one is ruled out where those before it stand at the end.

    As in transformers, a word of nothing but an end id does not count.
    """

    def __init__(self, num_rows: int, vocab_size: int, histories: Histories) -> None:
        self._asked = np.zeros(num_rows, np.bool_)
        self._alone: dict[int, Int64] = {}  # words of one token
        self._longer: dict[int, list[_Words]] = {}
        self._vocab_size = vocab_size
        self._histories = histories

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        words = {w for w in sampling.bad_words if w[-1] < self._vocab_size} - {(i,) for i in sampling.stop_token_ids}
        if not words:
            return False
        self._asked[row] = True
        self._alone[row] = np.array(sorted(w[0] for w in words if len(w) == 1), np.int64)
        longer = []
        for length in sorted({len(w) for w in words if len(w) > 1}):
            group = np.array(sorted(w for w in words if len(w) == length), np.int64)
            longer.append((group[:, :-1], group[:, -1]))
        if longer:
            self._longer[row] = longer
            self._histories.keep(row, token_ids)
        return True

    def release(self, rows: Rows) -> None:
        _forget(self._asked, self._alone, rows)
        for row in rows.tolist() if self._longer else ():
            self._longer.pop(row, None)

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        return self._asked[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        banned = [self._banned(row) for row in rows.tolist()]
        of_row = index(np.repeat(places, [len(ids) for ids in banned]), x)
        x[of_row, index(np.concatenate(banned), x)] = -torch.inf

    def took(self, rows: Rows, tokens: Int64) -> None:
        pass  # the histories know

    def _banned(self, row: int) -> Int64:
        """The ids that would end a bad word now, some perhaps twice."""
        if row not in self._longer:
            return self._alone[row]
        known, banned = self._histories.of(row), [self._alone[row]]
        for beginnings, last in self._longer[row]:
            length = beginnings.shape[1]
            if length <= len(known):
                banned.append(last[(beginnings == known[-length:]).all(1)])
        return np.concatenate(banned)


class MinLength:
    """Minimum length: no end id before it, unless nothing else is left."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._until = np.zeros(num_rows, np.int64)  # position from which on the end ids are allowed
        self._ends: dict[int, Int64] = {}
        self._vocab_size = vocab_size

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        ends = np.array([i for i in sampling.stop_token_ids if i < self._vocab_size], np.int64)
        if sampling.min_new_tokens == 0 or not ends.size:
            return False
        self._ends[row] = ends
        self._until[row] = num_prompt + sampling.min_new_tokens
        return True

    def release(self, rows: Rows) -> None:
        _forget(self._until, self._ends, rows)

    def asked(self, rows: Rows, positions: Int64) -> Bool:
        return positions < self._until[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        ends = [self._ends[row] for row in rows.tolist()]
        of_row = index(np.repeat(places, [e.size for e in ends]), x)
        ids = index(np.concatenate(ends), x)
        values = x[of_row, ids]
        x[of_row, ids] = -torch.inf
        if bool(torch.isneginf(x[index(places, x), :_GLANCE].amax(-1)).any()):
            again = torch.isneginf(x.amax(-1))[of_row]
            x[of_row[again], ids[again]] = values[again]

    def took(self, rows: Rows, tokens: Int64) -> None:
        pass


def _forget(asked: npt.NDArray[np.generic], kept: dict, rows: Rows) -> None:
    """Clear the entries of `rows` in `asked`, and what is kept of them."""
    asked[rows] = 0
    for row in rows.tolist() if kept else ():
        kept.pop(row, None)
