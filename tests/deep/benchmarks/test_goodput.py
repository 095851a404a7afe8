"""The goodput benchmark: the tokens of its stand-in follow from what lies in the pool alone; its load; what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import TinyEngine, prompts
from families import VOCAB, tiny

from benchmarks.goodput import MODULUS, StandIn
from benchmarks.load import MOST_PROMPT, BadTrace, two_streams
from pagetide.scheduler.request import Sampling

BLOCK_SIZE = 4
NEW = 16
INPUTS = prompts([3, 17, 9, 30, 4, 12], VOCAB)


def engine_of(**options: Any) -> TinyEngine:
    """An engine with the stand-in."""
    engine = TinyEngine(tiny("llama"), block_size=BLOCK_SIZE, max_model_len=80, **options)
    engine.core.runner.model = StandIn(VOCAB, 0.0, 0.0)
    return engine


def plainly(prompt: list[int]) -> list[int]:
    """What should come: sums over all tokens, in blocks of a plain list."""
    weights = np.random.default_rng(0).integers(1, MODULUS, 1 << 16).tolist()
    tokens = list(prompt)
    for _ in range(NEW):
        sums = np.cumsum([token * weights[at] % MODULUS for at, token in enumerate(tokens)]) % MODULUS
        seen = sums[(len(tokens) - 1) % BLOCK_SIZE :: BLOCK_SIZE].tolist()
        tokens.append(sum(one * weight for one, weight in zip(seen, weights, strict=False)) // 64 % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {"usable": 100},
        {"usable": 100, "max_chunk_tokens": 5},
        {"usable": 15, "max_step_tokens": 16},
        {"usable": 20, "caching": True, "max_chunk_tokens": 7},
        {"usable": 14, "caching": True, "host_slots": 30},
    ],
)
def test_its_tokens_are_those_of_a_plain_count_however_they_are_served(options: dict[str, Any]) -> None:
    engine = engine_of(**options)
    right = [plainly(prompt) for prompt in INPUTS]
    for _ in range(2):  # the second time with what the first one left in the prefix cache, if there is one
        assert engine.generate(INPUTS, Sampling(NEW)) == right
    assert bool(engine.preemptions) == (options["usable"] < 100)


def test_a_block_that_is_lost_shows() -> None:
    engine = engine_of(usable=100)
    engine.add("one", INPUTS[3], Sampling(NEW))
    for _ in range(4):
        engine.core.step()
    engine.core.runner.storage.layer(0).key[1:4] = 0.0  # of the first it is given
    assert engine.run()["one"].token_ids.tolist() != plainly(INPUTS[3])


def test_the_load_is_synthetic_or_the_folders(tmp_path: Path) -> None:
    (first, second), source = two_streams(None, 2.0, 8.0)
    assert source.startswith("a synthetic trace: 3,600 requests in four bursts")
    assert len(first) == len(second) == 16 and max(a.prompt_tokens for a in first) <= MOST_PROMPT
    with pytest.raises(BadTrace, match=f"{tmp_path}.* cannot be read"):
        two_streams(tmp_path, 2.0, 8.0)
