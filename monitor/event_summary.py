"""What each process and engine held in a span of time: at its beginning, at most, at its end; and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .events import EventKind, MemoryEvent
from .holders import Key
from .owners import OwnerKind, owners_in

_COUNTED = (EventKind.REFUSED, EventKind.RECALLED, EventKind.OVERDUE)


@dataclass(slots=True)
class HolderSummary:
    """One process or lease; bytes."""

    last: MemoryEvent  # its newest event, which names it
    began_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    taken_bytes: int = 0
    returned_bytes: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    ended: str | None = None  # "ended" or "died"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        amounts = ("began_bytes", "peak_bytes", "held_bytes", "taken_bytes", "returned_bytes", "ended")
        return names_of(self.last) | {name: getattr(self, name) for name in amounts} | self.counts


def names_of(event: MemoryEvent) -> dict[str, Any]:
    """What an event says of its process or lease, with the names of owners."""
    owners = owners_in(event.cgroup)
    names = {name: getattr(event, name) for name in ("device", "device_uuid", "pid", "engine", "user", "command", "cgroup")}
    return names | {
        kind.value: owners[kind].name if kind in owners else None for kind in OwnerKind if kind is not OwnerKind.USER
    }


def summarize(events: Iterable[MemoryEvent], since_s: float) -> list[HolderSummary]:
    """The summary of `EventReader.events`, in which earlier events lead to the state at `since_s`; the largest peaks first."""
    found: dict[Key, HolderSummary] = {}
    listed: set[Key] = set()  # as the log began a segment
    began = False
    for event in events:
        if not began and event.time >= since_s:
            _begin(found)
            began = True
        if event.kind is EventKind.STARTED:  # what is not held any more went while no monitor ran
            for key in found.keys() - listed:
                found[key].held_bytes = 0
        if event.kind is not EventKind.HOLDS:
            listed.clear()
        if event.pid is None or event.kind in (EventKind.ALERT, EventKind.LOST):
            continue
        if event.kind is EventKind.HOLDS:
            listed.add(event.holder)
        if (one := found.get(event.holder)) is None:
            one = found[event.holder] = HolderSummary(event)
            if event.kind is EventKind.HOLDS:  # as the monitor began: what was before is not known
                one.began_bytes = event.held_bytes or 0
        one.last = event
        _apply(one, event, began)
    if not began:
        _begin(found)
    kept = [one for one in found.values() if one.peak_bytes or one.taken_bytes or any(one.counts.values()) or one.ended]
    return sorted(kept, key=lambda one: -one.peak_bytes)


def _begin(found: dict[Key, HolderSummary]) -> None:
    for one in found.values():
        one.began_bytes = one.peak_bytes = one.held_bytes


def _apply(one: HolderSummary, event: MemoryEvent, began: bool) -> None:
    kind = event.kind
    if kind in (EventKind.TOOK, EventKind.RETURNED, EventKind.HOLDS):
        one.held_bytes = event.held_bytes or 0
    elif kind in (EventKind.ENDED, EventKind.DIED):
        one.held_bytes = 0
    if not began:
        return
    if kind in (EventKind.TOOK, EventKind.RETURNED):
        one.peak_bytes = max(one.peak_bytes, event.peak_bytes or 0, one.held_bytes)
        if event.bytes is not None:
            one.taken_bytes += max(0, event.bytes)
            one.returned_bytes += max(0, -event.bytes)
    elif kind is EventKind.HOLDS:
        one.peak_bytes = max(one.peak_bytes, one.held_bytes)
    elif kind in (EventKind.ENDED, EventKind.DIED):
        one.ended = kind.value
        one.peak_bytes = one.peak_bytes or event.peak_bytes or 0  # of one that the log knows by its end alone
    elif kind in one.counts:
        one.counts[kind] += event.times
