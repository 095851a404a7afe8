"""Tiny random models with other parts than text, saved as transformers saves them: `saved_multimodal("mistral3", folder)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import randomize
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from pagetide.engine.loading.text_model import making_models

VOCAB = 160
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 48}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def _with(text: dict[str, Any], vision: dict[str, Any], kind: str | None = None, **over: Any) -> dict[str, Any]:
    return {"text_config": _TEXT | text | ({"model_type": kind} if kind else {}), "vision_config": _VISION | vision, **over}


_LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_TOKENS = {"image_token_id": 151, "video_token_id": 152, "vision_start_token_id": 153, "vision_end_token_id": 154}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "mistral3": _with({}, {"model_type": "pixtral", "head_dim": 8}, "mistral", image_token_index=151),
    "qwen3_vl": _with(_MROPE, {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **_TOKENS),
    "qwen3_vl_moe": _with(
        _MROPE | _EXPERTS, {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **_TOKENS
    ),
    "qwen2_5_vl": _with(_MROPE, {**_QWEN_VISION, "fullatt_block_indexes": [1]}, **_TOKENS),
    "qwen2_vl": _with(_MROPE, {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 48}, **_TOKENS),
    "internvl": _with({}, {"image_size": [28, 28], "patch_size": [14, 14]}, "qwen2", image_token_id=151),
    "llava": _with({}, {"model_type": "clip_vision_model"}, "llama", image_token_index=151),
    "llava_onevision": _with({}, {"model_type": "siglip_vision_model"}, "qwen2", image_token_index=151),
    "gemma3": _with({"sliding_window": 6}, {}, image_token_id=151, mm_tokens_per_image=4),
    "glm4v": _with(
        {"head_dim": None, "hidden_size": 96, "rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 0.5}},
        {**_QWEN_VISION, "out_hidden_size": 96, "image_size": 28, "patch_size": 14},
    ),
    # Layers have experts for images beside those for text, of another width.
    "ernie4_5_vl_moe": _with(
        {"moe_intermediate_size": [32, 16], "moe_num_experts": 4, "moe_k": 2,
         "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [1, 1, 2]}},
        _QWEN_VISION | {"image_size": 28, "patch_size": 14},
    ),
    "granite4_vision": _with(
        {"attention_multiplier": 0.3}, {"model_type": "clip_vision_model", "hidden_size": 64}, downsample_rate="1/2",
        deepstack_layer_map=[[0, 1], [1, 2]], image_grid_pinpoints=[[28, 28]], spatial_target_layers=[0, 1, 2],
        qformer_config={"hidden_size": 64, "num_attention_heads": 4, "encoder_hidden_size": 64, "intermediate_size": 48},
    ),
    # transformers' class of its text does not know the names of its tensors.
    "emu3": {
        "text_config": _TEXT | {"bos_token_id": 1},
        "vq_config": {"codebook_size": 16, "embed_dim": 4, "base_channels": 32, "channel_multiplier": [1, 1],
                      "num_res_blocks": 1, "hidden_size": 32, "num_attention_heads": 4},
        "vocabulary_map": {"<image>": 150, "<|visual token 000000|>": 140, "<|visual token 000001|>": 141, "<|extra_200|>": 3},
    },
    "qwen2_5_omni_thinker": _with(
        _MROPE, {**_QWEN_VISION, "fullatt_block_indexes": [1]},
        audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32,
                      "output_dim": 48},
        audio_token_index=150, image_token_index=151, video_token_index=152,
    ),
    "paligemma": _with({}, {"projection_dim": 48}, "gemma", image_token_index=151),
    "idefics3": _with({}, {}, "llama", image_token_id=151),
    "kimi_k25": _with(_LATENT, {}, "deepseek_v3", image_token_id=151),
    # A decoder of Mistral 4 has the whole model's class of Mistral 3.
    "mistral4": _with(
        _LATENT | {"head_dim": 20}, {"model_type": "pixtral", "head_dim": 8}, "mistral4", image_token_index=151,
        whole="mistral3",
    ),
    "lfm2_vl": _with({"layer_types": ["full_attention", "conv", "full_attention"]}, {}, image_token_id=151),
    "gemma3n": {
        "text_config": _TEXT | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 8, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB, "sliding_window": 6, "intermediate_size": [64] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
        },
        "vision_config": {"hidden_size": 32, "vocab_size": 8, "vocab_offset": VOCAB},
        "audio_config": {"hidden_size": 32, "vocab_size": 8, "vocab_offset": VOCAB + 8, "conf_num_hidden_layers": 1,
                         "conf_num_attention_heads": 4},
    },
}  # fmt: skip


def saved_multimodal(kind: str, folder: Path, **over: Any) -> PreTrainedModel:
    """transformers' whole float32 model of this type, whose weights are in `folder`. `over` goes on top of the text's sizes.

    Parts that need a library which is not installed are left out.
    """
    values = {"whole": kind, **MULTIMODAL[kind]}
    config = AutoConfig.for_model(values.pop("whole"), **{**values, "text_config": values["text_config"] | over})
    with making_models():
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, 0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().requires_grad_(False).save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt of text, each by a forward pass of the whole model over all of it."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(prompt) :]
