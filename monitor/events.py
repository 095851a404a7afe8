"""Events: which process or engine took memory, gave it back, was refused or recalled from, ended, and its peak."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any

UNDELIVERED = "undelivered"  # among the counts of events: alerts that could not be delivered
MAX_TEXT_CHARS = 200  # of a reason, a cgroup or a name


class EventKind(StrEnum):
    """What happened."""

    HOLDS = "holds"  # what was held when a part of the log begins; not listed
    TOOK = "took"  # held memory grew
    RETURNED = "returned"  # held memory shrank
    IDLE = "idle"  # memory was held without use for the set time
    ENDED = "ended"  # a process ended, or a lease was released
    DIED = "died"  # a lease ended without being released
    REFUSED = "refused"  # a lease or reservation
    RECALLED = "recalled"  # a lease was told to shrink
    OVERDUE = "overdue"  # it did not in time
    LIMITED = "limited"  # its maximum was set by hand
    RESERVED = "reserved"  # memory is free for the process that reserved it: its reservation is new, or grew
    RELEASED = "released"  # a reservation ended, or shrank; its process may live on, and hold memory
    UNREADABLE = "unreadable"  # a device
    READABLE = "readable"  # again
    ALERT = "alert"  # a rule of the settings was met, or is met no longer
    STARTED = "started"  # the monitor
    STOPPED = "stopped"
    CLOCK = "clock"  # the system's clock was set, or the machine slept
    LOST = "lost"  # events that could not be kept


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One event. None and empty: unknown, or it does not apply."""

    kind: EventKind
    time: float = 0.0  # seconds since 1970
    id: int = 0  # ascending within a log
    device: str | None = None  # index
    device_uuid: str | None = None
    pid: int | None = None
    engine: str | None = None  # the name of a lease
    user: str | None = None
    command: str | None = None  # the program, without folder and arguments, which may hold secrets
    cgroup: str | None = None  # of the process
    bytes: int | None = None  # taken or returned; asked for by what was refused or reserved; to give back by a recall
    held_bytes: int | None = None  # after the event
    peak_bytes: int | None = None  # most that was held since the process or lease was first seen
    reason: str | None = None
    times: int = 1  # equal events that this one stands for

    @property
    def holder(self) -> tuple[str | None, int | None, str | None]:
        """What identifies the process or lease: device, pid, engine."""
        return self.device_uuid, self.pid, self.engine


_DEFAULTS = {field.name: None if field.default is MISSING else field.default for field in fields(MemoryEvent)}
_TEXTS = ("device", "device_uuid", "engine", "user", "command", "cgroup", "reason")
_AMOUNTS = ("id", "pid", "bytes", "held_bytes", "peak_bytes", "times")


def to_dict(event: MemoryEvent) -> dict[str, Any]:
    """The event as data for JSON, without what is unknown."""
    values = {name: getattr(event, name) for name in _DEFAULTS}
    return {name: _cut(value) for name, value in values.items() if value != _DEFAULTS[name]}


def from_dict(data: Any) -> MemoryEvent | None:
    """The inverse of `to_dict`; None for what is no event: another version or another program may have written it."""
    if not isinstance(data, Mapping):
        return None
    try:
        found: dict[str, Any] = {"kind": EventKind(data["kind"]), "time": float(data["time"])}
        if not math.isfinite(found["time"]):
            return None
        for name in _TEXTS:
            if name in data:
                found[name] = str(data[name])
        for name in _AMOUNTS:
            if name in data:
                found[name] = int(data[name])
        return MemoryEvent(**found)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def to_line(time_s: float, events: Iterable[MemoryEvent], *, full: bool) -> bytes:
    """A frame of a recording: {"time": ..., "full": ..., "events": [...]}."""
    frame = {"time": time_s, "full": full, "events": [to_dict(event) for event in events]}
    return json.dumps(frame, separators=(",", ":")).encode()  # ASCII: lone surrogates of odd names survive


def from_line(line: bytes) -> tuple[MemoryEvent, ...]:
    """The events of a frame; those that are damaged are left out."""
    try:
        rows = json.loads(line)["events"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ()
    return tuple(event for row in rows if (event := from_dict(row)) is not None) if isinstance(rows, list) else ()


def program_name(command: str | None) -> str | None:
    """The program of a command line, without folder and arguments."""
    words = command.split(maxsplit=1) if command else []
    return words[0].rpartition("/")[2] if words else None


def _cut(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 1] + "…"
