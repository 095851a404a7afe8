"""The header of a GGUF file: metadata, and where each tensor is.

    "GGUF" | version | number of tensors, of metadata | metadata: key, type, value | tensors: name, sizes, type, offset | data

(https://github.com/ggml-org/ggml, docs/gguf.md). Numbers are little endian, sizes begin with that of neighbouring elements, and
tensors lie one behind the other, aligned. A model may be split over several files. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ....common.checked_file import InvalidFile, open_checked
from ....common.units import format_bytes
from ...errors import CheckpointError, ModelNotFound, UnsupportedModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_VALUES = 1 << 23  # in all arrays of metadata; vocabularies and their merges have less than a million
_MOST_KEPT = 256  # texts of an array in memory
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_SIZE = 1 << 28  # of a dimension, as in model_config
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.gguf)", re.DOTALL)
# By number: name, weights of a block, bytes of a block. Without the last two: a type that is not read.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_NOT_READ = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
INSTEAD = f"take a file in {', '.join(name for name, *_ in TYPES.values())} or a mixture of these, such as Q4_K_M"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `shape` is in torch's order; `offset` counts from the beginning of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether it holds floating-point numbers, not blocks."""
        return self.type in ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class _Texts:
    """A long array of texts, such as a vocabulary, which stays in the file: where it begins, and how many they are."""

    path: Path
    at: int
    count: int

    def read(self) -> list[str]:
        with _opened(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            length_at, at, texts = struct.Struct("<Q").unpack_from, self.at, []
            for _ in range(self.count):
                begin = at + 8
                at = begin + length_at(data, at)[0]
                texts.append(data[begin:at].decode("utf-8", "replace"))
            return texts


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """One model: its metadata, and the tensors of all its files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, the one with the metadata first."""
        return tuple(dict.fromkeys([self.path, *(one.path for one in self.tensors.values())]))

    @property
    def architecture(self) -> str:
        """What kind of model it is, by llama.cpp's name. Raises CheckpointError."""
        return str(self.get("general.architecture", str))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The metadata of `key`, of a `kind`; `default` if it is not there. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        value = value.read() if isinstance(value, _Texts) else value
        if value is ...:
            raise CheckpointError(f"{self.path} has no {key} in its metadata; fetch or convert it again")
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise CheckpointError(f"{self.path}: {key} is {value!r:.80}, which is of another type; fetch or convert it again")
        return value

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor in F32. Raises CheckpointError for another one."""
        one = self.tensors[name]
        if one.type != "F32" or len(one.shape) != 1 or one.num_bytes > 1 << 20:
            raise CheckpointError(f"{self.path}: {name} is {one.type} {list(one.shape)}, and numbers in F32 are read there")
        with _opened(one.path) as file:
            file.seek(one.offset)
            return [*struct.unpack(f"<{one.shape[0]}f", file.read(one.num_bytes))]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, by its name or its first bytes."""
    if path.is_dir() or not path.exists():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open_checked(path, "models") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (InvalidFile, OSError):
        return False


def models_in(folder: Path) -> dict[str, Path]:
    """The models of the GGUF files in a folder and its folders, by the names of their files without ".gguf": of one that is
    split, its first file there. Vision projectors are none.
    """
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.gguf")):
        split = _SPLIT.fullmatch(file.name)
        if not file.name.startswith("mmproj"):
            found.setdefault(file.stem if split is None else split[1], file)
    return found


def read_gguf(path: Path) -> GgufFile:
    """The header of a file, and of the others of a model that is split. Remembers the last ones.

    Raises:
        CheckpointError: a file is none, is cut off, or contradicts itself.
        UnsupportedModel: a version, or a type of tensors, that is not read.
        ModelNotFound: files of a model that is split are missing.
    """
    first, count = path, 1
    if (split := _SPLIT.fullmatch(path.name)) is not None:
        count = int(split[2])
        first = path.with_name(f"{split[1]}-{1:05}-of-{count:05}{split[3]}")
        paths = [path.with_name(f"{split[1]}-{i:05}-of-{count:05}{split[3]}") for i in range(1, min(count, 10_000) + 1)]
        if missing := [one.name for one in paths if not one.is_file()]:
            raise ModelNotFound(
                f"{path} is one of {count:,} files of a model, and {missing[0]} is not beside it; fetch all of them"
            )
    file = _read(first, *_identity(first))
    if (said := file.get("split.count", int, 1)) not in (count, 0):
        raise CheckpointError(f"{first} is one of {said} files of a model; give them the names that they were published with")
    tensors = dict(file.tensors)
    for more in [] if count == 1 else paths[1:]:
        of_part = _read(more, *_identity(more)).tensors
        if twice := tensors.keys() & of_part.keys():
            raise CheckpointError(f"{more} has {min(twice)}, as has another file of the model; fetch them again")
        tensors |= of_part
    if (total := file.get("split.tensors.count", int, len(tensors))) != len(tensors):
        raise CheckpointError(f"the {count} files of {first} have {len(tensors):,} of {total:,} tensors; fetch them again")
    return GgufFile(first, file.metadata, tensors)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _opened(path: Path) -> Any:
    try:
        return open_checked(path, "models")
    except (InvalidFile, OSError) as error:
        raise CheckpointError(f"{error}; fetch it again") from error


@lru_cache(maxsize=8)
def _read(path: Path, num_bytes: int, _changed_ns: int) -> GgufFile:
    with _opened(path) as file:
        if num_bytes < 24 or os.pread(file.fileno(), len(MAGIC), 0) != MAGIC:
            raise CheckpointError(f"{path} has not the beginning of a GGUF file; fetch it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(path, data).read()
            except (struct.error, ValueError, OverflowError, MemoryError) as error:
                raise CheckpointError(
                    f"{path} is not a complete GGUF file ({error}); fetch it again, it was probably cut off"
                ) from error


class _Header:
    """Reads a header from its beginning on. Raises struct.error and ValueError at what it does not find."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._values = path, data, len(MAGIC), 0

    def read(self) -> GgufFile:
        version = self._number("I")
        if version not in _VERSIONS:
            what = "is big endian" if version.to_bytes(4, "big")[0] in _VERSIONS else f"has version {version}"
            raise UnsupportedModel(
                f"{self._path} {what}, and GGUF {' and '.join(map(str, _VERSIONS))} are read; fetch a newer file"
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > _MOST_TENSORS or num_keys > _MOST_TENSORS:
            raise ValueError(f"{num_tensors:,} tensors, and metadata of {num_keys:,}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise ValueError(f"{key!r:.80} is there twice")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise ValueError(f"an alignment of {alignment!r:.40}")
        entries = [(self._text(), self._sizes(), self._number("I"), self._number("Q")) for _ in range(num_tensors)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ValueError(f"the tensor {name!r:.80} is there twice")
            one = self._tensor(name, shape, kind, begin + offset)
            if offset != end:  # they lie one behind the other
                raise ValueError(f"{name} begins at {offset:,}, not {end:,}")
            end = -(-(offset + one.num_bytes) // alignment) * alignment
            if one.offset + one.num_bytes > len(self._data):
                raise ValueError(f"{name} ends at {one.offset + one.num_bytes:,}, the file at {len(self._data):,}")
            tensors[name] = one
        return GgufFile(self._path, metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TYPES:
            said = _NOT_READ.get(kind, f"of type {kind}")
            raise UnsupportedModel(f"{self._path}: {name} is {said}, for which there are no kernels here: {INSTEAD}")
        spelled, weights, num_bytes = TYPES[kind]
        if shape[-1] % weights:
            raise ValueError(f"{name} has rows of {shape[-1]:,}, and {spelled} has blocks of {weights}")
        return GgufTensor(name, spelled, shape, self._path, offset, prod(shape) // weights * num_bytes)

    def _sizes(self) -> tuple[int, ...]:
        count = self._number("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {count} dimensions")
        sizes = tuple(self._number("Q") for _ in range(count))[::-1]
        if not all(1 <= size <= _MOST_SIZE for size in sizes):
            raise ValueError(f"a tensor of {' by '.join(map(str, sizes))}")
        return sizes

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise ValueError(f"a text of {length:,} bytes at {self._at:,}")
        text = self._data[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8", "replace")

    def _texts(self, count: int) -> _Texts | list[str]:
        data, at, end, length_at = self._data, self._at, len(self._data), struct.Struct("<Q").unpack_from
        texts = _Texts(self._path, at, count)
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > end:
                raise ValueError(f"a text of {at - begin:,} bytes at {begin:,}")
        self._at = at
        return texts if count > _MOST_KEPT else texts.read()

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind} at {self._at:,}")
        of, count = self._number("I"), self._number("Q")
        self._values += count
        if self._values > _MOST_VALUES:
            raise ValueError(f"arrays of {self._values:,} values, and {_MOST_VALUES:,} are the most")
        if of == _TEXT:
            return self._texts(count)
        if of not in _NUMBERS:
            raise ValueError(f"an array of type {of} at {self._at:,}")
        form = _NUMBERS[of]
        size = count * struct.calcsize("<" + form)
        if size > len(self._data) - self._at:
            raise ValueError(f"an array of {format_bytes(size)} at {self._at:,}")
        self._at += size
        return [*struct.unpack_from(f"<{count}{form}", self._data, self._at - size)]
