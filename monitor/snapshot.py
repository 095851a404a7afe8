"""Snapshots of the devices: frozen data in bytes and monotonic nanoseconds. An unknown value is None, never 0."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .events import MemoryEvent

STALE_AFTER_INTERVALS = 3
MAX_HOST_PROCESSES = 64  # of the host, the largest are listed


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

    @property
    def lists_largest_only(self) -> bool:
        """Whether it is a host with so many processes that only its largest ones are listed."""
        return self.info.kind is DeviceKind.HOST and len(self.detail.reading.processes or ()) >= MAX_HOST_PROCESSES


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
    # "ok"; "loading": the engine has not reported yet; "recalling", "overdue"; "reaping": its process ended and its memory is
    # not back
    state: str
    recall_target_bytes: int | None
    recall_age_seconds: float | None  # since the oldest unserved recall
    kept_bytes: int = 0  # of the spare bytes, what holds cached prefixes
    num_waiting: int = 0  # requests that the engine has and does not run

    @property
    def kv_parts(self) -> dict[str, int]:
        """The bytes of the KV cache: "live" (in use), "cached" (prefixes that no request uses) and "free"."""
        kv = self.held_parts()["kv"]
        spare = min(self.spare_bytes, kv)
        cached = min(self.kept_bytes, spare)
        return {"live": kv - spare, "cached": cached, "free": spare - cached}

    def held_parts(self) -> dict[str, int]:
        """The held bytes by class: "weights", "kv" and "other", which is the rest.

        A report that is older than `held_bytes` is cut to it.
        """
        weights = min(self.held_by_class.get("weights", 0), self.held_bytes)
        kv = min(self.held_by_class.get("kv", 0), self.held_bytes - weights)
        return {"weights": weights, "kv": kv, "other": self.held_bytes - weights - kv}


@dataclass(frozen=True, slots=True)
class ReservationUse:
    """Memory of a device that is kept free for a program without a lease, or that it waits for."""

    id: int
    name: str
    pid: int
    user: str
    device_uuid: str
    state: str  # "held"; "waiting": for all of it, or for more than it holds
    held_bytes: int
    wanted_bytes: int
    priority: int  # of the queue: a lower number is served first
    place: int | None  # in the queue of its device, from 1; None: it does not wait
    waiting_seconds: float | None  # None: it does not wait
    left_seconds: float | None  # until its end; None: no time limit, or it has not begun


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
    leases_error: str | None = None  # why leases and reservations are unknown; then there are none
    reservations: tuple[ReservationUse, ...] = ()
    silent_ns: int | None = None  # time since the monitor's last heartbeat; None: it runs
    # When it was taken, since 1970; None if unknown. Not compared: it is `at_ns` by a clock that may be set.
    unix_seconds: float | None = field(default=None, compare=False)
    origin: Origin = field(default=Origin.MONITOR, compare=False)
    unavailable: Mapping[str, str] = field(default_factory=dict, compare=False)  # sources without devices, and why, if known
    event_counts: Mapping[str, int] = field(default_factory=dict)  # by kind, in the monitor's own process
    events: tuple[MemoryEvent, ...] = ()  # the newest, oldest first, as far as a view asked for them

    def with_leases(self, leases: Sequence[LeaseUse], reservations: Sequence[ReservationUse] = ()) -> Snapshot:
        """The same snapshot with these leases and reservations, and the engines' names in the process entries."""
        engines = {(lease.device_uuid, lease.pid): lease.engine for lease in leases}
        devices = tuple(_named(device, engines) for device in self.devices) if engines else self.devices
        reserved = tuple(reservations)
        return replace(self, devices=devices, leases=tuple(leases), leases_error=None, reservations=reserved)


def _named(device: Device, engines: Mapping[tuple[str, int], str]) -> Device:
    """The device, with engine names in its process entries."""
    processes = device.detail.reading.processes
    if processes is None:
        return device
    named = tuple(replace(use, engine=engines.get((device.info.uuid, use.pid), use.engine)) for use in processes)
    reading = replace(device.detail.reading, processes=named)
    return replace(device, detail=replace(device.detail, reading=reading))
