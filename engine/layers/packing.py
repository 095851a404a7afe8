"""The pass over a model that packs its linear layers: for the native kernels, or without them for oneDNN.

A packed weight replaces the plain one. If it is tied to the embedding, a `PackedEmbedding` reads its rows out of a native one;
with oneDNN both are kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ... import native
from . import onednn
from .linears import TYPES, NativeLinear, PackedEmbedding, is_plain, uses_of_parameters

log = logging.getLogger(__name__)


def pack_linears(
    model: nn.Module,
    least_weights: int = onednn.LEAST_WEIGHTS,
    *,
    types: Mapping[str, torch.dtype] | None = None,
    give_back: Callable[[torch.Tensor], None] | None = None,
) -> int:
    """Pack the linear layers of `model` on a CPU, and create their primitives, if any. Mutates the model; returns how many.

    Only plain layers are packed (`is_plain`): all of them for the native kernels, those that it `packs` for oneDNN.

    Args:
        least_weights: Of a float32 layer for oneDNN.
        types: The types of packed layers, biases too, by the names of their weights. Others keep their own.
        give_back: Called with each weight that nothing uses any more, before the next one is read; with parts of large ones as
            soon as these are packed. What is in use must be as it was when it is read again.

    The largest are packed first: what is read of a weight is held besides, and then little else is held.
    """
    types = types or {}
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
    packed, of_parameter = list[nn.Module](), dict[int, NativeLinear]()
    for linear in sorted(places, key=lambda one: one.weight.numel(), reverse=True):
        weight, layer = linear.weight, _packed(linear, wanted[linear], give_back)
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
    onednn.make_primitives([layer for layer in packed if isinstance(layer, onednn.PackedLinear)])
    log.info("packed %d linear layers for %s", len(packed), native.instructions() or "oneDNN")
    return len(packed)


def _packed(
    linear: nn.Linear, dtype: torch.dtype, give_back: Callable[[torch.Tensor], None] | None
) -> NativeLinear | onednn.PackedLinear:
    if native.instructions() is None:
        return onednn.PackedLinear(linear, dtype)
    return NativeLinear.of(linear, dtype, give_back)


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
