"""Latent attention over cached latents: the same tokens in both forms, what is recognised, and what it takes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from engines import TinyEngine, plain, prompts
from families import VOCAB, tiny
from torch import nn

from pagetide import LLM, SamplingParams, native
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.engine.attention import latent
from pagetide.engine.attention.latent import attend_to_latents, expands_plainly, keep_projections
from pagetide.engine.attention.native_kernel import NativeKernel
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.layers.linears import KeptLinear
from pagetide.engine.layers.packing import pack_linears
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.loading.probe import probe
from pagetide.engine.memory.planning import plan_memory
from pagetide.scheduler.request import Sampling

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7}
NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.instructions() is None, reason="they are not built"))
VARIANTS = [
    ("deepseek_v2", {"q_lora_rank": 24}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    ("deepseek_v3", {"rope_parameters": YARN, "attention_bias": True}),
]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count)


def geometry_of(model, **more) -> Geometry:
    return Geometry.from_config(model.config, **{"block_size": 4, "dtype": "float32", **more})


@pytest.mark.parametrize("kernel", [NATIVE, "torch"])
@pytest.mark.parametrize(("name", "expanded_from"), [("deepseek_v2", 1), ("deepseek_v3", 6), ("deepseek_v3", 1 << 20)])
def test_same_tokens_in_both_forms(name, expanded_from, kernel, monkeypatch):
    """With chunks of 7, preemption, prefix hits, and K and V of a few heads at a time."""
    monkeypatch.setattr(latent, "EXPANDED_FROM", expanded_from)
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 4000)
    model, inputs = tiny(name), prompts([2, 33, 34, 35, 36], VOCAB)
    expected = plain(model, inputs, 12)
    engine = TinyEngine(model, usable=30, block_size=4, max_seqs=4, max_chunk_tokens=7, caching=True)
    engine.core.runner.kernel = NativeKernel() if kernel == "native" else TorchKernel()
    assert engine.generate(inputs, Sampling(12)) == expected
    assert engine.generate(inputs, Sampling(12)) == expected
    assert engine.preemptions
    assert engine.core.scheduler.stats.prefix_lookups.hit_tokens


@pytest.mark.parametrize("attention", [NATIVE, "torch"])
def test_both_forms_read_quantized_latents(attention, monkeypatch):
    """What is stored is near full precision, so that a raw reading of it would be far off."""
    model, inputs = tiny("deepseek_v3"), prompts([2, 33, 64], VOCAB)
    scores = []
    options = {"dtype": "float32", "attention": attention, "device": "cpu", "kv_memory": "4MiB", "share": False}
    params = SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=0)
    for kv_cache_dtype, expanded_from in (("auto", 1 << 20), ("int8", 1 << 20), ("int8", 6)):
        monkeypatch.setattr(latent, "EXPANDED_FROM", expanded_from)
        with LLM(model, kv_cache_dtype=kv_cache_dtype, **options) as llm:
            outputs = llm.generate(inputs, params, progress=False)
        found = [one.logprob for output in outputs for one in output.prompt_logprobs if one is not None]
        scores.append(torch.tensor(found))
    full, absorbed, expanded = scores
    assert (absorbed - expanded).abs().max() < 0.01
    assert 0 < (absorbed - full).abs().mean() < 0.2, "of logits of about 10"


def test_variants():
    for family, over in VARIANTS:
        model = tiny(family, **over)
        geometry = geometry_of(model)
        assert all(layer == LayerShape(1, 24, 16, v_in_k=True) for layer in geometry.layers)
        attend_to_latents(model, geometry)
        probe(model, geometry)


@pytest.mark.parametrize(("dtype", "expanded_from"), [(torch.bfloat16, 1), (torch.float16, 1 << 20)])
def test_in_half_precision(dtype, expanded_from, monkeypatch):
    monkeypatch.setattr(latent, "EXPANDED_FROM", expanded_from)
    model = tiny("deepseek_v3").to(dtype)
    geometry = geometry_of(model, dtype=str(dtype).removeprefix("torch."))
    attend_to_latents(model, geometry)
    probe(model, geometry)


def test_other_attention_gets_k_and_v_of_all_heads():
    model, ids = tiny("deepseek_v3"), torch.arange(9)[None]
    before = model(input_ids=ids, use_cache=False).logits
    attend_to_latents(model, geometry_of(model))
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.model.layers[0].self_attn.kv_b_proj.weight)
    assert not torch.equal(other(input_ids=ids, use_cache=False).logits, before), "the copy has weights of its own"


def spoil_method(attention):
    attention.__class__ = type("Other", (type(attention),), {"expand_kv": lambda self, c, r: (c, c)})


def spoil_values(attention):
    kind = type(attention)

    def expand_kv(self, latents, rotated):
        key, value = kind.expand_kv(self, latents, rotated)
        return key, value.clamp(-0.5, 0.5)

    attention.__class__ = type("Other", (kind,), {"expand_kv": expand_kv})


def spoil_projection(attention):
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)


@pytest.mark.parametrize("spoil", [spoil_method, spoil_values, spoil_projection])
def test_what_computes_something_else_is_refused(spoil):
    model = tiny("deepseek_v3")
    spoil(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModel, match="layer 1 does not expand latents"):
        attend_to_latents(model, geometry_of(model))
    attend_to_latents(tiny("llama"), geometry_of(tiny("llama")))


def test_changed_models_keep_k_and_v_of_all_heads():
    model = tiny("deepseek_v3")
    assert expands_plainly(model)
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    assert not expands_plainly(model)
    with LLM(model, kv_memory="1MiB", share=False) as llm:
        assert llm.stats()["kv_bytes_per_token"] == 3 * 6 * (20 + 10) * 4
        assert list(llm.generate([[3, 4, 5]], greedy(5))[0].token_ids) == plain(model, [[3, 4, 5]], 5)[0]


def test_projections_are_neither_packed_nor_quantized():
    model = tiny("deepseek_v3")
    keep_projections(model)
    pack_linears(model)
    attention = model.model.layers[0].self_attn
    assert type(attention.kv_b_proj) is KeptLinear
    attend_to_latents(model, geometry_of(model))
    weight = attention.kv_b_proj.weight
    assert attention.latent_attention.weight.data_ptr() == weight.data_ptr(), "no bytes besides the model's"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("latent")
    tiny("deepseek_v3", hidden_size=256, kv_lora_rank=128, q_lora_rank=None).save_pretrained(path)
    return path


@pytest.mark.parametrize(("quantization", "loaded"), [(None, False), (None, True), ("int8", False)])
def test_engines(folder, quantization, loaded):
    if quantization and native.instructions() is None:
        pytest.skip("the native kernels are not built")
    model = tiny("deepseek_v3", hidden_size=256, kv_lora_rank=128, q_lora_rank=None)
    inputs = prompts([1, 9, 40], VOCAB)
    with LLM(model if loaded else folder, quantization=quantization, kv_memory="1MiB", share=False) as llm:
        assert llm.stats()["kv_bytes_per_token"] == 3 * (128 + 8) * 4
        got = [list(one.token_ids) for one in llm.generate(inputs, greedy(8))]
        if quantization is None:
            assert got == plain(model, inputs, 8)


def test_the_reserve_counts_both_forms(folder):
    def plan(**more):
        config = EngineConfig.resolve(folder, kv_memory="1MiB", **more)
        return plan_memory(config, Checkpoint.open(config.model), torch.device("cpu"), torch.float32)

    small, large = plan(max_step_tokens=128), plan(max_step_tokens=512)
    query, rank = 20, 128
    absorbed = 6 * (2 * query + 3 * rank + 8 + 2 * 10) * 4
    expanded = 4 * 512 * 6 * (20 + 10) * 4 + 512 * (rank + 8) * 4
    assert large.reserve_bytes - small.reserve_bytes >= (512 - 128) * absorbed + expanded


def test_code_of_the_folder_keeps_k_and_v_of_all_heads(folder):
    checkpoint = Checkpoint.open(resolve_model(folder))
    assert checkpoint.caches_latents
    checkpoint.config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    assert checkpoint.caches_latents, "that code runs only if it is trusted"
    trusted = replace(checkpoint, spec=replace(checkpoint.spec, trust_remote_code=True))
    assert not trusted.caches_latents
