"""Shared parts of the Triton kernels: the import of Triton, tile sizes and score transforms.

Only this module imports Triton, and pagetide works without it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .context import AttentionCall

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ImportError(
        "the Triton kernels need the package triton, which is not installed: pip install pagetide[triton]"
    ) from error

__all__ = (
    "DECODE_TILINGS",
    "DEFAULT_NUM_SMS",
    "LEAST_SPLIT_TILES",
    "LOG2_E",
    "MAX_DIM",
    "PREFILL_TILINGS",
    "PROGRAMS_PER_SM",
    "UNKNOWN_SPLITS",
    "UNKNOWN_SPLIT_KEYS",
    "ScoreTransform",
    "Tiling",
    "load_rows",
    "logits",
    "on_device",
    "padded",
    "product",
    "tiling",
    "tl",
    "triton",
)  # fmt: skip

LOG2_E = tl.constexpr(math.log2(math.e))  # logits are in base 2, weights are powers of two
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # TRITON_INTERPRET=1 at import time
NO_WINDOW = 2**31 - 1  # longer than any sequence


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's tile sizes and compiler options."""

    keys: int  # per loop iteration, a power of two from 16
    rows: int  # rows of scores per tile, a power of two from 16: queries times query heads per KV head
    warps: int
    stages: int  # of the software pipeline: iterations with K and V loads in flight


# By element bytes, then by maximum head dim (padded to a power of two). Based on compiling for sm_90: registers (only the
# widest prefill spills) and shared memory (three programs of the first entry per multiprocessor). Speed is unmeasured. Decode
# is memory-bound and needs copies in flight. Prefill is bound by the tensor cores, which need 64 rows and do not take 4 bytes.
DECODE_TILINGS: dict[int, dict[int, Tiling]] = {
    2: {128: Tiling(64, 16, 4, 3), 256: Tiling(32, 16, 4, 3), 512: Tiling(16, 16, 4, 3)},
    4: {128: Tiling(16, 16, 4, 3), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PREFILL_TILINGS: dict[int, dict[int, Tiling]] = {
    2: {128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2), 512: Tiling(16, 64, 8, 2)},
    4: {128: Tiling(16, 16, 4, 2), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PROGRAMS_PER_SM = 4  # decode programs that saturate a multiprocessor's memory; with fewer, rows are split
LEAST_SPLIT_TILES = 4  # tiles of keys: with fewer, writing and merging partial results costs more than it saves
UNKNOWN_SPLITS = 8  # splits of rows that fill the card, if lengths are unknown and one may be much longer ...
UNKNOWN_SPLIT_KEYS = 2048  # ... while rows below this length are not split
DEFAULT_NUM_SMS = 132  # if not a CUDA device; equals an H100 or H200
MAX_DIM = 512


class ScoreTransform(NamedTuple):
    """A call's transform from scores to weights, `softcap * tanh(scaling * qk / softcap)`, as the kernels take it."""

    inner: float  # the factor on the product of query and key: to base 2, or to tanh's argument
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


def padded(size: int) -> int:
    """The next power of two, at least 16, as `tl.dot` requires."""
    return max(16, 1 << (size - 1).bit_length())


def tiling(table: dict[int, dict[int, Tiling]], itemsize: int, dim: int) -> Tiling:
    """The table's entry for elements of `itemsize` bytes and a head dim. Raises ValueError beyond MAX_DIM."""
    for most, entry in table[itemsize].items():
        if padded(dim) <= most:
            return entry
    raise ValueError(f"the Triton kernels take head dims up to {MAX_DIM}, got {dim}: choose the torch kernel")


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch, because Triton uses the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def product(a: tl.tensor, b: tl.tensor, add: tl.tensor) -> tl.tensor:
    """`a @ b + add` in float32. The interpreter multiplies the bits of bfloat16, so it gets widened inputs, which is exact."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, add, input_precision="ieee")


@triton.jit
def load_rows(
    start: tl.tensor, offsets: tl.tensor, real: tl.tensor, DIM: tl.constexpr, DIM_PAD: tl.constexpr
) -> tl.tensor:
    """[n, DIM_PAD]: rows of DIM contiguous elements at `start + offsets`; zeros beyond, and where a row is not `real`."""
    dims = tl.arange(0, DIM_PAD)
    mask = real[:, None] & (dims < DIM)[None, :]
    return tl.load(start + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def logits(scores: tl.tensor, inner: tl.tensor, outer: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Query-key products as logits in base 2. See `ScoreTransform`."""
    scores = scores * inner
    if SOFTCAP:
        shrunk = tl.exp2(tl.abs(scores) * (-2 * LOG2_E))  # e ** -2|x|, which cannot overflow
        tanh = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -tanh, tanh) * outer
    return scores
