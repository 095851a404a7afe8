"""What layers with states have computed of chunks that are not done, so that each token changes each state once.

A step that raises is repeated, in other parts (`ModelRunner.begin`). Its states change in place: they are those before the
step in some layers, and those behind it, or behind some of its tokens, in others. Where a mixer has computed a token, its
output is repeated instead:

    layer 0    outputs kept, states behind the step     repeated
    layer 1    raised                                    computed

A mixer's output depends on its input and its state alone, so this gives what computing all again over the old states would. A
token's output takes a hidden state, where its state before would take hundreds. A chunk from the first token of a sequence on
needs nothing of this: it begins with states of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...cache.block_table import Index


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens `starts[i] .. starts[i] + lengths[i]` of `rows[i]`, which lie from `firsts[i]` on in tensors [1, T, ...]."""

    rows: Index
    starts: Index
    firsts: Index
    lengths: Index

    def __getitem__(self, places: Any) -> Tokens:
        return Tokens(self.rows[places], self.starts[places], self.firsts[places], self.lengths[places])

    @property
    def ends(self) -> Index:
        """The token of each row behind the last one."""
        return self.starts + self.lengths

    @property
    def places(self) -> torch.Tensor:
        """Where the tokens lie, int64 [sum of lengths]."""
        before = np.cumsum(self.lengths) - self.lengths
        return torch.from_numpy(np.arange(int(self.lengths.sum())) + np.repeat(self.firsts - before, self.lengths))


@dataclass(frozen=True, slots=True, eq=False)
class MixerOutput:
    """What a mixer gave for the tokens at `places` of a packed row: tensors [1, len(places), ...], in tuples or not."""

    places: torch.Tensor
    output: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    layer: int
    tokens: Tokens  # rows become -1
    output: Any


_NOTHING = Tokens(*[np.empty(0, np.int64)] * 4)


class UndoneOutputs:
    """The outputs of mixers for the tokens of chunks that are not done, by layer and row."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._passes = 0  # of this plan, and 1 more if something is kept of earlier ones
        self._lost: set[int] = set()
        self._last: Tokens | None = None  # those of the last `add`: where their outputs lay, and then lie
        self._places, self._copied = torch.empty(0), _NOTHING

    def begin(self, tokens: Tokens) -> bool:
        """Begin a forward pass over `tokens`. Returns whether `left` may differ from them."""
        self._passes += 1
        if self._kept:
            self.forget(tokens.rows[tokens.starts == 0])
        return bool(self._kept)

    def add(self, layer: int, tokens: Tokens, output: Any, num_tokens: int) -> None:
        """Keep what the mixer of `layer` gave for `tokens`, of its output for `num_tokens`."""
        if tokens is not self._last:  # most layers of a pass compute the same
            kept = tokens[tokens.starts > 0]
            firsts = np.cumsum(kept.lengths) - kept.lengths
            self._last, self._places = tokens, kept.places
            self._copied = Tokens(kept.rows.copy(), kept.starts, firsts, kept.lengths)
        if places := len(self._places):
            is_all = places == num_tokens
            copied = map_tokens(lambda one: one.clone() if is_all else one[:, self._places], output, num_tokens)
            self._kept.append(_Kept(layer, self._copied, copied))

    def left(self, layer: int, tokens: Tokens) -> tuple[Index, Tokens, list[MixerOutput]]:
        """The chunks of `tokens` that the mixer of `layer` has still to compute, what is left of them, and what it gave for the
        other tokens.
        """
        pieces, known = [], np.zeros(len(tokens.rows), np.int64)
        for kept in self._kept:
            ours = kept.tokens
            if kept.layer != layer:
                continue
            for i, j in zip(*np.nonzero(tokens.rows[:, None] == ours.rows), strict=True):
                begin, end = max(tokens.starts[i], ours.starts[j]), min(tokens.ends[i], ours.ends[j])
                if begin < end:
                    at, of = int(tokens.firsts[i] + begin - tokens.starts[i]), int(ours.firsts[j] + begin - ours.starts[j])
                    count = int(end - begin)
                    part = map_tokens(partial(_between, of, of + count), kept.output, int(ours.lengths.sum()))
                    pieces.append(MixerOutput(torch.arange(at, at + count), part))
                    known[i] = end - tokens.starts[i]
        places = np.flatnonzero(known < tokens.lengths)
        left = Tokens(tokens.rows, tokens.starts + known, tokens.firsts + known, tokens.lengths - known)[places]
        return places, left, pieces

    def done(self, rows: Index, ends: Index) -> None:
        """The chunks of `rows` in a plan are done, up to `ends[i]` tokens; those of other rows are not."""
        if self._passes == 1 and len(rows) and self._kept and set(rows.tolist()) >= self._rows:
            self._kept.clear()  # one pass over all of them, the usual case: none is ahead of its end
        elif self._kept:
            upto = dict(zip(rows.tolist(), ends.tolist(), strict=True))
            every = [pair for kept in self._kept for pair in zip(kept.tokens.rows.tolist(), kept.tokens.ends, strict=True)]
            ahead = {row for row, end in every if row in upto and end > upto[row]}
            self.forget(rows[~np.isin(rows, list(ahead))])
        self._passes = int(bool(self._kept))

    @property
    def _rows(self) -> set[int]:
        """Those with outputs."""
        every = {id(kept.tokens): kept.tokens for kept in self._kept}  # the layers of a pass share theirs
        return {row for tokens in every.values() for row in tokens.rows.tolist()} - {-1}

    def lose(self, tokens: Tokens) -> None:
        """A mixer raised behind a change of states: those of sequences that `tokens` continue are unknown."""
        self._lost.update(tokens.rows[tokens.starts > 0].tolist())

    def take_lost(self) -> Index:
        """The rows with unknown states since the last call. Their outputs are dropped."""
        lost = np.array(sorted(self._lost), np.int64)
        self._lost.clear()
        self.forget(lost)
        return lost

    def forget(self, rows: Index) -> None:
        """Drop the outputs of `rows`."""
        for kept in self._kept:
            kept.tokens.rows[np.isin(kept.tokens.rows, rows)] = -1
        self._kept = [kept for kept in self._kept if (kept.tokens.rows >= 0).any()]


def map_tokens(change: Callable[[torch.Tensor], torch.Tensor], value: Any, num_tokens: int) -> Any:
    """`value` with `change` applied to the tensors [1, num_tokens, ...] in its tuples, lists and dicts."""
    if isinstance(value, dict):
        return {key: map_tokens(change, one, num_tokens) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tokens(change, one, num_tokens) for one in value)
    has_tokens = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, num_tokens)
    return change(value) if has_tokens else value


def joined(pieces: list[MixerOutput], num_tokens: int) -> Any:
    """The outputs of `pieces` as one for a packed row: tensors with an item for each token; of others those of the first."""
    first = pieces[0].output
    if isinstance(first, (tuple, list)):
        columns = zip(*(piece.output for piece in pieces), strict=True)
        return tuple(
            joined([MixerOutput(piece.places, one) for piece, one in zip(pieces, column, strict=True)], num_tokens)
            for column in columns
        )
    if not isinstance(first, torch.Tensor) or first.shape[:2] != (1, len(pieces[0].places)):
        return first
    together = first.new_zeros(1, num_tokens, *first.shape[2:])
    for piece in pieces:
        together[0, piece.places] = piece.output[0]
    return together


def _between(first: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, first:end]
