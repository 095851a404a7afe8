"""Snapshots of the devices: frozen data in bytes and monotonic nanoseconds. An unknown value is None, never 0."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from .events import MemoryEvent
from .owners import OwnerKind, OwnerUse, owner_uses, owners_in

STALE_AFTER_INTERVALS = 3


class DeviceKind(StrEnum):
    """The kind of a device."""

    GPU = "gpu"
    MIG = "mig"  # an instance of a partitioned GPU, with memory of its own
    HOST = "host"  # this machine's memory, or a cgroup's limit of it


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The constant properties of a device."""

    uuid: str  # "GPU-8a6e...", "MIG-...", "HOST-..."; the key of a device everywhere
    # For display: "0" in NVML's order (CUDA's may differ), "0:1" for a MIG instance, "host"
    index: str
    kind: DeviceKind
    name: str | None = None
    pci_id: str | None = None  # "00000000:3B:00.0", as NVML writes it
    parent_uuid: str | None = None  # of a MIG instance: its GPU


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A source's numbers of one device's memory; None if the source gives none."""

    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process on one device."""

    pid: int
    used_bytes: int | None  # None if the driver hides it (permissions, containers, WDDM)
    kind: str = "compute"  # "compute", "graphics", "compute+graphics", "host"
    user: str | None = None
    command: str | None = None  # with arguments; None if this process cannot see the pid
    engine: str | None = None  # the engine's name in its lease
    cgroup: str | None = None  # its path, as the monitor sees it; owners.py reads container, pod and unit from it
    # Time without use, since the monitor first saw the process; None: not known. On a GPU use is computing, as the driver
    # samples it; of host memory, at least 1 % of a core.
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DetailReading:
    """The less frequent readings of one device: load and processes."""

    utilization: float | None = None  # share of time a kernel ran, 0..1
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    processes: tuple[ProcessUse, ...] | None = None  # None: the source gives none; (): there are no processes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device at one instant, with its trend."""

    at_ns: int  # monotonic, start of the last completed poll; 0 before the first
    interval_ns: int  # polling interval
    total_bytes: int | None
    free_bytes: int | None
    bytes_per_second: float | None  # smoothed growth of the used bytes; negative while memory becomes free
    polls: int  # answers and failures since the monitor started; never decreases
    failures: int  # of these, failures
    error: str | None = None  # why there are no numbers: "GPU is lost"

    @property
    def used_bytes(self) -> int | None:
        """total - free: the memory of all processes, including the driver's own reserve."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return self.total_bytes - self.free_bytes

    @property
    def seconds_until_exhaustion(self) -> float | None:
        """The time until free memory is used up at the present trend; None if use does not grow or is unknown."""
        if self.free_bytes is None or not self.bytes_per_second or self.bytes_per_second <= 0:
            return None
        return self.free_bytes / self.bytes_per_second

    def age_ns(self, now_ns: int | None = None) -> int:
        """The age of the numbers."""
        return (time.monotonic_ns() if now_ns is None else now_ns) - self.at_ns

    def is_stale(self, now_ns: int | None = None) -> bool:
        """Whether the numbers are older than three intervals, or from the future: written before a restart of the machine."""
        return not 0 <= self.age_ns(now_ns) <= STALE_AFTER_INTERVALS * self.interval_ns


@dataclass(frozen=True, slots=True)
class DeviceDetail:
    """Load, processes and the last minutes of one device."""

    at_ns: int  # monotonic, start of the last completed poll; 0 before the first
    interval_ns: int
    reading: DetailReading
    history: tuple[int | None, ...] = ()  # used bytes, one per interval, newest last; None if unknown
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """All known about one device."""

    info: DeviceInfo
    memory: DeviceMemory
    detail: DeviceDetail


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """One engine's lease on a device and its use. Bytes cover its whole process: weights, KV, everything else."""

    engine: str
    pid: int
    user: str
    device_uuid: str
    min_bytes: int
    max_bytes: int | None  # None: up to the whole device
    weight: float
    priority: int
    granted_bytes: int
    held_bytes: int
    held_by_class: Mapping[str, int]  # as the engine last reported: "weights", "kv", "other"
    spare_bytes: int  # of the held bytes, what the engine can give back without affecting a request
    asked_bytes: int | None  # None: no request
    state: str  # "ok", "recalling", "overdue", "reaping": its process ended and its memory is not back
    recall_target_bytes: int | None
    recall_age_seconds: float | None  # since the oldest unserved recall

    def held_parts(self) -> dict[str, int]:
        """The held bytes by class: "weights", "kv" and "other", which is the rest.

        A report that is older than `held_bytes` is cut to it.
        """
        weights = min(self.held_by_class.get("weights", 0), self.held_bytes)
        kv = min(self.held_by_class.get("kv", 0), self.held_bytes - weights)
        return {"weights": weights, "kv": kv, "other": self.held_bytes - weights - kv}


class Origin(StrEnum):
    """Where a view takes its snapshots from."""

    MONITOR = "monitor"  # a monitor's record
    DIRECT = "direct"  # a source that this process reads, or a recording that it plays
    WAITING = "waiting"  # like DIRECT, until a monitor starts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all devices at one time, as the monitor recorded it."""

    at_ns: int  # monotonic, when the snapshot was taken from the record
    source: str  # "nvml+host", "host", "replay:FILE"
    monitor_pid: int  # pid of the polling process
    started_ns: int  # monotonic, start of the monitor
    devices: tuple[Device, ...]
    leases: tuple[LeaseUse, ...] = ()
    leases_error: str | None = None  # why the leases are unknown; then `leases` is empty
    silent_ns: int | None = None  # time since the monitor's last heartbeat; None: it runs
    # When it was taken, since 1970; None if unknown. Not compared: it is `at_ns` by a clock that may be set.
    unix_seconds: float | None = field(default=None, compare=False)
    origin: Origin = field(default=Origin.MONITOR, compare=False)
    unavailable: Mapping[str, str] = field(default_factory=dict, compare=False)  # sources without devices, and why, if known
    event_counts: Mapping[str, int] = field(default_factory=dict)  # by kind, in the monitor's own process
    events: tuple[MemoryEvent, ...] = ()  # the newest, oldest first, as far as a view asked for them

    def with_leases(self, leases: Sequence[LeaseUse]) -> Snapshot:
        """The same snapshot with these leases, and their engines' names in the process entries."""
        engines = {(lease.device_uuid, lease.pid): lease.engine for lease in leases}
        devices = tuple(_named(device, engines) for device in self.devices) if engines else self.devices
        return replace(self, devices=devices, leases=tuple(leases), leases_error=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, including derived values."""
        devices = []
        for device in self.devices:
            memory = device.memory
            age = memory.age_ns(self.at_ns)
            devices.append(
                asdict(device.info)
                | {
                    "memory": {
                        "total_bytes": memory.total_bytes,
                        "used_bytes": memory.used_bytes,
                        "free_bytes": memory.free_bytes,
                        "bytes_per_second": memory.bytes_per_second,
                        "seconds_until_exhaustion": memory.seconds_until_exhaustion,
                        "age_seconds": age / 1e9 if memory.at_ns else None,
                        "stale": memory.is_stale(self.at_ns),
                        "polls": memory.polls,
                        "failures": memory.failures,
                        "error": memory.error,
                    },
                    **asdict(device.detail.reading),
                    "processes": None if (uses := device.detail.reading.processes) is None else [_process(use) for use in uses],
                    "owners": [_owner(owner) for owner in owner_uses(device, self.leases, self.devices)],
                    "detail_error": device.detail.error,
                }
            )
        leases = None if self.leases_error is not None else [asdict(lease) for lease in self.leases]
        return {
            "time": self.unix_seconds,
            "source": self.source,
            "monitor_pid": self.monitor_pid,
            "devices": devices,
            "leases": leases,
            "leases_error": self.leases_error,
        }


def _process(use: ProcessUse) -> dict[str, Any]:
    owners = owners_in(use.cgroup)
    names = {kind.value: owners[kind].name if kind in owners else None for kind in OwnerKind if kind is not OwnerKind.USER}
    return asdict(use) | names


def _owner(owner: OwnerUse) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in ("kind", "name", "num_processes", "used_bytes", "unknown", "idle_bytes")}


def _named(device: Device, engines: Mapping[tuple[str, int], str]) -> Device:
    """The device, with engine names in its process entries."""
    processes = device.detail.reading.processes
    if processes is None:
        return device
    named = tuple(replace(use, engine=engines.get((device.info.uuid, use.pid), use.engine)) for use in processes)
    reading = replace(device.detail.reading, processes=named)
    return replace(device, detail=replace(device.detail, reading=reading))


def to_json(snapshot: Snapshot, *, indent: int | None = None) -> str:
    """One JSON object, on one line without `indent`; in bytes, seconds, degrees, watts and shares of 1. Unknown is null.

        {"time": Unix seconds, "source", "monitor_pid",
         "devices": [{"uuid", "index", "kind", "name", "pci_id", "parent_uuid",
                      "memory": {"total_bytes", "used_bytes", "free_bytes", "bytes_per_second",
                                 "seconds_until_exhaustion", "age_seconds", "stale", "polls", "failures", "error"},
                      "utilization", "temperature_celsius", "power_watts", "power_limit_watts",
                      "processes": [{"pid", "used_bytes", "kind", "user", "command", "engine", "cgroup", "idle_seconds",
                                     "container", "pod", "unit"}] or null,
                      "owners": [{"kind", "name", "num_processes", "used_bytes", "unknown", "idle_bytes"}],
                      "detail_error"}],
         "leases": [{"engine", "pid", "user", "device_uuid", "min_bytes", "max_bytes", "weight", "priority",
                     "granted_bytes", "held_bytes", "held_by_class": {class: bytes}, "spare_bytes", "asked_bytes",
                     "state", "recall_target_bytes", "recall_age_seconds"}] or null,
         "leases_error"}

    Only what JSON has (RFC 8259): no NaN or infinity, and text without the halves of a surrogate pair.
    """
    return json.dumps(_plain(snapshot.to_dict()), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """`value` without values that JSON cannot express."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        # A trend that decays to a denormal number predicts exhaustion after more seconds than a float can hold.
        return None
    if isinstance(value, str):
        # A command line need not be UTF-8: Python keeps such bytes as surrogate halves.
        return value.encode(errors="replace").decode()
    return value
