"""The check of quantized K and V at load: what it measures, what it lets through, warns of and refuses."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from pagetide import LLM
from pagetide.cache.geometry import Geometry
from pagetide.engine import demo_model
from pagetide.engine.attention.interface import register
from pagetide.engine.attention.latent import attend_to_latents
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.loading.probe import random_tokens
from pagetide.engine.loading.quantized_kv_check import (
    LARGE_DIVERGENCE,
    MOST_DIVERGENCE,
    Divergence,
    calibration_tokens,
    check_quantized_kv,
    divergence,
)

FOLDER = Path(str(demo_model.__file__)).parent
NAMES = {"int8": "int8", "fp8": "float8_e4m3fn"}
ENGINE: dict[str, Any] = {"device": "cpu", "kv_memory": "4MiB", "share": False, "attention": "torch"}


def geometries(model: Any, kv_cache_dtype: str) -> tuple[Geometry, Geometry]:
    """Of full precision and quantized."""
    plain, quantized = (
        Geometry.from_config(model.config, block_size=16, dtype=dtype) for dtype in ("float32", NAMES[kv_cache_dtype])
    )
    return plain, quantized


def measured(model: Any, kv_cache_dtype: str, tokens: torch.Tensor) -> Divergence:
    model.set_attn_implementation(register())
    return divergence(model, *geometries(model, kv_cache_dtype), tokens)


def with_large_keys(size: float) -> Any:
    """A random model whose K has two channels per head that are `size` larger than the others, as Qwen2.5-7B's bias has."""
    model = tiny("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        for head in range(2):
            layer.self_attn.k_proj.bias[64 * head + torch.randperm(64, generator=generator)[:2]] = size
    return model


@pytest.mark.parametrize(("kv_cache_dtype", "nats", "agreement"), [("int8", 1e-4, 0.99), ("fp8", 1e-3, 0.97)])
def test_the_demo_model_loses_next_to_nothing(kv_cache_dtype: str, nats: float, agreement: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = calibration_tokens(AutoTokenizer.from_pretrained(FOLDER), model.config)
    found = measured(model, kv_cache_dtype, tokens)
    assert 0 < found.nats < nats and found.agreement >= agreement


def test_int8_serves_models_in_which_all_depends_on_attention() -> None:
    for family in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt_neox"):
        model = tiny(family)
        attend_to_latents(model, geometries(model, "int8")[1])
        tokens = random_tokens(model.config, 256)
        int8, fp8 = (measured(model, name, tokens) for name in NAMES)
        assert 0 < int8.nats < LARGE_DIVERGENCE and int8.agreement > 0.9, family
        assert int8.nats < fp8.nats / 5, "fp8 has 3 bits behind the first one, int8 has 7 for the largest"


def test_the_figure_is_the_mean_divergence_from_full_precision() -> None:
    model = tiny("llama")
    tokens = random_tokens(model.config, 48)
    found = measured(model, "fp8", tokens)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        right = model(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
    model.set_attn_implementation(register())
    kept: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: kept.append(output.logits[0]))
    divergence(model, *geometries(model, "fp8"), tokens)
    hook.remove()
    got = kept[1].double().log_softmax(-1)
    assert found.nats == pytest.approx(float((right.exp() * (right - got)).sum(-1).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float((right.argmax(-1) == got.argmax(-1)).double().mean()), abs=0.021)


@pytest.mark.parametrize(("kv_cache_dtype", "size", "remedy"), [("int8", 100.0, "'auto'"), ("fp8", 30.0, "'int8' or 'auto'")])
def test_a_model_that_it_breaks_is_refused(kv_cache_dtype: str, size: float, remedy: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        LLM(with_large_keys(size), kv_cache_dtype=kv_cache_dtype, **ENGINE)
    assert re.fullmatch(
        rf".* cannot be served with kv_cache_dtype='{kv_cache_dtype}': over a test text the distribution of the next token "
        r"differs by (0\.[1-9]\d?|1\.\d) nats on average, and the likeliest token is the same in [3-7]\d\.\d% of the places; "
        rf"the limit is {MOST_DIVERGENCE:g} nats\. Use kv_cache_dtype={remedy}",
        caught.value.reason,
    )


def test_a_model_that_it_changes_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(with_large_keys(16.0), kv_cache_dtype="int8", **ENGINE) as llm:
        assert llm.stats()["kv_cache_dtype"] == "int8"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert re.search(r"with kv_cache_dtype='int8': .* differs by 0\.0[2-9]\d? nats on average", warnings[0])


def test_others_are_served_with_the_figure_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetide")
    with LLM("demo", **ENGINE) as llm:
        assert llm.stats()["kv_cache_dtype"] == "float32" and "kv_cache_dtype" not in caplog.text, "nothing is measured"
    with LLM("demo", kv_cache_dtype="fp8", **ENGINE) as llm:
        assert llm.stats()["kv_cache_dtype"] == "fp8"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(r"demo with kv_cache_dtype='fp8': .* by 0\.000\d+ nats on average, .* in 9\d\.\d% of", caplog.text)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = tiny("llama")
    model.set_attn_implementation(register())
    plain, quantized = geometries(model, "int8")
    forward, calls = model.forward, iter(range(2))

    def broken(**keywords: Any) -> Any:
        output = forward(**keywords)
        output.logits[0, 5, 5] = float("nan") if next(calls) else 0.0
        return output

    model.forward = broken
    with pytest.raises(UnsupportedModel, match=r"tiny cannot be served with kv_cache_dtype='int8': .* by nan nats"):
        check_quantized_kv(model, plain, quantized, random_tokens(model.config, 20), name="tiny", kv_cache_dtype="int8")


def test_the_text_is_read_by_the_models_tokenizer() -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(FOLDER), PreTrainedConfig(vocab_size=4096)
    tokens = calibration_tokens(tokenizer, config, 40)
    assert tokens.dtype == torch.int64 and len(tokens) == 40
    assert tokenizer.decode(tokens, skip_special_tokens=True).startswith("CORIOLANUS:\nAway!\n\nMENENIUS:\nHow! away!")


def test_random_ids_take_its_place() -> None:
    """Without a tokenizer; of a short text, of unknown words only, of ids outside the vocabulary."""
    config = PreTrainedConfig(vocab_size=100)
    for ids in (None, [5, 6, 7], [5] * 300, [*range(60, 360)]):
        tokenizer = None if ids is None else SimpleNamespace(encode=lambda text, ids=ids: ids)
        assert torch.equal(calibration_tokens(tokenizer, config, 50), random_tokens(config, 50))
