"""The draw: distributions as weights, inverted at a share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .logits import Int64

_BLOCK = 128  # elements summed at once when a distribution is inverted


def draw(weights: Tensor, noise: Tensor) -> Int64:
    """int64[m]: inverts each row's distribution at `noise` (float64[m] in [0, 1)); never a token of weight 0."""
    ids = invert(weights, noise)
    lost = weights.gather(1, ids[:, None])[:, 0] <= 0
    if bool(lost.any()):  # parallel sums can step at a weight of 0, by their last bit
        ids[lost] = weights[lost].argmax(-1)
    return np.asarray(ids.cpu().numpy(), np.int64)


def invert(weights: Tensor, shares: Tensor) -> Tensor:
    """int64[m]: where the running sum of each row first exceeds its share of the row's total.

    In two levels, blocks and elements in a block: little is summed one by one, in float64, and the rest in trees.

    Args:
        weights: float32[m, blocks * _BLOCK], none negative.
        shares: float64[m], below 1.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)  # [m, blocks]
    targets = shares[:, None] * ends[:, -1:]  # [m, 1]
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].double().cumsum(-1)  # [m, _BLOCK]
    place = torch.searchsorted(within, targets - before, right=True)
    last = torch.searchsorted(within, within[:, -1:].contiguous())  # the last element that is not 0
    return (block * _BLOCK + torch.minimum(place, last))[:, 0]


def padded(weights: Tensor) -> Tensor:
    """`weights` [m, n], with zeros up to a whole number of blocks."""
    missing = -weights.shape[-1] % _BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights
