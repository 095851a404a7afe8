"""Checks of norms, rotary embeddings and gates by Triton, in its interpreter and on a device, against float64."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from pagetide.engine.layers.triton_kernels import gated, rms_norm, rotate

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_norms(device: str, shapes: list[tuple[int, ...]]) -> None:
    """Rows side by side and strided, with and without a weight, rounded once or twice."""
    for dtype, shape in itertools.product(TYPES, shapes):
        x, weight = drawn(device, dtype, *shape, scale=3.0), drawn(device, dtype, shape[-1])
        for rows in (x, x.transpose(0, -2), drawn(device, dtype, *shape[:-1], 2 * shape[-1])[..., : shape[-1]]):
            wide = rows.double()
            right = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            out = rms_norm(rows, None, 1e-5, 0.0, False)
            assert out.is_contiguous()
            close(out, right)
            close(rms_norm(rows, weight, 1e-5, 1.0, False), right * (weight.double() + 1))
            close(rms_norm(rows, weight, 1e-5, 0.0, True), right.to(dtype).double() * weight.double())


def check_rotations(device: str) -> None:
    """Of halves and of neighbours, of all elements of a head and of some, for heads and tokens in either order."""
    for dtype, token_dim, kind, rotated in itertools.product(TYPES, (1, 2), (0, 1, 2), (16, 24)):
        shapes = [(2, 5, heads, 24) if token_dim == 1 else (2, heads, 5, 24) for heads in (6, 2)]
        q, k = (drawn(device, dtype, *shape) for shape in shapes)
        q = torch.cat([q, q], -1)[..., :24]  # strided
        cos, sin = drawn(device, dtype, 2, 1, 5, rotated // 2 if kind == 1 else rotated)
        for out, one in zip(rotate(q, k, cos, sin, token_dim, kind), (q, k), strict=True):
            wide, c, s = one.double(), cos.double().unsqueeze(3 - token_dim), sin.double().unsqueeze(3 - token_dim)
            if kind == 1:
                c, s = torch.cat([c, c], -1), torch.cat([s, s], -1)
            turned = wide[..., :rotated]
            if kind == 2:
                other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
            else:
                other = torch.cat([-turned[..., rotated // 2 :], turned[..., : rotated // 2]], -1)
            close(out, torch.cat([turned * c + other * s, wide[..., rotated:]], -1), floor=1.0)


def check_gates(device: str, shapes: list[tuple[int, ...]]) -> None:
    """Each activation, with gate and up in either order and columns between them."""
    kinds = (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))
    for dtype, shape, (number, kind) in itertools.product(TYPES, shapes, enumerate(kinds)):
        n = shape[-1]
        both = drawn(device, dtype, *shape[:-1], 2 * n + 3, scale=3.0)
        for gate_at, up_at in ((0, n + 3), (n + 2, 1)):
            gate, up = (both.double()[..., at : at + n] for at in (gate_at, up_at))
            close(gated(both, n, gate_at, up_at, number), kind(gate) * up, floor=0.1)


def drawn(device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random, the same each time."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(device, dtype)


def close(out: torch.Tensor, right: torch.Tensor, floor: float = 0.0) -> None:
    """Of the same shape, and equal but for two roundings of the type, which the interpreter does towards zero."""
    floor = max(floor, 16 * torch.finfo(out.dtype).tiny)  # below it a rounding is a part of it
    relative = max(1e-5, 2.02 * torch.finfo(out.dtype).eps)
    assert out.shape == right.shape
    assert bool(((out.double() - right).abs() <= relative * (right.abs() + floor)).all())
