"""Tokens of whole batches by one native kernel: largest logits, temperature, top-k, top-p, min-p and draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import native

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_DRAWS = tuple(
    torch.empty(0, dtype=dtype)
    for dtype in (torch.int64, torch.float32, torch.int64, torch.float64, torch.float32, torch.float64)
)


def serves(device: torch.device) -> bool:
    """Whether the native kernel serves logits on `device`."""
    return device.type == "cpu" and native.instructions() is not None


def sample(logits: Tensor, settings: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The tokens of all rows, int64[n], and `logits.packed` tokens and largest logits, float64[2, n].

    A token is 0 where a row's largest logit, after temperature, is not finite.

    Args:
        logits: float[n, vocab] of any float type; unchanged.
        settings: The arrays of `DrawSettings`, as tensors. Rows that are not among their places take their largest logit; ties:
            the lowest id.
    """
    tokens, packed, _ = torch.ops.pagetide.sample(_readable(logits), *(settings or _NO_DRAWS), False)
    return tokens, packed


def _readable(logits: Tensor) -> Tensor:
    x = logits.detach()
    x = x if x.dtype in _TYPES else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
