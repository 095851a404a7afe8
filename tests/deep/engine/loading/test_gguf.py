"""GGUF files of further families, by the public writer, and with mutations of their headers."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, tiny
from gguf_files import TYPES, dequantize, quantize, write_model
from stored_checkpoints import check_logits, check_tokens, opened

from pagetide import native
from pagetide.engine.errors import EngineError
from pagetide.engine.layers.packed_experts import PackedExperts
from pagetide.engine.loading.gguf.file import read_gguf
from pagetide.engine.loading.loader import load_model

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
FLAT = {
    "vocab_size": VOCAB,
    **SIZES,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "mistral": {**SIZES, "sliding_window": None},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen2_moe": {**FLAT, **EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**FLAT, **EXPERTS, "norm_topk_prob": True},
    "gemma": FLAT,
    "gemma2": {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "phi3": SIZES,
    "gpt_oss": {**SIZES, "head_dim": 32, "rope_parameters": YARN},
}


def in_turns(name: str, shape: tuple[int, ...]) -> str:
    turns = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0", "Q5_0", "F16", "BF16")
    if name.endswith(("gate_exps.weight", "up_exps.weight")):  # of gpt-oss they have one type
        return "Q4_K"
    return "Q8_0" if shape[-1] % 256 else turns[sum(map(ord, name)) % len(turns)]


def experts_in_mxfp4(name: str, shape: tuple[int, ...]) -> str:
    return "MXFP4" if "_exps" in name else in_turns(name, shape)


@pytest.mark.parametrize("family", MODELS)
def test_logits_of_each_family(family: str, tmp_path: Path) -> None:
    plain = write_model(tiny(family, **MODELS[family]), tmp_path / "m.gguf", in_turns)
    check_logits(tmp_path / "m.gguf", plain)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Gate and up, which the converter takes apart, are in turns again, and stay packed in MXFP4."""
    plain = write_model(tiny("gpt_oss", **MODELS["gpt_oss"]), tmp_path / "m.gguf", experts_in_mxfp4)
    check_logits(tmp_path / "m.gguf", plain)
    if native.instructions() is not None:
        model = load_model(opened(tmp_path / "m.gguf"), torch.device("cpu"), torch.float32, pack=True)
        assert sum(isinstance(one, PackedExperts) for one in model.modules()) == 4


@pytest.mark.parametrize("kind", [kind for kind, (_, block, _) in TYPES.items() if block > 1 and kind != "MXFP4"])
def test_tokens_of_each_type(kind: str, tmp_path: Path) -> None:
    plain = write_model(tiny("llama", **SIZES), tmp_path / "m.gguf", lambda name, shape: kind)
    check_tokens(tmp_path / "m.gguf", plain)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "gpt_oss", "gemma2"])
def test_tokens_of_mixtures(family: str, tmp_path: Path) -> None:
    plain = write_model(tiny(family, **MODELS[family]), tmp_path / "m.gguf", in_turns)
    check_tokens(tmp_path / "m.gguf", plain)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_those_of_the_public_package(kind: str) -> None:
    """The oracle of the other tests decodes, and where that package quantizes, we read what it writes."""
    gguf = pytest.importorskip("gguf")
    number, data = gguf.GGMLQuantizationType(TYPES[kind][0]), np.random.default_rng(2).normal(size=(24, 512)).astype(np.float32)
    assert np.array_equal(gguf.quants.dequantize(quantize(data, kind), number), dequantize(quantize(data, kind), kind))
    try:
        blocks = gguf.quants.quantize(data, number)
    except NotImplementedError:  # K-quants
        return
    assert np.array_equal(dequantize(blocks.view(np.uint8).reshape(24, -1), kind), gguf.quants.dequantize(blocks, number))


def test_a_file_of_the_public_writer(tmp_path: Path) -> None:
    """Its header, alignment and types, over the tensors of one of ours."""
    gguf = pytest.importorskip("gguf")
    plain = write_model(tiny("qwen3", **SIZES, head_dim=32), tmp_path / "ours.gguf", in_turns)
    ours, content = read_gguf(tmp_path / "ours.gguf"), (tmp_path / "ours.gguf").read_bytes()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for key, value in ours.metadata.items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    for name, one in ours.tensors.items():
        data = np.frombuffer(content, np.uint8, one.num_bytes, one.offset)
        kind = gguf.GGMLQuantizationType(TYPES[one.type][0])
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(name, data.view(np.float32 if one.type == "F32" else np.float16).reshape(one.shape))
        else:
            writer.add_tensor(name, data.reshape(*one.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_logits(tmp_path / "m.gguf", plain)


def test_mutations_are_refused_or_change_nothing(tmp_path: Path) -> None:
    """A header with something else in one to three places is refused by an error of the engine's, or is a model that loads."""
    write_model(tiny("llama", num_hidden_layers=1, **SIZES), tmp_path / "m.gguf", in_turns)
    content, rng, loads = (tmp_path / "m.gguf").read_bytes(), random.Random(7), 0
    header = min(one.offset for one in read_gguf(tmp_path / "m.gguf").tensors.values())
    for i in range(3000):
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(4, header - 8)
            number = rng.choice([0, 1, 2, 255, 1 << 16, 1 << 20, 1 << 33, 1 << 62, (1 << 64) - 1])
            new = rng.choice([bytes([rng.randrange(256)]), struct.pack("<Q", number), struct.pack("<I", number & 0xFFFFFFFF)])
            changed[at : at + len(new)] = new
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(changed[: rng.choice([len(changed), len(changed), header, rng.randrange(len(changed))])])
        try:
            found = opened(path)
            loads += 1
            if loads % 20 == 1:
                load_model(found, torch.device("cpu"), torch.float32, pack=True)
        except EngineError:
            continue
        finally:
            path.unlink()
    assert loads


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_engine_over_two_devices(family: str, tmp_path: Path) -> None:
    """The inputs of two super groups of each layer that is cut there."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "head_dim": 32,
    }
    plain = write_model(tiny(family, **{**MODELS[family], **sizes}), tmp_path / "m.gguf", in_turns)
    check_tokens(tmp_path / "m.gguf", plain, device="cpu", tensor_parallel_size=2)
