"""Models and prompts of the benchmarks on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 8192  # token ids of prompts are below it


def save_model(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """The random Llama, with logits far enough apart that its greedy tokens are its own."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=positions, initializer_range=0.05,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def save_qwen2(folder: Path, hidden: int, layers: int, seed: int, positions: int = 2048) -> None:
    """A random Qwen2-like model in bfloat16, the output head tied to the embedding as in small Qwen2 models."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=19 * hidden // 4, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=max(VOCABULARY, 32 * hidden), max_position_embeddings=positions,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Ragged prompts of 64 to 256 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, int(n)).tolist() for n in rng.integers(64, 257, count)]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first that differs, over all prompts."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, ours))
