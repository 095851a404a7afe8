"""Linear layers packed for oneDNN give what plain ones give, and what may not be packed is left alone."""

from __future__ import annotations

import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB, tiny
from torch import nn
from transformers import Gemma4TextConfig

from pagetide import native
from pagetide.engine.layers import onednn
from pagetide.engine.layers.linears import placeholder
from pagetide.engine.layers.onednn import (
    LEAST_WEIGHTS,
    SIZES,
    PackedLinear,
    available,
    by_head_primitive_bytes,
    divided,
    packs,
    primitive_bytes,
)
from pagetide.engine.layers.packing import held_twice_bytes, pack_linears
from pagetide.engine.loading.loaded import Loaded
from pagetide.engine.loading.model_config import linear_shapes
from pagetide.engine.process.cpu_threads import thread_counts
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no packed linear layers")


@pytest.fixture(autouse=True)
def without_native_kernels(monkeypatch):
    monkeypatch.setattr(native, "instructions", lambda: None)


HALVES = (torch.bfloat16, torch.float16)


def reorders(dtype):
    """Whether oneDNN packs a weight of this type on this CPU."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(96, 96, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


def test_what_is_packed_gives_the_same_products():
    """Of each type that oneDNN packs on this CPU: a half precision only where it has the instructions."""
    torch.manual_seed(0)
    assert [packs(LEAST_WEIGHTS, dtype) for dtype in HALVES] == [reorders(dtype) for dtype in HALVES]
    for dtype in filter(reorders, (torch.float32, *HALVES)):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for bias in (True, False):
            linear = nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)
            packed = PackedLinear(linear)
            for rows in (1, 3, 16, 257):
                x = torch.randn(1, rows, 96, dtype=dtype)
                torch.testing.assert_close(packed(x), linear(x), rtol=tolerance, atol=tolerance)


def test_without_instructions_for_half_precision_layers_stay_plain_and_cost_nothing(monkeypatch):
    """As on processors without AVX-512, where packing a bfloat16 weight raises."""
    monkeypatch.setattr(onednn, "_by_onednn", lambda dtype: False)
    ids = torch.arange(9)[None]
    for dtype in HALVES:
        model = tiny("llama", hidden_size=288, num_attention_heads=6, tie_word_embeddings=True).to(dtype)
        before = model(input_ids=ids).logits
        assert pack_linears(model, least_weights=0) == 0
        assert torch.equal(model(input_ids=ids).logits, before)
        assert held_twice_bytes(model.config, dtype) == primitive_bytes(linear_shapes(model.config), dtype) == 0
        assert by_head_primitive_bytes(dtype) == Loaded.of(model).added_bytes(torch.device("cpu"), dtype) == 0


@pytest.mark.parametrize("outputs", [24, 1 << 18])
def test_any_number_of_rows(outputs):
    """0 rows, numbers that are divided and padded, and more than the largest size, which is smaller for a wide layer."""
    torch.manual_seed(0)
    linear = nn.Linear(8, outputs).requires_grad_(False)
    packed = PackedLinear(linear)
    for rows in (0, 1, 2, 5, 33, 65, 70) if outputs > 24 else (0, *range(1, 140, 3), 300, 511, 513, 1500):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)


def test_rows_are_divided_into_few_products_of_known_sizes():
    for count in (*range(1, 530), 1023, 1024, 1025, 2_099):
        sizes = divided(count)
        assert set(sizes) <= set(SIZES) and list(sizes) == sorted(sizes, reverse=True)
        assert count <= sum(sizes) < count + max(4, count // 2)
        assert len(sizes) <= 4 + count // SIZES[-1]
        assert count not in SIZES or sizes == (count,)


def test_only_large_plain_linears_are_packed():
    class Own(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    model = nn.ModuleDict(
        {
            "large": nn.Linear(256, 256),
            "small": nn.Linear(255, 256),
            "own": Own(256, 256),
            "in_half": nn.Linear(256, 256, dtype=torch.float16),
        }
    ).requires_grad_(False)
    halves = torch.ops.mkldnn._is_mkldnn_fp16_supported()  # or else they are no products of oneDNN's
    assert pack_linears(model) == 1 + halves
    names = ["PackedLinear", "Linear", "Own", "PackedLinear" if halves else "Linear"]
    assert [type(module).__name__ for module in model.values()] == names
    assert (model["large"].weight.shape, model["large"].weight.device.type) == ((256, 256), "meta")
    assert LEAST_WEIGHTS == 256 * 256


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "opt"])
def test_a_packed_model_gives_the_same_tokens(name):
    model = tiny(name)
    inputs = prompts([1, 17, 64], VOCAB)
    expected = plain(model, inputs, 16)
    assert pack_linears(model, least_weights=0) > 0
    assert TinyEngine(model, usable=60).generate(inputs, Sampling(16)) == expected


@pytest.mark.parametrize("read", [lambda w: w, lambda w: w.type(torch.float32), lambda w: w.float().detach()])
def test_a_packed_weight_that_is_read_raises_and_gives_no_garbage(read):
    weight = placeholder((5, 48), torch.float32)
    assert isinstance(weight, nn.Parameter) and weight.is_meta and weight.shape == (5, 48) and not weight.requires_grad
    x = torch.randn(3, 48)
    products = [lambda w: nn.functional.linear(x, w), lambda w: x @ w.T, lambda w: torch.mm(input=x, mat2=w.T)]
    products += [lambda w: torch.cat((x, w)), lambda w: torch.einsum("tk,nk->tn", [x, w])]
    for product in products:
        with pytest.raises(RuntimeError, match="has no memory"):
            product(read(weight))


def test_a_tied_head_is_counted_twice():
    tied = tiny("llama", vocab_size=2048, hidden_size=48, tie_word_embeddings=True)
    assert held_twice_bytes(tied.config, torch.float32) == 2048 * 48 * 4
    halves = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert held_twice_bytes(tied.config, torch.float16) == (2048 * 48 * 2 if halves else 0)
    assert held_twice_bytes(tiny("llama").config, torch.float32) == 0
    pack_linears(tied)
    held = sum(p.nbytes for p in tied.parameters() if p.device.type != "meta")
    assert tied.model.embed_tokens.weight.device.type == "cpu"
    assert held == sum(p.nbytes for p in tied.model.parameters())


def test_the_plan_counts_primitives_of_packed_layers_alone():
    threads = len(thread_counts(torch.get_num_threads()))
    assert primitive_bytes(linear_shapes(tiny("llama").config), torch.float32) == 0
    wide = tiny("llama", hidden_size=288, vocab_size=2048, intermediate_size=300, tie_word_embeddings=False)
    shapes = {(m.in_features, m.out_features) for m in wide.modules() if isinstance(m, nn.Linear)}
    packed = sum(a * b >= LEAST_WEIGHTS for a, b in shapes) + 1  # queries' and the output's may differ in their bias
    assert primitive_bytes(linear_shapes(wide.config), torch.float32) == packed * len(SIZES) * threads * 640 * 1024 > 0
    unlike = Gemma4TextConfig(  # its sliding layer's heads are too small to be packed, the other one's are not
        vocab_size=16, hidden_size=256, intermediate_size=16, num_hidden_layers=2, num_attention_heads=8, head_dim=8,
        num_key_value_heads=8, global_head_dim=64, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert 256 * 64 < LEAST_WEIGHTS <= 256 * 512
    assert primitive_bytes(linear_shapes(unlike), torch.float32) == 2 * len(SIZES) * threads * 640 * 1024
