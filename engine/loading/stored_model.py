"""Reads a checkpoint with quantized weights: packed for the native kernels where they hold them, else as plain numbers.

transformers reads the model, from a mapping of tensors instead of files. A weight that is not packed is a tensor in it which is
decoded when transformers asks for it, so that what it renames, joins or ties it does as with any checkpoint. The modules of
packed weights lack theirs meanwhile, and get them afterwards, one by one.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
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
from ..layers import torch_bytes
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
from ..layers.torch_linears import TorchLinear, TorchWeight, difference, obstacle
from ..process.memory_usage import trim
from .checkpoint import Checkpoint
from .division import Division
from .mapped_files import MappedFiles, drop_pages
from .meta_models import SPELLED, class_to_read, meta_model
from .packed_model import loading_bytes, most_besides
from .slices import shrink
from .stored_formats import StoredWeight, fitting_group
from .tensor_files import TensorFiles
from .weight_files import StoredTensor

log = logging.getLogger(__name__)

_CHUNK_WEIGHTS = 1 << 20  # decoded at a time, to bound temporary memory
_CHUNK_BYTES = 16  # of each of them, at most
_TIDY_BYTES = 1 << 25  # packed before memory is given back, which takes time
_COLUMNS = 32  # of packed outputs that lie together, or a divisor of these
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' variable, read at each loading
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

    @classmethod
    def on(cls, device: torch.device, checkpoint: Checkpoint, model: Any, dtype: torch.dtype) -> Places:
        """Where weights stay packed on `device`: native kernels take all places, torch's only linear layers of their own."""
        if not packs_stored(device) and not multiplies_by_torch(device):
            return cls()
        places = cls.of(checkpoint, model)
        if packs_stored(device):
            return places
        shared = set(places.embeddings.values())
        return cls(
            {
                path: name
                for path, name in places.linears.items()
                if name not in shared and _obstacle(checkpoint.stored[name], dtype, device) is None
            }
        )


def _obstacle(one: StoredWeight, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why torch's kernels on `device` do not multiply a weight as it is."""
    if one.experts:
        return "torch's kernels multiply no experts"
    return obstacle(one.form, *one.shape, one.group, dtype, device)


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
    stored = checkpoint.stored
    shapes = {(sum(stored[name].shape[0] for name, _ in each), stored[each[0][0]].shape[1]) for each in experts}
    return experts if shapes == {shape[1:]} else None


def packs_stored(device: torch.device) -> bool:
    """Whether weights that are stored quantized stay so on `device`."""
    return device.type == "cpu" and native.instructions() is not None


def multiplies_by_torch(device: torch.device) -> bool:
    """Whether torch has kernels for quantized weights on `device`."""
    return device.type == "cuda"


def _bytes_on(one: StoredWeight, device: torch.device) -> int:
    """The most bytes of a weight that stays packed."""
    if packs_stored(device):
        return one.packed_bytes
    return (torch_bytes(one.form, *one.shape, one.group) or 0) + 4 * one.shape[1] * ("g_idx" in one.parts)


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """Bytes of a checkpoint's weights once loaded: all, those of quantized weights that stay so (by form) and that become
    plain, and what is held besides all while they are read.
    """

    weights_bytes: int
    packed_bytes: Mapping[str, int]
    plain_bytes: int
    loading_bytes: int


@lru_cache(maxsize=4)  # of a model that is made without memory: a plan asks several times
def stored_sizes(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, division: Division | None = None
) -> StoredSizes:
    """The sizes on `device`, where what is not packed has `dtype`; with `division`, of the largest shard. Reads no weights.

    On CUDA a few small products are tried there.
    """
    model, shards = meta_model(checkpoint, dtype), [checkpoint]
    if division is not None:
        shards = [_shard_of(checkpoint, division, rank) for rank in range(division.size)]
        shrink(model, division, 0)
    packed = Places.on(device, shards[0], model, dtype).names
    largest = max(one.numel() for one in model.parameters()) * dtype.itemsize
    kept = [{name: _bytes_on(one.stored[name], device) for name in packed} for one in shards]
    sizes = (_sizes(one, each, dtype, largest) for one, each in zip(shards, kept, strict=True))
    return max(sizes, key=lambda sizes: sizes.weights_bytes)


def _sizes(checkpoint: Checkpoint, kept: Mapping[str, int], dtype: torch.dtype, largest_bytes: int) -> StoredSizes:
    read = {one.name: one.num_elements * dtype.itemsize for one in checkpoint.tensors if one.name in checkpoint.stored}
    plain_bytes = sum(size for name, size in read.items() if name not in kept)
    total = checkpoint.weights_bytes(dtype) - sum(read[name] for name in kept) + sum(kept.values())
    # Plain weights are packed first, and then quantized ones, the largest first: see `StoredModel`.
    before = loading_bytes(_read_tensors(checkpoint, kept, dtype), dtype) - sum(kept.values())
    besides = most_besides((size, checkpoint.stored[name].file_bytes) for name, size in kept.items())
    joined = largest_bytes if plain_bytes else 0  # transformers holds what it joins beside the whole
    by_form: dict[str, int] = {}
    for name, size in sorted(kept.items()):
        form = checkpoint.stored[name].form
        by_form[form] = by_form.get(form, 0) + size
    return StoredSizes(total, by_form, plain_bytes, max(before, besides, joined) + _CHUNK_WEIGHTS * _CHUNK_BYTES)


def _shard_of(checkpoint: Checkpoint, division: Division, rank: int) -> Checkpoint:
    """The checkpoint with what shard `rank` reads of quantized weights, and, of other tensors, the largest shard's part."""
    tensors = tuple(division.largest_part(one) for one in checkpoint.tensors)
    return replace(checkpoint, stored=division.stored_parts(checkpoint, rank), tensors=tensors)


def _read_tensors(checkpoint: Checkpoint, packed: Collection[str], dtype: torch.dtype) -> list[StoredTensor]:
    """What transformers reads: all that is not packed, decoded as `dtype` where it is stored quantized."""
    return [
        one
        if one.name not in checkpoint.stored
        else replace(one, dtype=SPELLED[dtype], num_bytes=one.num_elements * dtype.itemsize)
        for one in checkpoint.tensors
        if one.name not in packed
    ]


class StoredModel:
    """The reading of one checkpoint: `kind`, `config` and `tensors` for transformers, then `install`.

    What the model has besides is packed before, while little is held.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        part: tuple[Division, int] | None = None,
        change: Callable[[Any], None] = lambda model: None,
    ) -> None:
        """
        Args:
            device: Where weights stay packed if it multiplies them so; None: all become plain.
            part: Read only this shard's.
            change: Gets each new model, which may have no memory, and makes it smaller.
        """
        self._device = device
        self._differences: dict[Any, str | None] = {}  # of packed weights from plain ones, by form, sizes and group
        self._checkpoint, self._dtype, self._part = checkpoint if part is None else _shard_of(checkpoint, *part), dtype, part
        self._files = checkpoint.read_tensors()
        self._mapped = MappedFiles(checkpoint.weights.paths)
        self.places = Places()

        def changed(model: Any) -> None:
            change(model)
            if part is not None:
                shrink(model, *part)
            self._remove(model)

        model = meta_model(checkpoint, dtype)
        if device is not None:
            changed(model)
            self.places = Places.on(device, self._checkpoint, model, dtype)
        self.kind, self.config = class_to_read(checkpoint, changed, type(model))
        self.read = _read_tensors(self._checkpoint, self.places.names, dtype)
        stored, shapes = self._checkpoint.stored, {one.name: one for one in checkpoint.tensors}
        self.tensors = {
            one.name: _Later(partial(self._dequantized, stored[one.name]))
            if one.name in stored
            else self._plain(shapes[one.name])
            for one in self.read
        }

    def _plain(self, whole: StoredTensor) -> torch.Tensor | _Later:
        """A tensor of the files that is not quantized: this shard's part."""
        tensor, part = self._files[whole.name], self._part
        cut = None if part is None else part[0].cut_of(whole.name, whole.shape)
        if part is None or cut is None:
            return tensor
        rank = part[1]
        return cut.of(tensor, rank) if isinstance(tensor, torch.Tensor) else _Later(lambda: cut.of(tensor[...], rank))

    def warn(self) -> None:
        """Log how many quantized weights do not stay so, if there are any."""
        one, packed = self._checkpoint, len(self.places.names)
        plain = {tensor.name: tensor.num_bytes for tensor in self.read if tensor.name in one.stored}
        if plain:
            log.warning(
                "%s: %d of %d weights in %s form become %s, %s in all: %s",
                one.spec.name, len(plain), len(plain) + packed, one.stored_as, str(self._dtype).removeprefix("torch."),
                format_bytes(sum(plain.values())), self._why_plain(plain, bool(packed)),
            )  # fmt: skip

    def _why_plain(self, names: Collection[str], others_packed: bool) -> str:
        """Why weights do not stay packed, as a clause."""
        if self._device is not None and multiplies_by_torch(self._device):
            stored, device = self._checkpoint.stored, self._device
            said = Counter(
                _obstacle(stored[name], self._dtype, device) or "their modules take no packed ones" for name in names
            )
            return "; ".join(f"{reason} ({number})" for reason, number in said.most_common(3))
        return "these modules or the kernels take no packed ones" if others_packed else "packed ones need native kernels"

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
        stored = self._checkpoint.stored
        unused = self._mapped.besides(one for one in self.tensors.values() if isinstance(one, torch.Tensor))
        packed_bytes = _tidied(_TIDY_BYTES, unused)  # of the plain weights, packed before
        of_rows = {name: self._packed(name) for name in dict.fromkeys(self.places.embeddings.values())}
        for path, name in self.places.embeddings.items():
            PackedEmbedding.pack(model.get_submodule(path), of_rows[name], self._dtype)
        linears = sorted(self.places.linears.items(), key=lambda one: stored[one[1]].packed_bytes, reverse=True)
        by_torch = self._device is not None and not packs_stored(self._device)
        for path, name in linears:
            bias, made = model.get_submodule(path).bias, of_rows.get(name)
            layer = self._by_torch(name, bias) if by_torch else NativeLinear(made or self._packed(name), bias, self._dtype)
            model.set_submodule(path, layer)
            packed_bytes = _tidied(packed_bytes + stored[name].packed_bytes, unused)
        for path, leaves in self.places.experts.items():
            module = model.get_submodule(path)
            *_, first, last = leaves.values()
            joined = [_joined([self._packed(*source) for source in one]) for one in first]  # one expert's parts at a time
            down = [self._packed(*source) for (source,) in last]
            PackedExperts.pack(module, joined, down, self._dtype)
            packed_bytes = _tidied(packed_bytes + sum(one.num_bytes for one in itertools.chain(*joined, down)), unused)
        self.tensors, self._files = {}, TensorFiles(())  # the model's class refers to this, and files stay mapped by it

    def decoded(self, one: StoredWeight, expert: int = 0) -> Iterable[tuple[int, QuantizedWeight]]:
        """The weight in pieces: the first output of each, and the piece. Its parts are read once."""
        with self._parts(one, expert) as parts:
            multiple, (n, _) = math.lcm(_COLUMNS, one.unit), one.shape
            step = max(1, _CHUNK_WEIGHTS // (one.k * multiple)) * multiple
            for begin in range(0, n, step):
                yield begin, one.decoded(parts, begin, min(begin + step, n))

    @contextmanager
    def _parts(self, one: StoredWeight, expert: int) -> Iterator[dict[str, torch.Tensor]]:
        """The parts of a weight by role, the pages of which go back afterwards."""
        parts = {role: self._files[part.tensor.name] for role, part in one.parts.items()}
        if one.experts:
            parts = {role: part[expert] for role, part in parts.items()}
        try:
            yield parts
        finally:
            for part in parts.values():
                self._mapped.give_back(part)

    def _dequantized(self, one: StoredWeight) -> torch.Tensor:
        """The weight as plain numbers of the model's type."""
        whole = torch.empty((one.experts or 1, *one.shape), dtype=self._dtype)
        for expert in range(len(whole)):
            for begin, piece in self.decoded(one, expert):
                whole[expert, begin : begin + len(piece.values)] = piece.dequantized()
        return whole.transpose(1, 2).contiguous() if one.experts else whole[0]

    def _by_torch(self, name: str, bias: torch.Tensor | None) -> nn.Module:
        """The layer by torch's kernels; a plain one if the first of its sizes, which is compared with its weight, differs."""
        one, device = self._checkpoint.stored[name], self._device
        assert device is not None, "packed weights have a device"
        weight = TorchWeight.of(one.form, one.shape, one.group, self.decoded(one), device)
        kind = (one.form, one.shape, one.group)
        if kind not in self._differences:
            _, piece = next(iter(self.decoded(one)))
            self._differences[kind] = difference(weight, piece)
            if (why := self._differences[kind]) is not None:
                log.warning("%s becomes %s, as others of its sizes: %s", name, self._dtype, why)
        if self._differences[kind] is None:
            return TorchLinear(weight, bias)
        layer = nn.Linear(one.shape[1], one.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(self._dequantized(one).to(device), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    def _packed(self, name: str, expert: int = 0) -> PackedWeight:
        one = self._checkpoint.stored[name]
        if one.pack is not None and one.shape == (one.n, one.k):
            with self._parts(one, expert) as parts:
                return one.pack(one, parts, one.n).for_inputs(self._dtype)
        pieces = ((begin, pack(_without_files(fitted(piece)))) for begin, piece in self.decoded(one, expert))
        return PackedWeight.gathered(one.shape[0], pieces).for_inputs(self._dtype)


@contextmanager
def one_by_one() -> Iterator[None]:
    """A context in which transformers reads tensors when it needs them.

    Otherwise its threads read ahead of what it joins, and hold all experts twice. Only within `making_models`.
    """
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before


def _tidied(packed_bytes: int, unused: Iterable[tuple[int, int]]) -> int:
    """The bytes packed since memory was given back. From _TIDY_BYTES on it is: free pages of the heap, and those at `unused`
    addresses of files, which the system maps around each that is read.
    """
    if packed_bytes < _TIDY_BYTES:
        return packed_bytes
    for begin, end in unused:
        drop_pages(begin, end)
    trim(torch.device("cpu"))
    return 0


@dataclass(frozen=True, slots=True)
class _Later:
    """Stands for a tensor in a mapping that transformers reads: what it indexes is made then."""

    make: Callable[[], torch.Tensor]

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.make()[key]


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
