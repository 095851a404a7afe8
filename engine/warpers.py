"""The warpers: temperature, top-k, top-p and min-p of the rows that draw, as transformers has them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..scheduler.request import Sampling
from .draw import invert, padded
from .logits import LARGEST, Bool, Float32, Float64, Int64, Rows, index

_COLDEST = 1e-6  # lower temperatures act as this one, so that logits / temperature stays finite


class Warpers:
    """How each row's distribution is bent. A row without a temperature draws nothing. Not safe for concurrent use."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.zeros(num_rows, np.int64)  # 0: off
        self._top_p = np.ones(num_rows, np.float64)  # 1: off; else as `_share_for` gives it
        self._min_p = np.zeros(num_rows, np.float32)  # 0: off

    def admit(self, row: int, sampling: Sampling) -> None:
        """(Re)start `row`."""
        self._temperature[row] = min(max(sampling.temperature, _COLDEST), LARGEST) if sampling.temperature > 0 else 0.0
        self._top_k[row] = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._top_p[row] = _share_for(sampling.top_p) if sampling.top_p < 1 else 1.0
        self._min_p[row] = sampling.min_p

    def release(self, rows: Rows) -> None:
        """Back to greedy."""
        self._temperature[rows] = 0.0

    def draws(self, rows: Rows) -> Bool:
        """bool[n]: which of `rows` have a temperature."""
        return self._temperature[rows] > 0

    def warmed(self, top: Float32, rows: Rows) -> Float32:
        """float32[n]: what becomes of each row's largest logit; of a row that draws nothing it stays."""
        temperature = self._temperature[rows]
        with np.errstate(over="ignore"):
            return np.asarray(top / np.where(temperature > 0, temperature, np.float32(1)), np.float32)

    def weights(self, x: Tensor, rows: Rows) -> Tensor:
        """float32[m, vocab, padded to blocks] of logits x [m, vocab] of rows that draw, 0 where filtered. Overwrites `x`."""
        self._warm(x, rows)
        weights = torch.softmax(x, -1)
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))
        if cut.size == len(rows):
            weights.mul_(_cut(x, top_k, top_p))
        elif cut.size:
            places = index(cut, x)
            weights[places] = weights[places] * _cut(x[places], top_k[cut], top_p[cut])
        if (min_p > 0).any():
            least = torch.from_numpy(min_p).to(x.device)[:, None] * weights.amax(-1, keepdim=True)
            weights.mul_(weights.clone().ge_(least))
        return padded(weights)

    def scores(self, x: Tensor, rows: Rows, least: Int64) -> Tensor:
        """float32[m, vocab] of logits x [m, vocab] of rows that draw, -inf where filtered. Overwrites `x`.

        Row i keeps `least[i]` tokens at least, as transformers has it where beams are drawn.
        """
        self._warm(x, rows)
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        top_k = np.where(top_k > 0, np.maximum(top_k, least), 0)
        top_k[top_k >= self._vocab_size] = 0
        kept = torch.ones_like(x, dtype=torch.bool)
        if ((top_k > 0) | (top_p < 1)).any():
            kept &= _cut(x.clone(), top_k, top_p) > 0
        if (min_p > 0).any():
            likely = torch.softmax(x, -1)
            kept &= likely >= torch.from_numpy(min_p).to(x.device)[:, None] * likely.amax(-1, keepdim=True)
        for place in np.flatnonzero((top_p < 1) | (min_p > 0)).tolist():
            kept[place, x[place].sort(descending=True, stable=True).indices[: least[place]]] = True
        return x.masked_fill_(~kept, -torch.inf)

    def _warm(self, x: Tensor, rows: Rows) -> None:
        temperature = self._temperature[rows]
        if (temperature != 1).any():
            x.div_(torch.from_numpy(temperature).to(x.device)[:, None])


def _share_for(top_p: float) -> float:
    """The running sum, as a share, that a nucleus has to exceed: half a float32 step below `top_p`.

    So that ten tokens of a tenth each fill a nucleus of 0.9 with nine of them, whatever the last bits say.
    """
    above = np.float32(top_p)
    below = np.nextafter(above, np.float32(-1))
    return (float(above) + float(below)) / 2


def _cut(x: Tensor, top_k: Int64, top_p: Float64) -> Tensor:
    """float32[m, vocab]: 1 for tokens that top-k and top-p keep, else 0. Overwrites and returns `x`.

    Both read the largest logits in descending order: all of them for a row without top-k, else k and one more. What is
    computed for a row must not depend on how many were sorted for its neighbours: hence exponentials that no sum has
    scaled, in blocks counted from the largest.
    """
    vocab_size = x.shape[-1]
    by_k = top_k > 0
    count = vocab_size if not by_k.all() else min(vocab_size, int(top_k.max()) + 1)
    top = _largest(x, count)  # [m, count]
    places = torch.arange(len(x), device=x.device)
    last = index(np.maximum(top_k, 1) - 1, x)
    floor = torch.where(torch.from_numpy(by_k).to(x.device), top[places, last], -torch.inf)
    if not (top_p < 1).any():
        return x.ge_(floor[:, None])
    if count < vocab_size and bool((top[places, last] == top[places, last + 1]).any()):
        top = _largest(x, vocab_size)  # more than k tie for the k-th place: they all count
    weights = (top - top[:, :1]).exp_()
    if by_k.any():
        weights.mul_(top.clone().ge_(floor[:, None]))
    weights = padded(weights)
    ends = invert(weights, torch.from_numpy(top_p).to(x.device)).clamp_(max=top.shape[-1] - 1)
    border = top[places, ends]  # the token that crosses top_p is kept
    border = torch.where(torch.from_numpy(top_p < 1).to(x.device), border, -torch.inf)
    after = top[places, (ends + 1).clamp_(max=top.shape[-1] - 1)]
    split = (after == border) & (ends + 1 < top.shape[-1]) & (border > -torch.inf)
    for row in split.nonzero().flatten().tolist():
        keep = int(ends[row]) + 1 - int((top[row] > border[row]).sum())
        tied = (x[row] == border[row]).nonzero().flatten()
        x[row, tied[keep:]] = -torch.inf  # the lowest ids stay, as with argmax; transformers' unstable sort takes any
    return x.ge_(torch.maximum(floor, border)[:, None])


def _largest(x: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending: float32[m, count]. Read-only."""
    if x.device.type != "cpu":
        return x.topk(count).values if count < x.shape[-1] else x.sort(descending=True).values
    values = np.negative(x.numpy())  # numpy sorts values with vector instructions, torch values and indices without
    if count < x.shape[-1]:
        values.partition(count - 1, axis=-1)
        values = values[:, :count].copy()
    values.sort(axis=-1)
    return torch.from_numpy(np.negative(values, out=values))
