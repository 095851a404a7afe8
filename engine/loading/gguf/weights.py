"""Weights of GGUF files: tensors under transformers' names, and what the bits of their blocks stand for.

A block has the weights of neighbouring inputs of an output, and their scales (https://github.com/ggml-org/ggml,
src/ggml-common.h; `d` is float16):

    Q4_0   32   d, 16 bytes: weights 0 to 15 in the low halves, 16 to 31 in the high ones     (q - 8) d
    Q4_1   32   d, m, 16 bytes as Q4_0                                                       q d + m
    Q5_0   32   d, 4 bytes of fifth bits, 16 bytes as Q4_0                                   (q - 16) d
    Q5_1   32   d, m, 4 bytes of fifth bits, 16 bytes as Q4_0                                q d + m
    Q8_0   32   d, 32 int8                                                                   q d
    Q4_K   256  d, dmin, 12 bytes of scales and minimums (six bits) of groups of 32, 128 bytes  q d scale - dmin minimum
    Q5_K   256  d, dmin, 12 bytes, 32 bytes of fifth bits, 128 bytes                         the same
    Q6_K   256  128 bytes of low halves, 64 of high bits, 16 int8 scales of groups of 16, d  (q - 32) d scale
    MXFP4  32   an exponent, 16 bytes as Q4_0                                                e2m1 2^(e - 127)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....common.units import format_bytes
from ...errors import CheckpointError, UnsupportedModel
from ...layers import WeightForm
from ...layers.linears import PackedWeight
from ...layers.quantization import SIX_BIT_BYTES, SUPER_GROUP, QuantizedWeight
from ..stored_formats import StoredPart, StoredWeight
from ..weight_files import StoredTensor
from .file import INSTEAD, TYPES, GgufFile, GgufTensor
from .models import TensorPlace, places_of

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

if TYPE_CHECKING:
    _Scales = tuple[torch.Tensor, torch.Tensor | None]  # scales, factors as in QuantizedWeight


@dataclass(frozen=True, slots=True)
class _Type:
    """What blocks of `block` weights become, with `scale_bytes` of scales.

    Both functions take uint8 [n, blocks of a row, bytes]; `values` gives int8 [n, k], which the kernels decode by themselves.
    """

    form: WeightForm
    group: int
    block: int
    scale_bytes: int
    values: Callable[[torch.Tensor], torch.Tensor]
    scales: Callable[[torch.Tensor], _Scales]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [blocks of a row, n]: the number at byte `at` of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].T.contiguous()


def _write_halves(data: torch.Tensor, codes: torch.Tensor) -> None:
    """Write the low halves of bytes [..., m, bytes] into uint8 [..., 2, m, bytes], and behind them the high ones."""
    torch.bitwise_and(data, 15, out=codes[..., 0, :, :])
    torch.bitwise_right_shift(data, 4, out=codes[..., 1, :, :])


def _less(codes: torch.Tensor, less: int) -> torch.Tensor:
    """int8 [n, k]: codes uint8 [n, ...] less a number. Mutates `codes`."""
    return (codes.sub_(less) if less else codes).view(torch.int8).view(len(codes), -1)  # modulo 256


def _nibbles(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """uint8 [n, blocks of a row, 32]: the halves of the 16 bytes from `at` on."""
    codes = torch.empty((*blocks.shape[:2], 2, 1, 16), dtype=torch.uint8)
    _write_halves(blocks[..., None, at : at + 16], codes)
    return codes.flatten(2)


def _five_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """uint8 [n, blocks of a row, 32]: the halves of the 16 bytes from `at` + 4 on, with the fifth bits from `at` on."""
    codes, fifth = _nibbles(blocks, at + 4).unflatten(-1, (4, 8)), blocks[..., at : at + 4]
    for bit in range(8):
        codes[..., bit] |= (fifth >> bit & 1) << 4
    return codes.flatten(2)


def _k_codes(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """uint8 [n, blocks of a row, 4, 2, 32]: the halves of the 128 bytes from `at` on, each 32 of them for 64 weights."""
    codes = torch.empty((*blocks.shape[:2], 4, 2, 1, 32), dtype=torch.uint8)
    _write_halves(blocks[..., at : at + 128].unflatten(-1, (4, 1, 32)), codes)
    return codes.flatten(-2)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    codes, fifth = _k_codes(blocks, 48), blocks[..., 16:48]
    for bit in range(8):
        shifted = fifth << 4 - bit if bit < 4 else fifth >> bit - 4
        codes[..., bit // 2, bit % 2, :] |= shifted.bitwise_and_(16)
    return _less(codes, 0)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = torch.empty((*blocks.shape[:2], 2, 2, 2, 32), dtype=torch.uint8)  # 64 low bytes and 32 high ones for 128 weights
    _write_halves(blocks[..., :128].unflatten(-1, (2, 2, 32)), codes)
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    for part, shift in enumerate((4, 2, 0, -2)):
        shifted = high << shift if shift > 0 else high >> -shift
        codes[..., part // 2, part % 2, :] |= shifted.bitwise_and_(48)
    return _less(codes, 32)


def _half_scales(blocks: torch.Tensor) -> _Scales:
    return _half(blocks, 0), None


def _half_minimums(blocks: torch.Tensor) -> _Scales:
    return _half(blocks, 0), -_half(blocks, 2)


def _six_bit_scales(blocks: torch.Tensor) -> _Scales:
    """Scales uint8 [SIX_BIT_BYTES * blocks of a row, n] and factors float16 [2 * blocks of a row, n]."""
    scales = blocks[..., 4 : 4 + SIX_BIT_BYTES].flatten(1).T.contiguous()
    return scales, torch.stack([_half(blocks, 0), _half(blocks, 2)], 1).flatten(0, 1)


def _int8_scales(blocks: torch.Tensor) -> _Scales:
    return blocks[..., 192:208].flatten(1).T.contiguous().view(torch.int8), _half(blocks, 208)


_TYPES: Mapping[str, _Type] = {
    "Q4_0": _Type("int4", 32, 32, 2, lambda blocks: _less(_nibbles(blocks, 2), 8), _half_scales),
    "Q4_1": _Type("int4", 32, 32, 4, lambda blocks: _less(_nibbles(blocks, 4), 8), _half_minimums),
    "Q5_0": _Type("int8", 32, 32, 2, lambda blocks: _less(_five_bits(blocks, 2), 16), _half_scales),
    "Q5_1": _Type("int8", 32, 32, 4, lambda blocks: _less(_five_bits(blocks, 4), 0), _half_minimums),
    "Q8_0": _Type("int8", 32, 32, 2, lambda blocks: blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half_scales),
    "Q4_K": _Type("int4", 32, SUPER_GROUP, SIX_BIT_BYTES + 4, lambda blocks: _less(_k_codes(blocks, 16), 8), _six_bit_scales),
    "Q5_K": _Type("int8", 32, SUPER_GROUP, SIX_BIT_BYTES + 4, _q5_k, _six_bit_scales),
    "Q6_K": _Type("int8", 16, SUPER_GROUP, 16 + 2, _q6_k, _int8_scales),
    "MXFP4": _Type(
        "fp4", 32, 32, 1, lambda blocks: _less(_nibbles(blocks, 1), 8), lambda blocks: (blocks[..., 0].T.contiguous(), None)
    ),
}
_NUMBERS = {name: number for number, (name, *_) in TYPES.items()}


def read_weights(file: GgufFile, dtype: str) -> tuple[dict[str, StoredWeight], tuple[StoredTensor, ...]]:
    """The weights in blocks by transformers' names, and all tensors, with plain ones of `dtype` in their place.

    Reads the header alone. Raises UnsupportedModel, and CheckpointError.
    """
    stored, tensors = dict[str, StoredWeight](), list[StoredTensor]()
    for place in places_of(file):
        first = place.sources[0]
        if any((one.type, one.shape) != (first.type, first.shape) for one in place.sources):
            said = " and ".join(f"{one.name} is {one.type} {list(one.shape)}" for one in place.sources)
            raise UnsupportedModel(f"{file.path}: {said}, and both are read in one type and shape alone: {INSTEAD}")
        if first.is_plain:
            shape = _plain_shape(place)
            tensors.append(StoredTensor(place.name, first.type, shape, math.prod(shape) * _DTYPES[first.type].itemsize))
            continue
        one = stored[place.name] = _stored(file, place)
        num_bytes = math.prod(one.plain_shape) * {"F32": 4}.get(dtype, 2)
        tensors.append(StoredTensor(one.name, dtype, one.plain_shape, num_bytes))
    return stored, tuple(tensors)


def _plain_shape(place: TensorPlace) -> tuple[int, ...]:
    shape = place.sources[0].shape
    if place.expert is not None:
        return shape[1:]
    if place.change == "row":
        return (1, *shape)
    if place.change == "turns":
        return (shape[0], shape[2], 2 * shape[1]) if len(shape) == 3 else (shape[0], 2 * shape[1])
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape  # experts in one tensor


def _raw(place: TensorPlace) -> dict[str, tuple[GgufTensor, StoredTensor]]:
    """The parts of a weight in blocks, by role: the tensor that they are in, and bytes [..., outputs, bytes of a row]."""
    roles = ("gate", "up") if place.change == "turns" else ("blocks",)
    parts = {}
    for role, one in zip(roles, place.sources, strict=True):
        *sizes, n, _ = one.shape
        row_bytes = one.num_bytes // math.prod(one.shape[:-1])
        shape: tuple[int, ...] = (*sizes, n, row_bytes)
        name = one.name
        if place.expert is not None:
            name, shape = f"{name}[{place.expert}]", shape[1:]
        elif place.change == "halves":
            shape = (place.heads, n // place.heads, row_bytes)
        parts[role] = one, StoredTensor(name, "U8", shape, math.prod(shape))
    return parts


def _stored(file: GgufFile, place: TensorPlace) -> StoredWeight:
    first, kind = place.sources[0], _TYPES[place.sources[0].type]
    reader = _Reader(first.type, place.change)
    dimensions = 3 if place.expert is not None or place.name.endswith(_PROJECTIONS) else 2
    if len(first.shape) != dimensions or place.change in ("less 1", "row"):
        raise CheckpointError(f"{file.path}: {first.name} is {first.type} {list(first.shape)}, which no weight here is")
    n, k = first.shape[-2:]
    outputs = 2 if place.change == "turns" else n // place.heads if place.change == "halves" else 1
    return StoredWeight(
        place.name, kind.form, n * len(place.sources), k, kind.group,
        {role: StoredPart(raw, 0, outputs) for role, (_, raw) in _raw(place).items()},
        reader.decode,
        experts=first.shape[0] if len(first.shape) == 3 and place.expert is None else 0,
        scale_bytes=k // kind.block * kind.scale_bytes,
        block=kind.block,
        pack=reader.pack,
    )  # fmt: skip


_PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")  # of all experts


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a weight of a type: decoded, or as the kernels have it."""

    kind: str
    change: str

    def decode(self, one: StoredWeight, parts: Mapping[str, torch.Tensor], n: int) -> QuantizedWeight:
        """As StoredWeight.decode."""
        kind, (blocks, scales, factors) = _TYPES[self.kind], self._read(one, parts, n)
        return QuantizedWeight(kind.form, kind.values(blocks), scales, group=kind.group, factors=factors)

    def pack(self, one: StoredWeight, parts: Mapping[str, torch.Tensor], n: int) -> PackedWeight:
        """As StoredWeight.pack."""
        kind, (blocks, scales, factors) = _TYPES[self.kind], self._read(one, parts, n)
        packed = torch.ops.pagetide.pack_blocks(blocks, _NUMBERS[self.kind])
        return PackedWeight(kind.form, n, one.k, packed, scales, group=kind.group, factors=factors)

    def _read(
        self, one: StoredWeight, parts: Mapping[str, torch.Tensor], n: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Blocks uint8 [n, blocks of a row, bytes], and their scales and factors, which have memory of their own."""
        if self.change == "turns":
            blocks = torch.stack([parts["gate"], parts["up"]], 1)
        elif self.change == "halves":
            blocks = parts["blocks"].unflatten(1, (-1, 2)).transpose(1, 2)
        else:
            blocks = parts["blocks"]
        kind = _TYPES[self.kind]
        blocks = blocks.reshape(n, one.k // kind.block, -1)
        scales, factors = kind.scales(blocks)
        floats = [one for one in (scales, factors) if one is not None and one.is_floating_point()]
        if not all(bool(one.isfinite().all()) for one in floats) or (not floats and bool((scales == 255).any())):
            raise CheckpointError(f"{one.name} has scales that are not finite; fetch the file again")
        return blocks, scales, factors


class GgufTensors:
    """Tensors of GGUF files by name: plain ones by that of transformers, blocks by that in the file. Views of mapped files."""

    def __init__(self, file: GgufFile) -> None:
        self._files = {path: _mapped(path) for path in file.paths}
        self._places = {place.name: place for place in places_of(file)}
        self._raw: dict[str, tuple[GgufTensor, StoredTensor, int | None]] = {}
        for place in self._places.values():
            if not place.sources[0].is_plain:
                self._raw |= {raw.name: (one, raw, place.expert) for one, raw in _raw(place).values()}

    def __getitem__(self, name: str) -> Any:
        """The tensor, or something that becomes it once it is indexed."""
        if name in self._raw:
            one, raw, expert = self._raw[name]
            begin = one.offset + (0 if expert is None else expert * raw.num_bytes)
            return self._files[one.path][begin : begin + raw.num_bytes].view(raw.shape)
        place = self._places[name]
        tensors = [self._plain(one) for one in place.sources]
        if place.expert is not None:
            return tensors[0][place.expert]
        return tensors[0] if not place.change and tensors[0].dim() < 3 else _Changed(place, tensors)

    def _plain(self, one: GgufTensor) -> torch.Tensor:
        data = self._files[one.path][one.offset : one.offset + one.num_bytes]
        return data.view(_DTYPES[one.type]).view(one.shape)


def _mapped(path: Path) -> torch.Tensor:
    """uint8: the bytes of a file, which are read on first use, and are private to this process."""
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise CheckpointError(f"{path} of {format_bytes(size)} cannot be mapped ({error}); fetch it again") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Changed:
    """Plain tensors of a file that become one of transformers' checkpoint when that is indexed."""

    place: TensorPlace
    tensors: list[torch.Tensor]

    def __getitem__(self, key: Any) -> torch.Tensor:
        (first, *_), place = self.tensors, self.place
        match place.change:
            case "halves":
                n = first.shape[0]
                first = first.reshape(place.heads, -1, 2, *first.shape[1:]).transpose(1, 2).reshape(n, *first.shape[1:])
            case "less 1":
                first = (first.float() - 1).to(first.dtype)
            case "row":
                first = first[None]
            case "turns":
                first = torch.stack(self.tensors, 2).flatten(1, 2)
        if first.dim() == 3:  # experts multiply from the other side
            first = first.transpose(1, 2).contiguous()
        changed: torch.Tensor = first[key]
        return changed
