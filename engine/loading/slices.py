"""A shard's part of a checkpoint, for transformers' own loading: a class with parameters of the shard's shapes, and the cut
tensors.

What transformers renames, joins or converts while it loads it does with the parts: they are cut so that this gives the cut of
the whole. Tensors are views of their mapped files until they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from .checkpoint import Checkpoint
from .division import Division


def slices_of(checkpoint: Checkpoint, division: Division, rank: int) -> tuple[type[Any], dict[str, torch.Tensor]]:
    """The class of shard `rank`'s model, and its tensors under the checkpoint's names."""
    kind: Any = AutoModelForCausalLM._model_mapping[type(checkpoint.config)]
    kind = kind if isinstance(kind, type) else kind[0]

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        shrink(self, division, rank)

    part = type(
        kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.weights.paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                tensor = file.get_tensor(name)
                cut = division.cut_of(name, tensor.shape, kind.base_model_prefix)
                tensors[name] = tensor if cut is None else cut.of(tensor, rank)
    return part, tensors


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


def _tell_sizes(module: nn.Module) -> None:
    """Let a layer's own numbers agree with its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = len(module.weight)
        if module.padding_idx is not None and module.padding_idx >= module.num_embeddings:
            module.padding_idx = None  # it matters in training only
