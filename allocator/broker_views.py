"""Rows that show the broker's state to users and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from . import wire
from .lease_account import LeaseAccount, LeasedDevice
from .lease_policy import LeaseState


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
        device.info.uuid, state.capacity_bytes, state.rules.headroom_bytes, granted, state.foreign_bytes,
        state.reserved_bytes,
    )  # fmt: skip


def lease_view(lease: LeaseAccount, state: LeaseState, now_ns: int) -> wire.LeaseView:
    """The row of a lease."""
    recalls, demand, terms = state.recalls, state.demand, lease.terms
    if state.ended:
        status = "reaping"
    elif recalls:
        status = "overdue" if state.overdue(now_ns) else "recalling"
    else:
        status = "ok"
    return wire.LeaseView(
        lease.lease_id, terms.name, lease.peer.pid, user_name(lease.peer.uid), lease.device_uuid,
        state.min_bytes, state.max_bytes, terms.weight, terms.priority,
        granted_bytes=state.granted_bytes,
        held_bytes=state.held_bytes,
        held=lease.held,
        free_bytes=state.free_bytes,
        asked_bytes=demand.target_bytes if demand is not None and demand.expires_ns > now_ns else None,
        state=status,
        recall_target_bytes=recalls[-1].target_bytes if recalls else None,
        recall_age_ms=(now_ns - recalls[0].issued_ns) // 1_000_000 if recalls else None,
    )  # fmt: skip


def named(lease: LeaseAccount) -> str:
    """The engine's name, pid and lease id, for messages."""
    return f"{lease.terms.name!r} (pid {lease.peer.pid}, #{lease.lease_id})"


@lru_cache(maxsize=64)
def user_name(uid: int) -> str:
    """The user's name, or the uid if the system has no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
