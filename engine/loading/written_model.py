"""A decoder as its `config.json` alone describes it: sizes of weights, and the fields that KV and activations depend on.

transformers builds the same parameters; it takes seconds to load, and this takes milliseconds. A family is known if FAMILIES
has it: what its configurations leave out is then as in transformers' classes. Others are refused, not guessed. Of a multimodal
configuration only the text decoder counts. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from ...cache.geometry import FoundLayer
from ..errors import CheckpointError, UnsupportedModel
from ..layers import LEAST_QUANTIZED, Quantization, weight_bytes
from .gguf.models import written_config
from .model_config import check_counts, check_rope, context_length
from .models import DTYPES, ModelSpec
from .weight_files import READ_METHODS

_ROPE_KINDS = {"su": "longrope"}  # older names
# Types of whole multimodal configurations without a `text_config`.
_FLAT_TYPES = {"qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}
_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_SIZES = (
    *_NEEDED, "num_key_value_heads", "head_dim", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "shared_expert_intermediate_size", "decoder_sparse_step", "sliding_window_pattern",
    "num_experts_per_tok",
)  # fmt: skip
_COUNTS = ("n_shared_experts", "first_k_dense_replace", "max_window_layers")  # which may be 0
# What a configuration may leave out, unless the family says otherwise.
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "sliding_window": None, "layer_types": None, "moe_intermediate_size": None,
    "num_experts_per_tok": None, "mlp_only_layers": (), "decoder_sparse_step": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """What is the same in all models of a `model_type`, and in no field of their configurations.

    Attributes:
        defaults: Of fields, as in transformers' class. A field without a default has to be there.
        qkv_bias, o_bias, mlp_bias: True, False, or the field that says it.
        qk_norm: Norms of query and key, by "head" or by "row" of all heads; of a field, only where it is set.
        norms: Of a layer, of the hidden size.
        gated: Whether an MLP has three matrices, not two.
        fused: Which linear layers are one: "qkv", "gate_up".
        experts: The field that counts them; empty: no experts.
        shared: The field of the width of shared experts, or of their number.
        types: How layers have windows where `layer_types` does not say it.
        layered_rope: Rotary scaling is of some layers only, so that it does not extend the positions.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["", "head", "row"] = ""
    qk_norm_if: str = ""
    norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    fused: tuple[str, ...] = ()
    experts: str = ""
    expert_width: str = "moe_intermediate_size"
    shared: str = ""
    types: Literal["", "alternate", "pattern", "from_layer"] = ""
    pattern: int = 0
    layered_rope: bool = False


def _yarn(factor: int, original: int) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


_LLAMA: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28}
_MOE: dict[str, Any] = {"experts": "num_experts"}
_DEEPSEEK: dict[str, Any] = {"experts": "n_routed_experts", "shared": "n_shared_experts"}
_OF_DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(**_LLAMA, mlp_bias="mlp_bias"),
    "granite": Family(**_LLAMA, mlp_bias="mlp_bias"),
    "smollm3": Family({"num_key_value_heads": 4, "tie_word_embeddings": True, "use_sliding_window": False}, **_LLAMA,
                      mlp_bias="mlp_bias"),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": Family({"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _yarn(16, 16_384)}),
    "mixtral": Family({"num_key_value_heads": 8, "num_experts_per_tok": 2}, experts="num_local_experts",
                      expert_width="intermediate_size"),
    "qwen2": Family(_QWEN, qkv_bias=True, types="from_layer"),
    "qwen2_5_vl_text": Family(_QWEN | {"num_key_value_heads": 8, "max_window_layers": 80}, qkv_bias=True, types="from_layer"),
    "qwen2_moe": Family(_QWEN | {"num_key_value_heads": 16, "qkv_bias": True}, qkv_bias="qkv_bias", types="from_layer", **_MOE,
                        shared="shared_expert_intermediate_size"),
    "qwen3": Family(_QWEN | {"head_dim": 128}, **_LLAMA, qk_norm="head", types="from_layer"),
    "qwen3_moe": Family({"num_key_value_heads": 4}, **_LLAMA, qk_norm="head", **_MOE),
    "qwen3_vl_text": Family({"num_key_value_heads": 32, "head_dim": 128}, **_LLAMA, qk_norm="head"),
    "qwen3_vl_moe_text": Family({"num_key_value_heads": 16, "tie_word_embeddings": True}, **_LLAMA,
                                qk_norm="head", **_MOE),
    "gemma": Family({"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}, **_LLAMA),
    "gemma2": Family({"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096}, **_LLAMA,
                     norms=4, types="alternate"),
    "gemma3_text": Family(_GEMMA3, **_LLAMA, norms=4, qk_norm="head", types="pattern", pattern=6, layered_rope=True),
    "phi3": Family(fused=("qkv", "gate_up")),
    "glm4": Family({"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}, qkv_bias="attention_bias", norms=4,
                   fused=("gate_up",)),
    "glm4_moe": Family({"num_key_value_heads": 8, "use_qk_norm": False, "n_shared_experts": 1, "first_k_dense_replace": 1},
                       qkv_bias="attention_bias", qk_norm="head", qk_norm_if="use_qk_norm", **_DEEPSEEK),
    "gpt_oss": Family({"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "attention_bias": True,
                       "rope_parameters": _yarn(32, 4096)}, **_LLAMA,
                      experts="num_local_experts", expert_width="intermediate_size", types="alternate"),
    "cohere2": Family({"tie_word_embeddings": True, "sliding_window": 4096}, **_LLAMA, norms=1, types="pattern", pattern=4),
    "minimax_m2": Family({"num_key_value_heads": 8, "head_dim": 128}, qk_norm="row", experts="num_local_experts",
                         expert_width="intermediate_size"),
    "olmo2": Family(**_LLAMA, qk_norm="row"),
    "olmo3": Family({"sliding_window": 4096}, **_LLAMA, qk_norm="row", types="pattern", pattern=4, layered_rope=True),
    "starcoder2": Family({"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True}, qkv_bias="use_bias",
                         o_bias="use_bias", mlp_bias="use_bias", gated=False, norm_bias=True),
    "seed_oss": Family({"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
                       qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "ernie4_5": Family({"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True, "use_bias": False},
                       qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    "glm4_moe_lite": Family(
        {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
         "num_key_value_heads": 20, "n_shared_experts": 1, "mlp_layer_types": None}, **_LLAMA, **_DEEPSEEK,
    ),
    "deepseek_v2": Family(_OF_DEEPSEEK | {"first_k_dense_replace": 0, "n_shared_experts": 2}, **_LLAMA, mlp_bias="mlp_bias",
                          **_DEEPSEEK),
    "deepseek_v3": Family(_OF_DEEPSEEK | {"first_k_dense_replace": 3, "n_shared_experts": 1}, **_LLAMA, **_DEEPSEEK),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class WrittenModel:
    """A model of a known family, by its configuration. `config` is the text decoder's, completed."""

    spec: ModelSpec
    config: Any
    dtype: str  # float32, bfloat16 or float16
    context_length: int | None
    caches_latents: bool
    stored_as: str | None  # the quantization of stored weights, if they are quantized
    linears: Mapping[tuple[int, int], int]  # (outputs, inputs) of linear layers that can be quantized: how many of them
    num_others: int  # all other parameters, without an output head of its own

    @classmethod
    def read(cls, spec: ModelSpec, file: Path) -> WrittenModel:
        """The model of `file`. Raises CheckpointError for an invalid file, UnsupportedModel for one that cannot be counted."""
        written = written_config(file)
        check_rope(file, written)
        check_counts(file, written)
        try:
            return cls._of(spec, file, written)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:  # some field is of another kind
            raise CheckpointError(
                f"{file}: a field has a value that cannot be counted ({type(error).__name__}: {error}); fetch or save it again"
            ) from error

    @classmethod
    def _of(cls, spec: ModelSpec, file: Path, written: dict[str, Any]) -> WrittenModel:
        config, family = _completed(file, written)
        weights = _Weights(config, family)
        own_code = spec.trust_remote_code and "AutoModelForCausalLM" in (written.get("auto_map") or {})
        quantized = written.get("quantization_config") or getattr(config, "quantization_config", None)
        return cls(
            spec=spec,
            config=config,
            dtype=_dtype(written, vars(config)),
            context_length=context_length(config, _rope(config, family), file),
            caches_latents=not own_code and (not quantized or dict(quantized).get("quant_method") in READ_METHODS),
            stored_as=None if not quantized else str(dict(quantized).get("quant_method") or "a quantized form"),
            linears=weights.linears,
            num_others=weights.others,
        )

    @property
    def text_config(self) -> Any:
        """The language model's configuration."""
        return self.config

    @property
    def found(self) -> tuple[FoundLayer, ...]:
        """The configuration tells the layers."""
        return ()

    @property
    def num_parameters(self) -> int:
        """All parameters; tied weights count once."""
        head = 0 if self.config.tie_word_embeddings else self.config.vocab_size * self.config.hidden_size
        return sum(n * k * count for (n, k), count in self.linears.items()) + self.num_others + head

    def quantized_bytes(self, quantization: Quantization, itemsize: int) -> int:
        """Bytes of the weights with linear layers quantized, and all others in `itemsize` bytes each.

        The output head is quantized beside a tied embedding, in 8 bits.
        """
        linears = sum(weight_bytes(n, k, quantization) * count for (n, k), count in self.linears.items())
        return linears + self.num_others * itemsize + weight_bytes(self.config.vocab_size, self.config.hidden_size, "int8")


def _completed(file: Path, written: Mapping[str, Any]) -> tuple[Any, Family]:
    """The text decoder's configuration with its family's defaults, and the family."""
    text = written.get("text_config")
    if text is None:
        kind = _FLAT_TYPES.get(str(written.get("model_type")), str(written.get("model_type")))
        text = written
    else:
        if not isinstance(text, dict):
            raise CheckpointError(f"{file}: text_config must be an object, got {text!r:.80}; fetch or save it again")
        kind = str(text.get("model_type"))
        ties = {one["tie_word_embeddings"] for one in (written, text) if "tie_word_embeddings" in one}
        if len(ties) > 1:
            raise UnsupportedModel(f"{file}: tie_word_embeddings differs between the whole and its text_config; {_ASK}")
        text = {**text, **({"tie_word_embeddings": ties.pop()} if ties else {})}
    if (family := FAMILIES.get(kind)) is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"{file}: the sizes of a {kind!r:.80} model cannot be told from its fields (known: {known}); {_ASK}"
        )
    if family.experts and family.experts not in text:  # num_experts and num_local_experts are the same
        other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}.get(family.experts, "")
        text = {**text, **({family.experts: text[other]} if other in text else {})}
    needed = (*_NEEDED, *((family.experts, family.expert_width) if family.experts else ()))
    fields = {**_DEFAULTS, **family.defaults, **text, "model_type": kind}
    if missing := [name for name in needed if fields.get(name) is None]:
        raise UnsupportedModel(f"{file} does not say {', '.join(missing)}, which has no default in this family; {_ASK}")
    for name in (*_SIZES, *_COUNTS, *needed):
        least, value = int(name not in _COUNTS), fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UnsupportedModel(
                f"{file}: {name} must be an integer of at least {least} to be counted, got {value!r:.80}; {_ASK}"
            )
    config = SimpleNamespace(**fields)
    types = fields.get("mlp_layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != config.num_hidden_layers):
        raise UnsupportedModel(
            f"{file}: mlp_layer_types must name {config.num_hidden_layers} layers, got {types!r:.80}; {_ASK}"
        )
    config.num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
    config.layer_types = _layer_types(file, config, family)
    return config, family


_ASK = "add --exact, which asks transformers"


def _layer_types(file: Path, config: Any, family: Family) -> list[str] | None:
    """The types of layers, or None where all have the same."""
    layers = range(config.num_hidden_layers)
    if getattr(config, "use_sliding_window", True) is False:
        config.sliding_window = None
    if config.layer_types is not None:
        return list(config.layer_types)
    match family.types:
        case "alternate":
            sliding = [index % 2 == 0 for index in layers]
        case "pattern":
            step = int(getattr(config, "sliding_window_pattern", None) or family.pattern)
            sliding = [bool((index + 1) % step) for index in layers]
        case "from_layer":
            sliding = [config.sliding_window is not None and index >= config.max_window_layers for index in layers]
        case _:
            if getattr(config, "use_sliding_window", False):
                raise UnsupportedModel(f"{file}: use_sliding_window does not say which layers have windows; {_ASK}")
            return None
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def _rope(config: Any, family: Family) -> Mapping[str, Any]:
    """Rotary scaling as transformers completes it."""
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    if family.layered_rope or not isinstance(rope, dict):
        return {}
    kind = rope.get("rope_type", rope.get("type"))
    original = getattr(config, "original_max_position_embeddings", None)
    more = {} if original is None else {"original_max_position_embeddings": original}
    return {**more, **rope, "rope_type": _ROPE_KINDS.get(str(kind), kind)}


def _dtype(*configs: Mapping[str, Any]) -> str:
    """The type of the weights that a configuration names, by name; float32 if it names none that is served."""
    said = next((one[key] for one in configs for key in ("dtype", "torch_dtype") if one.get(key)), "float32")
    name = str(said).removeprefix("torch.")
    return name if name in DTYPES and name != "auto" else "float32"


class _Weights:
    """Counts the parameters of a model: those of linear layers by shape, and all others."""

    def __init__(self, config: Any, family: Family) -> None:
        self.linears: Counter[tuple[int, int]] = Counter()
        self.others = 0
        self._config, self._family = config, family
        hidden = config.hidden_size
        norm = hidden * (2 if family.norm_bias else 1)
        self.others += config.vocab_size * hidden + norm
        for index in range(config.num_hidden_layers):
            self.others += family.norms * norm
            if getattr(config, "kv_lora_rank", None):
                self._add_latent_attention()
            else:
                self._add_attention()
            if self._is_sparse(index):
                self._add_experts()
            else:
                self._add_mlp(config.intermediate_size)

    def _add(self, outputs: int, inputs: int, bias: bool = False) -> None:
        if outputs * inputs >= LEAST_QUANTIZED:
            self.linears[outputs, inputs] += 1
        else:
            self.others += outputs * inputs
        self.others += outputs if bias else 0

    def _has(self, what: bool | str) -> bool:
        return bool(getattr(self._config, what)) if isinstance(what, str) else what

    def _add_attention(self) -> None:
        config, family = self._config, self._family
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = config.head_dim or hidden // heads
        query, kv = heads * head_dim, config.num_key_value_heads * head_dim
        for width in (query + 2 * kv,) if "qkv" in family.fused else (query, kv, kv):
            self._add(width, hidden, self._has(family.qkv_bias))
        self._add(hidden, query, self._has(family.o_bias))
        if family.qk_norm and self._has(family.qk_norm_if or True):
            self.others += 2 * head_dim if family.qk_norm == "head" else query + kv
        if config.model_type == "gpt_oss":
            self.others += heads  # sinks

    def _add_latent_attention(self) -> None:
        """Multi-head latent attention. The projection from latents is never quantized."""
        config, bias = self._config, self._has(self._family.qkv_bias)
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        if (q_rank := config.q_lora_rank) is None:
            self._add(query, hidden)
        else:
            self._add(q_rank, hidden, bias)
            self._add(query, q_rank)
            self.others += q_rank
        self._add(rank + config.qk_rope_head_dim, hidden, bias)
        self.others += rank + heads * (config.qk_nope_head_dim + config.v_head_dim) * rank
        self._add(hidden, heads * config.v_head_dim, bias)

    def _is_sparse(self, index: int) -> bool:
        config = self._config
        if not self._family.experts:
            return False
        if "mlp_layer_types" in self._family.defaults:
            types = config.mlp_layer_types
            return index > 0 if types is None else bool(types[index] == "sparse")
        if (first := getattr(config, "first_k_dense_replace", None)) is not None:
            return bool(index >= first)
        return index not in (config.mlp_only_layers or ()) and (index + 1) % config.decoder_sparse_step == 0

    def _add_mlp(self, width: int) -> None:
        hidden, family, bias = self._config.hidden_size, self._family, self._has(self._family.mlp_bias)
        widths = (2 * width,) if "gate_up" in family.fused else (width, width) if family.gated else (width,)
        for one in widths:
            self._add(one, hidden, bias)
        self._add(hidden, width, bias)

    def _add_experts(self) -> None:
        """Experts, which are tensors of three dimensions and never quantized; their router; shared experts."""
        config, family = self._config, self._family
        hidden, count, width = config.hidden_size, getattr(config, family.experts), getattr(config, family.expert_width)
        self.others += count * (3 * hidden * width + hidden)
        match config.model_type:
            case "gpt_oss":
                self.others += count * (2 * width + hidden + 1)  # biases
            case "deepseek_v3" | "glm4_moe" | "glm4_moe_lite" | "minimax_m2":
                self.others += count  # corrections of scores
            case _:
                pass
        if family.shared == "n_shared_experts":
            if shared := config.n_shared_experts:
                self._add_mlp(width * shared)
        elif family.shared:
            self._add_mlp(getattr(config, family.shared))
            self._add(1, hidden)
