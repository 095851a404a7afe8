"""Fused models of further families, and a fused layer that computes something else."""

from __future__ import annotations

import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide import native
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.packing import pack_linears
from pagetide.scheduler.request import Sampling

KERNELS = kernels_on(torch.device("cpu"))
TOKENS = torch.tensor([31, 7, 99, 4, 63])
pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"llama", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3"}))
def test_tokens_equal_those_of_transformers(name):
    model, inputs = tiny(name), prompts([1, 7, 16, 33, 100], VOCAB)
    expected = plain(model, inputs, 16)
    pack_linears(model)
    fuse(model, TOKENS, KERNELS)
    engine = TinyEngine(model, usable=60, block_size=4, max_seqs=4, max_chunk_tokens=7)
    assert engine.generate(inputs, Sampling(16)) == expected


def test_a_model_that_computes_something_else_is_undone(monkeypatch, caplog):
    model = tiny("llama")
    ids = torch.arange(9)[None]
    before = model(input_ids=ids).logits
    pack_linears(model)
    monkeypatch.setattr(
        "pagetide.engine.layers.fusion.fused_attention_forward",
        lambda module, calls, kernels: (lambda **more: (torch.zeros_like(more["hidden_states"]), None)) if calls else None,
    )
    assert fuse(model, TOKENS, KERNELS).counts == {"products": 0, "norms": 0, "mlps": 0, "rotations": 0}
    assert "logits differ" in caplog.text
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
