"""Every family with states: the tokens of transformers in a batch, in chunks, preempted, from prefixes; and through `LLM`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB
from state_families import ONE_BY_ONE, STATE_FAMILIES, tiny_with_states

from pagetide import LLM, SamplingParams, native
from pagetide.engine.attention.states import installed
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 3, 7, 12, 18, 21, 26, 45]
NEW = 14
HOW: dict[str, dict[str, Any]] = {
    "batch": {"usable": 2000},
    "chunks of 5": {"usable": 2000, "max_chunk_tokens": 5},
    "chunks of 1": {"usable": 2000, "max_chunk_tokens": 1},
    "preempted": {"usable": 20},
    "prefixes": {"usable": 30, "caching": True, "max_seqs": 3},
    "host tier": {"usable": 24, "caching": True, "host_slots": 24},
    "blocks of 16": {"usable": 60, "block_size": 16, "caching": True},
    "int8 K and V": {"usable": 2000, "kv_dtype": "int8"},
}


@pytest.mark.parametrize("name", STATE_FAMILIES)
def test_the_tokens_of_transformers(name: str) -> None:
    inputs = prompts(LENGTHS, VOCAB)
    expected = plain(tiny_with_states(name), inputs, NEW)
    for label, how in HOW.items():
        engine = TinyEngine(tiny_with_states(name), **{"block_size": 4, **how})
        assert engine.mixers is not None
        engine.mixers.one_by_one = name in ONE_BY_ONE
        same = engine.generate(inputs, Sampling(NEW)) == expected
        assert same or label.startswith("int8"), label


@pytest.mark.parametrize("name", STATE_FAMILIES)
def test_llm(name: str, tmp_path: Path) -> None:
    """The probe finds which of them lose their state in a chunk; several samples, beams, a pool that is too small."""
    model, inputs = tiny_with_states(name), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    model.save_pretrained(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, n=3, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_memory="3MiB", share=False, max_step_tokens=64) as llm:
        mixers = installed(llm._manager.engine.core.runner.model) if hasattr(llm._manager, "engine") else None
        assert mixers is None or mixers.one_by_one == (name in ONE_BY_ONE)
        for _ in range(2):
            outputs = llm.generate(inputs, greedy)
            assert [list(one.token_ids) for o in outputs for one in o.outputs] == [t for t in expected for _ in "abc"]
        beams = llm.generate(inputs[4], SamplingParams(num_beams=4, max_new_tokens=NEW, ignore_eos=True))
        model.set_attn_implementation("eager")
        how = {"num_beams": 4, "do_sample": False, "pad_token_id": 0, "use_cache": False}  # MiniMax's cache is not reordered
        wanted = model.generate(torch.tensor([inputs[4]]), max_new_tokens=NEW, **how)
        assert list(beams[0].outputs[0].token_ids) == wanted[0, len(inputs[4]) :].tolist()


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "lfm2_moe", "mamba2", "jamba", "falcon_h1"])
def test_faults_and_recalls(name: str) -> None:
    """Steps that raise before, between and behind layers, in every kind of chunk, while blocks move to other places."""
    inputs = prompts(LENGTHS, VOCAB)
    expected = plain(tiny_with_states(name), inputs, NEW)
    model = tiny_with_states(name)
    engine = TinyEngine(model, usable=300, block_size=4, max_chunk_tokens=8, max_seqs=3, caching=True, elastic=True)
    engine.mixers.one_by_one = name in ONE_BY_ONE
    rng, raised = np.random.default_rng(1), []
    for module in (*getattr(model, "model", getattr(model, "backbone", None)).layers, model.lm_head):

        def failing(*_: Any) -> None:
            if rng.random() < 0.03:
                raised.append(1)
                raise RuntimeError("planted")

        module.register_forward_hook(failing)
    pool, step, given = engine.core.scheduler.pool, engine.core.step, []

    def recalling() -> Any:
        """All but what requests hold, which moves together, is given back; later the pool grows again."""
        if not pool.is_resizing and rng.random() < 0.3:
            given.append(pool.give_back(1000)) if rng.random() < 0.5 else pool.grow(1000)
        return step()

    engine.core.step = recalling  # type: ignore[method-assign]
    for _ in range(2):
        assert engine.generate(inputs, Sampling(NEW)) == expected
    assert len(raised) > 4 and len(given) > 3
    moves = engine.core.runner.storage.geometry.blocks_per_extent > 1
    assert not moves or engine.core.scheduler.stats.moved_blocks > 0


@pytest.mark.skipif(native.instructions() is None, reason="torch's own products depend on the number of rows")
@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_log_probabilities_are_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    """Through `LLM`: in a batch, alone, in chunks, in a pool with room for few, and with prompts that were found."""
    tiny_with_states(name).save_pretrained(tmp_path)
    inputs = prompts(LENGTHS, VOCAB)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True, logprobs=1)
    found = []
    for how in ({}, {"max_seqs": 1}, {"max_step_tokens": 16, "max_seqs": 8}, {"kv_memory": "64KiB", "max_model_len": 64}):
        settings: dict[str, Any] = {"kv_memory": "8MiB", "dtype": "float32", "device": "cpu", "share": False, **how}
        with LLM(str(tmp_path), **settings) as llm:
            for _ in range(2):
                outputs = llm.generate(inputs, greedy)
                found.append([[entry.logprob for entry in one.outputs[0].logprobs or ()] for one in outputs])
    assert len(found[0][0]) == NEW and all(other == found[0] for other in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype: str, tmp_path: Path) -> None:
    """Recurrent states stay float32; the same tokens alone, in a batch and in chunks, where no two are nearly as likely."""
    tiny_with_states("qwen3_5_text").save_pretrained(tmp_path)
    inputs = prompts(LENGTHS, VOCAB)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    with LLM(str(tmp_path), dtype=dtype, device="cpu", kv_memory="8MiB", share=False) as llm:
        assert all(output.finish_reason == "length" for one in llm.generate(inputs, greedy) for output in one.outputs)


def test_resident_memory_stays_within_the_plan(tmp_path: Path) -> None:
    """Over 2,000 random batches, with hits, and states that go to the host and come back."""
    tiny_with_states("qwen3_5_text", hidden_size=128, intermediate_size=256).save_pretrained(tmp_path)
    resident, rng = psutil.Process().memory_info, np.random.default_rng(0)
    how: dict[str, Any] = {
        "kv_memory": "512KiB",
        "host_kv_memory": "4MiB",
        "max_seqs": 16,
        "max_step_tokens": 128,
        "max_model_len": 256,
    }
    with LLM(str(tmp_path), dtype="float32", device="cpu", share=False, **how) as llm:
        known = prompts([40] * 20, VOCAB)

        def batch() -> None:
            count = int(rng.integers(1, 9))
            asked = [known[rng.integers(20)][: rng.integers(1, 41)] + rng.integers(1, VOCAB, 4).tolist() for _ in range(count)]
            params = [SamplingParams(temperature=0.0, max_new_tokens=int(rng.integers(1, 4)), ignore_eos=True) for _ in asked]
            llm.generate(asked, params)

        with llm.locked_engine() as engine:
            plan = engine.plan
        batch()
        gc.collect()
        before, most = resident().rss, []
        for number in range(2000):
            batch()
            if number % 100 == 99:
                most.append(resident().rss - before)
        stats = llm.stats()
    planned = plan.kv_bytes + plan.reserve_bytes + plan.answers_bytes + (4 << 20)
    assert max(most) <= planned, f"{max(most):,} of {planned:,} bytes"
    assert max(most[10:]) - max(most[:10]) <= 2 << 20, "it grows on"
    assert stats["cached_prompt_tokens"] > 10_000 and stats["host_tier"]["swapped_in_bytes"] > 0
