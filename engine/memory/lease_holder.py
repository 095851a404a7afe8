"""Connects an engine to its device's monitor and acquires a lease from its broker, before weights are read."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...allocator.arena import Arena
from ...allocator.broker_client import BrokerClient
from ...allocator.errors import LeaseError, LeaseRefused, MinimumsExceedCapacity
from ...allocator.lease import Lease
from ...allocator.sharded_lease import ShardedLease
from ...cache.geometry import PAGE_BYTES
from ...common.host_memory import free_host_bytes
from ...common.on_error import OnError
from ...common.units import MIB, format_bytes
from ...monitor.cuda_devices import find_device
from ...monitor.errors import MonitorError
from ...monitor.snapshot import DeviceInfo, DeviceKind
from ...monitor.watching import Watch, watch
from ..config import EngineConfig
from ..errors import NotEnoughMemory
from ..execution.host_pool import HostPool
from ..process.memory_usage import process_bytes
from .memory_plan import MemoryPlan

log = logging.getLogger(__name__)
AnyLease = TypeVar("AnyLease", Lease, ShardedLease)
_names: set[str] = set()  # of this process's engines that have leases
_naming = threading.Lock()

GRANT_TIMEOUT_S = 30.0  # for other engines to give back memory, or to finish loading
_LOADING_LOOK_S = 0.25
_LONGEST_NAME = 80
HEAP_BYTES = 32 * MIB  # cached by a loaded process, besides the reserve
LIBRARIES_BYTES = 128 * MIB  # besides weights, until a process has loaded: code paged in late, fragmented heaps


class LeaseHolder:
    """One engine's part of the memory that its process holds on a device, excluding that of the process's other engines.

    Shared memory, such as libraries, counts for each engine. `arena` and `host`, the host tier's memory, are set when created.
    `uncounted` tells the bytes of weights that the process's count lacks: those that come to memory while the engine serves,
    after a sleep, and those in an arena of a CUDA device.
    """

    _all: ClassVar[list[LeaseHolder]] = []  # of this process

    def __init__(self, device: torch.device, weights_bytes: int) -> None:
        self.device = device
        self.arena: Arena | None = None
        self.host: HostPool | None = None
        self.uncounted: Callable[[], int] = int
        self._weights_bytes = weights_bytes
        self._is_of_suspended = False
        self._all.append(self)

    @classmethod
    def count(cls, store: npt.NDArray[np.uint8]) -> None:
        """Count bytes of suspended requests, in host memory, as no engine's, for as long as they are referred to."""
        holder = cls(torch.device("cpu"), store.nbytes)
        holder._is_of_suspended = True
        weakref.finalize(store, holder.close)

    @classmethod
    def suspended_bytes(cls) -> int:
        """Bytes that are counted so."""
        return sum(one._weights_bytes for one in cls._all if one._is_of_suspended)

    @property
    def base_bytes(self) -> int:
        """Bytes that the process holds for this engine now, or awaits, besides KV in the pool and the host tier."""
        others = sum(other._own_bytes for other in self._all if other.device == self.device and other is not self)
        uncounted = self.uncounted()  # before what is there is counted: what comes between is counted twice, not missed
        return max(0, process_bytes(self.device) - others - self._resident_kv_bytes) + uncounted

    @property
    def _own_bytes(self) -> int:
        return max(0, self._weights_bytes - self.uncounted()) + self._resident_kv_bytes

    @property
    def _resident_kv_bytes(self) -> int:
        """KV bytes within `process_bytes`. None on CUDA: torch does not count the arena, and the host tier is elsewhere."""
        if self.device.type != "cpu":
            return 0
        return sum(pool.mapped_bytes for pool in (self.arena, self.host) if pool is not None)

    def close(self) -> None:
        """Remove the engine, which must have freed its memory, from the count. Idempotent."""
        if self in self._all:
            self._all.remove(self)


@dataclass(slots=True, eq=False)
class Sharing(Generic[AnyLease]):
    """An engine's registration with the monitor and the brokers of its devices."""

    watched: Watch
    lease: AnyLease
    name: str

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The one lease, or those of the shards by rank."""
        return (self.lease,) if isinstance(self.lease, Lease) else self.lease.leases

    def close(self) -> None:
        """Close the lease and the watch. All memory must be unmapped. Idempotent."""
        self.lease.close()
        self.watched.close()
        release_name(self.name)
        self.name = ""


def acquire_lease(
    config: EngineConfig, plan: MemoryPlan, holder: LeaseHolder, asleep_bytes: int | None = None
) -> Sharing[Lease] | None:
    """Acquire a lease with the plan's minimum granted. None without `config.share` or without a broker (logged).

    `asleep_bytes`: Of a model that wakes up in this process, the weights that do so: all else of it is held already.

    Raises NotEnoughMemory if the minimum does not fit beside those of other leases, or is not granted within 30 s.
    """
    held = holder.base_bytes
    if asleep_bytes is None:
        working = max(plan.reserve_bytes, plan.loading_bytes)  # no step runs before the weights are read
        base = held + plan.weights_bytes + plan.primitives_bytes + working + HEAP_BYTES + LIBRARIES_BYTES
    else:
        base = held + asleep_bytes + plan.reserve_bytes + HEAP_BYTES

    def acquired(watched: Watch, name: str) -> Lease:
        return acquire(config, plan, watched, device_info(watched, holder.device), base, held, name)

    what = f"{plan.model} on {plan.device} ({format_bytes(base)} besides KV, and {format_bytes(plan.min_kv_bytes)} of KV)"
    return _shared(config, plan.model, acquired, (base + plan.min_kv_bytes, plan.free_bytes, what))


def acquire_leases(
    config: EngineConfig, plan: MemoryPlan, devices: Sequence[str], held_bytes: Sequence[int], driver_bytes: Callable[[], int]
) -> Sharing[ShardedLease] | None:
    """Acquire a lease for each shard with the plan's minimum granted: all, or none. None and raises as `acquire_lease`.

    They are acquired in the order of the devices' uuids, so that two engines do not wait for each other.

    Args:
        held_bytes: By shard, what its process holds on the device before it has loaded anything.
        driver_bytes: What the driver's own process holds on the host.
    """
    extra = driver_bytes if torch.device(devices[0]).type == "cpu" else int
    working = max(plan.reserve_bytes, plan.loading_bytes) + HEAP_BYTES + LIBRARIES_BYTES
    base = plan.weights_bytes + plan.primitives_bytes + working

    def acquired(watched: Watch, name: str) -> ShardedLease:
        infos = [device_info(watched, torch.device(device)) for device in devices]
        leases: dict[int, Lease] = {}
        with ExitStack() as undo:
            for rank in sorted(range(len(devices)), key=lambda rank: infos[rank].uuid):
                held = held_bytes[rank] + (0 if rank else extra())
                own = [lease.name for lease in leases.values()]
                leases[rank] = acquire(config, plan, watched, infos[rank], held + base, held, f"{name}.{rank}", own)
                undo.callback(leases[rank].close)
            together = ShardedLease([leases[rank] for rank in range(len(devices))], plan.geometry.extent_bytes, extra)
            undo.pop_all()
        return together

    what = f"a shard of {plan.model} ({format_bytes(plan.min_kv_bytes)} of it KV), of {len(devices)} on {plan.device}"
    return _shared(config, plan.model, acquired, (base + plan.min_kv_bytes, plan.free_bytes, what))


def lease_host_copy(config: EngineConfig, plan: MemoryPlan, size: int) -> Sharing[Lease] | None:
    """Acquire a lease of `size` bytes of host memory for the copy of weights on a CUDA device; they count as held from now on.

    None and raises as `acquire_lease`.
    """
    what = f"the copy of the weights of {plan.model} on the host"

    def acquired(watched: Watch, name: str) -> Lease:
        host = device_info(watched, torch.device("cpu")).uuid
        terms = {"min_bytes": size, "max_bytes": size, "granule_bytes": PAGE_BYTES}
        lease = _registered(watched, (), name=name, device_uuid=host, **terms)
        with OnError(lease.close):
            if not lease.wait_granted(size, GRANT_TIMEOUT_S):
                remedy = "other processes hold the rest and do not return it"
                raise NotEnoughMemory(size, lease.granted_bytes, what, remedy)
            lease.report({"weights": size}, 0)
            return lease

    return _shared(config, f"{plan.model}/copy", acquired, (size, free_host_bytes(), what))


def _shared(
    config: EngineConfig, model: str, acquired: Callable[[Watch, str], AnyLease], asked: tuple[int, int, str]
) -> Sharing[AnyLease] | None:
    """The lease that `acquired` makes under a name of `model`; `asked` is how many bytes, of how many that are free, and for
    what.

    None and raises as `acquire_lease`.
    """
    if not config.share:
        return None
    try:
        watched = watch()
    except (MonitorError, OSError) as error:
        log.warning("memory is not shared with other engines: %s", error)
        return None
    name = take_name(model)
    sharing: Sharing[AnyLease] | None = None
    try:
        with OnError(watched.close):
            sharing = Sharing(watched, acquired(watched, name), name)
            return sharing
    except LeaseRefused as error:
        raise NotEnoughMemory(*asked, f"the broker says: {error}") from error
    except (MonitorError, LeaseError, OSError) as error:
        log.warning("memory is not shared with other engines: %s", error)
        return None
    finally:
        if sharing is None:
            release_name(name)


def acquire(
    config: EngineConfig,
    plan: MemoryPlan,
    watched: Watch,
    info: DeviceInfo,
    base_bytes: int,
    held_bytes: int,
    name: str,
    own: Collection[str] = (),
) -> Lease:
    """A lease with `base_bytes` and the plan's minimum of KV granted. Raises NotEnoughMemory, and what `Lease.register`
    raises.

    `own`: Names of the engine's other leases, which need no less later.
    """
    min_bytes = base_bytes + plan.min_kv_bytes
    lease = _registered(
        watched,
        own,
        name=name,
        device_uuid=info.uuid,
        min_bytes=min_bytes,
        max_bytes=base_bytes + plan.kv_bytes + (plan.answers_bytes if plan.device == "cpu" else 0),
        weight=config.kv_memory.weight,
        priority=config.kv_memory.priority,
        granule_bytes=plan.geometry.extent_bytes,
        held_bytes=held_bytes,
    )
    with OnError(lease.close):
        if not lease.wait_granted(min_bytes, GRANT_TIMEOUT_S):
            what = f"{plan.model} on {plan.device}, of which {format_bytes(lease.granted_bytes)} are granted"
            raise NotEnoughMemory(min_bytes, plan.free_bytes, what, "other processes hold the rest and do not return it")
    return lease


def _registered(watched: Watch, own: Collection[str], **terms: Any) -> Lease:
    """Register a lease. If other minimums are in the way, wait for engines that are loading: they may need less then.

    Raises MinimumsExceedCapacity, and what else `Lease.register` raises.
    """
    deadline = time.monotonic() + GRANT_TIMEOUT_S
    while True:
        try:
            return Lease.register(watched.directory.socket, **terms)
        except MinimumsExceedCapacity:
            others = BrokerClient(watched.directory.socket).leases()
            here = [
                one
                for one in others
                if one.device_uuid == terms["device_uuid"] and not (one.pid == os.getpid() and one.name in own)
            ]
            # A copy of weights has no KV either, but holds all that it was granted
            loading = [one.name for one in here if not one.held.get("kv") and sum(one.held.values()) < one.granted_bytes]
            if not loading or time.monotonic() > deadline:
                raise
            log.info("waiting for %s, which are loading and may need less afterwards", ", ".join(loading))
            time.sleep(_LOADING_LOOK_S)


def take_name(model: str) -> str:
    """The engine's name in `vram-monitor limit` and `recall`: that of its model, the same after each sleep.

    A second engine of the model in this process is "demo-2". To be released with `release_name`.
    """
    name = "".join(c if c.isprintable() else "_" for c in model)[-_LONGEST_NAME:]
    with _naming:
        number = next(n for n in itertools.count(1) if (name if n == 1 else f"{name}-{n}") not in _names)
        name = name if number == 1 else f"{name}-{number}"
        _names.add(name)
    return name


def release_name(name: str) -> None:
    """Let another engine have a name. Idempotent."""
    with _naming:
        _names.discard(name)


def device_info(watched: Watch, device: torch.device) -> DeviceInfo:
    """The monitor's entry for torch's device. Raises NoSuchDevice."""
    infos = watched.devices()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return find_device(infos, uuid=str(properties.uuid))
    hosts = [info for info in infos if info.kind is DeviceKind.HOST]
    return hosts[0] if hosts else find_device(infos, uuid="host")
