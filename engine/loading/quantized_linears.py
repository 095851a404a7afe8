"""Linear layers with quantized weights on a CPU, and the pass over a model that makes them.

Two runs over a few random tokens. In the first, linear layers return zeros and nothing is read: it shows which layers run, and
which have the same input. In the second, the layers that have the same input are quantized when the first of them is
called, by their weights and that input (`quantization.choose`), and the run goes on with their outputs. So
at any time at most one group of layers is held in full precision, besides what is mapped from files.

The embedding keeps its type. The output head has 8 bits in both forms.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ...native import instructions, panel_columns
from ..errors import ConfigError
from .linears import is_plain, placeholder, uses_of_parameters
from .models import Quantization
from .quantization import GROUP, Method, QuantizedWeight, choose, quantize

log = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 14  # smaller layers, such as routers, keep their type
NUM_TOKENS = (2, 64)  # sequences, tokens of each
_TYPES = {"int8": 3, "int4": 4}  # the numbers of the native products
_ROWS_AS_THEY_ARE: ContextVar[bool] = ContextVar("_ROWS_AS_THEY_ARE", default=False)


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


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantized weight [n, k] in the layout of this processor's products."""

    quantization: Quantization
    n: int
    k: int
    rows_in_int8: bool
    packed: torch.Tensor  # uint8
    scales: torch.Tensor  # as in QuantizedWeight
    in_scales: torch.Tensor | None

    @classmethod
    def of(cls, weight: QuantizedWeight, rows_in_int8: bool) -> Self:
        """Pack `weight`."""
        n, k = weight.values.shape
        packed = torch.ops.pagetide.pack_weight(weight.values, _TYPES[weight.quantization])
        return cls(weight.quantization, n, k, rows_in_int8, packed, weight.scales, weight.in_scales)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(part.nbytes for part in (self.packed, self.scales, self.in_scales) if part is not None)


class QuantizedLinear(nn.Module):
    """`nn.Linear` with a quantized weight. Its `weight` has the shape and type of the plain one, but no memory."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.weight = placeholder((packed.n, packed.k), dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        one = self.packed
        out: torch.Tensor = torch.ops.pagetide.linear(
            x.reshape(-1, one.k), one.packed, _TYPES[one.quantization], one.n, self.bias, one.scales, GROUP, one.in_scales,
            one.rows_in_int8 and not _ROWS_AS_THEY_ARE.get(),
        )  # fmt: skip
        return out.view(*x.shape[:-1], one.n)

    @classmethod
    def joined(cls, layers: Sequence[QuantizedLinear]) -> QuantizedLinear | None:
        """One layer with the outputs of all `layers`, in order; None if they are quantized differently.

        The layers have the same input, and were quantized together. Raises nothing for layers of unequal sizes.
        """
        first = layers[0].packed
        for layer in layers:
            one = layer.packed
            same = (one.quantization, one.k, one.rows_in_int8) == (first.quantization, first.k, first.rows_in_int8)
            if not same or not _same_factors(one, first) or (layer.bias is None) != (layers[0].bias is None):
                return None
        if any(layer.packed.n % panel_columns() for layer in layers[:-1]):
            return None
        packed = torch.cat([layer.packed.packed for layer in layers])
        scales = torch.cat([layer.packed.scales for layer in layers], dim=-1)
        n = sum(layer.packed.n for layer in layers)
        whole = PackedWeight(first.quantization, n, first.k, first.rows_in_int8, packed, scales, first.in_scales)
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])  # type: ignore[misc]
        return cls(whole, bias, layers[0].weight.dtype)


def _same_factors(one: PackedWeight, other: PackedWeight) -> bool:
    if one.in_scales is None or other.in_scales is None:
        return one.in_scales is other.in_scales
    return torch.equal(one.in_scales, other.in_scales)


def quantizable(module: nn.Module) -> bool:
    """Whether `module` is quantized if it runs."""
    return is_plain(module) and module.weight.numel() >= LEAST_WEIGHTS and module.weight.is_floating_point()


def quantize_linears(
    model: Any,
    quantization: Quantization,
    tokens: torch.Tensor,
    give_back: Callable[[torch.Tensor], None] = lambda weight: None,
) -> dict[str, PackedWeight]:
    """Quantize the linear layers of `model`. Mutates the model; returns the weights by their layers' names.

    Layers that do not run over `tokens`, such as experts that no token is routed to, are rounded by their weights alone.

    Args:
        model: A causal language model on the CPU.
        quantization: Of all layers but the output head, which gets "int8".
        tokens: int64 [sequences, tokens], by which the methods are chosen.
        give_back: Called with each weight that nothing uses any more.

    Raises ConfigError if the model has no linear layers to quantize.
    """
    layers = {module: name for name, module in model.named_modules() if quantizable(module)}
    groups = _groups(model, list(layers), tokens[:1, :4])
    if not groups:
        raise ConfigError(f"quantization={quantization!r}: a {type(model).__name__} has no linear layers to quantize")
    head, made, uses = model.get_output_embeddings(), {}, uses_of_parameters(model)

    def run(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if layer not in made:
            group = groups[layer]
            bits: Quantization = "int8" if head in group else quantization
            method = choose([one.weight for one in group], x.reshape(-1, x.shape[-1]), bits)
            for one in group:
                weight = one.weight
                made[one] = quantize_linear(one, method, x.dtype)
                if uses[id(weight)] == 1:
                    give_back(weight)
        return made[layer](x)

    with _instead(groups, run):
        _run(model, tokens)
    dtype = next(iter(made.values())).weight.dtype
    for layer in layers:
        if layer not in made:
            weight = layer.weight
            made[layer] = quantize_linear(
                layer, Method("int8" if layer is head else quantization, None, False, math.inf), dtype
            )
            if uses[id(weight)] == 1:
                give_back(weight)
    replace_linears(model, {layers[old]: new for old, new in made.items()})
    _log(made)
    return {layers[old]: new.packed for old, new in made.items()}


def quantize_linear(linear: nn.Linear, method: Method, dtype: torch.dtype) -> QuantizedLinear:
    """The quantized layer for inputs of `dtype`. The weight of `linear` is dropped."""
    packed = PackedWeight.of(quantize(linear.weight, method), method.rows_in_int8)
    made = QuantizedLinear(packed, linear.bias, dtype)
    linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    return made


def replace_linears(model: nn.Module, layers: dict[str, QuantizedLinear]) -> None:
    """Put `layers` into the model by their names."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def check_native(quantization: Quantization, device: torch.device) -> None:
    """Raise ConfigError unless quantized layers run on `device`."""
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} runs on a CPU only, and this engine is to run on {device}: leave it out, or give "
            f"device='cpu'"
        )
    if instructions() is None:
        raise ConfigError(
            f"quantization={quantization!r} needs the native kernels, which do not serve here (the log says why): install "
            f"g++ or clang and repeat the installation, unset PAGETIDE_NATIVE, or leave it out"
        )


def _groups(model: Any, layers: list[nn.Linear], tokens: torch.Tensor) -> dict[nn.Linear, tuple[nn.Linear, ...]]:
    """The layers that run, each with those that have the same input."""
    by_input: dict[
        int, tuple[torch.Tensor, dict[nn.Linear, None]]
    ] = {}  # the tensors are kept, so that ids stay theirs

    def note(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        by_input.setdefault(id(x), (x, {}))[1][layer] = None
        return x.new_zeros((*x.shape[:-1], layer.out_features))

    with _instead(layers, note):
        _run(model, tokens)
    groups: dict[nn.Linear, tuple[nn.Linear, ...]] = {}
    for _, members in by_input.values():
        group = tuple(layer for layer in members if layer not in groups)
        groups |= dict.fromkeys(group, group)
    return groups


def _run(model: Any, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=False)


@contextmanager
def _instead(layers: Any, run: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, each of the `layers` is computed by `run(layer, x)`."""
    for layer in layers:
        layer.forward = lambda input, layer=layer: run(layer, input)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _log(made: dict[nn.Linear, QuantizedLinear]) -> None:
    kinds = Counter(one.packed.quantization for one in made.values())
    rows, factors = (
        sum(map(bool, of))
        for of in zip(
            *((one.packed.rows_in_int8, one.packed.in_scales is not None) for one in made.values()), strict=True
        )
    )
    log.info(
        "quantized %s linear layers; %d quantize their inputs too, %d have factors of input channels",
        " and ".join(f"{number} {kind}" for kind, number in kinds.items()), rows, factors,
    )  # fmt: skip
