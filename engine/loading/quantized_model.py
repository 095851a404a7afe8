"""Quantizes a model as it is loaded, by the disk cache if the weights are there, and counts the bytes that it will have."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...common.units import format_bytes
from ..attention.latent import latent_projections
from ..collectives.group import ALONE, ShardGroup
from ..errors import ConfigError
from ..layers import Quantization, weight_bytes
from ..layers.linears import NativeLinear, PackedWeight
from ..layers.quantized_linears import NUM_TOKENS, quantizable, quantize_linears
from ..process.memory_usage import trim
from .checkpoint import Checkpoint
from .division import Division
from .loaded import parameter_types
from .mapped_files import MappedFiles
from .meta_models import meta_model
from .probe import random_tokens
from .slices import shrink
from .text_model import within
from .weight_cache import CacheEntry

log = logging.getLogger(__name__)

_TRIM_BYTES = 1 << 26  # quantized before memory is given back, which takes time


def quantize_model(
    model: Any,
    checkpoint: Checkpoint,
    quantization: Quantization,
    dtype: torch.dtype,
    entry: CacheEntry | None = None,
    group: ShardGroup = ALONE,
) -> None:
    """Quantize the linear layers of `model`, and convert everything else to `dtype`. Mutates the model.

    `model` has the checkpoint's type, so that weights that are quantized stay mapped from their files until then; with weights
    from the `entry` of the disk cache they are never read. Raises ConfigError if the checkpoint is quantized already, or if
    there is nothing to quantize. `group`: the shards that are quantized at the same time; `model` is this one's.
    """
    refuse_quantized(checkpoint, quantization)
    began = time.perf_counter()
    types = parameter_types(model, dtype)
    _convert(model, types, keep=quantizable)
    kept = {} if entry is None else entry.read()
    layers = _layers_of(model, kept, dtype)
    if not all(group.exchange(b"kept" if layers else b"")):  # then all compute, for the sake of those that must
        layers = {}
    if layers:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        done = "from the cache"
    else:
        tokens = min(NUM_TOKENS[1], checkpoint.context_length or NUM_TOKENS[1])
        ids = random_tokens(model.config, NUM_TOKENS[0] * tokens)
        mapped, since_trim = MappedFiles(checkpoint.weights.paths), 0

        def give_back(weight: torch.Tensor) -> None:
            nonlocal since_trim
            mapped.give_back(weight)
            since_trim += weight.nbytes
            if since_trim >= _TRIM_BYTES:
                trim(torch.device("cpu"))
                since_trim = 0

        kept = quantize_linears(model, quantization, ids.view(NUM_TOKENS[0], tokens), give_back)
        if entry is not None:
            entry.write(kept)
        done = "made now"
    _convert(model, types)
    size = sum(one.num_bytes for one in kept.values())
    log.info("%s weights of %s, %s, in %.1f s", quantization, format_bytes(size), done, time.perf_counter() - began)


def refuse_quantized(checkpoint: Checkpoint, quantization: Quantization) -> None:
    """Raise ConfigError if the checkpoint is quantized already."""
    if checkpoint.quantized:
        raise ConfigError(
            f"{checkpoint.spec.name} is quantized already, and quantization={quantization!r} was asked for: leave it out"
        )


def quantized_bytes(
    checkpoint: Checkpoint, quantization: Quantization, dtype: torch.dtype, division: Division | None = None
) -> int:
    """Bytes that the weights take once quantized; with `division`, those of one shard. Those of a loaded model that the engine
    shares with it are not counted.

    Reads no weights: the model is made without memory.
    """
    loaded = checkpoint.spec.loaded
    if loaded is None:
        model: Any = meta_model(checkpoint, dtype)
        if division is not None:
            shrink(model, division, division.size - 1)  # the last shard is the largest
    else:
        model = loaded.model
    head, total = model.get_output_embeddings(), 0
    kept = latent_projections(model) if checkpoint.caches_latents else frozenset()
    for name, module in model.named_modules():
        if within(name, checkpoint.unused_modules):
            continue
        if quantizable(module) and module not in kept:
            n, k = module.weight.shape
            total += weight_bytes(n, k, "int8" if module is head else quantization)
    types = parameter_types(model, dtype)
    for name, parameter in _plain_parameters(model, kept):
        if within(name, checkpoint.unused_modules):
            continue
        wanted = types.get(name, parameter.dtype)
        if loaded is None or parameter.dtype != wanted:
            total += parameter.numel() * wanted.itemsize
    return total


def quantized_shapes(checkpoint: Checkpoint) -> tuple[list[tuple[int, int]], int]:
    """(outputs, inputs) of each linear layer that would be quantized, but the output head; and the parameters of a head with
    weights of its own.
    """
    model: Any = meta_model(checkpoint)
    kept = {model.get_output_embeddings(), *(latent_projections(model) if checkpoint.caches_latents else ())}
    layers = [module for module in model.modules() if quantizable(module) and module not in kept]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = 0 if head is None or head.weight is embedding.weight else head.weight.numel()
    return [(layer.out_features, layer.in_features) for layer in layers], own


def _plain_parameters(model: nn.Module, kept: Collection[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are not quantized, each once, with a name. Those of modules in `kept` are not."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name != "weight" or module in kept or not quantizable(module):
                found.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    yield from found.values()


def _layers_of(model: nn.Module, kept: dict[str, PackedWeight], dtype: torch.dtype) -> dict[str, NativeLinear]:
    """Layers with the cached weights; none unless each of them has a layer of its shape."""
    there = {name: module for name, module in model.named_modules() if quantizable(module)}
    if any(name not in there or there[name].weight.shape != (one.n, one.k) for name, one in kept.items()):
        log.warning("the cache has quantized weights of other layers than the model: they are made again")
        return {}
    return {name: NativeLinear(one, there[name].bias, dtype) for name, one in kept.items()}


def _convert(model: Any, types: Mapping[str, torch.dtype], keep: Any = lambda module: False) -> None:
    """Convert parameters to `types`, by name, except the weights of modules that are to `keep` theirs."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            wanted = types.get(f"{path}.{name}" if path else name, parameter.dtype)
            if parameter.dtype != wanted and parameter.device.type != "meta" and not (keep(module) and name == "weight"):
                setattr(module, name, nn.Parameter(parameter.detach().to(wanted), requires_grad=False))
