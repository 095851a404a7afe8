"""Models with quantized weights are as good as promised, and hold what the plan says."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from families import FAMILIES, tiny
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.quantization import FOLDER, passages, with_outliers
from pagetide import LLM, ConfigError, SamplingParams, native
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading import quantized_linears
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.loading.quantization import Method, quantize, quantized_rows
from pagetide.engine.loading.quantized_linears import (
    PackedWeight,
    QuantizedLinear,
    check_native,
    quantize_linear,
    quantize_linears,
)
from pagetide.engine.loading.quantized_model import quantize_model, quantized_bytes

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TOKENS = torch.randint(2, 150, (2, 64), generator=torch.Generator().manual_seed(0))
ENGINE = {"device": "cpu", "kv_memory": "4MiB", "share": False}


@pytest.fixture(autouse=True)
def _all_layers(monkeypatch):
    """Tiny models have tiny layers."""
    monkeypatch.setattr(quantized_linears, "LEAST_WEIGHTS", 1)


def perplexity(model, texts):
    losses, count = 0.0, 0
    with torch.inference_mode():
        for ids in map(torch.tensor, texts):
            losses += F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return math.exp(losses / count)


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


def test_outliers_would_spoil_plain_rounding(monkeypatch):
    """The bound above holds because of the factors of input channels, and of leaving inputs alone where they fail."""
    model, texts = with_outliers(1), passages()
    plain = perplexity(model, texts)
    monkeypatch.setattr(quantized_linears, "choose", lambda weights, x, form: Method(form, None, True, math.nan))
    quantize_linears(model, "int8", TOKENS)
    assert perplexity(model, texts) > plain * 1.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_in_int8", [True, False])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_layer_computes_what_its_integers_say(form, rows_in_int8, dtype):
    if form == "int4" and rows_in_int8:
        pytest.skip("no such product")
    torch.manual_seed(0)
    linear = nn.Linear(150, 70, dtype=dtype).requires_grad_(False)
    scales = torch.rand(150) + 0.5
    method = Method(form, scales, rows_in_int8, math.nan)
    made = quantize(linear.weight, method)
    weight = made.dequantized().double() / scales
    x = torch.randn(3, 5, 150, dtype=dtype)
    inputs = x.float() * scales
    expected = F.linear((quantized_rows(inputs) if rows_in_int8 else inputs).double(), weight, linear.bias.double())
    bias = linear.bias.clone()
    layer = quantize_linear(linear, method, dtype)
    assert layer.weight.shape == (70, 150) and layer.weight.is_meta and linear.weight.is_meta
    assert torch.equal(layer.bias, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_most_of_its_logits(family, form):
    model = tiny(family)
    with torch.inference_mode():
        right = model(TOKENS).logits
        made = quantize_linears(model, form, TOKENS)
        got = model(TOKENS).logits
    assert made
    error = float((got - right).norm() / right.norm())
    assert 0 < error < (0.1 if form == "int8" else 0.6), error


def test_layers_with_the_same_input_have_the_same_factors():
    model = tiny("llama", hidden_size=96)
    gains = model.model.layers[0].input_layernorm.weight
    gains[5] *= 64
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(model.model.layers[0].self_attn, name).weight[:, 5] /= 64
    made = quantize_linears(model, "int8", TOKENS)
    q, k, v, o = (made[f"model.layers.0.self_attn.{name}_proj"].in_scales for name in "qkvo")
    assert q is not None and q is k and k is v and o is not q


def test_joined_layers_give_the_same_bits_as_each():
    torch.manual_seed(0)
    method = Method("int8", torch.rand(40) + 0.5, True, math.nan)
    layers = [quantize_linear(nn.Linear(40, n), method, torch.float32) for n in (64, 32, 7)]
    joined, x = QuantizedLinear.joined(layers), torch.randn(9, 40)
    assert joined is not None and joined.out_features == 103
    assert torch.equal(joined(x), torch.cat([layer(x) for layer in layers], dim=1))


@pytest.mark.parametrize(
    ("other", "sizes"),
    [
        (Method("int8", None, False, 0.0), (64, 32)),
        (Method("int4", None, True, 0.0), (64, 32)),
        (Method("int8", torch.ones(40), True, 0.0), (64, 32)),
        (Method("int8", None, True, 0.0), (60, 32)),
    ],
    ids=["inputs in int8", "bits", "factors", "an incomplete panel in the middle"],
)
def test_layers_that_do_not_fit_together_are_not_joined(other, sizes):
    first = quantize_linear(nn.Linear(40, sizes[0]), Method("int8", None, True, 0.0), torch.float32)
    assert QuantizedLinear.joined([first, quantize_linear(nn.Linear(40, sizes[1]), other, torch.float32)]) is None


def test_small_layers_and_subclasses_stay(monkeypatch):
    class Own(nn.Linear):
        pass

    monkeypatch.setattr(quantized_linears, "LEAST_WEIGHTS", 48 * 16)
    model = tiny("llama")
    model.never_run = nn.Linear(48, 48)  # as an expert that no token is routed to
    mlp = model.model.layers[0].mlp
    own = mlp.up_proj = Own(48, 64, bias=False)
    made = quantize_linears(model, "int4", TOKENS)
    assert type(model.never_run) is QuantizedLinear and made["never_run"].quantization == "int4"
    assert mlp.up_proj is own and "model.layers.0.mlp.up_proj" not in made
    assert {one.n * one.k >= 48 * 16 for one in made.values()} == {True}
    assert made["lm_head"].quantization == "int8" and made["model.layers.1.mlp.up_proj"].quantization == "int4"


def test_a_model_without_linear_layers_is_refused(monkeypatch):
    monkeypatch.setattr(quantized_linears, "LEAST_WEIGHTS", 1 << 40)
    with pytest.raises(ConfigError, match="no linear layers"):
        quantize_linears(tiny("llama"), "int8", TOKENS)


def test_the_same_weights_give_the_same_integers():
    first, second = (quantize_linears(tiny("llama"), "int8", TOKENS) for _ in range(2))
    assert all(torch.equal(first[name].packed, second[name].packed) for name in first)


# --- engines


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_engine_serves_and_says_so(form):
    with LLM("demo", quantization=form, **ENGINE) as llm:
        stats = llm.stats()
        text = llm.generate("The king said", SamplingParams(max_new_tokens=8, temperature=0))[0].text
    assert stats["quantization"] == form and len(text) > 8
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
    packed = [module.packed for module in model.modules() if isinstance(module, QuantizedLinear)]
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
    assert all(type(module) is not QuantizedLinear for module in model.modules())


def test_a_wrong_form_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"quantization must be int8, int4 or None, got 'fp8'"):
        EngineConfig.resolve("demo", quantization="fp8")


def test_other_devices_are_refused():
    with pytest.raises(ConfigError, match=r"runs on a CPU only.*cuda:0"):
        check_native("int8", torch.device("cuda", 0))


def test_without_the_library_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(quantized_linears, "instructions", lambda: None)
    with pytest.raises(ConfigError, match="install g"):
        LLM("demo", quantization="int8", **ENGINE)


def test_a_checkpoint_that_is_quantized_already_is_refused():
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(model, quantization="int8", **ENGINE)


def test_a_packed_weight_has_the_bytes_it_says():
    one = PackedWeight.of(quantize(torch.randn(64, 128), Method("int8", torch.ones(128), True, 0.0)), True)
    assert one.num_bytes == one.packed.nbytes + 64 * 4 + 128 * 4
