"""Every family with states: the tokens of transformers in a batch, in chunks, preempted, from prefixes; and through `LLM`."""

from __future__ import annotations

import gc
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import beam_rig
import numpy as np
import psutil
import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB
from state_families import ONE_BY_ONE, STATE_FAMILIES, save_with_words, tiny_with_states

from pagetide import LLM, SamplingParams, native
from pagetide.engine.attention.states import installed
from pagetide.engine.layers.linears import NativeLinear
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


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "bamba", "zaya", "kimi_linear", "minimax"])
def test_forks_and_beams_begin_with_states_of_others(name: str) -> None:
    """Without a cache of prefixes: no token is computed twice. Out of a small pool they wait on the host, with their states."""
    model, ids = tiny_with_states(name), prompts([26, 21], VOCAB)
    expected = plain(model, ids, NEW)
    how = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    wanted = [model.generate(torch.tensor([one]), max_new_tokens=beam_rig.NEW, **how)[:, len(one) :].tolist() for one in ids]
    for pool in ({"usable": 400}, {"usable": 45, "caching": True, "host_slots": 400}):
        engine = TinyEngine(tiny_with_states(name), block_size=4, max_chunk_tokens=8, **pool)
        for p, prompt in enumerate(ids):
            for i in range(3):
                engine.add(f"r{p}.{i}", prompt, Sampling(NEW), arrival=float(p), fork_of=f"r{p}.0" if i else None)
        ends = engine.run()
        assert [ends[f"r{p}.{i}"].token_ids.tolist() for p in range(2) for i in range(3)] == [
            t for t in expected for _ in "abc"
        ]
        stats = engine.core.scheduler.stats
        assert stats.forks == 4 or pool["usable"] < 400
        assert stats.computed_tokens == sum(map(len, ids)) + 2 * 3 * (NEW - 1) + 4 or pool["usable"] < 400
        found = beam_rig.searched(engine, {f"s{p}": prompt for p, prompt in enumerate(ids)}, (), num_beams=4, n=4)
        assert [beam_rig.tokens(found[f"s{p}"]) for p in range(2)] == wanted
        assert bool(engine.preemptions) == bool(stats.promoted_blocks) == (pool["usable"] < 400)


def test_int8_k_and_v_wait_on_the_host_with_states() -> None:
    """Nothing is computed twice, so that the tokens are those of a pool with room for all."""
    found, inputs = [], prompts([20, 22, 23], VOCAB)
    for usable, slots in ((400, 0), (38, 300)):
        engine = TinyEngine(
            tiny_with_states("qwen3_5_text"), usable=usable, block_size=4, caching=True, host_slots=slots, kv_dtype="int8"
        )
        found.append(engine.generate(inputs, Sampling(16)))
        assert {state.dtype for state in engine.core.runner.storage.states} == {torch.float32}
        assert bool(engine.preemptions) == (slots > 0) and not engine.core.scheduler.stats.recomputed_tokens
    assert found[0] == found[1]


@pytest.mark.skipif(native.instructions() is None, reason="quantized weights need native kernels")
@pytest.mark.parametrize(("form", "error"), [("int8", 0.2), ("int4", 0.6)])  # parts of the spread; of other weights over 1
def test_weights_of_mixers_in_8_and_4_bits(form: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone and in a batch, near those of plain weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    tiny_with_states("qwen3_5_text", **sizes).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    inputs, settings = prompts(LENGTHS[1:], VOCAB), {"dtype": "float32", "device": "cpu", "kv_memory": "8MiB", "share": False}
    found = []
    for more in ({"max_seqs": 1}, {"max_seqs": 1, "quantization": form}, {"quantization": form, "max_step_tokens": 16}):
        with LLM(str(tmp_path), **settings, **more) as llm:
            outputs = llm.generate(inputs, params)
            model = llm._manager.engine.core.runner.model
            assert installed(model).packed
            packed = [
                one.packed.type
                for name, one in model.named_modules()
                if isinstance(one, NativeLinear) and "linear_attn" in name
            ]
            assert not more.get("quantization") or packed.count(form) >= 9
        logprobs = [[entry.logprob for entry in one.outputs[0].logprobs] for one in outputs]
        found.append((logprobs, [[entry and entry.logprob for entry in one.prompt_logprobs] for one in outputs]))
    assert found[1] == found[2]
    plain_weights, quantized = (np.concatenate([one[1:] for one in each[1]]).astype(float) for each in found[:2])
    assert 0 < np.abs(plain_weights - quantized).mean() < error * plain_weights.std()


def test_constraints_interrupts_and_hand_over(tmp_path: Path) -> None:
    save_with_words(tmp_path, "qwen3_5_text")
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": "8MiB", "share": False}
    texts = ["the tide is", "a ship", "once upon a time there was a"]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    form = SamplingParams(temperature=0.0, max_new_tokens=24, regex="(aye|nay), captain [0-9]{2}", n=2)
    with LLM(str(tmp_path), **settings) as one, LLM(str(tmp_path), max_step_tokens=8, max_seqs=4, **settings) as two:
        expected = [[list(o.completions[0].token_ids) for o in llm.generate(texts, greedy)] for llm in (one, two)]
        answers = [[c.text for o in llm.generate(texts, form) for c in o.completions] for llm in (one, two)]
        assert expected[0] == expected[1] and answers[0] == answers[1]
        assert all(re.fullmatch(form.regex, text) for text in answers[0])
        calls = iter(range(10**6))

        def interrupt(*_: Any) -> None:
            if next(calls) == 5:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        norm = one._manager.engine.core.runner.model.get_submodule("model.layers.1.linear_attn.norm")
        hook = norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.generate(texts, SamplingParams(max_new_tokens=400, ignore_eos=True))
        hook.remove()
        assert one.stats()["blocks"]["live"] == 0
        stream = one.stream(texts, greedy)
        for _ in range(12):
            next(stream)
        data = [json.loads(json.dumps(handle.export())) for handle in stream.requests]
        assert one.stats()["blocks"]["live"] == 0
        assert [list(o.completions[0].token_ids) for o in two.import_request(data).outputs()] == expected[0]
        assert [list(o.completions[0].token_ids) for o in one.generate(texts, greedy)] == expected[0]


@pytest.mark.parametrize("name", STATE_FAMILIES)
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
