"""Linear layers by the native kernels (`pagetide.native`): weights packed once, at load, in any type or quantized.

Their sums depend on neither the number of rows nor that of threads.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from ... import native
from . import WeightForm

# The types of weights, as the kernels number them.
TYPES: dict[torch.dtype | WeightForm, int] = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, "int8": 3, "int4": 4, "fp8": 5, "fp4": 6,
}  # fmt: skip
COLUMN_PARTS = ("scales", "zeros", "factors")  # of a packed weight: their last dimension is that of the outputs
_NATIVE_SHARE = 0.9
PART_WEIGHTS = 1 << 22  # that are packed at a time, to bound what is held besides the packed ones
LEAST_GROUP = 16  # inputs that are rounded to int8 by themselves
_ROWS_AS_THEY_ARE: ContextVar[bool] = ContextVar("_ROWS_AS_THEY_ARE", default=False)


@cache
def _linear() -> Any:
    """The native product. Looking it up takes as long as a small one."""
    return torch.ops.pagetide.linear.default


@contextmanager
def rows_as_they_are() -> Iterator[None]:
    """Within, products of the calling thread do not quantize their rows.

    For comparisons of two ways to compute a model: where sums differ by rounding, a row's value may round to another integer,
    which changes the outputs by far more.
    """
    token = _ROWS_AS_THEY_ARE.set(True)
    try:
        yield
    finally:
        _ROWS_AS_THEY_ARE.reset(token)


def quantizes_rows() -> bool:
    """Whether products of the calling thread quantize their rows where the weight says so."""
    return not _ROWS_AS_THEY_ARE.get()


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] in the layout of this processor's products."""

    type: torch.dtype | WeightForm
    n: int
    k: int
    packed: torch.Tensor  # uint8
    scales: torch.Tensor | None = None  # these as in QuantizedWeight; None: it is not quantized
    in_scales: torch.Tensor | None = None
    rows_in_int8: bool = False
    group: int = 0
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def for_inputs(self, dtype: torch.dtype) -> PackedWeight:
        """This weight for inputs of `dtype`: in bfloat16, groups of a row are rounded to int8 where the form suits products of
        integers (docs/decisions/0079-inputs-in-8-bits.md).
        """
        suits = self.type in ("int8", "int4", "fp4") and self.group >= LEAST_GROUP
        return replace(self, rows_in_int8=True) if suits and dtype == torch.bfloat16 else self

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weight, and what belongs to it."""
        parts = (self.packed, self.scales, self.in_scales, self.zeros, self.order, self.factors)
        return [part for part in parts if part is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(part.nbytes for part in self.tensors)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., k] -> [..., n]. `bias` [n] has the type of x."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        out: torch.Tensor = _linear()(
            x.reshape(-1, self.k), self.packed, TYPES[self.type], self.n, bias, self.scales, self.group, self.in_scales,
            self.rows_in_int8 and quantizes_rows(), self.zeros, self.factors,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.n)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `ids`, integers [...], of a weight without `in_scales` and `order` -> [..., k] of `dtype`."""
        found: torch.Tensor = torch.ops.pagetide.embed(
            self.packed, TYPES[self.type], self.n, self.k, ids.reshape(-1).to(torch.int64), TYPES[dtype], self.scales,
            self.group, self.zeros, self.factors,
        )  # fmt: skip
        return found.view(*ids.shape, self.k)

    @classmethod
    def joined(cls, weights: Sequence[PackedWeight]) -> tuple[PackedWeight, list[int]] | None:
        """One weight with the outputs of all `weights`, and the outputs at which each of them begins. Packed weights that lie
        one behind another, in any order, stay where they are.

        Where panels are not full, there are zeros between their outputs. None if they differ in more than the outputs.
        """
        given, columns = weights, native.panel_columns()
        weights = sorted(given, key=lambda one: one.packed.storage_offset())  # of memory of their own it is 0
        first = weights[0]
        if not all(first._goes_with(one) for one in weights):
            return None
        widths = [-(-one.n // columns) * columns for one in weights[:-1]] + [weights[-1].n]
        begins = dict(zip(map(id, weights), [0, *itertools.accumulate(widths[:-1])], strict=True))
        starts = [begins[id(one)] for one in given]
        of_columns: dict[str, Any] = {}
        for name in COLUMN_PARTS:
            if getattr(first, name) is not None:
                parts = [F.pad(getattr(one, name), (0, width - one.n)) for one, width in zip(weights, widths, strict=True)]
                of_columns[name] = torch.cat(parts, -1)
        packed = _as_one([one.packed for one in weights])
        return replace(first, n=sum(widths), packed=packed, **of_columns), starts

    @classmethod
    def gathered(cls, n: int, pieces: Iterable[tuple[int, PackedWeight]]) -> PackedWeight:
        """The weight of `n` outputs from its pieces, of which one is held at a time: the output at which each begins, where a
        panel does, and the piece.
        """
        whole: PackedWeight | None = None
        for begin, piece in pieces:
            if piece.n == n:
                return piece
            whole = whole or piece._widened(n)
            place = whole.outputs(begin, piece.n)
            for name in ("packed", *COLUMN_PARTS):
                if (part := getattr(place, name)) is not None:
                    part.copy_(getattr(piece, name))
            del piece, place  # before the next is made
        assert whole is not None, "a weight has outputs"
        return whole

    def _widened(self, n: int) -> PackedWeight:
        """A weight of the same form with `n` outputs, whatever they are."""
        columns = native.panel_columns()
        panel_bytes = self.packed.numel() // -(-self.n // columns)
        of_columns: dict[str, Any] = {
            name: one.new_empty((*one.shape[:-1], n)) for name in COLUMN_PARTS if (one := getattr(self, name)) is not None
        }
        return replace(self, n=n, packed=self.packed.new_empty(-(-n // columns) * panel_bytes), **of_columns)

    def _goes_with(self, other: PackedWeight) -> bool:
        def kind(one: PackedWeight) -> tuple[Any, ...]:
            types = [getattr(getattr(one, name), "dtype", None) for name in COLUMN_PARTS]
            return one.type, one.k, one.rows_in_int8, one.group, *types

        rows = ((self.in_scales, other.in_scales), (self.order, other.order))
        return kind(self) == kind(other) and all(
            one is two if one is None or two is None else torch.equal(one, two) for one, two in rows
        )

    def outputs(self, start: int, n: int) -> PackedWeight:
        """`n` outputs from `start` on, where a panel begins: views of this weight."""
        columns = native.panel_columns()
        panel_bytes = self.packed.numel() // -(-self.n // columns)
        packed = self.packed[start // columns * panel_bytes : -(-(start + n) // columns) * panel_bytes]
        there = {name: one for name in COLUMN_PARTS if (one := getattr(self, name)) is not None}
        return replace(self, n=n, packed=packed, **{name: one.narrow(-1, start, n) for name, one in there.items()})


class PackedMemory:
    """The memory of packed weights: of the layers within a module in one piece, one behind another, so that merging them copies
    nothing. It is allocated when one of them is taken.
    """

    def __init__(self, places: Mapping[nn.Linear, Sequence[str]], types: Mapping[nn.Linear, torch.dtype | WeightForm]) -> None:
        """
        Args:
            places: The paths of all layers that will be packed, in the order of the model.
            types: Of their packed weights.
        """
        self._types = types
        self._module = {linear: paths[0].rpartition(".")[0] for linear, paths in places.items()}
        self._within = defaultdict[str, list[nn.Linear]](list)
        for linear, module in self._module.items():
            self._within[module].append(linear)
        self._pieces: dict[nn.Linear, torch.Tensor] = {}

    def take(self, linear: nn.Linear) -> torch.Tensor:
        """uint8, for the packed weight of `linear`, once."""
        if linear not in self._pieces:
            linears = self._within[self._module[linear]]
            sizes = [native_bytes(self._types[one], one.out_features, one.in_features) for one in linears]
            pieces = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
            self._pieces |= dict(zip(linears, pieces, strict=True))
        return self._pieces.pop(linear)


def native_bytes(form: torch.dtype | WeightForm, n: int, k: int) -> int:
    """Bytes of a packed weight [n, k], without scales."""
    return int(torch.ops.pagetide.packed_bytes(TYPES[form], n, k))


def _as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One-dimensional tensors as one: a view of their memory, if each begins where the one before ends."""
    first, starts = parts[0], itertools.accumulate((len(one) for one in parts), initial=parts[0].storage_offset())
    memory = first.untyped_storage().data_ptr()
    places = ((one.untyped_storage().data_ptr(), one.storage_offset()) for one in parts)
    if all(place == (memory, at) for place, at in zip(places, starts, strict=False)):  # the last start is the end
        return first.as_strided((sum(map(len, parts)),), (1,))
    return torch.cat([*parts])


class NativeLinear(nn.Module):
    """`nn.Linear` by the native kernels. Its `weight` has the shape of the plain one, and `dtype`, but no memory."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.weight, self.bias = placeholder((packed.n, packed.k), dtype), as_parameter(bias, dtype)
        self.packed = packed
        self.shares_weight = False  # with layers that have the same parameter

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        dtype: torch.dtype | None = None,
        give_back: Callable[[torch.Tensor], None] | None = None,
        memory: torch.Tensor | None = None,
    ) -> NativeLinear:
        """The layer with the weight of `linear` as `dtype`, by default its own.

        Args:
            give_back: Gets each part of a large weight once it was read.
            memory: uint8, of the packed weight's size, where the weight is packed; by default in memory of its own.
        """
        weight, to, columns = linear.weight.detach(), dtype or linear.weight.dtype, native.panel_columns()
        n, k = weight.shape
        memory = torch.empty(native_bytes(to, n, k), dtype=torch.uint8) if memory is None else memory
        whole, step = PackedWeight(to, n, k, memory), max(1, PART_WEIGHTS // max(1, k * columns)) * columns
        for begin in range(0, n, step):
            part = weight[begin : begin + step]
            numbers = (part if part.dtype in TYPES else part.to(to)).contiguous()  # the kernels convert the others
            torch.ops.pagetide.pack_weight_into(numbers, TYPES[to], whole.outputs(begin, len(part)).packed)
            if give_back is not None and step < n:
                give_back(part)
        return cls(whole, linear.bias, to)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.packed.product(x, self.bias)

    @classmethod
    def joined(cls, layers: Sequence[NativeLinear]) -> tuple[NativeLinear, list[int]] | None:
        """One layer with the outputs of all `layers`, which have the same input, and the outputs at which each of them begins.

        None if their weights cannot be joined, or only some have a bias.
        """
        joined = PackedWeight.joined([one.packed for one in layers])
        if joined is None or len({one.bias is None for one in layers}) > 1:
            return None
        packed, starts = joined
        bias = None if layers[0].bias is None else layers[0].bias.new_zeros(packed.n)
        if bias is not None:
            for start, one in zip(starts, layers, strict=True):
                bias[start : start + one.out_features] = one.bias  # type: ignore[assignment]
        return cls(packed, bias, layers[0].weight.dtype), starts

    def share_parameter(self, other: NativeLinear) -> None:
        """Free the weight, which is that of `other`."""
        self.packed, self.shares_weight, other.shares_weight = other.packed, True, True


Linear: TypeAlias = "NativeLinear | nn.Linear"


def joined_plain(layers: Sequence[nn.Linear]) -> tuple[nn.Linear, list[int]] | None:
    """One layer with the outputs of all `layers`, which have the same input, and the outputs at which each of them begins.

    Mutates the layers: their weights become parts of the joined one. None, and nothing changes, if they differ in more than
    the outputs.
    """
    first = layers[0]
    if len({(one.in_features, one.weight.dtype, one.bias is None) for one in layers}) > 1:
        return None
    sizes = [one.out_features for one in layers]
    whole = nn.Linear(first.in_features, sum(sizes), first.bias is not None, device="meta")
    names = ("weight", "bias") if first.bias is not None else ("weight",)
    joined = [torch.cat([getattr(one, name).detach() for one in layers]) for name in names]  # before any is changed
    for name, together in zip(names, joined, strict=True):
        setattr(whole, name, nn.Parameter(together, requires_grad=False))
        for one, part in zip(layers, together.split(sizes), strict=True):
            setattr(one, name, nn.Parameter(part, requires_grad=False))
    return whole, [0, *itertools.accumulate(sizes[:-1])]


class PackedEmbedding(nn.Embedding):
    """`nn.Embedding` that reads its rows out of a packed weight, which may be that of a tied output head. Its `weight` is NaN
    without memory.

    An embedding becomes one by its class, so that a subclass which scales what it looks up still does.
    """

    _packed: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input int64 or int32 [...] -> [..., embedding_dim]."""
        return self._packed.rows(input, self.weight.dtype)

    @classmethod
    def pack(cls, embedding: nn.Embedding, packed: PackedWeight, dtype: torch.dtype) -> None:
        """Let `embedding` read rows of `dtype` out of `packed`. Mutates it."""
        kind, shape = type(embedding), (packed.n, packed.k)
        embedding._packed = packed  # type: ignore[assignment]
        embedding.weight = nn.Parameter(torch.full((1, 1), math.nan, dtype=dtype).expand(shape), False)
        embedding.__class__ = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})

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
            cls.pack(embedding, head.packed, dtype)
            if torch.allclose(embedding(ids), expected, rtol=0.02, atol=1e-6):
                return True
        embedding.__class__, embedding.weight = kind, weight
        del embedding._packed
        return False


def looks_up_by_class(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether `module` is an `nn.Embedding` that looks up by that class's method, so that it can become a `PackedEmbedding`."""
    if not isinstance(module, nn.Embedding) or is_changed(module) or module.max_norm is not None:
        return False
    looked_up = []

    class Recorder(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            looked_up.append(True)
            return torch.zeros((*input.shape, self.embedding_dim), device=self.weight.device)

    twin = copy.copy(module)
    twin.__class__ = type("Twin", (type(module), Recorder), {}) if type(module) is not nn.Embedding else Recorder
    try:
        twin(torch.zeros(1, dtype=torch.int64, device=module.weight.device))
    except Exception:  # of a subclass that multiplies by something without memory, say
        return False
    return bool(looked_up)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` computes what an `nn.Linear` does: it is one, or of a subclass that does so, as Falcon's."""
    if not isinstance(module, nn.Linear) or isinstance(module, KeptLinear) or is_changed(module):
        return False
    if module.weight is None:  # it is read later
        return False
    if type(module) is nn.Linear:
        return True
    kind: Any = type(module)
    known = _as_plain(kind)
    return known is not None and known == _settings(module)


class KeptLinear(nn.Linear):
    """An `nn.Linear` that is neither packed nor quantized. One becomes such by its class."""


@lru_cache
def _as_plain(kind: Any) -> dict[str, Any] | None:
    """The settings of a small layer of a subclass, if it computes what a plain one does; else None."""
    try:
        with torch.inference_mode(), torch.device("cpu"):
            small, x = kind(3, 5), torch.randn((2, 3), generator=torch.Generator().manual_seed(0))
            alike = torch.allclose(small(x), F.linear(x, small.weight, small.bias))
    except Exception:  # of a class with other arguments, say
        return None
    return _settings(small) if alike else None


def _settings(layer: nn.Module) -> dict[str, Any]:
    """All that a layer has besides its sizes, weight and bias."""
    tensors = {name for name in (*layer._parameters, *layer._buffers) if name not in ("weight", "bias")}
    own = {name: value for name, value in vars(layer).items() if not name.startswith("_") and "_features" not in name}
    return own | {"training": None, "further": (tensors, list(layer._modules))}


def is_changed(module: nn.Module) -> bool:
    """Whether hooks or a `forward` of its own may make `module` compute something else than its class."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def users_of_parameters(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that use each parameter, by its id."""
    users = defaultdict[int, list[nn.Module]](list)
    for module in model.modules():
        for one in module._parameters.values():
            if one is not None:
                users[id(one)].append(module)
    return users


def uses_of_parameters(model: nn.Module) -> Counter[int]:
    """How many modules use each parameter, by its id."""
    return Counter({parameter: len(users) for parameter, users in users_of_parameters(model).items()})


class _WithoutMemory(torch.Tensor):
    """A meta tensor that raises where it meets one with memory: torch would multiply the two, and return what memory holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(one, torch.Tensor) and not one.is_meta for one in tree_leaves((args, kwargs))):
                raise RuntimeError("the weight of a packed linear layer has no memory: its module multiplies by it")
        return super().__torch_function__(func, types, args, kwargs or {})


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this shape and type without memory. Computing with it raises RuntimeError."""
    meta = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_WithoutMemory)
    return nn.Parameter(meta, requires_grad=False)


def as_parameter(bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Parameter | None:
    """`bias` as a layer's parameter of this type."""
    if bias is None or (isinstance(bias, nn.Parameter) and bias.dtype == dtype):
        return bias
    return nn.Parameter(bias.detach().to(dtype), requires_grad=False)


def is_native(model: nn.Module) -> bool:
    """Whether native kernels multiply by nearly all weights of `model`: embeddings do not count."""
    if native.instructions() is None:
        return False
    looked_up = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    with torch._C.DisableTorchFunctionSubclass():  # placeholders look at every call
        sizes = [(one.is_meta, one.numel()) for one in model.parameters() if id(one) not in looked_up]
    return sum(size for packed, size in sizes if packed) >= _NATIVE_SHARE * sum(size for _, size in sizes)


def scratch_bytes(widest: int, num_rows: int, dtype: torch.dtype) -> int:
    """The most bytes that a native product takes for `num_rows` rows of `widest` inputs, besides inputs and outputs."""
    if native.instructions() is None or dtype not in TYPES:
        return 0
    return int(torch.ops.pagetide.most_scratch_bytes(TYPES[dtype], num_rows, widest))
