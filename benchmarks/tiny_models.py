"""A tiny random model of any causal language model type of transformers: default configuration, small sizes.

Sizes are set by the names that configurations have for them, in nested configurations too. Types that need more than
small sizes are in SPECIAL.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 160
LAYERS = 4
MOST_PARAMETERS = 20_000_000

HIDDEN = dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "dim", "embedding_size", "n_embed"), 48)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 6
)
SIZES: dict[str, int] = {
    **HIDDEN,
    **HEADS,
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "o_lora_rank"), 16
    ),
    "q_lora_rank": 32,
    "n_group": 2,
    "topk_group": 1,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "rotary_dim": 8,
    "sliding_window": 9,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 16}
# Beyond small sizes; None removes a size.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "codegen": {"n_head": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "helium": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "full_attention"]},
    "dots3_note_text": {"per_layer_config": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granitemoehybrid": _MAMBA,
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [16, 32]},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: {"head_dim": 16, "global_head_dim": 32} for name in ("gemma4_text", "gemma4_unified_text")},
}


class CannotBeTiny(Exception):
    """No tiny model of this type could be made; says why."""


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model in eval mode that never ends a text. Raises CannotBeTiny."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if parameters > MOST_PARAMETERS:
            raise CannotBeTiny(f"{parameters:,} parameters remain")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    except CannotBeTiny:
        raise
    except Exception as error:
        raise CannotBeTiny(f"{type(error).__name__}: {error}") from error
    randomize(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default configuration of a model type with small sizes."""
    kind = CONFIG_MAPPING[model_type]
    values = {**small(kind()), **SPECIAL.get(model_type, {})}
    return kind(**{name: value for name, value in values.items() if value is not None})


def small(config: PreTrainedConfig) -> dict[str, Any]:
    """The sizes that a configuration has, made small."""
    given = config.to_dict()
    values: dict[str, Any] = {name: value for name, value in SIZES.items() if given.get(name) is not None}
    values |= {name: small(getattr(config, name)) for name in config.sub_configs if getattr(config, name, None)}
    if "kv_lora_rank" in values:  # latent attention: every head has keys of its own
        values |= {"num_key_value_heads": 6} if "num_key_value_heads" in values else {}
    if hasattr(config, "pad_token_id"):
        values["pad_token_id"] = 0
    if getattr(config, "is_decoder", None) is False:
        values["is_decoder"] = True
    return values


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights under which attention matters and the likeliest token is clearly so."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter += 0.3 * noise
        else:
            parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[-1])))
