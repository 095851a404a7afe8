"""Limits on concurrent work."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SCORED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits. At most `max_step_tokens` sequences run, because each decode gets a token in every step."""

    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    max_chunk_tokens: int | None = None
    forecast: bool = True  # False admits every request that fits now

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_step_tokens", "max_model_len", "max_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def max_scored_tokens(self) -> int:
        """Prompt tokens with log-probabilities computed per step.

        As many as sequences may run, because memory is planned for that many logits; at least LEAST_SCORED_TOKENS.
        """
        return max(self.max_seqs, LEAST_SCORED_TOKENS)

    @property
    def seats(self) -> int:
        """Sequences that may run at the same time."""
        return min(self.max_seqs, self.max_step_tokens)
