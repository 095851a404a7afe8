"""The pipeline's generation settings: arguments and configurations merged as transformers does, as `SamplingParams`.

    the caller's arguments  >  the caller's `generation_config`  >  the models file's sampling
    >  the model's own generation_config  >  the pipeline's defaults  >  those of `generate`

(transformers, `Pipeline._prepare_generate_kwargs` and `GenerationMixin._prepare_generation_config`.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from transformers import (
    GenerationConfig,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ...api.sampling_params import SamplingParams
from ...scheduler.request import LogitsProcessor
from ..process.log_suppression import quiet_transformers
from .checkpoint import read_config
from .gguf.file import is_gguf, read_gguf
from .gguf.tokenizer import generation_of
from .model_config import check_files
from .models import ModelSpec

log = logging.getLogger(__name__)

PIPELINE_DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
_TOP_K = 50  # default top_k of `generate`
_NEW_TOKENS = 20  # and its default number of new tokens

# Supported settings. `seed` is pagetide's own.
SERVED = frozenset({
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "sequence_bias", "num_beams",
    "length_penalty", "early_stopping", "num_return_sequences", "stop_strings", "bos_token_id", "eos_token_id",
    "pad_token_id", "logits_processor", "prefix_allowed_tokens_fn", "generation_config", "seed",
})  # fmt: skip
# Settings of how transformers computes: ignored, since the result is the same.
HARMLESS = frozenset({
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "prefill_chunk_size", "continuous_batching_config", "low_memory", "transformers_version", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
})  # fmt: skip
_NO_TREATMENT = "the engine has no such treatment of scores; a logits_processor can do it"
_NO_ASSISTANT = "the engine has no assisted generation, and needs no second model"
_NO_SCORES = "a pipeline gives text or token ids; LLM.generate with logprobs gives log-probabilities"
_NO_SEARCH = "the engine has greedy search, sampling and beam search"
_ENDS = "say when to end by max_new_tokens, eos_token_id or stop_strings"
# Unsupported settings: the reason, and the values besides None and False that mean "off".
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (_NO_TREATMENT, (1,))),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "encoder_no_repeat_ngram_size"), (_NO_TREATMENT, (0,))),
    **dict.fromkeys(
        (
            "top_h", "renormalize_logits", "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id",
            "exponential_decay_length_penalty", "begin_suppress_tokens", "watermarking_config", "token_healing",
            "negative_prompt_ids", "negative_prompt_attention_mask",
        ),
        (_NO_TREATMENT, ()),
    ),
    **dict.fromkeys(
        (
            "assistant_model", "assistant_tokenizer", "is_assistant", "prompt_lookup_num_tokens", "max_matching_ngram_size",
            "assistant_early_exit", "assistant_ensemble_weight", "speculation_type", "use_mtp",
        ),
        (_NO_ASSISTANT, ()),
    ),
    **dict.fromkeys(
        ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
        (_NO_SCORES, ()),
    ),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty"), (_NO_SEARCH, (1, 0.0))),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"), (_NO_SEARCH, ())),
    "decoder_start_token_id": ("only decoder-only models are served", ()),
    "stopping_criteria": (_ENDS, ([], ())),
    "max_time": (_ENDS, ()),
    "synced_gpus": ("an engine runs on one device", ()),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ModelDefaults:
    """A model's generation defaults, as transformers reads them. Each call reads `generation_config` again."""

    generation_config: GenerationConfig
    models_file: SamplingParams
    vocab_size: int
    max_positions: int | None

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The defaults of a supported model, from its JSON files."""
        if spec.loaded is not None:
            config, own = spec.loaded.config, spec.loaded.generation_config
        else:
            of_file = is_gguf(spec.path)
            if not of_file:
                check_files(spec.path)
            config, has_file = read_config(spec), (spec.path / "generation_config.json").is_file()
            with quiet_transformers():
                if of_file:
                    own = GenerationConfig(**generation_of(read_gguf(spec.path)))
                elif has_file:
                    own = GenerationConfig.from_pretrained(str(spec.path), local_files_only=True)
                else:
                    own = GenerationConfig.from_model_config(config)
        text = config.get_text_config()
        return cls(own, spec.sampling, int(text.vocab_size), getattr(config, "max_position_embeddings", None))

    def resolve(self, given: Mapping[str, Any], pad_token_id: int | None) -> GenerationSettings:
        """The settings of a call with arguments `given`; `pad_token_id` is the tokenizer's.

        Raises ValueError for unsupported or contradictory settings.
        """
        own = self.generation_config.to_diff_dict()
        for name, value in own.items():
            if name in REFUSED and value is not None and _asks(value, REFUSED[name][1]):
                _tell_once(name, repr(value), REFUSED[name][0])
        values = own | _from_models_file(self.models_file) | asked_for(given)
        for name, value in PIPELINE_DEFAULTS.items():
            if not (name == "max_new_tokens" and "max_length" in values):  # `max_length` sets it too
                values.setdefault(name, value)
        values.setdefault("pad_token_id", pad_token_id)
        values.setdefault("top_k", _TOP_K)
        return GenerationSettings(values, self).checked()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationSettings:
    """The resolved settings of one call, by transformers' names. None means off, or the default of `generate`."""

    values: Mapping[str, Any]
    model: ModelDefaults

    def checked(self) -> Self:
        """These settings. Raises ValueError for contradictory ones; `SamplingParams` checks each alone."""
        if self.num_sequences > 1 and self.num_beams == 1 and not self.samples:
            raise ValueError(
                f"num_return_sequences {self.num_sequences} would be so many times the same: greedy search gives one; "
                f"set do_sample=True or num_beams"
            )
        if self.samples and self._get("temperature", 1.0) == 0:
            raise ValueError("temperature must be above 0 to sample: for greedy search set do_sample=False")
        return self

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self._get("do_sample", False))

    @property
    def num_sequences(self) -> int:
        """Continuations of each prompt."""
        return int(self._get("num_return_sequences", 1))

    @property
    def num_beams(self) -> int:
        """The number of beams; 1 is no beam search."""
        return int(self._get("num_beams", 1))

    @property
    def bos_token_id(self) -> int | None:
        """The first token of an empty prompt."""
        return next(iter(_ids(self._get("bos_token_id", None))), None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end ids, without ids outside the vocabulary."""
        return tuple(i for i in _ids(self._get("eos_token_id", None)) if 0 <= i < self.model.vocab_size)

    @property
    def pad_token_id(self) -> int | None:
        """The id that pads shorter continuations. Beam search treats a padding id of 0 as none."""
        pad = next(iter(_ids(self._get("pad_token_id", None))), None)
        missing = pad is None or (pad == 0 and self.num_beams > 1)
        return next(iter(self.eos_token_ids), pad) if missing else pad

    def num_new_tokens(self, prompt_length: int, prefix_length: int = 0) -> tuple[int, int]:
        """The least and most tokens to generate. `max_length` and `min_length` include the prompt, but not its prefix.

        Raises ValueError if the prompt leaves no room below `max_length`.
        """
        most, total = self._get("max_new_tokens", None), self._get("max_length", None)
        if most is None:
            if total is not None:
                total += prefix_length
            else:
                total = min(prompt_length + _NEW_TOKENS, self.model.max_positions or prompt_length + _NEW_TOKENS)
            most = total - prompt_length
            if most < 1:
                raise ValueError(
                    f"the prompt has {prompt_length:,} tokens and max_length is {total:,}, prompt included: raise "
                    f"max_length, or better set max_new_tokens"
                )
        least = self._get("min_new_tokens", None)
        if least is None:
            least = max(0, self._get("min_length", 0) + prefix_length - prompt_length)
        return min(least, most), most

    def sampling_params(self, prompt_length: int, prefix_length: int = 0) -> SamplingParams:
        """The sampling parameters for a prompt of this length. All are set, so that no default of the model applies.

        Without a `seed` one is drawn from torch's generator, so that `transformers.set_seed` has an effect.
        """
        least, most = self.num_new_tokens(prompt_length, prefix_length)
        drawn = self.samples
        seed = self._get("seed", None)
        bias = self._sequence_bias()
        short = all(len(ids) == 1 and math.isfinite(value) for ids, value in bias.items())
        more_stops = self.model.models_file.stop_token_ids or ()
        return SamplingParams(
            max_new_tokens=most,
            min_new_tokens=least,
            temperature=self._get("temperature", 1.0) if drawn else 0.0,
            top_k=self._get("top_k", 0) if drawn else 0,
            top_p=self._get("top_p", 1.0) if drawn else 1.0,
            min_p=self._get("min_p", 0.0) if drawn else 0.0,
            repetition_penalty=self._get("repetition_penalty", 1.0),
            stop=self._get("stop_strings", None),
            stop_token_ids=(*self.eos_token_ids, *more_stops),
            ignore_eos=True,  # the engine's defaults; `stop_token_ids` has all that apply
            seed=int(torch.randint(2**63 - 1, ())) if drawn and seed is None else seed,
            n=self.num_sequences,
            **self._beams(),
            bad_words_ids=self._bad_words(),  # also if empty: None would mean the model's settings
            logit_bias={ids[0]: value for ids, value in bias.items()} if short else {},
            logits_processors=self._processors({} if short else bias) or None,
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _beams(self) -> dict[str, Any]:
        if self.num_beams == 1:
            return {"num_beams": self.num_beams}
        return {
            "num_beams": self.num_beams,
            "length_penalty": self._get("length_penalty", 1.0),
            "early_stopping": self._get("early_stopping", False),
        }

    def _bad_words(self) -> list[list[int]]:
        """Lists of ids; single end ids do not count, as in transformers."""
        ends = [[i] for i in self.eos_token_ids]
        bad = [list(ids) for ids in self._get("bad_words_ids", [])]
        return [ids for ids in bad if ids not in ends] + [[i] for i in _ids(self._get("suppress_tokens", None))]

    def _sequence_bias(self) -> dict[tuple[int, ...], float]:
        given = self._get("sequence_bias", {})
        pairs = given.items() if isinstance(given, Mapping) else given
        return {tuple(ids): float(value) for ids, value in pairs}

    def _processors(self, bias: Mapping[tuple[int, ...], float]) -> tuple[LogitsProcessor, ...]:
        """transformers' processors for what the engine lacks, in its order, then the caller's."""
        processors: list[Any] = []
        if bias:
            processors.append(SequenceBiasLogitsProcessor(sequence_bias=dict(bias)))
        if size := self._get("no_repeat_ngram_size", 0):
            processors.append(NoRepeatNGramLogitsProcessor(size))
        if allowed := self._get("prefix_allowed_tokens_fn", None):
            processors.append(PrefixConstrainedLogitsProcessor(allowed, num_beams=1))  # it sees one sequence at a time
        given = self._get("logits_processor", ())
        if not isinstance(given, Iterable):
            raise ValueError(f"logits_processor must be a list of processors, got {type(given).__name__}")
        return (*processors, *given)


def asked_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arguments, over those of a `generation_config` among them.

    Raises ValueError for the first unsupported setting.
    """
    asked: dict[str, Any] = {}
    theirs = given.get("generation_config")
    if theirs is not None:
        if not isinstance(theirs, GenerationConfig):
            raise ValueError(f"generation_config must be transformers' GenerationConfig, got {type(theirs).__name__}")
        asked = theirs.to_diff_dict()
    # Read an iterator once, so that every prompt has its items.
    lists = {name: list(value) if isinstance(value, Iterator) else value for name, value in given.items()}
    asked |= {name: value for name, value in lists.items() if name != "generation_config"}
    for name, value in asked.items():
        if value is None or name in SERVED or name in HARMLESS:
            continue
        why, off = REFUSED.get(name, ("this engine does not know that setting", ()))
        if _asks(value, off):
            raise ValueError(f"{name}={value!r} is not served: {why}")
    return asked


def _asks(value: Any, off: Sequence[Any]) -> bool:
    """Whether a setting's value has an effect. `off` are the values without one, besides False."""
    return value is not False and not any(value is not True and value == one for one in off)


@lru_cache(maxsize=256)
def _tell_once(name: str, value: str, why: str) -> None:
    log.warning("the model's generation config has %s=%s, which is not served and has no effect: %s", name, value, why)


def known_to_transformers() -> frozenset[str]:
    """The names of all generation settings of the installed transformers."""
    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def _from_models_file(sampling: SamplingParams) -> dict[str, Any]:
    """The models file's defaults by transformers' names. The engine applies those without such a name, such as `bad_words`."""
    names = (
        "max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty",
        "early_stopping", "bad_words_ids",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(sampling, name)) is not None}
    if sampling.n is not None:
        given["num_return_sequences"] = sampling.n
    if sampling.logit_bias is not None:
        given["sequence_bias"] = {(token_id,): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.stop is not None:
        given["stop_strings"] = sampling.stop
    if sampling.temperature is not None:
        given["do_sample"] = sampling.temperature > 0
        if sampling.temperature > 0:
            given["temperature"] = sampling.temperature
    return given


def _ids(value: Any) -> Sequence[int]:
    """A list of ids from one id, several, a tensor, or None."""
    if value is None:
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Iterable) else [value]
