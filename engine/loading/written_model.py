"""A decoder without its weights: their sizes, and the fields that KV and activations depend on, by `config.json` alone.

transformers builds the same parameters; it takes seconds to load, and this takes milliseconds. A family is known if FAMILIES
has it: what its configurations leave out is then as in transformers' classes. Others are refused, not guessed. Of a multimodal
configuration only the text decoder counts. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from ...cache.geometry import FoundLayer, StateShape
from ..errors import CheckpointError, UnsupportedModel
from ..layers import LEAST_QUANTIZED, Quantization, WeightForm, torch_bytes, weight_bytes
from .gguf.models import written_config
from .model_config import check_counts, check_rope, context_length
from .weight_files import READ_METHODS, stored_form

_ROPE_KINDS = {"su": "longrope"}  # older names
# Types of whole multimodal configurations without a `text_config`.
_FLAT_TYPES = {"qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}
_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_SIZES = (
    *_NEEDED, "num_key_value_heads", "head_dim", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "decoder_sparse_step", "sliding_window_pattern",
    "num_experts_per_tok", "global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "full_attention_interval",
)  # fmt: skip
# Which may be 0.
_COUNTS = (
    "n_shared_experts", "first_k_dense_replace", "max_window_layers", "shared_expert_intermediate_size",
    "hidden_size_per_layer_input", "num_kv_shared_layers",
)  # fmt: skip
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
        gated_query: Whether the projection of queries gives a gate for each of their elements too.
        fused: Which linear layers are one: "qkv", "gate_up", those of a recurrence ("delta").
        experts: The field that counts them; empty: no experts.
        shared: The field of the width of shared experts, or of their number.
        types: How layers have windows, or states ("interval"), where `layer_types` does not say it.
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
    gated_query: bool = False
    fused: tuple[str, ...] = ()
    experts: str = ""
    expert_width: str = "moe_intermediate_size"
    shared: str = ""
    types: Literal["", "alternate", "pattern", "from_layer", "interval"] = ""
    pattern: int = 0
    layered_rope: bool = False

    @property
    def own_heads_without_window(self) -> bool:
        """Whether layers without a window have other heads, as in Gemma 4."""
        return "global_head_dim" in self.defaults


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
_GEMMA4 = Family(
    {
        "vocab_size": 262_144, "head_dim": 256, "num_key_value_heads": 4, "global_head_dim": 512,
        "num_global_key_value_heads": None, "max_position_embeddings": 131_072, "attention_k_eq_v": False,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": False, "num_experts": None,
        "top_k_experts": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "sliding_window": 512, "tie_word_embeddings": True,
    },
    **_LLAMA, norms=4, qk_norm="head", types="pattern", pattern=6, layered_rope=True,
)  # fmt: skip
# Three layers of four have a gated delta rule instead of attention.
_DELTA = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
_OF_DELTA: dict[str, Any] = {**_LLAMA, "qk_norm": "head", "gated_query": True, "types": "interval"}
_SHARED: dict[str, Any] = {**_MOE, "shared": "shared_expert_intermediate_size"}

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
    "qwen3_next": Family(_DELTA | {"num_key_value_heads": 2}, **_OF_DELTA, **_SHARED, fused=("delta",)),
    "qwen3_5_text": Family(_DELTA | {"num_key_value_heads": 4}, **_OF_DELTA),
    "qwen3_5_moe_text": Family(_DELTA | {"num_key_value_heads": 2, "intermediate_size": None}, **_OF_DELTA, **_SHARED),
    "gemma": Family({"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}, **_LLAMA),
    "gemma2": Family({"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096}, **_LLAMA,
                     norms=4, types="alternate"),
    "gemma3_text": Family(_GEMMA3, **_LLAMA, norms=4, qk_norm="head", types="pattern", pattern=6, layered_rope=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, defaults={
        **_GEMMA4.defaults, "sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0,
    }),
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
    """A model by its configuration: one of a known family (`read`), or one that transformers made of it without memory."""

    spec: Any  # a ModelSpec: its module imports this one
    text_config: Any  # the language model's, completed
    dtype: str  # float32, bfloat16 or float16
    context_length: int | None
    caches_latents: bool
    stored_as: str | None  # the quantization of stored weights, if they are quantized
    stored: tuple[WeightForm, int] | None  # as `stored_form` says
    linears: Mapping[tuple[int, int], int]  # (outputs, inputs) of linear layers that can be quantized: how many of them
    head: int  # parameters of an output head with weights of its own
    num_others: int  # all other parameters
    found: tuple[FoundLayer, ...] = ()  # as for `layer_shapes`

    @classmethod
    def read(cls, spec: Any, file: Path) -> WrittenModel:
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
    def _of(cls, spec: Any, file: Path, written: dict[str, Any]) -> WrittenModel:
        config, family = _completed(file, written)
        weights = _Weights(config, family)
        own_code = spec.trust_remote_code and "AutoModelForCausalLM" in (written.get("auto_map") or {})
        quantized = written.get("quantization_config") or getattr(config, "quantization_config", None)
        dtype = _dtype(written, vars(config), unnamed="bfloat16" if quantized else "float32")
        return cls(
            spec=spec,
            text_config=config,
            dtype=dtype,
            context_length=context_length(config, _rope(config, family), file),
            caches_latents=not own_code and (not quantized or dict(quantized).get("quant_method") in READ_METHODS),
            stored_as=None if not quantized else str(dict(quantized).get("quant_method") or "a quantized form"),
            stored=stored_form(dict(quantized)) if quantized else None,
            linears=weights.linears,
            head=0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size,
            num_others=weights.others,
            found=_found(config, dtype),
        )

    @property
    def num_parameters(self) -> int:
        """All parameters; tied weights count once."""
        return sum(n * k * count for (n, k), count in self.linears.items()) + self.num_others + self.head

    def kept_linears(self) -> Iterator[tuple[WeightForm, int, int]]:
        """(form, elements, bytes) of the linear layers, those of a shape together, that CUDA keeps as they are stored."""
        if self.stored is None:
            return
        form, group = self.stored
        for (n, k), count in self.linears.items():
            if (size := torch_bytes(form, n, k, group)) is not None:
                yield form, n * k * count, size * count

    def quantized_bytes(self, quantization: Quantization, itemsize: int) -> int:
        """Bytes of the weights with linear layers quantized, and all others in `itemsize` bytes each.

        The output head is quantized beside a tied embedding, in 8 bits.
        """
        linears = sum(weight_bytes(n, k, quantization) * count for (n, k), count in self.linears.items())
        head = weight_bytes(self.text_config.vocab_size, self.text_config.hidden_size, "int8")
        return linears + self.num_others * itemsize + head


def _found(config: Any, dtype: str) -> tuple[FoundLayer, ...]:
    """Of a model with states what its layers hand to the cache; else (), since the configuration tells the layers."""
    if "linear_attention" not in (config.layer_types or ()):
        return ()
    heads, key_dim, value_dim, width = _delta_sizes(config)
    state = FoundLayer((
        StateShape("conv", 0, (width, config.linear_conv_kernel_dim), dtype),
        StateShape("recurrent", 0, (heads, key_dim, value_dim), "float32"),
    ))  # fmt: skip
    plain = FoundLayer(kv=(config.num_key_value_heads, config.head_dim, config.head_dim))
    return tuple(state if kind == "linear_attention" else plain for kind in config.layer_types)


def _delta_sizes(config: Any) -> tuple[int, int, int, int]:
    """Of a gated delta rule: heads, dimensions of a key and of a value, and what its convolution takes of a token."""
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return heads, key_dim, value_dim, 2 * config.linear_num_key_heads * key_dim + heads * value_dim


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
    if missing := [name for name in needed if fields.get(name) is None and name not in family.defaults]:
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
    if family.own_heads_without_window:
        _complete_gemma4(file, config)
    return config, family


def _complete_gemma4(file: Path, config: Any) -> None:
    """Layers without a window have heads of their own; the last layer never has one. Mutates `config`."""
    if getattr(config, "use_bidirectional_attention", None) == "all":
        raise UnsupportedModel(f"{file}: use_bidirectional_attention is 'all', so that it continues no text; {_ASK}")
    config.layer_types[-1] = "full_attention"
    heads = (config.attention_k_eq_v and config.num_global_key_value_heads) or config.num_key_value_heads
    own = SimpleNamespace(**vars(config) | {"head_dim": config.global_head_dim, "num_key_value_heads": heads})
    config.per_layer_config = [config if kind == "sliding_attention" else own for kind in config.layer_types]
    config.is_heterogeneous = True


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
        case "interval":
            step = config.full_attention_interval
            return ["linear_attention" if (index + 1) % step else "full_attention" for index in layers]
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


def _dtype(*configs: Mapping[str, Any], unnamed: str) -> str:
    """The type of the weights that a configuration names, by name; `unnamed` if it names none, float32 if it is not served."""
    said = next((one[key] for one in configs for key in ("dtype", "torch_dtype") if one.get(key)), unnamed)
    name = str(said).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "float32"


class _Weights:
    """Counts the parameters of a model: those of linear layers by shape, and all others."""

    def __init__(self, config: Any, family: Family) -> None:
        self.linears: Counter[tuple[int, int]] = Counter()
        self.others = 0
        self._config, self._family = config, family
        hidden = config.hidden_size
        norm = hidden * (2 if family.norm_bias else 1)
        self.others += config.vocab_size * hidden + norm
        if family.own_heads_without_window and (inputs := config.hidden_size_per_layer_input):
            self._add(config.num_hidden_layers * inputs, hidden)
            self.others += config.vocab_size_per_layer_input * config.num_hidden_layers * inputs + inputs
        for index in range(config.num_hidden_layers):
            self.others += family.norms * norm
            if getattr(config, "kv_lora_rank", None):
                self._add_latent_attention()
            elif family.types == "interval" and config.layer_types[index] == "linear_attention":
                self._add_delta_rule()
            elif family.own_heads_without_window:
                self._add_gemma4(index)
                continue
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
        queries = 2 * query if family.gated_query else query
        for width in (query + 2 * kv,) if "qkv" in family.fused else (queries, kv, kv):
            self._add(width, hidden, self._has(family.qkv_bias))
        self._add(hidden, query, self._has(family.o_bias))
        if family.qk_norm and self._has(family.qk_norm_if or True):
            self.others += 2 * head_dim if family.qk_norm == "head" else query + kv
        if config.model_type == "gpt_oss":
            self.others += heads  # sinks

    def _add_delta_rule(self) -> None:
        """A gated delta rule: projections, a convolution, a gate and a decay for each head, a norm."""
        config = self._config
        hidden, (heads, _, value_dim, width) = config.hidden_size, _delta_sizes(config)
        value = heads * value_dim
        for outputs in (width + value, 2 * heads) if "delta" in self._family.fused else (width, value, heads, heads):
            self._add(outputs, hidden)
        self._add(hidden, value)
        self.others += width * config.linear_conv_kernel_dim + 2 * heads + value_dim

    def _add_gemma4(self, index: int) -> None:
        """A layer of Gemma 4: of the last, some read K and V of others; experts and inputs of a layer are beside an MLP."""
        config, layer, bias = self._config, self._config.per_layer_config[index], self._has(self._family.qkv_bias)
        hidden, query = config.hidden_size, config.num_attention_heads * layer.head_dim
        shares = index >= config.num_hidden_layers - config.num_kv_shared_layers
        self._add(query, hidden, bias)
        self._add(hidden, query, bias)
        self.others += layer.head_dim + 1  # a norm, and the factor of the layer
        if not shares:
            same = config.attention_k_eq_v and config.layer_types[index] == "full_attention"
            for _ in range(1 if same else 2):
                self._add(layer.num_key_value_heads * layer.head_dim, hidden, bias)
            self.others += layer.head_dim
        self._add_mlp(config.intermediate_size * (2 if shares and config.use_double_wide_mlp else 1))
        if inputs := config.hidden_size_per_layer_input:
            self._add(inputs, hidden)
            self._add(hidden, inputs)
            self.others += hidden
        if config.enable_moe_block:
            count = config.num_experts
            self._add(count, hidden)
            self.others += count * 3 * hidden * config.moe_intermediate_size + 4 * hidden + count  # with norms, scales

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
