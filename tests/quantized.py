"""Engines of the demo model over quantized K and V, disturbed in one way or another."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import swap_whatever_it_costs

from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model

TEXT = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8").split("\n%%\n")[0]
# The likeliest token of each is ahead by 0.02 nats at least: K that is rounded to a neighbour moves it by about 1e-4.
PROMPTS = [TEXT[:60], TEXT[:190], TEXT[:203] + "Behold", TEXT[300:420], TEXT[400:640], TEXT[:180], "O"]
NEW = 10
DRAWN = SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=5, n=2)
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)

open_demo = functools.partial(LLM, "demo", device="cpu", dtype="float32", attention="torch", share=False)


def tokens(llm: LLM, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(PROMPTS, params)
    return [[tuple(completion.token_ids) for completion in output.completions] for output in outputs]


@functools.cache
def undisturbed(kv_cache_dtype: str, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    """One request after the other, in a pool with room for all."""
    with open_demo(kv_cache_dtype=kv_cache_dtype, kv_memory="8MiB", max_seqs=1, prefix_caching=False) as llm:
        return tokens(llm, params)


def admit_whatever_fits(llm: LLM) -> None:
    """Without the forecast, which would let no request in that has to be preempted."""
    scheduler = llm._manager.open().core.scheduler
    scheduler.state.limits = replace(scheduler.state.limits, forecast=False)
    swap_whatever_it_costs(scheduler)


SMALL = {"kv_memory": "512KiB", "block_size": 4}  # about 200 tokens; all prompts need more than 500
CASES: dict[str, tuple[dict[str, Any], SamplingParams, tuple[str, ...]]] = {
    "chunks": ({"kv_memory": "8MiB", "max_chunk_tokens": 7}, GREEDY, ()),
    "chunks of one token": ({"kv_memory": "8MiB", "max_chunk_tokens": 1, "block_size": 5}, GREEDY, ()),
    "prefix hits": ({"kv_memory": "8MiB", "block_size": 4}, DRAWN, ("hits", "forks")),
    "preemption": ({**SMALL, "prefix_caching": False}, DRAWN, ("preemptions", "recomputed_tokens", "forks")),
    "host tier": ({**SMALL, "host_kv_memory": "8MiB"}, DRAWN, ("preemptions", "hits", "swapped", "forks")),
    "growing pool": ({"kv_memory": {"min": "128KiB", "max": "8MiB"}, "max_chunk_tokens": 30}, DRAWN, ("grown",)),
}


def check_disturbed(kv_cache_dtype: str, case: str) -> None:
    """The tokens are those of undisturbed requests."""
    options, params, happens = CASES[case]
    expected = undisturbed(kv_cache_dtype, params)
    with open_demo(kv_cache_dtype=kv_cache_dtype, **options) as llm:
        admit_whatever_fits(llm)
        mapped_before = llm.stats()["extents"]["mapped"]
        for _ in range(2 if "hits" in happens else 1):
            assert tokens(llm, params) == expected
        stats = llm.stats()
    counts = {
        "hits": (stats["prefix_cache"] or {"hit_tokens": 0})["hit_tokens"],
        "swapped": (stats["host_tier"] or {"swapped_in_bytes": 0})["swapped_in_bytes"],
        "grown": stats["extents"]["mapped"] - mapped_before,
        **{name: stats[name] for name in ("preemptions", "recomputed_tokens", "forks")},
    }
    assert all(counts[name] > 0 for name in happens), counts
    assert stats["kv_cache_dtype"] == kv_cache_dtype and stats["attention"] == "torch"
    assert stats["kv_bytes_per_token"] == 2 * 8 * 4 * (32 + 2)  # K and V, layers, heads; 32 values and a scale
