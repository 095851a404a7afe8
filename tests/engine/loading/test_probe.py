"""The probe: what it lets through is right, and what it refuses it names."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, VOCAB, tiny
from paged_driver import PagedDriver, eager_logits
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.engine.attention.latent import attend_to_latents
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.loading.probe import probe

SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
GATED = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
HALF_SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}

# Beyond FAMILIES, each for something of its own.
ALSO_SERVED = {
    "stablelm": GATED,  # swallows the step keyword: the context variable
    "granite": {**GATED, "attention_multiplier": 0.3, "logits_scaling": 1.0},
    "gpt_bigcode": {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512},  # one KV head
    "gemma4_text": {  # layers that read other layers' K and V, and heads of two sizes
        **GATED, **HALF_SHARED, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "sliding_window": 6,
    },
    "gemma4_unified": {  # a mask made of the blocks of the prompt's tokens, which are images or none
        "text_config": {
            **GATED, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8,
            "global_head_dim": 16, "num_global_key_value_heads": 2, "sliding_window": 6,
            "use_bidirectional_attention": "vision",
        },
    },
    "mimo_v2_flash": {  # layers with other numbers of KV heads, sinks, K wider than V
        **GATED, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 16, "v_head_dim": 8, "sliding_window": 6,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip

NEVER_CALLS = "never calls transformers' attention interface"
PLAIN_HEADS = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 8}
CHUNKED = {**GATED, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}

BART = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
BART |= {f"{part}_attention_heads": 6 for part in ("encoder", "decoder")}

REFUSED = {
    "gptj": (PLAIN_HEADS, NEVER_CALLS),
    "diffllama": (GATED, "layer 0 calls 2 times"),
    "doge": (GATED, "layer 0 .DogeAttention. makes an attention mask of its own"),
    "llama4_text": ({**CHUNKED, "attention_chunk_size": 63}, "does not let token 63 see token 62.* up to 63 tokens"),
    "bert": ({**SMALL, "intermediate_size": 64}, "layer 0 .BertSelfAttention. lets a token see later ones"),
    # Its decoder alone, which counts positions by itself; masks that are None are seen on the way.
    "bart": ({"vocab_size": VOCAB, "d_model": 48, **BART}, "the logits of .* differ .* ignores position_ids"),
    # State besides K and V. Their geometry is refused before anyone gets here, so the probe is told a wrong one.
    "mamba": ({"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}, NEVER_CALLS),
    "lfm2": ({**GATED, "layer_types": ["full_attention", "conv", "full_attention"]}, "layer 1 .of type 'conv'. never calls"),
}


def geometry_of(model, **over) -> Geometry:
    geometry = Geometry.from_config(model.config, **{"block_size": 16, "dtype": "float32", **over})
    attend_to_latents(model, geometry)
    return geometry


def refusal(model, geometry: Geometry, **over) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        probe(model, geometry, **over)
    return caught.value.reason


def test_what_passes_gives_the_logits_of_the_plain_model() -> None:
    tokens = torch.randint(4, VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    for family in (*FAMILIES, *ALSO_SERVED):
        model = tiny(family, **ALSO_SERVED.get(family, {}))
        probe(model, geometry_of(model))
        found = PagedDriver(model, 16, 29).logits([tokens, tokens[30:]])
        for one, seen in zip((tokens, tokens[30:]), found, strict=True):
            right = eager_logits(model, one)
            assert (seen - right).norm() < 1e-4 * right.norm(), family


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_reason_to_refuse(dtype: str) -> None:
    for family in ("llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"):
        model = tiny(family).to(getattr(torch, dtype))
        probe(model, geometry_of(model, dtype=dtype))


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_is_named_with_its_reason(family: str) -> None:
    config, why = REFUSED[family]
    model = tiny(family, **config)
    try:
        geometry = geometry_of(model)
    except ValueError:
        geometry = Geometry((LayerShape(2, 8, 8),) * model.config.num_hidden_layers, 16, "float32")
    reason = refusal(model, geometry)
    assert family in reason and type(model).__name__ in reason and "transformers' generate" in reason
    assert re.search(why, reason)


def test_encoder_decoders_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    assert "encoder-decoder" in refusal(model, Geometry((LayerShape(2, 8, 8),), 16, "float32"))


def test_a_chunked_mask_of_whole_blocks_is_computed_and_another_is_no_matter_below_a_chunk() -> None:
    whole = tiny("llama4_text", **CHUNKED, attention_chunk_size=64)
    probe(whole, geometry_of(whole))
    model = tiny("llama4_text", **CHUNKED, attention_chunk_size=63)
    probe(model, geometry_of(model), max_length=63)
    assert "sliding_window keyword is None" in refusal(model, geometry_of(model), max_length=64)


# Queries scaled by their place in the batch; rotations that follow the longest sequence, with 8 / 2 factors.
SCALED = {**CHUNKED, "max_position_embeddings": 8192, "attention_chunk_size": 8192, "floor_scale": 128}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = {"rope_parameters": ROPE | {"original_max_position_embeddings": 128}, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("family", "config"), [("llama4_text", SCALED), ("phi3", LONG)])
def test_what_is_right_up_to_a_length_is_refused_beyond_it(family: str, config: dict[str, object]) -> None:
    model = tiny(family, **config)
    probe(model, geometry_of(model), max_length=128)
    assert "set max_model_len to at most 128" in refusal(model, geometry_of(model))


def test_a_window_that_only_the_mask_knows_is_seen_at_any_length() -> None:
    model = tiny("mistral", sliding_window=300)  # far beyond the tokens of a probe
    probe(model, geometry_of(model))
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
    for window, said in ((299, "has a mask that lets token"), (None, "has a mask that does not let token")):
        for layer in model.model.layers:
            layer.self_attn.config.sliding_window = window  # the layers' keyword; the mask's stays
        reason = refusal(model, geometry_of(model))
        assert said in reason and f"sliding_window keyword is {window}" in reason


def test_another_geometry_than_the_models_is_refused() -> None:
    model = tiny("llama")
    layers = geometry_of(model).layers
    wrong = Geometry((*layers[:-1], LayerShape(6, 8, 8)), 16, "float32")
    assert "layer 2 (LlamaAttention) attends over K and V of shapes (1, 2, 19, 8)" in refusal(model, wrong)
    assert "of 2" in refusal(model, Geometry(layers[:2], 16, "float32"))
    longer = Geometry((*layers, layers[0]), 16, "float32")
    assert "layer 3 never calls" in refusal(model, longer)


def test_a_wrong_kernel_is_refused() -> None:
    class Forgetful(TorchKernel):
        def attend(self, call):
            return super().attend(replace(call, scaling=1.1 * call.scaling))

    model = tiny("llama")
    assert "differ from those of a plain forward pass" in refusal(model, geometry_of(model), kernel=Forgetful())


def test_a_model_that_ignores_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    real = model.transformer.wpe.forward
    monkeypatch.setattr(model.transformer.wpe, "forward", lambda ids: real(torch.arange(ids.shape[-1])[None]))
    reason = refusal(model, geometry_of(model))
    assert "decoded tokens" in reason and "ignores position_ids" in reason


def test_everything_is_left_as_it_was() -> None:
    model = tiny("llama")
    registries = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    probe(model, geometry_of(model))
    before = [dict(r) for r in registries]
    for implementation in ("sdpa", "eager", "pagetide"):
        model.set_attn_implementation(implementation)
        probe(model, geometry_of(model))
        assert model.config._attn_implementation == implementation
        refusal(model, Geometry(geometry_of(model).layers[:2], 16, "float32"))
        assert model.config._attn_implementation == implementation
    assert [dict(r) for r in registries] == before
