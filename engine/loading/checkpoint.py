"""A model's metadata without its weights: shape, sizes, end ids, context length, defaults of its generation_config.json."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from ...api.sampling_params import SamplingParams
from ...common.units import format_bytes
from ..errors import CheckpointError, ConfigError, UnsupportedModel
from ..process.log_suppression import quiet_transformers
from .gguf.file import GgufFile, is_gguf, read_gguf
from .gguf.models import written_config
from .gguf.tokenizer import generation_of
from .gguf.weights import GgufTensors, read_weights
from .loaded import Loaded
from .model_config import check_counts, check_files, check_implementations, check_rope, context_length, read_json
from .models import ModelSpec
from .stored_formats import INSTEAD, StoredWeight, read_formats
from .tensor_files import TensorFiles
from .text_model import auto_class, continuing_part, may_have_more, remove_modules, unused_modules, whole_model, without_place
from .weight_files import READ_METHODS, StoredTensor, WeightFiles, find_weights, stored_twice

log = logging.getLogger(__name__)

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # types that loading converts; integers and 8-bit floats stay
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING_KEYS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "length_penalty", "early_stopping",
)  # fmt: skip
_WHEN_SAMPLING = ("top_k", "top_p", "min_p")
# Settings that change the output and are not supported, with the value that means "off".
_NOT_SERVED: Mapping[str, Any] = {
    "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None,
}  # fmt: skip
# Supported settings that a request must set itself: a model that always used beam search could give no log-probabilities,
# and one with processors of its own could export no request.
_WHEN_ASKED: Mapping[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "stop_strings": None,
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk, described by its JSON files and the headers of its weight files, or a GGUF file; or a loaded model."""

    spec: ModelSpec
    config: PreTrainedConfig
    weights: WeightFiles
    tensors: tuple[StoredTensor, ...]  # that are read, with plain ones for `stored`; empty if the weights are not safetensors
    generation: Mapping[str, Any]  # generation_config.json as written, {} without one
    unused_modules: tuple[str, ...] = ()  # of transformers' model, by name: parts that text does not need
    unread: Mapping[str, str] = field(default_factory=dict)  # other tensors in the files, by name: transformers' name
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)  # quantized weights, by the names of the plain ones
    stored_as: str | None = None  # the method of `stored`

    @classmethod
    def open(cls, spec: ModelSpec) -> Checkpoint:
        """Read the files of `spec`.

        Raises:
            ModelNotFound: weights are missing.
            CheckpointError: a file cannot be read or is cut off; names the file.
            UnsupportedModel: not a decoder-only language model, or unknown to this transformers.
            ConfigError: its code would have to be trusted, and is not.
        """
        if spec.loaded is not None:
            return cls._of_loaded(spec, spec.loaded)
        if is_gguf(spec.path):
            return cls._of_gguf(spec, read_gguf(spec.path))
        check_files(spec.path)
        weights = find_weights(spec.path)
        config = read_config(spec)
        tensors = weights.tensors() if weights.safetensors else ()
        stored: dict[str, StoredWeight] = {}
        given = (take_quantization(config) or _separate_quantization(spec, tensors)) if tensors else None
        if given is not None:
            files = cache(lambda: TensorFiles(weights.paths))
            stored, tensors = read_formats(given, tensors, spec.name, _spelled(config), lambda name: files()[name])
        generation_file = spec.path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        method = str(given["quant_method"]) if given is not None and stored else None
        checkpoint = cls(spec, config, weights, tensors, generation, stored=stored, stored_as=method)
        checkpoint._refuse_more_layers_than_tensors()
        checkpoint._refuse_unread_quantization()
        return checkpoint.of_text()._checked(generation_file)

    @classmethod
    def _of_gguf(cls, spec: ModelSpec, file: GgufFile) -> Checkpoint:
        config = read_config(spec)
        given = take_quantization(config)
        stored, tensors = read_weights(file, _spelled(config))
        weights = WeightFiles(file.paths, safetensors=False, gguf=True)
        method = None if given is None else str(given["quant_method"])
        checkpoint = cls(spec, config, weights, tensors, generation_of(file), stored=stored, stored_as=method)
        checkpoint._refuse_more_layers_than_tensors()
        return checkpoint._checked(spec.path)

    @classmethod
    def _of_loaded(cls, spec: ModelSpec, loaded: Loaded) -> Checkpoint:
        _refuse_encoders(loaded.config)
        generation = loaded.generation_config.to_diff_dict()
        where = f"the generation_config of the loaded {spec.name}"
        files = WeightFiles((), safetensors=True)
        return cls(spec, loaded.config, files, loaded.tensors, generation, loaded.unused_modules)._checked(where)

    def read_tensors(self) -> TensorFiles | GgufTensors:
        """The tensors of the weight files by name, as the headers have them. Raises CheckpointError."""
        return GgufTensors(read_gguf(self.spec.path)) if self.weights.gguf else TensorFiles(self.weights.paths)

    @property
    def files(self) -> list[Path]:
        """What the model is made of: the configuration, the weight files, and own code."""
        code = sorted(self.spec.path.glob("*.py")) if self.has_own_code else []
        return list(dict.fromkeys([self.spec.config_file, *self.weights.paths, *code]))

    def stamps(self) -> tuple[object, ...]:
        """What changes if one of `files` is written or replaced. Raises OSError."""
        if self.spec.loaded is not None:
            return ()
        return tuple((path, one.st_ino, one.st_size, one.st_mtime_ns) for path in self.files if (one := path.stat()))

    def of_text(self) -> Checkpoint:
        """This checkpoint without the parts that text does not need. Raises CheckpointError if it has no such model."""
        if self.has_own_code or not may_have_more(self.config, [tensor.name for tensor in self.tensors]):
            return self
        model = whole_model(self.config, self.spec.path)
        try:
            unused = unused_modules(model)
        except ImportError as error:
            raise UnsupportedModel(f"{self.spec.name}: {' '.join(str(error).split())}") from error
        except (NotImplementedError, AttributeError) as error:  # of classes that say nothing of their embeddings
            raise UnsupportedModel(
                f"a {self.config.model_type} model is not served: which of its parts continues text cannot be told "
                f"({type(error).__name__}: {error})"
            ) from error
        remove_modules(model, unused)
        unread = without_place(model, [tensor.name for tensor in self.tensors])
        if unread:
            num_bytes = sum(tensor.num_bytes for tensor in self.tensors if tensor.name in unread)
            log.info("%s: %d tensors are not of its text and are not read: %s", self, len(unread), format_bytes(num_bytes))
        tensors = tuple(tensor for tensor in self.tensors if tensor.name not in unread)
        return replace(self, tensors=tensors, unused_modules=unused, unread=unread)

    def _checked(self, where: object) -> Checkpoint:
        """This checkpoint, after validating the generation settings from `where` and warning about unsupported ones."""
        _ = self.eos_token_ids, self.default_sampling  # raises their errors now
        if not_served := self._asks_for(_NOT_SERVED):
            log.warning("%s sets %s, which this engine does not support", where, not_served)
        served = {"sequence_bias"} if self._logit_bias() else set()
        if when_asked := self._asks_for({key: off for key, off in _WHEN_ASKED.items() if key not in served}):
            log.warning(
                "%s asks for %s: a pipeline does so, every other request only if its SamplingParams say it", where, when_asked
            )
        return self

    def _refuse_more_layers_than_tensors(self) -> None:
        """Raises CheckpointError if there are more layers than tensors, before slowly building modules without weights."""
        layers = getattr(self.text_config, "num_hidden_layers", None)
        if self.tensors and isinstance(layers, int) and layers > len(self.tensors):
            raise CheckpointError(
                f"{self.spec.config_file} says that there are {layers:,} layers, and the weights have "
                f"{len(self.tensors):,} tensors in all: one of them is of another model; fetch or save it again"
            )

    def _refuse_unread_quantization(self) -> None:
        """Raises UnsupportedModel if transformers would take quantized weights for numbers, without their scales."""
        given = _quantization_of(self.config)
        method = None if given is None else given.get("quant_method")
        if method == "bitsandbytes":
            raise UnsupportedModel(
                f"{self.spec.name}: its weights are stored in bitsandbytes form, which only its own library for GPUs reads: "
                f"{INSTEAD}"
            )
        eight_bits = any(tensor.dtype.startswith("F8") for tensor in self.tensors)
        if (method not in AUTO_QUANTIZER_MAPPING if given is not None else eight_bits) and not self.has_own_code:
            raise UnsupportedModel(
                f"{self.spec.name}: its weights are stored quantized by {method or 'a method that config.json does not name'}, "
                f"which neither pagetide nor transformers {transformers.__version__} reads: {INSTEAD}"
            )

    def _asks_for(self, settings: Mapping[str, Any]) -> str:
        """The `settings`, given with their "off" values, that the generation config sets, as text."""
        asked = ((key, self.generation.get(key, off), off) for key, off in settings.items())
        return ", ".join(f"{key}={value}" for key, value, off in asked if value not in (off, None))

    @property
    def text_config(self) -> Any:
        """The language model's configuration: the whole one, unless the model has other parts too."""
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""
        return int(self.text_config.vocab_size)

    @property
    def quantized(self) -> bool:
        """Whether weights are stored quantized."""
        return bool(self.stored) or self.by_quantizer

    @property
    def by_quantizer(self) -> bool:
        """Whether a quantizer of transformers reads the weights, and keeps what it makes of them."""
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def caches_latents(self) -> bool:
        """Whether latent attention of this model is served from cached latents, not from K and V of all heads.

        Not with code of the folder's own, with weights that a quantizer reads, or with a loaded model that was changed.
        """
        if self.spec.loaded is not None:
            return self.spec.loaded.expands_plainly
        return not self.by_quantizer and not self.has_own_code

    @property
    def has_own_code(self) -> bool:
        """Whether the model runs by code of its folder."""
        kind = auto_class(self.config)
        name = "AutoModelForCausalLM" if kind is None else kind.__name__
        return self.spec.trust_remote_code and name in (getattr(self.config, "auto_map", None) or {})

    @property
    def dtype(self) -> str:
        """The checkpoint's intended type, by name: from its configuration, else the type of most bytes."""
        said = getattr(self.config, "dtype", None) or getattr(self.text_config, "dtype", None)
        if said is not None:
            return str(said).removeprefix("torch.")
        stored: Counter[str] = Counter()
        for tensor in self.tensors:
            stored[tensor.dtype] += tensor.num_bytes if tensor.dtype in _NAMES else 0
        return _NAMES.get(stored.most_common(1)[0][0], "float32") if stored else "float32"

    def weights_bytes(self, dtype: torch.dtype | str) -> int:
        """Bytes of the weights once loaded as `dtype`: exact for safetensors, else a KiB per tensor too many.

        Tied weights count once, even if the checkpoint stores both. (transformers keeps both if they differ, which only
        reading them can tell.)
        """
        itemsize = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
        if not self.tensors:
            stored = getattr(getattr(torch, self.dtype, None), "itemsize", 4)
            return self.weights.file_bytes if self.by_quantizer else self.weights.file_bytes * itemsize // stored
        twice = stored_twice(self.tensors, tied=bool(getattr(self.text_config, "tie_word_embeddings", False)))
        return sum(
            tensor.num_elements * itemsize if tensor.dtype in _FLOAT_BYTES and not self.by_quantizer else tensor.num_bytes
            for tensor in self.tensors
            if tensor is not twice
        )

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether loading as `dtype` changes the type of some weights, so that they need memory of their own."""
        name = str(dtype).removeprefix("torch.")
        stored = {_NAMES[tensor.dtype] for tensor in self.tensors if tensor.dtype in _NAMES} or {self.dtype}
        return bool(self.stored) or (not self.by_quantizer and stored != {name})

    @property
    def context_length(self) -> int | None:
        """The most tokens of a sequence, or None without a limit: see `model_config.context_length`."""
        text = self.text_config
        return context_length(text, getattr(text, "rope_parameters", None) or {}, self.spec.config_file)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end ids: the generation config's, else the configuration's."""
        return self._ids("eos_token_id")

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        return next(iter(self._ids("bos_token_id")), None)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id, if there is one."""
        return next(iter(self._ids("pad_token_id")), None)

    def _ids(self, key: str) -> tuple[int, ...]:
        for value in (self.generation.get(key), getattr(self.text_config, key, None), getattr(self.config, key, None)):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
                raise CheckpointError(f"{self.spec.path}: {key} must be an id or a list of ids, got {value!r}")
            if ids:
                # Some write -1 for "none"; ids outside the vocabulary cannot occur.
                return tuple(dict.fromkeys(token for token in ids if 0 <= token < self.vocab_size))
        return ()

    @property
    def default_sampling(self) -> SamplingParams:
        """The models file's sampling defaults over those of `generation_config.json`.

        Without `do_sample` sampling is greedy, and `top_k`, `top_p` and `min_p` are ignored. Settings that the file omits stay
        unset: transformers' default of `top_k=50` is not applied. `max_length` is not a setting here. `suppress_tokens` become
        bad words of one token, and a `sequence_bias` of single tokens becomes a logit bias.
        """
        samples = bool(self.generation.get("do_sample"))
        given = {key: self.generation.get(key) for key in _SAMPLING_KEYS if samples or key not in _WHEN_SAMPLING}
        temperature = self.generation.get("temperature")
        given["temperature"] = (1.0 if temperature is None else temperature) if samples else 0.0
        try:
            given |= {"bad_words_ids": self._bad_words() or None, "logit_bias": self._logit_bias() or None}
            own = SamplingParams(**given)  # type: ignore[arg-type]  # it checks them
        except (ValueError, TypeError) as error:  # TypeError: for example, a number instead of a list
            where = self.spec.path if self.weights.gguf else self.spec.path / "generation_config.json"
            raise CheckpointError(f"{where}: {error}; correct it there") from error
        return self.spec.sampling.over(own)

    def _bad_words(self) -> list[list[int]]:
        """Lists of ids that must not be generated, without those that contain an id outside the vocabulary."""
        words = [list(ids) for ids in self.generation.get("bad_words_ids") or ()]
        words += [[token] for token in self.generation.get("suppress_tokens") or ()]
        return [ids for ids in words if all(token < self.vocab_size for token in ids)]

    def _logit_bias(self) -> dict[int, float]:
        """The `sequence_bias`, if all its sequences are single tokens and its values finite; else empty."""
        given = self.generation.get("sequence_bias") or {}
        pairs = [(list(ids), float(bias)) for ids, bias in (given.items() if isinstance(given, Mapping) else given)]
        if any(len(ids) != 1 or not math.isfinite(bias) for ids, bias in pairs):
            return {}
        return {ids[0]: bias for ids, bias in pairs if ids[0] < self.vocab_size}

    def __str__(self) -> str:
        stored = format_bytes(self.weights.file_bytes)
        return f"{self.spec.name}: {self.config.model_type}, {stored} of weights in {self.spec.path}"


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration of `spec`'s folder. Raises as `Checkpoint.open`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = spec.config_file
    written = written_config(file)
    check_rope(file, written)
    check_counts(file, written)
    check_implementations(file, written)
    kind, code = written.get("model_type"), written.get("auto_map") or {}
    if kind not in CONFIG_MAPPING and not code:
        what = f"model_type {kind!r}, which transformers {transformers.__version__} does not know" if kind else "no model_type"
        raise UnsupportedModel(f"{file} has {what}; a newer transformers may")
    if kind not in CONFIG_MAPPING and not spec.trust_remote_code:
        raise ConfigError(
            f"{spec.name}: a {kind!r} model runs by Python code in its own folder {spec.path}; read that code, and if "
            f"you trust it set trust_remote_code to true in the models file or the call"
        )
    try:
        with quiet_transformers():
            config: PreTrainedConfig = (
                CONFIG_MAPPING[kind].from_dict(written)
                if is_gguf(file)
                else AutoConfig.from_pretrained(str(spec.path), local_files_only=True, trust_remote_code=spec.trust_remote_code)
            )
    except Exception as error:  # transformers raises whatever its checks or the folder's code raise
        raise CheckpointError(f"{file} is not a configuration that transformers can read: {error}") from error
    config = continuing_part(config)
    _refuse_encoders(config)
    if auto_class(config) is None and "AutoModelForCausalLM" not in code:
        raise UnsupportedModel(
            f"a {config.model_type} model does not continue text: transformers has no model of it that is causal, or that "
            f"continues text behind images or sound{', nor has the code in its folder' if code else ''}"
        )
    return config


def _quantization_of(config: Any) -> Mapping[str, Any] | None:
    """The `quantization_config` of a configuration or of its text, as written. Raises CheckpointError for what is none."""
    for one in (config, config.get_text_config()):
        given = getattr(one, "quantization_config", None) or getattr(one, "compression_config", None)
        if given is None:
            continue
        said = given if isinstance(given, Mapping) else given.to_dict() if hasattr(given, "to_dict") else None
        if not isinstance(said, Mapping) or not isinstance(said.get("quant_method", ""), str):
            raise CheckpointError(
                f"quantization_config must be an object with a text as quant_method, got {given!r:.80}; fetch or save the "
                "model again"
            )
        return said
    return None


def take_quantization(config: Any) -> Mapping[str, Any] | None:
    """What the configuration says of quantized weights that are read here, taken out of it. Mutates `config`.

    None if it says nothing, or names a method that a quantizer of transformers may read. Raises CheckpointError.
    """
    given = _quantization_of(config)
    if given is None or given.get("quant_method") not in READ_METHODS:
        return None
    for one in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(one, name):
                delattr(one, name)
    return given


def _separate_quantization(spec: ModelSpec, tensors: tuple[StoredTensor, ...]) -> Mapping[str, Any] | None:
    """What some GPTQ checkpoints say of their weights in a file of its own."""
    file = spec.path / "quantize_config.json"
    if not file.is_file() or not any(one.name.endswith(".qweight") for one in tensors):
        return None
    return {"quant_method": "gptq", **read_json(file)}


def _spelled(config: Any) -> str:
    """The type of the plain weights of a quantized checkpoint, as headers spell it."""
    said = str(getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    return next((spelled for spelled, name in _NAMES.items() if name == said and spelled != "F64"), "BF16")


def _refuse_encoders(config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"a {config.model_type} model has an encoder and a decoder; only decoder-only models are served")


assert set(_SAMPLING_KEYS) < {f.name for f in fields(SamplingParams)}
