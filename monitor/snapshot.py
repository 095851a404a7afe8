"""What the monitor saw of the devices: frozen records in bytes and monotonic nanoseconds; unknown is None, never 0."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

STALE_AFTER_INTERVALS = 3


class DeviceKind(StrEnum):
    """What a device is."""

    GPU = "gpu"
    MIG = "mig"  # an instance of a partitioned GPU, with memory of its own
    HOST = "host"  # this machine's memory, or what a cgroup leaves of it


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What does not change while a device is there."""

    uuid: str  # "GPU-8a6e...", "MIG-...", "HOST-..."; the key of a device everywhere
    index: str  # for people: "0" as NVML counts (CUDA may count otherwise), "0:1" for a MIG instance, "host"
    kind: DeviceKind
    name: str | None = None
    pci_id: str | None = None  # "00000000:3B:00.0", as NVML writes it
    parent_uuid: str | None = None  # of a MIG instance: its GPU


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a source says of one device's memory; None where it does not say."""

    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process on one device."""

    pid: int
    used_bytes: int | None  # None where the driver does not tell (permissions, containers, WDDM)
    kind: str = "compute"  # "compute", "graphics", "compute+graphics", "host"
    user: str | None = None
    command: str | None = None  # with arguments; None where the pid is not seen from here
    engine: str | None = None  # the name under which an engine holds a lease


@dataclass(frozen=True, slots=True)
class DetailReading:
    """What a source says of one device less often: load and processes."""

    utilization: float | None = None  # share of time a kernel ran, 0..1
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    processes: tuple[ProcessUse, ...] | None = None  # None: the source does not tell, () : there are none


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device at one instant, with its trend. What engines read."""

    at_ns: int  # monotonic, when the source was asked for what it answered last; 0 before the first answer
    interval_ns: int  # how often it is asked
    total_bytes: int | None
    free_bytes: int | None
    bytes_per_second: float | None  # smoothed growth of the used bytes; negative while memory comes free
    polls: int  # answers and failures since the monitor started; never falls
    failures: int  # of these, failures
    error: str | None = None  # why there are no numbers: "GPU is lost"

    @property
    def used_bytes(self) -> int | None:
        """total - free: what everybody holds together, the driver's own reserve included."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return self.total_bytes - self.free_bytes

    @property
    def seconds_until_exhaustion(self) -> float | None:
        """When free memory ends if the trend goes on; None where use does not grow or is not known."""
        if self.free_bytes is None or not self.bytes_per_second or self.bytes_per_second <= 0:
            return None
        return self.free_bytes / self.bytes_per_second

    def age_ns(self, now_ns: int | None = None) -> int:
        """How old the answer is."""
        return (time.monotonic_ns() if now_ns is None else now_ns) - self.at_ns

    def is_stale(self, now_ns: int | None = None) -> bool:
        """Whether the answer is older than three intervals, or from the future: written before a restart of the machine."""
        return not 0 <= self.age_ns(now_ns) <= STALE_AFTER_INTERVALS * self.interval_ns


@dataclass(frozen=True, slots=True)
class DeviceDetail:
    """Load, processes and the last minutes of one device."""

    at_ns: int  # monotonic, when the source answered last; 0 before the first answer
    interval_ns: int
    reading: DetailReading
    history: tuple[int | None, ...] = ()  # used bytes at the last intervals, newest last; None where unknown
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """All that is known of one device."""

    info: DeviceInfo
    memory: DeviceMemory
    detail: DeviceDetail


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """What one engine may hold of a device, and holds. Bytes cover all of its process: weights, KV, everything else."""

    engine: str
    pid: int
    user: str
    device_uuid: str
    min_bytes: int
    max_bytes: int | None  # None: as much as the device has
    weight: float
    priority: int
    granted_bytes: int
    held_bytes: int
    held_by_class: Mapping[str, int]  # as the engine reported last: "weights", "kv", "other"
    free_bytes: int  # of what is held, free in its pool
    asked_bytes: int | None  # None: it asks for nothing
    state: str  # "ok", "recalling", "overdue", "reaping": its process ended and its memory is not back
    recall_target_bytes: int | None
    recall_age_seconds: float | None  # since the oldest recall that is not served

    def held_parts(self) -> dict[str, int]:
        """What is held by class: "weights", "kv", and "other", which is the rest. The parts always make the whole.

        So a report that is older than `held_bytes` is cut to it.
        """
        weights = min(self.held_by_class.get("weights", 0), self.held_bytes)
        kv = min(self.held_by_class.get("kv", 0), self.held_bytes - weights)
        return {"weights": weights, "kv": kv, "other": self.held_bytes - weights - kv}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the monitor saw of all devices."""

    at_ns: int  # monotonic, when the snapshot was taken from the record
    source: str  # "nvml+host", "host", "replay:FILE"
    monitor_pid: int  # the process that polls
    started_ns: int  # monotonic, when it began
    devices: tuple[Device, ...]
    leases: tuple[LeaseUse, ...] = ()
    leases_error: str | None = None  # why the leases are not known; then there are none in `leases`
    silent_ns: int | None = None  # for how long nothing was heard of the monitor itself; None: it is at work
    # When it was taken, since 1970; None where nobody said. Not compared: it is `at_ns` by a clock that may be set.
    unix_seconds: float | None = field(default=None, compare=False)

    def with_leases(self, leases: Sequence[LeaseUse]) -> Snapshot:
        """The same with these leases, and their engines' names beside their processes."""
        engines = {(lease.device_uuid, lease.pid): lease.engine for lease in leases}
        devices = tuple(_named(device, engines) for device in self.devices) if engines else self.devices
        return replace(self, devices=devices, leases=tuple(leases), leases_error=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with what follows from it (used bytes, age, staleness, time until exhaustion)."""
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


def _named(device: Device, engines: Mapping[tuple[str, int], str]) -> Device:
    """The device with the names of the engines that its processes are."""
    processes = device.detail.reading.processes
    if processes is None:
        return device
    named = tuple(replace(use, engine=engines.get((device.info.uuid, use.pid), use.engine)) for use in processes)
    reading = replace(device.detail.reading, processes=named)
    return replace(device, detail=replace(device.detail, reading=reading))
