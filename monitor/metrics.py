"""The monitor's Prometheus metrics, computed from a snapshot at each scrape.

No state is kept between scrapes. What is gone from the snapshot is gone from the next page. Counters too come from the
snapshot: the poller keeps `polls` and `failures` by uuid as long as the monitor runs, also for an absent device.

An unknown value is an absent series, never 0. So is the time until exhaustion while use does not grow: +Inf would spoil
averages, and the trend, which is present then, distinguishes "does not grow" from "not known".
docs/decisions/0011-prometheus-client.md has the reasons for this and for the library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..version import __version__
from .events import UNDELIVERED, EventKind, program_name
from .owners import owner_uses
from .snapshot import Device, LeaseUse, ReservationUse, Snapshot

# Series per device; a host has hundreds of short-lived processes, each a series of its own
MAX_PROCESSES = 64
MAX_OWNERS = 64
_MAX_LABEL = 128  # characters; process names can be arbitrarily long

# Computed once: at each scrape, a start time would jitter with the system's clock.
_MONOTONIC_EPOCH_S = time.time() - time.monotonic()

Samples = Iterator[tuple[tuple[str | None, ...], float]]  # (label values, None if unknown; value)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the page and the function that computes its samples from a snapshot."""

    name: str
    type: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Samples]

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """The metric without samples, as an object of the client library."""
        kind = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        return kind(self.name, self.help, labels=self.labels)


class SnapshotCollector(Collector):
    """A Prometheus collector: METRICS of the snapshot that `read` returns. Thread-safe."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics without samples: a registry learns the names from it, for the filter `?name[]=`."""
        return [metric.family() for metric in METRICS]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """All metrics now. Raises what `read` raises."""
        snapshot = self._read()
        for metric in METRICS:
            family = metric.family()
            for values, number in metric.samples(snapshot):
                family.add_metric([_label(value) for value in values], number)
            yield family


def _of_devices(value: Callable[[Device, int], float | None]) -> Callable[[Snapshot], Samples]:
    """`value(device, now_ns)` of every device that has one."""

    def samples(snapshot: Snapshot) -> Samples:
        for device in snapshot.devices:
            if (number := value(device, snapshot.at_ns)) is not None:
                yield (device.info.uuid,), number

    return samples


def _device(name: str, text: str, value: Callable[[Device, int], float | None]) -> Metric:
    return Metric(name, "gauge", text, ("uuid",), _of_devices(value))


def _count(name: str, text: str, value: Callable[[Device], int]) -> Metric:
    """A counter per polled device. A record slot not yet filled says 0, which would make the counter decrease."""
    counted = _of_devices(lambda device, _: value(device) if device.memory.at_ns else None)
    return Metric(name, "counter", text, ("uuid",), counted)


def _monitor_infos(snapshot: Snapshot) -> Samples:
    yield (__version__, snapshot.source), 1


def _start_time(snapshot: Snapshot) -> Samples:
    yield (), _MONOTONIC_EPOCH_S + snapshot.started_ns / 1e9


def _last_answer_age(snapshot: Snapshot) -> Samples:
    last_ns = max([snapshot.started_ns, *(device.memory.at_ns for device in snapshot.devices)])
    yield (), (snapshot.at_ns - last_ns) / 1e9


_INFO_LABELS = ("uuid", "index", "name", "kind", "pci_id", "parent_uuid")


def _device_infos(snapshot: Snapshot) -> Samples:
    for device in snapshot.devices:
        yield tuple(getattr(device.info, label) for label in _INFO_LABELS), 1


def _processes(snapshot: Snapshot) -> Samples:
    for device in snapshot.devices:
        known = [(use, use.used_bytes) for use in device.detail.reading.processes or () if use.used_bytes is not None]
        known.sort(key=lambda pair: (pair[0].engine is None, -pair[1]))
        for use, used_bytes in known[:MAX_PROCESSES]:
            yield (device.info.uuid, str(use.pid), use.engine, use.user, program_name(use.command)), used_bytes


def _process_idle(snapshot: Snapshot) -> Samples:
    for device in snapshot.devices:
        known = [use for use in device.detail.reading.processes or () if use.idle_seconds is not None]
        known.sort(key=lambda use: (use.engine is None, -(use.used_bytes or 0)))
        for use in known[:MAX_PROCESSES]:
            yield (device.info.uuid, str(use.pid)), use.idle_seconds or 0.0


def _owners(snapshot: Snapshot) -> Samples:
    for device in snapshot.devices:
        owners = owner_uses(device, snapshot.leases, snapshot.devices)
        known = [owner for owner in owners if owner.unknown < owner.num_processes]
        for owner in known[:MAX_OWNERS]:
            yield (device.info.uuid, owner.kind, owner.name), owner.used_bytes


def _events(snapshot: Snapshot) -> Samples:
    for kind in EventKind:
        if kind is not EventKind.HOLDS:
            yield (kind,), snapshot.event_counts.get(kind, 0)


def _undelivered(snapshot: Snapshot) -> Samples:
    yield (), snapshot.event_counts.get(UNDELIVERED, 0)


_LEASE_LABELS = ("uuid", "pid", "engine")
_LEASE_STATES = ("ok", "loading", "recalling", "overdue", "reaping")

LeaseNumbers = Iterable[tuple[tuple[str, ...], float | None]]  # (values of further labels; number, None if unknown)
Together = Callable[[list[float]], float]


def _of_leases(numbers: Callable[[LeaseUse], LeaseNumbers], together: Together) -> Callable[[Snapshot], Samples]:
    """`numbers(lease)` of every lease, combined by `together` for leases with equal labels: a series must be unique.

    A process has two leases of one name if the memory of its former lease is not back yet, or if it runs a model twice.
    """

    def samples(snapshot: Snapshot) -> Samples:
        series: dict[tuple[str, ...], list[float]] = {}
        for lease in snapshot.leases:
            labels = lease.device_uuid, str(lease.pid), _label(lease.engine)
            for further, number in numbers(lease):
                if number is not None:
                    series.setdefault((*labels, *further), []).append(number)
        for key, values in series.items():
            yield key, together(values)

    return samples


def _lease(name: str, text: str, value: Callable[[LeaseUse], float | None], together: Together = sum) -> Metric:
    return Metric(name, "gauge", text, _LEASE_LABELS, _of_leases(lambda lease: [((), value(lease))], together))


def _lease_infos(lease: LeaseUse) -> LeaseNumbers:
    yield (_label(lease.user),), 1


def _lease_held(lease: LeaseUse) -> LeaseNumbers:
    for name, held_bytes in lease.held_parts().items():
        yield (name,), held_bytes


def _lease_states(lease: LeaseUse) -> LeaseNumbers:
    for state in _LEASE_STATES:
        yield (state,), state == lease.state


def _reservation(name: str, text: str, value: Callable[[ReservationUse], float | None]) -> Metric:
    def samples(snapshot: Snapshot) -> Samples:
        for one in snapshot.reservations:
            if (number := value(one)) is not None:
                yield (one.device_uuid, str(one.id), str(one.pid), one.name, one.user), number

    return Metric(f"vram_reservation_{name}", "gauge", text, ("uuid", "id", "pid", "name", "user"), samples)


def _age_s(at_ns: int, now_ns: int) -> float | None:
    return (now_ns - at_ns) / 1e9 if at_ns else None


METRICS: tuple[Metric, ...] = (
    # the monitor
    Metric("vram_monitor_info", "gauge", "1; what monitors.", ("version", "source"), _monitor_infos),
    Metric("vram_monitor_start_time_seconds", "gauge", "When the monitor began, Unix time.", (), _start_time),
    Metric(
        "vram_monitor_last_answer_age_seconds", "gauge",
        "Time since any of the devices answered; since the monitor's start if none did.", (), _last_answer_age,
    ),
    # devices
    Metric("vram_device_info", "gauge", "1; what the device is.", _INFO_LABELS, _device_infos),
    _device(
        "vram_device_up", "1 if the last question about memory was answered, 0 if it failed or none was answered yet.",
        lambda device, _: device.memory.at_ns > 0 and device.memory.error is None,
    ),
    _device(
        "vram_device_utilization_ratio", "Share of time in which the device computed, 0 to 1.",
        lambda device, _: device.detail.reading.utilization,
    ),
    _device(
        "vram_device_temperature_celsius", "Temperature of the device.",
        lambda device, _: device.detail.reading.temperature_celsius,
    ),
    _device("vram_device_power_watts", "Power drawn.", lambda device, _: device.detail.reading.power_watts),
    _device(
        "vram_device_power_limit_watts", "Power that may be drawn.",
        lambda device, _: device.detail.reading.power_limit_watts,
    ),
    # their memory
    _device("vram_memory_total_bytes", "Memory there is.", lambda device, _: device.memory.total_bytes),
    _device(
        "vram_memory_used_bytes", "Memory that is not free: of all processes, and of the driver itself.",
        lambda device, _: device.memory.used_bytes,
    ),
    _device("vram_memory_free_bytes", "Memory that is free.", lambda device, _: device.memory.free_bytes),
    _device(
        "vram_memory_trend_bytes_per_second", "Smoothed growth of used memory; negative while it comes free.",
        lambda device, _: device.memory.bytes_per_second,
    ),
    _device(
        "vram_memory_time_to_exhaustion_seconds",
        "When free memory ends if the trend goes on; absent while use does not grow.",
        lambda device, _: device.memory.seconds_until_exhaustion,
    ),
    # processes
    Metric(
        "vram_process_used_bytes", "gauge", f"Memory of a process; the engines' and the largest, {MAX_PROCESSES} at most.",
        ("uuid", "pid", "engine", "user", "command"), _processes,
    ),
    Metric(
        "vram_process_idle_seconds", "gauge", "Time without use, of the same processes, where that is known.",
        ("uuid", "pid"), _process_idle,
    ),
    Metric(
        "vram_owner_used_bytes", "gauge", f"Memory of containers, pods, units and users; {MAX_OWNERS} at most.",
        ("uuid", "kind", "owner"), _owners,
    ),
    # leases: what engines may hold, and hold
    Metric(
        "vram_lease_info", "gauge", "1; the names of a lease.", (*_LEASE_LABELS, "user"), _of_leases(_lease_infos, max),
    ),
    _lease("vram_lease_min_bytes", "What the engine is guaranteed.", lambda lease: lease.min_bytes),
    _lease(
        "vram_lease_max_bytes", "What it may be granted at most; absent if nothing but the device limits it.",
        lambda lease: lease.max_bytes,
    ),
    _lease("vram_lease_granted_bytes", "What it may hold now.", lambda lease: lease.granted_bytes),
    Metric(
        "vram_lease_held_bytes", "gauge", "What it holds at most, by class: weights, kv and other, which is the rest.",
        (*_LEASE_LABELS, "class"), _of_leases(_lease_held, sum),
    ),
    _lease("vram_lease_spare_bytes", "What it can give back without affecting a request.", lambda lease: lease.spare_bytes),
    _lease(
        "vram_lease_asked_bytes", "What it could use in all; absent if it asks for nothing.",
        lambda lease: lease.asked_bytes,
    ),
    _lease("vram_lease_waiting_requests", "Requests that the engine has and does not run.", lambda lease: lease.num_waiting),
    _lease(
        "vram_lease_recall_target_bytes", "What it is to be at or under; absent if nothing is recalled.",
        lambda lease: lease.recall_target_bytes,
    ),
    _lease(
        "vram_lease_recall_age_seconds", "Time since the oldest recall that is not served; absent if nothing is recalled.",
        lambda lease: lease.recall_age_seconds, max,
    ),
    Metric(
        "vram_lease_state", "gauge", "1 for the state that the lease is in, 0 for the other ones.",
        (*_LEASE_LABELS, "state"), _of_leases(_lease_states, max),
    ),
    # reservations: memory kept free for programs without a lease
    _reservation("held_bytes", "What is free for the program, or used by it.", lambda one: one.held_bytes),
    _reservation("wanted_bytes", "What it wants in all; more than held: the rest waits.", lambda one: one.wanted_bytes),
    _reservation("left_seconds", "Time until its end; absent without a time limit, and before.", lambda one: one.left_seconds),
    _reservation("waiting_seconds", "Time that it has waited; absent if it does not wait.", lambda one: one.waiting_seconds),
    _reservation("queue_place", "Its place in the device's queue, from 1; absent if it does not wait.", lambda one: one.place),
    # events
    Metric("vram_events_total", "counter", "Events, by kind.", ("kind",), _events),
    Metric("vram_alerts_undelivered_total", "counter", "Alerts that could not be delivered.", (), _undelivered),
    # quality of the numbers
    _device(
        "vram_memory_age_seconds", "Age of the memory numbers.",
        lambda device, now_ns: _age_s(device.memory.at_ns, now_ns),
    ),
    _device(
        "vram_memory_stale", "1 if they are older than three intervals: too old for engines.",
        lambda device, now_ns: device.memory.is_stale(now_ns),
    ),
    _device(
        "vram_detail_up", "1 if the last question about load and processes was answered, 0 if it failed or none was yet.",
        lambda device, _: device.detail.at_ns > 0 and device.detail.error is None,
    ),
    _device(
        "vram_detail_age_seconds", "Age of load and processes.",
        lambda device, now_ns: _age_s(device.detail.at_ns, now_ns),
    ),
    _count("vram_polls_total", "Questions about memory, answered or failed.", lambda device: device.memory.polls),
    _count("vram_poll_failures_total", "Of these, failed.", lambda device: device.memory.failures),
)  # fmt: skip


def _label(value: str | None) -> str:
    """A label's value that every parser of the page accepts: no control characters or lone surrogates, bounded length.

    An empty value is an absent label to Prometheus.
    """
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in value or "")
    return shown if len(shown) <= _MAX_LABEL else shown[: _MAX_LABEL - 1] + "…"
