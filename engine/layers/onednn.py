"""Faster linear layers on a CPU without native kernels: weights packed once, at load, in oneDNN's layout.

A decode step multiplies few rows with large weights, and a plain `F.linear` reorders the weight each time, so that packed
layers are 1.2 to 1.6 times as fast on 16 rows, and 4 times on some machines.

oneDNN compiles and keeps a primitive for each shape of a product: 0.05 to 0.65 MiB, depending on the CPU's instructions. An
engine's steps eventually have every number of tokens, which came to hundreds of MiB. A packed layer therefore splits its rows
into pieces of 13 sizes, the last one padded, and all primitives exist once the model is loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..process.cpu_threads import own_threads, thread_counts
from .linears import as_parameter, placeholder

log = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 16  # below, the call costs more than the product
SIZES = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)  # rows of a product; 512 are about as fast as more
_CALL_ROWS = 16  # a product of few rows costs as much as these: reading the weights
_MOST_OUTPUTS = 1 << 24  # of a product: output heads get fewer rows, which are as fast
_MOST_PRIMITIVES = 512  # kept by oneDNN per process, including other products
_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_PRIMITIVE_BYTES = 640 * 1024  # at most; 50 to 200 KiB on older CPUs


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight, in `dtype`. Its `weight` has the shape and type, but no memory."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dtype = dtype or linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = placeholder(linear.weight.shape, dtype), as_parameter(linear.bias, dtype)
        self._sizes = tuple(size for size in SIZES if size == 1 or size * self.out_features <= _MOST_OUTPUTS)
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        sizes = divided(len(rows), self._sizes)
        if missing := sum(sizes) - len(rows):
            rows = F.pad(rows, (0, 0, 0, missing))
        pieces = [self._product(piece) for piece in rows.split(sizes)]
        out = (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: len(rows) - missing]
        return out.view(*x.shape[:-1], self.out_features)

    def make_primitives(self) -> None:
        """Create all oneDNN primitives of this layer now. Created between steps, they would keep the heap from shrinking."""
        for size in self._sizes:
            self._product(torch.zeros((size, self.in_features), dtype=self.weight.dtype))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out


def divided(count: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, ...]:
    """The piece sizes, largest first, that multiply `count` rows in the least time. Their sum is at least `count`."""
    whole, rest = divmod(count, sizes[-1])
    return (sizes[-1],) * whole + (_divided(rest, sizes) if rest or not whole else ())


@functools.cache
def _divided(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`divided` for at most as many rows as the largest size."""
    covering = next(size for size in sizes if size >= count)
    ways = [(size, *_divided(count - size, sizes)) for size in reversed(sizes) if size < count]
    return min([(covering,), *ways], key=lambda way: sum(way) + _CALL_ROWS * len(way))


def make_primitives(layers: list[PackedLinear]) -> None:
    """Create the primitives of each layer shape, for the thread counts that steps use."""
    before, counts = torch.get_num_threads(), thread_counts(own_threads())
    shapes = {(one.weight.shape, one.weight.dtype, one.bias is None): one for one in layers}
    try:
        for count in counts:
            torch.set_num_threads(count)
            with torch.inference_mode():
                for layer in shapes.values():
                    layer.make_primitives()
    finally:
        torch.set_num_threads(before)
    if (made := len(shapes) * len(SIZES) * len(counts)) > _capacity():
        log.warning(
            "the model's products need up to %d of oneDNN's primitives, and ONEDNN_PRIMITIVE_CACHE_CAPACITY is %d: steps "
            "compile some of them again and again",
            made,
            _capacity(),
        )


def bound_primitives() -> None:
    """Limit oneDNN's cache to fewer primitives than its default of 1,024, unless the environment sets it.

    oneDNN reads the limit once, at the first primitive of the process.
    """
    os.environ.setdefault(_CAPACITY, str(_MOST_PRIMITIVES))


def _capacity() -> int:
    try:
        return int(os.environ[_CAPACITY])
    except (KeyError, ValueError):
        return _MOST_PRIMITIVES


def primitive_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """The most bytes that the primitives of linear layers of these shapes take."""
    num_packed = sum(packs(rows * columns, dtype) for rows, columns in shapes)
    return min(num_packed * len(SIZES) * len(thread_counts(own_threads())), _capacity()) * _PRIMITIVE_BYTES


def by_head_primitive_bytes(dtype: torch.dtype) -> int:
    """The most bytes that primitives take for the three products by head of latent attention, of SIZES rows."""
    if dtype == torch.float32 or not available() or not _by_onednn(dtype):
        return 0
    return 3 * len(SIZES) * len(thread_counts(own_threads())) * _PRIMITIVE_BYTES


def available() -> bool:
    """Whether this torch has oneDNN with the operators for packed weights, which belong to its compiler."""
    operators: Any = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )


def packs(num_weights: int, dtype: torch.dtype, least_weights: int = LEAST_WEIGHTS) -> bool:
    """Whether linear layers with this many weights are packed on this CPU.

    They are selected by size alone, never by measurement, so that a model computes the same sums each time it is loaded. In
    half precision all are packed, if oneDNN computes plain layers too.
    """
    if not available():
        return False
    return num_weights >= least_weights if dtype == torch.float32 else _by_onednn(dtype)


def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes products in this half precision on this CPU."""
    operators: Any = torch.ops.mkldnn
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return asked is not None and hasattr(operators, asked) and bool(getattr(operators, asked)())
