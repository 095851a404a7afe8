"""What requests say of how long their prompts are worth keeping: OpenAI's, Anthropic's and vLLM's fields, as one hint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..cache.retention import Retention
from .errors import invalid

MOST_S = 86_400.0  # longer hints are shortened to it
_ANTHROPIC_TTLS = ("5m", "1h")
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"{_NUMBER}({'|'.join(sorted(_UNITS_S, key=len, reverse=True))})")


def duration_s(given: str) -> float:
    """The seconds of a text such as "30m", "1h30m" or "90". Raises ValueError."""
    text = given.lstrip("+-")
    if re.fullmatch(_NUMBER, text):
        seconds = float(text)
    elif re.fullmatch(f"(?:{_PART.pattern})+", text):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    else:
        raise ValueError(f'give seconds, or a duration such as "30m" or "1h30m", got {given!r:.80}')
    return -seconds if given.startswith("-") else seconds


class PromptCacheOptions(BaseModel):
    """OpenAI's `prompt_cache_options`. Prefixes are cached without it; `ttl` says for how long at least."""

    model_config = ConfigDict(extra="ignore")
    ttl: str | None = None
    mode: Literal["implicit", "explicit"] | None = None  # without effect

    @field_validator("ttl")
    @classmethod
    def _is_time(cls, given: str | None) -> str | None:
        if given is not None and duration_s(given) <= 0:
            raise ValueError(f"give a time above 0, got {given!r:.80}")
        return given


class RetainDirective(BaseModel):
    """A range of tokens in a `kv.retain` action. Its `priority` makes no difference."""

    start: Annotated[int, Field(ge=0)] = 0
    end: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] | None = None
    duration: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    covers_output: bool = False

    @model_validator(mode="after")
    def _is_range(self) -> RetainDirective:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"a range ends behind its start, got {self.start} to {self.end}")
        return self


class RetainPayload(BaseModel):
    """The payload of a `kv.retain` action."""

    scope: str | None = None
    directives: Annotated[list[RetainDirective], Field(max_length=64, fail_fast=True)] = []


class KvHintAction(BaseModel):
    """An action of vLLM's `kv_hints`. Others than `kv.retain` are ignored."""

    action_type: str
    payload: dict[str, Any] = {}


class KvHints(BaseModel):
    """vLLM's `kv_hints`."""

    actions: Annotated[list[KvHintAction], Field(max_length=64, fail_fast=True)] = []


def hint_of(options: PromptCacheOptions | None, retention: str | None, hints: KvHints | None) -> Retention | None:
    """The hint of a request: the longest time, of the furthest range. `retention` is OpenAI's `prompt_cache_retention`.

    Raises ValidationError for the payload of a `kv.retain` action.
    """
    found: list[tuple[float, int | None]] = []
    if options is not None and options.ttl is not None:
        found.append((duration_s(options.ttl), None))
    if retention == "24h":
        found.append((MOST_S, None))
    for action in () if hints is None else hints.actions:
        if action.action_type == "kv.retain":
            directives = RetainPayload.model_validate(action.payload).directives
            found += [(one.duration or MOST_S, one.end) for one in directives if not one.covers_output]
    if not found:
        return None
    ends = [end for _, end in found if end is not None]
    return Retention(min(max(seconds for seconds, _ in found), MOST_S), max(ends) if len(ends) == len(found) else None)


def longest_ttl(blocks: Iterable[Any]) -> str | None:
    """The longest time of Anthropic's `cache_control` in objects and what they hold; None without one. Raises ApiError."""
    ttls = list(_ttls(blocks))
    return max(ttls, key=_ANTHROPIC_TTLS.index) if ttls else None


def _ttls(blocks: Iterable[Any]) -> Iterator[str]:
    for block in blocks:
        if not isinstance(block, dict):
            continue
        control = block.get("cache_control")
        if control is not None:
            kind, ttl = (control.get("type"), control.get("ttl") or "5m") if isinstance(control, dict) else (None, None)
            if kind != "ephemeral" or ttl not in _ANTHROPIC_TTLS:
                wanted = '{"type": "ephemeral"}, with a "ttl" of "5m" or "1h"'
                raise invalid(f"cache_control: give {wanted}, got {control!r:.80}", "cache_control")
            yield ttl
        if isinstance(content := block.get("content"), list):
            yield from _ttls(content)
