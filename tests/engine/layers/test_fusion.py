"""What is replaced in models, and what only looks like it and is left alone."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from engines import TinyEngine, plain, prompts
from families import FAMILIES, VOCAB, tiny
from state_families import tiny_with_states
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from pagetide import native
from pagetide.engine.attention.latent import keep_projections
from pagetide.engine.layers.fusion import Fused, fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.linears import NativeLinear, is_plain
from pagetide.engine.layers.merged_linears import MergedLinears
from pagetide.engine.layers.norms import fused_norm
from pagetide.engine.layers.packing import pack_linears
from pagetide.engine.layers.quantization import Method
from pagetide.engine.layers.quantized_linears import quantize_linear
from pagetide.engine.layers.rotary import RotaryCall, fused_attention_forward
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

KERNELS = kernels_on(torch.device("cpu"))
TOKENS = torch.tensor([31, 7, 49, 4, 23])
FALCON = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 160}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# By layer: q, k, v and gate, up are products.
EXPECTED = {
    "llama": {"products": 6, "norms": 7, "mlps": 3, "rotations": 3},
    "qwen2": {"products": 6, "norms": 7, "mlps": 3, "rotations": 3},
    "qwen3": {"products": 6, "norms": 13, "mlps": 3, "rotations": 3},
    "mistral": {"products": 6, "norms": 7, "mlps": 3, "rotations": 3},
    "gemma2": {"products": 8, "norms": 17, "mlps": 4, "rotations": 4},
    "gemma3_text": {"products": 8, "norms": 25, "mlps": 4, "rotations": 4},
    "phi3": {"products": 0, "norms": 7, "mlps": 3, "rotations": 3},
    "gpt2": {"products": 0, "norms": 0, "mlps": 0, "rotations": 0},
    "opt": {"products": 3, "norms": 0, "mlps": 0, "rotations": 0},
    "gpt_neox": {"products": 0, "norms": 0, "mlps": 0, "rotations": 3},
    "mixtral": {"products": 3, "norms": 7, "mlps": 0, "rotations": 3},
    "gpt_oss": {"products": 4, "norms": 9, "mlps": 0, "rotations": 4},
    "deepseek_v2": {"products": 6, "norms": 10, "mlps": 3, "rotations": 0},  # q and the latent are one product
    "deepseek_v3": {"products": 3, "norms": 13, "mlps": 3, "rotations": 0},
}


def fused_model(model):
    keep_projections(model)
    pack_linears(model)
    return fuse(model, TOKENS, KERNELS)


def test_what_is_replaced():
    assert set(EXPECTED) == set(FAMILIES)
    for name, dtype in [*((name, torch.float32) for name in FAMILIES), ("llama", TYPES[1]), ("gemma3_text", TYPES[2])]:
        model = tiny(name).to(dtype)
        names = [name for name, _ in model.named_modules()]
        assert fused_model(model).counts == EXPECTED[name], (name, dtype)
        assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_tokens_equal_those_of_transformers(name):
    model, inputs = tiny(name), prompts([1, 7, 16, 33, 100], VOCAB)
    expected = plain(model, inputs, 16)
    fused_model(model)
    engine = TinyEngine(model, usable=60, block_size=4, max_seqs=4, max_chunk_tokens=7)
    assert engine.generate(inputs, Sampling(16)) == expected
    sampling = Sampling(16, temperature=1.0, seed=3)
    first, again = (engine.generate(some, sampling) for some in (inputs, inputs[2:3]))
    assert first[2:3] == again, "the same seed, whatever else runs"


def test_slices_of_lists_of_layers():
    model = tiny("llama")
    fused_model(model)
    layers = model.model.layers
    assert layers[:3] is layers[:] is layers[0:9] is layers
    for part in (slice(2), slice(1, None), slice(None, None, -1)):
        assert list(layers[part]) == list(layers)[part]
    assert layers[-1] is list(layers)[2]


def test_nothing_without_native_kernels(monkeypatch):
    model = tiny("llama")
    pack_linears(model)
    monkeypatch.setattr(native, "instructions", lambda: None)
    assert fuse(model, TOKENS, kernels_on(torch.device("cpu"))) == Fused()
    assert all("forward" not in vars(module) for module in model.modules())


class Shifted(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) + 1e-3


class OtherEps(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)


def filled(norm, dtype):
    norm = norm.to(dtype).requires_grad_(False)
    norm.weight.add_(0.3 * torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    return norm


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms(dtype):
    x = torch.randn(3, 48).to(dtype)
    for kind, eps in itertools.product((LlamaRMSNorm, Gemma2RMSNorm), (1e-8, 1e-6, 1e-3)):
        norm = filled(kind(48, eps=eps), dtype)
        found = fused_norm(norm, x, KERNELS)
        assert found is not None, (kind, eps)
        torch.testing.assert_close(found(x), norm(x), rtol=max(1e-6, 2 * torch.finfo(dtype).eps), atol=0)
    for norm in (Shifted(48, eps=1e-5), OtherEps(48, eps=1e-5), nn.LayerNorm(48, bias=False)):
        assert fused_norm(filled(norm, dtype), x, KERNELS) is None, "it only looks like a norm"
    norm = filled(LlamaRMSNorm(48), dtype)
    for other in (torch.randn(3, 48).double(), torch.randn(3, 96).to(dtype)):
        assert fused_norm(norm, other, KERNELS) is None


class GateFirst(Qwen3_5RMSNormGated):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states * F.silu(gate), torch.full_like(gate, 9.0))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_with_a_gate_behind_them(dtype):
    """A gate is a row of each token and head, as in layers with the gated delta rule."""
    x, gate = torch.randn(2, 3, 37).to(dtype), torch.randn(3, 2, 37).to(dtype).transpose(0, 1)
    norm = filled(Qwen3_5RMSNormGated(37, eps=1e-5), dtype)
    found = fused_norm(norm, x, KERNELS, gate)
    assert found is not None
    torch.testing.assert_close(found(x, gate), norm(x, gate), rtol=max(2e-6, 2 * torch.finfo(dtype).eps), atol=1e-7)
    assert fused_norm(filled(GateFirst(37, eps=1e-5), dtype), x, KERNELS, gate) is None
    assert fused_norm(norm, x, KERNELS, gate[:1]) is None
    assert fused_norm(norm, x, KERNELS._replace(gated_norm=None), gate) is None
    model = tiny_with_states("qwen3_5_text")
    pack_linears(model)
    counts = fuse(model, TOKENS, KERNELS).counts
    assert counts["norms"] == 2 * 4 + 1 + 2 + 3  # of layers, the last, of queries and keys, and of gates


class Gated(nn.Module):
    def __init__(self, act=F.silu, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(48, 96, bias=bias), nn.Linear(48, 96, bias=bias)
        self.down, self.act = nn.Linear(96, 48, bias=bias), act

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class UpFirst(Gated):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class ClampedGate(Gated):
    def forward(self, x):
        return self.down(self.act(self.gate(x).clamp(max=7)) * self.up(x))


class Halves(nn.Module):
    """One layer for both, the gate last."""

    def __init__(self, act=F.silu, bias=False):
        super().__init__()
        self.both, self.down, self.act = nn.Linear(48, 192, bias=bias), nn.Linear(96, 48, bias=bias), act

    def forward(self, x):
        up, gate = self.both(x).chunk(2, -1)
        return self.down(up * self.act(gate))


class Flat(nn.Module):
    """Reads its layers' outputs as rows without gaps."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 24), nn.Linear(48, 24)

    def forward(self, x):
        return x + torch.cat([self.a(x).view(-1), self.b(x).view(-1)]).view(x.shape)


class Model(nn.Module):
    """As much of a language model as `fuse` needs."""

    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner, self.head = nn.Embedding(50, 48), inner, nn.Linear(48, 50)
        self.requires_grad_(False)
        self.config = tiny("llama").config
        self.config.vocab_size = 50

    def forward(self, input_ids, use_cache):
        x = self.embedding(input_ids)
        return SimpleNamespace(logits=self.head(x + self.inner(x)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_mlps(dtype):
    """Of three forms, and what only looks like one: a clamped gate, other activations."""
    x = torch.randn(2, 3, 48).to(dtype)
    tanh = functools.partial(F.gelu, approximate="tanh")
    for kind, act, bias in ((Gated, F.silu, False), (Gated, tanh, True), (UpFirst, F.gelu, False), (Halves, F.silu, True)):
        model = Model(kind(act, bias)).to(dtype)
        expected = model.inner(x)
        assert fused_model(model).mlps == [model.inner], kind
        torch.testing.assert_close(model.inner(x), expected, rtol=0.05, atol=1e-6 if dtype == torch.float32 else 2e-2)
    for inner in (ClampedGate(), Gated(F.relu), Gated(F.mish)):
        model = Model(inner).to(dtype)
        pack_linears(model)
        expected = model.inner(x)
        assert fuse(model, TOKENS, KERNELS).counts == {"products": 1, "norms": 0, "mlps": 0, "rotations": 0}
        assert torch.equal(model.inner(x), expected)


class Changing(nn.Module):
    """Changes its input in place between two layers that read it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        x = x * 1.0
        first = self.a(x)
        x.mul_(1.05)
        return first + self.b(x)


@pytest.mark.parametrize(("inner", "said"), [(Flat(), "view size is not compatible"), (Changing(), "")])
def test_layers_that_may_not_be_merged_compute_as_before(inner, said, caplog):
    model = Model(inner)
    pack_linears(model)
    x = torch.randn(1, 5, 48)
    expected = model.inner(x)
    assert fuse(model, TOKENS, KERNELS).counts == Fused().counts
    assert said in caplog.text
    assert torch.equal(model.inner(x), expected)


def test_a_product_that_is_undone_is_computed_layer_by_layer():
    torch.manual_seed(0)
    layers = [NativeLinear.of(nn.Linear(48, n).requires_grad_(False)) for n in (32, 70)]
    x = torch.randn(5, 48)
    expected = [one(x) for one in layers]
    merged = MergedLinears.of(layers)
    assert merged is not None
    merged.undo()
    assert torch.equal(layers[0](x), expected[0])
    x.mul_(2)  # the same tensor object
    assert torch.allclose(layers[1](x), 2 * expected[1] - layers[1].bias, atol=1e-5)


def test_layers_with_one_parameter_hold_it_once_and_are_not_merged():
    model = Model(Changing())
    model.inner.b.weight = model.inner.a.weight
    x = torch.randn(5, 48)
    expected = model.inner(x)
    pack_linears(model)
    assert model.inner.a.packed is model.inner.b.packed
    assert MergedLinears.of([model.inner.a, model.inner.b]) is None
    torch.testing.assert_close(model.inner(x), expected)


def test_norms_with_hooks_stay(caplog):
    model, ids = tiny("llama"), torch.arange(9)[None]
    model.model.layers[0].input_layernorm.register_forward_hook(lambda norm, args, out: out * 2)
    before = model(input_ids=ids).logits
    assert fused_model(model).counts == EXPECTED["llama"] | {"norms": 6}
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)


def test_rotations_that_get_further_tensors_stay():
    module, q, cos = tiny("llama").model.layers[0].self_attn, torch.randn(1, 4, 5, 16), torch.randn(1, 5, 16)
    tensors = (q, q.clone(), cos, cos.clone())
    for rest, expected in (((), True), ((torch.arange(5),), False)):
        call = RotaryCall("apply_rotary_pos_emb", tensors, rest, {})
        assert (fused_attention_forward(module, [call], KERNELS) is not None) == expected


@pytest.mark.parametrize(
    ("widths", "bias", "dtype"),
    [((64, 32, 32), False, TYPES[0]), ((48, 16, 16), True, TYPES[1]), ((1, 70, 33), True, TYPES[2])],
)
def test_products_are_the_same_to_the_bit(widths, bias, dtype):
    torch.manual_seed(0)
    layers = [NativeLinear.of(nn.Linear(50, n, bias=bias, dtype=dtype).requires_grad_(False)) for n in widths]
    x, other = torch.randn(2, 2, 7, 50).to(dtype)
    expected = [[layer(one) for layer in layers] for one in (x, other)]
    size = sum(layer.packed.packed.numel() for layer in layers)
    merged = MergedLinears.of(layers)
    assert merged is not None
    for one, outs in ((x, expected[0]), (other, expected[1])):
        assert all(map(torch.equal, [layer(one) for layer in layers], outs))
        assert merged._input is None and not merged._columns, "nothing is kept"
    backwards = [layers[i](x) for i in (2, 1, 0)][::-1]
    assert all(map(torch.equal, backwards, expected[0]))
    mixed = [layers[0](x), layers[0](other), layers[1](x), layers[2](x), layers[1](other)]
    for out, right in zip(mixed, (expected[0][0], expected[1][0], *expected[0][1:], expected[1][1]), strict=True):
        assert torch.equal(out, right)
    storages = {layer.packed.packed.untyped_storage().data_ptr() for layer in layers}
    assert storages == {merged.whole.packed.packed.untyped_storage().data_ptr()}
    assert merged.whole.packed.packed.untyped_storage().nbytes() == size, "no weight is held twice"
    for layer in layers:
        del layer.forward  # by its view of the weight
    assert all(map(torch.equal, [layer(x) for layer in layers], expected[0]))


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_products_of_quantized_layers(bits):
    torch.manual_seed(0)
    method = Method(bits, None, False, 0.0)
    layers = [quantize_linear(nn.Linear(128, n).requires_grad_(False), method, torch.float32) for n in (60, 32)]
    x = torch.randn(3, 128)
    expected = [layer(x) for layer in layers]
    merged = MergedLinears.of(layers)
    assert merged is not None
    assert all(map(torch.equal, [layer(x) for layer in layers], expected))
    assert len({layer.packed.packed.untyped_storage().data_ptr() for layer in layers}) == 1
    assert len({layer.packed.scales.untyped_storage().data_ptr() for layer in layers}) == 1
    merged.undo()
    assert all(map(torch.equal, [layer(x) for layer in layers], expected))


def test_layers_that_differ_are_not_merged():
    def layer(k=50, bias=True, dtype=torch.float32):
        return NativeLinear.of(nn.Linear(k, 8, bias=bias, dtype=dtype).requires_grad_(False))

    for other in (layer(k=60), layer(bias=False), layer(dtype=torch.bfloat16)):
        assert MergedLinears.of([layer(), other]) is None
    quantized = quantize_linear(nn.Linear(50, 8).requires_grad_(False), Method("int8", None, False, 0.0), torch.float32)
    assert MergedLinears.of([layer(), quantized]) is None


class Shifting(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Scaling(nn.Linear):
    scale = 1.0

    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_subclass_is_plain_where_it_computes_the_same():
    """Also without memory; not where a setting of the layer differs from that of the one that was tried."""
    with torch.device("meta"):
        assert is_plain(FalconLinear(7, 4, bias=False))
    assert is_plain(FalconLinear(7, 4)) and is_plain(Scaling(3, 5))
    assert not is_plain(Shifting(3, 5)) and not is_plain(Scaling(3, 5, scale=2.0)) and not is_plain(nn.Bilinear(3, 3, 5))
    model, ids = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **FALCON)).eval(), torch.arange(9)[None]
    before = model(input_ids=ids).logits
    assert pack_linears(model.requires_grad_(False)) == 9, "four of each layer, and the head"
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
