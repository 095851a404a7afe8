"""The outputs of requests: completions, stream chunks, timings and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from ...api.arguments import explains_names
from ...scheduler.request import FinishReason


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from submission to the first token, to the end, and to the first admission."""

    first_token_s: float | None  # None if the request ended without a token
    total_s: float
    queued_s: float | None = None  # None if it was never admitted, or by another engine before a hand-over


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token given those before it, from raw logits: before logits processors and temperature.

    Natural logarithm. A token that the model rules out has the lowest float32, about -3.4e38.
    """

    token_id: int
    logprob: float
    rank: int  # number of tokens at least as likely, from 1
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones and their log-probabilities, best first


Logprobs = TypeVar("Logprobs", TokenLogprobs, TokenLogprobs | None)

MOST_SHOWN_TOKENS = 8  # in a repr
MOST_SHOWN_CHARACTERS = 60


@explains_names("Completion")
@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One continuation of a prompt.

    `text` is without the prompt and cut before a stop string. A model without a tokenizer has none: reading it raises
    AttributeError, and `decoded` is None.

    `finish_reason` is "stop" (an end id, stop id or stop string), "length" (`max_new_tokens`, the model's context or the
    pool's capacity), "aborted", or "error" (`error` has the message; the tokens so far are included).
    """

    decoded: str | None  # the text; None without a tokenizer
    token_ids: list[int]  # all generated tokens, the end id included
    finish_reason: FinishReason
    timings: Timings
    num_preemptions: int = 0
    error: str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None  # one for each of `token_ids`; None if not requested
    cumulative_logprob: float | None = None  # their sum; set with `best_of` too

    @property
    def text(self) -> str:
        """The generated text. Raises AttributeError if the model has no tokenizer."""
        if self.decoded is None:
            raise AttributeError(
                "there is no text, because the model has no tokenizer: read token_ids, or give the engine tokenizer=..."
            )
        return self.decoded

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. `text` is None without a tokenizer."""
        told = asdict(replace(self, logprobs=_plain(self.logprobs)))
        return {"text": told.pop("decoded"), **told}

    def __repr__(self) -> str:
        """The beginning of the text and of the tokens, their number and the finish reason."""
        error = f", error={self.error!r}" if self.error is not None else ""
        text = _shown_text(self.decoded)
        tokens = _shown_tokens(self.token_ids)
        return f"Completion(text={text}, token_ids={tokens}, finish_reason={self.finish_reason!r}{error})"


@explains_names("RequestOutput")
@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """The output of a finished request: its `n` continuations, with `best_of` the best first.

    `completions` has all continuations, and `outputs` is vLLM's name for it. The other properties are the first
    continuation's.

    `num_cached_tokens` is the number of `prompt_token_ids` found in the prefix cache at the first admission; these were not
    computed. It is 0 for a prompt that was never admitted, and one number for all continuations and beams. An imported
    request keeps the number of its first engine. Of these, `num_disk_tokens` were read from the disk tier here.

    `prompt_logprobs` has one entry for each of `prompt_token_ids`, None for the first. It is None if not requested, and shorter
    if the request ended before its prompt was computed.
    """

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    completions: tuple[Completion, ...]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """`completions`, by vLLM's name."""
        return self.completions

    @property
    def text(self) -> str:
        """The generated text, cut before a stop string. Raises AttributeError if the model has no tokenizer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """All generated tokens, the end id included."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended: see `Completion`."""
        return self.completions[0].finish_reason

    @property
    def timings(self) -> Timings:
        """Seconds to the first token and to the end."""
        return self.completions[0].timings

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions."""
        return self.completions[0].num_preemptions

    @property
    def error(self) -> str | None:
        """The error message if `finish_reason` is "error"."""
        return self.completions[0].error

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. `text` is None without a tokenizer."""
        told = asdict(replace(self, completions=(), prompt_logprobs=_plain(self.prompt_logprobs)))
        return {**told, "completions": tuple(completion.to_dict() for completion in self.completions)}

    def __repr__(self) -> str:
        """The id, the beginning and length of the prompt, and the completions."""
        prompt = _shown_tokens(self.prompt_token_ids) if self.prompt is None else _shown_text(self.prompt)
        count = f"{len(self.prompt_token_ids)} tokens"
        return f"RequestOutput({self.request_id!r}, prompt={prompt} ({count}), completions={list(self.completions)!r})"


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The first `num_tokens` tokens of a prompt, which stay computed until `unpin_prefix` of the engine that gave this."""

    name: str
    num_tokens: int  # in full blocks


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New tokens and text of one continuation. `text` ends at a whole character and never changes later.

    The last chunk of a continuation has its `completion` and `finish_reason`; the last chunk of a prompt also has `output`.
    """

    index: int  # of the prompt
    text: str
    token_ids: list[int] = field(default_factory=list)
    number: int = 0  # of the continuation, among the prompt's n
    completion: Completion | None = None
    output: RequestOutput | None = None
    logprobs: Sequence[TokenLogprobs] | None = None  # of `token_ids`, if requested

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the continuation has ended."""
        return self.completion.finish_reason if self.completion else None


def refused(prompt: str | None, error: str, has_tokenizer: bool) -> RequestOutput:
    """The output of a rejected request, which was never started."""
    end = Completion("" if has_tokenizer else None, [], "error", Timings(None, 0.0), error=error)
    return RequestOutput("", prompt, [], (end,))


def _plain(logprobs: Sequence[Logprobs] | None) -> tuple[Logprobs, ...] | None:
    return None if logprobs is None else tuple(logprobs)


def _shown_text(text: str | None) -> str:
    if text is None or len(text) <= MOST_SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:MOST_SHOWN_CHARACTERS]!r}... ({len(text):,} characters)"


def _shown_tokens(token_ids: list[int]) -> str:
    if len(token_ids) <= MOST_SHOWN_TOKENS:
        return repr(token_ids)
    return f"[{', '.join(map(str, token_ids[:MOST_SHOWN_TOKENS]))}, ... {len(token_ids):,} in all]"


def mean_logprob(completion: Completion) -> float:
    """The score for `best_of`: the mean log-probability of a token; -inf unless the reason is "stop" or "length"."""
    total, whole = completion.cumulative_logprob, completion.finish_reason in ("stop", "length")
    return total / len(completion.token_ids) if whole and total is not None and completion.token_ids else -math.inf
