"""Shapes from real configs against what real models hand over: tiny ones with random weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, FalconConfig, FalconForCausalLM, Gemma3Config

from pagetide.cache.geometry import Geometry, LayerShape, layer_shapes

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TWO_TYPES = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
FEW_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
OLD = {"num_key_value_heads": None, "head_dim": None}  # families from before grouped queries do not know these


LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32}
SHARING = TWO_TYPES | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": None},
    "qwen3": {},
    "gemma3_text": TWO_TYPES,
    "gpt2": OLD,
    "gpt_bigcode": OLD | {"multi_query": True},
    "opt": OLD | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "gpt_neox": OLD,
    "jetmoe": FEW_EXPERTS
    | OLD
    | {"num_attention_heads": None, "num_key_value_heads": 2, "kv_channels": 8}
    | {"num_experts_per_tok": 2},
    "gpt_oss": FEW_EXPERTS | TWO_TYPES,
    "deepseek_v3": LATENT | {"first_k_dense_replace": 3},
    "minicpm3": LATENT,
    "mimo_v2_flash": TWO_TYPES | {"mlp_layer_types": ["dense"] * 4, "v_head_dim": 12},
    "gemma3n_text": SHARING
    | PER_LAYER_INPUT
    | {"num_kv_shared_layers": 3, "intermediate_size": [32] * 6, "activation_sparsity_pattern": [0.0] * 6}
    | {"laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": SHARING
    | PER_LAYER_INPUT
    | {"num_kv_shared_layers": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}


def _tiny(model_type: str) -> Any:
    wanted = {name: value for name, value in (TINY | CONFIGS[model_type]).items() if value is not None}
    return CONFIG_MAPPING[model_type](**wanted)


def _handed_over(config: Any) -> dict[int, tuple[Any, Any]]:
    """Per layer the K and V, [1, num_kv_heads, tokens, dim], that one forward pass gives the attention function."""
    seen: dict[int, tuple[Any, Any]] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        seen[module.layer_idx] = (key, value)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("pagetide_test_record", record)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="pagetide_test_record").eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 8)[None], use_cache=False)
    return seen


@pytest.mark.parametrize("model_type", CONFIGS)
def test_shapes_are_what_the_model_hands_over(model_type: str) -> None:
    config = _tiny(model_type)
    shapes, seen = layer_shapes(config, latents=False), _handed_over(config)
    assert len(seen) == len(shapes)
    for index, (key, value) in seen.items():
        shape = shapes[index]
        assert tuple(key.shape) == (1, shape.num_kv_heads, 5, shape.k_dim), index
        assert tuple(value.shape) == (1, shape.num_kv_heads, 5, shape.v_dim), index
        source = index if shape.shares is None else shape.shares
        assert key is seen[source][0]
        assert value is seen[source][1]
    assert len({id(key) for key, _ in seen.values()}) == sum(shape.shares is None for shape in shapes)


def test_the_configs_above_cover_what_differs() -> None:
    """The sizes are told apart by the tiny configs, so that a test above cannot pass by chance."""
    layers = {name: layer_shapes(_tiny(name), latents=False) for name in CONFIGS}
    shapes = {name: {(s.num_kv_heads, s.k_dim, s.v_dim) for s in of} for name, of in layers.items()}
    assert shapes["llama"] == {(2, 8, 8)}
    assert shapes["qwen3"] == {(2, 16, 16)}
    assert shapes["gpt2"] == {(4, 8, 8)}
    assert shapes["gpt_bigcode"] == {(1, 8, 8)}
    assert shapes["jetmoe"] == {(4, 8, 8)}
    assert shapes["deepseek_v3"] == {(4, 20, 10)}
    assert shapes["mimo_v2_flash"] == {(2, 16, 12), (4, 16, 12)}
    assert shapes["gemma4_text"] == {(2, 16, 16), (1, 32, 32)}
    assert [s.shares for s in layer_shapes(_tiny("gemma3n_text"))] == [None, None, None, 1, 2, 1]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_latent_attention_caches_a_head_whose_k_holds_its_v(model_type: str) -> None:
    assert set(layer_shapes(_tiny(model_type))) == {LayerShape(1, 16, 8, v_in_k=True)}


@pytest.mark.parametrize("new", [False, True])
def test_falcon_caches_what_the_geometry_says(new: bool) -> None:
    """It calls no registered attention function; its own cache shows what it would hand over."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = FalconConfig(**sizes, new_decoder_architecture=new, num_kv_heads=2 if new else None)
    with torch.inference_mode():
        cache = FalconForCausalLM(config).eval()(input_ids=torch.arange(3, 8)[None]).past_key_values
    (shape,) = layer_shapes(config)
    assert tuple(cache.layers[0].keys.shape) == (1, shape.num_kv_heads, 5, shape.k_dim)


def test_the_text_part_of_a_composite_config_is_found() -> None:
    config = Gemma3Config(text_config=_tiny("gemma3_text").to_dict())
    windows = [shape.window for shape in layer_shapes(config)]
    assert windows == [8, None] * 2
    geometry = Geometry.from_config(config, block_size=16, dtype="float32", extent_target_bytes=1 << 20)
    assert geometry.kv_bytes_per_token == 4 * 2 * 32 * 4
    assert geometry.extent_bytes == 1 << 20
