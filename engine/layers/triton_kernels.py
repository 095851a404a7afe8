"""Norms, rotary embeddings and gates by Triton kernels, with the arguments and results of the native ones on a CPU.

They compute in float32 and round to the type of their inputs once, where not said otherwise. A row's result does not depend on
other rows.
"""

from __future__ import annotations

import torch

from .triton_import import on_device, tl, triton

MOST_ELEMENTS = 1 << 15  # of a row that is normalised: a program holds it in registers
TILE = 1024  # elements of a gate that a program computes
ROTATED = 4096  # elements that a program rotates, about


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounds_first: bool) -> torch.Tensor:
    """x [..., n] -> its rows over the root of their mean square, times weight [n] + offset.

    With `rounds_first`, a normalised row is rounded to its type before it is multiplied. Raises ValueError for rows of more
    than MOST_ELEMENTS.
    """
    n = x.shape[-1]
    if n > MOST_ELEMENTS:
        raise ValueError(f"rows of up to {MOST_ELEMENTS:,} elements are normalised, got {n:,}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    (outer_stride, inner, inner_stride), x = _outer_dimensions(x)
    count, width = x.numel() // n, triton.next_power_of_2(n)
    rows = max(1, 1024 // width)  # of a program
    with on_device(x):
        _rms_norm[(triton.cdiv(count, rows),)](
            out, x, weight, count, inner, outer_stride, inner_stride, eps, offset,
            N=n, WIDTH=width, ROWS=rows, ROUNDS=rounds_first, num_warps=max(1, min(16, rows * width // 256)),
        )  # fmt: skip
    return out


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, token_dim: int, rotation: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, each rotated by cos and sin.

    Args:
        q, k: [batch, heads, tokens, dim] with a `token_dim` of 2, [batch, tokens, heads, dim] with 1.
        cos, sin: [1 or batch, tokens, elements that rotate, or half as many with rotation 1].
        rotation: 0: the halves of a head are pairs; 1: they are, with one cos and sin for each pair; 2: neighbours are.

    The results lie in memory as [batch, tokens, heads, dim]. Raises ValueError for other shapes.
    """
    batch, tokens = q.shape[0], q.shape[token_dim]
    rotated = cos.shape[2] * (2 if rotation == 1 else 1)
    for one in (q, k):
        if one.shape[0] != batch or one.shape[token_dim] != tokens or one.shape[3] < rotated or one.dtype != cos.dtype:
            raise ValueError(f"{tuple(one.shape)} of {one.dtype} cannot be rotated by {tuple(cos.shape)} of {cos.dtype}")
    if cos.shape != sin.shape or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens or rotated % 2:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not rotate {tuple(q.shape)}")
    cos, sin, head_dim = cos.contiguous(), sin.contiguous(), 3 - token_dim
    parts, outs = [], []
    for one in (q, k):
        one = one if one.stride(3) == 1 else one.contiguous()
        out = torch.empty(batch, tokens, one.shape[head_dim], one.shape[3], dtype=one.dtype, device=one.device)
        parts += [out, one, one.stride(0), one.stride(token_dim), one.stride(head_dim), one.shape[head_dim]]
        outs.append(out if token_dim == 1 else out.transpose(1, 2))
    half = triton.next_power_of_2(max(1, rotated // 2))
    width = triton.next_power_of_2(max(q.shape[3], k.shape[3]))
    heads = max(1, ROTATED // width)
    if batch * tokens:
        programs = [triton.cdiv(one.shape[head_dim], heads) for one in (q, k)]
        with on_device(q):
            _rotate[(batch * tokens, sum(programs))](
                *parts, cos, sin, tokens, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), programs[0],
                HEADS=heads, ROTATED=rotated, HALF_PAD=half, Q_DIM=q.shape[3], K_DIM=k.shape[3], DIM_PAD=width,
                PAIRED=rotation == 1, NEIGHBOURS=rotation == 2,
            )  # fmt: skip
    return outs[0], outs[1]


def gated(both: torch.Tensor, n: int, gate_at: int, up_at: int, gate: int) -> torch.Tensor:
    """both [..., width] -> [..., n]: the activated columns from `gate_at` on, times those from `up_at` on.

    `gate`: 0 is silu, 1 gelu, 2 gelu by tanh.
    """
    both = both.contiguous()
    out = torch.empty(*both.shape[:-1], n, dtype=both.dtype, device=both.device)
    rows = both.numel() // max(1, both.shape[-1])
    if rows and n:
        with on_device(both):
            _gated[(rows, triton.cdiv(n, TILE))](out, both, n, both.shape[-1], gate_at, up_at, KIND=gate, TILE=TILE)
    return out


def _outer_dimensions(x: torch.Tensor) -> tuple[tuple[int, int, int], torch.Tensor]:
    """The dimensions but the last one as two, (outer stride, inner size, inner stride), and x or a copy that has them."""
    dims: list[list[int]] = []  # size and stride, from the innermost
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1][0] *= size
        else:
            dims.append([size, stride])
    if (x.shape[-1] > 1 and x.stride(-1) != 1) or len(dims) > 2:
        return _outer_dimensions(x.contiguous())
    inner, outer = [*dims, [1, 0], [1, 0]][:2]
    return (outer[1], inner[0], inner[1]), x


@triton.jit(do_not_specialize=["count", "inner_size"])
def _rms_norm(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, count: tl.tensor, inner_size: tl.tensor,
    outer_stride: tl.tensor, inner_stride: tl.tensor, eps: tl.tensor, offset: tl.tensor,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: ROWS rows."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (at < N)[None, :]
    places = rows // inner_size * outer_stride + rows % inner_size * inner_stride
    values = tl.load(x + places[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    factors = 1.0 / tl.sqrt(tl.sum(values * values, 1) / N + eps)
    values = values * factors[:, None]
    if ROUNDS:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    if weight is not None:
        values = values * (tl.load(weight + at, mask=at < N, other=0.0).to(tl.float32) + offset)[None, :]
    tl.store(out + rows[:, None] * N + at[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "q_programs"])
def _rotate(
    q_out: tl.tensor, q: tl.tensor, q_batch: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, q_heads: tl.tensor,
    k_out: tl.tensor, k: tl.tensor, k_batch: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, k_heads: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, tokens: tl.tensor, cos_batch: tl.tensor, cos_token: tl.tensor, q_programs: tl.tensor,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, HALF_PAD: tl.constexpr, Q_DIM: tl.constexpr, K_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAIRED: tl.constexpr, NEIGHBOURS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: HEADS heads of a token's queries or keys."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // tokens
    token = row % tokens
    place = batch * cos_batch + token * cos_token
    if tl.program_id(1) < q_programs:
        _rotate_heads(
            q_out + row * q_heads * Q_DIM, q + batch * q_batch + token * q_token, q_head, q_heads, tl.program_id(1) * HEADS,
            cos + place, sin + place, HEADS, ROTATED, HALF_PAD, Q_DIM, DIM_PAD, PAIRED, NEIGHBOURS,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_out + row * k_heads * K_DIM, k + batch * k_batch + token * k_token, k_head, k_heads,
            (tl.program_id(1) - q_programs) * HEADS,
            cos + place, sin + place, HEADS, ROTATED, HALF_PAD, K_DIM, DIM_PAD, PAIRED, NEIGHBOURS,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    out: tl.tensor, x: tl.tensor, head_stride: tl.tensor, num_heads: tl.tensor, first: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, HEADS: tl.constexpr, ROTATED: tl.constexpr, HALF_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAIRED: tl.constexpr, NEIGHBOURS: tl.constexpr,
) -> None:  # fmt: skip
    """The heads from `first` on of one token. Elements beyond ROTATED stay as they are."""
    half: tl.constexpr = ROTATED // 2
    heads = (first + tl.arange(0, HEADS)).to(tl.int64)
    pairs = tl.arange(0, HALF_PAD)
    if NEIGHBOURS:
        one = 2 * pairs
        other = one + 1
    else:
        one = pairs
        other = pairs + half
    second = pairs if PAIRED else other
    real = pairs < half
    source = x + heads[:, None] * head_stride
    target = out + heads[:, None] * DIM
    if DIM > ROTATED:
        rest = tl.arange(0, DIM_PAD)
        mask = (heads < num_heads)[:, None] & ((rest >= ROTATED) & (rest < DIM))[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask), mask=mask)
    mask = (heads < num_heads)[:, None] & real[None, :]
    a = tl.load(source + one[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + one, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + one, mask=real, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + second, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + second, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(target + one[None, :], (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=mask)
    tl.store(target + other[None, :], (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["gate_at", "up_at"])
def _gated(
    out: tl.tensor, both: tl.tensor, n: tl.tensor, width: tl.tensor, gate_at: tl.tensor, up_at: tl.tensor,
    KIND: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: TILE elements of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < n
    both += row * width
    x = tl.load(both + gate_at + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + up_at + at, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    tl.store(out + row * n + at, (x * up).to(out.dtype.element_ty), mask=mask)
