"""What a request gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...scheduler.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the submission to the first token, and to the end."""

    first_token_s: float | None  # None when it ended without a token
    total_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model thought a token behind those before it: of its own logits, before any treatment of sampling.

    Natural logarithms. What the model rules out has the lowest float32, about -3.4e38.
    """

    token_id: int
    logprob: float
    rank: int  # how many tokens are at least as likely, from 1
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones and their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation of a prompt.

    `finish_reason` is "stop" (an end id, stop id or stop string), "length" (`max_new_tokens`, the model's context or the
    pool's capacity), "aborted", or "error" (then `error` says what happened; the tokens so far are there).
    """

    text: str | None  # what follows the prompt, cut before a stop string; None without a tokenizer
    token_ids: list[int]  # everything generated, the end id included
    finish_reason: FinishReason
    timings: Timings
    num_preemptions: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one of each of `token_ids`; None where nobody asked
    cumulative_logprob: float | None = None  # their sum; known with `best_of` too


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: the `n` continuations that were asked for, with `best_of` the best first. The properties are those of
    the first.

    `num_cached_tokens` is how many of `prompt_token_ids` the prefix cache had when it was first admitted; these were not
    computed. It is 0 for a prompt that was never admitted, and one number for all continuations and beams: those after the
    first share what the first one finds and computes. A request that was handed over keeps the number of its first engine.

    `prompt_logprobs` has one of each of `prompt_token_ids`, None for the first one, which nothing is before. It is None where
    nobody asked, and ends where the prompt's computation did, if the request was ended before.
    """

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str | None:
        """What follows the prompt, cut before a stop string; None without a tokenizer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Everything generated, the end id included."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended: see `Completion`."""
        return self.completions[0].finish_reason

    @property
    def timings(self) -> Timings:
        """When the first token came, and the end."""
        return self.completions[0].timings

    @property
    def num_preemptions(self) -> int:
        """How often it had to give its blocks back."""
        return self.completions[0].num_preemptions

    @property
    def error(self) -> str | None:
        """What happened, where `finish_reason` is "error"."""
        return self.completions[0].error

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What is new of one continuation: `text` ends at a whole character and never changes later.

    The last chunk of a continuation has `completion`, and its `finish_reason`; the last chunk of all of a prompt's has
    `output` as well.
    """

    index: int  # of the prompt
    text: str
    token_ids: list[int] = field(default_factory=list)
    number: int = 0  # of the continuation, of the prompt's n
    completion: Completion | None = None
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, if they were asked for

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the continuation has ended."""
        return self.completion.finish_reason if self.completion else None


def refused(prompt: str | None, error: str) -> RequestOutput:
    """The output of a request that was never started."""
    end = Completion(None, [], "error", Timings(None, 0.0), error=error)
    return RequestOutput("", prompt, [], (end,))
