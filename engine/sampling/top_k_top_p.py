"""Top-k and top-p filters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .categorical import find, padded, sums


def cut(x: Tensor, num_sorted: int, top_k: Tensor | None, top_p: Tensor | None, at_hand: bool) -> Tensor:
    """float32[m, vocab]: 1 for kept tokens, else 0. Overwrites and returns `x`, logits float32[m, vocab].

    All ties for the k-th place stay. Of ties for the last place in the nucleus the lowest ids stay, as with argmax. A
    row's result must not depend on how many logits were sorted for its neighbours. Therefore the exponentials are not
    normalized and are summed in blocks counted from the largest, and ties for the k-th place are counted, because not
    all are among the sorted logits.

    Args:
        num_sorted: Number of largest logits read in descending order: at least `top_k`, or all without it.
        top_k: int64[m], from 1. None: no row has top-k, all have top-p.
        top_p: float64[m], the share that the nucleus must exceed; inf: off. None: no row has top-p, all have top-k.
        at_hand: Values can be read without a wait, as on a CPU. Otherwise nothing is read.
    """
    depths = _depths(x, num_sorted, at_hand)
    floor = depths[:, -1:] if top_k is None else depths.gather(1, top_k[:, None] - 1)
    if top_p is None:
        return x.ge_(-floor)
    weights = (depths[:, :1] - depths).exp_()
    tied = torch.zeros_like(floor, dtype=torch.int64)
    if top_k is not None:
        weights.mul_(depths.clone().lt_(floor))
        tied = _count(x, -floor, at_hand)
    border, keep = _nucleus(depths, padded(weights), floor, tied, top_p[:, None])
    if at_hand:
        among = torch.searchsorted(depths, border, right=True) - torch.searchsorted(depths, border)
        more = keep < torch.where(border == floor, torch.maximum(tied, among), among)
        for row in more[:, 0].nonzero().flatten().tolist():
            x[row, (x[row] == -border[row]).nonzero().flatten()[int(keep[row]) :]] = -torch.inf
    else:
        at_border = x == -border
        x.masked_fill_(at_border & (at_border.cumsum(-1, dtype=torch.int32) > keep), -torch.inf)
    return x.ge_(-border)


def _nucleus(depths: Tensor, weights: Tensor, floor: Tensor, tied: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(float32[m, 1], int64[m, 1]): the depth of the token that crosses top-p, which stays, and how many of this depth stay.

    Args:
        depths: float32[m, num_sorted], ascending.
        weights: float32[m, padded to blocks], of logits above the floor; 0 elsewhere.
        floor: float32[m, 1], a depth.
        tied: int64[m, 1], how many tokens at the floor's depth count too.
        top_p: float64[m, 1].
    """
    ends = sums(weights)
    above, one = ends[:, -1:], (depths[:, :1] - floor).exp_().double()
    wanted = (above + tied * one) * top_p
    place = find(weights, ends, wanted).clamp_(max=depths.shape[-1] - 1)
    border = torch.minimum(depths.gather(1, place), floor)
    keep = place + 1 - torch.searchsorted(depths, border)
    on_floor = wanted >= above
    keep_tied = torch.minimum((wanted - above) / one, tied.double()).long() + 1
    return torch.where(on_floor, floor, border), torch.where(on_floor, keep_tied, keep)


def _count(x: Tensor, value: Tensor, at_hand: bool) -> Tensor:
    """int64[m, 1]: how many elements in each row of `x` [m, vocab] equal `value` [m, 1]."""
    if not at_hand:
        return (x == value).sum(-1, keepdim=True)
    rows = np.flatnonzero(x.numpy() == value.numpy()) // x.shape[-1]  # few: faster than counting along the rows
    return torch.from_numpy(np.bincount(rows, minlength=len(x)))[:, None]


def _depths(x: Tensor, count: int, at_hand: bool) -> Tensor:
    """The `count` largest values of each row, negated and so ascending: float32[m, count]. Read-only."""
    if not at_hand:
        return (x.topk(count) if count < x.shape[-1] else x.sort(descending=True)).values.neg_()
    values = x.numpy()  # numpy's sort is vectorized; torch's is not, and sorts indices too
    if count < values.shape[-1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    depths = np.negative(values)
    depths.sort(axis=-1)
    return torch.from_numpy(depths)
