"""Models with windows, and engines of them against plain transformers."""

from __future__ import annotations

import functools
from typing import Any

from engines import TinyEngine, plain, prompts
from families import _EXPERTS, _GQA, _ROPE, FAMILIES, VOCAB, tiny

from pagetide.cache.geometry import Geometry
from pagetide.scheduler.request import Sampling

NEW = 12
GREEDY = Sampling(NEW)
_FOUR = {**_GQA, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 8192}

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {**_GQA, "max_position_embeddings": 8192},
    "gemma2": {**FAMILIES["gemma2"], "max_position_embeddings": 8192},
    "gemma3_text": {**FAMILIES["gemma3_text"], "max_position_embeddings": 8192},
    "gpt_oss": {**FAMILIES["gpt_oss"], "max_position_embeddings": 8192},
    "cohere2": {**_FOUR, "sliding_window_pattern": 4, "pad_token_id": 0},
    "exaone4": {**_FOUR, "sliding_window_pattern": 4},
    "olmo3": {**_FOUR, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_parameters": _ROPE},
    "llama4_text": {
        **_FOUR, **_EXPERTS, "intermediate_size_mlp": 64, "attn_temperature_tuning": False, "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 1, "rope_parameters": _ROPE,
    },
}  # fmt: skip


@functools.cache
def of(name: str, window: int) -> Any:
    size = "attention_chunk_size" if name == "llama4_text" else "sliding_window"
    over = {**MODELS[name], size: window}
    return tiny(name, **over)


@functools.cache
def case(name: str, window: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of up to 20 windows, two of which begin alike, and their tokens."""
    lengths = [1, window - 1, window, window + 1, 2 * window + 3, 5 * window, 13 * window + 2, 20 * window]
    inputs = prompts(lengths, VOCAB)
    inputs.append(inputs[-1][: 7 * window + 5] + inputs[4])
    return inputs, plain(of(name, window), inputs, NEW)


def engine_for(name: str, window: int, share: float = 4.0, **more: Any) -> TinyEngine:
    """An engine whose pool holds `share` of the longest sequence."""
    block_size = more.pop("block_size", 4)
    model, longest = of(name, window), 20 * window + NEW
    geometry = Geometry.from_config(model.config, block_size=block_size, dtype="float32")
    per_block = geometry.blocks_for_tokens(160) / geometry.columns_for_tokens(160)  # as TinyEngine counts
    usable = int(share * geometry.blocks_for_tokens(longest) / per_block)
    return TinyEngine(model, usable=usable, block_size=block_size, max_model_len=longest + window + NEW, **more)


def check_chunks(name: str, window: int, sizes: list[tuple[int | None, int]]) -> None:
    """Sizes: tokens a chunk, and of a block."""
    inputs, expected = case(name, window)
    for chunk, block_size in sizes:
        engine = engine_for(name, window, max_chunk_tokens=chunk, block_size=block_size)
        assert engine.generate(inputs, GREEDY) == expected, (chunk, block_size)


def check_disturbed(name: str, window: int, pools: list[tuple[float, int]]) -> None:
    """Pools: the share of the longest sequence that each holds, and slots of its host tier."""
    inputs, expected = case(name, window)
    preemptions = hits = swaps = 0
    for share, host_slots in pools:
        engine = engine_for(name, window, share, caching=True, host_slots=host_slots, max_chunk_tokens=29)
        for _ in range(2):
            assert engine.generate(inputs, GREEDY) == expected, (share, host_slots)
        stats = engine.core.scheduler.stats
        preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_lookups.hit_tokens
        swaps += stats.promoted_blocks
    assert hits > 0
    assert (preemptions > 0 and swaps > 0) or window > 8, "nothing was forced out"
