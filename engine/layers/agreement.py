"""The comparison of what a native kernel computes with what it is to replace."""

from __future__ import annotations

import torch

# Relative errors of products of a few factors: sums of another order in float32; in 16-bit types each factor is rounded.
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def agrees(out: torch.Tensor, right: object, relative: float, floor: torch.Tensor | float = 0.0) -> bool:
    """Whether `right` is a tensor of the same shape and type, and errors are at most `relative` times its elements' size plus
    `floor`.
    """
    if not isinstance(right, torch.Tensor) or (out.shape, out.dtype) != (right.shape, right.dtype):
        return False
    bound = relative * (right.float().abs() + floor)
    return bool(((out.float() - right.float()).abs() <= bound).all())
