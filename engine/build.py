"""Builds an engine from its configuration, and tears it down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..allocator.arena import Arena
from ..allocator.blocks import BlockAllocator
from ..allocator.errors import GrantExceeded, OutOfDeviceMemory
from ..allocator.lease import Lease
from ..allocator.leased_arena import LeasedArena
from ..allocator.sharded_lease import ShardedLease
from ..api.sampling_params import SamplingParams
from ..cache.block_table import Int32
from ..cache.cache_events import CacheEventLog
from ..cache.manager import CacheManager
from ..cache.prefix_hash import PrefixHasher
from ..cache.state_tables import tables_for
from ..cache.storage import TensorArena
from ..common import answer_memory
from ..common.on_error import OnError
from ..common.units import format_bytes
from ..scheduler.cost import SwapCost
from ..scheduler.outcome import STEP_TOKEN_BOUNDS
from ..scheduler.scheduler import Scheduler
from ..scheduler.state import Limits
from .attention.choose import Site, check, choose
from .config import EngineConfig
from .core import EngineCore
from .errors import NotEnoughMemory
from .execution.runner import ModelRunner
from .executor import (
    KeptModel,
    collect,
    content_of,
    empty_caches,
    load_checked,
    make_runner,
    open_arena,
    open_disk_tier,
    open_host_pool,
)
from .layers.quantized_linears import check_native
from .loading.checkpoint import Checkpoint
from .loading.hub_kernels import no_hub_kernels
from .loading.loader import address_remedy, choose_device, choose_dtype, free_bytes, load_tokenizer
from .loading.meta_models import outlined
from .memory.base_memory import BaseMemory
from .memory.decision import PoolBounds
from .memory.engine_memory import EngineMemory
from .memory.lease_holder import HEAP_BYTES, LeaseHolder, Sharing, acquire_lease
from .memory.memory_plan import MemoryPlan
from .memory.planning import plan_memory
from .memory.pool_use import SchedulerPoolUse
from .process.memory_usage import trim
from .sampling.sampler import Sampler
from .shards.sharded_engine import plan_shard, start_shards
from .shards.sharded_runner import ShardedRunner
from .text.encoder import Encoder

if TYPE_CHECKING:
    from .self_check.report import CheckReport
    from .shards.team import ShardTeam

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
    # How weights, K and V are stored: engines that differ in it may compute other tokens
    layout: str = ""
    # Of this host's memory, for outputs that a server has not delivered: no fact of the model.
    answers_bytes: int = field(default=answer_memory.LEAST_PLANNED_BYTES, compare=False)
    weights_bytes: int = field(default=0, compare=False)
    leases: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # their names, and the devices' uuids


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The parts of a running engine. `close` frees the memory."""

    core: EngineCore
    encoder: Encoder
    plan: MemoryPlan  # of one shard, if the model is divided
    arena: Arena
    sharing: Sharing[Lease] | Sharing[ShardedLease] | None
    sampling: SamplingParams  # defaults: the models file's over the generation config's
    eos_token_ids: tuple[int, ...]
    owners: tuple[Callable[[], None], ...]  # free the memory, called in order
    self_check: CheckReport | None = None  # on CUDA, unless switched off
    team: ShardTeam | None = None  # of a divided model
    kept: KeptModel | None = None  # what the engine leaves behind, if it is to sleep
    content: object = None  # equal where another engine can use the bytes of blocks; None: none can

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model."""
        plan, sharing = self.plan, self.sharing
        return ModelFacts(
            plan.max_model_len, self.encoder.vocab_size, plan.block_size, plan.device, plan.dtype, self.sampling,
            self.eos_token_ids, self.encoder.bos_token_id, plan.geometry.num_tables,
            f"weights {plan.quantization or plan.stored_as or plan.dtype}, KV {plan.kv_cache_dtype}", plan.answers_bytes,
            plan.weights_bytes, tuple((one.name, one.device_uuid) for one in sharing.leases) if sharing is not None else (),
        )  # fmt: skip

    def suspend(self) -> Scheduler:
        """Take rows and blocks from all requests, with none of them ended, between two steps. This engine is done then.

        Returns what the core of another engine takes over.
        """
        scheduler, drain = self.core.scheduler, self.core.runner.drain

        def counted(places: Int32) -> npt.NDArray[np.uint8]:
            assert drain is not None
            LeaseHolder.count(data := drain(places))
            return data

        scheduler.suspend(None if drain is None else counted)
        if self.core.disk is not None:  # what was computed last; closing waits for the writes
            self.core.save(self.core.disk, is_idle=True)
        return scheduler

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
            "attention": "transformers" if self.plan.geometry.gathers else self.core.runner.kernel.name,
            "overlap": self.core.runner.overlaps,
            "cuda_graphs": [] if self.core.runner.graphs is None else list(self.core.runner.graphs.sizes),
            "fused_layers": self.core.runner.fused_layers,
            "max_model_len": self.plan.max_model_len,
            "weights_bytes": self.plan.weights_bytes,
            "kv_bytes": self.arena.mapped_bytes,
            "kv_bytes_per_token": self.plan.kv_bytes_per_token,
            "block_size": self.plan.block_size,
            "blocks": {"usable": scheduler.cache.pool.usable, "limit": scheduler.pool.limit_blocks, **counts._asdict()},
            "extents": {"mapped": len(self.arena.mapped_extents), "total": self.arena.num_extents},
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "waiting_for_others": scheduler.state.num_dependent,
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
                "retained_blocks": scheduler.cache.index.retained.num_nodes,
                "pins": len(scheduler.cache.pins),
                "pinned_blocks": scheduler.cache.pins.num_blocks,
                "lost_pins": scheduler.cache.pins.num_lost,
                "max_cached_blocks": scheduler.cache.swapping.max_cached_blocks,
            },
            "host_tier": self._host_tier(),
            "disk_tier": self._disk_tier(),
            "memory": None if self.core.memory is None else self.core.memory.to_dict(),
            "self_check": self._self_check(),
            "shards": self._shards(),
        }

    def _shards(self) -> dict[str, Any] | None:
        runner = self.core.runner
        if self.team is None or not isinstance(runner, ShardedRunner):
            return None
        times = {name: getattr(runner.times, name) for name in ("steps", "sending_s", "waiting_s", "computing_s")}
        return {"collectives": runner.collectives, **times, "each": self.team.to_dict()}

    def _self_check(self) -> dict[str, Any]:
        if self.self_check is not None:
            return self.self_check.to_dict()
        reason = "the device is a CPU" if self.plan.device.startswith("cpu") else "self_check=False"
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

    def _disk_tier(self) -> dict[str, Any] | None:
        disk = self.core.disk
        return None if disk is None else {**disk.to_dict(), "hit_tokens": self.core.scheduler.stats.disk_tokens}

    def close(self) -> None:
        """Free the KV memory, and the weights unless they are referenced elsewhere. Idempotent."""
        with ExitStack() as last:  # runs every callback, even if one raises
            for free in reversed(self.owners):
                last.callback(free)


def build(config: EngineConfig, kept: KeptModel | None = None) -> Engine:
    """Load the model, check that it can be served, and map the KV pool. Nothing stays allocated if it raises.

    Args:
        kept: What the same engine left behind for its sleep, which goes on with it: nothing is loaded or checked again.

    Raises what `Checkpoint.open`, `plan_memory`, `load_model`, `load_tokenizer` and `probe` raise.
    """
    began = time.perf_counter()
    with _loading, no_hub_kernels():
        engine = _build_divided(config) if config.devices else _build_whole(config, kept)
    plan = engine.plan
    log.info(
        "%s as %s on %s: %s of KV now, at most %s in %d blocks of %d tokens, attention by %s, ready in %.1f s",
        plan.model, plan.dtype, plan.device, format_bytes(engine.arena.mapped_bytes), format_bytes(plan.kv_bytes),
        plan.num_blocks, plan.block_size, engine.core.runner.kernel.name, time.perf_counter() - began,
    )  # fmt: skip
    return engine


def _build_whole(config: EngineConfig, kept: KeptModel | None) -> Engine:
    """As `build`, for a model on one device."""
    checked = _self_check(config)  # before this process uses the device
    faults = {} if checked is None else checked.faults
    # Raises if the model does not fit, before weights are read.
    checkpoint, device, dtype, plan = _planned(config, None)
    check(config.attention, Site.of(device, dtype, plan.geometry), plan.geometry, faults)
    if kept is not None and not kept.fits(plan, checkpoint.stamps()):
        kept = None
    elif kept is not None:  # the copy on the host is there, so that the plan found no room for one
        plan = replace(plan, host_copy_bytes=kept.host_bytes)
    holder = LeaseHolder(device, plan.weights_bytes)
    with OnError(holder.close):
        sharing = acquire_lease(config, plan, holder, None if kept is None else kept.asleep_bytes)
        with OnError(lambda: None if sharing is None else sharing.close()):
            return _build(config, checkpoint, dtype, plan, holder, sharing, checked, kept)


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
    sharing: Sharing[Lease] | None,
    checked: CheckReport | None,
    kept: KeptModel | None,
) -> Engine:
    device = holder.device
    faults = {} if checked is None else checked.faults
    if kept is None:
        files = checkpoint.stamps()
        loaded = load_checked(config, checkpoint, device, dtype, plan, faults=faults)
        kept = KeptModel.of(loaded, checkpoint, plan, files, config, faults)
        content = content_of(plan, files)
    else:
        content = kept.content
        loaded = kept.wake()
    kernel = None if kept is None else kept.kernel
    if kernel is None:
        kernel = choose(config.attention, Site.of(device, dtype, plan.geometry), loaded.specs, faults=faults)
    if kept is not None:
        kept.kernel = kernel
        holder.uncounted = lambda: kept.uncounted_bytes
    host = open_host_pool(plan, config, pins="swaps" not in faults)
    arena = _open_pool(plan, holder, None if sharing is None else sharing.lease, elastic="pool" not in faults)
    holder.arena, holder.host = arena, host
    encoder = Encoder(loaded.tokenizer, checkpoint.vocab_size, checkpoint.bos_token_id, plan.max_model_len)
    limits, elastic = _limits(plan, config), not isinstance(arena, TensorArena)  # a TensorArena is one fixed allocation
    cache = _cache(plan, config, limits, arena if elastic else None, 0 if host is None else host.num_slots)
    runner = make_runner(
        loaded.model, arena, plan, config, kernel,
        Sampler(limits.num_rows, encoder.vocab_size, device, encoder.constraints), device=device,
        num_rows=limits.num_rows, max_tokens=cache.max_tokens, host=host, captures="graphs" not in faults,
    )  # fmt: skip
    speed = None if host is None else host.measure(runner.storage, cache.pool.usable)
    core = EngineCore(Scheduler(cache, limits, _swap_cost(plan, speed)), runner)
    if elastic:
        core.memory = _elastic_memory(core, runner, config, plan, holder, sharing)
    owners: list[Callable[[], None]] = [arena.close, holder.close, *([] if kept is None else [kept.release])]
    if (disk := open_disk_tier(plan, config, checkpoint, runner, kernel.name, cache)) is not None:
        core.disk = cache.disk = disk
        owners.insert(0, disk.close)
    if sharing is not None:
        owners.append(sharing.close)
    if core.memory is not None:
        owners.append(core.memory.close)
    owners += [runner.close, lambda: collect(device)]
    return Engine(
        core,
        encoder,
        plan,
        arena,
        sharing,
        checkpoint.default_sampling,
        encoder.all_ends(checkpoint.eos_token_ids),
        tuple(owners),
        checked,
        kept=kept,
        content=content,
    )


def _build_divided(config: EngineConfig) -> Engine:
    """As `build`, for a model that is divided over `config.devices`."""
    shards = start_shards(config)
    with OnError(shards.close):
        plan, checkpoint, team = shards.plan, shards.checkpoint, shards.team
        limits = _limits(plan, config)
        loaded = shards.load(limits.num_rows, _cache(plan, config, limits, shards.arena, 0).max_tokens)
        first = loaded[0]
        cache = _cache(plan, config, limits, shards.arena if first.elastic else None, first.num_slots)
        runner = ShardedRunner(team, shards.arena if first.elastic else None, loaded)
        core = EngineCore(Scheduler(cache, limits, _swap_cost(plan, first.swap_bytes_per_s)), runner)
        if first.elastic:
            core.memory = shards.memory(lambda: core.scheduler, runner)
        encoder = Encoder(load_tokenizer(config.model), checkpoint.vocab_size, checkpoint.bos_token_id, plan.max_model_len)
        owners = [team.close, shards.close, runner.close]
        how = f"{runner.kernel.name}, {runner.collectives}"
        if (disk := open_disk_tier(plan, config, checkpoint, runner, how, cache)) is not None:
            core.disk = cache.disk = disk
            owners.insert(0, disk.close)
        if core.memory is not None:
            owners.append(core.memory.close)
        return Engine(
            core, encoder, plan, shards.arena, shards.sharing, checkpoint.default_sampling,
            encoder.all_ends(checkpoint.eos_token_ids), tuple(owners), team=team,
        )  # fmt: skip


def plan_only(
    config: EngineConfig, context: int | None = None, *, has_weights: bool = True, memory_bytes: int | None = None
) -> MemoryPlan:
    """The memory plan of `build`, for sequences of `context` tokens; of a divided model, that of each shard.

    Reads no weights, allocates no memory.

    Args:
        has_weights: Whether the model's weight files are here; else transformers makes its tensors of the configuration.
        memory_bytes: The free memory of a device, or of each of them, that is not here: CUDA, unless `config` says "cpu".
    """
    with _loading:
        if config.devices:
            return plan_shard(config, context, has_weights=has_weights, memory_bytes=memory_bytes)
        if has_weights and memory_bytes is None:
            return _planned(config, context)[-1]
        checkpoint = Checkpoint.open(config.model) if has_weights else outlined(config.model)
        device = choose_device(config.device) if memory_bytes is None else torch.device(_kind_of(config.device))

        def free(one: torch.device) -> int:
            return free_bytes(one) if memory_bytes is None else memory_bytes

        dtype = choose_dtype(config.dtype, checkpoint, device)
        plan = plan_memory(config, checkpoint, device, dtype, context=context, free=free, total=free)
        if memory_bytes is not None and config.sleeps and device.type == "cuda":  # of its host nothing is known
            plan = replace(plan, host_copy_bytes=plan.weights_bytes)
        return plan


def _kind_of(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"


def _planned(config: EngineConfig, context: int | None) -> tuple[Checkpoint, torch.device, torch.dtype, MemoryPlan]:
    checkpoint = Checkpoint.open(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint, device)
    if config.quantization is not None:
        check_native(config.quantization, device)
    return checkpoint, device, dtype, plan_memory(config, checkpoint, device, dtype, context=context)


def _open_pool(plan: MemoryPlan, holder: LeaseHolder, lease: Lease | None, *, elastic: bool) -> Arena:
    """Open an arena of the plan's size with the minimum extents mapped.

    The arena does not work in the background until there is an `EngineMemory`: CUDA graphs are captured before that.
    """
    try:
        arena = open_arena(plan, holder.device, elastic=elastic)
        if isinstance(arena, TensorArena):
            return arena
        if lease is not None:
            held = holder.base_bytes
            weights = min(held, plan.weights_bytes)
            lease.report({"weights": weights, "other": held - weights}, 0)
            arena = LeasedArena(arena, lease)
        arena.map(range(plan.min_extents))
        return arena
    except (OutOfDeviceMemory, GrantExceeded) as error:  # another process took memory since it was counted
        free = error.free_bytes if isinstance(error, OutOfDeviceMemory) else error.granted_bytes
        what = f"the KV pool of {plan.model} on {plan.device}"
        remedy = address_remedy(error.asked_bytes, holder.device) or (
            "another process took memory meanwhile: try again, or ask for less kv_memory"
        )
        raise NotEnoughMemory(error.asked_bytes, free, what, remedy) from error


def _elastic_memory(
    core: EngineCore,
    runner: ModelRunner,
    config: EngineConfig,
    plan: MemoryPlan,
    holder: LeaseHolder,
    sharing: Sharing[Lease] | None,
) -> EngineMemory:
    """What grows and shrinks the arena of `holder`, within its lease if it is shared."""
    device, arena = holder.device, holder.arena
    assert arena is not None
    on_host = device.type == "cpu"
    bounds = PoolBounds(arena.num_extents, plan.min_extents, arena.extent_bytes, config.idle_s, on_host)
    base = BaseMemory(
        lambda: holder.base_bytes,
        weights_bytes=plan.weights_bytes,
        reserve_bytes=plan.reserve_bytes + (0 if sharing is None else HEAP_BYTES),
        trim=lambda: empty_caches(runner, device),
        tidy=(lambda: trim(device)) if on_host else None,
    )
    lease = None if sharing is None else sharing.lease
    return EngineMemory(SchedulerPoolUse(lambda: core.scheduler, bounds), arena, base, lease=lease, host=holder.host)


def _limits(plan: MemoryPlan, config: EngineConfig) -> Limits:
    return Limits(config.max_seqs, config.max_step_tokens, plan.max_model_len, config.max_chunk_tokens)


def _cache(plan: MemoryPlan, config: EngineConfig, limits: Limits, arena: Arena | None, host_slots: int) -> CacheManager:
    """The bookkeeping of the pool. `arena` None: its size is fixed."""
    kept = config.prefix_cache_memory
    pool = BlockAllocator(
        plan.num_blocks,
        blocks_per_extent=None if arena is None else plan.geometry.blocks_per_extent,
        mapped=None if arena is None else arena.mapped_extents,
    )
    return CacheManager(
        tables_for(plan.geometry.groups, pool, plan.block_size, limits.num_rows, plan.max_model_len),
        PrefixHasher(plan.block_size, config.prefix_hash_secret) if config.prefix_caching else None,
        max_cached_blocks=None if kept is None else kept // plan.geometry.block_stride,
        host_slots=host_slots,
        events=CacheEventLog() if config.kv_events else None,
    )


def _swap_cost(plan: MemoryPlan, bytes_per_s: float | None) -> SwapCost:
    """`bytes_per_s` of copies to and from the host tier: None if there is none."""
    if bytes_per_s is None:
        return SwapCost(plan.geometry.payload_bytes, plan.block_size)
    log.info("the host tier: copies at %s a second", format_bytes(int(bytes_per_s)))
    return SwapCost(plan.geometry.payload_bytes, plan.block_size, bytes_per_s=bytes_per_s)
