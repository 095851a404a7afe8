"""Decode steps from real CUDA graphs, begun before the last one's tokens are on the host: `make gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything has kernels: there they are interpreted
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install pagetide[cuda]")

from engines import TinyEngine, core_over, plain, prompts
from families import VOCAB, tiny

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.cuda_arena import CudaArena
from pagetide.cache.geometry import Geometry
from pagetide.cache.storage import Storage
from pagetide.engine.attention.interface import NAME
from pagetide.engine.attention.triton_kernel import TritonKernel
from pagetide.engine.execution.graphs import CudaRecorder
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.request import Sampling
from pagetide.scheduler.state import Limits

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2")  # of experts torch multiplies on the host's word, in float32
LENGTHS = [1, 2, 15, 16, 17, 64, 100, 300]
NEW = 20
MIB = 1 << 20


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_plain_transformers(name: str) -> None:
    model = tiny(name).to("cuda")
    inputs = prompts(LENGTHS, VOCAB)
    expected = plain(model, inputs, NEW)
    engine = TinyEngine(model, usable=60, block_size=16, max_seqs=12, max_chunk_tokens=70, device="cuda", overlaps=True)
    engine.core.runner.kernel = TritonKernel()
    engine.core.runner.record((1, 2, 4, 8, 16), CudaRecorder(torch.device("cuda")))
    assert engine.generate(inputs, Sampling(NEW)) == expected
    graphs = engine.core.runner.graphs
    assert graphs is not None and graphs.sizes == (1, 2, 4, 8, 16), "one gave other logits than without a graph"
    assert engine.generate(inputs, Sampling(NEW)) == expected


def test_drawn_tokens_are_those_of_the_host() -> None:
    """By `sample`, which waits, without graphs and overlap; the same batches, so the same sums."""
    model = tiny("llama").to("cuda")
    inputs = prompts(LENGTHS, VOCAB)
    each = [
        Sampling(NEW, temperature=0.5 + i / 8, top_k=3 * (i % 3), top_p=1 - 0.1 * (i % 2), min_p=0.02 * (i % 4), seed=i)
        for i in range(len(inputs))
    ]
    tokens = []
    for overlaps in (False, True):
        engine = TinyEngine(model, usable=400, device="cuda", overlaps=overlaps)
        tokens.append(engine.generate(inputs, each))
    assert tokens[0] == tokens[1]


class Elastic(TinyEngine):
    """Over extents of 2 MiB of a real arena, of which one has memory at the start."""

    def __init__(self, model: Any, max_seqs: int) -> None:
        geometry = Geometry.from_config(model.config, block_size=16, dtype="float32", granule_bytes=2 * MIB).with_extents(
            2 * MIB
        )
        tokens_per_extent = geometry.blocks_per_extent * 16
        self.max_model_len = 2 * tokens_per_extent // max_seqs + NEW  # some four extents for all
        num_extents = 10
        self.arena = CudaArena(num_extents, geometry.extent_bytes, 0)
        self.arena.map([0])
        storage = Storage(geometry, self.arena, "cuda")
        limits = Limits(max_seqs, 512, self.max_model_len, None, False)
        self.core = core_over(
            model, storage, limits, device="cuda", kernel=TritonKernel(), arena=self.arena, overlaps=True, cache={},
            pool=BlockAllocator(
                storage.num_blocks, blocks_per_extent=geometry.blocks_per_extent, mapped=self.arena.mapped_extents
            ),
        )  # fmt: skip


def test_captured_steps_survive_resizes() -> None:
    model = tiny("llama").to("cuda")
    engine = Elastic(model, max_seqs=8)
    rng = np.random.default_rng(0)
    inputs = prompts([engine.max_model_len - 2 * NEW + i for i in range(12)], VOCAB)
    expected = plain(model, inputs, NEW)
    model.set_attn_implementation(NAME)
    engine.core.runner.record((1, 2, 4, 8), CudaRecorder(torch.device("cuda")))
    scheduler = engine.core.scheduler
    engine.add_all(inputs, Sampling(NEW))
    ends: dict[str, Finished] = {}
    while engine.core.has_work:
        if rng.random() < 0.3 or scheduler.starving:
            while engine.core.is_ahead:
                ends |= {end.request_id: end for end in engine.core.step(ahead=False).finished}
            if rng.random() < 0.6 or scheduler.starving:
                scheduler.pool.grow(int(rng.integers(1, 4)))
            else:
                scheduler.pool.make_idle(1)
                scheduler.pool.give_back(int(rng.integers(1, 4)))
        ends |= {end.request_id: end for end in engine.core.step().finished}
    assert [ends[f"r{i}"].token_ids.tolist() for i in range(len(inputs))] == expected
    stats, graphs = scheduler.stats, engine.core.runner.graphs
    assert min(stats.grown_extents, stats.given_back_extents) > 2
    assert graphs is not None and graphs.sizes == (1, 2, 4, 8)
    engine.core.runner.close()
    engine.arena.close()
