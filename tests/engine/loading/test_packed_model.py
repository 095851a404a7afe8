"""Models that are packed as they are loaded: the same numbers as without, and little more memory than stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCAB, tiny
from safetensors.torch import load_file, save_file
from torch import nn

from pagetide import LLM, SamplingParams, native
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.linears import NativeLinear, PackedEmbedding, pack_linears
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.mapped_files import MappedFiles
from pagetide.engine.loading.models import ModelSpec, loaded_spec
from pagetide.engine.loading.packed_model import loading_bytes, stored_dtype

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.arange(0, VOCAB, 7)[None]
WITH_KERNELS = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")


def opened(folder: Path) -> Checkpoint:
    return Checkpoint.open(ModelSpec("tiny", folder, "a test"))


def saved(folder: Path, family: str, dtype: torch.dtype, **options: Any) -> Checkpoint:
    size = options.pop("max_shard_size", "1GB")
    model = tiny(family, **options).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=size)
    return opened(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def types_of(model: Any) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.dtype for name, tensor in tensors}


def assert_packed_alike(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Bit by bit what packing gives after loading. Returns the packed model."""
    packed, plain = load_model(checkpoint, CPU, dtype, pack=True), load_model(checkpoint, CPU, dtype)
    assert types_of(packed) == types_of(plain)
    rows = plain.get_input_embeddings()(IDS)
    assert torch.equal(packed.get_input_embeddings()(IDS), rows)
    assert (
        pack_linears(plain) == sum(isinstance(m, NativeLinear) for m in packed.modules()) or not native.instructions()
    )
    assert torch.equal(logits(packed), logits(plain))
    return packed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("stored", TYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_same_numbers_in_every_type(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, tied: bool) -> None:
    checkpoint = saved(tmp_path, "qwen2", stored, tie_word_embeddings=tied)
    assert stored_dtype(checkpoint) == stored
    model = assert_packed_alike(checkpoint, dtype)
    if native.instructions():
        assert isinstance(model.model.embed_tokens, PackedEmbedding) == tied
        assert_packed_alike(checkpoint, dtype)  # whoever reads the file again finds it as it was


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "gpt_oss", "mixtral", "opt"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_numbers_in_other_families(tmp_path: Path, family: str, stored: torch.dtype) -> None:
    """A scaled embedding with a buffer of the model's type, layers that are not `nn.Linear`, float32 that stays, experts."""
    checkpoint = saved(tmp_path, family, stored, tie_word_embeddings=True)
    for dtype in (torch.float32, torch.bfloat16):
        model = assert_packed_alike(checkpoint, dtype)
        if native.instructions():
            assert isinstance(model.get_input_embeddings(), PackedEmbedding)


def test_the_same_numbers_from_files_of_several_types(tmp_path: Path) -> None:
    saved(tmp_path, "llama", torch.bfloat16)
    file = tmp_path / "model.safetensors"
    save_file({k: v.float() if "norm" in k else v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    checkpoint = opened(tmp_path)
    assert stored_dtype(checkpoint) is None
    for dtype in (torch.float32, torch.bfloat16):
        assert_packed_alike(checkpoint, dtype)


@pytest.mark.parametrize("pickled", [True, False], ids=["pytorch", "safetensors"])
def test_the_same_numbers_from_shards(tmp_path: Path, pickled: bool) -> None:
    saved(tmp_path, "llama", torch.bfloat16, max_shard_size="40KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    if pickled:
        index = tmp_path / "model.safetensors.index.json"
        names = json.loads(index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin"))
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(names))
        for file in [*files]:
            new = file.name.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            torch.save(load_file(file), tmp_path / new)
        for file in [*files, index]:
            file.unlink()
    for dtype in (torch.float32, torch.bfloat16):
        assert_packed_alike(opened(tmp_path), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_model_object_is_left_alone(dtype: torch.dtype) -> None:
    model = tiny("gemma3_text", tie_word_embeddings=True).bfloat16()
    before = {name: (one.data_ptr(), one.dtype, one.clone()) for name, one in model.state_dict().items()}
    kinds, alone = [type(module) for module in model.modules()], logits(model)
    packed = load_model(Checkpoint.open(loaded_spec(model)), CPU, dtype, pack=True)
    assert {p.dtype for p in packed.parameters()} == {dtype}
    if dtype == torch.float32:
        torch.testing.assert_close(
            logits(packed), logits(tiny("gemma3_text", tie_word_embeddings=True).bfloat16().float())
        )
    assert [type(module) for module in model.modules()] == kinds
    for name, one in model.state_dict().items():
        place, kind, values = before[name]
        assert (one.data_ptr(), one.dtype) == (place, kind) and torch.equal(one, values)
    assert torch.equal(logits(model), alone)


class Reading(nn.Embedding):
    """Looks up by itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * F.embedding(input, self.weight)


class Doubling(nn.Embedding):
    """Looks up as its base class does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Heads(nn.Module):
    """An embedding and an output head with one weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(24, 40, bias=False)
        self.head.weight = embedding.weight


@WITH_KERNELS
@pytest.mark.parametrize(
    ("embedding", "shared"),
    [
        (nn.Embedding(40, 24, padding_idx=0), True),
        (Doubling(40, 24), True),
        (Reading(40, 24), False),
        (nn.Embedding(40, 24, max_norm=1.0), False),
    ],
    ids=["plain", "doubling", "reading", "renormalising"],
)
def test_an_embedding_reads_the_packed_head(embedding: nn.Embedding, shared: bool) -> None:
    model = Heads(embedding).requires_grad_(False)
    ids = torch.tensor([[0, 39, 7], [7, 1, 0]], dtype=torch.int32)
    returned: list[torch.Tensor] = []
    with torch.no_grad():
        expected, weight = embedding(ids), embedding.weight
        assert pack_linears(model, give_back=returned.append) == 1
        torch.testing.assert_close(model.embedding(ids), expected)  # renormalised again, a last bit may change
    assert isinstance(embedding, PackedEmbedding) == shared
    assert [one is weight for one in returned] == [True] * shared
    assert embedding.weight.shape == (40, 24) and embedding.weight.untyped_storage().nbytes() == (4 if shared else 3840)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell its mappings")
def test_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "some.bin"
    values = torch.arange(1 << 18, dtype=torch.int32)  # 1 MiB
    file.write_bytes(values.numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=len(values), dtype=torch.int32)

    def resident_bytes() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.endswith(str(file)))
        return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])

    assert torch.equal(mapped, values) and resident_bytes() == mapped.nbytes
    files, part = MappedFiles([file]), mapped[1000:-1000]
    assert files.holds(mapped) and files.holds(part) and not files.holds(values)
    files.give_back(values)
    files.give_back(part)
    assert resident_bytes() <= 4 * 4096  # what it shares with its neighbours stays
    assert torch.equal(mapped, values) and torch.equal(values, torch.arange(1 << 18, dtype=torch.int32))
    assert not MappedFiles([]).holds(mapped)


def test_the_most_memory_while_loading(tmp_path: Path) -> None:
    """The largest weights are packed first, when little else is held: only a model of few large ones needs more than stays."""
    even = saved(tmp_path / "even", "llama", torch.bfloat16, num_hidden_layers=8)
    smallest = min(tensor.num_bytes for tensor in even.tensors)
    assert loading_bytes(even, torch.bfloat16) == smallest
    assert loading_bytes(even, torch.float32) == smallest
    wide = saved(tmp_path / "wide", "llama", torch.bfloat16, vocab_size=1 << 15, num_hidden_layers=1)
    others = sum(tensor.num_bytes for tensor in wide.tensors if "norm" not in tensor.name) - 2 * 48 * 2 * (1 << 15)
    table = 48 * 2 * (1 << 15)
    norms = 3 * 48 * 2
    assert loading_bytes(wide, torch.bfloat16) == table - others - norms > 0


PROGRAM = """
import gc, json, sys
from pathlib import Path
from pagetide import LLM

def size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def load(folder):
    return LLM(folder, device="cpu", dtype=sys.argv[3], kv_memory="1MiB", max_seqs=4, max_model_len=64, share=False)

load(sys.argv[1]).close()
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = size("VmRSS")
with load(sys.argv[2]) as llm:
    print(json.dumps({"stays": size("VmRSS") - before, "peak": size("VmHWM") - before, **llm.stats()}))
"""


@WITH_KERNELS
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system keeps no high-water mark")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_little_more_memory_than_stays(tmp_path: Path, dtype: str) -> None:
    """In a process of its own: 60 MiB of weights in bfloat16, a sixth of them tied. Libraries vary by some MiB."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 1 << 13}
    saved(tmp_path / "small", "qwen2", torch.bfloat16)
    checkpoint = saved(
        tmp_path / "model", "qwen2", torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=4, **sizes
    )
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "small"), str(tmp_path / "model"), dtype]
    run = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    weights = checkpoint.weights_bytes(dtype)
    assert weights == found["weights_bytes"] > 50 << 20
    assert weights < found["stays"] < 1.2 * weights + (12 << 20)
    assert found["peak"] < 1.15 * found["stays"] + (8 << 20)


def test_an_engine_of_a_tied_model_continues_alike(tmp_path: Path) -> None:
    model = tiny("gemma3_text", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    ids = model.generate(torch.tensor([[5, 17, 99]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    for given in (tmp_path, model):
        with LLM(given, kv_memory="1MiB", max_seqs=4, share=False, dtype="float32") as llm:
            assert llm.generate([5, 17, 99], SamplingParams(temperature=0, max_new_tokens=8))[0].token_ids == ids
