"""The parts of an engine with a divided model: the shards' processes, their leases, and the pool that all of them have."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ...allocator.sharded_lease import ShardedLease
from ...common.host_memory import free_host_bytes
from ...common.on_error import OnError
from ...scheduler.scheduler import Scheduler
from ..attention.choose import Site, check
from ..config import EngineConfig
from ..errors import ConfigError, DeviceNotFound
from ..layers.quantized_linears import check_native
from ..loading.checkpoint import Checkpoint
from ..loading.division import Division
from ..loading.loader import choose_dtype, free_bytes, total_bytes
from ..loading.meta_models import outlined
from ..memory.base_memory import BaseMemory
from ..memory.decision import PoolBounds
from ..memory.engine_memory import EngineMemory
from ..memory.lease_holder import HEAP_BYTES, LeaseHolder, Sharing, acquire_leases
from ..memory.memory_plan import MemoryPlan
from ..memory.planning import model_geometry, plan_memory
from ..memory.pool_use import SchedulerPoolUse
from ..process.cpu_threads import own_threads
from .messages import Hello, LoadShard, ShardLoaded
from .sharded_arena import ShardedArena
from .sharded_runner import ShardedRunner
from .team import ShardTeam

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DividedEngine:
    """The shards, started and planned for, and what the driver needs of them. `close` ends them."""

    config: EngineConfig
    checkpoint: Checkpoint
    plan: MemoryPlan  # of one shard
    team: ShardTeam
    holder: LeaseHolder  # of the driver's own memory
    sharing: Sharing[ShardedLease] | None
    arena: ShardedArena
    faults: dict[str, str]

    def load(self, num_rows: int, max_tokens: int) -> list[ShardLoaded]:
        """Load the model: every shard its part. Raises what `load_checked` raises, NotEnoughMemory, and ShardLost."""
        load = LoadShard(self.config, self.plan, num_rows, max_tokens, self.faults)
        loaded: list[ShardLoaded] = self.team.ask([load] * self.team.size)
        self.team.is_loaded = True
        return loaded

    def memory(self, scheduler: Callable[[], Scheduler], runner: ShardedRunner) -> EngineMemory:
        """What keeps the pool within the leases of all shards."""
        if self.sharing is not None:
            runner.on_refused = self.sharing.lease.return_unused
        plan, team, on_host = self.plan, self.team, torch.device(self.team.devices[0]).type == "cpu"
        arena, idle_s = self.arena, self.config.idle_s
        bounds = PoolBounds(arena.num_extents, plan.min_extents, arena.extent_bytes, idle_s, on_host)
        base = BaseMemory(
            lambda: max(team.sign(rank).base_bytes for rank in range(team.size)),
            weights_bytes=plan.weights_bytes,
            reserve_bytes=plan.reserve_bytes + (0 if self.sharing is None else HEAP_BYTES),
            trim=runner.empty_caches,
            tidy=runner.tidy if on_host else None,
        )
        lease = None if self.sharing is None else self.sharing.lease
        return EngineMemory(SchedulerPoolUse(scheduler, bounds), arena, base, lease=lease, host=runner.host)

    def close(self) -> None:
        """End the shards, then their leases. Idempotent."""
        self.team.close()
        self.arena.close()
        self.holder.close()
        if self.sharing is not None:
            self.sharing.close()


def plan_shard(
    config: EngineConfig, context: int | None = None, *, has_weights: bool = True, memory_bytes: int | None = None
) -> MemoryPlan:
    """The memory plan of each shard, for sequences of `context` tokens. Starts no process. Raises as `start_shards`.

    Args:
        has_weights: Whether the model's weight files are here; else transformers makes its tensors of the configuration.
        memory_bytes: The free memory of each device, of which none is here.
    """
    _refuse_what_stays_here(config)
    devices = _numbered(config.devices, are_here=memory_bytes is None)
    checkpoint = Checkpoint.open(config.model) if has_weights else outlined(config.model)
    dtype, division = _divided(config, checkpoint, devices, are_here=memory_bytes is None)
    rooms = [
        (free_bytes(device), total_bytes(device)) if memory_bytes is None else (memory_bytes, memory_bytes)
        for device in map(torch.device, devices)
    ]
    return _planned(config, checkpoint, dtype, division, devices, rooms, context)


def start_shards(config: EngineConfig) -> DividedEngine:
    """Start a process for each of `config.devices`, plan their memory and acquire their leases. Reads no weights.

    Raises what `Checkpoint.open`, `Division.of`, `plan_memory` and `acquire_leases` raise; ConfigError.
    """
    _refuse_what_stays_here(config)
    devices = _numbered(config.devices)
    faults = _faults(config, devices)
    team = ShardTeam(devices, max(1, own_threads() // len(devices)))
    holder = LeaseHolder(torch.device("cpu"), 0)
    sharing: Sharing[ShardedLease] | None = None
    with OnError(team.close, holder.close, lambda: None if sharing is None else sharing.close()):
        team.start()
        checkpoint = Checkpoint.open(config.model)  # while the shards import torch
        dtype, division = _divided(config, checkpoint, devices)
        hellos: list[Hello] = team.wait(0, range(team.size))
        team.forget(0)
        rooms = [(hello.free_bytes, hello.total_bytes) for hello in hellos]
        plan = _planned(config, checkpoint, dtype, division, devices, rooms)
        check(config.attention, Site.of(torch.device("cpu"), dtype, plan.geometry), plan.geometry, faults)
        held = [hello.held_bytes for hello in hellos]
        sharing = acquire_leases(config, plan, devices, held, lambda: holder.base_bytes)
        leases = None if sharing is None else sharing.lease.leases
        arena = ShardedArena(plan.num_extents, plan.geometry.extent_bytes, leases, range(plan.min_extents), len(devices))
        return DividedEngine(config, checkpoint, plan, team, holder, sharing, arena, faults)


def _divided(
    config: EngineConfig, checkpoint: Checkpoint, devices: Sequence[str], *, are_here: bool = True
) -> tuple[torch.dtype, Division]:
    """The model's dtype, and how it is divided. Raises what `Division.of` raises, and ConfigError."""
    device = torch.device(devices[0])
    dtype = choose_dtype(config.dtype, checkpoint, device)
    if config.quantization is not None and are_here:
        check_native(config.quantization, device)
    layers = model_geometry(config, checkpoint, device, dtype).layers
    division = Division.of(checkpoint, len(devices), layers)
    if left := division.describe():
        log.warning("%s: %s", config.model.name, left)
    return dtype, division


def _refuse_what_stays_here(config: EngineConfig) -> None:
    """Raises ConfigError for a model that other processes cannot read."""
    asked = f"the model is to be divided over {len(config.devices)} devices, each in a process of its own"
    if config.model.loaded is not None:
        raise ConfigError(f"{asked}, and a loaded model is in this one: save it by save_pretrained(), and give its folder")
    if os.name == "nt":
        raise ConfigError(f"{asked}, which needs Linux or macOS")


def _numbered(devices: Sequence[str], *, are_here: bool = True) -> tuple[str, ...]:
    """The devices with "auto" and "cuda" replaced: cuda:0, cuda:1, ... or as often the CPU.

    Raises DeviceNotFound if they should be here and are not.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices[0] == "cpu" or (devices[0] == "auto" and not there and are_here):
        return ("cpu",) * len(devices)
    wanted = tuple(f"cuda:{i}" for i in range(len(devices))) if devices[0] in ("auto", "cuda") else tuple(devices)
    if missing := [name for name in wanted if are_here and int(name.partition(":")[2]) >= there]:
        found = ", ".join(f"cuda:{i}" for i in range(there)) or "none"
        raise DeviceNotFound(
            f"{len(wanted)} shards were asked for on {', '.join(wanted)}, and {', '.join(missing)} is not there: torch sees "
            f"{found}; use fewer shards, name a device several times as in devices=['cuda:0', 'cuda:0'], or use device='cpu'"
        )
    return wanted


def _faults(config: EngineConfig, devices: Sequence[str]) -> dict[str, str]:
    """The parts of the engine that failed in the self-check of one of the devices, with the reasons."""
    faults: dict[str, str] = {}
    if not config.self_check:
        return faults
    for name in dict.fromkeys(devices):
        if name != "cpu":
            from ..self_check.check import at_start

            if (report := at_start(torch.device(name).index)) is not None:
                faults |= report.faults
    return faults


def _planned(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    division: Division,
    devices: Sequence[str],
    rooms: Sequence[tuple[int, int]],
    context: int | None = None,
) -> MemoryPlan:
    """The plan of one shard, within what the scarcest device has for each of its shards.

    `rooms`: by shard, free and total bytes of its device.
    """
    times, device = Counter(devices), torch.device(devices[0])
    free = min(room[0] // times[name] for name, room in zip(devices, rooms, strict=True))
    total = min(room[1] // times[name] for name, room in zip(devices, rooms, strict=True))

    def free_of(asked: torch.device) -> int:
        return free if asked == device else free_host_bytes() // len(devices)

    plan = plan_memory(
        config, checkpoint, device, dtype, context=context, free=free_of, total=lambda asked: total, division=division
    )
    replicated = division.replicated_bytes(dtype)
    return replace(plan, device=",".join(devices), num_shards=division.size, replicated_bytes=replicated)
