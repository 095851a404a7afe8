"""Which decoder layers run as one native call, that they give the bits of their own forward, and what falls back to it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import FAMILIES, VOCAB, tiny
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pagetide import native
from pagetide.cache.geometry import Geometry
from pagetide.engine.attention import decoder_layers
from pagetide.engine.attention.decoder_layers import LayerWatch, fused_layers
from pagetide.engine.attention.interface import register
from pagetide.engine.attention.latent import attend_to_latents, keep_projections
from pagetide.engine.attention.native_kernel import NativeKernel
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.packing import pack_linears
from pagetide.engine.layers.quantized_linears import quantize_linears
from pagetide.engine.loading.probe import probe
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TOKENS = torch.tensor([31, 7, 99, 4, 63])
KERNELS = kernels_on(torch.device("cpu"))
USUAL = {"llama", "qwen2", "qwen3", "mistral", "phi3"}
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def fused_model(model, dtype=torch.float32, quantization=None):
    """The model as `load_checked` makes it."""
    model = model.to(dtype)
    if quantization is not None:
        quantize_linears(model, quantization, torch.arange(1, 129).reshape(2, 64))
    geometry = Geometry.from_config(model.config, block_size=4, dtype=str(dtype).removeprefix("torch."))
    keep_projections(model)
    pack_linears(model)
    fuse(model, TOKENS, KERNELS)
    attend_to_latents(model, geometry)
    watch = LayerWatch(model)
    with watch.noting():
        probe(model, geometry)
    model.set_attn_implementation(register())
    assert watch.fuse() == fused_layers(model)
    return model


@contextmanager
def counted(monkeypatch):
    """A list that grows by the tokens of each native call of a layer."""
    calls, op = [], torch.ops.pagetide.decoder_layer.default

    def counting(x, *args):
        calls.append(x.shape[1])
        return op(x, *args)

    with monkeypatch.context() as patched:
        patched.setattr(decoder_layers, "_decoder_layer", lambda: counting)
        yield calls


def generated(model, inputs, new=8, **engine):
    """The tokens of ragged chunks and decodes, and all logits behind sampled positions."""
    dtype = str(model.dtype).removeprefix("torch.")
    tiny_engine = TinyEngine(
        model, **{"usable": 60, "block_size": 4, "max_seqs": 4, "max_chunk_tokens": 7, "kv_dtype": dtype} | engine
    )
    tiny_engine.core.runner.kernel = NativeKernel()
    tiny_engine.watch_logits()
    return tiny_engine.generate(inputs, Sampling(new)), tiny_engine.logits


def assert_same_bits(model, inputs, monkeypatch, **engine):
    """Fused and not, in the same steps."""
    with counted(monkeypatch) as calls:
        tokens, logits = generated(model, inputs, **engine)
    assert calls and len(calls) % len(model.model.layers) == 0
    for layer in model.model.layers:
        del layer.forward
    with counted(monkeypatch) as calls:
        expected = generated(model, inputs, **engine)
    assert not calls and tokens == expected[0] and logits.keys() == expected[1].keys()
    assert all(torch.equal(one, expected[1][at]) for at, one in logits.items())


def test_layers_that_run_as_one_call():
    for name in FAMILIES:
        model = tiny(name)
        usual = len(model.model.layers) if name in USUAL else 0
        assert fused_layers(fused_model(model)) == usual, name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_equal_those_of_transformers(name):
    model, inputs = tiny(name), prompts([1, 7, 16, 33, 100], VOCAB)
    expected = plain(model, inputs, 16)
    together, logits = generated(fused_model(model), inputs, 16)
    assert together == expected
    alone, own = generated(model, inputs[2:3], 16)
    assert alone == expected[2:3]
    assert all(torch.equal(one, logits["r2", at]) for (_, at), one in own.items()), "whatever else runs"


@pytest.mark.parametrize(
    ("name", "dtype", "over"),
    [
        ("qwen2", torch.float32, {}),
        ("mistral", torch.bfloat16, {}),
        ("phi3", torch.float16, {}),
        ("qwen3", torch.bfloat16, {"kv_dtype": "int8"}),
        ("llama", torch.float32, {"kv_dtype": "int8"}),
    ],
)
def test_the_same_bits_as_without(name, dtype, over, monkeypatch):
    assert_same_bits(fused_model(tiny(name), dtype), prompts([1, 7, 33], VOCAB), monkeypatch, **over)


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", torch.bfloat16), ("int4", torch.float32)])
def test_the_same_bits_of_quantized_weights(quantization, dtype, monkeypatch):
    model = fused_model(tiny("llama", **WIDE), dtype, quantization)
    assert_same_bits(model, prompts([5, 17], VOCAB), monkeypatch)


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) * 1.001


class Clamped(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs).clamp(-20, 20)


class Crossed(LlamaDecoderLayer):
    """Attention and MLP read the same input."""

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


class NormsExchanged(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(hidden_states=self.post_attention_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.input_layernorm(hidden_states))


@pytest.mark.parametrize(("kind", "fused"), [(Scaled, False), (Clamped, False), (Crossed, False), (NormsExchanged, True)])
def test_layers_are_known_by_what_they_compute(kind, fused, monkeypatch):
    model, inputs = tiny("llama"), prompts([5, 17], VOCAB)
    for layer in model.model.layers:
        layer.__class__ = kind
    expected = plain(model, inputs, 8)
    assert fused_layers(fused_model(model)) == fused * 3
    assert generated(model, inputs)[0] == expected


def test_layers_with_hooks_compute_as_before(monkeypatch):
    """Hooks from before the layers are replaced, and from later on, on modules within a layer and on the layer."""
    model, inputs, seen = tiny("llama"), prompts([9], VOCAB), []
    layers = model.model.layers
    layers[0].self_attn.o_proj.register_forward_hook(lambda *_: seen.append("o"))
    layers[1].register_forward_hook(lambda *_: seen.append("before"))
    expected = plain(model, inputs, 4)
    assert fused_layers(fused_model(model)) == 1
    later = layers[2].self_attn.register_forward_hook(lambda *_: seen.append("attention"))
    around = layers[2].register_forward_hook(lambda *_: seen.append("layer"))
    seen.clear()
    with counted(monkeypatch) as calls:
        assert generated(model, inputs, 4)[0] == expected
        assert not calls and seen == ["o", "before", "attention", "layer"] * (len(seen) // 4) != []
        later.remove()
        seen.clear()
        assert generated(model, inputs, 4)[0] == expected
    assert calls and seen == ["o", "before", "layer"] * len(calls)
    around.remove()


def test_steps_of_another_kind_take_the_layers_own_forward(monkeypatch):
    """Another kernel; more tokens; another type of K and V."""
    model, inputs = fused_model(tiny("llama")), prompts([40], VOCAB)
    expected = generated(model, inputs, 3)[0]
    with counted(monkeypatch) as calls:
        engine = TinyEngine(model, usable=60, block_size=4)
        assert engine.generate(inputs, Sampling(3)) == expected and not calls
        monkeypatch.setattr(decoder_layers, "MOST_TOKENS", 6)
        assert generated(model, inputs, 3)[0] == expected
    assert sum(calls) == 3 * (40 % 7 + 2), "the prompt's last chunk, and two decodes"


def test_lists_that_are_no_layer_are_refused():
    layer = fused_model(tiny("llama")).model.layers[0]
    fused, x, cos = layer.forward, torch.zeros(1, 2, 48), torch.zeros(1, 2, 8)
    cache = torch.zeros(3, 4, 2, 8)
    one, places = torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    more = (cache, cache.clone(), one, places, places, torch.tensor([0, 1, 2]).int(), torch.ones(2).int())
    op = torch.ops.pagetide.decoder_layer

    def call(tensors=fused._tensors, numbers=fused._numbers[True], factors=fused._factors, x=x):
        return op(x, cos, cos, tensors, numbers, factors, *more)

    assert call().shape == x.shape
    for bad, said in (
        ({"tensors": fused._tensors[:-1]}, "a layer has more tensors than"),
        ({"tensors": [*fused._tensors, cos, cos]}, "a layer's lists are longer"),
        ({"numbers": fused._numbers[True][:-1]}, "a layer has more numbers than"),
        ({"factors": fused._factors[:-1]}, "a layer has more factors than"),
        ({"numbers": [6, 70, *fused._numbers[True][2:]]}, "queries are columns 70 to 118 of"),
        ({"x": x[:, :, :40]}, "x must be contiguous"),
        ({"x": x.bfloat16()}, "differ in type"),
    ):
        with pytest.raises(RuntimeError, match=said):
            call(**bad)
