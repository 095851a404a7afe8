"""An engine against plain transformers: the same tokens and logits, whatever the blocks, chunks, rows and pool."""

from __future__ import annotations

import functools
from typing import Any

import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import VOCAB, tiny

from pagetide.scheduler.request import Sampling

LENGTHS = [1, 2, 7, 15, 16, 17, 33, 64, 99, 130, 180, 300]
NEW = 20
GREEDY = Sampling(NEW)


@functools.lru_cache(maxsize=4)
def family(name: str, count: int = len(LENGTHS)) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, so many prompts, the short ones first, and the greedy tokens behind them."""
    model = tiny(name)
    inputs = prompts(LENGTHS[:count], VOCAB)
    return model, inputs, plain(model, inputs, NEW)


def engine_for(model: Any, inputs: list[list[int]], block_size: int, share: float, **more: Any) -> TinyEngine:
    """An engine whose pool is `share` of what all need together, and at least what the longest does."""
    least = -(-(max(map(len, inputs)) + NEW - 1) // block_size)
    usable = max(least, int(share * blocks_needed(inputs, NEW, block_size)))
    return TinyEngine(model, usable=usable, block_size=block_size, **more)


def check_tokens(name: str, cases: list[tuple[int, int | None, int, float]]) -> None:
    """Cases: block size, tokens a chunk, rows, pool as a share of the joint need; 0 is just enough for the longest."""
    model, inputs, expected = family(name)
    preemptions = 0
    for block_size, chunk, num_rows, share in cases:
        # A token at a time takes a step for each.
        few = 8 if chunk == 1 else len(inputs)
        engine = engine_for(model, inputs[:few], block_size, share, max_chunk_tokens=chunk, max_seqs=num_rows)
        assert engine.generate(inputs[:few], GREEDY) == expected[:few], (block_size, chunk, num_rows, share)
        preemptions += engine.preemptions
    assert preemptions >= 2, "nothing was forced out"


def check_logits(name: str, count: int = len(LENGTHS)) -> None:
    """Behind chunks, preemptions and resumes."""
    model, inputs, expected = family(name, count)
    engine = engine_for(model, inputs, 4, 0.3, max_chunk_tokens=7)
    engine.watch_logits()
    assert engine.generate(inputs, GREEDY) == expected
    assert engine.preemptions > 0
    for i, (prompt, tokens) in enumerate(zip(inputs, expected, strict=True)):
        check_positions(engine, f"r{i}", model, prompt, tokens)


def check_positions(engine: TinyEngine, name: str, model: Any, prompt: list[int], tokens: list[int]) -> None:
    """The logits of a request's tokens are those of a plain forward."""
    right = log_probs_of(model, prompt + tokens)
    for position in range(len(prompt), len(prompt) + len(tokens)):
        ours = torch.log_softmax(engine.logits[name, position].double(), -1)
        assert (ours - right[position - 1]).abs().max() < 1e-4


def log_probs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Of a plain forward, for each position."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), -1)


def check_prefixes(name: str, cases: list[tuple[int, int | None, float]]) -> None:
    """Twice the same prompts, and longer ones behind them: most of it is found, under pressure too.

    Cases: block size, tokens a chunk, pool as a share of the joint need.
    """
    model, inputs, expected = family(name)
    # Behind the prompt stands what was generated, so that a second turn goes on with the very tokens of the first.
    turns = [prompt + tokens[:12] for prompt, tokens in zip(inputs, expected, strict=True)]
    for block_size, chunk, share in cases:
        engine = engine_for(model, inputs, block_size, share, caching=True, max_chunk_tokens=chunk)
        stats = engine.core.scheduler.stats
        engine.watch_logits()
        assert engine.generate(inputs, GREEDY) == expected, block_size
        first = stats.prefix_lookups.hit_tokens
        chosen = sorted(range(len(inputs)), key=lambda i: i * 7 % len(inputs))[1::2]
        for i in chosen:
            assert engine.generate([inputs[i]], GREEDY) == [expected[i]], (block_size, i)
            assert engine.generate([turns[i]], Sampling(NEW - 12)) == [expected[i][12:]], (block_size, i)
        # With windows, hits end where each layer can go on: at the ends of prompts and sequences, in whole blocks.
        least = 0.95 if engine.core.scheduler.cache.row_tables.others else 1
        assert stats.prefix_lookups.hit_tokens > first + least * sum(LENGTHS[i] for i in chosen), block_size
        engine.core.scheduler.check_invariants()
        turn, rest = turns[chosen[-1]], expected[chosen[-1]][12:]
        check_positions(engine, "r0", model, turn, rest)
