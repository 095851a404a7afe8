"""Models of GGUF files as transformers has them: `config.json` from the metadata, names and places of their tensors.

llama.cpp's converter (https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py) renames tensors, reorders the rows of query
and key, adds 1 to the norms of Gemma, and joins experts in one tensor. Each family here undoes what it does to that one. An
architecture or a tensor that is not known is refused. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import CheckpointError, UnsupportedModel
from ..model_config import read_json
from .file import INSTEAD, GgufFile, GgufTensor, is_gguf, read_gguf

_UNREAD = re.compile(
    r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)  # in the configuration
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_STEMS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.*.gate_proj", "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}  # fmt: skip
_GEMMA: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Of families that are not read: a model with one of them computes something else.
_UNREAD_FACTORS = (
    "attention.scale", "attention.clamp_kqv", "logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear",
)  # fmt: skip
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, and original length, of all models that scale by `rope_freqs`

# What is done to a tensor: rows of query and key back in halves, 1 off, one more dimension, gate and up in turns.
Change = Literal["", "halves", "less 1", "row", "turns"]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of transformers' checkpoint: its name, what it is made of, and how. `expert`: which of those in one tensor."""

    name: str
    sources: tuple[GgufTensor, ...]
    change: Change = ""
    expert: int | None = None
    heads: int = 0  # of `halves`


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What llama.cpp's converter does to the models of an architecture.

    Attributes:
        kind: transformers' `model_type`.
        fields: Of the configuration, beyond those of all families: from keys of the metadata, in order of preference.
        fixed: Fields that are the same in all models, and in no metadata.
        stems: Names of tensors, beyond those of all families; an asterisk stands for an expert.
        halves: Rows of query and key are in turns of both halves of a head.
        norms_plus_1: Norms are stored plus 1.
    """

    kind: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stems: Mapping[str, str] = field(default_factory=dict)
    halves: bool = False
    norms_plus_1: bool = False


_OF_EXPERTS = {"num_experts_per_tok": ("expert_used_count",), "moe_intermediate_size": ("expert_feed_forward_length",)}
_QWEN_EXPERTS = {**_OF_EXPERTS, "num_experts": ("expert_count",)}
_GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"sliding_window": ("attention.sliding_window",)}

FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", halves=True),
    "qwen2": GgufFamily("qwen2", fixed={"use_sliding_window": False}),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        {**_QWEN_EXPERTS, "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",)},
        {"norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False},
        {
            **_EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "qwen3": GgufFamily("qwen3", fixed={"use_sliding_window": False}),
    "qwen3moe": GgufFamily(
        "qwen3_moe", _QWEN_EXPERTS, {"norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False}, _EXPERTS
    ),
    "gemma": GgufFamily("gemma", fixed=_GEMMA_FIXED, norms_plus_1=True),
    "gemma2": GgufFamily(
        "gemma2",
        {**_WINDOW, **{name: (name,) for name in ("attn_logit_softcapping", "final_logit_softcapping")}},
        _GEMMA_FIXED, _GEMMA, norms_plus_1=True,
    ),
    "gemma3": GgufFamily(
        "gemma3_text", {**_WINDOW, "final_logit_softcapping": ("final_logit_softcapping",)}, _GEMMA_FIXED, _GEMMA,
        norms_plus_1=True,
    ),
    "phi3": GgufFamily("phi3", _WINDOW, {}, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {
            **_WINDOW, "num_local_experts": ("expert_count",), "num_experts_per_tok": ("expert_used_count",),
            "intermediate_size": ("expert_feed_forward_length", "feed_forward_length"),
        },
        {"attention_bias": True, "hidden_act": "silu"},
        {
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
    ),
}  # fmt: skip


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file's model. Raises UnsupportedModel, and CheckpointError."""
    name = file.architecture
    if name not in FAMILIES or (name == "llama" and file.get("llama.expert_count", int, 0)):
        what = f"{name!r:.80} with experts" if name in FAMILIES else f"{name!r:.80}"
        raise UnsupportedModel(
            f"{file.path} has a model of architecture {what}, and GGUF files of {', '.join(FAMILIES)} are read; take the model "
            "in safetensors form"
        )
    return FAMILIES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """The content of `config.json`. Raises UnsupportedModel, and CheckpointError."""
    family, embedding = family_of(file), _needed(file, "token_embd.weight")

    def number(key: str, kind: Any = int, default: Any = ...) -> Any:
        return file.get(f"{file.architecture}.{key}", kind, default)

    heads = number("attention.head_count")
    config: dict[str, Any] = {
        "model_type": family.kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", int, heads),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **{name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_IDS.items()},
        **family.fixed,
    }
    for name, keys in {"intermediate_size": ("feed_forward_length",), **family.fields}.items():
        value = next((value for key in keys if (value := number(key, (int, float), None)) is not None), None)
        if value is not None:
            config[name] = value or None if name == "sliding_window" else value
    if not all(one.is_plain for one in file.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    if family.kind == "qwen3_moe":  # which has no layers without experts
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if not heads:
        raise CheckpointError(f"{file.path} says that there are no attention heads; fetch or convert it again")
    config["head_dim"] = number("attention.key_length", int, config["hidden_size"] // heads)
    if number("attention.value_length", int, config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{file.path} has keys and values of different lengths, which no {family.kind} model here has")
    for key in _UNREAD_FACTORS:
        if number(key, (int, float), 0) not in (0, 1):
            raise UnsupportedModel(
                f"{file.path} has {file.architecture}.{key}, by which {family.kind} models do not compute here"
            )
    _add_biases(file, config)
    _add_rope(file, config)
    if family.kind in ("gemma2", "gemma3_text"):
        _add_gemma(file, config)
    return config


def written_config(file: Path) -> dict[str, Any]:
    """The content of a configuration file, or of that which a GGUF file stands for. Raises what `read_gguf` raises."""
    return config_of(read_gguf(file)) if is_gguf(file) else read_json(file)


_SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _needed(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}; fetch or convert it again")
    return file.tensors[name]


def _dtype(file: GgufFile) -> str:
    """The type of most plain weights; bfloat16 beside quantized ones."""
    if not all(one.is_plain for one in file.tensors.values()):
        return "bfloat16"
    sizes: Counter[str] = Counter()
    for one in file.tensors.values():
        sizes[one.type] += one.num_bytes
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[sizes.most_common(1)[0][0]]


def _add_biases(file: GgufFile, config: dict[str, Any]) -> None:
    if config["model_type"] != "llama":
        return
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors


def _add_rope(file: GgufFile, config: dict[str, Any]) -> None:
    """Rotary embeddings: their base, how much of a head they turn, and their scaling."""
    arch, head_dim = file.architecture, config["head_dim"]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get(f"{arch}.rope.freq_base", (int, float), 10_000.0)),
    }
    turned = file.get(f"{arch}.rope.dimension_count", int, head_dim)
    if turned != head_dim:
        if config["model_type"] != "phi3":
            raise UnsupportedModel(f"{file.path} turns {turned} of {head_dim} dimensions of a head, and {arch} models turn all")
        rope["partial_rotary_factor"] = turned / head_dim
    scaling = file.get(f"{arch}.rope.scaling.type", str, "none")
    factor = file.get(f"{arch}.rope.scaling.factor", (int, float), None)
    original = file.get(f"{arch}.rope.scaling.original_context_length", int, None)
    if "rope_freqs.weight" in file.tensors:
        if config["model_type"] != "llama":
            raise UnsupportedModel(f"{file.path} has rope_freqs.weight, which is read of llama models alone; {INSTEAD}")
        rope |= _llama3(file, rope["rope_theta"], head_dim)
    elif "rope_factors_long.weight" in file.tensors:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {f"{name}_factor": file.floats(_needed(file, f"rope_factors_{name}.weight").name) for name in ("long", "short")}
        config["original_max_position_embeddings"] = original
    elif scaling == "linear" and factor is not None:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    elif scaling == "yarn" and factor is not None:
        rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if arch == "gpt-oss" else {}
    elif scaling != "none":
        raise UnsupportedModel(f"{file.path} scales rotary embeddings by {scaling!r:.40}, which is not read; {INSTEAD}")
    config["rope_parameters"] = rope


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file has what each frequency is divided by."""
    factors = file.floats("rope_freqs.weight")
    low, high, original = _LLAMA3
    factor = max(factors, default=1.0)

    def divisor(i: int) -> float:
        length = 2 * math.pi * theta ** (2 * i / head_dim)
        if length < original / high:
            return 1.0
        if length > original / low:
            return factor
        smooth = (original / length - low) / (high - low)
        return 1 / ((1 - smooth) / factor + smooth)

    if len(factors) != head_dim // 2 or any(abs(one / divisor(i) - 1) > 1e-3 for i, one in enumerate(factors)):
        raise UnsupportedModel(f"{file.path} scales rotary embeddings by factors that are not those of Llama 3; {INSTEAD}")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def _add_gemma(file: GgufFile, config: dict[str, Any]) -> None:
    """The scale of queries, and in Gemma 3 the rotary embeddings of both types of layers."""
    largest = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]  # layers of the models with 27 B parameters
    is_largest = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    )
    if config["model_type"] == "gemma3_text":
        local = float(file.get("gemma3.rope.freq_base_swa", (int, float), 10_000.0))
        full, sliding = config["rope_parameters"], {"rope_type": "default", "rope_theta": local}
        full["rope_theta"] = float(file.get("gemma3.rope.freq_base", (int, float), 1e6))
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        step = file.get("gemma3.attention.sliding_window_pattern", int, 6)
        layers = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = ["sliding_attention" if i % step else "full_attention" for i in layers]


def places_of(file: GgufFile) -> Iterator[TensorPlace]:
    """The tensors that transformers' checkpoint has, and what they are made of. Raises UnsupportedModel, CheckpointError."""
    family, arch = family_of(file), file.architecture
    stems = {**_STEMS, **family.stems}
    heads = {stem: file.get(f"{arch}.attention.{key}", int, None) for stem, key in _HEADS.items()}
    layers = file.get(f"{arch}.block_count", int)
    for name, one in file.tensors.items():
        if _UNREAD.fullmatch(name):
            continue
        layer = _LAYER.fullmatch(name)
        rest = name if layer is None else layer[2]
        stem, _, kind = rest.rpartition(".")
        if stem not in stems or kind not in ("weight", "bias") or (layer is not None and int(layer[1]) >= layers):
            raise UnsupportedModel(f"{file.path} has a tensor {name}, which {arch} models of {layers} layers do not have here")
        there = stems[stem] if layer is None else f"model.layers.{int(layer[1])}.{stems[stem]}"
        if family.kind == "gpt_oss" and stem in ("ffn_gate_exps", "ffn_up_exps"):
            if stem == "ffn_gate_exps":
                up = _needed(file, name.replace("ffn_gate_exps", "ffn_up_exps"))
                yield TensorPlace(there + ("" if kind == "weight" else "_bias"), (one, up), "turns")
        elif family.kind == "gpt_oss" and stem == "ffn_down_exps":
            yield TensorPlace(there + ("" if kind == "weight" else "_bias"), (one,))
        elif stem == "attn_sinks":
            yield TensorPlace(there, (one,))
        elif "*" in there:
            for expert in range(one.shape[0]):
                yield TensorPlace(f"{there.replace('*', str(expert))}.{kind}", (one,), expert=expert)
        else:
            yield _place(family, f"{there}.{kind}", one, heads.get(stem) or heads["attn_q"])


_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


def _place(family: GgufFamily, name: str, one: GgufTensor, heads: int | None) -> TensorPlace:
    if family.halves and name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")):
        if not heads or one.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{one.path}: {one.name} has {one.shape[0]} rows for {heads} heads; fetch or convert it again"
            )
        return TensorPlace(name, (one,), "halves", heads=heads)
    if family.norms_plus_1 and name.endswith("norm.weight"):
        return TensorPlace(name, (one,), "less 1")
    if name.endswith("shared_expert_gate.weight") and len(one.shape) == 1:
        return TensorPlace(name, (one,), "row")
    return TensorPlace(name, (one,))
