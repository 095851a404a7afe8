"""Packs the linear layers of a model as it is loaded, one by one, from its mapped files or from the user's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ... import native
from ..layers.linears import PART_WEIGHTS, NativeLinear, PackedEmbedding, PackedWeight
from ..layers.merged_linears import MergedLinears
from ..layers.packing import pack_linears
from .checkpoint import Checkpoint
from .loaded import parameter_types
from .mapped_files import MappedFiles, drop_pages, span_of
from .weight_cache import CacheEntry
from .weight_files import StoredTensor

# Of a mapped parameter: the mapping of a file stays as long as any tensor of it is used
_MOST_COPIED_BYTES = 1 << 20
_INTEGERS = ("I", "U", "BOOL")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """The type of all floating-point weights among `tensors`; None if they differ, or there are none."""
    stored = {tensor.dtype for tensor in tensors if not tensor.dtype.startswith(_INTEGERS)}
    return _DTYPES.get(stored.pop()) if len(stored) == 1 else None


def loading_bytes(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> int:
    """Bytes that `pack_model` holds at most besides the weights that stay: pages of files that it reads `tensors` from.

    What transformers converts while it reads is held beside the whole of its file.
    """
    if stored_dtype(tensors) is None:
        return sum(tensor.num_bytes for tensor in tensors if _DTYPES.get(tensor.dtype) != dtype)
    return most_besides((tensor.num_elements * dtype.itemsize, _at_once_bytes(tensor)) for tensor in tensors)


def _at_once_bytes(tensor: StoredTensor) -> int:
    """Bytes held while the tensor is packed, besides the packed weight."""
    is_whole = native.instructions() is None or tensor.num_elements <= PART_WEIGHTS
    return tensor.num_bytes if is_whole else PART_WEIGHTS * (tensor.num_bytes // tensor.num_elements)


def most_besides(sizes: Iterable[tuple[int, int]]) -> int:
    """The most bytes held besides those that stay while weights are packed, the largest first: (bytes that stay, bytes that
    are read for them) of each.
    """
    in_order = sorted(sizes, reverse=True)
    made, most, total = 0, 0, sum(kept for kept, _ in in_order)
    for kept, read in in_order:
        made += kept
        most = max(most, made + read - total)
    return most


def pack_model(model: Any, checkpoint: Checkpoint, dtype: torch.dtype | None, entry: CacheEntry | None = None) -> None:
    """Pack the linear layers of `model`, which are on the CPU, and convert parameters to `dtype`. Mutates the model.

    Those that transformers keeps in float32 stay so (`parameter_types`). `dtype` None keeps all types. Parameters of mapped
    files are copied, unless they are large and keep their type. With an `entry` of the disk cache packed weights come from
    there, and are written if any is missing.
    """
    mapped, kept = MappedFiles(checkpoint.weights.paths), {} if entry is None else entry.read()
    types = {} if dtype is None else parameter_types(model, dtype)
    pack_linears(model, types=types, kept=kept, give_back=mapped.give_back)
    if entry is not None:
        packed, there = _packed_weights(model), {id(one) for one in kept.values()}
        if any(id(one) not in there for one in packed.values()):
            entry.write(packed)
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


def _packed_weights(model: Any) -> dict[str, PackedWeight]:
    """The weights of native layers by the layers' names; one that several layers share by the first of them."""
    found: dict[int, tuple[str, PackedWeight]] = {}
    for name, module in model.named_modules():
        if isinstance(module, NativeLinear):
            found.setdefault(id(module.packed), (name, module.packed))
    return dict(found.values())


def free_merged(model: Any) -> None:
    """Free packed weights that were copied to be merged, though they share memory with others, and drop those that lie in a
    file. Mutates the model: the others are copied out of memory that they share.
    """
    layers = defaultdict[int, list[NativeLinear]](list)
    for module in model.modules():
        if isinstance(module, NativeLinear):
            layers[module.packed.packed.untyped_storage().data_ptr()].append(module)
    looked_up = {id(one._packed) for one in model.modules() if isinstance(one, PackedEmbedding)}
    for sharing in layers.values():
        memory = sharing[0].packed.packed.untyped_storage()
        at, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        unused = []
        for first, last in sorted({span_of(part) for one in sharing for part in one.packed.tensors}):
            if at <= first and last <= end:
                unused.append((at, first))
                at = last
        unused = [(first, last) for first, last in [*unused, (at, end)] if first < last]
        if not memory.resizable():  # a file's
            for first, last in unused:
                drop_pages(first, last)
        elif unused and not any(id(one.packed) in looked_up for one in sharing):
            merged = {one: MergedLinears.around(one) for one in sharing}
            for group in {group for group in merged.values() if group is not None}:
                group.move()
            for one, around in merged.items():
                if around is None:
                    one.packed = replace(one.packed, packed=one.packed.packed.clone())


def give_back_unused(model: Any, checkpoint: Checkpoint) -> None:
    """Drop the pages of weight files in which no tensor of `model` lies: the system maps some around each page that is read."""
    for begin, end in MappedFiles(checkpoint.weights.paths).besides([*model.parameters(), *model.buffers()]):
        drop_pages(begin, end)
