"""Tiny checkpoints in every quantized format that is read, and their comparison with transformers over plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engines import plain, prompts
from families import VOCAB, tiny
from transformers import AutoModelForCausalLM

from benchmarks.stored_weights import awq, compressed, experts_checkpoint, float_quantized, gptq, int_quantized, mxfp4_packed
from pagetide import LLM, SamplingParams
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import ModelSpec


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
    "int4 in groups": ("llama", of_compressed(group=16), compressed(4, 16, True)),
    "int4 by channel with zero points": ("qwen2", of_compressed(symmetric=False), compressed(4, 0, False)),
    "int4 in groups with zero points": ("llama", of_compressed(group=24, symmetric=False), compressed(4, 24, False)),
    "int4 in groups out of order": (
        "llama", of_compressed(group=16, actorder="group"), compressed(4, 16, True, act_order=True),
    ),
    "int8 in groups": ("llama", of_compressed(bits=8, group=16), compressed(8, 16, True, dtype=torch.float16)),
    "int8 in groups with zero points": ("llama", of_compressed(bits=8, group=8, symmetric=False), compressed(8, 8, False)),
    "int8 in bytes": ("llama", of_compressed(bits=8), int_quantized()),
    "int8 in bytes with zero points": ("llama", of_compressed(bits=8, symmetric=False), int_quantized(False)),
    "fp8 by tensor": ("qwen3", of_compressed("float", 8, strategy="tensor"), float_quantized(0, 0)),
    "fp8 by channel": ("llama", of_compressed("float", 8), float_quantized(1, 0, dtype=torch.bfloat16)),
    "fp8 in blocks": ("llama", FP8, float_quantized(32, 16, "weight_scale_inv")),
    "fp8 in blocks with exponents": ("llama", FP8, float_quantized(32, 16, "weight_scale_inv", exponents=True)),
    "MXFP8 in groups": ("llama", of_compressed("float", 8, 32), float_quantized(1, 32, exponents=True)),
    "fp8 without blocks": ("llama", {"quant_method": "fp8"}, float_quantized(0, 0)),
    "MXFP4 in groups": ("llama", of_compressed("float", 4, 32), mxfp4_packed()),
    "GPTQ": ("qwen3", of_gptq(), gptq(4, 16, True)),
    "GPTQ by channel": ("llama", of_gptq(group=0), gptq(4, 0, True)),
    "GPTQ of 8 bits": ("llama", of_gptq(8), gptq(8, 16, False)),
    "GPTQ with zero points": ("llama", of_gptq(checkpoint_format="gptq"), gptq(4, 16, False)),
    "GPTQ of the second version": ("llama", of_gptq(checkpoint_format="gptq_v2"), gptq(4, 16, False, less=0)),
    "GPTQ out of order": ("llama", of_gptq(desc_act=True), gptq(4, 16, False, act_order=True)),
    "AWQ": ("qwen3", AWQ, awq(16)),
}  # fmt: skip


def small(name: str, **more) -> Any:
    """A model with layers that the packer of this format takes."""
    return tiny(FORMATS[name][0], **({"hidden_size": 96} if "MXFP4" in name else {}), **more)


def gpt_oss(folder: Path) -> Path:
    """As its checkpoints are: experts in MXFP4, everything else in floating point. Returns the plain folder."""
    return experts_checkpoint(tiny("gpt_oss", hidden_size=64), folder)


def oracle(folder: Path) -> Any:
    """transformers' model of a plain folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def opened(folder: Path) -> Checkpoint:
    """The checkpoint of a folder."""
    return Checkpoint.open(ModelSpec(folder.name, folder, "a test"))


def check_logits(folder: Path, plain_folder: Path) -> None:
    """The logits of the folder's model, packed and not, are those of transformers over plain weights."""
    ids = torch.tensor(prompts([40], VOCAB))
    with torch.inference_mode():
        right = oracle(plain_folder)(ids).logits
        for pack in (True, False):
            out = load_model(opened(folder), torch.device("cpu"), torch.float32, pack=pack)(ids).logits
            assert (out - right).norm() <= (1e-5 if pack else 1e-7) * right.norm(), pack


def check_tokens(folder: Path, plain_folder: Path, **options: Any) -> None:
    """The tokens of the folder's engine are those of transformers over plain weights."""
    inputs = prompts([3, 17, 40], VOCAB)
    expected = plain(oracle(plain_folder), inputs, 8)
    options = options or {"device": "cpu"}
    with LLM(folder, dtype="float32", kv_memory=1 << 20, **options) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in outputs] == expected
