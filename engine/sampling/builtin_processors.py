"""Built-in logits processors: biases, penalties, bad words and minimum length.

Each acts as in transformers' `generate`, except frequency and presence penalties, which are OpenAI's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...scheduler.request import Sampling
from .histories import Histories, Lines
from .logits import LARGEST, Bool, Int32, Int64, Rows, index

# A glance at these logits nearly always shows that a row has a token left
_GLANCE = 64


class BuiltinLogitsProcessor(Protocol):
    """A logits processor with the settings and the state of its rows."""

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        """(Re)start `row`, which was released. `token_ids` [known] are its tokens so far, prompt first.

        Returns whether the row requests this processor.
        """

    def release(self, rows: Rows) -> None:
        """Forget `rows`. Rows without a request are fine."""

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        """bool[n]: which of `rows` request it for the next tokens, at `positions`."""

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        """Process in place `x[places]`, float32 [len(places), vocab]: the logits of `rows`, which all request it."""

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        """Append `tokens` to `rows`; state is updated as needed."""


class LogitBias:
    """Logit bias: added to the logits."""

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

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        return self._asked[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        each = [self._bias[row] for row in rows.tolist()]
        of_row = index(np.repeat(places, [len(ids) for ids, _ in each]), x)
        ids = index(np.concatenate([ids for ids, _ in each]), x)
        x[of_row, ids] += torch.from_numpy(np.concatenate([values for _, values in each])).to(x.device)

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        pass


class RepetitionPenalty:
    """Repetition penalty of tokens in prompt or output (Keskar et al., CTRL, 2019): positive logits are divided, negative ones
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

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        return self.seen.held(rows)

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        lines, ids, _ = self.seen.nonzero(rows)
        penalty = torch.from_numpy(self._penalty[rows]).to(x.device)[lines]
        of_row = index(places, x)[lines]
        values = x[of_row, ids]
        x[of_row, ids] = torch.where(values < 0, values * penalty, values / penalty)

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        self.seen.mark(rows, tokens)


class FrequencyPenalty:
    """Frequency and presence penalties of tokens in the output: one per occurrence, and one for having occurred."""

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

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        return self._counts.held(rows)

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        lines, ids, counts = self._counts.nonzero(rows)
        frequency, presence = torch.from_numpy(self._penalties[rows]).to(x.device)[lines].unbind(-1)
        x[index(places, x)[lines], ids] -= frequency * counts + presence

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        self._counts.count(rows, tokens)


class BadWords:
    """Token sequences that must not be generated: a word's last token is excluded when the output ends with the tokens before
    it.

    As in transformers, a word that is just an end id does not count.
    """

    def __init__(self, num_rows: int, vocab_size: int, histories: Histories) -> None:
        self._asked = np.zeros(num_rows, np.bool_)
        self._words: dict[int, _Words] = {}
        self._newest: tuple[Sampling, _Words] | None = None  # shared by forks of one prompt
        self._vocab_size = vocab_size
        self._histories = histories

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        if not sampling.bad_words:
            return False
        words = self._words_of(sampling)
        if not words.any:
            return False
        self._asked[row] = True
        self._words[row] = words
        if words.longer:
            self._histories.keep(row, token_ids)
        return True

    def release(self, rows: Rows) -> None:
        _forget(self._asked, self._words, rows)
        if not self._words:
            self._newest = None

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        return self._asked[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        banned = [self._banned(row) for row in rows.tolist()]
        of_row = index(np.repeat(places, [len(ids) for ids in banned]), x)
        x[of_row, index(np.concatenate(banned), x)] = -torch.inf

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        pass  # `Sampler` updates the histories

    def _words_of(self, sampling: Sampling) -> _Words:
        newest = self._newest
        if newest is not None:
            before, words = newest
            if before.bad_words is sampling.bad_words and before.stop_token_ids is sampling.stop_token_ids:
                return words
        words = _Words(sampling, self._vocab_size)
        self._newest = sampling, words
        return words

    def _banned(self, row: int) -> Int64:
        """The ids that would complete a bad word now, perhaps with duplicates."""
        words = self._words[row]
        return words.ended_by(self._histories.of(row)) if words.longer else words.alone


class _Words:
    """The indexed bad words of a request. Read-only.

    Attributes:
        alone: int64: the words of one token.
        longer: Whether there are words of several tokens. They are indexed by their last token but one, so that each step
            compares only a few of many words.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        ends = {(i,) for i in sampling.stop_token_ids}
        words = [word for word in sampling.bad_words if word[-1] < vocab_size and word not in ends]
        self.alone = np.array([word[0] for word in words if len(word) == 1], np.int64)
        last: dict[tuple[int, ...], list[int]] = {}  # by all tokens but the last
        lengths: dict[int, set[int]] = {}  # lengths of these prefixes, by their last token
        for word in words:
            if len(word) > 1:
                last.setdefault(word[:-1], []).append(word[-1])
                lengths.setdefault(word[-2], set()).add(len(word) - 1)
        self._last = {beginning: np.array(ids, np.int64) for beginning, ids in last.items()}
        self._lengths = {token: sorted(each) for token, each in lengths.items()}
        self.longer = bool(last)
        self.any = bool(words)

    def ended_by(self, known: Int64) -> Int64:
        """int64: the ids that would complete a word after the tokens `known`, at least one."""
        banned = [self.alone]
        for length in self._lengths.get(int(known[-1]), ()):
            if length <= len(known) and (ids := self._last.get(tuple(known[-length:].tolist()))) is not None:
                banned.append(ids)
        return np.concatenate(banned)


class MinLength:
    """Minimum length: excludes end ids before it, unless nothing else is left."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._until = np.zeros(num_rows, np.int64)  # first position at which end ids are allowed
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

    def requested(self, rows: Rows, positions: Int64) -> Bool:
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

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        pass


def _forget(asked: npt.NDArray[np.generic], kept: dict, rows: Rows) -> None:
    """Clear the entries of `rows` in `asked` and `kept`."""
    asked[rows] = 0
    for row in rows.tolist() if kept else ():
        kept.pop(row, None)
