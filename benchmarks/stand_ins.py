"""Stand-ins for a model, in place of `ModelRunner.model`: their logits determine the next token."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from pagetide.engine.attention.context import StepContext


class Always:
    """A step takes `step_s`, in which other threads run as they do beside torch; the next token is always `token`."""

    def __init__(self, token: int, vocab_size: int, step_s: float = 0.0) -> None:
        self._token, self._vocab_size, self._step_s = token, vocab_size, step_s

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext,
        logits_to_keep: torch.Tensor | int,
    ) -> SimpleNamespace:  # fmt: skip
        """See `Runner.model`."""
        if self._step_s:
            time.sleep(self._step_s)
        return output_of(torch.full((num_kept(logits_to_keep),), self._token), self._vocab_size)


def num_kept(logits_to_keep: torch.Tensor | int) -> int:
    """How many tokens' logits a step wants."""
    return logits_to_keep if isinstance(logits_to_keep, int) else len(logits_to_keep)


def output_of(tokens: torch.Tensor, vocab_size: int) -> SimpleNamespace:
    """A model output with logits [1, n, vocab_size] that select `tokens`, int64 [n]."""
    logits = torch.zeros(1, len(tokens), vocab_size)
    logits[0].scatter_(1, tokens[:, None], 1.0)
    return SimpleNamespace(logits=logits)
