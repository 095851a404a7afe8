"""Tiny random models of many families, made so that a fault in attention shows: `tiny("llama")`.

Weights are scaled so that what a token attends to decides what comes next; norms, biases and sinks are random too, and
no token ends a text. The same call gives the same weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB = 160

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_GQA = {**_BASE, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FOUR = {**_GQA, "num_hidden_layers": 4, "head_dim": 16}

# Latent attention, K wider than V; a layer without experts, and layers with.
_LATENT = {
    **_BASE, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 6,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": _ROPE,
}  # fmt: skip

_ENDLESS = {"eos_token_id": None, "bos_token_id": None}

# What engines are tested with: together they have all that attention can be asked for.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 16},
    "mistral": {**_GQA, "sliding_window": 7},
    "gemma2": {**_FOUR, "query_pre_attn_scalar": 12, "sliding_window": 9, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**_FOUR, "sliding_window": 6, "sliding_window_pattern": 3},
    "phi3": {**_GQA, "pad_token_id": 0},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512, "tie_word_embeddings": False},
    "opt": {**_BASE, "ffn_dim": 64, "word_embed_proj_dim": 48, "activation_function": "gelu"},
    "gpt_neox": _BASE,
    "mixtral": {**_GQA, **_EXPERTS},
    "gpt_oss": {**_FOUR, **_EXPERTS, "sliding_window": 8, "rope_parameters": _ROPE},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24},
}


def tiny(family: str, *, seed: int = 0, **over: Any) -> PreTrainedModel:
    """A random float32 model in eval mode. `over` goes on top of the family's configuration.

    `family` is a name in FAMILIES, or any model type that transformers knows, with its whole configuration in `over`.
    """
    config = AutoConfig.for_model(family, **{**_ENDLESS, **FAMILIES.get(family, {}), **over})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights under which attention matters and the likeliest token is clearly so."""
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(path, recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:  # norms, biases, sinks: around what they were
                parameter += 0.3 * noise
            elif isinstance(module, torch.nn.Embedding):
                parameter.copy_(0.5 * noise)
            else:
                inputs = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                parameter.copy_(noise * (_gain(leaf) / math.sqrt(inputs)))


def _gain(name: str) -> float:
    """How much larger than its input a layer's output is, about."""
    if any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "q_b_proj", "kv_b_proj")):
        return 2.0
    if any(part in name for part in ("v_proj", "o_proj", "out_proj", "attn.c_proj", "attention.dense")):
        return 1.5
    return 3.0 if any(part in name for part in ("lm_head", "embed_out")) else 0.7


def perplexity(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """Of some texts, given as token ids."""
    losses, count = 0.0, 0
    with torch.inference_mode():
        for ids in map(torch.tensor, texts):
            logits = model(ids[None]).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return math.exp(losses / count)


def attention_matters(model: PreTrainedModel, input_ids: torch.Tensor) -> float:
    """The share of greedy tokens [T] that change when every attention layer's output is zero."""
    with torch.inference_mode():
        before = model(input_ids=input_ids[None], use_cache=False).logits[0].argmax(-1)
        hooks = [m.register_forward_hook(_zero) for m in model.modules() if type(m).__name__.endswith("Attention")]
        after = model(input_ids=input_ids[None], use_cache=False).logits[0].argmax(-1)
        for hook in hooks:
            hook.remove()
    assert hooks
    return float((before != after).float().mean())


def _zero(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def to_pytorch(folder: Path) -> None:
    """Turn a folder's safetensors into PyTorch's own files."""
    for file in folder.glob("*.safetensors"):
        name = file.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(load_file(file), folder / name)
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()
