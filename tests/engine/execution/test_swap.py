"""Swapping with real tensors: the tokens and logits of plain transformers, whatever has to leave the device and come back."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import equality
import pytest
from engines import TinyEngine, blocks_needed, plain, prompts
from equality import check_positions
from families import VOCAB, tiny

from pagetide import LLM, SamplingParams
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.engine.errors import ConfigError, NotEnoughMemory
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 7, 16, 33, 64, 99, 130, 180]
NEW = 20
GREEDY = Sampling(NEW)
# The shares of pools in which some are forced out, where windows give blocks back. These are 55 blocks: the longest sequence
# takes 53, and the first five hold 44 when they are admitted, and 69 in the end.
SHARES = {"gemma2": 0.3, "gpt_oss": 0.3}


@functools.lru_cache(maxsize=1)
def family(name: str):
    model = tiny(name)
    inputs = prompts(LENGTHS, VOCAB)
    return model, inputs, plain(model, inputs, NEW)


def engine_for(model, inputs, block_size: int, share: float, host_slots: int, **more) -> TinyEngine:
    return equality.engine_for(model, inputs, block_size, share, caching=True, host_slots=host_slots, **more)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.stress) for n in ("gemma2", "gpt2", "gpt_oss", "mistral", "qwen3"))]
)
def test_same_tokens_and_logits_with_a_host_tier_too_small_exact_and_ample(name):
    """D 34, 35; L 77, 80. Each prompt once more, so that what was demoted is found again as well."""
    model, inputs, expected = family(name)
    needed = blocks_needed(inputs, NEW, 4)
    for slots in 0, 5, needed, 4 * needed:
        engine = engine_for(model, inputs, 4, SHARES.get(name, 0.4), slots, max_chunk_tokens=29)
        engine.watch_logits()
        stats = engine.core.scheduler.stats
        assert engine.generate(inputs, GREEDY) == expected, slots
        assert stats.preemptions > 0
        for i in sorted(range(len(inputs)), key=lambda i: i * 5 % len(inputs)):
            assert engine.generate([inputs[i]], GREEDY) == [expected[i]], (slots, i)
        assert (stats.demoted_blocks > 0) == (slots > 0) >= (stats.promoted_blocks > 0)
        if slots >= needed:
            assert stats.recomputed_tokens == 0, "everything that was computed came back"
            assert stats.promoted_blocks > (0 if engine.core.scheduler.cache.row_tables.others else needed // 2)
        tier = engine.core.scheduler.cache.host
        assert engine.host is None or tier.num_used <= tier.capacity
        longest = max(range(len(inputs)), key=lambda i: len(inputs[i]))
        assert engine.generate([inputs[longest]], GREEDY) == [expected[longest]]
        check_positions(engine, "r0", model, inputs[longest], expected[longest])


def refuse_memory(engine: TinyEngine, after: int) -> None:
    """From the host's extent number `after` on there is none."""
    arena = engine.host._extents._arena
    map_ = arena.map

    def refused(extents):
        if len(arena.mapped_extents) + len(extents) > after:
            raise OutOfDeviceMemory(1, 0, "host memory")
        map_(extents)

    arena.map = refused


def test_a_host_without_memory_costs_nobody_a_token(caplog):
    """What could not be written is forgotten, and the tier stays as large as it is."""
    model, inputs, expected = family("llama")
    for after in 0, 9:
        engine = engine_for(model, inputs, 4, 0.4, 100)
        refuse_memory(engine, after)
        assert engine.generate(inputs, GREEDY) == expected
        assert [engine.generate([p], GREEDY)[0] for p in inputs] == expected
        tier = engine.core.scheduler.cache.host
        assert tier.num_used <= tier.num_slots < 100
        assert engine.host.mapped_bytes <= after * engine.host._extents._arena.extent_bytes
        assert "host tier cannot grow beyond" in caplog.text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model, _, _ = family("llama")
    model.save_pretrained(path)
    return path


def admit_whatever_fits(llm: LLM) -> None:
    """Else the forecast, which knows how long these outputs may be, lets nobody in who has to give way."""
    scheduler = llm._manager.open().core.scheduler
    scheduler.state.limits = replace(scheduler.state.limits, forecast=False)


def test_an_engine_swaps_within_its_host_memory(saved):
    """C 27 too: what was asked for is what comes back, however often it was preempted, and counts once."""
    model, _, _ = family("llama")
    inputs = prompts([120] * 24, VOCAB, seed=1)
    expected = plain(model, inputs, 12)
    options = {"device": "cpu", "dtype": "float32", "share": False, "kv_memory": 1 << 20, "block_size": 4}
    with LLM(saved, host_kv_memory="4MiB", **options) as llm:
        assert llm.config.host_kv_memory == 4 << 20
        before = llm.stats()["host_tier"]
        assert (before["bytes"], before["used_blocks"], before["swapped_out_bytes"]) == (0, 0, 0)
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        admit_whatever_fits(llm)
        for _ in range(2):
            outputs = llm.generate(inputs, params)
            assert [output.token_ids for output in outputs] == expected
            assert [output.prompt_token_ids for output in outputs] == inputs
            assert any(output.num_preemptions for output in outputs)
        after = llm.stats()["host_tier"]
        assert after["swapped_out_bytes"] > 0 and 0 < after["bytes"] <= 4 << 20
        assert 0 < after["used_blocks"] <= after["total_blocks"]
        json.dumps(after)
        json.dumps(llm.explain())
        pool = llm._manager.open().core.runner.host
    assert pool.mapped_bytes == 0
    with LLM(saved, prefix_caching=False, **options) as llm:
        assert llm.stats()["host_tier"] is None
        admit_whatever_fits(llm)
        outputs = llm.generate(inputs, params)
        assert [(output.prompt_token_ids, output.token_ids) for output in outputs] == [*zip(inputs, expected, strict=True)]
        stats = llm.stats()
        assert any(output.num_preemptions for output in outputs) and stats["recomputed_tokens"] > 0
        assert stats["computed_tokens"] - stats["recomputed_tokens"] == 24 * (120 + 11), "each entry counts once"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"host_kv_memory": -1}, "at least 1 byte"), ({"host_kv_memory": "many"}, "cannot read 'many'"),
        ({"host_kv_memory": True}, "host_kv_memory"), ({"host_kv_memory": 1.5}, "host_kv_memory"),
        ({"host_kv_memory": 100}, "hold no block"), ({"host_kv_memory": "900TiB"}, "the host tier of"),
        ({"host_kv_memory": "1GiB", "prefix_caching": False}, "leave prefix_caching on"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_an_engine_starts(saved, given, says):
    with pytest.raises((ConfigError, NotEnoughMemory), match=says):
        LLM(saved, device="cpu", share=False, kv_memory=1 << 20, **given)
