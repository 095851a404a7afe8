"""Packs the linear layers of a model as it is loaded, one by one, from its mapped files or from the user's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layers.packing import pack_linears
from .checkpoint import Checkpoint
from .division import Division
from .loaded import parameter_types
from .mapped_files import MappedFiles

# Of a mapped parameter: the mapping of a file stays as long as any tensor of it is used
_MOST_COPIED_BYTES = 1 << 20
_INTEGERS = ("I", "U", "BOOL")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The type of all floating-point weights of `checkpoint`; None if they differ, or it is not known without reading them."""
    stored = {tensor.dtype for tensor in checkpoint.tensors if not tensor.dtype.startswith(_INTEGERS)}
    return _DTYPES.get(stored.pop()) if len(stored) == 1 else None


def loading_bytes(checkpoint: Checkpoint, dtype: torch.dtype, division: Division | None = None) -> int:
    """Bytes that `pack_model` holds at most besides the weights that stay: pages of files that it reads tensors from. With
    `division`, of one shard.

    What transformers converts while it reads is held beside the whole of its file.
    """
    parts = checkpoint.tensors if division is None else map(division.largest_part, checkpoint.tensors)
    tensors = sorted(parts, key=lambda tensor: tensor.num_elements, reverse=True)
    if stored_dtype(checkpoint) is None:
        return sum(tensor.num_bytes for tensor in tensors if _DTYPES.get(tensor.dtype) != dtype)
    made, most, total = 0, 0, sum(tensor.num_elements for tensor in tensors) * dtype.itemsize
    for tensor in tensors:
        made += tensor.num_elements * dtype.itemsize
        most = max(most, made + tensor.num_bytes - total)
    return most


def pack_model(model: Any, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """Pack the linear layers of `model`, which are on the CPU, and convert parameters to `dtype`. Mutates the model.

    Those that transformers keeps in float32 stay so (`parameter_types`). `dtype` None keeps all types. Parameters of mapped
    files are copied, unless they are large and keep their type.
    """
    mapped = MappedFiles(checkpoint.weights.paths)
    types = {} if dtype is None else parameter_types(model, dtype)
    pack_linears(model, types=types, give_back=mapped.give_back)
    made: dict[int, nn.Parameter] = {}  # of tied parameters one
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":  # quantized; without memory
                continue
            small = parameter.nbytes <= _MOST_COPIED_BYTES and mapped.holds(parameter)
            wanted = types.get(f"{path}.{name}" if path else name, parameter.dtype)
            if not small and parameter.dtype == wanted:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().to(wanted, copy=True), requires_grad=False)
            setattr(module, name, made[id(parameter)])
