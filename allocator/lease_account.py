"""The entries of the lease table, leases and leased devices, and the rows that show them to users and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..monitor.events import EventKind, MemoryEvent
from ..monitor.snapshot import DeviceInfo
from ..monitor.sources.process_facts import user_name
from . import wire
from .broker_connection import Connection, Peer
from .device_account import DeviceAccount
from .lease_policy import LeaseState
from .lease_record import HeldBounds, RecordOwner, Sums, bounds_between

_MAX_READINGS = 64  # readings of a record kept until the next measurement
_BETWEEN_READINGS_NS = 2_000_000  # at least, beside those of each measurement: reports may come fast


@dataclass(slots=True, eq=False)
class LeaseAccount:
    """A lease, with what its device's account does not store. Only `LeaseTable` changes it."""

    state: LeaseState
    device_uuid: str
    peer: Peer
    record: RecordOwner
    connection: Connection | None  # None: it has ended and is being reaped
    generation: wire.OrderGeneration  # the generation of its newest grant
    may_return: bool = True  # after its end: whether its engine may continue it
    held: Mapping[str, int] = field(default_factory=dict)  # bytes by class, as reported
    num_waiting: int = 0  # requests, as reported
    overdue_logged: bool = False
    readings: deque[tuple[int, Sums]] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))

    @property
    def lease_id(self) -> int:
        """The lease's id; no other of this broker has it."""
        return self.state.lease_id

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.state.name

    def add_reading(self, at_ns: int, sums: Sums) -> None:
        """Keep a reading of the record that was made by `at_ns`, unless there is a recent one."""
        if not self.readings or at_ns - self.readings[-1][0] >= _BETWEEN_READINGS_NS:
            self.readings.append((at_ns, sums))

    def bounds_since(self, at_ns: int, now: Sums) -> HeldBounds:
        """Bounds that held at every instant from `at_ns` until now; the lower one is 0 if no reading is that old."""
        while len(self.readings) > 1 and self.readings[1][0] <= at_ns:
            self.readings.popleft()
        known = bool(self.readings) and self.readings[0][0] <= at_ns
        return bounds_between(self.readings[0][1] if known else Sums(), now)


@dataclass(slots=True, eq=False)
class LeasedDevice:
    """A leased device."""

    info: DeviceInfo
    account: DeviceAccount
    measured_ns: int = -1  # the time of the newest measurement applied
    trouble: str | None = None  # why the device is not measured
    trouble_since_ns: int = 0  # since when
    trouble_logged: str | None = None  # the last trouble in the log


@dataclass(frozen=True, slots=True)
class DeviceView:
    """How one device is shared out; bytes."""

    uuid: str
    capacity_bytes: int
    headroom_bytes: int
    granted_bytes: int  # to all leases, including those being reaped
    foreign_bytes: int
    reserved_bytes: int


def device_view(device: LeasedDevice) -> DeviceView:
    """The row of a device."""
    state = device.account.state
    granted = sum(lease.granted_bytes for lease in state.leases.values())
    return DeviceView(
        device.info.uuid, state.capacity_bytes, state.rules.headroom_bytes, granted, state.foreign_bytes, state.reserved_bytes
    )


def lease_view(lease: LeaseAccount, now_ns: int) -> wire.LeaseView:
    """The row of a lease."""
    state = lease.state
    recalls, demand, lacking_ns = state.recalls, state.demand_at(now_ns), state.lacks_for_ns(now_ns)
    if state.ended:
        status = "reaping"
    elif recalls:
        status = "overdue" if state.overdue(now_ns) else "recalling"
    else:
        status = "ok"
    return wire.LeaseView(
        lease.lease_id, lease.name, lease.peer.pid, user_name(lease.peer.uid), lease.device_uuid,
        state.min_bytes, state.max_bytes, state.weight, state.priority,
        granted_bytes=state.granted_bytes,
        held_bytes=state.held_bytes,
        held=lease.held,
        free_bytes=min(state.free_bytes + state.kept_bytes, wire.MAX_BYTES),
        asked_bytes=None if demand is None else demand.target_bytes,
        state=status,
        recall_target_bytes=recalls[-1].target_bytes if recalls else None,
        recall_age_ms=(now_ns - recalls[0].issued_ns) // 1_000_000 if recalls else None,
        kept_bytes=min(state.kept_bytes, wire.MAX_BYTES),
        num_waiting=lease.num_waiting,
        lacking_ms=None if lacking_ns is None else lacking_ns // 1_000_000,
    )  # fmt: skip


def named(lease: LeaseAccount) -> str:
    """The engine's name, pid and lease id, for messages."""
    return f"{lease.name!r} (pid {lease.peer.pid}, #{lease.lease_id})"


def peer_event(
    peer: Peer, info: DeviceInfo | None, kind: EventKind, num_bytes: int | None, reason: str | None = None
) -> MemoryEvent:
    """An event that concerns a process with a lease or a reservation, or one that was refused it."""
    return MemoryEvent(
        kind=kind,
        device=None if info is None else info.index,
        device_uuid=None if info is None else info.uuid,
        pid=peer.pid,
        user=user_name(peer.uid),
        bytes=num_bytes,
        reason=reason,
    )
