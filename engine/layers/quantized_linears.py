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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...native import instructions
from ..errors import ConfigError
from . import LEAST_QUANTIZED, Quantization, WeightForm
from .linears import TYPES, NativeLinear, PackedMemory, PackedWeight, is_plain, uses_of_parameters
from .quantization import Method, QuantizedWeight, choose, quantize

log = logging.getLogger(__name__)

_RUNS = 8
_BEYOND_CACHES = 1 << 27  # bytes of weights: more than the caches of most processors hold
NUM_TOKENS = (2, 64)  # sequences, tokens of each


def quantizable(module: nn.Module) -> bool:
    """Whether `module` is quantized if it runs."""
    return is_plain(module) and module.weight.numel() >= LEAST_QUANTIZED and module.weight.is_floating_point()


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
    forms: dict[nn.Linear, Quantization] = {
        one: "int8" if one is head or head in groups.get(one, ()) else quantization for one in layers
    }
    memory = PackedMemory({one: [name] for one, name in layers.items()}, forms)

    def run(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if layer not in made:
            group = groups[layer]
            method = choose([one.weight for one in group], x.reshape(-1, x.shape[-1]), forms[layer])
            for one in group:
                weight = one.weight
                made[one] = quantize_linear(one, method, x.dtype, memory.take(one))
                if uses[id(weight)] == 1:
                    give_back(weight)
        return made[layer](x)

    with _instead(groups, run):
        _run(model, tokens)
    dtype = next(iter(made.values())).weight.dtype
    for layer in layers:
        if layer not in made:
            weight = layer.weight
            method = Method(forms[layer], None, False, math.inf)
            made[layer] = quantize_linear(layer, method, dtype, memory.take(layer))
            if uses[id(weight)] == 1:
                give_back(weight)
    for old, new in made.items():
        model.set_submodule(layers[old], new)
    _log(made)
    return {layers[old]: new.packed for old, new in made.items()}


def quantize_linear(linear: nn.Linear, method: Method, dtype: torch.dtype, memory: torch.Tensor | None = None) -> NativeLinear:
    """The quantized layer for inputs of `dtype`. The weight of `linear` is dropped."""
    weight = pack(quantize(linear.weight, method), method.rows_in_int8, memory)
    linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    return NativeLinear(weight, linear.bias, dtype)


def pack(weight: QuantizedWeight, rows_in_int8: bool = False, memory: torch.Tensor | None = None) -> PackedWeight:
    """The weight in the native layout, in `memory` of its size if that is given."""
    (n, k), form = weight.values.shape, TYPES[weight.form]
    if memory is not None:
        torch.ops.pagetide.pack_weight_into(weight.values, form, memory)
    packed = torch.ops.pagetide.pack_weight(weight.values, form) if memory is None else memory
    return PackedWeight(
        weight.form, n, k, packed, weight.scales, weight.in_scales, rows_in_int8, weight.group, weight.zeros,
        weight.order, weight.factors,
    )  # fmt: skip


def product_ms(size: int) -> dict[str, float]:
    """Milliseconds of a product of one row in bfloat16 with `size` by `size` weights, by their form: the least of a few runs.

    Four-bit forms as most are published. Nothing without native kernels.
    """
    return {form: 1000 * least for form, (least, _) in _measured(size, 0).items()}


def product_rates(size: int, num_bytes: int = _BEYOND_CACHES) -> dict[str, float]:
    """Bytes per second at which such products read weights out of memory: of at least `num_bytes`, which take turns."""
    return {form: read / least for form, (least, read) in _measured(size, num_bytes).items()}


def _measured(size: int, num_bytes: int) -> dict[str, tuple[float, int]]:
    """(seconds, bytes) of products of one row with weights of at least `num_bytes`, at least one, by their form."""
    if instructions() is None:
        return {}
    x, found = torch.ones((1, size), dtype=torch.bfloat16), dict[str, tuple[float, int]]()
    with torch.inference_mode():
        for form, weight in _samples(size).items():
            rows = x.float() if form == "float32" else x
            copies = [replace(weight, packed=weight.packed.clone()) for _ in range(-(-num_bytes // weight.num_bytes) or 1)]
            least = [math.inf] * len(copies)  # of each by itself: another process interrupts few of these short times
            for _ in range(_RUNS):
                for i, copy in enumerate(copies):
                    began = time.perf_counter()
                    copy.product(rows, None)
                    least[i] = min(least[i], time.perf_counter() - began)
            found[form] = sum(least), weight.num_bytes * len(copies)
    return found


def _samples(size: int) -> dict[str, PackedWeight]:
    """A weight of each form."""
    bits = torch.randint(-8, 8, (size, size), dtype=torch.int8)

    def packed(form: WeightForm, group: int, scale: torch.Tensor, zeros: bool = False) -> PackedWeight:
        scales = scale.expand((size // group, size) if group else (size,)).contiguous()
        values = bits + 56 if form == "fp8" else bits  # from 0.5 to 2
        points = torch.zeros_like(scales).char() if zeros else None
        return pack(QuantizedWeight(form, values, scales, group=group, zeros=points)).for_inputs(torch.bfloat16)

    def plain(dtype: torch.dtype) -> PackedWeight:
        return NativeLinear.of(nn.Linear(size, size, bias=False, dtype=dtype)).packed

    half, power = torch.tensor(0.01, dtype=torch.bfloat16), torch.tensor(120, dtype=torch.uint8)
    return {
        "float32": plain(torch.float32),
        "bfloat16": plain(torch.bfloat16),
        "int8": packed("int8", 0, half),
        "int4": packed("int4", 128, half, zeros=True),
        "fp8": packed("fp8", 128, half),
        "fp4": packed("fp4", 32, power),
    }


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
    # The tensors are kept, so that ids stay theirs.
    by_input: dict[int, tuple[torch.Tensor, dict[nn.Linear, None]]] = {}

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


def _log(made: dict[nn.Linear, NativeLinear]) -> None:
    weights = [one.packed for one in made.values()]
    kinds = Counter(one.type for one in weights)
    log.info(
        "quantized %s linear layers; %d quantize their inputs too, %d have factors of input channels",
        " and ".join(f"{number} {kind}" for kind, number in kinds.items()),
        sum(one.rows_in_int8 for one in weights),
        sum(one.in_scales is not None for one in weights),
    )
