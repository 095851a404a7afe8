"""Every combination of block size, chunk, seats and pool, for every family: the tokens of plain transformers."""

from __future__ import annotations

import functools
import itertools

import pytest
from engines import TinyEngine, blocks_needed, plain, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.stress

LENGTHS = [1, 3, 15, 16, 17, 40, 99, 101]
NEW = 20
CASES = list(itertools.product([4, 16, 100, 256], [1, 7, None], [1, 3, 12], ["just enough", "half", "plenty"]))


@functools.lru_cache(maxsize=1)
def family(name: str):
    model = tiny(name)
    inputs = prompts(LENGTHS, VOCAB, seed=1)
    return model, inputs, plain(model, inputs, NEW)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_combination(name):
    model, inputs, expected = family(name)
    preemptions = 0
    for block_size, chunk, seats, pool in CASES:
        need, least = blocks_needed(inputs, NEW, block_size), -(-(max(LENGTHS) + NEW - 1) // block_size)
        usable = {"just enough": least, "half": max(least, need // 2), "plenty": need}[pool]
        engine = TinyEngine(model, usable=usable, block_size=block_size, max_seqs=seats, max_chunk_tokens=chunk)
        assert engine.generate(inputs, Sampling(NEW)) == expected, (block_size, chunk, seats, pool)
        preemptions += engine.preemptions
    assert preemptions > 20, "hardly anything was forced out"
