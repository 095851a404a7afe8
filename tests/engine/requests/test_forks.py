"""Continuations of one prompt give what each gives alone, whatever they share, and however often they are put out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import TinyEngine, blocks_needed, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide.scheduler.request import Sampling

LENGTHS = [1, 17, 40]
NEW = 8
N = 3
DRAWN = Sampling(NEW, temperature=1.0, seed=7)


def samplings(greedy: bool = False) -> list[Sampling]:
    return [replace(DRAWN, index=i, temperature=0.0 if greedy else 1.0) for i in range(N)]


def forked(engine: TinyEngine, inputs: list[list[int]], greedy: bool = False) -> list[list[int]]:
    """The tokens of N continuations of each prompt."""
    for p, prompt in enumerate(inputs):
        for i, sampling in enumerate(samplings(greedy)):
            engine.add(f"r{p}.{i}", prompt, sampling, arrival=float(p), fork_of=f"r{p}.0" if i else None)
    ends = engine.run()
    assert {end.reason for end in ends.values()} == {"length"}
    return [ends[f"r{p}.{i}"].token_ids.tolist() for p in range(len(inputs)) for i in range(N)]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_alone(name: str) -> None:
    model, inputs = tiny(name), prompts(LENGTHS, VOCAB)
    alone = TinyEngine(model, usable=200, max_seqs=1)
    expected = [alone.generate([prompt], one)[0] for prompt in inputs for one in samplings()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "each draws for itself"
    preemptions = 0
    for caching, host_slots in ((False, 0), (True, 3)):
        usable = int(0.45 * N * blocks_needed(inputs, NEW, 4))
        engine = TinyEngine(
            model, usable=usable, block_size=4, max_chunk_tokens=20, caching=caching, host_slots=host_slots
        )
        assert forked(engine, inputs) == expected, (caching, host_slots)
        assert engine.core.scheduler.stats.forks > 0
        preemptions += engine.preemptions
    assert preemptions >= 2, "nothing was forced out"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_same_logits_behind_a_fork(name: str) -> None:
    model, inputs = tiny(name), prompts(LENGTHS, VOCAB)
    engine = TinyEngine(model, usable=200, block_size=4)
    engine.watch_logits()
    tokens = forked(engine, inputs, greedy=True)
    stats = engine.core.scheduler.stats
    assert stats.forks == len(inputs) * (N - 1)
    assert stats.computed_tokens == sum(LENGTHS) + len(inputs) * (N * (NEW - 1) + N - 1), "each prompt once"
    model.set_attn_implementation("eager")
    for p, prompt in enumerate(inputs):
        assert tokens[N * p] == tokens[N * p + 1] == tokens[N * p + 2], "greedy ones are all alike"
        with torch.inference_mode():
            right = model(torch.tensor([prompt + tokens[N * p]]), use_cache=False).logits[0]
        for i in range(N):
            for k in range(NEW):
                got = engine.logits[f"r{p}.{i}", len(prompt) + k]
                torch.testing.assert_close(got, right[len(prompt) + k - 1], atol=1e-4, rtol=1e-4)
