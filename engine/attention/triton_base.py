"""What the Triton kernels share: Triton itself, their tiles in one table, and how scores are made.

Nothing else imports Triton, so that pagetide works where it is not installed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

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
    "logits",
    "on_device",
    "padded",
    "product",
    "tiling",
    "tl",
    "triton",
)  # fmt: skip

LOG2_E = tl.constexpr(math.log2(math.e))  # weights are powers of two: so are logits in here
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # TRITON_INTERPRET=1 when this was imported
NO_WINDOW = 2**31 - 1  # longer than any sequence


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts its work, and what the compiler is told."""

    keys: int  # a loop's turn, a power of two from 16
    rows: int  # of scores at once, a power of two from 16: queries times the query heads of a KV head
    warps: int
    stages: int  # of the software pipeline: turns whose K and V are on their way


# By bytes of an element, and for head dims up to so many (padded to a power of two). What compiling for sm_90 tells is used:
# registers (only the widest prefill spills) and shared memory (three programs of the first entry on a multiprocessor). Speed is
# unmeasured. Decode is bound by memory, and wants copies on their way; prefill by the matrix units, which want 64 rows at least
# and do not take 4 bytes.
DECODE_TILINGS: dict[int, dict[int, Tiling]] = {
    2: {128: Tiling(64, 16, 4, 3), 256: Tiling(32, 16, 4, 3), 512: Tiling(16, 16, 4, 3)},
    4: {128: Tiling(16, 16, 4, 3), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PREFILL_TILINGS: dict[int, dict[int, Tiling]] = {
    2: {128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2), 512: Tiling(16, 64, 8, 2)},
    4: {128: Tiling(16, 16, 4, 2), 256: Tiling(16, 16, 8, 2), 512: Tiling(16, 16, 8, 2)},
}
PROGRAMS_PER_SM = 4  # decode programs that fill a multiprocessor's memory pipes: where there are fewer, rows are split
LEAST_SPLIT_TILES = 4  # of keys: below that, writing and merging partial results costs more than it wins
UNKNOWN_SPLITS = 8  # of rows that fill the card together, where nobody knows whether one of them is much longer ...
UNKNOWN_SPLIT_KEYS = 2048  # ... for which shorter ones are not split
DEFAULT_NUM_SMS = 132  # of what is no CUDA device; an H100 or H200 has as many
MAX_DIM = 512


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTransform:
    """How scores become weights: `softcap * tanh(scaling * qk / softcap)`, and which keys are seen."""

    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads], contiguous
    window: int | None

    @property
    def inner(self) -> float:
        """What the product of query and key is multiplied by: into base 2, or into what tanh gets."""
        return self.scaling * LOG2_E.value if self.softcap is None else self.scaling / self.softcap

    @property
    def outer(self) -> float:
        """What tanh is multiplied by, into base 2. Not used without a softcap."""
        return 0.0 if self.softcap is None else self.softcap * LOG2_E.value

    @property
    def reach(self) -> int:
        """Keys that a query sees at most, its own among them."""
        return NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)


def padded(size: int) -> int:
    """The next power of two, and 16 at least: what `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length())


def tiling(table: dict[int, dict[int, Tiling]], itemsize: int, dim: int) -> Tiling:
    """The table's entry for elements of `itemsize` bytes and a head dim. Raises ValueError beyond MAX_DIM."""
    for most, entry in table[itemsize].items():
        if padded(dim) <= most:
            return entry
    raise ValueError(f"the Triton kernels take head dims up to {MAX_DIM}, got {dim}: choose the torch kernel")


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device: Triton takes the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def product(a: tl.tensor, b: tl.tensor, add: tl.tensor) -> tl.tensor:
    """`a @ b + add`, in float32. The interpreter multiplies the bits of bfloat16: there they are widened, which is exact."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, add, input_precision="ieee")


@triton.jit
def logits(scores: tl.tensor, inner: tl.tensor, outer: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Products of query and key as logits in base 2. See `ScoreTransform`."""
    scores = scores * inner
    if SOFTCAP:
        shrunk = tl.exp2(tl.abs(scores) * (-2 * LOG2_E))  # e ** -2|x|, which cannot overflow
        tanh = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -tanh, tanh) * outer
    return scores
