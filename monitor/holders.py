"""What processes and leases hold: from one snapshot to the next as events, and from events as a summary of a span of time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..common.units import MIB
from .events import EventKind, MemoryEvent, program_name
from .owners import owner_names
from .snapshot import Device, LeaseUse, ProcessUse, Snapshot

MOST_STEP_BYTES = 256 * MIB
MAX_EVENTS = 256  # of one snapshot, those of most bytes
MAX_HOLDERS = 1024  # listed at the beginning of a part of the log, likewise

_COUNTED = (EventKind.REFUSED, EventKind.RECALLED, EventKind.OVERDUE)  # in a summary

Key = tuple[str | None, int | None, str | None]  # MemoryEvent.holder
Alive = Callable[[int], bool]


def step_bytes(total_bytes: int | None) -> int:
    """The change of held memory that is an event: 1/128 of the device, at most 256 MiB."""
    return MOST_STEP_BYTES if total_bytes is None else min(MOST_STEP_BYTES, max(1, total_bytes // 128))


class _Listed(NamedTuple):
    """A holder in a snapshot."""

    names: MemoryEvent
    held_bytes: int | None
    use: ProcessUse | None


@dataclass(slots=True)
class _Holder:
    """A process without a lease, or a lease."""

    names: MemoryEvent  # what an event about it says
    told_bytes: int | None  # held at its last event; None: not known
    held_bytes: int | None = None
    peak_bytes: int | None = None  # since its last event
    most_bytes: int | None = None  # since it was first seen
    idle: bool = False
    ended: bool = False  # its end was told already

    def hold(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        self.raise_peak(held_bytes)

    def raise_peak(self, held_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes or 0, held_bytes)
        self.most_bytes = max(self.most_bytes or 0, held_bytes)

    def event(self, kind: EventKind, num_bytes: int | None = None, reason: str | None = None) -> MemoryEvent:
        """An event about it, with the peak since the one before; at its end, since it was first seen."""
        ends = kind is EventKind.ENDED
        peak_bytes, held_bytes = (self.most_bytes, None) if ends else (self.peak_bytes, self.held_bytes)
        if kind is not EventKind.HOLDS:
            self.peak_bytes = self.held_bytes
        return replace(self.names, kind=kind, bytes=num_bytes, held_bytes=held_bytes, peak_bytes=peak_bytes, reason=reason)


def is_alive(pid: int) -> bool:
    """Whether a process runs, as far as this one sees it."""
    return os.path.exists(f"/proc/{pid}")


class Holders:
    """The holders of all devices. Not thread-safe."""

    def __init__(self, *, idle_after_s: float, alive: Alive = is_alive) -> None:
        self._idle_after_s, self._alive = idle_after_s, alive
        self._holders: dict[Key, _Holder] = {}
        self._gone: dict[Key, _Holder] = {}  # since the last look: the event of their end may come after it
        self._known: set[str] = set()  # devices of which processes were listed before; leases begin with the monitor

    def look(self, snapshot: Snapshot) -> list[MemoryEvent]:
        """What changed since the last call. The first list of a device's processes is where it begins."""
        events: list[MemoryEvent] = []
        self._gone = {}
        leases = {(lease.device_uuid, lease.pid) for lease in snapshot.leases}
        there = {device.info.uuid for device in snapshot.devices}
        self._holders = {key: holder for key, holder in self._holders.items() if key[0] in there}
        self._known &= there
        for device in snapshot.devices:
            uuid = device.info.uuid
            seen = self._seen(device, snapshot.leases, leases)
            events += self._update(device, seen)
            if device.detail.reading.processes is not None:
                self._known.add(uuid)
        if len(events) > MAX_EVENTS:
            largest = sorted(events, key=lambda event: -(abs(event.bytes or 0)))
            events = largest[:MAX_EVENTS]
            events.append(MemoryEvent(kind=EventKind.LOST, times=len(largest) - MAX_EVENTS, reason="too many changes at once"))
        return events

    def raise_peaks(self, leases: Iterable[LeaseUse]) -> None:
        """Take note of what leases hold between two snapshots."""
        for lease in leases:
            holder = self._holders.get((lease.device_uuid, lease.pid, lease.engine))
            if holder is not None:
                holder.raise_peak(lease.held_bytes)

    def completed(self, event: MemoryEvent) -> MemoryEvent:
        """A broker's event, with what is known of its process or lease."""
        known = (*event.holder[:2], None)
        holder = self._holders.get(event.holder) or self._gone.get(event.holder) or self._holders.get(known)
        if event.kind in (EventKind.ENDED, EventKind.DIED) and holder is not None and holder.names.engine == event.engine:
            holder.ended = True
        if holder is None:
            return event
        names = holder.names
        is_lease = names.engine == event.engine
        return replace(
            event,
            user=event.user or names.user,
            command=event.command or names.command,
            cgroup=event.cgroup or names.cgroup,
            peak_bytes=holder.most_bytes if is_lease and holder.ended else event.peak_bytes,
        )

    def held(self) -> list[MemoryEvent]:
        """What each holder that had an event holds, as events of the kind "holds": the largest MAX_HOLDERS."""
        told = [one for one in self._holders.values() if one.told_bytes is None or one.told_bytes > 0]
        told.sort(key=lambda one: -(one.held_bytes or 0))
        return [one.event(EventKind.HOLDS) for one in told[:MAX_HOLDERS]]

    def _seen(self, device: Device, leases: Iterable[LeaseUse], leased: set[tuple[str, int]]) -> dict[Key, _Listed]:
        """The holders of a device now: leases, and processes without one."""
        info, found = device.info, dict[Key, _Listed]()
        uses = {use.pid: use for use in device.detail.reading.processes or ()}
        names = MemoryEvent(kind=EventKind.HOLDS, device=info.index, device_uuid=info.uuid)
        for lease in leases:
            if lease.device_uuid == info.uuid:
                use = uses.get(lease.pid)
                about = replace(names, pid=lease.pid, engine=lease.engine, user=lease.user)
                if use is not None:
                    about = replace(about, command=program_name(use.command), cgroup=use.cgroup)
                # A process may hold two leases of one name while memory of the former one comes back.
                before = found[about.holder].held_bytes if about.holder in found else 0
                found[about.holder] = _Listed(about, lease.held_bytes + (before or 0), use)
        for pid, use in uses.items():
            if (info.uuid, pid) not in leased:
                about = replace(names, pid=pid, user=use.user, command=program_name(use.command), cgroup=use.cgroup)
                found[about.holder] = _Listed(about, use.used_bytes, use)
        return found

    def _update(self, device: Device, seen: dict[Key, _Listed]) -> list[MemoryEvent]:
        uuid, step = device.info.uuid, step_bytes(device.memory.total_bytes)
        gone = [key for key in self._holders if key[0] == uuid and key not in seen and self._is_gone(key, device)]
        left = {key[1]: self._holders.pop(key) for key in gone}
        events: list[MemoryEvent] = []
        for key, (names, held_bytes, use) in seen.items():
            holder = self._holders.get(key)
            if holder is None:
                is_known = key[2] is not None or uuid in self._known
                holder = self._holders[key] = _begun(names, held_bytes, left.pop(key[1], None), step, is_known=is_known)
                if held_bytes is None and is_known:
                    events.append(holder.event(EventKind.TOOK, reason="the driver does not say how much"))
            holder.names = names
            events += _changes(holder, held_bytes, step)
            events += self._idleness(holder, use, step)
        self._gone |= {holder.names.holder: holder for holder in left.values()}
        for holder in left.values():
            events += self._end(holder, step)
        return events

    def _is_gone(self, key: Key, device: Device) -> bool:
        """Whether a holder that is not listed is not there, rather than a process that could not be listed."""
        processes, pid = device.detail.reading.processes, key[1]
        if key[2] is not None:
            return True
        if processes is None or device.detail.error is not None:
            return False
        return not device.lists_largest_only or pid is None or not self._alive(pid)

    def _idleness(self, holder: _Holder, use: ProcessUse | None, step: int) -> Iterator[MemoryEvent]:
        seconds = None if use is None else use.idle_seconds
        was_idle, holder.idle = holder.idle, seconds is not None and seconds >= self._idle_after_s
        if holder.idle and not was_idle and (holder.held_bytes or 0) >= step:
            yield holder.event(EventKind.IDLE, reason=f"without use for {seconds:,.0f} s")

    def _end(self, holder: _Holder, step: int) -> Iterator[MemoryEvent]:
        """The event of a holder that is not there any more."""
        if holder.names.engine is not None or holder.ended or holder.told_bytes == 0:
            return  # the broker tells the ends of leases
        pid, given = holder.names.pid, None if holder.told_bytes is None else -holder.told_bytes
        if pid is not None and self._alive(pid):
            holder.held_bytes = 0
            yield holder.event(EventKind.RETURNED, given)
        else:
            yield holder.event(EventKind.ENDED, given)


def _begun(names: MemoryEvent, held_bytes: int | None, former: _Holder | None, step: int, *, is_known: bool) -> _Holder:
    """A holder that was not there before; of the `former` one of the same process, with a lease or without, it is no news.

    The processes that are there at the first look at a device are no news either.
    """
    if former is not None:
        return _Holder(names, former.told_bytes, former.held_bytes, former.peak_bytes, former.most_bytes)
    if is_known:
        return _Holder(names, None if held_bytes is None else 0)
    return _Holder(names, held_bytes if held_bytes is None or held_bytes >= step else 0)


def _changes(holder: _Holder, held_bytes: int | None, step: int) -> Iterator[MemoryEvent]:
    """The event of a holder that now holds so much."""
    if held_bytes is None:
        holder.held_bytes = None
        return
    holder.hold(held_bytes)
    change = held_bytes - (holder.told_bytes or 0)
    if holder.told_bytes is None or abs(change) >= step or (held_bytes == 0 and change):
        holder.told_bytes = held_bytes
        if change:
            yield holder.event(EventKind.TOOK if change > 0 else EventKind.RETURNED, change)


# ---- summaries ----------------------------------------------------------------------------------------------------------


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
    names = {name: getattr(event, name) for name in ("device", "device_uuid", "pid", "engine", "user", "command", "cgroup")}
    return names | owner_names(event.cgroup)


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
