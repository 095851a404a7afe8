"""Serialization of an exported request for another process: plain data, validated on import.

The settings are the resolved ones, with seed and end ids: docs/decisions/0022-hand-over.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...api.sampling_params import MOST_FORKS, SamplingParams
from ...cache.block_table import Int32
from ...scheduler.plan import ChunkLogprobs
from ...scheduler.request import Request, RequestRejected, Sampling
from .outputs import TokenLogprobs

log = logging.getLogger(__name__)

VERSION = 2
_KEYS = (
    "version", "model", "vocab_size", "prompt", "prompt_token_ids", "token_ids", "sampling", "index", "priority", "cache_salt",
    "num_told_tokens", "num_told_characters", "num_preemptions", "num_cached_tokens", "first_token_s", "total_s", "logprobs",
    "prompt_logprobs",
)  # fmt: skip
_SETTINGS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "bad_words_ids", "logit_bias", "json_schema", "regex", "grammar", "stop", "stop_token_ids", "seed",
    "logprobs", "prompt_logprobs", "n", "num_beams", "length_penalty", "early_stopping", "skip_special_tokens",
    "kept_special_tokens",
)  # fmt: skip
_SCORES = ("token_ids", "logprobs", "ranks")


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """The state of a request between two steps. `params` leave nothing to the engine's defaults: see `resolved_params`.

    The stream has delivered the first `num_told_tokens` of `token_ids` and `num_told_characters` of their text.
    `num_cached_tokens` (`Finished`) is None if the prompt was not admitted yet. `logprobs` are those of `token_ids`;
    `prompt_logprobs` begin at the prompt's second token and end where the computation did. They are None if not requested.
    """

    prompt: str | None
    prompt_token_ids: Int32
    token_ids: Int32
    params: SamplingParams
    index: int
    priority: int
    cache_salt: str | None
    num_told_tokens: int
    num_told_characters: int
    num_preemptions: int
    num_cached_tokens: int | None
    first_token_s: float | None
    total_s: float
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None

    def request(self, fresh: Request) -> Request:
        """`fresh`, a request with this prompt and these settings, advanced to this state. The seconds so far count as if spent
        here.
        """
        whole = self.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.prompt_token_ids) - 1
        of_prompt = None if whole else fresh.sampling.prompt_logprobs
        return replace(
            fresh,
            sampling=replace(fresh.sampling, index=self.index, prompt_logprobs=of_prompt),
            arrival=fresh.arrival - self.total_s,
            generated=self.token_ids,
        )

    def to_dict(self, model: str, vocab_size: int) -> dict[str, Any]:
        """Plain data for JSON, of a request computed by `model`."""
        settings = {name: _plain(value) for name in _SETTINGS if (value := getattr(self.params, name)) is not None}
        if self.params.logit_bias is not None:
            settings["logit_bias"] = [[int(i), float(bias)] for i, bias in self.params.logit_bias.items()]
        values = (
            VERSION, model, vocab_size, self.prompt, self.prompt_token_ids.tolist(), self.token_ids.tolist(), settings,
            self.index, self.priority, self.cache_salt, self.num_told_tokens, self.num_told_characters, self.num_preemptions,
            self.num_cached_tokens, self.first_token_s, self.total_s, _logprob_columns(self.logprobs),
            _logprob_columns(self.prompt_logprobs),
        )  # fmt: skip
        return dict(zip(_KEYS, values, strict=True))

    @classmethod
    def from_dict(cls, data: object, model: str, vocab_size: int) -> Self:
        """Parse data of `to_dict` for an engine with `model`. A different model of the same vocabulary size is only logged.

        Raises:
            RequestRejected: the data are malformed, of an unknown version or of another vocabulary size.
        """
        if not isinstance(data, Mapping):
            raise RequestRejected(f"what was handed over must be a mapping, as export gives it, got {type(data).__name__}")
        version = data.get("version")
        if version != VERSION:
            raise RequestRejected(
                f"what was handed over has the version {version!r}, and this process reads version {VERSION}: let both "
                f"have the same release of pagetide"
            )
        _check_keys("what was handed over", data, _KEYS, every=True)
        _check_model(data, model, vocab_size)
        _check(data, "prompt", str, optional=True)
        _check(data, "cache_salt", str, optional=True)
        _check_count(data, "index", MOST_FORKS - 1)
        _check(data, "priority", int)
        token_ids, prompt_token_ids = (_ids(name, data[name], vocab_size) for name in ("token_ids", "prompt_token_ids"))
        for name, most in (("num_told_tokens", len(token_ids)), ("num_told_characters", None), ("num_preemptions", None)):
            _check_count(data, name, most)
        if data["num_cached_tokens"] is not None:
            _check_count(data, "num_cached_tokens", len(prompt_token_ids))
        _check_seconds(data, "total_s")
        if data["first_token_s"] is not None:
            _check_seconds(data, "first_token_s")
        params = _params(data["sampling"])
        if (params.num_beams or 1) > 1 and len(token_ids):
            raise RequestRejected("a beam search is handed over from its beginning: token_ids must be empty with num_beams")
        return cls(
            prompt=data["prompt"],
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids,
            params=params,
            index=data["index"],
            priority=data["priority"],
            cache_salt=data["cache_salt"],
            num_told_tokens=data["num_told_tokens"],
            num_told_characters=data["num_told_characters"],
            num_preemptions=data["num_preemptions"],
            num_cached_tokens=data["num_cached_tokens"],
            first_token_s=data["first_token_s"],
            total_s=data["total_s"],
            logprobs=_read(data, "logprobs", params.logprobs, token_ids, vocab_size),
            prompt_logprobs=_read(data, "prompt_logprobs", params.prompt_logprobs, prompt_token_ids[1:], vocab_size),
        )


def resolved_params(params: SamplingParams, sampling: Sampling) -> SamplingParams:
    """Parameters of one continuation, or one beam search, that resolve to `sampling` again under any engine's defaults.

    `params` are those that were resolved to `sampling`.
    """
    searches = (params.num_beams or 1) > 1
    form = {} if sampling.constraint is None else dict([sampling.constraint])
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        bad_words_ids=sampling.bad_words or None,
        logit_bias=dict(sampling.logit_bias) or None,
        stop=params.stop_strings or None,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=True,  # the end ids are among `stop_token_ids`
        seed=sampling.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        skip_special_tokens=params.skip_special_tokens,
        kept_special_tokens=params.kept_special_tokens,
        n=params.n if searches else None,
        num_beams=params.num_beams if searches else None,
        length_penalty=params.length_penalty if searches else None,
        early_stopping=params.early_stopping if searches else None,
        **form,  # type: ignore[arg-type]
    )


def scores_of(entries: Sequence[TokenLogprobs], first: int) -> ChunkLogprobs:
    """Log-probabilities of the tokens from position `first` on, in the form of a step's output. `entries` is not empty."""
    return ChunkLogprobs(
        0,
        first,
        np.array([[e.token_id, *(i for i, _ in e.top)] for e in entries], np.int32),
        np.array([[e.logprob, *(logprob for _, logprob in e.top)] for e in entries], np.float32),
        np.array([e.rank for e in entries], np.int32),
    )


# -- out -----------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _logprob_columns(entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    if not entries:
        return {name: [] for name in _SCORES}
    scores = scores_of(entries, 0)
    return {name: getattr(scores, name).tolist() for name in _SCORES}


# -- in ------------------------------------------------------------------------------------------------------------------


def _check_keys(what: str, data: Mapping[Any, Any], known: Sequence[str], every: bool) -> None:
    missing = [name for name in known if name not in data] if every else []
    unknown = [name for name in data if name not in known]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise RequestRejected(f"{what} {' and '.join(said)}: pass on what export gave, as a whole")


def _check_model(data: Mapping[str, Any], model: str, vocab_size: int) -> None:
    _check(data, "model", str)
    _check(data, "vocab_size", int)
    if data["vocab_size"] != vocab_size:
        raise RequestRejected(
            f"the request is of the model {data['model']!r} with {data['vocab_size']:,} tokens in its vocabulary; {model!r} "
            f"has {vocab_size:,}: tokens mean something else here"
        )
    if data["model"] != model:
        log.info("a request of the model %r continues on %r, with a vocabulary of the same size", data["model"], model)


def _check(data: Mapping[str, Any], name: str, kind: type, optional: bool = False) -> None:
    value = data[name]
    if (value is None and optional) or (isinstance(value, kind) and not isinstance(value, bool)):
        return
    article = {str: "a text", int: "an integer"}[kind]
    raise RequestRejected(f"{name} must be {article}{' or None' if optional else ''}, got {value!r:.80}")


def _check_count(data: Mapping[str, Any], name: str, most: int | None) -> None:
    _check(data, name, int)
    if data[name] < 0 or (most is not None and data[name] > most):
        raise RequestRejected(f"{name} must be from 0 {'on' if most is None else f'to {most:,}'}, got {data[name]}")


def _check_seconds(data: Mapping[str, Any], name: str) -> None:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RequestRejected(f"{name} must be a number of seconds, got {value!r:.80}")


def _ids(name: str, value: object, vocab_size: int) -> Int32:
    if not isinstance(value, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise RequestRejected(f"{name} must be a list of token ids, got {value!r:.80}")
    wrong = [i for i in value if not 0 <= i < vocab_size]
    if wrong:
        raise RequestRejected(f"{name} {wrong[:5]} are outside the vocabulary, which has 0 .. {vocab_size - 1:,}")
    return np.array(value, np.int32)


def _params(settings: object) -> SamplingParams:
    if not isinstance(settings, Mapping):
        raise RequestRejected(f"sampling must be a mapping, got {settings!r:.80}")
    _check_keys("sampling", settings, _SETTINGS, every=False)
    given = dict(settings)
    for name in ("seed", "max_new_tokens", "stop_token_ids"):
        if given.get(name) is None:  # the engine's defaults could change the tokens
            raise RequestRejected(f"sampling has no {name}, without which the tokens could be others")
    try:
        if given.get("logit_bias") is not None:
            given["logit_bias"] = dict(given["logit_bias"])
        params = SamplingParams(**given, ignore_eos=True)
    except (TypeError, ValueError) as error:
        raise RequestRejected(f"sampling cannot be used: {error}") from error
    if (params.num_beams or 1) == 1 and (params.n or 1) > 1:
        raise RequestRejected(f"sampling has n {params.n}: each continuation is handed over by itself")
    return params


def _read(
    data: Mapping[str, Any], name: str, num_top: int | None, token_ids: Int32, vocab_size: int
) -> tuple[TokenLogprobs, ...] | None:
    """Parse the log-probabilities of `token_ids`; those of a prompt may be incomplete. None if `num_top` is None."""
    value = data[name]
    if (value is None) != (num_top is None):
        raise RequestRejected(f"{name} must be there if sampling asks for them, and None if not")
    if value is None or num_top is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestRejected(f"{name} must be a mapping of {', '.join(_SCORES)}, got {value!r:.80}")
    _check_keys(name, value, _SCORES, every=True)
    try:
        ids, logprobs, ranks = (np.array(value[key]) for key in _SCORES)
    except ValueError as error:
        raise RequestRejected(f"{name} must be of lists of the same length: {error}") from error
    count = len(ranks) if ranks.ndim else 0
    shape = (count, 1 + min(num_top, vocab_size))
    whole = count <= len(token_ids) if name == "prompt_logprobs" else count == len(token_ids)
    if not whole or (count and not (ids.shape == logprobs.shape == shape and ranks.shape == shape[:1])):
        raise RequestRejected(
            f"{name} must be of {len(token_ids)} tokens and {num_top} more each, got {ids.shape} token_ids, {logprobs.shape} "
            f"logprobs and {ranks.shape} ranks"
        )
    if not count:
        return ()
    if ids.dtype.kind != "i" or ranks.dtype.kind != "i" or logprobs.dtype.kind not in "if" or not np.isfinite(logprobs).all():
        raise RequestRejected(f"{name} must be of integers and finite numbers")
    if ranks.min() < 1 or ranks.max() > vocab_size:
        raise RequestRejected(f"{name} must have ranks from 1 to {vocab_size:,}")
    if ids.min() < 0 or ids.max() >= vocab_size or (ids[:, 0] != token_ids[:count]).any():
        raise RequestRejected(f"{name} are of other tokens than the request's")
    return tuple(
        TokenLogprobs(one[0], numbers[0], rank, tuple(zip(one[1:], numbers[1:], strict=True)))
        for one, numbers, rank in zip(ids.tolist(), logprobs.astype(float).tolist(), ranks.tolist(), strict=True)
    )
