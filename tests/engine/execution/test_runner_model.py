"""`Runner.model` is a seam: another callable may compute the logits of a step, from what it is passed and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engines import TinyEngine, prompts
from families import VOCAB, tiny

from pagetide.engine.attention.context import StepContext
from pagetide.scheduler.request import Sampling

INPUTS = prompts([3, 17, 30, 5], VOCAB)
NEW = 12


def logits_for(tokens: torch.Tensor) -> torch.Tensor:
    """[1, n, VOCAB]: the token behind each of `tokens` is the one 7 above it."""
    return torch.nn.functional.one_hot((tokens + 7) % VOCAB, VOCAB).float()[None]


class Keeping:
    """A stand-in that computes the logits that are wanted, and notes what it was called with."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext, logits_to_keep: Any
    ) -> SimpleNamespace:
        assert input_ids.shape == position_ids.shape == (1, sum(step.q_lens)) and use_cache is False
        self.kept.append(logits_to_keep)
        kept = input_ids[0, :1] if isinstance(logits_to_keep, int) else input_ids[0, logits_to_keep]
        return SimpleNamespace(logits=logits_for(kept))


class Whole(torch.nn.Module):
    """A stand-in, as a module, that knows nothing of `logits_to_keep`; like many models it swallows other keywords."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> SimpleNamespace:
        assert "logits_to_keep" not in others
        return SimpleNamespace(logits=logits_for(input_ids[0]))


def counting(prompt: list[int]) -> list[int]:
    return [(prompt[-1] + 7 * (i + 1)) % VOCAB for i in range(NEW)]


def engine_of(model: Any, **options: Any) -> TinyEngine:
    return TinyEngine(model, block_size=4, max_model_len=80, **options)


def test_a_step_that_wants_no_logits_asks_for_one() -> None:
    engine = engine_of(tiny("llama"), usable=100, max_chunk_tokens=4)
    engine.core.runner.model = stand_in = Keeping()
    engine.generate([INPUTS[1]], Sampling(NEW))
    assert [kept for kept in stand_in.kept if isinstance(kept, int)] == [1] * 4, "all chunks of 17 tokens but the last"
    assert all(len(kept) == 1 for kept in stand_in.kept[4:])


def test_the_model_may_change_between_steps() -> None:
    """What the stand-in leaves in the pool is what it wrote: nothing. So the model behind it is asked about a new prompt."""
    engine = engine_of(tiny("llama"), usable=100)
    model, runner = engine.core.runner.model, engine.core.runner
    right = engine.generate(INPUTS, Sampling(NEW))
    runner.model = Whole()
    engine.add("one", INPUTS[0], Sampling(NEW))
    for _ in range(5):
        engine.core.step()
    runner.model = Keeping()
    assert engine.run()["one"].token_ids.tolist() == counting(INPUTS[0])
    runner.model = model
    assert engine.generate(INPUTS, Sampling(NEW)) == right


def test_captured_steps_go_with_their_model() -> None:
    runner: Any = engine_of(tiny("llama"), usable=100).core.runner
    runner.graphs = object()
    runner.model = Whole()
    assert runner.graphs is None
