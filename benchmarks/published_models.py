"""Published checkpoints by their configurations, each shrunk to a tiny model of the same shape.

`published_models.yaml` has of each what differs from the defaults of its type in transformers, and the public file that says
so. `shrunk` keeps whatever decides how a layer attends: the pattern of layers, the ratios of heads and of widths, rotary
scaling and the rotated part of a head, tied embeddings, softcaps and multipliers. Widths, depth, experts, windows and the
vocabulary become small. `small` does the same to a part or type of which only the defaults matter.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .stored_weights import checkpoint, experts_checkpoint, packer_of, stays

FILE = Path(__file__).with_name("published_models.yaml")

VOCABULARY = 160
# Tokens. A window of the whole context and more keeps its size; a chunk stays a multiple of a block.
WINDOWS = {"sliding_window": 9, "window_size": 9, "attention_chunk_size": 8}
NARROWER = 8  # times fewer dimensions in each head
MOST_EXPERTS = 8
LAYERS = 4
LONGEST_PERIOD = 12

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_LAYER_INDICES = ("mlp_only_layers", "moe_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "n_head", "num_kv_heads")
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_HEAD_DIMS = (
    "head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "rotary_dim",
    "kv_lora_rank", "q_lora_rank", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head",
    "mamba_head_dim",
    "query_pre_attn_scalar", "hidden_size_per_layer_input", "laurel_rank", "ssm_state_size", "mamba_d_state",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
_SIZES = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "intermediate_size_mlp", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
}
# No more than so much.
_MOST = {
    "n_shared_experts": 1,
    "n_group": 2,
    "n_groups": 2,
    "topk_group": 1,
    "index_n_heads": 32,  # with few, tokens for which all scores are negative tie
    "index_topk": 8,
    "first_k_dense_replace": 1,
}


# What configurations call each size, and the small one.
NAMES = {
    "hidden_size n_embd d_model emb_dim dim embedding_size n_embed": 48,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 6,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers": LAYERS,
    "num_key_value_heads num_kv_heads multi_query_group_num swa_num_key_value_heads": 2,
    "intermediate_size ffn_dim n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim": 64,
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size q_lora_rank": 32,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_top_k top_k_experts n_group": 2,
    "index_n_heads": 32,
    "max_position_embeddings n_positions max_seq_len n_ctx": 512,
    "vocab_size vocab_size_per_layer_input": VOCABULARY,
    "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank o_lora_rank hidden_size_per_layer_input": 16,
    "swa_head_dim swa_v_head_dim index_head_dim": 16,
    "swa_num_attention_heads": 6,
    "rotary_dim index_topk": 8,
    "sliding_window": 9,
    "topk_group": 1,
}
SIZES = {name: size for names, size in NAMES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A checkpoint as its publisher describes it.

    `config` has the text part's settings that differ from the defaults of `model_type`, at the published sizes; `file` has
    entries of the published config.json that concern the files: stored quantization, code of the publisher's own.
    """

    name: str  # the hub id
    class_name: str
    model_type: str
    source: str  # "owner/repository: path" of the public file with these facts
    config: Mapping[str, Any]
    file: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stored(self) -> str:
        """How the weights are stored: the quantization's method, or empty."""
        return str(self.file.get("quantization_config", {}).get("quant_method", ""))

    @property
    def unquantized(self) -> PublishedModel:
        """The same with weights stored as floating-point numbers."""
        return replace(self, file={key: value for key, value in self.file.items() if key != "quantization_config"})


@functools.cache
def published_models() -> Mapping[str, PublishedModel]:
    """All of the file, by name and in its order."""
    entries = yaml.safe_load(FILE.read_text("utf-8"))
    models = [
        PublishedModel(one["id"], one["class"], one["type"], one["source"], one["config"], one.get("file", {}))
        for one in entries
    ]
    return {model.name: model for model in models}


def published_config(model: PublishedModel) -> PreTrainedConfig:
    """Its configuration at the published sizes; parts for images and sound have the defaults of the type."""
    return CONFIG_MAPPING[model.model_type](**copy.deepcopy(dict(model.config)))


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a tiny model of the same shape."""
    values = _values(config)
    if "text_config" in config.sub_configs:
        values = {name: value for name, value in values.items() if name not in config.sub_configs}
        for name in config.sub_configs:
            part = getattr(config, name, None)
            if part is not None:
                values[name] = (shrunk(part) if name == "text_config" else type(part)(**small(part))).to_dict()
        return type(config)(**values)
    _shorten(values)
    _narrow(values)
    for name, size in WINDOWS.items():
        if values.get(name) and values[name] < _context(values):
            values[name] = size
    values |= {name: size for name, size in _SIZES.items() if values.get(name)}
    values |= {name: min(most, values[name]) for name, most in _MOST.items() if values.get(name)}
    for name in _EXPERTS:
        if values.get(name):
            values[name] = min(MOST_EXPERTS, values[name])
            values |= {top: min(values[top], values[name] // 2) for top in _EXPERTS_PER_TOKEN if values.get(top)}
    values["pad_token_id"] = 0
    return type(config)(**values)


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings as its class takes them."""
    values = config.to_dict()
    for name in ("model_type", "transformers_version", "architectures"):
        values.pop(name, None)
    if values.get("per_layer_config"):
        values["per_layer_config"] = {int(layer): dict(own) for layer, own in values["per_layer_config"].items()}
    return values


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


def _context(values: Mapping[str, Any]) -> int:
    return int(values.get("max_position_embeddings") or values.get("n_positions") or 0)


def _shorten(values: dict[str, Any]) -> None:
    """Keep so many first layers that they show all that the published ones do.

    These are a whole period of their pattern, or every kind once if it has no period, and twice as many where late layers
    read the keys and values of early ones.
    """
    total = next((int(values[name]) for name in _LAYERS if values.get(name)), 0) or len(values["layers_block_type"])
    indices = [name for name, value in values.items() if isinstance(value, list) and name in _LAYER_INDICES]
    lists = [name for name, value in values.items() if isinstance(value, list) and len(value) == total and name not in indices]
    kinds = [tuple(values[name][layer] for name in lists) for layer in range(total)]
    period = next((n for n in range(1, LONGEST_PERIOD + 1) if kinds[n:] == kinds[:-n]), None)
    shown = period or 1 + max(kinds.index(kind) for kind in kinds)
    shared = values.get("num_kv_shared_layers") or 0
    layers = min(total, max(LAYERS, 2 * shown if shared and period else shown))
    values |= {name: layers for name in _LAYERS if values.get(name)}
    values |= {name: values[name][:layers] for name in lists}
    values |= {name: [layer for layer in values[name] if layer < layers] for name in indices}
    if shared:
        values["num_kv_shared_layers"] = layers * shared // total
    if values.get("per_layer_config"):
        values["per_layer_config"] = {layer: own for layer, own in values["per_layer_config"].items() if layer < layers}


def _narrow(values: dict[str, Any]) -> None:
    """Fewer heads in the published ratio, narrower ones, and a hidden size in the published ratio to both."""
    before = copy.deepcopy(values)
    hidden = next(name for name in ("hidden_size", "n_embd") if values.get(name))
    heads = next(name for name in ("num_attention_heads", "n_head") if values.get(name))
    tables = [values, *(values.get("per_layer_config") or {}).values()]
    _divide(tables, _HEADS)
    _divide(tables, _LINEAR_HEADS)
    for table in tables:
        table |= {name: max(2, int(table[name]) // NARROWER) for name in _HEAD_DIMS if table.get(name)}
    width = _head_dim(before, hidden, heads) // NARROWER
    ratio = before[hidden] / (before[heads] * _head_dim(before, hidden, heads))
    # Grouped products of experts want rows of 16 bytes and more.
    values[hidden] = 8 * max(1, round(values[heads] * width * ratio / 8))
    for name in ("word_embed_proj_dim", "moe_latent_size"):
        if values.get(name):
            values[name] = round(before[name] * values[hidden] / before[hidden])
    if values.get("mamba_n_heads"):
        values["mamba_n_heads"] = values["mamba_expand"] * values[hidden] // values["mamba_d_head"]
    if values.get("mamba_num_heads"):
        values["mamba_num_heads"] //= NARROWER
    for rope in _ropes(values.get("rope_parameters")):
        _narrow_rope(rope, width)


def _divide(tables: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Divide these counts of heads by what they share, so that the ratios stay and 2 of the fewest, or a few more, remain."""
    counts = {int(table[name]) for table in tables for name in names if table.get(name)}
    if not counts:
        return
    shared = math.gcd(*counts)
    left = next((n for n in range(2, shared + 1) if shared % n == 0), shared) if len(counts) > 1 else 4
    for table in tables:
        table |= {name: int(table[name]) * left // shared for name in names if table.get(name)}


def _head_dim(values: Mapping[str, Any], hidden: str, heads: str) -> int:
    return int(values.get("v_head_dim") or values.get("head_dim") or values[hidden] // values[heads])


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """The rotary parameters, one for each kind of layer."""
    if not parameters:
        return []
    return [parameters] if "rope_type" in parameters else [one for one in parameters.values() if one]


def _narrow_rope(rope: dict[str, Any], width: int) -> None:
    """Frequencies that are listed become fewer, evenly taken; the sections of several axes keep their shares."""
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][NARROWER // 2 :: NARROWER]
    if "mrope_section" in rope:
        left = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        sections: list[int] = []
        total = sum(rope["mrope_section"])
        for at, section in enumerate(rope["mrope_section"]):
            sections.append(left - sum(sections) if at == 2 else round(section * left / total))
        rope["mrope_section"] = sections


def save(model: PreTrainedModel, published: PublishedModel, folder: Path) -> PreTrainedModel:
    """Write the tiny model as its publisher would have. Returns it with the weights that the files stand for.

    In forms without a packer here, such as NVFP4, weights stay as they are.
    """
    config = dict(published.file.get("quantization_config", {}))
    packer = packer_of(config)
    if published.stored == "mxfp4":
        model = type(model).from_pretrained(experts_checkpoint(model, folder), dtype=torch.float32)
    elif packer is not None:
        stored = checkpoint(model, folder, config, lambda base: None if stays(base, config) else packer, by_name=True)
        model = type(model).from_pretrained(stored, dtype=torch.float32)
    else:
        model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(_merged(json.loads(file.read_text("utf-8")), published.file)), "utf-8")
    return model.eval()


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`one` with the entries of `other`, also within mappings that both have."""
    both = {key: _merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return {**one, **other, **both}


def class_of(published: PublishedModel) -> type[PreTrainedModel]:
    """The class of transformers that its configuration names."""
    made: type[PreTrainedModel] = getattr(transformers, published.class_name)
    return made
