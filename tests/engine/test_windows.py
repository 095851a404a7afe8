"""Models with windows give the tokens of plain transformers while windows pass, whatever else happens to their blocks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import _EXPERTS, _GQA, _ROPE, FAMILIES, VOCAB, tiny

from pagetide.cache.geometry import Geometry
from pagetide.cache.layer_groups import LayerGroup
from pagetide.engine.attention.context import StepContext
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.loading.probe import probe
from pagetide.scheduler.request import Sampling

NEW = 12
GREEDY = Sampling(NEW)
_FOUR = {**_GQA, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 8192}

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {**_GQA, "max_position_embeddings": 8192},
    "gemma2": {**FAMILIES["gemma2"], "max_position_embeddings": 8192},
    "gemma3_text": {**FAMILIES["gemma3_text"], "max_position_embeddings": 8192},
    "gpt_oss": {**FAMILIES["gpt_oss"], "max_position_embeddings": 8192},
    "cohere2": {**_FOUR, "sliding_window_pattern": 4, "pad_token_id": 0},
    "exaone4": {**_FOUR, "sliding_window_pattern": 4},
    "olmo3": {**_FOUR, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_parameters": _ROPE},
    "llama4_text": {
        **_FOUR, **_EXPERTS, "intermediate_size_mlp": 64, "attn_temperature_tuning": False, "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 1, "rope_parameters": _ROPE,
    },
}  # fmt: skip
# The tables of each group: those without a window first.
TABLES = {
    "mistral": [1], "gemma2": [1, 1], "gemma3_text": [1, 3], "gpt_oss": [1, 1], "cohere2": [1, 3], "exaone4": [1, 3],
    "olmo3": [1, 3], "llama4_text": [1, 3],
}  # fmt: skip
# Some run each time, the others in `make stress`.
SMALL = [8, pytest.param(24, marks=pytest.mark.stress), pytest.param(64, marks=pytest.mark.stress)]


@functools.cache
def of(name: str, window: int) -> Any:
    size = "attention_chunk_size" if name == "llama4_text" else "sliding_window"
    over = {**MODELS[name], size: window}
    return tiny(name, **over)


@functools.cache
def case(name: str, window: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of up to 20 windows, two of which begin alike, and their tokens."""
    lengths = [1, window - 1, window, window + 1, 2 * window + 3, 5 * window, 13 * window + 2, 20 * window]
    inputs = prompts(lengths, VOCAB)
    inputs.append(inputs[-1][: 7 * window + 5] + inputs[4])
    return inputs, plain(of(name, window), inputs, NEW)


def engine_for(name: str, window: int, share: float = 4.0, **more: Any) -> TinyEngine:
    """An engine whose pool holds `share` of the longest sequence."""
    block_size = more.pop("block_size", 4)
    model, longest = of(name, window), 20 * window + NEW
    geometry = Geometry.from_config(model.config, block_size=block_size, dtype="float32")
    per_block = geometry.blocks_for_tokens(160) / geometry.slots_for_tokens(160)  # as TinyEngine counts
    usable = int(share * geometry.blocks_for_tokens(longest) / per_block)
    return TinyEngine(model, usable=usable, block_size=block_size, max_model_len=longest + window + NEW, **more)


@pytest.mark.parametrize("name", MODELS)
def test_the_groups_are_those_of_the_config(name: str) -> None:
    model = of(name, 8)
    geometry = Geometry.from_config(model.config, block_size=4, dtype="float32")
    assert [group.num_tables for group in geometry.groups] == TABLES[name]
    assert [group.window for group in geometry.groups] == [8] if len(TABLES[name]) == 1 else [None, 8]
    assert geometry.groups[-1].chunked == (name == "llama4_text")
    probe(model, geometry)


@pytest.mark.parametrize("window", SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_in_chunks_of_any_size(name: str, window: int) -> None:
    inputs, expected = case(name, window)
    for chunk, block_size in ((None, 4), (7, 4), (3, 8), (2 * window, 2)):
        engine = engine_for(name, window, max_chunk_tokens=chunk, block_size=block_size)
        assert engine.generate(inputs, GREEDY) == expected, (chunk, block_size)


@pytest.mark.parametrize("window", SMALL)
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_behind_preemptions_prefixes_and_swaps(name: str, window: int) -> None:
    inputs, expected = case(name, window)
    preemptions = hits = swaps = 0
    for share, host_slots in ((1.05, 0), (1.05, 400), (4, 0)):
        engine = engine_for(name, window, share, caching=True, host_slots=host_slots, max_chunk_tokens=29)
        for _ in range(2):
            assert engine.generate(inputs, GREEDY) == expected, (share, host_slots)
        stats = engine.core.scheduler.stats
        preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_lookups.hit_tokens
        swaps += stats.promoted_blocks
    assert hits > 0
    assert (preemptions > 0 and swaps > 0) or window > 8, "nothing was forced out"


@pytest.mark.parametrize("name", MODELS)
def test_forks_and_second_turns_share_what_windows_still_read(name: str) -> None:
    inputs, expected = case(name, 8)
    engine = engine_for(name, 8, caching=True)
    for i in (6, 7):
        request = {"sampling": Sampling(NEW), "arrival": 0.0}
        engine.add(f"r{i}", inputs[i], **request)
        for k in range(3):
            engine.add(f"r{i}+{k}", inputs[i], **request, fork_of=f"r{i}")
    ends = engine.run()
    assert all(end.token_ids.tolist() == expected[int(name[1])] for name, end in ends.items())
    assert engine.core.scheduler.stats.forks >= 3, "others find the prompt when a window has passed its end"
    before = engine.core.scheduler.stats.prefix_lookups.hit_tokens
    turn = inputs[7] + expected[7]
    (got,) = engine.generate([turn], GREEDY)
    assert got == plain(of(name, 8), [turn], NEW)[0]
    found = engine.core.scheduler.stats.prefix_lookups.hit_tokens - before
    assert found == (len(turn) - 1) // 4 * 4, "all of the first turn, for which each window has what it reads next"


@pytest.mark.parametrize("name", ["gemma2", "mistral", "llama4_text"])
def test_a_sequence_holds_no_more_than_its_windows(name: str) -> None:
    """After each step: all blocks of tables without a window, and of the others those that are read."""
    window, block_size = 8, 4
    engine = engine_for(name, window, max_chunk_tokens=4)
    (prompt,) = prompts([20 * window], VOCAB)
    engine.add("r", prompt, GREEDY)
    cache = engine.core.scheduler.cache
    most = sum(
        group.num_tables * (1 + (group.most_slots(block_size) or 10**6))
        for group in cache.row_tables.groups
        if group.window
    )
    full = sum(group.num_tables for group in cache.row_tables.groups if group.window is None)
    while engine.core.has_work:
        engine.core.step()
        for row in engine.core.scheduler._running.by_row:
            held = int(cache.row_tables.held_blocks(np.array([row]))[0])
            assert held <= most + full * -(-(20 * window + NEW) // block_size)


@pytest.mark.parametrize("window", [pytest.param(w, marks=pytest.mark.stress) for w in (320, 1024, 4096)])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4_text"])
def test_same_tokens_with_large_windows(name: str, window: int) -> None:
    """Up to three windows, in 16 or more blocks each."""
    model = of(name, window)
    model.config.max_position_embeddings = 4 * window
    inputs = prompts([window - 1, window + 5, 3 * window - NEW], VOCAB)
    expected = plain(model, inputs, NEW)
    size = 16
    geometry = Geometry.from_config(model.config, block_size=size, dtype="float32")
    usable = 3 * geometry.slots_for_tokens(3 * window)
    engine = TinyEngine(
        model, usable=usable, block_size=size, max_model_len=3 * window + 8, max_step_tokens=512, caching=True
    )
    for _ in range(2):
        assert engine.generate(inputs, GREEDY) == expected


def test_a_window_that_the_model_does_not_have_is_refused() -> None:
    model = of("gemma2", 8)
    geometry = Geometry.from_config(model.config, block_size=4, dtype="float32")
    assert geometry.groups == (LayerGroup(), LayerGroup(1, 8))
    layers = tuple(replace(layer, window=layer.window and 6) for layer in geometry.layers)
    with pytest.raises(UnsupportedModel, match="window of 8; its configuration promises 6"):
        probe(model, replace(geometry, layers=layers))


def test_decodes_in_chunks_on_a_device_that_alone_knows_the_lengths() -> None:
    """The step of a CUDA graph: lengths on the host are bounds, and a chunk of length 0 is padding."""
    lens = torch.tensor([1, 8, 9, 30, 0], dtype=torch.int32)
    table = torch.arange(1, 1 + 5 * 8).view(5, 8)
    step = StepContext(
        layers=(), kernel=TorchKernel(), q_starts=np.arange(5), q_lens=np.ones(5, np.int32), kv_lens=np.full(5, 32),
        num_decodes=5, lens=lens, bounds=torch.arange(6, dtype=torch.int32), tables=(table,), write_blocks=(),
        write_offsets=torch.zeros(5, dtype=torch.int64), block_size=4, bounded=True,
    )  # fmt: skip
    chunked = step.in_chunks(8)
    assert chunked is step.in_chunks(8)
    assert chunked.lens.tolist() == [1, 8, 1, 6, 0] and chunked.kv_lens.tolist() == [8] * 5
    assert chunked.tables[0].tolist() == [[1, 0], [9, 10], [19, 0], [31, 32], [0, 0]]
