"""Divided models under one scheduler, with the shards in threads of this process: what `TinyEngine` is for one device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from engines import POISON, AlwaysSwap, TinyEngine
from families import tiny
from shard_threads import ThreadGroup, run_in_threads, thread_groups
from state_families import STATE_FAMILIES

from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.state_tables import tables_for
from pagetide.cache.storage import Storage
from pagetide.engine.attention.interface import NAME, register
from pagetide.engine.attention.latent import attend_to_latents
from pagetide.engine.attention.states import install
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.collectives.sharded_modules import gather_on_first
from pagetide.engine.config import resolve_model
from pagetide.engine.core import EngineCore
from pagetide.engine.execution.host_pool import HostPool
from pagetide.engine.execution.memory_operations import MemoryExecutor
from pagetide.engine.execution.row_states import RowStates
from pagetide.engine.execution.runner import ModelRunner
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.division import Division
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.meta_models import found_layers
from pagetide.engine.sampling.follower import TokenFollower
from pagetide.engine.sampling.sampler import Sampler
from pagetide.engine.shards.sharded_arena import ResizeOutcome, ShardedArena
from pagetide.engine.shards.sharded_runner import joined_results
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

CPU = torch.device("cpu")
_loading = threading.Lock()

_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 163}
_ROUTED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [1],
}  # fmt: skip
_SLIDING = {"intermediate_size": 64, "num_hidden_layers": 4, "sliding_window": 8, "pad_token_id": 0}
# What is divided: by name the family, and what goes on top of its configuration. Vocabulary and width divide unevenly.
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_HEADS, "intermediate_size": 70}),
    "llama-mqa": ("llama", {**_HEADS, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {**_HEADS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", _HEADS),
    "mistral": ("mistral", _HEADS),
    "gemma2": ("gemma2", {**_HEADS, "tie_word_embeddings": True, "final_logit_softcapping": 30.0}),
    "qwen3_moe": ("qwen3_moe", {**_HEADS, **_ROUTED, "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 64}),
    "mixtral": ("mixtral", _HEADS),
    "gemma3": ("gemma3_text", {**_HEADS, "tie_word_embeddings": True}),
    "phi3": ("phi3", _HEADS),
    "deepseek_v3": ("deepseek_v3", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "cohere2": ("cohere2", {**_HEADS, **_SLIDING}),
    "qwen3_5": ("qwen3_5_text", {**STATE_FAMILIES["qwen3_5_text"], **_HEADS}),
}


def undivided(name: str, **over: Any) -> Any:
    """A tiny model of DIVIDED: the same for each call."""
    family, config = DIVIDED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some parameters begin with random values
        return tiny(family, **{**config, **over})


def saved(name: str, folder: Path, **over: Any) -> tuple[Any, Checkpoint]:
    """The model of `undivided`, and its checkpoint, saved in `folder`."""
    model = undivided(name, **over)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model, Checkpoint.open(resolve_model(folder))


def geometry_of(checkpoint: Checkpoint, block_size: int = 16, dtype: str = "float32", max_tokens: int = 512) -> Geometry:
    """The layout of the whole model's blocks."""
    return Geometry.from_config(
        checkpoint.config, block_size=block_size, dtype=dtype, latents=checkpoint.caches_latents, max_tokens=max_tokens,
        found=found_layers(checkpoint, getattr(torch, dtype)),
    )  # fmt: skip


def divided(
    checkpoint: Checkpoint, size: int, dtype: torch.dtype = torch.float32, **how: Any
) -> tuple[Division, list[ThreadGroup], list[Any]]:
    """The division of a model, and its shards, each with a group for a thread of its own."""
    division = Division.of(checkpoint, size, geometry_of(checkpoint).layers)
    groups = thread_groups(size)
    if how.get("quantization") is not None:  # they compute while they are loaded

        def load(group: ThreadGroup) -> Any:
            return load_model(checkpoint, CPU, dtype, division=division, group=group, **how)

        return division, groups, run_in_threads([lambda group=group: load(group) for group in groups], groups)
    with _loading:
        return division, groups, [load_model(checkpoint, CPU, dtype, division=division, group=g, **how) for g in groups]


class ShardArena(HostArena):
    """One shard's memory: NaN when it is mapped. It refuses to map while `full`."""

    full = False

    def map(self, extents: Sequence[int]) -> None:
        if self.full:
            raise OutOfDeviceMemory(len(extents) * self.extent_bytes, 0)
        super().map(extents)
        view = torch.frombuffer(self.buffer, dtype=torch.uint8).view(self.num_extents, -1)
        view[list(extents)] = POISON


class ThreadedRunner:
    """Runs the plans of a scheduler on the runners of all shards, each in a thread."""

    lost = graphs = None

    def __init__(self, runners: list[ModelRunner], groups: list[ThreadGroup], arena: ShardedArena) -> None:
        self.runners, self.groups, self.arena = runners, groups, arena
        self.overlaps = runners[0].overlaps

    @property
    def sampler(self) -> Sampler:
        return self.runners[0].sampler

    @property
    def mapped_extents(self) -> frozenset[int]:
        return self.arena.mapped_extents

    def on_all(self, function: Callable[[ModelRunner], Any]) -> list[Any]:
        """What `function` returns for the runner of each shard."""
        return run_in_threads([lambda runner=runner: function(runner) for runner in self.runners], self.groups)

    def begin(self, plan: Plan) -> _ThreadedStep:
        for rank, runner in enumerate(self.runners):
            if undo := self.arena.undo(rank):
                runner.arena.unmap(undo)
                self.arena.undone(rank, undo)
        if plan.resize:
            assert self.arena.expect(plan.resize) is None
        return _ThreadedStep(self, plan, self.on_all(lambda runner: runner.begin(plan)))


class _ThreadedStep:
    def __init__(self, runner: ThreadedRunner, plan: Plan, steps: list[Any]) -> None:
        self.runner, self.plan, self.steps = runner, plan, steps

    def wait(self) -> Result:
        results = run_in_threads([step.wait for step in self.steps], self.runner.groups)
        joined = joined_results(results)
        if not self.plan.resize:
            return joined
        outcomes = [ResizeOutcome(tuple(r.mapped.tolist()), tuple(r.unmapped.tolist()), r.refused) for r in results]
        return self.runner.arena.settle(self.plan.resize, outcomes).applied_to(joined)


class ShardedTinyEngine(TinyEngine):
    """A model of a checkpoint over pools of `usable` blocks, one for each shard."""

    def __init__(
        self, checkpoint: Checkpoint, size: int, *, usable: int, block_size: int = 4, max_seqs: int = 16,
        max_step_tokens: int = 2048, max_model_len: int = 512, caching: bool = False, host_slots: int = 0,
        overlaps: bool = False, kernel: Callable[[], Any] = TorchKernel,
    ) -> None:  # fmt: skip
        division, groups, models = divided(checkpoint, size)
        whole = geometry_of(checkpoint, block_size, max_tokens=max_model_len)
        geometry = division.geometry(whole).with_extents(4096)
        limits = Limits(max_seqs, max_step_tokens, max_model_len, None, False)
        num_extents = geometry.extents_for_blocks(usable + 1)
        one = geometry.with_extents(geometry.payload_bytes)
        register()
        runners: list[ModelRunner] = []
        per = geometry.blocks_per_extent
        pool = BlockAllocator(num_extents * per, blocks_per_extent=per, mapped=range(num_extents))
        tables = tables_for(geometry.groups, pool, block_size, limits.num_rows, max_model_len)
        cache = CacheManager(tables, PrefixHasher(block_size) if caching else None, host_slots=host_slots)
        tokens = torch.arange(1, 6)[None]
        run_in_threads([lambda model=model: install(model, geometry, tokens) for model in models], groups)
        for group, model in zip(groups, models, strict=True):
            attend_to_latents(model, geometry)
            model.set_attn_implementation(NAME)
            gather_on_first(model)
            arena = ShardArena(num_extents, geometry.extent_bytes)
            arena.map(range(num_extents))
            storage = Storage(geometry, arena, "cpu")
            storage.clear([0])
            host = HostPool(one, (host_slots + 1) * one.extent_bytes) if host_slots else None
            vocab = checkpoint.vocab_size
            sampler = TokenFollower() if group.rank else Sampler(limits.num_rows, vocab)
            rows, memory = RowStates(sampler, limits.num_rows, max_model_len), MemoryExecutor(storage, arena, host)
            runner = ModelRunner(model, kernel(), rows, memory, group=group)
            runner.overlaps = overlaps
            runners.append(runner)
        arena = ShardedArena(num_extents, geometry.extent_bytes, None, range(num_extents), size)
        threaded: Any = ThreadedRunner(runners, groups, arena)
        cost = AlwaysSwap(geometry.payload_bytes, block_size)
        self.runner = threaded
        self.core = EngineCore(Scheduler(cache, limits, cost), threaded, clock=itertools.count().__next__)
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
