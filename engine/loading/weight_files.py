"""The files of a model's weights: which they are, whether all are present, and what their headers contain.

A safetensors file is

    8 bytes, little endian: n | n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}} | the tensors' bytes

(https://github.com/huggingface/safetensors, "Format"), so the first kilobytes show shapes and reveal a truncated file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.checked_file import open_checked
from ..errors import CheckpointError, ModelNotFound
from ..layers import WeightForm
from .gguf.file import is_gguf, read_gguf
from .model_config import MOST_INDEX_BYTES, read_json

# In transformers' search order; (file, is it an index of shards).
_CANDIDATES = (
    ("model.safetensors", False),
    ("model.safetensors.index.json", True),
    ("pytorch_model.bin", False),
    ("pytorch_model.bin.index.json", True),
)
# `quant_method` of the quantized weights that are read here, without a quantizer's library.
READ_METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "gguf")
# What those leave as it is without a word for layers of a text decoder.
_BESIDES = re.compile(r"lm_head|visual|vision|audio|image|projector|embed|mtp|router|gate$|re:.*gate\$")
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
LOOKED_FOR = tuple(name for name, _ in _CANDIDATES)
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file. `dtype` is spelled as in the format: F32, BF16, I64, ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one model: a single file, all shards of its index, or a GGUF file and those that it is split over."""

    paths: tuple[Path, ...]
    safetensors: bool
    gguf: bool = False

    @property
    def file_bytes(self) -> int:
        """Total bytes of the files."""
        return sum(path.stat().st_size for path in self.paths)

    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors listed in the headers. Read-only; safetensors only. Raises CheckpointError naming a broken file."""
        found = {tensor.name: tensor for path in self.paths for tensor in read_header(path)}
        return tuple(found.values())


def stored_form(given: Mapping[str, Any]) -> tuple[WeightForm, int] | None:
    """How the linear layers of a decoder are stored, by a `quantization_config`: the form, and the weights of an output for
    each scale, 0 for all. None if some are stored otherwise, or in a form that torch's kernels never take.
    """
    method, group = given.get("quant_method"), given.get("group_size")
    left = given.get("ignore") or given.get("modules_to_not_convert") or given.get("ignored_layers") or ()
    if not all(isinstance(one, str) and _BESIDES.search(one) for one in left) or given.get("dynamic"):
        return None
    match method:
        case "awq" | "gptq" if given.get("bits") == 4 and isinstance(group, int):
            return "int4", max(0, group)
        case "fp8" | "fbgemm_fp8" if not given.get("weight_block_size"):
            return "fp8", 0
        case "compressed-tensors" if isinstance(groups := given.get("config_groups"), Mapping) and len(groups) == 1:
            weights = next(iter(groups.values())).get("weights") or {}
            sizes = {"group": weights.get("group_size"), "channel": 0, "tensor": 0}
            group = sizes.get(str(weights.get("strategy")))
            if weights.get("num_bits") == 4 and weights.get("type") == "int" and isinstance(group, int):
                return "int4", group
            return ("fp8", 0) if weights.get("num_bits") == 8 and weights.get("type") == "float" and group == 0 else None
        case _:
            return None


def stored_twice(tensors: Sequence[StoredTensor], *, tied: bool) -> StoredTensor | None:
    """The output head among `tensors`, if it is `tied` to the embedding and stored as well."""
    if not tied:
        return None
    heads = [tensor for tensor in tensors if tensor.name.endswith(OUTPUT_HEADS)]
    others = [tensor.shape for tensor in tensors if "emb" in tensor.name or "wte" in tensor.name]
    return heads[0] if heads and heads[0].shape in others else None


def stored_bytes(folder: Path) -> int | None:
    """Bytes of the weights of a model of which some files are in `folder`, if one of them tells. Raises CheckpointError."""
    try:
        return find_weights(folder).file_bytes
    except ModelNotFound:
        pass
    for name, is_index in _CANDIDATES:
        if is_index and (folder / name).is_file():
            metadata = read_json(folder / name, MOST_INDEX_BYTES).get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            if isinstance(total, int) and total > 0:
                return total
    return None


def find_weights(folder: Path) -> WeightFiles:
    """The weight files that transformers would load from `folder`, safetensors first; or `folder` itself, if it is a GGUF file.

    Raises:
        ModelNotFound: there are none, or shards of the index are missing.
        CheckpointError: the index, or the GGUF file, cannot be read.
        UnsupportedModel: as `read_gguf`.
    """
    if is_gguf(folder):
        return WeightFiles(read_gguf(folder).paths, safetensors=False, gguf=True)
    for name, is_index in _CANDIDATES:
        path = folder / name
        if path.is_file():
            paths = _shards(path) if is_index else (path,)
            return WeightFiles(paths, safetensors=name.startswith("model."))
    raise ModelNotFound(
        f"{folder} has no weights; looked for {', '.join(LOOKED_FOR)}, found {_listing(folder)}. "
        f"Save the model there with save_pretrained(), or name the folder that holds it"
    )


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, from its header. Raises CheckpointError if the file is incomplete."""
    file_bytes = path.stat().st_size
    try:
        with open_checked(path, "weights") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(_MOST_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"{file_bytes:,} bytes cannot hold a header of {header_bytes:,}")
            entries: dict[str, Any] = json.loads(file.read(header_bytes))
        entries.pop("__metadata__", None)
        tensors, data_bytes = [], 0
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            one = StoredTensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), end - begin)
            right = one.num_elements * _ITEM_BYTES[one.dtype] if one.dtype in _ITEM_BYTES else one.num_bytes
            if begin < 0 or min(one.shape, default=0) < 0 or one.num_bytes != right:
                raise ValueError(f"{name}, {one.dtype} {list(one.shape)}, has {one.num_bytes:,} bytes at {begin:,}")
            tensors.append(one)
            data_bytes = max(data_bytes, end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}); fetch or save it again, it was probably truncated"
        ) from error
    expected = 8 + header_bytes + data_bytes
    if file_bytes != expected:
        raise CheckpointError(
            f"{path} has {file_bytes:,} bytes, its header promises {expected:,}; fetch or save it again, "
            f"it was {'cut off while copied' if file_bytes < expected else 'written over'}"
        )
    return tensors


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(read_json(index, MOST_INDEX_BYTES)["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files outside of its folder")
        paths = tuple(index.parent / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of shards ({type(error).__name__}: {error}); fetch it again") from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelNotFound(
            f"{index.parent} is incomplete: {len(missing)} of the {len(paths)} files that {index.name} lists are "
            f"missing: {shorten(missing)}. Fetch them into the same folder"
        )
    return paths


def shorten(names: list[str], most: int = 6) -> str:
    """`names` in one line, cut after `most` of them."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return shorten(names) if names else "nothing"
