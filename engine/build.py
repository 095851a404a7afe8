"""Puts an engine together, from its configuration to a core that can step, and takes it apart again."""

from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..allocator.arena import Arena
from ..allocator.errors import OutOfDeviceMemory
from ..allocator.host_arena import HostArena
from ..cache.manager import CacheManager
from ..cache.storage import Storage, TensorArena
from ..monitor.units import format_bytes
from ..scheduler.request import SamplingParams
from ..scheduler.scheduler import Limits, Scheduler
from .attention.interface import NAME, register
from .attention.torch_kernel import TorchKernel
from .checkpoint import Checkpoint
from .config import EngineConfig
from .core import EngineCore
from .encoder import Encoder
from .errors import NotEnoughMemory
from .linears import pack_linears
from .loader import choose_device, choose_dtype, load_model, load_tokenizer
from .planning import MemoryPlan, plan_memory
from .probe import probe
from .runner import Runner
from .sampler import Sampler

log = logging.getLogger(__name__)
_loading = threading.Lock()  # while it loads, transformers changes settings that are the process's


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What `LLM` works with. `close` gives the memory back."""

    core: EngineCore
    encoder: Encoder
    plan: MemoryPlan
    arena: Arena
    sampling: SamplingParams  # of the models file over the generation config
    eos_token_ids: tuple[int, ...]

    def stats(self) -> dict[str, Any]:
        """What the engine holds and did. Plain data."""
        scheduler = self.core.scheduler
        counters, counts = scheduler.stats, scheduler.cache.counts()
        return {
            "model": self.plan.model,
            "device": self.plan.device,
            "dtype": self.plan.dtype,
            "attention": self.core.runner.kernel.name,
            "max_model_len": self.plan.max_model_len,
            "weights_bytes": self.plan.weights_bytes,
            "kv_bytes": self.arena.mapped_bytes,
            "kv_bytes_per_token": self.plan.kv_bytes_per_token,
            "block_size": self.plan.block_size,
            "blocks": {"usable": scheduler.cache.usable, **counts._asdict()},
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "steps": counters.steps,
            "computed_tokens": counters.computed_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "preemptions": counters.preemptions,
            "peak_used_blocks": counters.peak_used_blocks,
        }

    def close(self) -> None:
        """Give back the KV memory, and the weights as far as nobody else holds them. Idempotent."""
        self.arena.close()
        self.core.runner.close()
        gc.collect()  # models are full of reference cycles
        if self.plan.device != "cpu":
            torch.cuda.empty_cache()


def build(config: EngineConfig) -> Engine:
    """Load the model, check that it can be served, map the KV pool. Nothing stays allocated when it raises.

    Raises what `Checkpoint.open`, `plan_memory`, `load_model`, `load_tokenizer` and `probe` raise.
    """
    began = time.perf_counter()
    with _loading:
        checkpoint, device, dtype, plan = _planned(config, None)  # refuses what does not fit, before a weight is read
        tokenizer = load_tokenizer(config.model)
        model = load_model(checkpoint, device, dtype)
        if device.type == "cpu":
            pack_linears(model)
        probe(model, plan.geometry, max_length=plan.max_model_len)
        register()
        model.set_attn_implementation(NAME)
    arena = _map_pool(plan, device)
    core = _core(model, Storage(plan.geometry, arena, device), plan, config, checkpoint.vocab_size)
    log.info(
        "%s as %s on %s: %s of KV in %d blocks of %d tokens, attention by %s, ready in %.1f s",
        plan.model, plan.dtype, plan.device, format_bytes(plan.kv_bytes), plan.num_blocks, plan.block_size,
        core.runner.kernel.name, time.perf_counter() - began,
    )  # fmt: skip
    encoder = Encoder(tokenizer, checkpoint.vocab_size, checkpoint.bos_token_id)
    return Engine(core, encoder, plan, arena, checkpoint.default_sampling, checkpoint.eos_token_ids)


def plan_only(config: EngineConfig, context: int | None = None) -> MemoryPlan:
    """What `build` would take, counted in sequences of `context` tokens. Reads no weights, takes no memory."""
    with _loading:
        return _planned(config, context)[-1]


def _planned(config: EngineConfig, context: int | None) -> tuple[Checkpoint, torch.device, torch.dtype, MemoryPlan]:
    checkpoint = Checkpoint.open(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint, device)
    return checkpoint, device, dtype, plan_memory(config, checkpoint, device, dtype, context=context)


def _map_pool(plan: MemoryPlan, device: torch.device) -> Arena:
    """An arena of the plan's size, all of it mapped."""
    geometry = plan.geometry
    try:
        if device.type != "cpu":
            return TensorArena(plan.num_extents, geometry.extent_bytes, device)
        arena = HostArena(plan.num_extents, geometry.extent_bytes)
        arena.map(range(plan.num_extents))
        return arena
    except OutOfDeviceMemory as error:  # someone else took the bytes since they were counted
        what = f"the KV pool of {plan.model} on {plan.device}"
        remedy = "another process took memory meanwhile: try again, or ask for less kv_memory"
        raise NotEnoughMemory(error.asked_bytes, error.free_bytes, what, remedy) from error


def _core(model: Any, storage: Storage, plan: MemoryPlan, config: EngineConfig, vocab_size: int) -> EngineCore:
    limits = Limits(config.max_seqs, config.max_step_tokens, plan.max_model_len, config.max_chunk_tokens)
    cache = CacheManager(plan.num_blocks, plan.block_size, limits.seats, plan.max_model_len)
    runner = Runner(
        model,
        storage,
        TorchKernel(),
        Sampler(limits.seats, vocab_size, storage.device),
        num_rows=limits.seats,
        max_tokens=cache.max_tokens,
    )
    return EngineCore(Scheduler(cache, limits), runner)
