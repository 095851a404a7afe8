"""Headers of GGUF files: what is read, and files that are not whole."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny
from gguf_files import TYPES, quantize, write, write_model

from pagetide.engine.errors import CheckpointError, EngineError, ModelNotFound, UnsupportedModel
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.gguf.file import is_gguf, read_gguf
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import resolve_model

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
METADATA = {
    "general.architecture": "llama", "a": True, "b": -5, "c": 1.5, "d": "caf\u00e9", "e": [1, 2, 3], "f": ["x", "", "yz"],
    "g": [],
}  # fmt: skip


def small(file: Path) -> Path:
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": (kind, quantize(rng.normal(size=(3, 256)).astype(np.float32), kind)) for i, kind in enumerate(TYPES)}
    return write(file, METADATA, tensors)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", lambda name, shape: "Q8_0")
    return tmp_path / "m.gguf"


def test_metadata_and_places_of_tensors(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    file, content = read_gguf(path), path.read_bytes()
    assert file.metadata == METADATA and file.architecture == "llama" and file.paths == (path,)
    rng = np.random.default_rng(1)
    for (name, one), kind in zip(file.tensors.items(), TYPES, strict=True):
        data = quantize(rng.normal(size=(3, 256)).astype(np.float32), kind)
        assert (one.name, one.type, one.shape, one.num_bytes) == (name, kind, (3, 256), data.nbytes)
        assert content[one.offset : one.offset + one.num_bytes] == data.tobytes()


def test_a_file_is_known_by_its_name_or_its_beginning(tmp_path: Path) -> None:
    blob = small(tmp_path / "m.gguf").rename(tmp_path / "sha256-0a1b")
    assert is_gguf(blob) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "absent.gguf")
    (tmp_path / "text").write_text("GGML")
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert not is_gguf(tmp_path / "text") and is_gguf(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="has not the beginning of a GGUF file"):
        read_gguf(tmp_path / "empty.gguf")


def test_a_model_that_is_split(tmp_path: Path) -> None:
    whole = read_gguf(small(tmp_path / "m.gguf"))
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": (kind, quantize(rng.normal(size=(3, 256)).astype(np.float32), kind)) for i, kind in enumerate(TYPES)}
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    splits = [{"split.no": i, "split.count": 3, "split.tensors.count": len(tensors)} for i in range(3)]
    for i, name in enumerate(names):
        part = {key: one for at, (key, one) in enumerate(tensors.items()) if at % 3 == i}
        write(tmp_path / name, {**(METADATA if i == 0 else {}), **splits[i]}, part)
    for name in names:  # any of them names the model
        file = read_gguf(tmp_path / name)
        assert [one.name for one in file.paths] == names and file.metadata["d"] == METADATA["d"]
        assert {key: (one.type, one.shape, one.num_bytes) for key, one in file.tensors.items()} == {
            key: (one.type, one.shape, one.num_bytes) for key, one in whole.tensors.items()
        }
    (tmp_path / names[1]).rename(tmp_path / "elsewhere")
    with pytest.raises(ModelNotFound, match=r"m-00002-of-00003\.gguf is not beside it; fetch all of them"):
        read_gguf(tmp_path / names[0])
    (tmp_path / "elsewhere").rename(tmp_path / "one.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 files of a model"):
        read_gguf(tmp_path / "one.gguf")
    (tmp_path / names[1]).write_bytes((tmp_path / names[0]).read_bytes())
    with pytest.raises(CheckpointError, match="has t0, as has another file"):
        read_gguf(tmp_path / names[0])


def at_key(content: bytes, key: str) -> int:
    """Where the value of a key of the metadata, or the sizes of a tensor, begin."""
    text = struct.pack("<Q", len(key)) + key.encode()
    return content.index(text) + len(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c[:-100], "is not a complete GGUF file .*ends at"),
        (lambda c: c[: len(c) // 2], "is not a complete GGUF file"),
        (lambda c: c[:20], "has not the beginning"),
        (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "has version 1"),
        (lambda c: c[:4] + struct.pack(">I", 3) + c[8:], "is big endian"),
        (lambda c: c[:8] + struct.pack("<Q", 1 << 60) + c[16:], "is not a complete GGUF file"),
        (lambda c: c[:16] + struct.pack("<Q", 1 << 62) + c[24:], "is not a complete GGUF file"),
        (lambda c: c.replace(b"\x05\0\0\0\0\0\0\0a", b"\x05\0\0\0\0\0\0\x10a", 1)[:200], "is not a complete GGUF file"),
        (lambda c: c.replace(b"output_norm.weight", b"blk.0.ffn_x.weight"), "has a tensor blk.0.ffn_x.weight"),
        (lambda c: c.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"), "has a tensor blk.9.attn_q.weight"),
        (lambda c: c.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "'blk.0.attn_k.weight' is there twice"),
        (lambda c: c.replace(b"token_embd.weight", b"token_embe.weight"), "has no tensor token_embd.weight"),
        (lambda c: c.replace(b"llama.block_count", b"llama.block_kount"), "has no llama.block_count in its metadata"),
        (lambda c: c.replace(b"general.architecture", b"general.architektura"), "has no general.architecture"),
    ],
)  # fmt: skip
def test_files_that_are_not_whole_are_refused(change, said: str, model_file: Path) -> None:
    content = model_file.read_bytes()
    changed = change(content)
    assert changed != content
    model_file.write_bytes(changed)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        Checkpoint.open(resolve_model(model_file))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (1, struct.pack("<I", 10), "blk.0.attn_q.weight is Q2_K, for which there are no kernels here: take a file in"),
        (1, struct.pack("<I", 99), "blk.0.attn_q.weight is of type 99"),
        (2, struct.pack("<Q", 64), r"begins at 64, not"),
        (2, struct.pack("<Q", 1 << 63), r"begins at"),
        (0, struct.pack("<QQ", 63, 64), r"rows of 63, and Q8_0 has blocks of 32"),
        (0, struct.pack("<QQ", 64, 1 << 40), r"a tensor of \d+ by 64"),
        (0, struct.pack("<QQ", 0, 64), r"a tensor of 64 by 0"),
    ],
)
def test_tensors_elsewhere_or_of_other_types_are_refused(field: int, value: bytes, said: str, model_file: Path) -> None:
    """Fields of a tensor: sizes, type, offset."""
    content = model_file.read_bytes()
    begin = at_key(content, "blk.0.attn_q.weight") + (4, 20, 24)[field]
    model_file.write_bytes(content[:begin] + value + content[begin + len(value) :])
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        Checkpoint.open(resolve_model(model_file))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", lambda name, shape: "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    file = read_gguf(tmp_path / "m.gguf")
    kept = {
        name: (one.type, np.frombuffer(content, np.uint8, one.num_bytes, one.offset).reshape(*one.shape[:-1], -1))
        for name, one in file.tensors.items()
        if name != "blk.0.ffn_up.weight"
    }
    write(tmp_path / "less.gguf", file.metadata, kept)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(Checkpoint.open(resolve_model(tmp_path / "less.gguf")), torch.device("cpu"), torch.float32, pack=True)


def test_headers_with_something_else_in_one_place(model_file: Path) -> None:
    """Each is refused by an error of the engine's, or is a header; the memory of the process is bounded meanwhile."""
    content, rng = model_file.read_bytes(), random.Random(3)
    header = min(one.offset for one in read_gguf(model_file).tensors.values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for i in range(200):
        at = rng.randrange(4, header - 8)
        new = rng.choice(
            [bytes([rng.randrange(256)]), struct.pack("<Q", rng.choice([0, 1, 1 << 20, 1 << 33, 1 << 62, (1 << 64) - 1]))]
        )
        path = model_file.with_name(f"{i}.gguf")
        path.write_bytes(content[:at] + new + content[at + len(new) :])
        try:
            Checkpoint.open(resolve_model(path))
        except EngineError:
            refused += 1
        path.unlink()
    assert refused > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
