"""A snapshot as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from .owners import OwnerUse, owner_names, owner_uses
from .snapshot import Snapshot


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
                     "state", "recall_target_bytes", "recall_age_seconds", "kept_bytes", "num_waiting"}] or null,
         "leases_error",
         "reservations": [{"id", "name", "pid", "user", "device_uuid", "state", "held_bytes", "wanted_bytes", "priority",
                           "place", "waiting_seconds", "left_seconds"}] or null}

    Only what JSON has (RFC 8259): no NaN or infinity, and text without the halves of a surrogate pair.
    """
    return json.dumps(plain(to_dict(snapshot)), indent=indent, allow_nan=False)


def to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Plain data, including derived values."""
    devices = []
    for device in snapshot.devices:
        memory, uses = device.memory, device.detail.reading.processes
        age = memory.age_ns(snapshot.at_ns)
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
                    "stale": memory.is_stale(snapshot.at_ns),
                    "polls": memory.polls,
                    "failures": memory.failures,
                    "error": memory.error,
                },
                **asdict(device.detail.reading),
                "processes": None
                if (uses := device.detail.reading.processes) is None
                else [asdict(use) | owner_names(use.cgroup) for use in uses],
                "owners": [_owner(owner) for owner in owner_uses(device, snapshot.leases, snapshot.devices)],
                "detail_error": device.detail.error,
            }
        )
    known = snapshot.leases_error is None
    return {
        "time": snapshot.unix_seconds,
        "source": snapshot.source,
        "monitor_pid": snapshot.monitor_pid,
        "devices": devices,
        "leases": [asdict(lease) for lease in snapshot.leases] if known else None,
        "leases_error": snapshot.leases_error,
        "reservations": [asdict(reservation) for reservation in snapshot.reservations] if known else None,
    }


def _owner(owner: OwnerUse) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in ("kind", "name", "num_processes", "used_bytes", "unknown", "idle_bytes")}


def plain(value: Any) -> Any:
    """`value` without values that JSON cannot express."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        # A trend that decays to a denormal number predicts exhaustion after more seconds than a float can hold.
        return None
    if isinstance(value, str):
        # A command line need not be UTF-8: Python keeps such bytes as surrogate halves.
        return value.encode(errors="replace").decode()
    return value
