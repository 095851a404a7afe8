"""Faster linear layers on the CPU: weights packed once, at load.

With native kernels (`pagetide.native`), each plain linear layer becomes a `NativeLinear`: its sums depend on neither the
number of rows nor that of threads. Without them, large ones become a `PackedLinear` in oneDNN's layout: a decode step
multiplies few rows with large weights, and a plain `F.linear` reorders the weight each time, so that packed layers are 1.2
to 1.6 times as fast on 16 rows, and 4 times on some machines. Layers are selected by size alone, never by measurement, so
that a model computes the same sums each time it is loaded. A packed weight replaces the plain one. If it is tied to the
embedding, a `PackedEmbedding` reads its rows out of a native one; with oneDNN both are kept.

oneDNN compiles and keeps a primitive for each shape of a product: 0.05 to 0.65 MiB, depending on the CPU's instructions. An
engine's steps eventually have every number of tokens, which came to hundreds of MiB. A layer packed for oneDNN therefore splits
its rows into pieces of 13 sizes, the last one padded, and all primitives exist once the model is loaded.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from ... import native
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


_NATIVE_SHARE = 0.9
_NATIVE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, as the native kernels number them


class NativeLinear(nn.Module):
    """`nn.Linear` by the native kernels, in `dtype`. Its `weight` has the shape and type, but no memory."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dtype = dtype or linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = placeholder(linear.weight.shape, dtype), _converted(linear.bias, dtype)
        self._type = _NATIVE_TYPES[dtype]
        weight = linear.weight.detach().contiguous()
        if weight.dtype not in _NATIVE_TYPES:  # the kernels convert the others
            weight = weight.to(dtype)
        self._packed: torch.Tensor = torch.ops.pagetide.pack_weight(weight, self._type)
        self.shares_weight = False  # with layers that have the same parameter
        self._multiply = torch.ops.pagetide.linear.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        out: torch.Tensor = self._multiply(
            rows, self._packed, self._type, self.out_features, self.bias, None, 0, None, False
        )
        return out.view(*x.shape[:-1], self.out_features)

    @classmethod
    def joined(cls, layers: Sequence[NativeLinear]) -> tuple[NativeLinear, list[int]] | None:
        """One layer with the outputs of all `layers`, and the outputs at which each of them begins.

        The layers have the same input. Where panels are not full, there are zeros between their outputs. None if the layers
        differ in type or input size, or only some have a bias.
        """
        first, columns = layers[0], native.panel_columns()
        if len({(one._type, one.in_features, one.bias is None) for one in layers}) > 1:
            return None
        widths = [-(-one.out_features // columns) * columns for one in layers[:-1]] + [layers[-1].out_features]
        starts = [0, *itertools.accumulate(widths[:-1])]
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.in_features, whole.out_features = first.in_features, sum(widths)
        shape = (whole.out_features, whole.in_features)
        whole.weight = nn.Parameter(first.weight.new_empty(shape), requires_grad=False)
        whole.register_parameter("bias", None)
        if first.bias is not None:
            biases = first.bias.new_zeros(whole.out_features)
            for start, one in zip(starts, layers, strict=True):
                biases[start : start + one.out_features] = one.bias  # type: ignore[assignment]
            whole.register_parameter("bias", nn.Parameter(biases, requires_grad=False))
        whole._type, whole._multiply, whole.shares_weight = first._type, first._multiply, False
        whole._packed = torch.cat([one._packed for one in layers])
        return whole, starts

    def share_parameter(self, other: NativeLinear) -> None:
        """Free the weight, which is that of `other`."""
        self._packed, self.shares_weight, other.shares_weight = other._packed, True, True

    def share_weight(self, whole: NativeLinear, start: int) -> None:
        """Free the weight, which is also in `whole`, `joined` with this layer as its outputs from `start` on."""
        columns = native.panel_columns()
        panel_bytes = whole._packed.numel() // -(-whole.out_features // columns)
        first = start // columns * panel_bytes
        self._packed = whole._packed[first : first + self._packed.numel()]


class PackedEmbedding(nn.Embedding):
    """`nn.Embedding` that reads its rows out of a packed output head. Its `weight` is NaN without memory.

    An embedding becomes one by its class (`share`), so that a subclass which scales what it looks up still does.
    """

    _head: tuple[torch.Tensor, int]  # packed, and the number of its type

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input int64 or int32 [...] -> [..., embedding_dim]."""
        packed, number = self._head
        rows: torch.Tensor = torch.ops.pagetide.embed(
            packed, number, self.num_embeddings, self.embedding_dim, input.reshape(-1).to(torch.int64)
        )
        return rows.view(*input.shape, self.embedding_dim)

    @classmethod
    def share(cls, embedding: nn.Embedding, head: NativeLinear) -> bool:
        """Make `embedding`, which is tied to the weight of `head`, read that one. Mutates it; returns whether it could.

        It cannot where a subclass looks up by itself: then nothing changes.
        """
        kind, weight = type(embedding), embedding.weight
        if embedding.max_norm is not None or "forward" in vars(embedding):  # it changes its weight; or is replaced
            return False
        ids, dtype = torch.tensor([[0, len(weight) // 2, len(weight) - 1]]), head.weight.dtype
        with torch.no_grad():
            expected = embedding(ids).to(dtype)
            embedding._head = (head._packed, head._type)  # type: ignore[assignment]
            embedding.weight = nn.Parameter(torch.full((1, 1), math.nan, dtype=dtype).expand(weight.shape), False)
            embedding.__class__ = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})
            if torch.allclose(embedding(ids), expected, rtol=0.02, atol=1e-6):
                return True
        embedding.__class__, embedding.weight = kind, weight
        del embedding._head
        return False


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight, in `dtype`. Its `weight` has the shape and type, but no memory."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dtype = dtype or linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = placeholder(linear.weight.shape, dtype), _converted(linear.bias, dtype)
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


def pack_linears(
    model: nn.Module,
    least_weights: int = LEAST_WEIGHTS,
    *,
    types: Mapping[str, torch.dtype] | None = None,
    give_back: Callable[[torch.Tensor], None] | None = None,
) -> int:
    """Pack the linear layers of `model` on a CPU, and create their primitives, if any. Mutates the model; returns how many.

    Only plain layers are packed (`is_plain`). Of float32, oneDNN packs
    layers of `least_weights` or more; in half precision, if it computes plain layers too, small ones are also packed.

    Args:
        types: The types of packed layers, biases too, by the names of their weights. Others keep their own.
        give_back: Called with each weight that nothing uses any more, before the next one is read.

    The largest are packed first: while a weight is packed it is held twice, and then little else is held.
    """
    kind, types = PackedLinear if native.instructions() is None else NativeLinear, types or {}
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    wanted: dict[nn.Linear, torch.dtype] = {}
    uses, embeddings = uses_of_parameters(model), defaultdict[int, list[nn.Embedding]](list)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings[id(module.weight)].append(module)
        for name, child in module.named_children():
            if not is_plain(child) or child.weight.device.type != "cpu":
                continue
            dtype = types.get(f"{path}.{name}.weight" if path else f"{name}.weight", child.weight.dtype)
            if packs(child.weight.numel(), wanted.setdefault(child, dtype), least_weights):
                places.setdefault(child, []).append((module, name))
    packed, of_parameter = [], dict[int, NativeLinear]()
    for linear in sorted(places, key=lambda one: one.weight.numel(), reverse=True):
        weight, layer = linear.weight, kind(linear, wanted[linear])
        packed.append(layer)
        for module, name in places[linear]:
            setattr(module, name, layer)
        uses[id(weight)] -= 1
        if isinstance(layer, NativeLinear):
            if (same := of_parameter.setdefault(id(weight), layer)) is not layer:
                layer.share_parameter(same)
            uses[id(weight)] -= sum(PackedEmbedding.share(one, layer) for one in embeddings.pop(id(weight), ()))
        if give_back is not None and not uses[id(weight)]:
            give_back(weight)
    _make_primitives([layer for layer in packed if isinstance(layer, PackedLinear)])
    log.info("packed %d linear layers for %s", len(packed), native.instructions() or "oneDNN")
    return len(packed)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` computes what an `nn.Linear` does."""
    return type(module) is nn.Linear and not is_changed(module)


def is_changed(module: nn.Module) -> bool:
    """Whether hooks or a `forward` of its own may make `module` compute something else than its class."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def uses_of_parameters(model: nn.Module) -> Counter[int]:
    """How many modules use each parameter, by its id."""
    return Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)


class _WithoutMemory(torch.Tensor):
    """A meta tensor that raises where it meets one with memory: torch would multiply the two, and return what memory holds."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(one, torch.Tensor) and not one.is_meta for one in tree_leaves((args, kwargs))):
                raise RuntimeError("the weight of a packed linear layer has no memory: its module multiplies by it")
        return super().__torch_function__(func, types, args, kwargs or {})


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this shape and type without memory. Computing with it raises RuntimeError."""
    meta = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_WithoutMemory)
    return nn.Parameter(meta, requires_grad=False)


def _converted(bias: nn.Parameter | None, dtype: torch.dtype) -> nn.Parameter | None:
    return bias if bias is None or bias.dtype == dtype else nn.Parameter(bias.detach().to(dtype), requires_grad=False)


def is_native(model: nn.Module) -> bool:
    """Whether native kernels multiply by nearly all weights of `model`: embeddings do not count."""
    if native.instructions() is None:
        return False
    looked_up = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    sizes = [(one.is_meta, one.numel()) for one in model.parameters() if id(one) not in looked_up]
    return sum(size for packed, size in sizes if packed) >= _NATIVE_SHARE * sum(size for _, size in sizes)


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
    """Bytes that `pack_linears` adds to such a model: with oneDNN, an output head tied to the embedding."""
    if native.instructions() is not None:
        return 0
    rows, width = int(text_config.vocab_size), int(getattr(text_config, "hidden_size", 0) or 0)
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    return rows * width * dtype.itemsize if tied and packs(rows * width, dtype) else 0


def scratch_bytes(text_config: Any, num_rows: int, dtype: torch.dtype) -> int:
    """The most bytes that a native product of such a model takes for `num_rows` rows, besides inputs and outputs."""
    if native.instructions() is None or dtype not in _NATIVE_TYPES:
        return 0
    hidden = int(getattr(text_config, "hidden_size", 0) or 0)
    widest = max(k for layer in layer_configs(text_config) for _, k, _ in _layer_shapes(layer, hidden))
    return int(torch.ops.pagetide.most_scratch_bytes(_NATIVE_TYPES[dtype], num_rows, widest))


def primitive_bytes(text_config: Any, dtype: torch.dtype) -> int:
    """The most bytes that oneDNN's primitives take for such a model: none with native kernels."""
    if native.instructions() is not None:
        return 0
    hidden = int(getattr(text_config, "hidden_size", 0) or 0)
    shapes = {("head", hidden, int(text_config.vocab_size))}
    for layer in layer_configs(text_config):
        shapes |= _layer_shapes(layer, hidden)
    packed = sum(packs(rows * columns, dtype) for _, rows, columns in shapes)
    return min(packed * len(SIZES) * len(thread_counts(own_threads())), _capacity()) * _PRIMITIVE_BYTES


def by_head_primitive_bytes(dtype: torch.dtype) -> int:
    """The most bytes that oneDNN's primitives take for the three products by head of latent attention, of SIZES rows."""
    if dtype == torch.float32 or not available() or not _by_onednn(dtype):
        return 0
    return 3 * len(SIZES) * len(thread_counts(own_threads())) * _PRIMITIVE_BYTES


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
    if native.instructions() is not None:
        return dtype in _NATIVE_TYPES
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
