"""Input normalization: checks prompts and parameters as callers pass them in, and converts them to `PromptInput`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...cache.block_table import Int32
from ...scheduler.errors import RequestRejected
from ...scheduler.request import SamplingParams
from ..text.encoder import Encoder, PreparedParams
from .handover import Handover

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
MOST_PRIORITY = 1000  # largest absolute value


class PromptInput(NamedTuple):
    """A prompt ready to be queued: its text (None if given as ids), token ids, merged parameters and data derived from these.

    `before` is the state of an imported request.
    """

    prompt: str | None
    token_ids: Int32
    params: SamplingParams
    prepared: PreparedParams
    before: Handover | None = None


def pair_params(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Pair one or many prompts with their parameters. Raises RequestRejected."""
    many = _as_list(prompts)
    each: list[Any]
    if isinstance(params, SamplingParams | None):
        each = [params or SamplingParams()] * len(many)
    else:
        each = list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
    for given in each:
        if not isinstance(given, SamplingParams):
            raise RequestRejected(f"sampling_params must be SamplingParams, got {type(given).__name__}")
    if len(each) != len(many):
        raise RequestRejected(f"{len(many)} prompts, but {len(each)} sampling_params: give one for all, or one each")
    return list(zip(many, each, strict=True))


def encode_pairs(
    pairs: Sequence[tuple[Prompt, SamplingParams]],
    encoder: Encoder,
    defaults: SamplingParams,
    eos_token_ids: Sequence[int],
) -> list[PromptInput]:
    """Encode prompts and merge their parameters over the model's defaults. Shared parameters are prepared once.

    Does not compile constraints. Raises RequestRejected.
    """
    prepared: dict[int, tuple[SamplingParams, PreparedParams]] = {}  # by the identity of the parameters
    inputs = []
    for prompt, params in pairs:
        if (known := prepared.get(id(params))) is None:
            try:
                whole = params.over(defaults)
            except ValueError as error:  # the parameters contradict the model's settings
                raise RequestRejected(f"with the model's own settings: {error}") from error
            known = prepared[id(params)] = whole, encoder.prepare(whole, eos_token_ids)
        inputs.append(
            PromptInput(prompt if isinstance(prompt, str) else None, encoder.encode(prompt, known[0]), *known)
        )
    return inputs


def conversations(messages: Any) -> list[Any]:
    """A list of conversations, from one or several. Raises RequestRejected."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestRejected(
            f"messages must be a list of {{'role': ..., 'content': ...}}, or several such lists, got "
            f"{type(messages).__name__}"
        )
    many = list(messages)
    return [many] if many and isinstance(many[0], Mapping) else many


def paired(
    prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    """Pair each prompt with its parameters, lazily.

    Raises RequestRejected if `prompts` is not an iterable of prompts, and during iteration if the parameters end first.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestRejected(f"prompts must be an iterable of prompts, got {type(prompts).__name__}")
    if isinstance(params, SamplingParams | None):
        return ((prompt, params) for prompt in prompts)
    return _paired(prompts, params)


def _paired(
    prompts: Iterable[Prompt], params: Iterable[SamplingParams]
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    each = iter(params)
    for number, prompt in enumerate(prompts):
        own = next(each, None)
        if own is None:
            raise RequestRejected(
                f"there are {number} sampling_params, and more prompts: give one for all, or one each"
            )
        yield prompt, own


def check_count(name: str, value: object) -> None:
    """Raise RequestRejected unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestRejected(f"{name} must be an integer of at least 1, got {value!r}")


def checked_priority(priority: object) -> int:
    """Return `priority`. Raises RequestRejected unless it is an integer from -MOST_PRIORITY to MOST_PRIORITY."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST_PRIORITY:
        raise RequestRejected(f"priority must be an integer from {-MOST_PRIORITY} to {MOST_PRIORITY}, got {priority!r}")
    return priority


def check_cache_salt(cache_salt: object) -> None:
    """Raise RequestRejected unless `cache_salt` is a text or None."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestRejected(f"cache_salt must be a text, or None for none, got {type(cache_salt).__name__}")


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts, from one or several. Raises RequestRejected for none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got {type(prompts).__name__}")
    many = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # `tolist`: arrays and tensors
    if not isinstance(many, list):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got the single number {many!r}")
    if not many:
        raise RequestRejected("no prompt was given: pass a string, token ids, or a list of them")
    first = many[0]
    return [many] if not isinstance(first, str) and not isinstance(first, Iterable) else many
