"""K and V in one byte (int8, float8_e4m3fn): numbers that stand for themselves times a float16 scale of their token and head.

A row of a token and head is quantized by itself, so that what is stored does not depend on the chunk that it came in.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LARGEST_SCALE = torch.finfo(torch.float16).max


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., dim] of `dtype`, float16 scales [...]) of `x` [..., dim]. `x` is about the values times their scale.

    The largest value of a row is about `LARGEST`. Values are relative to the scale as it is stored, rounded to the nearest, and
    half to even. A row with a scale that is too small for float16 becomes zeros.
    """
    x, largest = x.float(), LARGEST[dtype]
    # Not divided by a Python number: CUDA would multiply by its reciprocal, which gives other bits.
    scales = (x.abs().amax(-1) / x.new_full((), largest)).clamp_(max=_LARGEST_SCALE).half()
    divisors = scales.float().masked_fill_(scales == 0, 1.0)
    values = (x / divisors[..., None]).clamp_(-largest, largest)
    return (values.round_() if dtype == torch.int8 else values).to(dtype), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Values [..., dim] times scales [...]: float32, or rounded into `out`."""
    return torch.mul(values.float(), scales.float()[..., None], out=out)


def store(
    x: torch.Tensor,  # [T, heads, dim]
    stored: torch.Tensor,  # [num_blocks, block_size, heads, dim]
    scales: torch.Tensor | None,  # [num_blocks, block_size, heads]
    places: tuple[torch.Tensor, torch.Tensor],  # int64 [T] each: blocks, and slots within them
) -> None:
    """Write K or V of a batch to its places, quantized if there are scales."""
    if scales is None:
        stored.index_put_(places, x)
        return
    values, of_rows = quantize(x, stored.dtype)
    stored.view(torch.uint8).index_put_(places, values.view(torch.uint8))
    scales.index_put_(places, of_rows)


def gather(stored: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `blocks` (int64 [n]) of K or V to `out` [n, block_size, heads, dim], dequantized if there are scales."""
    if scales is None:
        torch.index_select(stored, 0, blocks, out=out)
        return
    values = stored.view(torch.uint8).index_select(0, blocks).view(stored.dtype)
    dequantize(values, scales.index_select(0, blocks), out)
