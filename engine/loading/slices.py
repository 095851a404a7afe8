"""A shard's part of a checkpoint, for transformers' own loading: a class with parameters of the shard's shapes, the cut
tensors, and the modules at which shards meet.

What transformers renames, joins or converts while it loads it does with the parts: they are cut so that this gives the cut of
the whole. Tensors are views of their mapped files until they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..collectives.group import ShardGroup
from ..collectives.sharded_modules import DividedEmbedding, GatheredHead, Reduced
from .checkpoint import Checkpoint
from .division import Division
from .meta_models import class_to_read
from .tensor_files import TensorFiles


def slices_of(checkpoint: Checkpoint, division: Division, rank: int) -> tuple[type[Any], Any, dict[str, torch.Tensor]]:
    """The class of shard `rank`'s model, the configuration that it takes, and its tensors under the checkpoint's names."""
    part, config = class_to_read(checkpoint, lambda model: shrink(model, division, rank))
    tensors: dict[str, torch.Tensor] = {}
    files = TensorFiles(checkpoint.weights.paths)
    for name in files:
        if name not in checkpoint.unread:
            cut = division.cut_of(name, (tensor := files[name]).shape)
            tensors[name] = tensor if cut is None else cut.of(tensor, rank)
    return part, config, tensors


def shrink(model: nn.Module, division: Division, rank: int) -> None:
    """Give the cut parameters of `model`, which have no memory, the shapes of shard `rank`. Mutates it. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for child, parameter in list(module.named_parameters(recurse=False)):
            cut = division.cuts.get(f"{name}.{child}" if name else child)
            if cut is None:
                continue
            if id(parameter) not in made:
                empty = parameter.new_empty(cut.shape(parameter.shape, rank))
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, child, made[id(parameter)])
        _tell_sizes(module)
        if name == division.embedding and (padding := getattr(module, "padding_idx", None)) is not None:
            ((first, end),) = division.cuts[f"{name}.weight"].ranges[rank]  # some models set its row as they are read
            module.padding_idx = padding - first if first <= padding < end else None
        if name in division.kv_groups and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = division.kv_groups[name]


def _tell_sizes(module: nn.Module) -> None:
    """Let a layer's own numbers agree with its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = len(module.weight)


def divide_modules(model: Any, division: Division, group: ShardGroup) -> None:
    """Put the modules at which shards meet around the local layers of `model`. Mutates it."""
    for name in division.reduced:
        layer = model.get_submodule(name)
        if group.rank and getattr(layer, "bias", None) is not None:  # it is added once
            layer.bias = None
        model.set_submodule(name, Reduced(layer, group))
    if (head := division.head) is not None:
        cut = division.cuts[f"{head}.weight"]
        widths = tuple(cut.width(rank) for rank in range(group.size))
        model.set_submodule(head, GatheredHead(model.get_submodule(head), group, widths))
    if (path := division.embedding) is not None:
        cut, layer = division.cuts[f"{path}.weight"], model.get_submodule(path)
        model.set_submodule(path, DividedEmbedding(layer, group, cut.ranges[group.rank][0][0], cut.width(group.rank)))
