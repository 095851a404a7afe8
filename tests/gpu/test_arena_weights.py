"""Weights that sleep on a real device: the same bytes, tokens and addresses after each sleep, and the memory that is free."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from stored_checkpoints import AWQ

from benchmarks import stored_weights as made
from pagetide import AsyncLLM, SamplingParams
from pagetide.engine.loading.arena_weights import ArenaWeights
from pagetide.engine.loading.mapped_weights import weights_of

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings: pip install 'pagetide[cuda]'", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
NOISE = 64 * MIB  # page tables, and whatever else the driver keeps
SQUARE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
LARGE: dict[str, Any] = {  # some 1.2 GB in float32
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
PROMPTS = [list(range(5, 40)), [7, 8, 9]]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def content(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one.detach().cpu() for one in weights_of(model)]


def places(model: torch.nn.Module) -> list[int]:
    return [one.data_ptr() for one in weights_of(model)]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(1, 20, device=DEVICE)[None], use_cache=False).logits.clone()


@torch.no_grad()
def mlps(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """What a CUDA graph can hold: transformers' masks cannot be captured."""
    for layer in model.model.layers:
        rows = rows + layer.mlp(rows)
    return rows


def test_bytes_addresses_and_a_captured_graph_survive_sleeps() -> None:
    model = tiny("llama", **LARGE).to(DEVICE)
    expected, right, before = content(model), logits(model), free_bytes()
    weights = ArenaWeights.of(model, DEVICE)
    assert abs(before - free_bytes()) < NOISE + 128 * MIB, "they are held once"
    assert all(torch.equal(a, b) for a, b in zip(content(model), expected, strict=True)) and torch.equal(logits(model), right)
    at, rows, stream = places(model), torch.rand(4, LARGE["hidden_size"], device=DEVICE), torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(stream):
        products = mlps(model, rows)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = mlps(model, rows)
    levels = [1, 1]
    try:
        weights.drop(2)
        weights.fill()
        levels = [2, 1, 2]
    except OSError as error:
        print(f"level 2 is left out: {error}")
    for level in levels:
        awake = free_bytes()
        weights.drop(level)  # type: ignore[arg-type]
        weights.drop(level)  # type: ignore[arg-type]
        asleep = free_bytes()
        assert weights.uncounted_bytes == 0 and asleep - awake > weights.num_bytes - NOISE
        weights.fill()
        assert torch.equal(logits(model), right), "each layer waits for its own copy"
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        assert torch.allclose(captured, products, rtol=1e-3, atol=1e-3 * float(products.abs().max())) and places(model) == at
        assert all(torch.equal(a, b) for a, b in zip(content(model), expected, strict=True))
    del graph, captured, model, weights


@pytest.mark.parametrize("form", ["float32", "awq"])
def test_an_engine_sleeps_and_wakes_up_with_the_same_tokens(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "model"
    if form == "awq":
        made.checkpoint(tiny("llama", **SQUARE), folder, AWQ | {"group_size": 32}, made.awq(32))
    else:
        tiny("llama", **LARGE).save_pretrained(folder)
    dtype = "float32" if form == "float32" else "bfloat16"
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "kv_memory": "64MiB", "max_seqs": 4, "share": False}
    before = free_bytes()

    async def run() -> None:
        async with AsyncLLM(str(folder), **options) as llm:
            expected = [one.token_ids for one in await llm.generate(PROMPTS, GREEDY)]
            kept, graphs = llm._engine_thread.open().kept, (await llm.stats())["cuda_graphs"]
            assert kept is not None and kept.uncounted_bytes == kept.asleep_bytes >= llm.facts.weights_bytes
            del kept  # it would hold what is let go where a file cannot be made
            for level in (1, 2, 1):
                await llm.sleep(level)  # type: ignore[arg-type]
                assert before - free_bytes() < NOISE + 512 * MIB, "a context, and cuBLAS's workspaces"
                await llm.wake_up()
                assert [one.token_ids for one in await llm.generate(PROMPTS, GREEDY)] == expected
                assert (await llm.stats())["cuda_graphs"] == graphs

    asyncio.run(run())
