"""Checkpoints in published quantized formats compute what their formats stand for, packed and not."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
import stored_weights as made
import torch
from engines import plain, prompts
from families import VOCAB, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagetide import LLM, SamplingParams, native
from pagetide.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from pagetide.engine.layers.linears import NativeLinear
from pagetide.engine.layers.packed_experts import PackedExperts
from pagetide.engine.loading import stored_model, tensor_files
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import ModelSpec
from pagetide.engine.loading.packed_model import loading_bytes
from pagetide.engine.loading.stored_model import stored_bytes

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing stays packed")
MIB = 1 << 20


def of_compressed(kind: str = "int", bits: int = 4, group: int = 0, symmetric: bool = True, **more) -> dict:
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group or None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def of_gptq(bits: int = 4, group: int = 16, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}

FORMATS = {
    "int4 in groups": ("llama", of_compressed(group=16), made.compressed(4, 16, True)),
    "int4 by channel with zero points": ("qwen2", of_compressed(symmetric=False), made.compressed(4, 0, False)),
    "int4 in groups with zero points": ("llama", of_compressed(group=24, symmetric=False), made.compressed(4, 24, False)),
    "int4 in groups out of order": (
        "llama", of_compressed(group=16, actorder="group"), made.compressed(4, 16, True, act_order=True),
    ),
    "int8 in groups": ("llama", of_compressed(bits=8, group=16), made.compressed(8, 16, True, dtype=torch.float16)),
    "int8 in groups with zero points": ("llama", of_compressed(bits=8, group=8, symmetric=False), made.compressed(8, 8, False)),
    "int8 in bytes": ("llama", of_compressed(bits=8), made.int_quantized()),
    "int8 in bytes with zero points": ("llama", of_compressed(bits=8, symmetric=False), made.int_quantized(False)),
    "fp8 by tensor": ("qwen3", of_compressed("float", 8, strategy="tensor"), made.float_quantized(0, 0)),
    "fp8 by channel": ("llama", of_compressed("float", 8), made.float_quantized(1, 0, dtype=torch.bfloat16)),
    "fp8 in blocks": ("llama", FP8, made.float_quantized(32, 16, "weight_scale_inv")),
    "fp8 without blocks": ("llama", {"quant_method": "fp8"}, made.float_quantized(0, 0)),
    "GPTQ": ("qwen3", of_gptq(), made.gptq(4, 16, True)),
    "GPTQ by channel": ("llama", of_gptq(group=0), made.gptq(4, 0, True)),
    "GPTQ of 8 bits": ("llama", of_gptq(8), made.gptq(8, 16, False)),
    "GPTQ with zero points": ("llama", of_gptq(checkpoint_format="gptq"), made.gptq(4, 16, False)),
    "GPTQ of the second version": ("llama", of_gptq(checkpoint_format="gptq_v2"), made.gptq(4, 16, False, less=0)),
    "GPTQ out of order": ("llama", of_gptq(desc_act=True), made.gptq(4, 16, False, act_order=True)),
    "AWQ": ("qwen3", AWQ, made.awq(16)),
}  # fmt: skip


@pytest.fixture
def counted_reads(monkeypatch) -> dict[str, int]:
    """How often each tensor of a file was taken."""
    counts: dict[str, int] = {}
    original = tensor_files.TensorFiles.__getitem__

    def counting(self, name):
        counts[name] = counts.get(name, 0) + 1
        return original(self, name)

    monkeypatch.setattr(tensor_files.TensorFiles, "__getitem__", counting)
    return counts


def opened(folder: Path) -> Checkpoint:
    return Checkpoint.open(ModelSpec(folder.name, folder, "a test"))


def oracle(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def check(folder: Path, plain_folder: Path) -> None:
    """The tokens of the folder's engine, and logits both ways, are those of transformers over plain weights."""
    right, inputs = oracle(plain_folder), prompts([3, 17, 40], VOCAB)
    expected = plain(right, inputs, 8)
    with LLM(folder, device="cpu", dtype="float32", kv_memory=MIB) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in outputs] == expected
    checkpoint, ids = opened(folder), torch.tensor([inputs[2]])
    with torch.inference_mode():
        logits = right(ids).logits
        for pack in (True, False):
            model = load_model(checkpoint, CPU, torch.float32, pack=pack)
            out = model(ids).logits
            assert (out - logits).norm() <= (1e-5 if pack else 1e-7) * logits.norm(), pack


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_computes_what_the_format_stands_for(name: str, tmp_path: Path) -> None:
    family, config, packer = FORMATS[name]
    plain_folder = made.checkpoint(tiny(family), tmp_path / "packed", config, packer)
    check(tmp_path / "packed", plain_folder)


# --- mixtures of experts ---


def packed_experts(folder: Path) -> int:
    """How many experts modules of the loaded model are packed."""
    model = load_model(opened(folder), CPU, torch.float32, pack=True)
    return sum(isinstance(one, PackedExperts) for one in model.modules())


@needs_native
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_that_are_stored_one_by_one(family: str, tmp_path: Path) -> None:
    """transformers joins them as it reads; the latent projection of the last family keeps plain weights."""
    more = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
                num_key_value_heads=2, moe_intermediate_size=40, num_experts=4, num_experts_per_tok=2, head_dim=16,
                norm_topk_prob=True) if family == "qwen3_moe" else {"v_head_dim": 12} if family == "deepseek_v3" else {}  # fmt: skip
    model = tiny(family, **more)
    plain_folder = made.checkpoint(model, tmp_path / "packed", of_gptq(desc_act=True), made.gptq(4, 8, False))
    check(tmp_path / "packed", plain_folder)
    assert packed_experts(tmp_path / "packed") == {"mixtral": 3, "qwen3_moe": 2, "deepseek_v3": 2}[family]


def gpt_oss(folder: Path) -> Path:
    """As its checkpoints are: experts in MXFP4, everything else in floating point. Returns the plain folder."""
    model = tiny("gpt_oss", hidden_size=64)
    plain_folder = folder.parent / "plain"
    model.save_pretrained(folder)
    model.save_pretrained(plain_folder)
    stored, values = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(values.items()):
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        parts = [made.mxfp4(expert.T) for expert in tensor]
        stored[f"{name}_blocks"], stored[f"{name}_scales"], value = (torch.stack(part) for part in zip(*parts, strict=True))
        values[name] = value.transpose(1, 2).contiguous()
    made.write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    save_file(values, plain_folder / "model.safetensors", {"format": "pt"})
    return plain_folder


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    check(tmp_path / "packed", gpt_oss(tmp_path / "packed"))
    assert packed_experts(tmp_path / "packed") == (4 if native.instructions() else 0)
