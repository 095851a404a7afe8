"""Builds an engine from its configuration, and tears it down."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..allocator.arena import Arena
from ..allocator.cuda_arena import CudaArena
from ..allocator.errors import DriverUnavailable, GrantExceeded, OutOfDeviceMemory
from ..allocator.host_arena import HostArena
from ..allocator.lease import Lease
from ..allocator.leased_arena import LeasedArena
from ..cache.cache_events import CacheEventLog
from ..cache.manager import CacheManager
from ..cache.prefix_hash import PrefixHasher
from ..cache.storage import Storage, TensorArena
from ..monitor.host_memory import free_host_bytes
from ..monitor.units import format_bytes
from ..scheduler.cost import SwapCost
from ..scheduler.outcome import STEP_TOKEN_BOUNDS
from ..scheduler.request import SamplingParams
from ..scheduler.scheduler import Limits, Scheduler
from .attention.backends import AttentionSpec
from .attention.choose import Site, WatchedKernel, check, choose
from .attention.context import AttentionKernel
from .attention.interface import register
from .config import EngineConfig
from .core import EngineCore
from .errors import ConfigError, NotEnoughMemory
from .execution.graphs import CudaRecorder, sizes_for
from .execution.host_pool import HostPool
from .execution.runner import ModelRunner
from .loading.checkpoint import Checkpoint
from .loading.fusion import fuse
from .loading.hub_kernels import no_hub_kernels
from .loading.latent_attention import attend_to_latents
from .loading.linears import bound_primitives, is_native
from .loading.loader import choose_device, choose_dtype, load_model, load_tokenizer
from .loading.probe import probe
from .loading.quantized_kv_check import TOKENS, calibration_tokens, check_quantized_kv
from .loading.quantized_linears import check_native, rows_as_they_are
from .memory.engine_memory import READY_LIMIT_BYTES, EngineMemory
from .memory.lease_holder import HEAP_BYTES, LeaseHolder, Sharing, acquire_lease
from .memory.planning import MemoryPlan, plan_memory
from .process.cpu_threads import CpuThreads
from .process.memory_usage import trim
from .sampling.sampler import Sampler
from .text.encoder import Encoder

if TYPE_CHECKING:
    from .self_check.report import CheckReport

log = logging.getLogger(__name__)
_loading = threading.Lock()  # transformers changes process-wide settings while it loads


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a loaded model that do not change. `sampling` holds what requests leave open."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    block_size: int  # tokens of a KV block
    device: str
    dtype: str
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_tables: int = 1  # block tables of a sequence
    layout: str = ""  # how weights, K and V are stored: engines that differ in it may compute other tokens


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The parts of a running engine. `close` frees the memory."""

    core: EngineCore
    encoder: Encoder
    plan: MemoryPlan
    arena: Arena
    holder: LeaseHolder
    sharing: Sharing | None
    sampling: SamplingParams  # defaults: the models file's over the generation config's
    eos_token_ids: tuple[int, ...]
    self_check: CheckReport | None  # on CUDA, unless switched off

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model."""
        plan = self.plan
        return ModelFacts(
            plan.max_model_len, self.encoder.vocab_size, plan.block_size, plan.device, plan.dtype, self.sampling,
            self.eos_token_ids, self.encoder.bos_token_id, plan.geometry.num_tables,
            f"weights {plan.quantization or plan.dtype}, KV {plan.kv_cache_dtype}",
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The engine's state and counters as plain data."""
        scheduler = self.core.scheduler
        counters, counts = scheduler.stats, scheduler.cache.pool.counts()
        return {
            "model": self.plan.model,
            "device": self.plan.device,
            "dtype": self.plan.dtype,
            "quantization": self.plan.quantization,
            "kv_cache_dtype": self.plan.kv_cache_dtype,
            "attention": self.core.runner.kernel.name,
            "overlap": self.core.runner.overlaps,
            "cuda_graphs": [] if self.core.runner.graphs is None else list(self.core.runner.graphs.sizes),
            "max_model_len": self.plan.max_model_len,
            "weights_bytes": self.plan.weights_bytes,
            "kv_bytes": self.arena.mapped_bytes,
            "kv_bytes_per_token": self.plan.kv_bytes_per_token,
            "block_size": self.plan.block_size,
            "blocks": {
                "usable": scheduler.cache.pool.usable,
                "limit": scheduler.pool.limit_blocks,
                **counts._asdict(),
            },
            "extents": {"mapped": len(self.arena.mapped_extents), "total": self.arena.num_extents},
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "waiting_for_others": scheduler.num_dependent,
            "steps": counters.steps,
            "step_tokens": {"up_to": list(STEP_TOKEN_BOUNDS), "steps": list(counters.step_tokens)},
            "prompt_tokens": counters.prompt_tokens,
            "cached_prompt_tokens": counters.cached_prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "computed_tokens": counters.computed_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "preemptions": counters.preemptions,
            "forks": counters.forks,
            "peak_used_blocks": counters.peak_used_blocks,
            "prefix_cache": None
            if not scheduler.cache.index.capacity
            else {
                "lookups": counters.prefix_lookups.number,
                "lookup_tokens": counters.prefix_lookups.tokens,
                "hit_tokens": counters.prefix_lookups.hit_tokens,
                "resumed": {
                    "lookups": counters.resumed_lookups.number,
                    "lookup_tokens": counters.resumed_lookups.tokens,
                    "hit_tokens": counters.resumed_lookups.hit_tokens,
                },
                "findable_blocks": scheduler.cache.index.num_nodes,
                "max_cached_blocks": scheduler.cache.swapping.max_cached_blocks,
            },
            "host_tier": self._host_tier(),
            "memory": None if self.core.memory is None else self.core.memory.to_dict(),
            "self_check": self._self_check(),
        }

    def _self_check(self) -> dict[str, Any]:
        if self.self_check is not None:
            return self.self_check.to_dict()
        reason = "the device is a CPU" if self.plan.device == "cpu" else "self_check=False"
        return {"state": "not run", "reason": reason}

    def _host_tier(self) -> dict[str, Any] | None:
        tier, pool = self.core.scheduler.cache.host, self.core.runner.host
        if pool is None:
            return None
        block_bytes, counters = self.plan.geometry.payload_bytes, self.core.scheduler.stats
        return {
            "used_blocks": tier.num_used,
            "total_blocks": tier.num_slots,
            "bytes": pool.mapped_bytes,
            "swapped_out_bytes": counters.demoted_blocks * block_bytes,
            "swapped_in_bytes": counters.promoted_blocks * block_bytes,
        }

    def close(self) -> None:
        """Free the KV memory, and the weights unless they are referenced elsewhere. Idempotent."""
        with ExitStack() as last:  # runs every callback, even if one raises
            last.callback(_collect, self.plan.device)
            last.callback(self.core.runner.close)
            if self.core.memory is not None:
                last.callback(self.core.memory.close)
            if self.sharing is not None:
                last.callback(self.sharing.close)
            last.callback(self.holder.close)
            last.callback(self.arena.close)


def _collect(device: str) -> None:
    gc.collect()  # models are full of reference cycles
    trim(torch.device(device))


def build(config: EngineConfig) -> Engine:
    """Load the model, check that it can be served, and map the KV pool. Nothing stays allocated if it raises.

    Raises what `Checkpoint.open`, `plan_memory`, `load_model`, `load_tokenizer` and `probe` raise.
    """
    began = time.perf_counter()
    with _loading, no_hub_kernels():
        checked = _self_check(config)  # before this process uses the device
        faults = {} if checked is None else checked.faults
        # Raises if the model does not fit, before weights are read.
        checkpoint, device, dtype, plan = _planned(config, None)
        check(config.attention, Site.of(device, dtype, plan.geometry), plan.geometry, faults)
        holder, sharing = LeaseHolder(device, plan.weights_bytes), None
        try:
            sharing = acquire_lease(config, plan, holder)
            return _build(config, checkpoint, dtype, plan, holder, sharing, checked, began)
        except BaseException:
            holder.close()
            if sharing is not None:
                sharing.close()
            raise


def _self_check(config: EngineConfig) -> CheckReport | None:
    """The report of the device's self-check; None on a CPU or if it is switched off."""
    device = choose_device(config.device)
    if device.type != "cuda" or not config.self_check:
        return None
    from .self_check.check import at_start

    return at_start(device.index)


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: MemoryPlan,
    holder: LeaseHolder,
    sharing: Sharing | None,
    checked: CheckReport | None,
    began: float,
) -> Engine:
    device = holder.device
    faults = {} if checked is None else checked.faults
    if device.type == "cpu":
        bound_primitives()
    tokenizer = load_tokenizer(config.model)
    model = load_model(checkpoint, device, dtype, quantization=config.quantization, pack=True)
    with rows_as_they_are():
        if device.type == "cpu" and not fuse(model).computes and config.quantization is None:
            log.warning("linear layers of %s stay as they are: it does not compute with packed ones", plan.model)
            del model
            model = load_model(checkpoint, device, dtype)
        attend_to_latents(model, plan.geometry)
        specs = _check_attention(model, plan, tokenizer, checkpoint)
    kernel = choose(config.attention, Site.of(device, dtype, plan.geometry), specs, faults=faults)
    host = _host_pool(plan, config, pins="swaps" not in faults)
    arena, first = _open_pool(plan, holder, None if sharing is None else sharing.lease, elastic="pool" not in faults)
    holder.arena, holder.host = arena, host
    encoder = Encoder(tokenizer, checkpoint.vocab_size, checkpoint.bos_token_id, plan.max_model_len)
    config = replace(config, cuda_graphs=config.cuda_graphs and "graphs" not in faults)
    core = _core(model, arena, Storage(plan.geometry, arena, device), plan, config, encoder, host, kernel)
    if not isinstance(arena, TensorArena):
        core.memory = EngineMemory(
            lambda: core.scheduler,
            arena,
            min_extents=plan.min_extents,
            base_bytes=lambda: holder.base_bytes,
            reserve_bytes=plan.reserve_bytes + (0 if sharing is None else HEAP_BYTES),
            weights_bytes=plan.weights_bytes,
            trim=lambda: _trim(core, device),
            tidy=(lambda: trim(device)) if device.type == "cpu" else None,
            lease=None if sharing is None else sharing.lease,
            idle_s=config.idle_s,
            host=host,
            host_is_device=device.type == "cpu",
        )
    log.info(
        "%s as %s on %s: %s of KV now, at most %s in %d blocks of %d tokens, attention by %s, ready in %.1f s",
        plan.model, plan.dtype, plan.device, format_bytes(first), format_bytes(plan.kv_bytes), plan.num_blocks,
        plan.block_size, core.runner.kernel.name, time.perf_counter() - began,
    )  # fmt: skip
    sampling, eos_token_ids = checkpoint.default_sampling, checkpoint.eos_token_ids
    return Engine(core, encoder, plan, arena, holder, sharing, sampling, eos_token_ids, checked)


def _check_attention(
    model: Any, plan: MemoryPlan, tokenizer: Any | None, checkpoint: Checkpoint
) -> Counter[AttentionSpec]:
    """Check that the model can be served over the plan's blocks, and set its attention to these.

    Returns what its layers need of a kernel, with their number. Raises UnsupportedModel.
    """
    watched = WatchedKernel()
    plain = replace(plan.geometry, dtype=plan.dtype)
    probe(model, plain, max_length=plan.max_model_len, kernel=watched)
    model.set_attn_implementation(register())
    if plan.geometry.has_scales:
        tokens = calibration_tokens(tokenizer, checkpoint.text_config, min(TOKENS, plan.max_model_len))
        check_quantized_kv(model, plain, plan.geometry, tokens, name=plan.model, kv_cache_dtype=plan.kv_cache_dtype)
    return watched.specs


def _trim(core: EngineCore, device: torch.device) -> None:
    """Free the caches of libraries and the buffers of the attention kernel."""
    core.runner.kernel.release_buffers()
    trim(device)


def plan_only(config: EngineConfig, context: int | None = None) -> MemoryPlan:
    """The memory plan of `build`, for sequences of `context` tokens. Reads no weights, allocates no memory."""
    with _loading:
        return _planned(config, context)[-1]


def _planned(config: EngineConfig, context: int | None) -> tuple[Checkpoint, torch.device, torch.dtype, MemoryPlan]:
    checkpoint = Checkpoint.open(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint, device)
    if config.quantization is not None:
        check_native(config.quantization, device)
    return checkpoint, device, dtype, plan_memory(config, checkpoint, device, dtype, context=context)


def _open_pool(plan: MemoryPlan, holder: LeaseHolder, lease: Lease | None, *, elastic: bool) -> tuple[Arena, int]:
    """Open an arena of the plan's size with the minimum extents mapped. Returns it and its mapped bytes.

    The arena does not work in the background until there is an `EngineMemory`: CUDA graphs are captured before that.
    """
    try:
        arena = _arena(plan, holder.device, elastic)
        if isinstance(arena, TensorArena):  # one fixed allocation
            return arena, arena.mapped_bytes
        if lease is not None:
            held = holder.base_bytes
            weights = min(held, plan.weights_bytes)
            lease.report({"weights": weights, "other": held - weights}, 0)
            arena = LeasedArena(arena, lease)
        arena.map(range(plan.min_extents))
        return arena, arena.mapped_bytes
    except (OutOfDeviceMemory, GrantExceeded) as error:  # another process took memory since it was counted
        free = error.free_bytes if isinstance(error, OutOfDeviceMemory) else error.granted_bytes
        what = f"the KV pool of {plan.model} on {plan.device}"
        remedy = "another process took memory meanwhile: try again, or ask for less kv_memory"
        raise NotEnoughMemory(error.asked_bytes, free, what, remedy) from error


def _arena(plan: MemoryPlan, device: torch.device, elastic: bool) -> Arena:
    """The device's elastic arena with nothing mapped.

    On CUDA it is one fixed allocation unless `elastic`, or if the driver cannot be called.
    """
    shape = (plan.num_extents, plan.geometry.extent_bytes)
    if device.type == "cpu":
        return HostArena(*shape)
    if device.type == "cuda" and elastic:
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            return CudaArena(*shape, index, ready_limit_bytes=READY_LIMIT_BYTES)
        except DriverUnavailable as error:
            log.warning("the KV pool cannot grow and shrink: %s", error)
    return TensorArena(*shape, device)


def _host_pool(plan: MemoryPlan, config: EngineConfig, *, pins: bool) -> HostPool | None:
    """The host tier's memory, not allocated yet. Raises NotEnoughMemory if the host has less free now; ConfigError."""
    asked = config.host_kv_memory
    if not asked:
        return None
    if asked > (free := free_host_bytes()):
        remedy = "ask for less host_kv_memory, or for none"
        raise NotEnoughMemory(asked, free, f"the host tier of {plan.model}", remedy)
    try:
        return HostPool(plan.geometry, asked, pins=pins)
    except ValueError as error:
        raise ConfigError(f"host_kv_memory: {error}") from error


def _record(runner: ModelRunner, num_rows: int) -> None:
    """Capture decode steps in CUDA graphs if kernel and model support it; otherwise log why not."""
    device = runner.storage.device
    if not runner.kernel.captures:
        log.info("decode steps are not captured in CUDA graphs: attention by %s cannot be", runner.kernel.name)
        return
    began = time.perf_counter()
    try:
        runner.record(sizes_for(num_rows), CudaRecorder(device))
    except Exception as error:  # of a library, or of a model that synchronizes with the device
        log.warning("decode steps are not captured in CUDA graphs: %s: %s", type(error).__name__, error)
        return
    finally:
        _collect(str(device))  # return memory to the driver for the pool
    assert runner.graphs is not None
    sizes, took = runner.graphs.sizes, time.perf_counter() - began
    log.info("decode steps of up to %d rows captured in %d CUDA graphs, in %.1f s", sizes[-1], len(sizes), took)


def _core(
    model: Any, arena: Arena, storage: Storage, plan: MemoryPlan, config: EngineConfig, encoder: Encoder,
    host: HostPool | None, kernel: AttentionKernel,
) -> EngineCore:  # fmt: skip
    limits = Limits(config.max_seqs, config.max_step_tokens, plan.max_model_len, config.max_chunk_tokens)
    elastic = not isinstance(arena, TensorArena)  # a TensorArena is one fixed allocation
    kept = config.prefix_cache_memory
    cache = CacheManager(
        plan.num_blocks, plan.block_size, limits.num_rows, plan.max_model_len, groups=plan.geometry.groups,
        blocks_per_extent=plan.geometry.blocks_per_extent if elastic else None,
        mapped=arena.mapped_extents if elastic else None,
        hasher=PrefixHasher(plan.block_size, config.prefix_hash_secret) if config.prefix_caching else None,
        max_cached_blocks=None if kept is None else kept // plan.geometry.block_stride,
        host_slots=0 if host is None else host.num_slots,
        events=CacheEventLog() if config.kv_events else None,
    )  # fmt: skip
    runner = ModelRunner(
        model,
        storage,
        kernel,
        Sampler(limits.num_rows, encoder.vocab_size, storage.device, encoder.constraints),
        num_rows=limits.num_rows,
        max_tokens=cache.max_tokens,
        max_step_tokens=limits.max_step_tokens,
        arena=arena,
        host=host,
        overlaps=storage.device.type == "cuda" if config.overlap is None else config.overlap,
        threads=CpuThreads(set_native=torch.ops.pagetide.set_threads.default if is_native(model) else None),
    )
    if config.cuda_graphs and storage.device.type == "cuda":
        _record(runner, limits.num_rows)
    cost = SwapCost(plan.geometry.payload_bytes, plan.block_size)
    if host is not None and (measured := host.measure(storage, cache.pool.usable)) is not None:
        log.info("the host tier: copies at %s a second", format_bytes(int(measured)))
        cost = SwapCost(plan.geometry.payload_bytes, plan.block_size, bytes_per_s=measured)
    return EngineCore(Scheduler(cache, limits, cost), runner)
