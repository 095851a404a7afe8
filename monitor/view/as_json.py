"""A snapshot as JSON for scripts."""

from __future__ import annotations

import json
import math
from typing import Any

from ..snapshot import Snapshot


def to_json(snapshot: Snapshot, *, indent: int | None = None) -> str:
    """One JSON object, on one line without `indent`; in bytes, seconds, degrees, watts and shares of 1. Unknown is null.

        {"time": Unix seconds, "source", "monitor_pid",
         "devices": [{"uuid", "index", "kind", "name", "pci_id", "parent_uuid",
                      "memory": {"total_bytes", "used_bytes", "free_bytes", "bytes_per_second",
                                 "seconds_until_exhaustion", "age_seconds", "stale", "polls", "failures", "error"},
                      "utilization", "temperature_celsius", "power_watts", "power_limit_watts",
                      "processes": [{"pid", "used_bytes", "kind", "user", "command", "engine"}] or null,
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
