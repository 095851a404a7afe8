"""Engines over quantized K and V: disturbed requests get the tokens of undisturbed ones; wrong arguments are refused."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError

TEXT = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8").split("\n%%\n")[0]
# The likeliest token of each is ahead by 0.02 nats at least: K that is rounded to a neighbour moves it by about 1e-4.
PROMPTS = [TEXT[:60], TEXT[:190], TEXT[:203] + "Behold", TEXT[300:420], TEXT[400:640], TEXT[:180], "O"]
NEW = 16
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
    scheduler.limits = replace(scheduler.limits, forecast=False)


SMALL = {"kv_memory": "512KiB", "block_size": 4}  # about 200 tokens; all prompts need more than 500
CASES: dict[str, tuple[dict[str, Any], SamplingParams, tuple[str, ...]]] = {
    "chunks": ({"kv_memory": "8MiB", "max_chunk_tokens": 7}, GREEDY, ()),
    "chunks of one token": ({"kv_memory": "8MiB", "max_chunk_tokens": 1, "block_size": 5}, GREEDY, ()),
    "prefix hits": ({"kv_memory": "8MiB", "block_size": 4}, DRAWN, ("hits", "forks")),
    "preemption": ({**SMALL, "prefix_caching": False}, DRAWN, ("preemptions", "recomputed_tokens", "forks")),
    "host tier": ({**SMALL, "host_kv_memory": "8MiB"}, DRAWN, ("preemptions", "hits", "swapped", "forks")),
    "growing pool": ({"kv_memory": {"min": "128KiB", "max": "8MiB"}, "max_chunk_tokens": 30}, DRAWN, ("grown",)),
}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "case"), [*(("int8", case) for case in CASES), ("fp8", "chunks"), ("fp8", "host tier")]
)
def test_disturbed_requests_get_the_same_tokens(kv_cache_dtype: str, case: str) -> None:
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


def test_a_request_goes_on_in_an_engine_with_other_blocks_and_in_one_of_full_precision() -> None:
    """The tokens are computed again there. Greedy int8 has the tokens of full precision here."""
    expected = undisturbed("int8", GREEDY)[1][0]
    with (
        open_demo(kv_cache_dtype="int8", kv_memory="4MiB", block_size=4) as first,
        open_demo(kv_cache_dtype="int8", kv_memory="4MiB", block_size=16) as second,
        open_demo(kv_memory="4MiB") as full,
    ):
        for other in (second, full):
            stream = first.stream([PROMPTS[1]], GREEDY)
            seen = [token for _, chunk in zip(range(5), stream, strict=False) for token in chunk.token_ids]
            exported = stream.requests[0].export()
            rest = [token for chunk in other.import_request(exported) for token in chunk.token_ids]
            assert tuple(seen + rest) == expected


@pytest.mark.parametrize("wrong", ["int4", "float8", "bfloat16", 8, True])
def test_an_unknown_type_is_refused(wrong: object) -> None:
    said = f"kv_cache_dtype must be one of auto, int8, fp8, got {wrong!r}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig.resolve("demo", kv_cache_dtype=wrong)


def test_left_out_it_is_the_models_own() -> None:
    assert (
        EngineConfig.resolve("demo").kv_cache_dtype == EngineConfig.resolve("demo", kv_cache_dtype=None).kv_cache_dtype
    )
    assert EngineConfig.resolve("demo").kv_cache_dtype == "auto"


def test_a_backend_that_reads_no_scales_is_refused() -> None:
    said = (
        "attention='native' cannot serve this model: it takes no K and V in float8_e4m3fn with scales; use 'auto', or"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM("demo", device="cpu", kv_memory="4MiB", share=False, attention="native", kv_cache_dtype="fp8")
