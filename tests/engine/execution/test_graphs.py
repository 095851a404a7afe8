"""Recorded decode steps, with a tape in place of CUDA graphs: the same tokens, whatever comes and goes around them."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from dense_kernel import DenseKernel
from engines import TinyEngine, prompts
from families import FAMILIES, VOCAB, tiny
from tape import Tape, recorder

from pagetide.engine.execution.graph_sizes import SIZES, sizes_for
from pagetide.engine.execution.graphs import CannotBeCaptured, CudaRecorder, DecodeGraphs
from pagetide.engine.execution.transfers import Upload
from pagetide.scheduler.request import Sampling

GREEDY = Sampling(12)


def recorded(model, sizes=(1, 2, 4, 8), **pool) -> tuple[TinyEngine, list[Tape]]:
    engine = TinyEngine(model, block_size=4, max_model_len=64, **{"usable": 100} | pool)
    engine.core.runner.kernel = DenseKernel()
    tapes: list[Tape] = []
    engine.core.runner.record(sizes, recorder(tapes))
    return engine, tapes


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_recorded_steps_give_the_same_tokens(family: str) -> None:
    """Rows come, end at different lengths and are preempted, so steps of all sizes are padded to those recorded."""
    model = tiny(family)
    inputs = prompts([3, 17, 9, 30, 5], VOCAB)
    each = [Sampling(12 + 3 * i, temperature=float(i % 2), seed=i) for i in range(5)]
    right = TinyEngine(model, usable=100, block_size=4, max_model_len=64).generate(inputs, each)
    engine, tapes = recorded(model, usable=16, max_step_tokens=16)
    assert engine.generate(inputs, each) == right
    assert engine.preemptions
    graphs = engine.core.runner.graphs
    assert graphs is not None and graphs.sizes == (1, 2, 4, 8), "none was found to be wrong"
    assert sum(tape.num_replays for tape in tapes) > 20


def test_what_gives_other_logits_than_unrecorded_is_used_no_more(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    inputs = prompts([3, 17, 9], VOCAB)
    right = TinyEngine(model, usable=100, block_size=4, max_model_len=64).generate(inputs, GREEDY)
    engine, _ = recorded(model)
    graphs = engine.core.runner.graphs
    assert graphs is not None
    replay = graphs._replays[4]
    graphs._replays[4] = lambda: (replay(), graphs._logits.add_(torch.rand_like(graphs._logits)))[0]
    with caplog.at_level(logging.WARNING):
        assert engine.generate(inputs, GREEDY) == right
    assert graphs.sizes == () and "a decode step of 4 rows gives other logits" in caplog.text


def test_a_graph_that_does_nothing_is_not_trusted_for_what_another_size_left() -> None:
    works = {4: lambda work: work, 2: lambda work: lambda: None}
    sizes = iter(works)
    graphs = DecodeGraphs(lambda size: torch.arange(12.0).view(4, 3)[:size], lambda work: works[next(sizes)](work))
    for size in works:
        graphs.add(size)
    right = graphs.logits(4, 4).clone()
    assert graphs.sizes == (2, 4)
    assert torch.equal(graphs.logits(2, 2), right[:2]) and graphs.sizes == ()


def test_a_row_that_is_not_finite_ends_alone_and_is_no_reason_to_distrust() -> None:
    model, inputs, poison = tiny("llama"), prompts([3, 5], VOCAB), torch.zeros(())
    right = TinyEngine(model, usable=100, block_size=4, max_model_len=64).generate(inputs, GREEDY)
    handle = model.lm_head.register_forward_hook(
        lambda module, given, out: out.index_fill(1, torch.tensor([0]), torch.nan).where(poison > 0, out)
    )
    with handle:
        engine, _ = recorded(model)
        engine.add_all(inputs, GREEDY)
        for _ in range(4):
            engine.core.step()
        poison.fill_(1)
        engine.core.step()
        poison.fill_(0)
        ends = engine.run()
    assert engine.core.runner.graphs is not None and engine.core.runner.graphs.sizes
    assert ends["r1"].token_ids.tolist() == right[1]


ASKS = {
    "bool": lambda x: bool((x == 7).any()),
    "item": lambda x: x.sum().item(),
    "another device": lambda x: x.to("meta"),
    "a mask that is read": lambda x: x[x > 9],
    "a mask that is written": lambda x: x.clone().__setitem__(x > 9, 0.0),
    "places": lambda x: torch.where(x > 9),
    "repeats": lambda x: x[0, 0].repeat_interleave(x[0, 0].long().clamp(0, 2)),
    "counts": lambda x: torch.bincount(x[0, 0].long().abs()),
}


def test_models_that_ask_the_device_are_not_recorded() -> None:
    model = tiny("llama")
    for name, ask in ASKS.items():
        engine = TinyEngine(model, usable=20, block_size=4)
        engine.core.runner.kernel = DenseKernel()
        hook = model.model.layers[0].register_forward_hook(lambda module, given, out, ask=ask: (ask(out), None)[1])
        with hook, pytest.raises(CannotBeCaptured, match=r"^aten\..* (waits for a value|copies between)"):
            engine.core.runner.record([2], lambda work: work)
        assert engine.core.runner.graphs is None, name


def test_table_entries_beyond_the_upload_leave_the_inputs_of_a_graph_in_their_place() -> None:
    """As of a long prompt that is found, and decodes at once beside others: its table alone is more than the buffer."""
    tokens, buffer = [], 2400  # bytes; the entries of 100 blocks are as many
    for sizes in ((), (1, 2, 4, 8)):
        engine = TinyEngine(tiny("llama"), usable=900, block_size=4, max_seqs=8, max_model_len=480, caching=True)
        runner = engine.core.runner
        runner.kernel, runner._upload = DenseKernel(), Upload(torch.device("cpu"), buffer)
        if sizes:
            runner.record(sizes, recorder([]))
        (long,) = prompts([401], VOCAB)
        engine.generate([long], Sampling(4))
        for i, prompt in enumerate(prompts([5] * 7, VOCAB, 1)):
            engine.add(f"s{i}", prompt, Sampling(30), arrival=100.0 + i)
        for _ in range(6):
            engine.core.step()
        engine.add("s7", long, Sampling(20), arrival=200.0)
        ends = engine.run()
        tokens.append([ends[f"s{i}"].token_ids.tolist() for i in range(8)])
    assert tokens[0] == tokens[1]


def test_no_family_asks_the_device_in_a_step_of_decodes() -> None:
    """Nor is a pool that was made in inference mode an obstacle."""
    for family in FAMILIES:
        assert recorded(tiny(family), sizes=[2])[0].core.runner.graphs is not None, family
    with torch.inference_mode():
        engine, _ = recorded(tiny("llama"), sizes=[2])
    assert engine.core.runner.graphs is not None


def test_sizes() -> None:
    assert sizes_for(1) == (1,) and sizes_for(2) == (1, 2) and sizes_for(3) == (1, 2, 4) and sizes_for(256) == SIZES
    assert sizes_for(5000) == SIZES and sizes_for(100) == (*SIZES[:10], 128)
    graphs = DecodeGraphs(lambda size: torch.zeros(size, 3), lambda work: work)
    for size in (8, 2):
        graphs.add(size)
    assert [graphs.size_for(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, None]
    assert graphs.sizes == (2, 8)


def test_a_recorder_has_the_stream_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of graphs that are in use: a library's workspace belongs to its stream."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr("pagetide.engine.execution.graphs._idle", defaultdict(list))
    device = torch.device("cuda", 0)
    one, other = CudaRecorder(device), CudaRecorder(device)
    stream = one._stream
    assert other._stream is not stream
    del one
    third, elsewhere = CudaRecorder(device), CudaRecorder(torch.device("cuda", 1))
    assert third._stream is stream and elsewhere._stream not in (stream, other._stream)
