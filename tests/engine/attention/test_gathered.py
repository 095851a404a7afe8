"""Models with attention of their own, served a sequence at a time: the tokens of transformers, whatever happens between."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engines import TinyEngine, plain, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from pagetide import LLM, SamplingParams
from pagetide.engine.attention import backends
from pagetide.engine.attention.gathered import attends_by_itself, find_cached, install, is_installed
from pagetide.engine.errors import UnsupportedModel
from pagetide.scheduler.request import Sampling

VOCAB = 160
TOKENS = torch.arange(1, 6)[None]
ALIKE: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": VOCAB, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
INDEXED: dict[str, Any] = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 6, "max_position_embeddings": 512,
    "index_topk": 8, "index_n_heads": 32, "index_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {},  # no positions: it counts what the cache has
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "deepseek_v32": INDEXED,  # a key besides K and V, by which it chooses 8 tokens
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**ALIKE, **MODELS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for one in model.parameters():
        one.normal_(0.0, 0.15) if one.dim() > 1 else one.add_(0.1 * torch.randn_like(one))
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_equal_those_of_transformers(kind: str) -> None:
    """In chunks of any size, preempted, from cached prefixes, and beside sequences of other lengths."""
    model, inputs = made(kind), prompts([1, 9, 16, 33, 70], VOCAB)
    expected = plain(model, inputs, 14)
    for options in (
        {"usable": 200},
        {"usable": 26, "block_size": 4, "max_chunk_tokens": 5, "max_seqs": 4},
        {"usable": 200, "max_chunk_tokens": 7, "caching": True},
    ):
        engine = TinyEngine(made(kind), **options)
        assert is_installed(engine.core.runner.model)
        assert engine.generate(inputs, Sampling(14)) == expected, options
        if "caching" in options:
            assert engine.generate(inputs, Sampling(14)) == expected
            assert engine.core.scheduler.stats.cached_prompt_tokens > 0
        elif "max_seqs" in options:
            assert engine.preemptions > 0


def test_long_chunks_are_computed_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens at a time as their scores leave room for, down to one."""
    model, inputs = made("falcon"), prompts([70, 9], VOCAB)
    expected = plain(model, inputs, 6)
    for piece_bytes in (1, 40_000):
        monkeypatch.setattr(backends, "PIECE_BYTES", piece_bytes)
        assert TinyEngine(made("falcon"), usable=60).generate(inputs, Sampling(6)) == expected
    assert backends.tokens_in_a_piece(model.config, 70) == 5


def test_an_llm_serves_one_and_says_how(caplog: pytest.LogCaptureFixture) -> None:
    """Log-probabilities of prompts too; K and V in one byte; a model that is loaded stays as it is."""
    model, prompt = made("falcon"), prompts([20, 11], VOCAB)
    with torch.inference_mode():
        right = [model(input_ids=torch.tensor([one])).logits[0].log_softmax(-1) for one in prompt]
    with caplog.at_level(logging.WARNING), LLM(model, kv_memory="8MiB", share=False, max_model_len=256) as llm:
        asked = SamplingParams(max_new_tokens=3, temperature=0, logprobs=1, prompt_logprobs=1)
        outputs = llm.generate(prompt, asked, progress=False)
        assert llm.stats()["attention"] == "transformers"
    assert "computed one after the other" in caplog.text
    for output, ids, logprobs in zip(outputs, prompt, right, strict=True):
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry.logprob == pytest.approx(float(logprobs[at, ids[at + 1]]), abs=1e-4)
        assert output.token_ids[0] == int(logprobs[-1].argmax())
    assert "forward" not in vars(model)
    with LLM(model, kv_memory="8MiB", kv_cache_dtype="int8", share=False, max_model_len=256) as llm:
        again = llm.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0), progress=False)
    assert [output.token_ids[0] for output in again] == [int(logprobs[-1].argmax()) for logprobs in right]


def test_what_it_is_not_for_is_left_alone() -> None:
    """Models that call the interface, those that hand the cache something else than the geometry has, or nothing."""
    llama = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **ALIKE, num_key_value_heads=2, intermediate_size=64)
    )
    assert not attends_by_itself(llama)
    engine = TinyEngine(made("bloom"), usable=20)
    geometry, other = engine.core.runner.storage.geometry, made("falcon")
    assert not install(other, geometry, TOKENS) and "forward" not in vars(other)
    old = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", n_embd=48, n_layer=2, n_head=6, vocab_size=VOCAB))
    assert attends_by_itself(old) and find_cached(old.eval(), TOKENS) == ()
    with pytest.raises(UnsupportedModel, match="never calls transformers' attention interface"):
        LLM(old, kv_memory="8MiB", share=False)
