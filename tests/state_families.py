"""Tiny random models with recurrent and convolution states, for `families.tiny`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from families import VOCAB, tiny
from transformers import PreTrainedModel

import pagetide.engine.demo_model as demo_model

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_GATED = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LATENT = {
    "layer_types": _GATED["layer_types"], "linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 4,
    "moe_intermediate_size": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
_ALONE = {"vocab_size": VOCAB, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0, "tie_word_embeddings": False}

STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_BASE, **_GATED},
    "qwen3_5_moe_text": {**_BASE, **_GATED, **_EXPERTS},
    "qwen3_next": {**_BASE, **_GATED, **_EXPERTS},
    "olmo_hybrid": {**_BASE, **_GATED},
    "lfm2": {**_BASE, "layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_BASE, **_EXPERTS, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
    },
    "falcon_h1": {**_BASE, **_SCAN, "mamba_d_ssm": 128},
    "bamba": {**_BASE, **_SCAN, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_BASE, **_SCAN, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        **_BASE, "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 16,
    },
    "minimax": {**_BASE, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, "block_size": 8},
    "zaya": {
        **_BASE, "layer_types": ["hybrid"] * 4, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
        "router_hidden_size": 16,
    },
    "kimi_linear": {**_BASE, **_LATENT, "num_experts_per_token": 2},
    "bailing_hybrid": {**_BASE, **_LATENT, "num_experts_per_tok": 2, "num_expert_group": 2, "topk_group": 1},
    "mamba2": {**_ALONE, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    # A chunk that continues a sequence begins without its state in transformers: these are computed token by token.
    "mamba": {**_ALONE, "hidden_size": 48},
    "falcon_mamba": {**_ALONE, "hidden_size": 48},
    "jamba": {
        **_BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8, "num_experts": 4, "use_mamba_kernels": False,
    },
}  # fmt: skip
ONE_BY_ONE = frozenset({"mamba", "falcon_mamba", "jamba"})


def tiny_with_states(family: str, **over: Any) -> PreTrainedModel:
    """A random float32 model of one of STATE_FAMILIES: the same for each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # decays and time steps begin with random values
        return tiny(family, **{**STATE_FAMILIES[family], **over})


def save_with_words(folder: Path, family: str) -> None:
    """Save a model with the vocabulary and the tokenizer of the bundled one."""
    tiny_with_states(family, vocab_size=4096).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model.__file__).with_name(name), folder)
