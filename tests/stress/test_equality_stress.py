"""Every combination of block size, chunk, rows, pool and what is kept: the tokens of plain transformers.

In every other one steps are begun before the last one's tokens are on the host.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from engines import TinyEngine, blocks_needed, plain, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.stress

LENGTHS = (1, 3, 15, 16, 17, 40, 99, 101)
NEW = 20
CASES = list(itertools.product([4, 16, 100, 256], [1, 7, None], [1, 3, 12], ["just enough", "half", "plenty"]))


@functools.lru_cache(maxsize=1)
def family(name: str, lengths: tuple[int, ...], seed: int):
    model = tiny(name)
    inputs = prompts(list(lengths), VOCAB, seed=seed)
    return model, inputs, plain(model, inputs, NEW)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_combination(name):
    """All of them for one family, every seventh for each of the others."""
    model, inputs, expected = family(name, LENGTHS, seed=1)
    preemptions = 0
    cases = CASES if name == "llama" else CASES[list(FAMILIES).index(name) % 7 :: 7]
    for number, (block_size, chunk, num_rows, pool) in enumerate(cases):
        need, least = blocks_needed(inputs, NEW, block_size), -(-(max(LENGTHS) + NEW - 1) // block_size)
        usable = {"just enough": least, "half": max(least, need // 2), "plenty": need}[pool]
        overlaps = number % 2 == 1
        engine = TinyEngine(
            model, usable=usable, block_size=block_size, max_seqs=num_rows, max_chunk_tokens=chunk, overlaps=overlaps
        )
        assert engine.generate(inputs, Sampling(NEW)) == expected, (block_size, chunk, num_rows, pool, overlaps)
        preemptions += engine.preemptions
    assert preemptions >= (5 if name == "llama" else 2), "hardly anything was forced out"


KEPT_LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 99, 130, 180, 300)
POOLS = ["just enough", "half", "plenty"]
KEPT = ["computed again", "cached", "swapped"]
KEPT_CASES = list(itertools.product([4, 16, 32, 100], [24, None], [1, 3, 12], POOLS, KEPT))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_combination_of_what_is_kept(name):
    """L 77. Twice in each engine, so that much is found. Many combinations for one family, some for the others."""
    model, inputs, expected = family(name, KEPT_LENGTHS, seed=0)
    cases = KEPT_CASES[::5] if name == "llama" else KEPT_CASES[list(FAMILIES).index(name) :: 29]
    preemptions = hit_tokens = promoted = 0
    for number, (block_size, chunk, num_rows, pool, way) in enumerate(cases):
        need, least = blocks_needed(inputs, NEW, block_size), -(-(max(KEPT_LENGTHS) + NEW - 1) // block_size)
        usable = {"just enough": least, "half": max(least, int(0.4 * need)), "plenty": 2 * need}[pool]
        engine = TinyEngine(
            model, usable=usable, block_size=block_size, max_seqs=num_rows, max_chunk_tokens=chunk,
            caching=way != "computed again", host_slots=need if way == "swapped" else 0, overlaps=number % 2 == 1,
        )  # fmt: skip
        for order in (1, -1):
            got = engine.generate(inputs[::order], Sampling(NEW))
            assert got[::order] == expected, (block_size, chunk, num_rows, pool, way, number % 2)
        stats = engine.core.scheduler.stats
        preemptions += stats.preemptions
        hit_tokens += stats.prefix_lookups.hit_tokens + stats.resumed_lookups.hit_tokens
        promoted += stats.promoted_blocks
    assert preemptions and hit_tokens > 1000 and promoted, "hardly anything was forced out or found"
