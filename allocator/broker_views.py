"""Rows that show the broker's state to users and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from . import wire
from .lease_policy import LeaseState

if TYPE_CHECKING:
    from .lease_table import Book, LeaseAccount


@dataclass(frozen=True, slots=True)
class DeviceView:
    """How one device is shared out; bytes."""

    uuid: str
    capacity_bytes: int
    headroom_bytes: int
    granted_bytes: int  # to all leases, including those being reaped
    foreign_bytes: int
    reserved_bytes: int


def device_view(book: Book) -> DeviceView:
    """The row of a device."""
    state = book.ledger.state
    granted = sum(tenant.granted_bytes for tenant in state.tenants.values())
    return DeviceView(
        book.info.uuid, state.capacity_bytes, state.rules.headroom_bytes, granted, state.foreign_bytes,
        state.reserved_bytes,
    )  # fmt: skip


def lease_view(entry: LeaseAccount, tenant: LeaseState, now_ns: int) -> wire.LeaseView:
    """The row of a lease."""
    recalls, demand, terms = tenant.recalls, tenant.demand, entry.terms
    if tenant.ended:
        state = "reaping"
    elif recalls:
        state = "overdue" if tenant.overdue(now_ns) else "recalling"
    else:
        state = "ok"
    return wire.LeaseView(
        entry.lease_id, terms.name, entry.peer.pid, user_name(entry.peer.uid), entry.device_uuid,
        tenant.min_bytes, tenant.max_bytes, terms.weight, terms.priority,
        granted_bytes=tenant.granted_bytes,
        held_bytes=tenant.held_bytes,
        held=entry.held,
        free_bytes=tenant.free_bytes,
        asked_bytes=demand.target_bytes if demand is not None and demand.expires_ns > now_ns else None,
        state=state,
        recall_target_bytes=recalls[-1].target_bytes if recalls else None,
        recall_age_ms=(now_ns - recalls[0].issued_ns) // 1_000_000 if recalls else None,
    )  # fmt: skip


def named(entry: LeaseAccount) -> str:
    """The engine's name, pid and lease id, for messages."""
    return f"{entry.terms.name!r} (pid {entry.peer.pid}, #{entry.lease_id})"


@lru_cache(maxsize=64)
def user_name(uid: int) -> str:
    """The user's name, or the uid if the system has no name for it, as in a container."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
