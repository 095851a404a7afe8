"""Engines put together from a model in memory, without files: exact pool sizes, and logits that can be looked at."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from pagetide import LLM
from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import FoundLayer, Geometry
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.state_tables import tables_for
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.attention.gathered import attends_by_itself, find_cached, is_installed
from pagetide.engine.attention.gathered import install as attend_by_sequence
from pagetide.engine.attention.interface import NAME, register
from pagetide.engine.attention.latent import attend_to_latents
from pagetide.engine.attention.states import find_layers, install, may_have_states
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.core import EngineCore
from pagetide.engine.execution.host_pool import HostPool
from pagetide.engine.execution.memory_operations import MemoryExecutor
from pagetide.engine.execution.row_states import RowStates
from pagetide.engine.execution.runner import ModelRunner
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

POISON = 0xFF  # as bytes: NaN in floating types, scales among them


def step(llm: LLM) -> None:
    """Run a step, though no caller waits for one."""
    llm._engine_thread.ask(llm._engine_thread.run_with_engine, lambda engine: llm._manager.step())


class AlwaysSwap(SwapCost):
    """Swapping is worth it, whatever a busy machine takes for it."""

    def swap_s(self, num_blocks: int) -> float:
        return 0.0

    def observe(self, plan: Plan, result: Result) -> None:
        pass


def swap_whatever_it_costs(scheduler: Scheduler) -> None:
    """Let an engine that was built with a measured cost swap as if it were free."""
    scheduler.state.cost = AlwaysSwap(1, 1)


def found_layers(model: Any, tokens: torch.Tensor) -> tuple[FoundLayer, ...]:
    """What the model's layers hand to the cache, where its configuration does not tell."""
    if may_have_states(type(model)):
        return find_layers(model, tokens)[0]
    return find_cached(model, tokens) if attends_by_itself(model) else ()


def core_over(
    model: Any, storage: Storage, limits: Limits, *, pool: BlockAllocator, device: str = "cpu", kernel: Any = None,
    cost: SwapCost | None = None, cache: dict[str, Any], arena: Any = None, host: HostPool | None = None,
    overlaps: bool = False, **runner: Any,
) -> EngineCore:  # fmt: skip
    """An engine's core over memory, with a clock that counts; `cache` is for its manager, and `runner` for its runner."""
    geometry, num_rows, num_tokens = storage.geometry, limits.num_rows, limits.max_model_len
    register()
    if not is_installed(model):
        model.set_attn_implementation(NAME)
    manager = CacheManager(tables_for(geometry.groups, pool, geometry.block_size, num_rows, num_tokens), **cache)
    sampler, kernel = Sampler(num_rows, model.config.get_text_config().vocab_size, device), kernel or TorchKernel()
    rows = RowStates(sampler, num_rows, num_tokens)
    begun = ModelRunner(model, kernel, rows, MemoryExecutor(storage, arena, host), **runner)
    begun.overlaps = overlaps
    return EngineCore(Scheduler(manager, limits, cost), begun, clock=itertools.count().__next__)


class TinyEngine:
    """One model over a pool of `usable` blocks filled with NaN, so that anything read before it is written shows.

    A block counts for the tokens of all layers: with groups of layers there are more blocks and slots, as many as hold as
    much of sequences of 160 tokens.

    With `host_slots` there is a host tier of so many blocks; `cost` None: it is always worth it. Where it `overlaps`, steps are
    begun before the result of the one before them is in.
    """

    def __init__(
        self, model: Any, *, usable: int, block_size: int = 16, max_seqs: int = 16, max_step_tokens: int = 2048,
        max_chunk_tokens: int | None = None, max_model_len: int = 512, forecast: bool = False, device: str = "cpu",
        caching: bool = False, host_slots: int = 0, cost: SwapCost | None = None, overlaps: bool = False,
        kv_dtype: str = "float32", elastic: bool = False,
    ) -> None:  # fmt: skip
        tokens = torch.arange(1, 6)[None]
        geometry = Geometry.from_config(
            model.config, block_size=block_size, dtype=kv_dtype, max_tokens=max_model_len, found=found_layers(model, tokens)
        ).with_extents(4096)
        self.mixers = install(model, geometry, tokens)
        attend_by_sequence(model, geometry, tokens)
        per_slot = geometry.blocks_for_tokens(160) / geometry.columns_for_tokens(160)
        longest = geometry.blocks_for_tokens(min(max_model_len, usable * block_size))
        usable, host_slots = max(math.ceil(usable * per_slot), longest), math.ceil(host_slots * per_slot)
        attend_to_latents(model, geometry)
        num_extents = geometry.extents_for_blocks(usable + 1)
        if device == "cpu":
            self.arena = HostArena(num_extents, geometry.extent_bytes)
            self.arena.map(range(num_extents))
        else:
            self.arena = TensorArena(num_extents, geometry.extent_bytes, device)
        storage = Storage(geometry, self.arena, device)
        pool = BlockAllocator(storage.num_blocks, blocks_per_extent=geometry.blocks_per_extent) if elastic else None
        pool = pool or BlockAllocator(usable + 1)
        storage.blocks[1:] = POISON
        limits = Limits(max_seqs, max_step_tokens, max_model_len, max_chunk_tokens, forecast)
        cache = {"hasher": PrefixHasher(block_size) if caching else None, "host_slots": host_slots}
        # Extents of one block each, so that there are just as many slots as asked for.
        one = geometry.with_extents(geometry.payload_bytes)
        self.host = HostPool(one, (host_slots + 1) * one.extent_bytes) if host_slots else None
        self.core = core_over(
            model, storage, limits, pool=pool, arena=self.arena if elastic else None, device=device, host=self.host,
            overlaps=overlaps, cache=cache, cost=cost or AlwaysSwap(geometry.payload_bytes, block_size),
        )  # fmt: skip
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def preemptions(self) -> int:
        return self.core.scheduler.stats.preemptions

    def watch_logits(self) -> None:
        """From now on keep the logits behind every sampled position, by (request id, position)."""
        sampler, rows = self.core.runner.sampler, self.core.scheduler.rows
        sample = sampler.sample

        def watched(at_rows, positions, logits):
            for i, row in enumerate(at_rows):
                self.logits[rows.request_ids[row], int(positions[i])] = logits[i].clone()
            return sample(at_rows, positions, logits)

        sampler.sample = watched

    def add(self, name: str, prompt: list[int], sampling: Sampling, **more: Any) -> None:
        self.core.add(Request(name, np.array(prompt, np.int32), sampling, **more))

    def add_all(self, prompts: list[list[int]], sampling: Sampling | list[Sampling]) -> None:
        """Requests r0, r1, ..., in this order."""
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            self.add(f"r{i}", prompt, one, arrival=float(i))

    def run(self, most: int = 20_000) -> dict[str, Finished]:
        """Step until all is done, checking invariants; the ends by request id."""
        ends: dict[str, Finished] = {}
        for _ in range(most):
            if not self.core.has_work:
                counts = self.core.scheduler.cache.pool.counts()
                assert counts.live == 0, "blocks are left"
                return ends
            ends.update({end.request_id: end for end in self.core.step().finished})
            self.core.scheduler.check_invariants()
        raise AssertionError(f"work is left after {most} steps")

    def generate(self, prompts: list[list[int]], sampling: Sampling | list[Sampling]) -> list[list[int]]:
        """The tokens of each prompt; all must end by themselves."""
        self.add_all(prompts, sampling)
        ends = self.run()
        assert {end.reason for end in ends.values()} <= {"length", "stop"}, [end.error for end in ends.values()]
        return [ends[f"r{i}"].token_ids.tolist() for i in range(len(prompts))]


def prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, n).tolist() for n in lengths]


def blocks_needed(inputs: list[list[int]], new: int, block_size: int) -> int:
    """Blocks that all prompts come to hold together."""
    return sum(-(-(len(p) + new - 1) // block_size) for p in inputs)


def plain(model: Any, inputs: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens by transformers' `generate`, prompt by prompt, with its own attention."""
    model.set_attn_implementation("eager")
    out = []
    for prompt in inputs:
        ids = model.generate(torch.tensor([prompt], device=model.device), max_new_tokens=new, do_sample=False, pad_token_id=0)
        out.append(ids[0, len(prompt) :].tolist())
    return out
