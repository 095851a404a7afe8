"""Input normalization: checks prompts and parameters as callers pass them in, and converts them to `PromptInput`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...api.sampling_params import SamplingParams
from ...cache.block_table import Int32
from ...cache.retention import Retention
from ...scheduler.request import RequestRejected
from .handover import Handover

if TYPE_CHECKING:
    from ..text.encoder import Encoder, PreparedParams  # imports torch

Prompt = str | Sequence[int] | Mapping[str, Any]  # a text; token ids; vLLM's form of either; a tokenizer's result
# One prompt, or several. A union of `Sequence[int]` and `Sequence[Prompt]` would leave type checkers without a type for lists.
Prompts = str | Mapping[str, Any] | Sequence[int | Prompt]
Message = Mapping[str, Any]
MOST_PRIORITY = 1000  # largest absolute value
LONGEST_LABEL = 128  # characters
# Of vLLM's prompts; a name for watchers; how long it is worth keeping
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "label", "retention")
_ENCODING_KEYS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # of a tokenizer's results


class PromptInput(NamedTuple):
    """A prompt ready to be queued: its text (None if given as ids), token ids, merged parameters and data derived from these.

    `before` is the state of an imported request. `cache_salt` is the prompt's own; None is the call's. `label` is the
    caller's name for the request, `retention` a hint of how long the prompt is worth keeping. `pin` names a new pin
    of the prompt's blocks; empty: none.
    """

    prompt: str | None
    token_ids: Int32
    params: SamplingParams
    prepared: PreparedParams
    before: Handover | None = None
    cache_salt: str | None = None
    label: str = ""
    retention: Retention | None = None
    pin: str = ""


def parse_prompt(prompt: Any) -> tuple[str | Sequence[int], str | None, dict[str, Any]]:
    """Parse one prompt of any form: what to encode, its text (None if only ids are known), its other fields of `PromptInput`.

    Raises RequestRejected for a mapping without a prompt, with several, or with other keys.
    """
    if isinstance(prompt, str):
        return prompt, prompt, {}
    if not isinstance(prompt, Mapping):
        return prompt, None, {}
    if "input_ids" in prompt:
        many = _encoded_prompts(prompt)
        if len(many) != 1:
            raise RequestRejected(f"the tokenizer's result has {len(many)} prompts, and one is needed here: give its rows")
        return many[0], None, {}
    _refuse_other_keys(prompt, _PROMPT_KEYS)
    given: list[Any] = [prompt.get(name) for name in _PROMPT_KEYS]
    text, ids, salt, label, retention = given
    if text is None and ids is None:
        raise RequestRejected("a prompt given as a mapping needs `prompt` or `prompt_token_ids`")
    if text is not None and not isinstance(text, str):
        raise RequestRejected(f"`prompt` of a mapping must be a text, got {type(text).__name__}")
    if isinstance(ids, str):  # a text would be tokenized
        raise RequestRejected("`prompt_token_ids` of a mapping must be a list of token ids, got str; a text is its `prompt`")
    check_cache_salt(salt)
    if label is not None and (not isinstance(label, str) or len(label) > LONGEST_LABEL):
        raise RequestRejected(f"`label` of a mapping must be a text of at most {LONGEST_LABEL} characters, got {label!r:.80}")
    if retention is not None and not isinstance(retention, Retention):
        raise RequestRejected(f"`retention` of a mapping must be a `Retention`, got {type(retention).__name__}")
    content: Any = text if ids is None else ids
    return content, text, {"cache_salt": salt, "label": label or "", "retention": retention}


def text_of(prompt: object) -> str | None:
    """The text of a prompt that may be invalid; None if it has none."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def pair_params(
    prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None
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
    pairs: Sequence[tuple[Prompt, SamplingParams]], encoder: Encoder, defaults: SamplingParams, eos_token_ids: Sequence[int]
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
            whole = encoder.with_special_stops(whole)
            known = prepared[id(params)] = whole, encoder.prepare(whole, eos_token_ids)
        content, text, others = parse_prompt(prompt)
        ids = encoder.encode(content, known[0])
        inputs.append(PromptInput(text, ids, *known, **others))
    return inputs


def conversations(messages: Any) -> list[Any]:
    """A list of conversations, from one or several. Raises RequestRejected."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestRejected(
            f"messages must be a list of {{'role': ..., 'content': ...}}, or several such lists, got {type(messages).__name__}"
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


def _paired(prompts: Iterable[Prompt], params: Iterable[SamplingParams]) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    each = iter(params)
    for number, prompt in enumerate(prompts):
        own = next(each, None)
        if own is None:
            raise RequestRejected(f"there are {number} sampling_params, and more prompts: give one for all, or one each")
        yield prompt, own


def check_count(name: str, value: object) -> None:
    """Raise RequestRejected unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestRejected(f"{name} must be an integer of at least 1, got {value!r}")


def joined_progress(progress: bool | None, use_tqdm: bool | None) -> bool | None:
    """`progress`, given by either name. Raises RequestRejected if both are given and differ, or one is not a bool."""
    given = {value for value in (progress, use_tqdm) if value is not None}
    if len(given) > 1:
        raise RequestRejected(f"progress is {progress} and use_tqdm {use_tqdm}: they mean the same")
    for value in given:
        if not isinstance(value, bool):
            raise RequestRejected(f"progress must be True, False or None, got {value!r:.80}")
    return given.pop() if given else None


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
    if isinstance(prompts, Mapping):
        return _encoded_prompts(prompts) if "input_ids" in prompts else [prompts]
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got {type(prompts).__name__}")
    many = _plain(prompts)
    if not isinstance(many, list):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got the single number {many!r}")
    if not many:
        raise RequestRejected("no prompt was given: pass a string, token ids, or a list of them")
    first = many[0]
    return [many] if not isinstance(first, str) and not isinstance(first, Iterable) else many


def _encoded_prompts(encoding: Mapping[str, Any]) -> list[Any]:
    """The token ids of each prompt in a tokenizer's result (`BatchEncoding`), without padding.

    Raises RequestRejected for other keys than a tokenizer's, and for a mask of another shape than the ids.
    """
    _refuse_other_keys(encoding, _ENCODING_KEYS)
    many, mask = _as_list(encoding["input_ids"]), encoding.get("attention_mask")
    if mask is None:
        return many
    masks = _as_list(mask)
    try:
        rows = zip(map(_plain, many), map(_plain, masks), strict=True)
        return [[i for i, kept in zip(ids, row, strict=True) if kept] for ids, row in rows]
    except (TypeError, ValueError) as error:
        raise RequestRejected("attention_mask must have the shape of input_ids") from error


def _plain(values: Any) -> Any:
    """A list of `values`; arrays and tensors have `tolist`."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _refuse_other_keys(given: Mapping[str, Any], known: Sequence[str]) -> None:
    other = [key for key in given if key not in known and given[key] is not None]
    if other:
        raise RequestRejected(f"a prompt cannot have the key {other[0]!r:.80}; known are {', '.join(known)}")
