"""Models that are packed as they are loaded: the same numbers as without, and little more memory than stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCAB, tiny, to_pytorch
from safetensors.torch import load_file, save_file
from torch import nn

from pagetide import native
from pagetide.engine.layers.linears import NativeLinear, PackedEmbedding
from pagetide.engine.layers.packing import pack_linears
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import ModelSpec
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
    assert pack_linears(plain) == sum(isinstance(m, NativeLinear) for m in packed.modules()) or not native.instructions()
    assert torch.equal(logits(packed), logits(plain))
    return packed


@pytest.mark.parametrize(
    ("family", "stored", "tied"),
    [
        ("qwen2", torch.float32, False),
        ("qwen2", torch.float32, True),
        ("qwen2", torch.bfloat16, True),
        ("qwen2", torch.float16, False),
        ("gemma3_text", torch.bfloat16, True),  # a scaled embedding with a buffer of the model's type
        ("gpt2", torch.bfloat16, True),  # layers that are not `nn.Linear`
        ("gpt_oss", torch.bfloat16, True),  # float32 that stays, experts
    ],
)
def test_the_same_numbers_in_every_type(tmp_path: Path, family: str, stored: torch.dtype, tied: bool) -> None:
    """Whoever reads the file again finds it as it was."""
    checkpoint = saved(tmp_path, family, stored, tie_word_embeddings=tied)
    assert stored_dtype(checkpoint.tensors) == stored
    for dtype in TYPES if family in ("qwen2", "gpt_oss") else TYPES[:2]:
        embeddings = assert_packed_alike(checkpoint, dtype).get_input_embeddings()
        assert isinstance(embeddings, PackedEmbedding) == (tied and native.instructions() is not None)


def test_the_same_numbers_from_files_of_several_types(tmp_path: Path) -> None:
    saved(tmp_path, "llama", torch.bfloat16)
    file = tmp_path / "model.safetensors"
    save_file({k: v.float() if "norm" in k else v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    checkpoint = opened(tmp_path)
    assert stored_dtype(checkpoint.tensors) is None
    for dtype in (torch.float32, torch.bfloat16):
        assert_packed_alike(checkpoint, dtype)


@pytest.mark.parametrize("pickled", [True, False], ids=["pytorch", "safetensors"])
def test_the_same_numbers_from_shards(tmp_path: Path, pickled: bool) -> None:
    saved(tmp_path, "llama", torch.bfloat16, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    if pickled:
        to_pytorch(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert_packed_alike(opened(tmp_path), dtype)


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


@WITH_KERNELS
@pytest.mark.parametrize("name", ["model.proj", "lm_head"])
def test_layers_that_share_a_parameter_share_what_was_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them has its name, and in whichever order modules are gone through."""

    def tied() -> nn.Module:
        root, inner = nn.Module(), nn.Module()
        root.lm_head = inner.proj = nn.Linear(64, 48).requires_grad_(False)
        inner.proj = nn.Linear(64, 48).requires_grad_(False)
        inner.proj.weight = root.lm_head.weight
        root.model = inner
        return root

    first = tied()
    assert pack_linears(first) == 2
    packed = first.lm_head.packed
    assert packed is first.model.proj.packed and packed.packed.untyped_storage().nbytes() == packed.packed.nbytes
    monkeypatch.setattr(NativeLinear, "of", None)
    second = tied()
    assert pack_linears(second, kept={name: packed}) == 2
    assert second.lm_head.packed is packed and second.model.proj.packed is packed


def test_the_most_memory_while_loading(tmp_path: Path) -> None:
    """The largest weights are packed first, when little else is held: only a model of few large ones needs more than stays."""
    even = saved(tmp_path / "even", "llama", torch.bfloat16, num_hidden_layers=8)
    smallest = min(tensor.num_bytes for tensor in even.tensors)
    assert loading_bytes(even.tensors, torch.bfloat16) == smallest
    assert loading_bytes(even.tensors, torch.float32) == smallest
    wide = saved(tmp_path / "wide", "llama", torch.bfloat16, vocab_size=1 << 15, num_hidden_layers=1)
    others = sum(tensor.num_bytes for tensor in wide.tensors if "norm" not in tensor.name) - 2 * 48 * 2 * (1 << 15)
    table = 48 * 2 * (1 << 15)
    norms = 3 * 48 * 2
    assert loading_bytes(wide.tensors, torch.bfloat16) == table - others - norms > 0
