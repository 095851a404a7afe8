"""The division of a device's memory: exact numbers for a known shape, and the rules on random ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    RwkvConfig,
)

from pagetide import native
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.common.units import GIB, MIB, format_bytes
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError, NotEnoughMemory, UnsupportedModel
from pagetide.engine.loading.division import Division
from pagetide.engine.loading.loader import Checkpoint
from pagetide.engine.loading.models import ModelSpec
from pagetide.engine.memory.memory_plan import (
    CUDA_WORKSPACE_BYTES,
    DEFAULT_CONTEXT,
    MemoryPlan,
    auto_pool,
    model_length,
    pool_geometry,
    working_reserve_bytes,
)
from pagetide.engine.memory.planning import model_geometry, plan_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_network")
KV_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, float32: of one token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return Checkpoint.open(ModelSpec("tiny", folder, "a test"))


def plan(
    checkpoint: Checkpoint, free: int = GIB, device: torch.device = CPU, total: int = 2 * GIB, **arguments: Any
) -> MemoryPlan:
    context = arguments.pop("context", None)
    config = EngineConfig.resolve(checkpoint.spec, **arguments)
    return plan_memory(config, checkpoint, device, torch.float32, context=context, free=lambda _: free, total=lambda _: total)


def test_numbers_of_a_known_model(checkpoint: Checkpoint) -> None:
    made = plan(checkpoint, max_seqs=4, max_step_tokens=8)
    weights = 4 * (2 * 64 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48))
    assert (made.model, made.device, made.dtype, made.free_bytes) == ("tiny", "cpu", "float32", GIB)
    assert made.weights_bytes == weights == checkpoint.weights_bytes(torch.float32)
    rows = 8 * (48 * 4 + 12) if native.instructions() else 0  # copies of the widest inputs, their scale, the sums of two groups
    assert made.reserve_bytes == 8 * (4 * 32 + 3 * 48 + 2 * 8 * (4 + 2 * 2)) * 4 + 4 * 64 * 12 + rows
    assert (made.kv_bytes_per_token, made.block_size) == (KV_BYTES, 16)
    # 4 sequences of 128 tokens and the null block are 33 blocks of 4 KiB, an extent each
    assert (made.num_blocks, made.kv_bytes, made.num_extents) == (33, 33 * 16 * KV_BYTES, 33)
    assert (made.max_model_len, made.context, made.tokens_that_fit, made.sequences_that_fit) == (128, 128, 512, 4)
    assert made.left_bytes == GIB - made.weights_bytes - made.reserve_bytes - made.kv_bytes
    assert "4 at the same time" in made.describe()
    assert f"{KV_BYTES:,} bytes in float32" in made.describe()


@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_of_a_shard(checkpoint: Checkpoint, size: int) -> None:
    config = EngineConfig.resolve(checkpoint.spec, max_seqs=4, max_step_tokens=8)
    whole = model_geometry(config, checkpoint, CPU, torch.float32)
    division = Division.of(checkpoint, size, whole.layers)
    assert model_geometry(config, checkpoint, CPU, torch.float32, division) == division.geometry(whole)
    made = plan_memory(config, checkpoint, CPU, torch.float32, free=lambda _: GIB, total=lambda _: 2 * GIB, division=division)
    norms = 4 * (32 + 2 * 2 * 32)
    attention = 2 * (2 * 32 * 32 // size + 2 * 8 * 32)  # one head of K and V
    assert division.replicated_bytes(torch.float32) == norms
    mlps = 2 * 3 * 32 * (48 // size if size < 4 else 16)
    assert made.weights_bytes == norms + 4 * (2 * 64 // size * 32 + attention + mlps)
    # One of two heads: blocks of half the size, two of them in an extent.
    assert (made.kv_bytes_per_token, made.num_blocks) == (KV_BYTES // 2, 34)
    assert made.loading_bytes <= plan(checkpoint, max_seqs=4, max_step_tokens=8).loading_bytes
    assert (made.num_shards, made.to_dict()["num_shards"]) == (1, 1) and "shards" not in made.describe()
    shown = replace(made, num_shards=size, replicated_bytes=norms)
    assert f"shards {size}; what follows is of each" in re.sub(" +", " ", shown.describe())
    assert "... on every shard" in shown.describe() and shown.to_dict()["replicated_bytes"] == norms


def test_a_shard_for_which_there_is_no_room_says_what_would_fit(checkpoint: Checkpoint) -> None:
    config = EngineConfig.resolve(checkpoint.spec)
    division = Division.of(checkpoint, 2, model_geometry(config, checkpoint, CPU, torch.float32).layers)
    needed = division.weights_bytes(torch.float32)
    with pytest.raises(NotEnoughMemory) as caught:
        plan_memory(config, checkpoint, CPU, torch.float32, free=lambda _: needed - 1, division=division)
    assert caught.value.asked_bytes == needed < checkpoint.weights_bytes(torch.float32)
    assert f"dtype='bfloat16' would need {format_bytes(division.weights_bytes(torch.bfloat16))}" in str(caught.value)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_k_and_v_in_one_byte_count_with_their_scales(checkpoint: Checkpoint, kv_cache_dtype: str) -> None:
    token = 2 * 2 * 2 * (8 + 2)  # layers, K and V, heads; 8 values and a scale
    plain, made = plan(checkpoint, kv_memory="1MiB"), plan(checkpoint, kv_memory="1MiB", kv_cache_dtype=kv_cache_dtype)
    assert (made.dtype, made.kv_cache_dtype, made.kv_bytes_per_token) == ("float32", kv_cache_dtype, token)
    assert (plain.kv_cache_dtype, plain.kv_bytes_per_token) == ("float32", KV_BYTES)
    assert (made.weights_bytes, made.reserve_bytes) == (plain.weights_bytes, plain.reserve_bytes)
    assert made.num_blocks == MIB // (16 * token) // 16 * 16  # extents of 16 blocks, five pages
    assert f"{token:,} bytes in {kv_cache_dtype}" in made.describe()
    assert f"... in float32    {plain.sequences_that_fit:,} with the same memory, {KV_BYTES} bytes" in made.describe()


def test_a_plan_shows_the_groups_of_layers_and_what_windows_bring(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=64, max_position_embeddings=1024, sliding_window=128, sliding_window_pattern=6,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(ModelSpec("tiny", tmp_path, "a test"))
    made, layer = plan(checkpoint, kv_memory="1MiB"), 2 * 2 * 8 * 4  # K and V, heads, head_dim, float32
    full, window = made.to_dict()["groups"]
    assert full == {"layers": 1, "window": None, "chunked": False, "tables": 1, "kv_bytes_per_token": layer}
    assert window == {"layers": 5, "window": 128, "chunked": False, "tables": 5, "kv_bytes_per_token": 5 * layer}
    per_sequence = 1024 // 16 + 5 * (128 // 16 + 1)
    assert made.geometry.blocks_for_tokens(1024) == per_sequence
    assert made.sequences_that_fit == (made.num_blocks - 1) // per_sequence
    without = made.to_dict()["without_windows"]["sequences_that_fit"]
    assert without == (MIB // (6 * layer * 16)) // 64 < made.sequences_that_fit
    shown = dict(line.split("  ", 1) for line in made.describe().splitlines())
    shown = {name: value.strip() for name, value in shown.items()}
    assert shown["... in 1 layer"] == f"{layer} bytes, for all tokens"
    assert shown["... in 5 layers"] == f"{5 * layer} bytes, for the last 128 tokens"
    assert shown["... without windows"] == f"{without} with the same memory"
    short = plan(checkpoint, kv_memory="1MiB", max_model_len=128)
    assert len(short.to_dict()["groups"]) == 1, "no sequence is longer than the window"


def test_a_plan_shows_what_other_types_would_bring(checkpoint: Checkpoint) -> None:
    plans = {name: plan(checkpoint, kv_memory="1MiB", context=64, kv_cache_dtype=name) for name in ("auto", "int8", "fp8")}
    shown = {
        name: {"kv_bytes_per_token": made.kv_bytes_per_token, "sequences_that_fit": made.sequences_that_fit}
        for name, made in plans.items()
    }
    assert plans["auto"].to_dict()["kv_cache_dtypes"] == shown
    unbounded = plan(checkpoint, max_seqs=3)
    assert unbounded.to_dict()["kv_cache_dtypes"]["auto"]["sequences_that_fit"] == unbounded.sequences_that_fit == 3
    for name in ("int8", "fp8"):
        others = plans[name].to_dict()["kv_cache_dtypes"]
        assert (others["int8"], others["fp8"]) == (shown["int8"], shown["fp8"])
        assert shown["auto"]["sequences_that_fit"] - others["auto"]["sequences_that_fit"] in (0, 1), "whole extents"
    assert plans["auto"].to_dict()["kv_cache_dtype"] == "float32" and plans["fp8"].to_dict()["kv_cache_dtype"] == "fp8"
    assert shown["int8"] == shown["fp8"] and shown["int8"]["sequences_that_fit"] > 3 * shown["auto"]["sequences_that_fit"]
    line = f"... in int8 or fp8  {shown['int8']['sequences_that_fit']} with the same memory, 80 bytes per token"
    assert line in plans["auto"].describe()


def test_context_counts_and_does_not_change_the_pool(checkpoint: Checkpoint) -> None:
    whole, half, odd = (plan(checkpoint, max_seqs=4, context=tokens) for tokens in (None, 64, 17))
    assert whole.kv_bytes == half.kv_bytes == odd.kv_bytes
    assert (whole.sequences_that_fit, half.sequences_that_fit, odd.sequences_that_fit) == (4, 8, 16)
    for tokens in (0, 129):
        with pytest.raises(ConfigError, match="context must be 1 to 128 tokens"):
            plan(checkpoint, context=tokens)


def test_explicit_pool(checkpoint: Checkpoint) -> None:
    made = plan(checkpoint, kv_memory=40 * 16 * KV_BYTES)
    assert (made.num_blocks, made.kv_bytes) == (40, 40 * 16 * KV_BYTES)
    made = plan(checkpoint, kv_memory=40 * 32 * KV_BYTES, block_size=32)
    assert (made.num_blocks, made.block_size) == (40, 32)
    needed = 2 * 16 * KV_BYTES
    assert plan(checkpoint, kv_memory=needed).num_blocks == 2
    with pytest.raises(ConfigError, match=f"the least is 2 blocks, .* ask for {needed:,} bytes or more"):
        plan(checkpoint, kv_memory=needed - 1)


def test_pool_that_does_not_fit(checkpoint: Checkpoint) -> None:
    weights = checkpoint.weights_bytes(torch.float32)
    with pytest.raises(
        NotEnoughMemory, match=r"the KV pool of tiny on cpu, besides .* of weights: .* at most 1\.00 MiB"
    ) as caught:
        plan(checkpoint, free=weights + MIB, kv_memory="2MiB")
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (2 * MIB, MIB)
    with pytest.raises(NotEnoughMemory, match="the KV pool"):
        plan(checkpoint, free=weights + 100)
    with pytest.raises(NotEnoughMemory, match="the weights of tiny"):
        plan(checkpoint, free=weights - 1)


def test_a_bound_is_no_demand(checkpoint: Checkpoint) -> None:
    """What is not free now may be later; what the device has not never will."""
    made = plan(checkpoint, free=64 * MIB, kv_memory={"min": "1MiB", "max": "1GiB"})
    assert made.kv_bytes == GIB and made.min_extents == 1
    made = plan(checkpoint, free=64 * MIB, kv_memory={"min": "1MiB", "max": "10TiB"})
    assert 2 * GIB - 2 * made.geometry.extent_bytes < made.kv_bytes < 2 * GIB
    with pytest.raises(NotEnoughMemory) as refusal:
        plan(checkpoint, free=64 * MIB, kv_memory={"min": "70MiB", "max": "1GiB"})
    assert refusal.value.asked_bytes >= 70 * MIB
    with pytest.raises(NotEnoughMemory):
        plan(checkpoint, free=64 * MIB, kv_memory={"min": "1GiB", "max": "1GiB"})


def test_little_memory_still_gives_a_pool(checkpoint: Checkpoint) -> None:
    """One sequence does not fit beside the reserve: the pool is what the rule gives, and says so."""
    made = plan(checkpoint, free=checkpoint.weights_bytes(torch.float32) + 16 * 16 * KV_BYTES, max_seqs=256)
    assert (made.num_blocks, made.sequences_that_fit) == (4, 0)


def test_buffers_of_a_disk_tier_are_in_the_plan(checkpoint: Checkpoint) -> None:
    """128 MiB for writes, and what 4 sequences of the greatest length take for reads, if that is no eighth of the memory."""
    plain, kept = (plan(checkpoint, free=GIB, **more) for more in ({}, {"disk_kv_memory": "1GiB"}))
    assert (plain.disk_buffer_bytes, kept.disk_buffer_bytes) == (0, 128 * MIB + 4 * 128 * KV_BYTES)
    assert kept.reserve_bytes == plain.reserve_bytes + kept.disk_buffer_bytes
    assert "disk tier" in kept.describe() and "disk tier" not in plain.describe()
    tiered = plan(checkpoint, free=GIB, host_kv_memory="3MiB")
    assert tiered.host_kv_bytes == 3 * MIB and "host tier" in tiered.describe() and "host tier" not in plain.describe()
    weights = checkpoint.weights_bytes(torch.float32)
    assert plan(checkpoint, free=weights + MIB, disk_kv_memory="1GiB").disk_buffer_bytes == 128 * MIB + MIB // 8


def test_a_copy_of_weights_on_the_host_is_in_the_plan_of_what_may_sleep_on_cuda(checkpoint: Checkpoint) -> None:
    """If half of the host's free memory, less the host tier, has room for it."""
    weights = checkpoint.weights_bytes(torch.float32)

    def made(host: int, device: torch.device = GPU, sleeps: bool = True, **arguments: Any) -> MemoryPlan:
        config = replace(EngineConfig.resolve(checkpoint.spec, **arguments), sleeps=sleeps)
        free = {"cpu": host, "cuda": GIB}
        return plan_memory(config, checkpoint, device, torch.float32, free=lambda one: free[one.type])

    assert made(2 * weights).host_copy_bytes == weights and "to sleep" in made(2 * weights).describe()
    assert made(2 * weights + MIB, host_kv_memory="1MiB").host_copy_bytes == weights
    for less in (
        made(2 * weights - 1), made(2 * weights + MIB - 1, host_kv_memory="1MiB"), made(GIB, CPU), made(GIB, sleeps=False),
    ):  # fmt: skip
        assert less.host_copy_bytes == 0 and "to sleep" not in less.describe()


def test_model_length(checkpoint: Checkpoint) -> None:
    assert model_length(EngineConfig.resolve(checkpoint.spec), checkpoint) == 128
    assert model_length(EngineConfig.resolve(checkpoint.spec, max_model_len=128), checkpoint) == 128
    with pytest.raises(ConfigError, match="max_model_len 129 is beyond the 128 positions of tiny"):
        plan(checkpoint, max_model_len=129)
    endless = replace(checkpoint, config=MambaConfig(num_hidden_layers=1))
    assert model_length(EngineConfig.resolve(checkpoint.spec), endless) == DEFAULT_CONTEXT
    assert model_length(EngineConfig.resolve(checkpoint.spec, max_model_len=10**6), endless) == 10**6


def test_a_cache_that_cannot_be_told(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModel, match="tiny: "):
        plan(replace(checkpoint, config=RwkvConfig(num_hidden_layers=1)))


SIZES = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}


def test_the_reserve_counts_the_largest_of_layers_that_differ_experts_and_workspaces() -> None:
    """The whole configuration refuses to tell what differs by layer."""
    config = Gemma4TextConfig(
        **SIZES, head_dim=16, global_head_dim=32, num_hidden_layers=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = config.head_dim
    expected = 10 * (4 * 64 + 3 * 100 + 2 * 32 * (4 + 4)) * 2 + 3 * 1000 * 10
    assert working_reserve_bytes(config, 10, 3, "bfloat16", on_cpu=True) == expected
    config = MixtralConfig(**SIZES, num_experts_per_tok=2)
    expected = 10 * (4 * 64 + 3 * 200 + 2 * 16 * (4 + 4)) * 2 + 3 * 1000 * 10
    assert working_reserve_bytes(config, 10, 3, "bfloat16", on_cpu=True) == expected
    assert working_reserve_bytes(config, 10, 3, "bfloat16", on_cpu=False) == expected + CUDA_WORKSPACE_BYTES
    # As Gemma 4 calls it, and with experts for text and for images, as in ERNIE 4.5 VL.
    others = SimpleNamespace(**SIZES, top_k_experts=3, moe_intermediate_size=[40, 20])
    expected = 10 * (4 * 64 + 3 * 3 * 40 + 2 * 16 * (4 + 4)) * 2 + 3 * 1000 * 10
    assert working_reserve_bytes(others, 10, 3, "bfloat16", on_cpu=True) == expected


LLAMA_8B = Geometry(tuple([LayerShape(8, 128, 128)] * 32), 16, "bfloat16", granule_bytes=2 * MIB)  # 2 MiB a block


@pytest.mark.parametrize(
    ("device", "free", "reserve", "max_seqs", "max_model_len", "expected"),
    [
        (GPU, 100 * GIB, 10 * GIB, 256, 131072, 81 * GIB),  # 90 % of what is left
        (GPU, 100 * GIB, 10 * GIB, 4, 8192, 4 * GIB + 32 * MIB),  # no more than can be used
        (GPU, 10 * GIB, GIB, 256, 69632, 8.5 * GIB + 32 * MIB),  # one sequence, although that is more than 90 %
        (GPU, 10 * GIB, GIB, 256, 131072, 8 * GIB + 96 * MIB),  # which does not fit: 90 %, whole extents of 32 MiB
        (CPU, 100 * GIB, GIB, 256, 4096, GIB),
        (CPU, 2 * GIB, GIB // 4, 256, 2048, GIB // 2),  # a quarter
        (CPU, 2 * GIB, GIB // 4, 256, 8192, GIB + 32 * MIB),  # one sequence
        (CPU, 2 * GIB, GIB, 256, 8192, GIB // 2),  # which does not fit beside the reserve
        (CPU, -5, GIB, 256, 8192, 0),
    ],
)
def test_automatic_pool(
    device: torch.device, free: int, reserve: int, max_seqs: int, max_model_len: int, expected: int
) -> None:
    geometry, num_blocks = auto_pool(LLAMA_8B, device is CPU, free, reserve, max_seqs, max_model_len)
    assert geometry.bytes_for_blocks(num_blocks) == expected


@given(
    heads=st.integers(1, 16), dim=st.integers(1, 160), layers=st.integers(1, 40),
    block_size=st.sampled_from([1, 16, 24, 256]), gpu=st.booleans(), free=st.integers(0, 1 << 38),
    reserve=st.integers(0, 1 << 34), max_seqs=st.integers(1, 300), max_model_len=st.integers(2, 200_000),
)  # fmt: skip
def test_rules_of_the_automatic_pool(
    heads: int, dim: int, layers: int, block_size: int, gpu: bool, free: int, reserve: int, max_seqs: int, max_model_len: int
) -> None:
    geometry = Geometry((LayerShape(heads, dim, dim),) * layers, block_size, "float16", 2 * MIB if gpu else 4096)
    fitted, num_blocks = auto_pool(geometry, not gpu, free, reserve, max_seqs, max_model_len)
    kv_bytes = fitted.bytes_for_blocks(num_blocks)
    room, per_sequence = max(0, free - reserve), geometry.blocks_for_tokens(max_model_len)
    fits = pool_geometry(geometry, kv_bytes or 1)
    assert 0 <= kv_bytes <= max(room, 0 if gpu else min(free // 4, GIB))
    if kv_bytes and gpu:
        assert kv_bytes <= 0.9 * room or kv_bytes <= 1.5 * (1 + per_sequence) * geometry.block_stride + 32 * MIB
    one_sequence = (1 + per_sequence) * geometry.block_stride
    if one_sequence * 1.5 + fits.extent_bytes + 32 * MIB <= room:  # the slack: padding and whole extents
        blocks = kv_bytes // geometry.payload_bytes
        assert blocks >= 1 + per_sequence
    assert kv_bytes <= 1.5 * max_seqs * one_sequence + 32 * MIB + fits.extent_bytes


@given(heads=st.integers(1, 16), dim=st.integers(1, 160), layers=st.integers(1, 40), kv_bytes=st.integers(1, 1 << 36))
def test_pools_round_down_by_little(heads: int, dim: int, layers: int, kv_bytes: int) -> None:
    geometry = Geometry((LayerShape(heads, dim, dim),) * layers, 16, "bfloat16")
    fitted = pool_geometry(geometry, kv_bytes)
    used = fitted.bytes_for_blocks(fitted.blocks_for_bytes(kv_bytes))
    assert 0 <= kv_bytes - used < max(kv_bytes / 32 + 1, fitted.extent_bytes)
    assert fitted.blocks_per_extent == 1 or kv_bytes // fitted.extent_bytes >= 32 or fitted.extent_bytes <= 4096


def test_planning_reads_no_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`pagetide plan` must not read weights: here they are gone once the headers were seen."""
    weights = checkpoint.weights.paths[0]
    hidden = weights.rename(tmp_path / "away")
    try:
        assert plan(checkpoint).sequences_that_fit > 0
    finally:
        hidden.rename(weights)
