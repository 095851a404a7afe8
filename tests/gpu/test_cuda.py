"""The same engine on a CUDA device: `make gpu`. A model over two, with NCCL; where there is one, two shards on it, by gloo.

The self-check there: everything passes, the result is kept, and a fault in its process harms no other.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide import LLM, SamplingParams
from pagetide.engine.errors import NotEnoughMemory
from pagetide.engine.self_check.cache import Cache
from pagetide.engine.self_check.check import self_check
from pagetide.engine.self_check.identity import identity_of
from pagetide.engine.self_check.parts import check_part, cuda_seams
from pagetide.engine.self_check.process import try_parts
from pagetide.engine.self_check.report import ABSENT, FAILED, PASSED, POOL
from pagetide.scheduler.request import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [1, 2, 15, 16, 17, 64, 100, 300]
NEW = 20


def allocated_bytes() -> int:
    """What tensors hold: without the workspaces that cuBLAS keeps for good, 32 MiB a stream on a Hopper chip."""
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_plain_transformers(name):
    model = tiny(name).to("cuda")
    inputs = prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    preemptions = 0
    for block_size, chunk, num_rows, share in [(4, 7, 12, 0.4), (16, None, 12, 0.5), (256, None, 3, 1.0)]:
        least = -(-(max(LENGTHS) + NEW - 1) // block_size)
        usable = max(least, int(share * blocks_needed(inputs, NEW, block_size)))
        engine = TinyEngine(
            model, usable=usable, block_size=block_size, max_seqs=num_rows, max_chunk_tokens=chunk, device="cuda"
        )
        assert engine.generate(inputs, Sampling(NEW)) == expected, (block_size, chunk, num_rows)
        preemptions += engine.preemptions
    assert preemptions > 0


def test_llm_on_cuda_gives_its_memory_back():
    torch.cuda.init()
    before = allocated_bytes()
    with LLM("demo", device="cuda", dtype="float32", kv_memory="256MiB") as llm:
        stats = llm.stats()
        assert (stats["device"], stats["kv_bytes"]) == ("cuda:0", 256 << 20)
        out = llm.generate(["It was", "The whale"], SamplingParams(max_new_tokens=24, temperature=0))
        assert all(0 < len(o.token_ids) <= 24 for o in out)
        again = llm.generate("It was", SamplingParams(max_new_tokens=24, temperature=0))
        assert again[0].token_ids == out[0].token_ids
    assert allocated_bytes() - before < 1 << 20


PROMPTS = ["It was", "The whale", "Once upon a time", "The sea", "Call me"]


def events_of(llm: Any) -> list[Any]:
    """All that comes of a few requests: at once, by a stream, up to a stop string, beside one that is left in the middle."""
    each = [SamplingParams(max_new_tokens=20 + 8 * i, temperature=0, stop=[" the", "."][: i % 2]) for i in range(5)]
    left = llm.stream("In the beginning", each[-1])
    next(left), next(left)
    told: Any = [(c.text, c.token_ids, c.finish_reason) for o in llm.generate(PROMPTS, each) for c in o.completions]
    left.close()
    for prompt, params in zip(PROMPTS, each, strict=True):
        stream = llm.stream(prompt, params)
        told.append(("".join(chunk.text for chunk in stream), [o.token_ids for o in stream.outputs()]))
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (0, 0, 0)
    return told


@pytest.mark.parametrize("attention", [None, "triton"])
def test_steps_begun_ahead_and_from_graphs_give_the_tokens_of_plain_ones(attention: str | None) -> None:
    before = allocated_bytes()
    told = []
    for options in ({"cuda_graphs": False, "overlap": False}, {}):
        with LLM(
            "demo", device="cuda", dtype="float32", kv_memory="256MiB", share=False, attention=attention, **options
        ) as llm:
            stats, kernel = llm.stats(), llm._manager.engine.core.runner.kernel
            assert stats["overlap"] is not bool(options)
            assert bool(stats["cuda_graphs"]) == (kernel.captures and not options), kernel.name
            told.append(events_of(llm))
            assert llm.stats()["cuda_graphs"] == stats["cuda_graphs"], "one gave other logits than without a graph"
        del llm, kernel
    assert told[0] == told[1]
    assert {reason for *_, reason in told[0][: len(PROMPTS)]} == {"length", "stop"}
    assert allocated_bytes() - before < 1 << 20


def test_a_model_that_asks_the_device_is_served_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = tiny("llama").to("cuda"), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    handle = model.model.layers[0].register_forward_hook(lambda module, _, out: out if bool((out == 7).any()) else None)
    with (
        caplog.at_level(logging.WARNING, "pagetide"),
        LLM(model, kv_memory="64MiB", max_model_len=512, share=False, attention="triton") as llm,
    ):
        assert llm.stats()["cuda_graphs"] == []
        outputs = llm.generate(inputs, SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True))
    handle.remove()
    assert "not captured in CUDA graphs: CannotBeCaptured" in caplog.text
    assert [list(output.token_ids) for output in outputs] == expected


def test_what_the_card_has_not_is_refused_with_numbers():
    before = allocated_bytes()
    with pytest.raises(NotEnoughMemory, match="are free"):
        LLM("demo", device="cuda", kv_memory="4TiB")
    assert allocated_bytes() == before


TALES = ["the tide is", "a ship", "once upon a time there was a", "in the morning"] * 3
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)
DEVICES = ["cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.completions[0].token_ids) for output in llm.generate(TALES, GREEDY, progress=False)]


def test_two_shards_give_the_tokens_of_one_device() -> None:
    options = {"dtype": "float32", "kv_memory": {"min": "16MiB", "max": "64MiB"}}
    with LLM("demo", device="cuda:0", **options) as llm:
        right = tokens(llm)
    with LLM("demo", devices=DEVICES, host_kv_memory="16MiB", **options) as llm:
        assert llm.stats()["shards"]["collectives"].startswith("nccl" if len(set(DEVICES)) > 1 else "gloo")
        for _ in range(2):
            assert tokens(llm) == right


def test_a_killed_shard_ends_the_engine_and_frees_its_memory() -> None:
    with LLM("demo", devices=DEVICES, kv_memory="32MiB") as llm:
        pids = [shard["pid"] for shard in llm.stats()["shards"]["each"]]
        timer = threading.Timer(0.3, lambda: os.kill(pids[1], signal.SIGKILL))
        timer.start()
        long = SamplingParams(temperature=0.0, max_new_tokens=900, ignore_eos=True)
        outputs = llm.generate(TALES, long, progress=False)
        timer.join()
        assert {output.completions[0].finish_reason for output in outputs} == {"error"}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_swaps_pass_over_one_allocation_too() -> None:
    outcome = check_part("swaps", cuda_seams(0, failed=[POOL]))
    assert outcome.state == PASSED, outcome.reason


def test_a_first_check_passes_in_its_processes_and_the_second_is_the_kept_one(tmp_path: Path) -> None:
    first = self_check(0, cache=Cache(tmp_path))
    assert (first.state, first.cached) == (PASSED, False), first.to_dict()
    print(f"tried in {sum(one.seconds for one in first.outcomes):.2f} s, without the start of processes")
    second = self_check(0, cache=Cache(tmp_path))
    assert second.cached is True
    assert second.outcomes == first.outcomes
    assert json.loads(json.dumps(dict(first.identity))) == first.identity


def test_a_fault_on_the_device_costs_its_part_and_neither_the_others_nor_this_process() -> None:
    program = """
import json, sys, torch
from dataclasses import replace
from pagetide.common.child_process import parent_channel
from pagetide.engine.self_check import child
from pagetide.engine.self_check.identity import identity_of
from pagetide.engine.self_check.parts import cuda_seams
request = json.loads(sys.argv[1])
answers = parent_channel()
def faulty():
    torch.zeros(3, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()
seams = replace(cuda_seams(0), makers={"triton": faulty})
answers.send({"identity": identity_of(0)})
child.serve(request["parts"], lambda: seams, answers)
"""

    def command(parts: Sequence[str], failed: Collection[str]) -> list[str]:
        return ["-c", program, json.dumps({"parts": list(parts)})]

    triton, swaps = try_parts(["triton", "swaps"], command, identity_of(0))
    if triton.state == ABSENT:
        pytest.skip(f"triton: {triton.reason}")
    assert (triton.state, swaps.state) == (FAILED, PASSED), (triton.reason, swaps.reason)
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_an_engine_starts_with_it_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (False, True):
        with LLM("demo", device="cuda", kv_memory="64MiB", share=False) as llm:
            told = llm.stats()["self_check"]
            assert (told["state"], told["cached"]) == (PASSED, cached), told
            assert llm.generate("The sea was", SamplingParams(max_new_tokens=4))[0].token_ids
