"""The pass over a model that packs its linear layers: for the native kernels, or without them for oneDNN.

A packed weight replaces the plain one. If it is tied to the embedding, a `PackedEmbedding` reads its rows out of a native one;
with oneDNN both are kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import native
from . import onednn
from .linears import TYPES, NativeLinear, PackedEmbedding, PackedMemory, PackedWeight, is_plain, uses_of_parameters

log = logging.getLogger(__name__)


def pack_linears(
    model: nn.Module,
    least_weights: int = onednn.LEAST_WEIGHTS,
    *,
    types: Mapping[str, torch.dtype] | None = None,
    kept: Mapping[str, PackedWeight] | None = None,
    give_back: Callable[[torch.Tensor], None] | None = None,
) -> int:
    """Pack the linear layers of `model` on a CPU, and create their primitives, if any. Mutates the model; returns how many.

    Only plain layers are packed (`is_plain`): all of them for the native kernels, those that it `packs` for oneDNN.

    Args:
        least_weights: Of a float32 layer for oneDNN.
        types: The types of packed layers, biases too, by the names of their weights. Others keep their own.
        kept: Weights of native layers that were packed before, by the names of the layers. What does not fit is packed again.
        give_back: Called with each weight that nothing uses any more, before the next one is read; with parts of a large one as
            soon as these are packed. What is in use must be as it was when it is read again.

    The largest are packed first: what is read of a weight is held besides, and then little else is held. Those of a module lie
    one behind another in memory, so that merging them copies nothing.
    """
    types, kept = types or {}, kept or {}
    places: dict[nn.Linear, list[str]] = {}
    wanted: dict[nn.Linear, torch.dtype] = {}
    uses, embeddings = uses_of_parameters(model), defaultdict[int, list[nn.Embedding]](list)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings[id(module.weight)].append(module)
        for name, child in module.named_children():
            if not is_plain(child) or child.weight.device.type != "cpu":
                continue
            place = f"{path}.{name}" if path else name
            dtype = types.get(f"{place}.weight", child.weight.dtype)
            if packs(child.weight.numel(), wanted.setdefault(child, dtype), least_weights):
                places.setdefault(child, []).append(place)
    packed, of_parameter = list[nn.Module](), dict[int, NativeLinear]()
    there, own = _kept_weights(places, kept, wanted), dict[int, nn.Linear]()
    for linear in places:
        if id(linear.weight) not in there:
            own.setdefault(id(linear.weight), linear)
    memory = PackedMemory({linear: places[linear] for linear in own.values()}, wanted)
    for linear in sorted(places, key=lambda one: one.weight.numel(), reverse=True):
        weight, same = linear.weight, of_parameter.get(id(linear.weight))
        layer = _packed(linear, wanted[linear], there.get(id(weight)), give_back, memory)
        packed.append(layer)
        for place in places[linear]:
            model.set_submodule(place, layer)
        uses[id(weight)] -= 1
        if isinstance(layer, NativeLinear):
            if same is not None:
                layer.share_parameter(same)
            of_parameter.setdefault(id(weight), layer)
            there[id(weight)] = layer.packed
            uses[id(weight)] -= sum(PackedEmbedding.share(one, layer) for one in embeddings.pop(id(weight), ()))
        if give_back is not None and not uses[id(weight)]:
            give_back(weight)
    onednn.make_primitives([layer for layer in packed if isinstance(layer, onednn.PackedLinear)])
    log.info("packed %d linear layers for %s", len(packed), native.instructions() or "oneDNN")
    return len(packed)


def _kept_weights(
    places: Mapping[nn.Linear, Sequence[str]], kept: Mapping[str, PackedWeight], dtypes: Mapping[nn.Linear, torch.dtype]
) -> dict[int, PackedWeight]:
    """Those that fit, by the id of the parameter: a file has one that layers share by the name of one of these."""
    return {
        id(linear.weight): kept[path]
        for linear, paths in places.items()
        for path in paths
        if path in kept and (kept[path].type, kept[path].n, kept[path].k) == (dtypes[linear], *linear.weight.shape)
    }


def _packed(
    linear: nn.Linear,
    dtype: torch.dtype,
    there: PackedWeight | None,
    give_back: Callable[[torch.Tensor], None] | None,
    memory: PackedMemory,
) -> NativeLinear | onednn.PackedLinear:
    if native.instructions() is None:
        return onednn.PackedLinear(linear, dtype)
    if there is not None:
        return NativeLinear(there, linear.bias, dtype)
    return NativeLinear.of(linear, dtype, give_back, memory.take(linear))


def held_twice_bytes(text_config: Any, dtype: torch.dtype) -> int:
    """Bytes that `pack_linears` adds to such a model: with oneDNN, an output head tied to the embedding."""
    if native.instructions() is not None:
        return 0
    rows, width = int(text_config.vocab_size), int(getattr(text_config, "hidden_size", 0) or 0)
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    return rows * width * dtype.itemsize if tied and packs(rows * width, dtype) else 0


def packs(num_weights: int, dtype: torch.dtype, least_weights: int = onednn.LEAST_WEIGHTS) -> bool:
    """Whether linear layers with this many weights are packed on this CPU."""
    if native.instructions() is not None:
        return dtype in TYPES
    return onednn.packs(num_weights, dtype, least_weights)
