"""Models with recurrent and convolution states: the tokens of transformers, whatever the chunks, the pool and the faults."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB
from state_families import ONE_BY_ONE, tiny_with_states

from pagetide import LLM, SamplingParams, native
from pagetide.cache.geometry import Geometry, LayerShape, StateShape
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.attention.context import running_step
from pagetide.engine.attention.native_kernel import NativeKernel
from pagetide.engine.attention.states import find_layers, may_have_states
from pagetide.engine.attention.undone_outputs import Tokens, UndoneOutputs
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.packing import pack_linears
from pagetide.engine.loading.probe import probe
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 3, 7, 12, 21, 45]
NEW = 10


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_the_tokens_of_transformers(name: str) -> None:
    model, inputs = tiny_with_states(name), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    turns = [prompt + tokens[:6] for prompt, tokens in zip(inputs, expected, strict=True)]
    for how in (
        {"usable": 200}, {"usable": 200, "max_chunk_tokens": 5}, {"usable": 24, "caching": True, "max_seqs": 4},
        {"usable": 24, "caching": True, "host_slots": 100, "max_seqs": 4},
    ):  # fmt: skip
        engine = TinyEngine(tiny_with_states(name), block_size=4, **how)
        engine.mixers.one_by_one = name in ONE_BY_ONE
        assert engine.generate(inputs, Sampling(NEW)) == expected, how
        if engine.core.scheduler.cache.index.capacity:
            later = {f"t{n}": turn for n, turn in enumerate(turns)}
            for label, turn in later.items():
                engine.add(label, turn, Sampling(NEW - 6))
            ends = engine.run()
            assert [ends[label].token_ids.tolist() for label in later] == [tokens[6:] for tokens in expected]
            assert engine.core.scheduler.stats.cached_prompt_tokens > 0 or how["usable"] < 200


@pytest.mark.parametrize("rest", [0, 2])
def test_what_is_preempted_goes_on_from_its_state_on_the_host(rest: int) -> None:
    """With the partly filled last block, so that no token is computed twice; and states of prompts are found there."""
    model, inputs = tiny_with_states("qwen3_5_text"), prompts([20 + rest] * 3, VOCAB)
    expected = plain(model, inputs, 16)
    engine = TinyEngine(model, usable=38, block_size=4, caching=True, host_slots=300)
    for turn in range(2):
        assert engine.generate(inputs, Sampling(16)) == expected
        stats = engine.core.scheduler.stats
        assert engine.preemptions and stats.recomputed_tokens == 0
        assert stats.cached_prompt_tokens == (16 if not rest else 20) * 3 * turn
    assert stats.promoted_blocks >= 6


@pytest.mark.parametrize(("packed", "usable"), [(True, 200), (True, 26), (False, 200)])
def test_a_step_that_raises_is_repeated_with_the_same_tokens(packed: bool, usable: int) -> None:
    """Before, between and behind layers with states, in decodes, first chunks, later ones and their pieces: what a mixer has
    computed changes its state once. Requests are preempted, and find states, in between.
    """
    model, inputs = tiny_with_states("qwen3_5_text"), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    engine = TinyEngine(model, usable=usable, block_size=4, max_chunk_tokens=8, max_seqs=4, caching=True)
    engine.mixers.packed = packed
    rng, raised = np.random.default_rng(3), []
    for module in (*model.model.layers, model.lm_head):

        def failing(*_: Any, name: str = type(module).__name__) -> None:
            if rng.random() < 0.03:
                raised.append(name)
                raise RuntimeError("planted")

        module.register_forward_hook(failing)
    assert engine.generate(inputs, Sampling(NEW)) == expected
    assert engine.generate(inputs, Sampling(NEW)) == expected
    assert len(raised) > 5 and (engine.preemptions if usable < 100 else engine.core.scheduler.stats.cached_prompt_tokens)
    assert not engine.core.runner._states._undone._kept


@pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("packed", [True, False])
def test_a_fault_within_a_mixer_changes_no_token(packed: bool) -> None:
    """Behind a kernel that has changed states in place, its sequences are computed from the start; from copies,
    the step is repeated.
    """
    model, inputs = tiny_with_states("qwen3_5_text"), prompts(LENGTHS * 2, VOCAB)
    expected = plain(model, inputs, NEW)
    engine = TinyEngine(model, usable=300, block_size=4, max_chunk_tokens=8, max_seqs=3, caching=True)
    engine.mixers.packed = packed
    calls = itertools.count(1)

    def failing(*_: Any) -> None:
        if next(calls) in (100, 101, 150):
            raise RuntimeError("planted")

    for name, module in model.named_modules():
        if name.endswith(("linear_attn.norm", "linear_attn.out_proj")):
            module.register_forward_hook(failing)
    assert engine.generate(inputs, Sampling(NEW)) == expected
    assert next(calls) > 150 and bool(engine.core.scheduler.stats.recomputed_tokens) == packed


@pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")
def test_a_request_that_loses_its_states_at_each_try_ends_alone() -> None:
    model, inputs = tiny_with_states("qwen3_5_text"), prompts([5, 9, 14], VOCAB)
    expected = plain(model, inputs, NEW)
    engine = TinyEngine(model, usable=300, block_size=4, max_seqs=3, max_chunk_tokens=8)
    norm = model.get_submodule("model.layers.1.linear_attn.norm")

    def failing(*_: Any) -> None:
        step = running_step()
        if step is not None and (step.kv_lens == 20).any():
            raise RuntimeError("planted")

    norm.register_forward_hook(failing)
    engine.add_all(inputs, Sampling(NEW))
    ends = engine.run()
    assert [ends[f"r{number}"].reason for number in range(3)] == ["length", "length", "error"]
    assert [ends[f"r{number}"].token_ids.tolist() for number in range(3)] == [*expected[:2], expected[2][:6]]


def test_outputs_of_deferred_chunks_outlast_plans_without_them() -> None:
    undone = UndoneOutputs()
    tokens = Tokens(*(np.array([number]) for number in (3, 7, 0, 1)))
    undone.begin(tokens)
    undone.add(0, tokens, torch.ones(1, 1, 4), 1)
    none = np.empty(0, np.int64)
    for _ in range(3):
        undone.done(none, none)
        assert len(undone.left(0, tokens)[0]) == 0, "it is known"
    undone.done(np.array([3]), np.array([8]))
    assert len(undone.left(0, tokens)[0]) == 1


def test_a_token_changes_a_state_once() -> None:
    """Decodes that raise behind all layers with states are computed again, deferred and planned again."""
    inputs, left = prompts([9, 9], VOCAB), [0]

    def failing(*_: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("planted")

    states = []
    for times in (0, 1, 3):  # together; then each alone, so that both are deferred
        model = tiny_with_states("qwen3_5_text")
        engine = TinyEngine(model, usable=60, block_size=4)
        model.lm_head.register_forward_pre_hook(failing)
        engine.add_all(inputs, Sampling(NEW))
        engine.core.step()
        left[0] = times
        for _ in range(2 if times == 3 else 1):
            engine.core.step()
        runner = engine.core.runner
        recurrent = [cache for cache in runner.storage.states if cache.place.state.kind == "recurrent"]
        states.append([cache.read(runner._rows.states[:2]) for cache in recurrent])
        assert not runner._states._undone._kept
    assert all(torch.equal(one, two) for other in states[1:] for one, two in zip(states[0], other, strict=True))


def test_mixers_that_no_kernel_computes_are_called_in_parts() -> None:
    """Their activation behind the convolution is another: the probe finds it."""
    model, inputs = tiny_with_states("qwen3_5_text", hidden_act="gelu"), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    engine = TinyEngine(model, usable=200, block_size=4)
    assert engine.mixers.packed == (native.instructions() is not None)
    probe(model, engine.core.runner.storage.geometry)
    assert not engine.mixers.packed and not engine.mixers.one_by_one
    assert engine.generate(inputs, Sampling(NEW)) == expected


def test_time_steps_are_limited_as_the_configuration_says() -> None:
    """transformers limits Nemotron's by `time_step_min`, and in chunks alone."""
    inputs, models = (
        prompts([9, 14], VOCAB),
        [tiny_with_states("nemotron_h", time_step_min=1.5, time_step_max=2.0) for _ in range(3)],
    )
    for module in models[0].modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = 0.0, float("inf")
    expected = plain(models[0], inputs, NEW)
    assert plain(models[1], inputs, NEW) != expected
    assert TinyEngine(models[2], usable=200, block_size=4, max_chunk_tokens=5).generate(inputs, Sampling(NEW)) == expected


def test_states_of_any_shape_are_read_as_they_were_written() -> None:
    states = (StateShape("conv", 0, (10, 4), "bfloat16"), StateShape("recurrent", 0, (3, 5, 7), "float32"))
    geometry = Geometry((LayerShape(1, 4, 4, states=states), LayerShape(0, 0, 0, states=states)), 4, "bfloat16")
    storage = Storage(geometry, TensorArena(geometry.extents_for_blocks(40), geometry.extent_bytes, "cpu"))
    blocks = torch.randperm(39)[: 3 * geometry.state_blocks].view(3, -1) + 1
    written = [torch.randn(3, *state.shape).to(state.dtype) for state in storage.states]
    for state, values in zip(storage.states, written, strict=True):
        state.write(blocks, values)
    for state, values in zip(storage.states, written, strict=True):
        assert torch.equal(state.read(blocks[[2, 0]]), values[[2, 0]])


def test_the_layers_of_a_model_are_seen_without_its_weights() -> None:
    model = tiny_with_states("qwen3_5_text")
    assert may_have_states(type(model))
    layers, mixers = find_layers(model, torch.arange(4)[None])
    assert [len(layer.states) for layer in layers] == [2, 2, 2, 0]
    assert [layer.kv for layer in layers] == [None, None, None, (2, 16, 16)]
    assert layers[0].states[1] == StateShape("recurrent", 0, (4, 8, 8), "float32")
    assert mixers == {f"model.layers.{n}.linear_attn": n for n in range(3)}
    with torch.device("meta"):
        without = type(model)(model.config)
    assert find_layers(without, torch.zeros((1, 4), dtype=torch.int64, device="meta")) == (layers, mixers)


def test_llm_serves_them(tmp_path: Path) -> None:
    model, inputs = tiny_with_states("qwen3_5_text"), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    model.save_pretrained(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, n=2, ignore_eos=True)
    settings: dict[str, Any] = {"kv_memory": "4MiB", "host_kv_memory": "4MiB", "overlap": True}
    with LLM(str(tmp_path), dtype="float32", device="cpu", share=False, **settings) as llm:
        assert llm.stats()["host_tier"] is not None
        for _ in range(2):
            outputs = llm.generate(inputs, greedy)
            assert [list(one.token_ids) for output in outputs for one in output.outputs] == [t for t in expected for _ in "ab"]
        assert llm.stats()["cached_prompt_tokens"] > 0
        beams = llm.generate(inputs[3], SamplingParams(num_beams=3, max_new_tokens=NEW, ignore_eos=True))
        wanted = model.generate(torch.tensor([inputs[3]]), max_new_tokens=NEW, num_beams=3, do_sample=False, pad_token_id=0)
        assert list(beams[0].outputs[0].token_ids) == wanted[0, len(inputs[3]) :].tolist()


@pytest.mark.skipif(native.instructions() is None, reason="torch's own products depend on the number of rows")
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_logits_are_the_same_to_the_bit(name: str) -> None:
    """Alone, in a batch, in chunks and after preemption."""
    inputs = prompts(LENGTHS, VOCAB)
    logits: dict[tuple[str, int], torch.Tensor] = {}
    for how in ({}, {"max_seqs": 1}, {"max_chunk_tokens": 5}, {"max_chunk_tokens": 1}, {"usable": 20}):
        model = tiny_with_states(name)
        pack_linears(model)
        with torch.inference_mode():
            fuse(model, torch.arange(1, 6), kernels_on(torch.device("cpu")))
            engine = TinyEngine(model, **{"usable": 2000, "block_size": 4, **how})
            engine.core.runner.kernel = NativeKernel()
            engine.watch_logits()
            engine.generate(inputs, Sampling(NEW))
        assert engine.mixers.packed and (how.get("usable") is None or engine.preemptions)
        logits = logits or engine.logits
        assert logits.keys() == engine.logits.keys()
        assert all(torch.equal(one, engine.logits[at]) for at, one in logits.items()), how
