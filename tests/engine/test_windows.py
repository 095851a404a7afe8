"""Models with windows give the tokens of plain transformers while windows pass, whatever else happens to their blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import plain
from windows import GREEDY, MODELS, NEW, case, check_chunks, check_disturbed, engine_for, of

from pagetide.cache.geometry import Geometry
from pagetide.cache.layer_groups import LayerGroup
from pagetide.engine.attention.context import StepContext
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.loading.probe import probe
from pagetide.scheduler.request import Sampling

# The tables of each group: those without a window first.
TABLES = {
    "mistral": [1], "gemma2": [1, 1], "gemma3_text": [1, 3], "gpt_oss": [1, 1], "cohere2": [1, 3], "exaone4": [1, 3],
    "olmo3": [1, 3], "llama4_text": [1, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_groups_are_those_of_the_config(name: str) -> None:
    model = of(name, 8)
    geometry = Geometry.from_config(model.config, block_size=4, dtype="float32")
    assert [group.num_tables for group in geometry.groups] == TABLES[name]
    assert [group.window for group in geometry.groups] == [8] if len(TABLES[name]) == 1 else [None, 8]
    assert geometry.groups[-1].chunked == (name == "llama4_text")
    probe(model, geometry)


def test_same_tokens_in_chunks_and_behind_preemptions_prefixes_and_swaps() -> None:
    check_chunks("gemma3_text", 8, [(7, 4)])
    check_disturbed("gemma3_text", 8, [(1.05, 400)])


def test_forks_and_second_turns_share_what_windows_still_read() -> None:
    inputs, expected = case("gemma3_text", 8)
    engine = engine_for("gemma3_text", 8, caching=True)
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
    assert got == plain(of("gemma3_text", 8), [turn], NEW)[0]
    found = engine.core.scheduler.stats.prefix_lookups.hit_tokens - before
    assert found == (len(turn) - 1) // 4 * 4, "all of the first turn, for which each window has what it reads next"


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
