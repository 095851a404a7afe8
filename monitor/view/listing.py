"""The processes and leases that a page lists: filtered, ordered, without the small processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ...common.units import MIB
from ..owners import owner_text
from ..snapshot import Device, DeviceKind, LeaseUse, ProcessUse, ReservationUse
from .numbers import share_of

HOST_MIN_BYTES = 16 * MIB  # the live view hides smaller processes of the host


class Order(StrEnum):
    """The sort order of the processes."""

    MEMORY = "memory"
    PID = "pid"
    USER = "user"


@dataclass(frozen=True, slots=True)
class Use:
    """A process on a device."""

    device: Device
    process: ProcessUse

    @property
    def share(self) -> float | None:
        """The share of the device's memory."""
        return share_of(self.process.used_bytes, self.device.memory.total_bytes)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is listed, and in which order."""

    order: Order = Order.MEMORY
    reverse: bool = False  # memory starts with the largest, pid and user with the lowest
    text: str = ""  # part of a command, user, owner, engine or pid, in any case
    min_bytes: int | None = 0  # hides smaller processes; None: those below `HOST_MIN_BYTES`, of the host alone

    @property
    def descending(self) -> bool:
        """Whether the largest comes first."""
        return (self.order is Order.MEMORY) != self.reverse

    def min_bytes_of(self, device: Device) -> int:
        """The size below which a process of `device` is hidden."""
        if self.min_bytes is not None:
            return self.min_bytes
        return HOST_MIN_BYTES if device.info.kind is DeviceKind.HOST else 0

    def uses(self, devices: Sequence[Device]) -> tuple[list[Use], int]:
        """The processes in order, and the number of those that are hidden because they are small.

        A process of an engine, and one of unknown size, is never hidden.
        """
        found = [
            Use(device, process)
            for device in devices
            for process in device.detail.reading.processes or ()
            if self._matches(process.command, process.user, process.engine, process.pid, owner_text(process.cgroup))
        ]
        shown = [use for use in found if not self._is_small(use)]
        known = sorted((use for use in shown if not self._is_unknown(use)), key=self._sort_key)
        unknown = sorted((use for use in shown if self._is_unknown(use)), key=self._sort_key)
        return (known[::-1] if self.reverse else known) + unknown, len(found) - len(shown)

    def leases(self, leases: Sequence[LeaseUse], devices: Sequence[Device]) -> list[LeaseUse]:
        """The leases by device, the largest first."""
        places = {device.info.uuid: place for place, device in enumerate(devices)}
        return sorted(
            (lease for lease in leases if self._matches(lease.user, lease.engine, lease.pid)),
            key=lambda lease: (
                places.get(lease.device_uuid, len(places)),
                lease.device_uuid,
                -lease.granted_bytes,
                lease.engine,
                lease.pid,
            ),
        )

    def reservations(self, reservations: Sequence[ReservationUse]) -> list[ReservationUse]:
        """The reservations, in the given order."""
        return [one for one in reservations if self._matches(one.user, one.name, one.pid)]

    def without_small(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The devices without their small processes."""
        kept = []
        for device in devices:
            reading = device.detail.reading
            if reading.processes is not None:
                large = tuple(process for process in reading.processes if not self._is_small(Use(device, process)))
                reading = replace(reading, processes=large)
            kept.append(replace(device, detail=replace(device.detail, reading=reading)))
        return tuple(kept)

    def _matches(self, *facts: object) -> bool:
        wanted = self.text.casefold()
        return not wanted or any(wanted in str(fact).casefold() for fact in facts if fact is not None)

    def _is_small(self, use: Use) -> bool:
        size = use.process.used_bytes
        return size is not None and use.process.engine is None and size < self.min_bytes_of(use.device)

    def _is_unknown(self, use: Use) -> bool:
        if self.order is Order.PID:
            return False
        return use.process.user is None if self.order is Order.USER else use.process.used_bytes is None

    def _sort_key(self, use: Use) -> tuple[Any, ...]:
        """Equals are sorted by size, largest first."""
        process = use.process
        by_memory = process.used_bytes is None, -(process.used_bytes or 0), process.pid
        if self.order is Order.USER:
            return process.user or "", *by_memory
        return (process.pid, *by_memory) if self.order is Order.PID else by_memory
