"""The same engine on a CUDA device: `make gpu`."""

from __future__ import annotations

import gc

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
    for block_size, chunk, seats, share in [(4, 7, 12, 0.4), (16, None, 12, 0.5), (256, None, 3, 1.0)]:
        least = -(-(max(LENGTHS) + NEW - 1) // block_size)
        usable = max(least, int(share * blocks_needed(inputs, NEW, block_size)))
        engine = TinyEngine(
            model, usable=usable, block_size=block_size, max_seqs=seats, max_chunk_tokens=chunk, device="cuda"
        )
        assert engine.generate(inputs, Sampling(NEW)) == expected, (block_size, chunk, seats)
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


def test_what_the_card_has_not_is_refused_with_numbers():
    from pagetide import LLM
    from pagetide.engine.errors import NotEnoughMemory

    before = allocated_bytes()
    with pytest.raises(NotEnoughMemory, match="are free"):
        LLM("demo", device="cuda", kv_memory="4TiB")
    assert allocated_bytes() == before
