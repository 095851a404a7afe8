"""Models with quantized weights are as good as promised, and hold what the plan says."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from families import FAMILIES, perplexity, tiny
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.quantization import FOLDER, passages, with_outliers
from pagetide import LLM, ConfigError, SamplingParams, native
from pagetide.engine.config import EngineConfig
from pagetide.engine.layers import quantized_linears
from pagetide.engine.layers.linears import NativeLinear
from pagetide.engine.layers.quantization import Method, quantize, quantized_rows
from pagetide.engine.layers.quantized_linears import check_native, quantize_linear, quantize_linears
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.loading.quantized_model import quantize_model, quantized_bytes

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TOKENS = torch.randint(2, 150, (2, 64), generator=torch.Generator().manual_seed(0))
ENGINE = {"device": "cpu", "kv_memory": "4MiB", "share": False}


@pytest.fixture(autouse=True)
def _all_layers(monkeypatch):
    """Tiny models have tiny layers."""
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1)


def demo():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "bounds"),
    [(demo, {"int8": 0.2, "int4": 1.5}), (lambda: with_outliers(1), {"int8": 1.0, "int4": 1.5})],
    ids=["demo", "with outliers"],
)
def test_perplexity_stays_within_its_bounds(make, bounds):
    model, texts = make(), passages()
    plain = perplexity(model, texts)
    for form, percent in bounds.items():
        quantized = copy.deepcopy(model)
        quantize_linears(quantized, form, TOKENS)
        assert perplexity(quantized, texts) <= plain * (1 + percent / 100), form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "rows_in_int8"), [("int8", True), ("int8", False), ("int4", True), ("int4", False)])
def test_a_layer_computes_what_its_integers_say(form, rows_in_int8, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(150, 70, dtype=dtype).requires_grad_(False)
    scales = torch.rand(150) + 0.5
    method = Method(form, scales, rows_in_int8, math.nan)
    made = quantize(linear.weight, method)
    weight = made.dequantized().double() / scales
    x = torch.randn(3, 5, 150, dtype=dtype)
    inputs = x.float() * scales
    expected = F.linear((quantized_rows(inputs, made.group) if rows_in_int8 else inputs).double(), weight, linear.bias.double())
    bias = linear.bias.clone()
    layer = quantize_linear(linear, method, dtype)
    assert layer.weight.shape == (70, 150) and layer.weight.is_meta and linear.weight.is_meta
    assert torch.equal(layer.bias, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.1), ("int4", 0.6)])
def test_every_family_keeps_most_of_its_logits(form, most):
    for family in FAMILIES:
        model = tiny(family)
        with torch.inference_mode():
            right = model(TOKENS).logits
            assert quantize_linears(model, form, TOKENS)
            error = float((model(TOKENS).logits - right).norm() / right.norm())
        assert 0 < error < most, family


def test_layers_with_the_same_input_have_the_same_factors():
    model = tiny("llama", hidden_size=96)
    gains = model.model.layers[0].input_layernorm.weight
    gains[5] *= 64
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(model.model.layers[0].self_attn, name).weight[:, 5] /= 64
    made = quantize_linears(model, "int8", TOKENS)
    q, k, v, o = (made[f"model.layers.0.self_attn.{name}_proj"].in_scales for name in "qkvo")
    assert q is not None and q is k and k is v and o is not q


def test_layers_that_do_not_fit_together_are_not_joined():
    for other in (Method("int8", None, False, 0.0), Method("int4", None, True, 0.0), Method("int8", torch.ones(40), True, 0.0)):
        first = quantize_linear(nn.Linear(40, 64), Method("int8", None, True, 0.0), torch.float32)
        second = quantize_linear(nn.Linear(40, 32), other, torch.float32)
        assert NativeLinear.joined([first, second]) is None, other


def test_small_layers_and_subclasses_stay(monkeypatch):
    class Own(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 48 * 16)
    model = tiny("llama")
    model.never_run = nn.Linear(48, 48)  # as an expert that no token is routed to
    mlp = model.model.layers[0].mlp
    own = mlp.up_proj = Own(48, 64, bias=False)
    made = quantize_linears(model, "int4", TOKENS)
    assert type(model.never_run) is NativeLinear and made["never_run"].type == "int4"
    assert mlp.up_proj is own and "model.layers.0.mlp.up_proj" not in made
    assert {one.n * one.k >= 48 * 16 for one in made.values()} == {True}
    assert made["lm_head"].type == "int8" and made["model.layers.1.mlp.up_proj"].type == "int4"


def test_an_engine_serves_and_says_so():
    with LLM("demo", quantization="int8", **ENGINE) as llm:
        stats = llm.stats()
        text = llm.generate("The king said", SamplingParams(max_new_tokens=8, temperature=0))[0].text
    assert stats["quantization"] == "int8" and len(text) > 8
    with LLM("demo", **ENGINE) as llm:
        assert llm.stats()["quantization"] is None and llm.stats()["weights_bytes"] > 2 * stats["weights_bytes"]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_plan_counts_what_is_held(form):
    """Plain weights of the demo model are float16, and served as float32: only embedding and norms are converted."""
    spec = resolve_model("demo")
    checkpoint = Checkpoint.open(spec)
    model = AutoModelForCausalLM.from_pretrained(FOLDER).eval().requires_grad_(False)
    quantize_model(model, checkpoint, form, torch.float32)
    held = {id(p): p.nbytes for p in model.parameters() if not p.is_meta}
    packed = [module.packed for module in model.modules() if isinstance(module, NativeLinear)]
    bytes_held = sum(held.values()) + sum(one.num_bytes for one in packed)
    assert {p.dtype for p in model.parameters() if not p.is_meta} == {torch.float32}
    planned = quantized_bytes(checkpoint, form, torch.float32)
    assert bytes_held <= planned <= 1.02 * bytes_held


def test_a_loaded_model_stays_as_it_is():
    model = tiny("llama", hidden_size=96)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with LLM(model, quantization="int8", **ENGINE) as llm:
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(type(module) is not NativeLinear for module in model.modules())


def test_what_cannot_be_quantized_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"quantization must be int8, int4 or None, got 'fp8'"):
        EngineConfig.resolve("demo", quantization="fp8")
    with pytest.raises(ConfigError, match=r"runs on a CPU only.*cuda:0"):
        check_native("int8", torch.device("cuda", 0))
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(model, quantization="int8", **ENGINE)
    monkeypatch.setattr(quantized_linears, "LEAST_QUANTIZED", 1 << 40)
    with pytest.raises(ConfigError, match="no linear layers"):
        quantize_linears(tiny("llama"), "int8", TOKENS)
    monkeypatch.setattr(quantized_linears, "instructions", lambda: None)
    with pytest.raises(ConfigError, match="install g"):
        LLM("demo", quantization="int8", **ENGINE)
