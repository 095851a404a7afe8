"""The plan of a configuration alone, against the plan of the model that transformers makes of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pagetide.cache.geometry import layer_shapes
from pagetide.common.units import GIB, MIB, format_bytes
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError, NotEnoughMemory, UnsupportedModel
from pagetide.engine.loading.meta_models import outlined
from pagetide.engine.loading.models import IN_CACHE, ModelSpec
from pagetide.engine.loading.quantized_model import quantized_bytes
from pagetide.engine.loading.written_model import FAMILIES, WrittenModel
from pagetide.engine.memory.estimate import CARDS, CONTEXT_BYTES, TABLE_GIB, card_bytes, estimate, plan_device
from pagetide.engine.memory.planning import outlined_model

SIZES = {
    "hidden_size": 480, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 20, "vocab_size": 1000,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 160, "num_experts": 8, "num_experts_per_tok": 2}
LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
# What else the least configuration of a family has; all other fields have transformers' defaults.
LEAST: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 200},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | {"shared_expert_intermediate_size": 200},
    "qwen3_5_moe_text": EXPERTS | {"shared_expert_intermediate_size": 200},
    "glm4_moe": LATENT,
    "glm4_moe_lite": LATENT,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
# Types without a causal language model of their own in transformers: parts of larger models.
OF_LARGER = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 48, "torch_dtype": "bfloat16",
               "rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 2, "head_dim": 64, "dtype": "float16"}),
    ("mistral", {"sliding_window": 64, "max_position_embeddings": 512}),
    ("mixtral", {"num_local_experts": 4, "sliding_window": 64, "num_key_value_heads": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 200, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 2048, "use_sliding_window": False, "sliding_window": 64}),
    ("qwen3_moe", EXPERTS | {"head_dim": 64, "mlp_only_layers": [0], "num_key_value_heads": 2}),
    ("gemma3_text", {"num_hidden_layers": 8, "sliding_window": 32, "num_key_value_heads": 1,
                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 2048}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 32}),
    ("gemma4_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "num_global_key_value_heads": 1}),
    ("gemma4_text", EXPERTS | {"enable_moe_block": True, "top_k_experts": 6, "hidden_size_per_layer_input": 0,
                               "attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_hidden_layers": 6}),
    ("qwen3_next", EXPERTS | {"shared_expert_intermediate_size": 200, "mlp_only_layers": [1], "full_attention_interval": 2,
                              "linear_num_value_heads": 48, "linear_key_head_dim": 64, "dtype": "bfloat16"}),
    ("phi3", {"num_key_value_heads": 4, "sliding_window": 100, "max_position_embeddings": 4096,
              "original_max_position_embeddings": 1024, "rope_scaling": {
                  "type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_scaling": YARN}),
    ("starcoder2", {"use_bias": False, "sliding_window": 64}),
    ("glm4_moe", LATENT | {"use_qk_norm": True, "n_shared_experts": 2, "attention_bias": True}),
    ("glm4_moe_lite", LATENT | {"mlp_layer_types": ["sparse", "dense"] * 2, "n_shared_experts": 2}),
    ("cohere2", {"sliding_window": 32, "sliding_window_pattern": 2, "num_key_value_heads": 4, "attention_bias": True}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 1}),
    ("deepseek_v3", LATENT | {"kv_lora_rank": 64, "attention_bias": True, "first_k_dense_replace": 1}),
]  # fmt: skip


def written(folder: Path, kind: str, fields: dict[str, Any]) -> Path:
    """The path of a `config.json` of type `kind`."""
    file = folder / "config.json"
    file.write_text(json.dumps({**SIZES, "model_type": kind, **fields}))
    return file


def settled(file: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.resolve(ModelSpec("tiny", file.parent, "a test"), device="cuda", **settings)


@pytest.mark.parametrize(
    ("kind", "fields"), [*((kind, LEAST.get(kind, {})) for kind in FAMILIES if kind not in OF_LARGER), *OTHERS]
)
def test_as_transformers_makes_the_model(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Weights, groups of layers, reserve, context and pool: the whole plan, number by number."""
    file = written(tmp_path, kind, fields)
    config = replace(settled(file, max_seqs=32), sleeps=True)
    made = estimate(config, file, memory_bytes=4 * GIB)
    exact = plan_only(config, has_weights=False, memory_bytes=4 * GIB - CONTEXT_BYTES)
    assert made.plan is not None
    mine, theirs = made.plan.to_dict(), exact.to_dict()
    for loose in ("device", "answers_bytes"):
        del mine[loose], theirs[loose]
    assert mine == theirs and mine["host_copy_bytes"] == made.weights_bytes
    assert made.geometry.layers == exact.geometry.layers
    checkpoint = outlined(config.model)
    for form in ("int8", "int4"):
        counted = quantized_bytes(checkpoint, form, torch.bfloat16)
        assert made.model.quantized_bytes(form, 2) == pytest.approx(counted, rel=0.001)


@pytest.mark.parametrize("kind", sorted(OF_LARGER))
def test_the_text_decoder_of_a_larger_model(kind: str, tmp_path: Path) -> None:
    """Its `text_config` alone counts, beside whatever else the configuration has; the head is tied if either part says so."""
    text = SIZES | (EXPERTS if "moe" in kind else {})
    of_whole = {"model_type": kind.removesuffix("_text"), "tie_word_embeddings": True, "vision_config": {"hidden_size": 64}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**of_whole, "text_config": {"model_type": kind, **text}}))
    model = WrittenModel.read(ModelSpec("tiny", tmp_path, "a test"), file)
    config = CONFIG_MAPPING[kind](**text)
    with torch.device("meta"):
        decoder = AutoModel.from_config(config)
    assert model.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())
    assert layer_shapes(model.text_config) == layer_shapes(config)
    differs = {**of_whole, "text_config": {"model_type": kind, "tie_word_embeddings": False, **text}}
    file.write_text(json.dumps(differs))
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings differs"):
        WrittenModel.read(ModelSpec("tiny", tmp_path, "a test"), file)


def test_a_published_configuration(tmp_path: Path) -> None:
    """Qwen3-0.6B: the number of parameters that its weight file has, and what its tokens take."""
    fields = {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    made = estimate(settled(file), file, context=4096)
    assert (made.model.num_parameters, made.weights_bytes, made.dtype) == (596_049_920, 2 * 596_049_920, "bfloat16")
    assert made.geometry.kv_bytes_per_token == 28 * 8 * 128 * 2 * 2
    assert made.sequence_bytes == 4096 * 28 * 8 * 128 * 2 * 2
    assert list(made.table) == [size * GIB for size in TABLE_GIB] and made.plan is None
    told = json.loads(json.dumps(made.to_dict()))
    fits = [row["plan"]["sequences_that_fit"] for row in told["table"]]
    assert fits == sorted(fits) and fits[0] > 1
    lines = made.describe().splitlines()
    assert lines[1].split("  ")[-1].strip() == "596,049,920, from config.json"
    assert lines[-1].split() == ["80", "GB", *format_bytes(made.table[80 * GIB].kv_bytes).split(), *lines[-1].split()[4:]]
    assert lines[-1].split()[-2] == f"{fits[-1]:,}"


def test_what_the_files_say_besides(tmp_path: Path) -> None:
    """Headers confirm the number of parameters, or a note says what else is there; stored quantization is named."""
    file = written(tmp_path, "llama", {"num_key_value_heads": 4})
    model = WrittenModel.read(ModelSpec("tiny", tmp_path, "a test"), file)
    made = estimate(settled(file), file)
    assert (made.source, made.notes) == ("config.json", ())
    cached = replace(settled(file), model=ModelSpec("org/tiny", tmp_path, IN_CACHE))
    size = format_bytes(model.num_parameters * 4)
    said = f"the weights are not here; fetch them, {size} or more, with: hf download org/tiny"
    assert estimate(cached, file).notes == (said,)
    save_file({"all": torch.zeros(model.num_parameters, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    made = estimate(settled(file), file)
    assert (made.source, made.notes) == ("the headers of its weight files", ())
    save_file({"all": torch.zeros(model.num_parameters + 7, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    made = estimate(settled(file), file)
    assert made.source == "config.json"
    assert made.notes == (
        f"the weight files have {model.num_parameters + 7:,} parameters; those of the text decoder alone count",
    )
    file = written(tmp_path, "llama", {"quantization_config": {"quant_method": "awq"}})
    size = format_bytes((tmp_path / "model.safetensors").stat().st_size)
    said = f"the weights are stored in awq, in files of {size}; here they count as bfloat16"
    assert estimate(settled(file), file).notes == (said,)


BY_CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}}
BY_GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}


@pytest.mark.parametrize(
    ("quantization", "bytes_of"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, lambda n, k: n * k / 2 + 4 * n * k / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, lambda n, k: n * k / 2 + 4 * n * k / 32),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": BY_GROUP}}, lambda n, k: n * k / 2 + 4 * n * k / 32),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": BY_CHANNEL}}, lambda n, k: n * k + 4 * n),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head", "model.visual.merger"]}, lambda n, k: n * k + 4 * n),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["mlp.down_proj"]}, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, None),
        ({"quant_method": "modelopt"}, None),
    ],
)
def test_stored_weights_that_a_card_keeps(quantization: dict[str, Any], bytes_of: Any, tmp_path: Path) -> None:
    """Linear layers in int4 and fp8 as torch's kernels take them, float16 as bfloat16; in other forms as plain numbers."""
    fields = {"quantization_config": quantization, "torch_dtype": "float16", "num_attention_heads": 15}
    file = written(tmp_path, "llama", fields)
    made = estimate(settled(file), file, memory_bytes=4 * GIB)
    linears = 4 * [*[(480, 480)] * 4, (640, 480), (640, 480), (480, 640)]
    elements = sum(n * k for n, k in linears)
    packed = 0 if bytes_of is None else sum(int(bytes_of(n, k)) for n, k in linears)
    others = made.model.num_parameters - elements
    assert made.dtype == ("float16" if bytes_of is None else "bfloat16") and made.plan is not None
    assert made.weights_bytes == 2 * others + (packed or 2 * elements)
    assert sum(made.plan.packed_bytes.values()) == packed and made.plan.weights_bytes == made.weights_bytes
    assert len(made.notes) == 1 and ("without torch's kernels" in made.notes[0]) == bool(packed)


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    for fields, said in [
        ({"model_type": "mamba"}, "the sizes of a 'mamba' model cannot be told from its fields"),
        ({"model_type": "mixtral"}, "does not say num_local_experts, which has no default"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"vocab_size": 1.5}, "vocab_size must be an integer of at least 1 to be counted, got 1.5"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "does not say which layers have windows"),
    ]:
        file = written(tmp_path, "llama", fields)
        with pytest.raises(UnsupportedModel, match=re.escape(said)) as caught:
            estimate(settled(file), file)
        assert "add --exact" in str(caught.value)
    file = written(tmp_path, "llama", {})
    with pytest.raises(ConfigError, match="an estimate is of one CUDA device"):
        estimate(settled(file, tensor_parallel_size=2), file)
    with pytest.raises(NotEnoughMemory, match="the weights of tiny as float32 on a toaster"):
        estimate(settled(file), file, device="a toaster", memory_bytes=CONTEXT_BYTES + MIB)
    with pytest.raises(ConfigError, match="context must be 1 to 2,048 tokens"):
        estimate(settled(file), file, context=5000)


def test_devices_that_are_not_here() -> None:
    assert plan_device(None, None) == plan_device("cuda:1", None) == plan_device("cpu", None) == (None, None)
    assert plan_device("RTX 4090", None) == ("RTX 4090", 24_564 * MIB)
    assert card_bytes("A100-80GB") == card_bytes("nvidia a100 80gb") == CARDS["a100-80gb"] * MIB
    assert plan_device(None, "24GiB") == ("a device of 24.00 GiB", 24 * GIB) and plan_device("cpu", "8GiB") == ("cpu", 8 * GIB)
    for device, memory, said in [
        ("voodoo2", None, "is neither auto, cpu, cuda or cuda:N, nor one of rtx3060"),
        ("h100", "24GiB", "h100 has 79.65 GiB: leave out --memory or --device"),
        (None, "much", "--memory: cannot read 'much'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            plan_device(device, memory)


@pytest.mark.parametrize("kind", ["bloom", "qwen3_5_text"])
def test_other_families_are_counted_by_transformers(kind: str, tmp_path: Path) -> None:
    """Also from a file of another name, with states and for attention of its own; the same plan as that of the engine."""
    fields = {"layer_types": ["linear_attention", "full_attention"] * 2} if kind == "qwen3_5_text" else {}
    file = written(tmp_path, kind, fields)
    config = settled(file, max_seqs=32)
    exact = plan_only(config, has_weights=False, memory_bytes=4 * GIB - CONTEXT_BYTES).to_dict()
    in_int8 = quantized_bytes(outlined(config.model), "int8", torch.bfloat16)
    other = file.rename(tmp_path / "other.json")
    made = estimate(config, other, memory_bytes=4 * GIB, model=outlined_model(config.model, other))
    assert made.plan is not None and made.plan.to_dict() | {"device": "", "answers_bytes": 0} == exact | {
        "device": "",
        "answers_bytes": 0,
    }
    assert all(made.table.values()) and made.geometry.gathers == (kind == "bloom")
    assert made.model.quantized_bytes("int8", 2) == pytest.approx(in_int8, rel=0.001)
