"""Faster linear layers on the CPU: weights packed once in oneDNN's layout, and products of a few fixed sizes.

A decode step multiplies few rows with large weights, and a plain `F.linear` reorders the weight each time: packed layers are
1.2 to 1.6 times as fast on 16 rows, and 4 times on some machines. Layers are selected by size alone, never by
measurement, so that a model computes the same sums each time it is loaded. A packed weight replaces the plain one; if
it is tied to the embedding, both are kept.

oneDNN compiles and keeps a primitive for each shape of a product: 0.05 to 0.65 MiB, depending on the CPU's instructions. An
engine's steps eventually have every number of tokens, which came to hundreds of MiB. A packed layer therefore splits its rows
into pieces of 13 sizes, the last one padded, and all primitives exist once the model is loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..process.cpu_threads import own_threads, thread_counts
from .model_config import layer_configs

log = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 16  # below, the call costs more than the product
SIZES = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)  # rows of a product; 512 are about as fast as more
_CALL_ROWS = 16  # a product of few rows costs as much as these: reading the weights
_MOST_OUTPUTS = 1 << 24  # of a product: output heads get fewer rows, which are as fast
_MOST_PRIMITIVES = 512  # kept by oneDNN per process, including other products
_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_PRIMITIVE_BYTES = 640 * 1024  # at most; 50 to 200 KiB on older CPUs


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight. Its `weight` has the shape and type, but no memory."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.detach().to("meta"), requires_grad=False)
        self.bias = linear.bias
        self._sizes = tuple(size for size in SIZES if size == 1 or size * self.out_features <= _MOST_OUTPUTS)
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

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


def pack_linears(model: nn.Module, least_weights: int = LEAST_WEIGHTS) -> int:
    """Pack the large linear layers of `model` on a CPU, and create their primitives. Mutates the model; returns how many.

    Only exact `nn.Linear` layers are packed, since a subclass may interpret its weight differently. In half precision, if
    oneDNN computes plain layers too, small ones are also packed.
    """
    packed: list[PackedLinear] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if packs(child.weight.numel(), child.weight.dtype, least_weights):
                setattr(module, name, layer := PackedLinear(child))
                packed.append(layer)
    _make_primitives(packed)
    log.info("packed %d linear layers for oneDNN", len(packed))
    return len(packed)


def _make_primitives(layers: list[PackedLinear]) -> None:
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
            "compile some of them again and again", made, _capacity(),
        )  # fmt: skip


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


def held_twice_bytes(text_config: Any, dtype: torch.dtype) -> int:
    """Bytes that `pack_linears` adds to such a model: an output head tied to the embedding."""
    rows, width = int(text_config.vocab_size), int(getattr(text_config, "hidden_size", 0) or 0)
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    return rows * width * dtype.itemsize if tied and packs(rows * width, dtype) else 0


def primitive_bytes(text_config: Any, dtype: torch.dtype) -> int:
    """The most bytes that oneDNN's primitives take for such a model."""
    hidden = int(getattr(text_config, "hidden_size", 0) or 0)
    shapes = {("head", hidden, int(text_config.vocab_size))}
    for layer in layer_configs(text_config):
        shapes |= _layer_shapes(layer, hidden)
    packed = sum(packs(rows * columns, dtype) for _, rows, columns in shapes)
    return min(packed * len(SIZES) * len(thread_counts(own_threads())), _capacity()) * _PRIMITIVE_BYTES


def _layer_shapes(layer: Any, hidden: int) -> set[tuple[str, int, int]]:
    """(place, rows, columns) of a layer's linear layers; `layer` is the configuration as that layer sees it."""
    heads = int(getattr(layer, "num_attention_heads", 0) or 1)
    head_dim = int(getattr(layer, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(layer, "num_key_value_heads", None) or heads)
    inner = getattr(layer, "intermediate_size", None) or 4 * hidden
    # Query and output projections may differ only in their bias, which makes other primitives.
    shapes = {("in", hidden, width * head_dim) for width in (heads, kv_heads)} | {("out", heads * head_dim, hidden)}
    for width in inner if isinstance(inner, (list, tuple)) else [inner]:
        shapes |= {("in", hidden, width), ("out", width, hidden)}
    return shapes


def available() -> bool:
    """Whether this torch has oneDNN with the operators for packed weights, which belong to its compiler."""
    operators: Any = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )


def packs(num_weights: int, dtype: torch.dtype, least_weights: int = LEAST_WEIGHTS) -> bool:
    """Whether linear layers with this many weights are packed on this CPU."""
    if not available():
        return False
    if dtype == torch.float32:
        return num_weights >= least_weights
    return _by_onednn(dtype)


def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes products in this half precision on this CPU."""
    operators: Any = torch.ops.mkldnn
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return asked is not None and hasattr(operators, asked) and bool(getattr(operators, asked)())
