"""Weights that checkpoints store in quantized form: which tensors of the files make one, and what their bits stand for.

    compressed-tensors  weight_packed (int32), weight_scale, weight_shape, weight_zero_point, weight_g_idx; weight (fp8, int8)
                        and weight_scale; or weight_packed (e2m1) and weight_scale (MXFP4)
                            https://github.com/vllm-project/compressed-tensors, compressors/
    gptq                qweight, qzeros, scales, g_idx        https://github.com/AutoGPTQ/AutoGPTQ, nn_modules/qlinear/
    awq                 qweight, qzeros, scales               https://github.com/casper-hansen/AutoAWQ, utils/packing_utils.py
    fp8                 weight (e4m3), weight_scale_inv (a block's) or weight_scale     arXiv 2412.19437, 3.3
    mxfp4               NAME_blocks, NAME_scales              OCP Microscaling Formats 1.0; transformers, integrations/mxfp4.py

Shapes and types are checked from the headers alone. No library of a quantizer is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedModel
from ..layers import WeightForm, packed_bytes
from ..layers.linears import PackedWeight
from ..layers.quantization import QuantizedWeight
from .name_patterns import matches
from .weight_files import StoredTensor

_FLOATS = ("F32", "F16", "BF16")
_FP8, _POWERS = "F8_E4M3", "F8_E8M0"
_NO_POWER = 255  # as an exponent of 8 bits: not a number
_INTEGERS: Mapping[int, WeightForm] = {4: "int4", 8: "int8"}  # by bits
_SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, _POWERS: 1}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of eight columns each of them is
_PATTERN = "re:"  # before a target that is one
_MOST_SIZE = 1 << 28  # of a dimension, as in model_config
_MOST_GROUP, _LEAST_GROUP = 256, 8  # of the kernels, powers of 2
# Beside quantized weights: ranges of activations and of K and V, which are computed in the model's type here.
_UNUSED = re.compile(
    r"\.(?:(?:input|output|[qkv])_(?:scale|zero_point|global_scale)(?:_ub)?|(?:activation|input)_scale|k_proj\.k_scale|v_proj\.v_scale)$"
)
_PARTS = (
    ".weight_packed", ".weight_shape", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_g_idx", ".qweight",
    ".qzeros", ".g_idx",
)  # fmt: skip
INSTEAD = "take a version of the model in GPTQ, AWQ, compressed-tensors or fp8 form, or the one it was made of"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a stored weight. Its dimension `dim` is that of the outputs, `outputs` of them an element; None: of all."""

    tensor: StoredTensor
    dim: int | None = None
    outputs: int = 1

    def of(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """What outputs `begin` to `end` need of the part; `begin` begins an element."""
        if self.dim is None:
            return tensor
        first = begin // self.outputs
        return tensor.narrow(self.dim, first, -(-end // self.outputs) - first)


_Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight [n, k], or those of `experts`, as parts by role. `name` is that of the plain weight in its place."""

    name: str
    form: WeightForm
    n: int
    k: int
    group: int  # weights of a scale; 0: all of an output
    parts: Mapping[str, StoredPart]
    decode: Callable[[StoredWeight, _Parts, int], QuantizedWeight]  # the weight, its parts for some outputs, how many
    experts: int = 0
    scale_bytes: int = 0  # of an output, where scales are no part of their own
    block: int = 0  # inputs that lie together with their scales, where these are no part of their own
    pack: Callable[[StoredWeight, _Parts, int], PackedWeight] | None = None  # by the kernels; None: what `decode` gives
    some_outputs: tuple[int, int] | None = None  # of a shard: from, to; None: all
    some_inputs: tuple[int, int] | None = None

    @property
    def outputs(self) -> tuple[int, int]:
        """The outputs that are read: from, to."""
        return self.some_outputs or (0, self.n)

    @property
    def inputs(self) -> tuple[int, int]:
        """The inputs that are read: from, to."""
        return self.some_inputs or (0, self.k)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs that are read."""
        return self.outputs[1] - self.outputs[0], self.inputs[1] - self.inputs[0]

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of the plain weight. Experts that are stored together multiply from the other side."""
        n, k = self.shape
        return (self.experts, k, n) if self.experts else (n, k)

    def part(self, dim: int, ranges: Sequence[tuple[int, int]]) -> StoredWeight:
        """What a shard reads of a weight that is cut in dimension `dim`. Raises ValueError if that is no part of it."""
        if self.experts:
            raise ValueError("the experts of a layer are stored together")
        if len(ranges) > 1:
            raise ValueError("several layers are stored together")
        ((begin, end),) = ranges
        if dim == 0:
            return replace(self, some_outputs=(begin, end))
        whole = self.inputs_together
        if begin % whole or (end % whole and end != self.k):
            raise ValueError(f"inputs {begin} to {end} are not whole groups of {whole}")
        return replace(self, some_inputs=(begin, end))

    @property
    def inputs_together(self) -> int:
        """Inputs can be read by themselves from multiples of this on."""
        return self.block or self.group or 1

    @property
    def unit(self) -> int:
        """Outputs can be decoded by themselves from multiples of this on."""
        return math.lcm(*(part.outputs for part in self.parts.values()))

    def decoded(self, parts: _Parts, begin: int, end: int) -> QuantizedWeight:
        """Outputs `begin` to `end` of those that are read, from the tensors of its parts by role."""
        first, last = self.outputs[0] + begin, self.outputs[0] + end
        from_unit = first // self.unit * self.unit
        some = {role: part.of(parts[role], from_unit, last) for role, part in self.parts.items()}
        weight = self.decode(self, some, last - from_unit)
        if first > from_unit:
            weight = weight.outputs(first - from_unit, last - from_unit)
        if self.some_inputs is None:
            return weight
        try:
            return weight.inputs(*self.some_inputs)
        except ValueError as error:
            raise UnsupportedModel(
                f"{self.name} cannot be divided over shards: {error}; serve the model on one device"
            ) from error

    @property
    def packs(self) -> bool:
        """Whether the kernels can hold it exactly."""
        return fitting_group(self.group) is not None

    @property
    def file_bytes(self) -> int:
        """Bytes of its parts in the files; of one expert."""
        return sum(part.tensor.num_bytes for part in self.parts.values()) // (self.experts or 1)

    @property
    def packed_bytes(self) -> int:
        """The most bytes that it takes once packed."""
        (n, k), ordered = self.shape, "g_idx" in self.parts
        if self.scale_bytes:
            return (self.experts or 1) * (packed_bytes(n, k, self.form, 0, 0) + n * self.scale_bytes * k // self.k)
        group = fitting_group(self.group) or 0
        scale_bytes = _SCALE_BYTES[self.parts["scales"].tensor.dtype] + ("zeros" in self.parts)
        return (self.experts or 1) * (packed_bytes(n, k, self.form, group, scale_bytes) + 4 * k * ordered)


def fitting_group(group: int) -> int | None:
    """The size of groups by which the kernels hold weights with a scale for each `group`; None if there is none."""
    fitting = min(group & -group, _MOST_GROUP)
    return fitting if fitting >= _LEAST_GROUP or not group else None


def read_formats(
    given: Mapping[str, Any], tensors: Sequence[StoredTensor], name: str, dtype: str, content: Callable[[str], torch.Tensor]
) -> tuple[dict[str, StoredWeight], tuple[StoredTensor, ...]]:
    """The stored weights by the names of the plain ones, and all tensors, with plain ones in their place.

    Args:
        given: `quantization_config`, with one of READ_METHODS.
        tensors: All in the files.
        name: The model's, for errors.
        dtype: Of the plain ones, as a header spells it.
        content: Reads a tensor. Called for shapes alone, which one format has as tensors.

    Raises UnsupportedModel for a format that is not read, and CheckpointError for tensors that are not of the format.
    """
    files = _StoredTensors(name, str(given["quant_method"]), {one.name: one for one in tensors}, content)
    try:
        weights = {one.name: one for one in _weights(files, given)}
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, re.error) as error:
        raise CheckpointError(f"{name}: its quantization_config is not valid ({error}); fetch or save it again") from error
    left = [one for one in tensors if one.name not in files.used and not _UNUSED.search(one.name)]
    for one in left:
        if one.dtype.startswith("F8") or one.name.endswith(_PARTS):
            raise CheckpointError(f"{name}: {one.name} belongs to a quantized weight that is not there; fetch or save it again")
    if twice := [one.name for one in left if one.name in weights]:
        raise CheckpointError(f"{name} has {twice[0]} both in quantized form and not; fetch or save it again")
    itemsize = {"F32": 4}.get(dtype, 2)
    plain = [StoredTensor(one.name, dtype, one.plain_shape, math.prod(one.plain_shape) * itemsize) for one in weights.values()]
    return weights, (*left, *plain)


class _StoredTensors:
    """The tensors of a checkpoint by name, and which of them have been used."""

    def __init__(
        self, model: str, method: str, tensors: Mapping[str, StoredTensor], content: Callable[[str], torch.Tensor]
    ) -> None:
        self.model, self.method, self.tensors, self.content, self.used = model, method, tensors, content, set[str]()

    def named(self, suffix: str, dtypes: Sequence[str] = ()) -> list[str]:
        """The beginnings of the names with `suffix`."""
        found = (one for one in self.tensors.values() if one.name.endswith(suffix) and (not dtypes or one.dtype in dtypes))
        return [one.name.removesuffix(suffix) for one in found]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, dtypes: Sequence[str], *dims: int) -> StoredTensor:
        """The tensor of this name, with one of `dtypes` and of numbers of `dims`. Raises CheckpointError."""
        one = self.tensors.get(name)
        if one is None:
            raise CheckpointError(
                f"{self.model}: {name} is missing, which its {self.method} form needs; fetch or save it again"
            )
        if one.dtype not in dtypes or len(one.shape) not in dims:
            raise CheckpointError(
                f"{self.model}: {name} is {one.dtype} {list(one.shape)}, and {self.method} has {' or '.join(dtypes)} of "
                f"{' or '.join(map(str, dims))} dimensions there; fetch or save it again"
            )
        self.used.add(name)
        return one

    def check(self, one: StoredTensor, *shapes: tuple[int, ...]) -> None:
        """Raises CheckpointError unless a tensor has one of `shapes`."""
        if one.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CheckpointError(
                f"{self.model}: {one.name} is {list(one.shape)}, and {wanted} goes with its other parts; fetch or save it again"
            )

    def refuse(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.model} is stored in {self.method} form {what}, which is not read: {INSTEAD}")


def _weights(files: _StoredTensors, given: Mapping[str, Any]) -> Iterable[StoredWeight]:
    match files.method:
        case "compressed-tensors":
            return _compressed_tensors(files, given)
        case "gptq":
            return _gptq(files, given)
        case "awq":
            return _awq(files, given)
        case "mxfp4":
            return _mxfp4(files)
        case "gguf":
            raise files.refuse("in files of another kind than GGUF")
        case "modelopt" if (algorithm := given.get("quant_algo")) != "FP8":
            raise files.refuse(f"with quant_algo {algorithm!r:.40}")
        case _:
            return _fp8(files, given)


# --- compressed-tensors ---


def _compressed_tensors(files: _StoredTensors, given: Mapping[str, Any]) -> Iterable[StoredWeight]:
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise files.refuse(f"with {sparsity!r:.40} sparsity")
    if (given.get("transform_config") or {}).get("config_groups"):
        raise files.refuse("with transforms of its inputs")
    groups = list(given["config_groups"].values()) if isinstance(given.get("config_groups"), dict) else []
    packed, in_bytes = files.named(".weight_packed"), files.named(".weight", (_FP8, "I8"))
    schemes = _schemes(files, groups, [*packed, *in_bytes])
    for base in packed:
        scheme = schemes[base]
        kind = tuple(scheme.get(name) for name in ("num_bits", "type", "group_size"))
        if kind == (4, "float", 32) and files.has(f"{base}.weight_scale") and not files.has(f"{base}.weight_global_scale"):
            yield _packed_floats(files, base)
        else:
            yield _packed_integers(files, base, scheme)
    for base in in_bytes:
        yield _bytes_with_scales(files, base, schemes[base])


def _schemes(files: _StoredTensors, groups: Sequence[Mapping[str, Any]], bases: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """How the weight of each module is quantized: by its name, else by a pattern, else by its class."""
    targets = [(str(target), group.get("weights") or {}) for group in groups for target in group.get("targets") or ()]
    patterns = [target[len(_PATTERN) :] for target, _ in targets if target.startswith(_PATTERN)]
    matched = matches(patterns, bases)
    by_name, by_class = dict[str, Mapping[str, Any]](), None
    by_pattern: dict[str, Mapping[str, Any]] = {}
    for target, scheme in targets:
        if target.startswith(_PATTERN):
            by_pattern = dict.fromkeys(matched[target[len(_PATTERN) :]], scheme) | by_pattern
        else:
            by_name.setdefault(target, scheme)
            if by_class is None and re.fullmatch(r"\w+", target):
                by_class = scheme
    found = by_pattern | {base: by_name[base] for base in bases if base in by_name}
    for base in bases:
        if base not in found and by_class is None:
            raise CheckpointError(
                f"{files.model}: no config group of its quantization_config is of {base}; fetch or save it again"
            )
    return {base: found.get(base, by_class or {}) for base in bases}


def _packed_integers(files: _StoredTensors, base: str, scheme: Mapping[str, Any]) -> StoredWeight:
    bits = scheme.get("num_bits")
    if files.has(f"{base}.weight_global_scale"):
        raise files.refuse("as NVFP4")
    if bits not in (4, 8) or scheme.get("type") != "int":
        raise files.refuse(f"of {bits!r:.20} bits, {scheme.get('type')!r:.20}")
    packed, scales = files.get(f"{base}.weight_packed", ("I32",), 2), files.get(f"{base}.weight_scale", _FLOATS, 1, 2)
    shape = files.get(f"{base}.weight_shape", ("I64", "I32"), 1)
    files.check(shape, (2,))
    n, k = files.content(shape.name).tolist()
    per_word = 32 // bits
    if not 0 < min(n, k) <= max(n, k) <= _MOST_SIZE:
        raise CheckpointError(f"{files.model}: {shape.name} says {n} by {k}; fetch or save it again")
    files.check(packed, (n, -(-k // per_word)))
    group = int(scheme["group_size"]) if scheme.get("strategy") == "group" else 0
    if group < 0:
        raise ValueError(f"groups of {group}")
    parts = {"values": StoredPart(packed, 0), "scales": _scale_part(files, scales, n, -(-k // group) if group else 1)}
    if not scheme.get("symmetric", True):
        zeros = files.get(f"{base}.weight_zero_point", ("I32",), 2)
        files.check(zeros, (-(-n // per_word), -(-k // group) if group else 1))
        parts["zeros"] = StoredPart(zeros, 0, per_word)
    if files.has(f"{base}.weight_g_idx") or (group and scheme.get("actorder") in ("group", "dynamic")):
        parts["g_idx"] = StoredPart(files.get(f"{base}.weight_g_idx", ("I32", "I64"), 1))
        files.check(parts["g_idx"].tensor, (k,))
    return StoredWeight(f"{base}.weight", _INTEGERS[bits], n, k, group if group < k else 0, parts, _decode_packed)  # type: ignore[arg-type]


def _packed_floats(files: _StoredTensors, base: str) -> StoredWeight:
    """MXFP4 (`mxfp4-pack-quantized`)."""
    packed, scales = files.get(f"{base}.weight_packed", ("U8",), 2), files.get(f"{base}.weight_scale", ("U8", _POWERS), 2)
    n, half = packed.shape
    if not n or not half or half % 16:
        raise ValueError(f"{n} by {2 * half} weights in groups of 32")
    files.check(scales, (n, half // 16))
    parts = {"values": StoredPart(packed, 0), "scales": StoredPart(scales, 0)}
    return StoredWeight(f"{base}.weight", "fp4", n, 2 * half, 32, parts, _decode_mxfp4)


def _scale_part(files: _StoredTensors, scales: StoredTensor, n: int, groups: int, block: int = 1) -> StoredPart:
    """Scales [outputs, groups], or one for all."""
    rows = -(-n // block)
    files.check(scales, (rows, groups), *(((rows,), (1,), (1, 1), ()) if groups == 1 and block == 1 else ()))
    return StoredPart(scales, 0, block) if scales.shape[:1] == (rows,) and (block > 1 or rows > 1) else StoredPart(scales)


def _decode_packed(one: StoredWeight, parts: _Parts, n: int) -> QuantizedWeight:
    bits = 4 if one.form == "int4" else 8
    zeros = None
    if "zeros" in parts:
        zeros = _by_columns(_signed(_codes(parts["zeros"].T, bits)[:, :n], bits))
    values = _signed(_codes(parts["values"], bits)[:, : one.k].contiguous(), bits)
    return _ordered(one, values, _by_group(parts["scales"], n, one), zeros, parts.get("g_idx"))


# --- bytes with scales: fp8 and int8 ---


def _fp8(files: _StoredTensors, given: Mapping[str, Any]) -> Iterable[StoredWeight]:
    block = given.get("weight_block_size")
    for base in files.named(".weight", (_FP8,)):
        scheme = {} if block is None else {"strategy": "block", "block_structure": block}
        yield _bytes_with_scales(files, base, scheme)


def _bytes_with_scales(files: _StoredTensors, base: str, scheme: Mapping[str, Any]) -> StoredWeight:
    weight = files.get(f"{base}.weight", (_FP8, "I8"), 2)
    n, k = weight.shape
    if not n or not k:
        raise ValueError(f"a weight of {n} by {k}")
    suffix = "weight_scale_inv" if files.has(f"{base}.weight_scale_inv") else "weight_scale"
    scales = files.get(f"{base}.{suffix}", (*_FLOATS, _POWERS, *(("U8",) if weight.dtype == _FP8 else ())), 0, 1, 2)
    rows, group = 1, 0
    if scheme.get("strategy") == "block":
        rows, group = map(int, scheme["block_structure"])
        if rows < 1 or group < 1:
            raise ValueError(f"blocks of {rows} by {group}")
        rows = min(rows, n)
    elif scheme.get("strategy") == "group":
        group = int(scheme["group_size"])
    groups = -(-k // group) if group > 0 else 1
    parts = {"values": StoredPart(weight, 0), "scales": _scale_part(files, scales, n, groups, rows)}
    zero_point = f"{base}.weight_zero_point"  # zeros where a scheme is symmetric, which some versions write
    if weight.dtype == "I8" and (files.has(zero_point) or not scheme.get("symmetric", True)):
        parts["zeros"] = _scale_part(files, files.get(zero_point, ("I8",), 1, 2), n, groups, rows)
    files.used.add(zero_point)
    form: WeightForm = "int8" if weight.dtype == "I8" else "fp8"
    return StoredWeight(f"{base}.weight", form, n, k, group if 0 < group < k else 0, parts, _decode_bytes)


def _decode_bytes(one: StoredWeight, parts: _Parts, n: int) -> QuantizedWeight:
    values = parts["values"].view(torch.int8)
    if one.form == "fp8" and int((values & 127).amax()) == 127:
        raise CheckpointError(f"{one.name} has weights that are not a number; fetch or save the model again")
    rows, scales = one.parts["scales"].outputs, parts["scales"]
    if one.parts["scales"].tensor.dtype == _POWERS:
        scales = scales.view(torch.uint8)
    zeros = _by_group(parts["zeros"], n, one, rows) if "zeros" in parts else None
    return _ordered(one, values.contiguous(), _by_group(scales, n, one, rows), zeros, None)


# --- GPTQ and AWQ ---


def _gptq(files: _StoredTensors, given: Mapping[str, Any]) -> Iterable[StoredWeight]:
    form = str(given.get("checkpoint_format") or given.get("format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise files.refuse(f"{form!r:.40}")
    for base in files.named(".qweight"):
        words, zeros = files.get(f"{base}.qweight", ("I32",), 2), files.get(f"{base}.qzeros", ("I32",), 2)
        scales = files.get(f"{base}.scales", _FLOATS, 2)
        groups, n = scales.shape
        bits = zeros.shape[1] * 32 // max(n, 1)
        if bits not in (4, 8):
            raise files.refuse(f"of {bits} bits ({base})")
        k = words.shape[0] * 32 // bits
        files.check(words, (k * bits // 32, n))
        files.check(zeros, (groups, n * bits // 32))
        parts = {"values": StoredPart(words, 1), "scales": StoredPart(scales, 1), "zeros": StoredPart(zeros, 1, 32 // bits)}
        if files.has(f"{base}.g_idx") or (given.get("desc_act") and groups > 1):
            parts["g_idx"] = StoredPart(files.get(f"{base}.g_idx", ("I32", "I64"), 1))
            files.check(parts["g_idx"].tensor, (k,))
        decode = _decode_gptq if form == "gptq_v2" else _decode_gptq_v1
        yield StoredWeight(
            f"{base}.weight",
            _INTEGERS[bits],
            n,
            k,
            _group_of(files, base, given, k, groups),
            parts,
            decode,  # type: ignore[arg-type]
        )


def _group_of(files: _StoredTensors, base: str, given: Mapping[str, Any], k: int, groups: int) -> int:
    """Weights of each of `groups` scales: as `given`, or, where a module has another number of them, equal parts."""
    group = int(given.get("group_size") or given.get("q_group_size") or -1)
    if groups == 1:
        return 0
    if group > 0 and -(-k // group) == groups:
        return group
    if groups < 1 or k % groups:
        raise CheckpointError(f"{files.model}: {base} has {groups} groups of {k} weights; fetch or save it again")
    return k // groups


def _decode_gptq_v1(one: StoredWeight, parts: _Parts, n: int) -> QuantizedWeight:
    """Zero points are stored less 1, modulo 2^bits."""
    return _decode_gptq(one, parts, n, 1)


def _decode_gptq(one: StoredWeight, parts: _Parts, n: int, less: int = 0) -> QuantizedWeight:
    bits = 4 if one.form == "int4" else 8
    values = _signed(_codes(parts["values"].T, bits), bits)
    zeros = _codes(parts["zeros"], bits)[:, :n] + less & (1 << bits) - 1
    return _ordered(one, values, _by_columns(parts["scales"]), _by_columns(_signed(zeros, bits)), parts.get("g_idx"))


def _awq(files: _StoredTensors, given: Mapping[str, Any]) -> Iterable[StoredWeight]:
    version = str(given.get("version") or "gemm").lower()
    if version != "gemm":
        raise files.refuse(f"{version!r:.40}")
    if given.get("zero_point", True) is not True:
        raise files.refuse("without zero points")
    for base in files.named(".qweight"):
        words, scales = files.get(f"{base}.qweight", ("I32",), 2), files.get(f"{base}.scales", _FLOATS, 2)
        groups, n = scales.shape
        k = words.shape[0]
        if words.shape[1] * 8 != n and words.shape[1] * 4 == n:
            raise files.refuse("of 8 bits")
        if n % 8 or not k:
            raise ValueError(f"{n} outputs of {k} inputs in words of 8")
        files.check(words, (k, n // 8))
        zeros = files.get(f"{base}.qzeros", ("I32",), 2)
        files.check(zeros, (groups, n // 8))
        parts = {"values": StoredPart(words, 1, 8), "scales": StoredPart(scales, 1), "zeros": StoredPart(zeros, 1, 8)}
        yield StoredWeight(f"{base}.weight", "int4", n, k, _group_of(files, base, given, k, groups), parts, _decode_awq)


def _decode_awq(one: StoredWeight, parts: _Parts, n: int) -> QuantizedWeight:
    def columns(words: torch.Tensor) -> torch.Tensor:
        """int8 [n, rows]: the columns of words [rows, n / 8]."""
        words = words.T.contiguous()
        codes = torch.empty((len(words), 8, words.shape[1]), dtype=torch.int8)
        for column, place in enumerate(_AWQ_ORDER):
            codes[:, column] = (words >> 4 * place).bitwise_and_(15)
        return codes.flatten(0, 1)[:n].sub_(8)

    zeros = _by_columns(columns(parts["zeros"]).T)
    return _ordered(one, columns(parts["values"]), _by_columns(parts["scales"]), zeros, None)


# --- MXFP4 ---


def _mxfp4(files: _StoredTensors) -> Iterable[StoredWeight]:
    for base in files.named("_blocks"):
        blocks, scales = files.get(f"{base}_blocks", ("U8",), 4), files.get(f"{base}_scales", ("U8",), 3)
        experts, n, groups, _ = blocks.shape
        files.check(blocks, (experts, n, groups, 16))
        files.check(scales, (experts, n, groups))
        parts = {"values": StoredPart(blocks, 0), "scales": StoredPart(scales, 0)}  # of an expert
        yield StoredWeight(base, "fp4", n, groups * 32, 32, parts, _decode_mxfp4, experts)


def _decode_mxfp4(one: StoredWeight, parts: _Parts, n: int) -> QuantizedWeight:
    values = _signed(_nibbles(parts["values"].flatten(1)), 4)
    return _ordered(one, values, parts["scales"].view(torch.uint8).T.contiguous(), None, None)


# --- parts ---


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8: the numbers in int32 words along the last dimension, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else _nibbles(data)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """uint8: the halves of bytes along the last dimension, the low ones first."""
    both = data.contiguous().to(torch.int16)  # operators on all of it: on every other byte they take four times as long
    both |= both << 4
    return both.bitwise_and_(0x0F0F).view(torch.uint8)


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8: codes less half of their range."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def _by_group(numbers: torch.Tensor, n: int, one: StoredWeight, rows: int = 1) -> torch.Tensor:
    """[groups, n], or [n] if one output has one: from [n / rows, groups], or from one number for all."""
    if numbers.numel() == 1 and not one.group:
        return numbers.reshape(1).expand(n).contiguous()
    if rows > 1:
        numbers = numbers.repeat_interleave(rows, 0)[:n]
    return numbers.reshape(n, -1).T.contiguous() if one.group else numbers.reshape(n).contiguous()


def _by_columns(numbers: torch.Tensor) -> torch.Tensor:
    """[groups, n], or [n] of one group."""
    return numbers.reshape(-1).contiguous() if len(numbers) == 1 else numbers.contiguous()


def _ordered(
    one: StoredWeight, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None
) -> QuantizedWeight:
    """The weight, with the columns of each group together: g_idx [k] tells to which group each belongs."""
    if not bool((scales.isfinite() if scales.is_floating_point() else scales != _NO_POWER).all()):
        raise CheckpointError(f"{one.name} has scales that are not finite; fetch or save the model again")
    order = None
    if g_idx is not None and one.group and not bool((g_idx == -1).all()):
        in_order = torch.arange(one.k) // one.group
        if not torch.equal(g_idx.long(), in_order):
            order = g_idx.long().argsort(stable=True)
            if not torch.equal(g_idx.long()[order], in_order):
                raise CheckpointError(
                    f"{one.name}: its g_idx does not put {one.group} weights into each of its groups, from 0 to "
                    f"{len(scales) - 1}; fetch or save the model again"
                )
            values = values.gather(1, order.expand(len(values), -1))
    return QuantizedWeight(
        one.form, values, scales, group=one.group, zeros=zeros, order=None if order is None else order.to(torch.int32)
    )
