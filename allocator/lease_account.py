"""The entries of the lease table: a lease with its terms and connection, and a leased device with its account."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..monitor.snapshot import DeviceInfo
from . import wire
from .broker_connection import Connection, Peer
from .device_account import DeviceAccount, LeaseTerms
from .lease_record import HeldBounds, RecordOwner, Sums, bounds_between

_MAX_READINGS = 64  # readings of a record kept until the next measurement


@dataclass(slots=True, eq=False)
class LeaseAccount:
    """A lease, with what its device's account does not store. Only `LeaseTable` changes it."""

    lease_id: int
    terms: LeaseTerms
    device_uuid: str
    peer: Peer
    record: RecordOwner
    connection: Connection | None  # None: it has ended and is being reaped
    generation: wire.OrderGeneration  # the generation of its newest grant
    may_return: bool = True  # after its end: whether its engine may continue it
    held: Mapping[str, int] = field(default_factory=dict)  # bytes by class, as reported
    overdue_logged: bool = False
    readings: deque[tuple[int, Sums]] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))

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
