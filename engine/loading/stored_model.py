"""Reads a checkpoint with quantized weights: packed for the native kernels where they hold them, else as plain numbers.

transformers reads the model, from a mapping of tensors instead of files. A weight that is not packed is a tensor in it which is
decoded when transformers asks for it, so that what it renames, joins or ties it does as with any checkpoint. The modules of
packed weights lack theirs meanwhile, and get them afterwards, one by one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ... import native
from ...common.units import format_bytes
from ..attention.latent import latent_projections
from ..layers.linears import (
    COLUMN_PARTS,
    NativeLinear,
    PackedEmbedding,
    PackedWeight,
    is_plain,
    looks_up_by_class,
    users_of_parameters,
)
from ..layers.packed_experts import FIRST, LAST, PackedExperts, is_plain_experts
from ..layers.quantization import QuantizedWeight
from ..layers.quantized_linears import pack
from .checkpoint import Checkpoint
from .mapped_files import MappedFiles
from .meta_models import class_to_read, meta_model
from .stored_formats import StoredWeight, fitting_group
from .tensor_files import TensorFiles

log = logging.getLogger(__name__)

_CHUNK_WEIGHTS = 1 << 22  # decoded at a time, to bound temporary memory
_CHUNK_BYTES = 16  # of each of them, at most
# Names of stored weights, in the order of their outputs: of each expert, of which a tensor may have all.
_Sources = list[list[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Places:
    """Where weights are packed: linear layers and embeddings by their path, and the parameters of experts by path and name."""

    linears: Mapping[str, str] = field(default_factory=dict)
    embeddings: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, Mapping[str, _Sources]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The packed weights."""
        of_experts = (source for leaves in self.experts.values() for each in leaves.values() for one in each for source in one)
        return {*self.linears.values(), *self.embeddings.values(), *(name for name, _ in of_experts)}

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: Any) -> Places:
        """Where the stored weights of `checkpoint` are packed in `model`, which may have no memory."""
        conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = {
            pattern: one for one in conversions if isinstance(one, WeightConverter) for pattern in one.source_patterns
        }
        state, modules, users_of = model.state_dict(), dict(model.named_modules()), users_of_parameters(model)
        kept = latent_projections(model) if checkpoint.caches_latents else frozenset()
        linears, embeddings = dict[str, str](), dict[str, str]()
        paths = {module: path for path, module in modules.items()}
        parts: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(checkpoint.stored, key=dot_natural_key):
            there, pattern = rename_source_key(
                name, renamings, [*dict.fromkeys(converters.values())], model.base_model_prefix, state
            )
            if there not in state and name in state:  # as transformers does
                there, pattern = name, None
            path, _, leaf = there.rpartition(".")
            module, one = modules.get(path), checkpoint.stored[name]
            if module is None or not one.packs:
                continue
            if leaf in (*FIRST, LAST) and is_plain_experts(module):
                parts[there][pattern].append(name)
            elif pattern is None and leaf == "weight" and tuple(getattr(module.weight, "shape", ())) == one.plain_shape:
                users = users_of[id(module.weight)]
                found = [one for one in users if is_plain(one) and one not in kept]
                rows = [one for one in users if looks_up_by_class(one)] if "g_idx" not in one.parts else []
                if len(found) <= 1 and len(found) + len(rows) == len(users):
                    linears |= {paths[one]: name for one in found}
                    embeddings |= {paths[one]: name for one in rows}
        return cls(linears, embeddings, _experts(checkpoint, modules, converters, parts))


def _experts(
    checkpoint: Checkpoint,
    modules: Mapping[str, Any],
    converters: Mapping[str | None, WeightConverter],
    parts: Mapping[str, Mapping[str | None, list[str]]],
) -> dict[str, dict[str, _Sources]]:
    """The experts that can be packed: all their weights are quantized, stored together as the module has them or one by one."""
    found: dict[str, dict[str, _Sources]] = {}
    for path in dict.fromkeys(there.rpartition(".")[0] for there in parts):
        module = modules[path]
        leaves = (FIRST[0] if module.has_gate else FIRST[1], LAST)
        sources = {leaf: _sources(checkpoint, module, leaf, converters, parts.get(f"{path}.{leaf}", {})) for leaf in leaves}
        if all(sources.values()):
            found[path] = {leaf: each for leaf, each in sources.items() if each is not None}
    return found


def _sources(
    checkpoint: Checkpoint,
    module: Any,
    leaf: str,
    converters: Mapping[str | None, WeightConverter],
    by_pattern: Mapping[str | None, list[str]],
) -> _Sources | None:
    """What the parameter `leaf` of experts is made of; None if it is made otherwise, or not all of it is quantized."""
    shape = tuple(getattr(module, leaf).shape)
    if list(by_pattern) == [None]:
        (name, *more), whole = by_pattern[None], checkpoint.stored[by_pattern[None][0]]
        if more or not module.is_transposed or whole.plain_shape != shape:
            return None
        return [[(name, expert)] for expert in range(whole.experts)]
    converter = converters.get(next(iter(by_pattern), None))
    if converter is None or module.is_transposed or {*by_pattern} != {*converter.source_patterns}:
        return None
    merge, *join = converter.operations
    if not isinstance(merge, MergeModulelist) or merge.dim or len(converter.target_patterns) > 1:
        return None
    if len(by_pattern) > 1 and not (len(join) == 1 and isinstance(join[0], Concatenate) and join[0].dim == 1):
        return None
    columns = [by_pattern[pattern] for pattern in converter.source_patterns]
    if {len(names) for names in columns} != {shape[0]}:
        return None
    experts = [[(name, 0) for name in names] for names in zip(*columns, strict=True)]
    shapes = {(sum(checkpoint.stored[name].n for name, _ in each), checkpoint.stored[each[0][0]].k) for each in experts}
    return experts if shapes == {shape[1:]} else None


def packs_stored(device: torch.device) -> bool:
    """Whether weights that are stored quantized stay so on `device`."""
    return device.type == "cpu" and native.instructions() is not None


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """Bytes of a checkpoint's weights once loaded: all, those of quantized weights that become plain, and what is held besides
    all while they are read.
    """

    weights_bytes: int
    plain_bytes: int
    loading_bytes: int


@lru_cache(maxsize=4)  # of a model that is made without memory: a plan asks several times
def stored_sizes(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> StoredSizes:
    """The sizes on `device`, where what is not packed has `dtype`. Reads no weights."""
    packed = Places.of(checkpoint, meta_model(checkpoint, dtype)).names if packs_stored(device) else set()
    read = {one.name: one.num_elements * dtype.itemsize for one in checkpoint.tensors if one.name in checkpoint.stored}
    plain = {name: size for name, size in read.items() if name not in packed}
    kept = {name: checkpoint.stored[name].packed_bytes for name in packed}
    total = checkpoint.weights_bytes(dtype) - sum(read[name] for name in packed) + sum(kept.values())
    largest = max([*plain.values(), *kept.values()], default=0)  # it is held in pieces and as a whole
    return StoredSizes(total, sum(plain.values()), largest + _CHUNK_WEIGHTS * _CHUNK_BYTES)


class StoredModel:
    """The reading of one checkpoint: `kind`, `config` and `tensors` for transformers, then `install`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, pack: bool) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._files = checkpoint.read_tensors()
        self._mapped = MappedFiles(checkpoint.weights.paths)
        self.places = Places.of(checkpoint, meta_model(checkpoint, dtype)) if pack else Places()
        self.kind, self.config = class_to_read(checkpoint, self._remove)
        packed = self.places.names
        self.tensors = {
            one.name: _PlainWeight(self, stored) if (stored := checkpoint.stored.get(one.name)) else self._files[one.name]
            for one in checkpoint.tensors
            if one.name not in packed
        }
        plain = [one for one in checkpoint.tensors if one.name in checkpoint.stored and one.name not in packed]
        if plain:
            size = format_bytes(sum(one.num_elements for one in plain) * dtype.itemsize)
            log.warning(
                "%s: %d of %d weights in %s form become %s, %s in all: %s",
                checkpoint.spec.name, len(plain), len(plain) + len(packed), checkpoint.stored_as,
                str(dtype).removeprefix("torch."), size,
                "these modules or the kernels take no packed ones" if packed else "packed ones need a CPU and native kernels",
            )  # fmt: skip

    def _remove(self, model: Any) -> None:
        """Take the weights that are packed out of a new model, and keep transformers from drawing some."""
        for path, leaves in {**dict.fromkeys(self.places.linears, ("weight",)), **self.places.experts}.items():
            module = model.get_submodule(path)
            for leaf in leaves:
                setattr(module, leaf, None)
            module._is_hf_initialized = True
        for path in self.places.embeddings:
            module = model.get_submodule(path)
            del module.weight
            module.weight = torch.empty(0)  # no parameter; transformers draws none, and sets a factor of what is looked up
            module.weight._is_hf_initialized = True
        packed = self.places.linears.keys() | self.places.embeddings.keys()
        tied = getattr(model, "all_tied_weights_keys", None) or {}  # a packed one is given to all its modules here
        model.all_tied_weights_keys = {name: one for name, one in tied.items() if name.rpartition(".")[0] not in packed}

    def install(self, model: Any) -> None:
        """Pack the weights, and give them to their modules. Mutates the model. Nothing can be read afterwards."""
        of_rows = {name: self._packed(name) for name in dict.fromkeys(self.places.embeddings.values())}
        for path, name in self.places.embeddings.items():
            PackedEmbedding.pack(model.get_submodule(path), of_rows[name], self._dtype)
        for path, name in self.places.linears.items():
            packed = of_rows.get(name) or self._packed(name)
            model.set_submodule(path, NativeLinear(packed, model.get_submodule(path).bias, self._dtype))
        for path, leaves in self.places.experts.items():
            module = model.get_submodule(path)
            *_, first, last = leaves.values()
            joined = [_joined([self._packed(*source) for source in one]) for one in first]  # one expert's parts at a time
            PackedExperts.pack(module, joined, [self._packed(*source) for (source,) in last], self._dtype)
        self.tensors, self._files = {}, TensorFiles(())  # the model's class refers to this, and files stay mapped by it

    def decoded(self, one: StoredWeight, expert: int = 0) -> Iterable[tuple[int, QuantizedWeight]]:
        """The weight in pieces: the first output of each, and the piece. Its parts are read once."""
        parts = {role: self._files[part.tensor.name] for role, part in one.parts.items()}
        if one.experts:
            parts = {role: part[expert] for role, part in parts.items()}
        step = max(1, _CHUNK_WEIGHTS // (one.k * one.step)) * one.step
        for begin in range(0, one.n, step):
            end = min(begin + step, one.n)
            some = {role: part.of(parts[role], begin, end) for role, part in one.parts.items()}
            yield begin, one.decode(one, some, end - begin)
        for part in parts.values():
            self._mapped.give_back(part)

    def _packed(self, name: str, expert: int = 0) -> PackedWeight:
        one = self._checkpoint.stored[name]
        pieces = [pack(_without_files(fitted(piece))) for _, piece in self.decoded(one, expert)]
        if len(pieces) == 1:
            return pieces[0]
        joined = PackedWeight.joined(pieces)
        assert joined is not None, "pieces are of one form, and begin where panels do"
        return joined[0]


class _PlainWeight:
    """Stands for a tensor in a mapping that transformers reads: what it indexes is decoded then."""

    def __init__(self, model: StoredModel, stored: StoredWeight) -> None:
        self._model, self._stored = model, stored

    def __getitem__(self, key: Any) -> torch.Tensor:
        one, dtype = self._stored, self._model._dtype
        whole = torch.empty((one.experts or 1, one.n, one.k), dtype=dtype)
        for expert in range(len(whole)):
            for begin, piece in self._model.decoded(one, expert):
                whole[expert, begin : begin + len(piece.values)] = piece.dequantized()
        tensor: torch.Tensor = (whole.transpose(1, 2).contiguous() if one.experts else whole[0])[key]
        return tensor


def _without_files(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with scales and zero points in memory of their own, which may be views of mapped files."""
    there = {name: part for name in COLUMN_PARTS if (part := getattr(weight, name)) is not None}
    return replace(weight, **{name: part.clone() for name, part in there.items()})


def fitted(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with groups of a size that the kernels take."""
    group = fitting_group(weight.group)
    assert group is not None, "weights in other groups are not packed"
    if group == weight.group:
        return weight
    times, groups = weight.group // group, -(-weight.values.shape[1] // group)

    def repeated(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.repeat_interleave(times, 0)[:groups].contiguous()

    zeros = None if weight.zeros is None else repeated(weight.zeros)
    return replace(weight, scales=repeated(weight.scales), zeros=zeros, group=group)


def _joined(parts: list[PackedWeight]) -> list[PackedWeight]:
    """The parts as one, if there are no gaps between them."""
    joined = PackedWeight.joined(parts) if len(parts) > 1 else None
    return [joined[0]] if joined is not None and joined[0].n == sum(one.n for one in parts) else parts
