"""Draws from categorical distributions given as weights, by inversion."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128  # elements per block of an inversion


def draw(weights: Tensor, noise: Tensor, at_hand: bool) -> Tensor:
    """int64[m]: inverts each row's distribution at `noise` (float64[m] in [0, 1)). Never returns a token of weight 0.

    `at_hand`: as in `SamplingTransforms`.
    """
    ids = invert(weights, noise)[:, None]
    lost = weights.gather(1, ids) <= 0  # rounding in parallel sums can select a weight of 0
    if not at_hand or bool(lost.any()):
        ids = torch.where(lost, weights.argmax(-1, keepdim=True), ids)
    return ids[:, 0]


def invert(weights: Tensor, shares: Tensor) -> Tensor:
    """int64[m]: where each row's running sum first exceeds its share (float64[m], below 1) of the row's total."""
    ends = sums(weights)
    return find(weights, ends, shares[:, None] * ends[:, -1:])[:, 0]


def sums(weights: Tensor) -> Tensor:
    """float64[m, blocks]: running sums at block ends of weights float32[m, blocks * _BLOCK], all non-negative."""
    return weights.view(len(weights), -1, _BLOCK).sum(-1).double().cumsum(-1)


def find(weights: Tensor, ends: Tensor, targets: Tensor) -> Tensor:
    """int64[m, 1]: where each row's running sum of `weights` first exceeds its target, float64[m, 1].

    It searches two levels: blocks, by their `sums` in `ends`, then the elements of a block. If no sum exceeds the
    target, or a value is NaN, the result is any place.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)  # [m, _BLOCK]
    place = torch.searchsorted(within, targets - before, right=True)
    last = torch.searchsorted(within, within[:, -1:].contiguous())  # the last non-zero element
    return block * _BLOCK + torch.minimum(place, last).clamp_(max=_BLOCK - 1)


def padded(weights: Tensor) -> Tensor:
    """`weights` [m, n], zero-padded to a whole number of blocks."""
    missing = -weights.shape[-1] % _BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights
