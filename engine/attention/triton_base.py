"""Shared parts of the Triton kernels of attention: tile sizes and score transforms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..layers.triton_import import on_device, padded, tl, triton
from .context import AttentionCall, LayerCache

__all__ = (
    "DECODE_TILINGS",
    "DEFAULT_NUM_SMS",
    "LEAST_SPLIT_TILES",
    "LOG2_E",
    "MAX_DIM",
    "MAX_KEY_DIM",
    "PREFILL_TILINGS",
    "PROGRAMS_PER_SM",
    "UNKNOWN_SPLITS",
    "UNKNOWN_SPLIT_KEYS",
    "ScoreTransform",
    "Tiling",
    "add_values",
    "cache_tiling",
    "key_scores",
    "load_rows",
    "load_scales",
    "logits",
    "on_device",
    "padded",
    "product",
    "split_dims",
    "split_heads",
    "tiling",
    "tl",
    "triton",
    "views_and_strides",
)

LOG2_E = tl.constexpr(math.log2(math.e))  # logits are in base 2, weights are powers of two
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # TRITON_INTERPRET=1 at import time
NO_WINDOW = 2**31 - 1  # longer than any sequence


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's tile sizes and compiler options."""

    keys: int  # per loop iteration, a power of two from 16
    # Rows of scores per tile, a power of two from 16: queries times query heads per KV head
    rows: int
    warps: int
    stages: int  # of the software pipeline: iterations with K and V loads in flight


# By bytes of an element of the cache (4 if the query's has 4), then by maximum head dim (padded to a power of two). For two
# bytes and dims up to 128, decode's is the fastest of 32 on an H200, and prefill's within 5 % of the fastest of 24, which
# spills (docs/gpu.md); the speed of the others is unmeasured. They are based on compiling for sm_90: registers (only the widest
# prefill spills, and one-byte elements for queries of 4 bytes do) and shared memory (three decode programs per
# multiprocessor). Decode is memory-bound and needs copies in flight. Prefill is bound by the tensor cores, which need 64 rows
# and do not take 4 bytes. Elements of one byte need registers to become operands, so their prefill tiles are smaller.
DECODE_TILINGS: dict[int, dict[int, Tiling]] = {
    1: {128: Tiling(64, 16, 4, 3), 256: Tiling(32, 16, 4, 3), 512: Tiling(16, 16, 4, 3)},
    2: {128: Tiling(32, 16, 4, 3), 256: Tiling(32, 16, 4, 3), 512: Tiling(16, 16, 4, 3)},
    4: {128: Tiling(16, 16, 4, 3), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PREFILL_TILINGS: dict[int, dict[int, Tiling]] = {
    1: {64: Tiling(64, 128, 8, 3), 128: Tiling(32, 128, 8, 3), 256: Tiling(32, 32, 8, 2), 512: Tiling(32, 32, 8, 2)},
    2: {128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2), 512: Tiling(16, 64, 8, 2)},
    4: {128: Tiling(16, 16, 4, 2), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PROGRAMS_PER_SM = 4  # decode programs that saturate a multiprocessor's memory; with fewer, rows are split
# Tiles of keys: with fewer, writing and merging partial results costs more than it saves
LEAST_SPLIT_TILES = 4
# Splits of rows that fill the card, if lengths are unknown and one may be much longer ...
UNKNOWN_SPLITS = 8
UNKNOWN_SPLIT_KEYS = 2048  # ... while rows below this length are not split
DEFAULT_NUM_SMS = 132  # if not a CUDA device; equals an H100 or H200
# Elements in a program's registers, 64 KiB: with more rows of them, a KV head's query heads are divided.
RESULTS = 1 << 14
MAX_DIM = 512
MAX_KEY_DIM = 576  # of latents: V and 64 rotated elements


class ScoreTransform(NamedTuple):
    """A call's transform from scores to weights, `softcap * tanh(scaling * qk / softcap)`, as the kernels take it."""

    # The factor on the product of query and key: to base 2, or to tanh's argument
    inner: float
    outer: float  # the factor on tanh, to base 2; not used without a softcap
    has_softcap: bool
    sinks: torch.Tensor | None  # [num_heads], contiguous
    reach: int  # the most keys visible to a query, including its own

    @classmethod
    def of(cls, call: AttentionCall) -> ScoreTransform:
        """The call's transform."""
        sinks = None if call.sinks is None else call.sinks.contiguous()
        reach = NO_WINDOW if call.window is None else min(call.window, NO_WINDOW)
        if call.softcap is None:
            return cls(call.scaling * LOG2_E.value, 0.0, False, sinks, reach)
        return cls(call.scaling / call.softcap, call.softcap * LOG2_E.value, True, sinks, reach)


def tiling(table: dict[int, dict[int, Tiling]], itemsize: int, dim: int) -> Tiling:
    """The table's entry for elements of `itemsize` bytes and a head dim. Raises ValueError beyond MAX_DIM."""
    for most, entry in table[itemsize].items():
        if padded(dim) <= most:
            return entry
    raise ValueError(f"the Triton kernels take head dims up to {MAX_DIM}, got {dim}: choose the torch kernel")


def split_dims(cache: LayerCache) -> tuple[int, int]:
    """(leading, further) elements of each key, multiplied separately because tiles are powers of two.

    Where V is a part of K it is the leading elements, so a tile of them serves as keys and as values. Raises ValueError for
    keys of more than MAX_KEY_DIM elements.
    """
    k_dim, v_dim = cache.key.shape[-1], cache.value.shape[-1]
    if k_dim > MAX_KEY_DIM:
        raise ValueError(f"the Triton kernels take keys of up to {MAX_KEY_DIM} elements, got {k_dim}: choose the torch kernel")
    leading = v_dim if cache.v_in_k else min(k_dim, MAX_DIM)
    return leading, k_dim - leading


def split_heads(group: int, v_dim: int, rows: int = 16) -> tuple[int, int]:
    """(query heads per program, programs per KV head): one program if its results fit `rows` rows, or RESULTS."""
    rows = max(rows, RESULTS // padded(v_dim))
    return (group, 1) if padded(group) <= rows else (rows, -(-group // rows))


def cache_tiling(table: dict[int, dict[int, Tiling]], query: torch.Tensor, cache: LayerCache) -> Tiling:
    """The table's entry for these. Raises ValueError for head dims that are too large."""
    itemsize = query.itemsize if query.itemsize == 4 else cache.key.itemsize
    return tiling(table, itemsize, max(*split_dims(cache), cache.value.shape[-1]))


def views_and_strides(cache: LayerCache, *, reads: bool) -> tuple[tuple[torch.Tensor | None, ...], tuple[int | None, ...]]:
    """(K, V, K scales, V scales) as kernels take them, and the strides of each by block, token and head; None for those absent.

    V within K is not written. When read, its tiles are those of K, except with scales: the compiler does not copy tiles of
    one-byte elements ahead that serve twice.
    """
    without_v = cache.v_in_k and not (reads and cache.key_scale is not None)
    value, value_scale = (None, None) if without_v else (cache.value, cache.value_scale)
    views = cache.key, value, cache.key_scale, value_scale
    return views, tuple(stride for view in views for stride in ((None,) * 3 if view is None else view.stride()[:3]))


@triton.jit
def product(a: tl.tensor, b: tl.tensor, add: tl.tensor) -> tl.tensor:
    """`a @ b + add` in float32. The interpreter multiplies the bits of bfloat16, so it gets widened inputs, which is exact."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, add, input_precision="ieee")


@triton.jit
def load_rows(start: tl.tensor, offsets: tl.tensor, real: tl.tensor, DIM: tl.constexpr, DIM_PAD: tl.constexpr) -> tl.tensor:
    """[n, DIM_PAD]: rows of DIM contiguous elements at `start + offsets`; zeros beyond, and where a row is not `real`.

    `real` None: all rows are.
    """
    dims = tl.arange(0, DIM_PAD)
    if real is None:
        mask = (dims < DIM)[None, :]
    else:
        mask = real[:, None] & (dims < DIM)[None, :]
    return tl.load(start + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_scales(start: tl.tensor, offsets: tl.tensor, real: tl.tensor) -> tl.tensor:
    """float32 [n]: the scales at `start + offsets`; zeros where there is no `real` token, as the memory may hold a NaN."""
    if real is None:
        scales = tl.load(start + offsets)
    else:
        scales = tl.load(start + offsets, mask=real, other=0.0)
    return scales.to(tl.float32)


@triton.jit
def _operand(tile: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The tile's elements in another type, exactly. The interpreter makes other bits of bfloat16 from integers."""
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile.to(TYPE)


@triton.jit
def key_scores(
    q: tl.tensor, q_further: tl.tensor, key: tl.tensor, offsets: tl.tensor, real: tl.tensor, scales: tl.tensor,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Products of queries with the keys at `key + offsets`, times their scales; and the keys' leading elements, in q's type.

    See `split_dims`. `scales` None: the elements have none. `FURTHER` 0: `q_further` is not used.
    """
    k = _operand(load_rows(key, offsets, real, DIM, DIM_PAD), q.dtype)
    scores = product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32))
    if FURTHER:
        further = _operand(load_rows(key + DIM, offsets, real, FURTHER, FURTHER_PAD), q.dtype)
        scores = product(q_further, tl.trans(further), scores)
    if scales is not None:
        scores = scores * scales[None, :]
    return scores, k


@triton.jit
def add_values(
    mixed: tl.tensor, shrink: tl.tensor, weights: tl.tensor, v: tl.tensor, scales: tl.tensor, TYPE: tl.constexpr
) -> tl.tensor:
    """`mixed * shrink + weights @ v`, for v times its tokens' `scales` if these are not None. TYPE is that of queries.

    Scaled weights are multiplied in bfloat16 if queries are in float16, in which small weights times small scales underflow;
    bfloat16 holds elements of one byte exactly.
    """
    if scales is not None:
        weights = weights * scales[None, :]
        if TYPE == tl.float32:
            v = _operand(v, tl.float32)
        else:
            v = _operand(v, tl.bfloat16)
    return product(weights.to(v.dtype), v, mixed * shrink[:, None])


@triton.jit
def logits(scores: tl.tensor, inner: tl.tensor, outer: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Query-key products as logits in base 2. See `ScoreTransform`."""
    scores = scores * inner
    if SOFTCAP:
        shrunk = tl.exp2(tl.abs(scores) * (-2 * LOG2_E))  # e ** -2|x|, which cannot overflow
        tanh = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -tanh, tanh) * outer
    return scores
