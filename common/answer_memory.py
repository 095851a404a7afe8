"""The memory that answers take in a process until they are delivered: of one answer, and what is planned for all."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKEN_BYTES = 48  # a token of a prompt, in lists of ids
# A token of an output: its id in lists of the engine, of a message and of a response, and its text
TOKEN_BYTES = 128
SCORED_BYTES = 256  # more, if it has log-probabilities
LIKELY_BYTES = 40  # more, for each likely token in its place, in arrays or packed
MOST_UNREAD_BYTES = 16 << 20  # of a stream's output that its reader has not read
LEAST_PLANNED_BYTES, _MOST_PLANNED_BYTES = 32 << 20, 4 << 30
_SHARE = 1 / 32  # of the free memory


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """What an answer may come to have.

    Attributes:
        num_sequences: Those that run: prompts times `n`, `best_of` or beams.
        num_tokens: Of all outputs together.
        num_prompt: Tokens of all prompts together.
        logprobs, prompt_logprobs: Likely tokens for each token of outputs and of prompts; None: no log-probabilities.
        is_streamed: Outputs are sent as they come, and released then.
    """

    num_sequences: int
    num_tokens: int
    num_prompt: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_streamed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the answer takes in a process at most.

        One sequence without log-probabilities counts nothing: beside the K and V of its tokens they are little, and it is
        delivered when it ends. Others wait for the last one of their request.
        """
        waiting = self.num_tokens - (self.num_tokens // self.num_sequences if self.logprobs is None else 0)
        outputs = waiting * TOKEN_BYTES + _scored_bytes(self.num_tokens, self.logprobs)
        if self.is_streamed:
            outputs = min(outputs, MOST_UNREAD_BYTES)
        return outputs + self.num_prompt * PROMPT_TOKEN_BYTES + _scored_bytes(self.num_prompt, self.prompt_logprobs)

    def __str__(self) -> str:
        """What was asked for, in an error."""
        outputs = f"{self.num_sequences:,} sequences with {self.num_tokens:,} tokens in all{_with(self.logprobs)}"
        prompts = f", and prompts of {self.num_prompt:,} tokens{_with(self.prompt_logprobs)}" if self.num_prompt else ""
        return outputs + prompts


def planned_bytes(free_bytes: int) -> int:
    """Bytes for all answers of an engine on a host with so much free memory."""
    return max(LEAST_PLANNED_BYTES, min(_MOST_PLANNED_BYTES, int(free_bytes * _SHARE)))


def _scored_bytes(count: int, likely: int | None) -> int:
    return 0 if likely is None else count * (SCORED_BYTES + likely * LIKELY_BYTES)


def _with(likely: int | None) -> str:
    return "" if likely is None else f" and {likely:,} log-probabilities for each"
