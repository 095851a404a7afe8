"""Packed linear layers give what plain ones give, and what may not be packed is left alone."""

from __future__ import annotations

import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB, tiny
from torch import nn

from pagetide.engine.linears import LEAST_WEIGHTS, PackedLinear, available, held_twice_bytes, pack_linears
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no packed linear layers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 257])
def test_same_products(dtype, bias, rows):
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(1, rows, 96, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=tolerance, atol=tolerance)


def test_only_large_plain_linears_are_packed():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "large": nn.Linear(256, 256),
            "small": nn.Linear(255, 256),
            "own": Own(256, 256),
            "in_half": nn.Linear(256, 256, dtype=torch.float16),
        }
    ).requires_grad_(False)
    assert pack_linears(model) == 1
    assert [type(module).__name__ for module in model.values()] == ["PackedLinear", "Linear", "Own", "Linear"]
    assert (model["large"].weight.shape, model["large"].weight.device.type) == ((256, 256), "meta")
    assert LEAST_WEIGHTS == 256 * 256


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "gpt_oss", "opt", "gpt_neox"])
def test_a_packed_model_gives_the_same_tokens(name):
    model = tiny(name)
    inputs = prompts([1, 17, 64], VOCAB)
    expected = plain(model, inputs, 16)
    assert pack_linears(model, least_weights=0) > 0
    assert TinyEngine(model, usable=60).generate(inputs, Sampling(16)) == expected


def test_a_tied_head_is_counted_twice():
    tied = tiny("llama", vocab_size=2048, hidden_size=48, tie_word_embeddings=True)
    assert held_twice_bytes(tied.config, torch.float32) == 2048 * 48 * 4
    assert held_twice_bytes(tied.config, torch.float16) == 0
    assert held_twice_bytes(tiny("llama").config, torch.float32) == 0
    pack_linears(tied)
    held = sum(p.nbytes for p in tied.parameters() if p.device.type != "meta")
    assert tied.model.embed_tokens.weight.device.type == "cpu"
    assert held == sum(p.nbytes for p in tied.model.parameters())
