"""Logits processors of single requests: what they see, what they may do, and that it is their own row alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engines import TinyEngine, blocks_needed, prompts
from families import VOCAB, tiny
from sampling_oracle import distribution
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from pagetide import LLM, SamplingParams
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

NEW = 16


class Recorder(LogitsProcessor):
    """Writes down what it is called with, and changes the scores by all the tokens so far."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (input_ids.dtype, scores.dtype) == (torch.int64, torch.float32)
        assert (input_ids.ndim, scores.shape) == (2, (1, VOCAB))
        self.seen.append(input_ids[0].tolist())
        return scores + torch.arange(VOCAB) * (int(input_ids.sum()) % 5 - 2) / 40


@functools.cache
def model() -> Any:
    return tiny("llama")


def engine(usable: int, **more: Any) -> TinyEngine:
    return TinyEngine(model(), usable=usable, block_size=4, **more)


@pytest.mark.parametrize("host_slots", [0, 64])
def test_they_see_prompt_and_output_after_a_resume_too(host_slots: int) -> None:
    """Scenario 79: the tokens are those of a roomy pool, and each call has all tokens before, none left out, none twice."""
    inputs = prompts([9, 17, 30, 5, 12, 24], VOCAB)
    outputs: list[list[list[int]]] = []
    for usable in (400, blocks_needed(inputs, NEW, 4) // 2):
        recorders = [Recorder() for _ in inputs]
        settings = [
            Sampling(
                NEW, temperature=0.8, seed=i, frequency_penalty=0.4, repetition_penalty=1.2, logits_processors=(recorder,),
                bad_words=tuple((a, b) for a in range(40) for b in range(a, VOCAB, 3)), presence_penalty=0.1 * i,
            )
            for i, recorder in enumerate(recorders)
        ]  # fmt: skip
        tight = engine(usable, max_chunk_tokens=7, host_slots=host_slots, caching=bool(host_slots))
        outputs.append(tight.generate(inputs, settings))
        for prompt, output, recorder in zip(inputs, outputs[-1], recorders, strict=True):
            assert recorder.seen == [prompt + output[:n] for n in range(NEW)]
    assert tight.preemptions > 0
    assert outputs[0] == outputs[1]


def _raises(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise KeyError("nothing there")


def _ruins(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.fill_(torch.nan)


def test_what_one_does_wrong_ends_its_own_request() -> None:
    for processor, message in [
        (_raises, "the logits processor _raises raised KeyError: 'nothing there'"),
        (lambda ids, scores: scores[0], "returned scores of shape [160] instead of scores of shape [1, 160]"),
        (lambda ids, scores: scores.repeat(2, 1), "returned scores of shape [2, 160] instead"),
        (lambda ids, scores: None, "returned NoneType instead of scores"),
        (_ruins, "the logits processor _ruins left no token to choose"),
        (lambda ids, scores: scores - torch.inf, "left no token to choose"),
        (TemperatureLogitsWarper(1e-45), "the logits processor TemperatureLogitsWarper"),
    ]:
        inputs = prompts([9, 17, 5], VOCAB)
        expected = engine(400).generate(inputs, Sampling(NEW))
        late = engine(400)
        for i, prompt in enumerate(inputs):
            late.add(f"r{i}", prompt, Sampling(NEW))

        def third(input_ids: Tensor, scores: Tensor, processor: Callable[..., Any] = processor) -> Tensor:
            return processor(input_ids, scores) if input_ids.shape[1] == 9 + 3 else scores

        third.__qualname__ = getattr(processor, "__qualname__", type(processor).__name__)
        late.add("bad", inputs[0], Sampling(NEW, logits_processors=(third,)))
        ends = late.run()
        assert ends["bad"].reason == "error"
        assert message in (ends["bad"].error or "")
        assert ends["bad"].token_ids.tolist() == expected[0][:3]
        assert [ends[f"r{i}"].token_ids.tolist() for i in range(3)] == expected


def test_a_list_of_them_is_one_behind_the_other() -> None:
    both = LogitsProcessorList([lambda ids, s: s + torch.arange(s.shape[-1]), lambda ids, s: s.remainder(4.0)])
    x = torch.tensor([[0.5, 1.0, 0.25, 0.0, 3.0]])
    expected = both(torch.zeros((1, 1), dtype=torch.int64), x).softmax(-1)
    for given in (tuple(both), (both,)):
        sampler = Sampler(1, 5)
        sampler.admit(0, Sampling(5, temperature=1.0, logits_processors=given), np.array([1], np.int32), 1)
        assert torch.allclose(distribution(sampler, np.array([0]), np.array([1]), x), expected)


def test_one_that_calls_its_own_engine_ends_its_request_and_hangs_nobody() -> None:
    with LLM("demo", device="cpu", kv_memory="8MiB", share=False) as llm:

        def curious(input_ids: Tensor, scores: Tensor) -> Tensor:
            llm.explain()
            return scores

        params = [SamplingParams(max_new_tokens=4, temperature=0, logits_processors=[curious])]
        params.append(SamplingParams(max_new_tokens=4, temperature=0))
        bad, good = llm.generate(["Call me", "Call me"], params)
        assert bad.finish_reason == "error" and "would wait for itself" in (bad.error or "")
        assert good.finish_reason == "length" and llm.stats()["blocks"]["live"] == 0
