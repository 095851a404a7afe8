"""The same engine on a CUDA device: `make gpu`."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import FAMILIES, VOCAB, tiny

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


def test_sampled_tokens_repeat_with_their_seed():
    model = tiny("llama").to("cuda")
    inputs = prompts(LENGTHS, VOCAB)
    settings = [Sampling(NEW, temperature=0.8, top_p=0.95, top_k=30, repetition_penalty=1.1, seed=i) for i in range(8)]
    runs = [TinyEngine(model, usable=400, device="cuda").generate(inputs, settings) for _ in range(2)]
    assert runs[0] == runs[1]


def test_llm_on_cuda_gives_its_memory_back():
    from pagetide import LLM, SamplingParams

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


def told_by(llm: Any) -> list[Any]:
    """All that comes of a few requests: at once, by a stream, up to a stop string, beside one that is left in the middle."""
    from pagetide import SamplingParams

    each = [SamplingParams(max_new_tokens=20 + 8 * i, temperature=0, stop=[" the", "."][: i % 2]) for i in range(5)]
    left = llm.stream("In the beginning", each[-1])
    next(left), next(left)
    told: list[Any] = [
        (c.text, c.token_ids, c.finish_reason) for o in llm.generate(PROMPTS, each) for c in o.completions
    ]
    left.close()
    for prompt, params in zip(PROMPTS, each, strict=True):
        stream = llm.stream(prompt, params)
        told.append(("".join(chunk.text for chunk in stream), [o.token_ids for o in stream.outputs()]))
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (0, 0, 0)
    return told


@pytest.mark.parametrize("attention", [None, "triton"])
def test_steps_begun_ahead_and_from_graphs_give_the_tokens_of_plain_ones(attention: str | None) -> None:
    from pagetide import LLM

    before = allocated_bytes()
    told = []
    for options in ({"cuda_graphs": False, "overlap": False}, {}):
        with LLM(
            "demo", device="cuda", dtype="float32", kv_memory="256MiB", share=False, attention=attention, **options
        ) as llm:  # fmt: skip
            stats, kernel = llm.stats(), llm._manager.engine.core.runner.kernel
            assert stats["overlap"] is not bool(options)
            assert bool(stats["cuda_graphs"]) == (kernel.captures and not options), kernel.name
            told.append(told_by(llm))
            assert llm.stats()["cuda_graphs"] == stats["cuda_graphs"], "one gave other logits than without a graph"
        del llm, kernel
    assert told[0] == told[1]
    assert {reason for *_, reason in told[0][: len(PROMPTS)]} == {"length", "stop"}
    assert allocated_bytes() - before < 1 << 20


def test_a_model_that_asks_the_device_is_served_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    from pagetide import LLM, SamplingParams

    model, inputs = tiny("llama").to("cuda"), prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    handle = model.model.layers[0].register_forward_hook(
        lambda module, given, out: out if bool((out == 7).any()) else None
    )
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
    from pagetide import LLM
    from pagetide.engine.errors import NotEnoughMemory

    before = allocated_bytes()
    with pytest.raises(NotEnoughMemory, match="are free"):
        LLM("demo", device="cuda", kv_memory="4TiB")
    assert allocated_bytes() == before
