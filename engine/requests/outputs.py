"""The outputs of requests: completions, stream chunks, timings and log-probabilities."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...scheduler.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from submission to the first token and to the end."""

    first_token_s: float | None  # None if the request ended without a token
    total_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token given those before it, from raw logits: before logits processors and temperature.

    Natural logarithm. A token that the model rules out has the lowest float32, about -3.4e38.
    """

    token_id: int
    logprob: float
    rank: int  # number of tokens at least as likely, from 1
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones and their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation of a prompt.

    `finish_reason` is "stop" (an end id, stop id or stop string), "length" (`max_new_tokens`, the model's context or the
    pool's capacity), "aborted", or "error" (`error` has the message; the tokens so far are included).
    """

    text: str | None  # without the prompt, cut before a stop string; None without a tokenizer
    token_ids: list[int]  # all generated tokens, the end id included
    finish_reason: FinishReason
    timings: Timings
    num_preemptions: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of `token_ids`; None if not requested
    cumulative_logprob: float | None = None  # their sum; set with `best_of` too


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a finished request: its `n` continuations, with `best_of` the best first.

    The properties are the first continuation's.

    `num_cached_tokens` is the number of `prompt_token_ids` found in the prefix cache at the first admission; these were not
    computed. It is 0 for a prompt that was never admitted, and one number for all continuations and beams. An imported
    request keeps the number of its first engine.

    `prompt_logprobs` has one entry for each of `prompt_token_ids`, None for the first. It is None if not requested, and shorter
    if the request ended before its prompt was computed.
    """

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str | None:
        """The generated text, cut before a stop string; None without a tokenizer."""
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
        """Plain data, for JSON."""
        return asdict(self)


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
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, if requested

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the continuation has ended."""
        return self.completion.finish_reason if self.completion else None


def refused(prompt: str | None, error: str) -> RequestOutput:
    """The output of a rejected request, which was never started."""
    end = Completion(None, [], "error", Timings(None, 0.0), error=error)
    return RequestOutput("", prompt, [], (end,))
