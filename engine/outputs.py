"""What a request gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..scheduler.scheduler import FinishReason


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the submission to the first token, and to the end."""

    first_token_s: float | None  # None when it ended without a token
    total_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    `finish_reason` is "stop" (an end id, stop id or stop string), "length" (`max_new_tokens`, the model's context or the
    pool's capacity), "aborted", or "error" (then `error` says what happened; the tokens so far are there).
    """

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    text: str | None  # what follows the prompt, cut before a stop string; None without a tokenizer
    token_ids: list[int]  # everything generated, the end id included
    finish_reason: FinishReason
    timings: Timings
    num_preemptions: int = 0
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What is new of one request: `text` ends at a whole character and never changes later.

    The last chunk of a request has `output`, and its `finish_reason`.
    """

    index: int  # of the prompt
    text: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the request has ended."""
        return self.output.finish_reason if self.output else None
