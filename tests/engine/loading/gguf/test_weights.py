"""Models in GGUF files compute what their blocks stand for, packed and not."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import VOCAB, tiny
from gguf_files import TYPES, dequantize, quantize, write_demo, write_model
from stored_checkpoints import check_logits, check_tokens, opened

from pagetide import LLM, SamplingParams, native
from pagetide.engine.errors import CheckpointError
from pagetide.engine.layers.linears import NativeLinear, PackedEmbedding
from pagetide.engine.layers.packed_experts import PackedExperts
from pagetide.engine.layers.quantization import QuantizedWeight
from pagetide.engine.layers.quantized_linears import pack
from pagetide.engine.loading import stored_model
from pagetide.engine.loading.gguf import weights
from pagetide.engine.loading.gguf.file import read_gguf
from pagetide.engine.loading.gguf.weights import read_weights
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.mapped_files import MappedFiles

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing stays packed")
BLOCKS = [name for name, (_, block, _) in TYPES.items() if block > 1]
MOST_GROWTH = {"Q5_K": 1.56, "Q6_K": 1.31, "Q5_0": 1.56, "Q5_1": 1.51}  # of others 1.01
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
SCALED = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 3, "tie_word_embeddings": True}
MOE = {
    "vocab_size": VOCAB, **SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "moe_intermediate_size": 256,
    "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "norm_topk_prob": True,
}  # fmt: skip
MODELS = {"llama": SIZES, "qwen3": {**SIZES, "tie_word_embeddings": True}, "gemma3_text": SCALED, "qwen3_moe": MOE}


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Types that take turns, as in the mixtures of llama.cpp."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K"
    turns = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_1", "Q5_1", "F16", "BF16")[3 if shape[-1] % 256 else 0 :]
    return turns[sum(map(ord, name)) % len(turns)]


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_they_stand_for(kind: str) -> None:
    """All codes, scales of both signs, and minimums occur."""
    rng = np.random.default_rng(len(kind))
    data = quantize(rng.normal(0.1, 1, (40, 512)).astype(np.float32) * rng.uniform(0.01, 3, (40, 1)).astype(np.float32), kind)
    right = torch.from_numpy(dequantize(data, kind))
    one = weights._TYPES[kind]
    blocks = torch.from_numpy(data).view(40, 512 // one.block, -1)
    scales, factors = one.scales(blocks)
    weight = QuantizedWeight(one.form, one.values(blocks), scales, group=one.group, factors=factors)
    assert torch.equal(weight.dequantized(), right)
    if native.instructions() is None:
        return
    packed = replace(pack(weight), packed=torch.ops.pagetide.pack_blocks(blocks, TYPES[kind][0]))  # as files are read
    assert torch.equal(packed.rows(torch.arange(40), torch.float32), right)
    few = replace(packed, n=7, k=one.block, packed=torch.ops.pagetide.pack_blocks(blocks[:7, :1].contiguous(), TYPES[kind][0]))
    scales, factors = one.scales(blocks[:7, :1])
    few = replace(few, scales=scales, factors=factors)
    assert torch.equal(few.rows(torch.arange(7), torch.float32), right[:7, : one.block])
    for rows in (1, 13, 60):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        expected = x.double() @ right.double().T
        assert (packed.product(x, None) - expected).norm() <= 1e-6 * expected.norm()
        small = x.bfloat16()
        expected = small.double() @ right.double().T
        assert (packed.product(small, None) - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("family", MODELS)
def test_a_file_is_read_as_what_it_stands_for(family: str, tmp_path: Path) -> None:
    plain = write_model(tiny(family, **MODELS[family]), tmp_path / "m.gguf", mixed)
    check_logits(tmp_path / "m.gguf", plain)
    if native.instructions() is not None:
        model = load_model(opened(tmp_path / "m.gguf"), CPU, torch.float32, pack=True)
        assert isinstance(model.get_output_embeddings(), NativeLinear)
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert any(isinstance(one, PackedExperts) for one in model.modules()) == (family == "qwen3_moe")


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_files_that_are_not_quantized(kind: str, tmp_path: Path) -> None:
    plain = write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", lambda name, shape: kind)
    check_logits(tmp_path / "m.gguf", plain)
    assert opened(tmp_path / "m.gguf").dtype == {"F16": "float16", "F32": "float32"}[kind]
    if native.instructions() is not None:
        with LLM(tmp_path / "m.gguf", device="cpu", quantization="int8", kv_memory=1 << 20) as llm:
            assert llm._manager.engine.plan.quantization == "int8"


def test_tokens_of_an_engine(tmp_path: Path) -> None:
    plain = write_model(tiny("qwen3", **MODELS["qwen3"]), tmp_path / "m.gguf", mixed)
    check_tokens(tmp_path / "m.gguf", plain)
    for library in ("gguf", "accelerate", "gptqmodel", "kernels"):
        assert library not in sys.modules


@pytest.mark.parametrize("kind", BLOCKS)
def test_bytes_of_each_type(kind: str, tmp_path: Path) -> None:
    """As published, of the sizes of small models: at most 1.31 times those in the file for Q6_K, 1.56 for Q5_K."""
    model = tiny("llama", vocab_size=32, hidden_size=256, intermediate_size=256, num_attention_heads=8, num_hidden_layers=1)
    write_model(model, tmp_path / "m.gguf", lambda name, shape: kind)
    (one, *_) = read_weights(read_gguf(tmp_path / "m.gguf"), "BF16")[0].values()
    large = replace(one, n=1024, k=1024, scale_bytes=4 * one.scale_bytes)
    _, block, num_bytes = TYPES[kind]
    assert large.packed_bytes <= MOST_GROWTH.get(kind, 1.01) * (1024 * 1024 // block * num_bytes)


@needs_native
def test_the_plan_agrees_and_no_file_stays_mapped(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING)

    def kind(name: str, shape: tuple[int, ...]) -> str:
        return {"attn_v": "Q6_K", "attn_k": "Q5_K", "ffn_up": "Q8_0"}.get(name.split(".")[-2], "Q4_K")

    write_model(tiny("llama", hidden_size=512, intermediate_size=512, num_attention_heads=8), tmp_path / "m.gguf", kind)
    checkpoint = opened(tmp_path / "m.gguf")
    planned = stored_model.stored_sizes(checkpoint, CPU, torch.bfloat16)
    model = load_model(checkpoint, CPU, torch.bfloat16, pack=True)
    layers = [one for one in model.modules() if isinstance(one, NativeLinear)]
    packed = [*(one.packed for one in layers), model.get_input_embeddings()._packed]
    plain = [one for one in model.parameters() if one.device.type == "cpu" and one.stride() != (0, 0)]
    held = sum(one.num_bytes for one in packed) + sum(one.nbytes for one in plain)
    assert held <= planned.weights_bytes <= 1.01 * held and planned.plain_bytes == 0
    mapped = MappedFiles(checkpoint.weights.paths)
    kept = [part for one in packed for part in (one.packed, one.scales, one.factors) if part is not None]
    assert not any(mapped.holds(part) for part in (*kept, *plain))
    assert not caplog.records


@needs_native
def test_pieces_of_heads(tmp_path: Path, monkeypatch) -> None:
    """Weights are decoded in pieces: of query and key, whose rows are reordered head by head, too."""
    plain = write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", mixed)
    monkeypatch.setattr(stored_model, "_CHUNK_WEIGHTS", 1000)
    check_logits(tmp_path / "m.gguf", plain)


def test_the_bundled_model_says_the_same(tmp_path: Path) -> None:
    """With the tokenizer of the file, and its text."""

    def kind(name: str, shape: tuple[int, ...]) -> str:
        return "Q8_0" if shape[-1] % 256 else "Q6_K" if "attn_v" in name or "embd" in name else "Q4_K"

    plain = write_demo(tmp_path / "demo.gguf", kind)
    greedy, texts = SamplingParams(max_tokens=12, temperature=0), ["Call me", "The sea"]
    said = []
    for model in (tmp_path / "demo.gguf", plain):
        with LLM(model, device="cpu", dtype="float32", kv_memory=1 << 22) as llm:
            said.append([one.outputs[0].text for one in llm.generate(texts, greedy)])
            said[-1].append(llm.chat([{"role": "user", "content": "Who are you?"}], greedy)[0].outputs[0].text)
            if model is not plain:
                assert "weights" in llm._manager.engine.plan.describe() and llm._manager.engine.plan.stored_as == "gguf"
    assert said[0] == said[1]


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", lambda name, shape: "Q8_0")
    one = read_gguf(tmp_path / "m.gguf").tensors["blk.1.ffn_up.weight"]
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[one.offset : one.offset + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has scales that are not finite"):
        load_model(opened(tmp_path / "m.gguf"), CPU, torch.float32, pack=True)


def test_nothing_is_read_for_the_sizes(tmp_path: Path) -> None:
    """The header alone tells the names, shapes and bytes."""
    write_model(tiny("qwen3_moe", **MOE), tmp_path / "m.gguf", mixed)
    file = read_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"")  # the header is kept, and its tensors are gone
    stored, tensors = read_weights(file, "BF16")
    assert len({one.name for one in tensors}) == len(tensors) and stored.keys() <= {one.name for one in tensors}
