"""The broker's table of reservations: bytes of devices that processes without a lease hold for a time, or wait for.

    reserve ─► waits ── its bytes are free ─► holds ── its time, its process or its connection ends, or it is released ─► gone
                 └── refused after its wait          └── wants more: waits for the rest

Times are monotonic nanoseconds, so that a changed clock of the machine ends nothing early or late.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..common.units import format_bytes, format_seconds
from ..monitor.events import EventKind, MemoryEvent
from ..monitor.sources.process_facts import user_name
from . import wire
from .broker_connection import Connection, Peer
from .errors import LeaseRefused, MemoryNotFree, NotPermitted
from .lease_account import LeasedDevice, peer_event
from .lease_policy import ReservedBytes

log = logging.getLogger(__name__)

_TOLD_AFTER_NS = 1_000_000_000  # an ordinary recall is over before
_MOST_NAMED = 4  # holders in a refusal
_MOST_TOLD = 16  # at a look: with hundreds that wait, the broker answers others meanwhile


@dataclass(slots=True, eq=False)
class ReservationAccount:
    """A reservation, with what its device's account does not store. Only `ReservationTable` changes it."""

    reservation_id: int
    device: LeasedDevice
    connection: Connection
    request: wire.ReserveMessage
    asked_ns: int  # when its last question came
    wait_until_ns: int  # when that question is refused
    is_told: bool = False  # that it waits, and for what
    told_bytes: int = 0  # that it holds by the events so far
    ends_ns: int | None = None  # None: it holds nothing yet, or has no time limit

    @property
    def pid(self) -> int:
        """The process that the reservation is for."""
        return self.request.pid or self.connection.peer.pid

    @property
    def bytes(self) -> ReservedBytes:
        """What it holds and wants."""
        return self.device.account.state.reservations[self.reservation_id]

    def named(self) -> str:
        """Its name, process, user and id, for messages."""
        return f"{self.request.name!r} (pid {self.pid}, {user_name(self.connection.peer.uid)}, #{self.reservation_id})"


class ReservationTable:
    """All reservations. Used by one thread."""

    def __init__(self, clock: Callable[[], int], tell: Callable[[MemoryEvent], None] = lambda event: None) -> None:
        """`tell` takes events of reservations, and must not wait."""
        self._clock, self._tell_event = clock, tell
        self._reservations: dict[int, ReservationAccount] = {}

    def __contains__(self, reservation_id: object) -> bool:
        return reservation_id in self._reservations

    def reserve(
        self, reservation_id: int, device: LeasedDevice, connection: Connection, request: wire.ReserveMessage, *, held: bool
    ) -> None:
        """Add a reservation, which holds its bytes at once if `held`. Raises LeaseRefused, with nothing changed."""
        now_ns = self._clock()
        reservation = ReservationAccount(
            reservation_id, device, connection, request, now_ns, now_ns + request.wait_ms * 1_000_000
        )
        device.account.reserve(reservation_id, request.num_bytes, request.priority, held=held)
        self._reservations[reservation_id] = reservation
        connection.reservation_id = reservation_id
        if reservation.bytes.held_bytes:
            self._answer(reservation)

    def resize(self, reservation_id: int, message: wire.ResizeMessage) -> None:
        """Change what a reservation wants. Raises LeaseRefused, with nothing changed, if it can never be free."""
        reservation = self._reservations[reservation_id]
        reservation.device.account.resize_reservation(reservation_id, message.num_bytes)
        reservation.is_told, reservation.asked_ns = False, self._clock()
        reservation.wait_until_ns = reservation.asked_ns + message.wait_ms * 1_000_000
        if not reservation.bytes.missing_bytes:
            self._answer(reservation)

    def ready(self, reservation_id: int) -> None:
        """Tell the process that its bytes are free."""
        self._answer(self._reservations[reservation_id])

    def end(self, reservation_id: int, reason: str) -> None:
        """End a reservation, and tell its process."""
        reservation = self._reservations.pop(reservation_id)
        held_bytes = reservation.bytes.held_bytes
        reservation.device.account.unreserve(reservation_id)
        reservation.connection.reservation_id = None
        reservation.connection.send(wire.ReservationEndedMessage(reason))
        self._tell_event(_event(reservation, EventKind.RELEASED, held_bytes, reason))
        log.info("the reservation of %s has ended with %s: %s", reservation.named(), format_bytes(held_bytes), reason)

    def end_by_hand(self, reservation_id: int, peer: Peer, owner_uid: int) -> None:
        """End a reservation by user command. Raises LeaseRefused if there is none, NotPermitted if `peer` may not end it."""
        if (reservation := self._reservations.get(reservation_id)) is None:
            there = ", ".join(one.named() for one in list(self._reservations.values())[:_MOST_TOLD]) or "none"
            raise LeaseRefused(f"there is no reservation #{reservation_id}; it may have ended. Those that there are: {there}")
        holder_uid, user = reservation.connection.peer.uid, user_name(peer.uid)
        if peer.uid not in (0, owner_uid, holder_uid):
            may = " and ".join(dict.fromkeys(map(user_name, (holder_uid, 0, owner_uid))))
            raise NotPermitted(f"the reservation of {reservation.named()} cannot be ended by {user}; only {may} may do that")
        self.end(reservation_id, f"{user} has ended it")

    def check_times(self, describe: Callable[[LeasedDevice], str]) -> bool:
        """End the reservations with no time left, refuse those that have waited for as long as they wanted, and tell the
        others once that they wait. Returns whether others may be served now.

        `describe` says what of a device others than reservations hold.
        """
        now_ns, before = self._clock(), len(self._reservations)
        crowds: dict[str, _Crowd] = {}  # by device
        told = 0
        for reservation in list(self._reservations.values()):
            waits = reservation.bytes.missing_bytes > 0
            refused = waits and reservation.wait_until_ns <= now_ns
            if reservation.ends_ns is not None and reservation.ends_ns <= now_ns:
                self.end(reservation.reservation_id, "its time is over")
            elif refused or (waits and not reservation.is_told and now_ns - reservation.asked_ns > _TOLD_AFTER_NS):
                device = reservation.device
                if (crowd := crowds.get(device.info.uuid)) is None:
                    here = [one for one in self._reservations.values() if one.device is device]
                    crowd = crowds[device.info.uuid] = _Crowd(here, describe(device), now_ns)
                (self._refuse if refused else self._tell)(reservation, crowd, now_ns)
                if (told := told + 1) == _MOST_TOLD:  # the others at the next look
                    break
        return len(self._reservations) < before

    def views(self) -> list[wire.ReservationView]:
        """The reservations, oldest first."""
        now_ns = self._clock()
        return [_view(reservation, now_ns) for reservation in self._reservations.values()]

    def promised_bytes(self, device: LeasedDevice, uid: int, but: int | None = None) -> int:
        """Bytes of a device that a user has reserved or waits for, without those of the reservation `but`."""
        return sum(
            reservation.bytes.wanted_bytes
            for reservation in self._reservations.values()
            if reservation.device is device and reservation.connection.peer.uid == uid and reservation.reservation_id != but
        )

    def device_of(self, reservation_id: int) -> LeasedDevice:
        """The reservation's device."""
        return self._reservations[reservation_id].device

    def clear(self) -> None:
        """Drop all state."""
        self._reservations.clear()

    # ---- internal -------------------------------------------------------------------------------

    def _answer(self, reservation: ReservationAccount) -> None:
        now_ns, held_bytes = self._clock(), reservation.bytes.held_bytes
        if reservation.ends_ns is None and reservation.request.duration_ms is not None:
            reservation.ends_ns = now_ns + reservation.request.duration_ms * 1_000_000
        left_ms = _left_ms(reservation, now_ns)
        reservation.connection.send(wire.ReservedMessage(held_bytes, reservation.reservation_id, left_ms))
        if change := held_bytes - reservation.told_bytes:  # so amounts of several events add up
            kind = EventKind.RESERVED if change > 0 else EventKind.RELEASED
            self._tell_event(_event(reservation, kind, abs(change)))
            reservation.told_bytes = held_bytes
        log.info(
            "%s are reserved for %s on %s%s",
            format_bytes(held_bytes),
            reservation.named(),
            reservation.device.info.index,
            "" if left_ms is None else f" for {format_seconds(left_ms / 1000)}",
        )

    def _refuse(self, reservation: ReservationAccount, crowd: _Crowd, now_ns: int) -> None:
        account, reservation_id = reservation.device.account, reservation.reservation_id
        missing, waited = _missing(reservation), format_seconds((now_ns - reservation.asked_ns) / 1e9)
        reason = f"{missing} have not become free within {waited}: {crowd.holders(reservation)}"
        self._tell_event(_event(reservation, EventKind.REFUSED, reservation.bytes.missing_bytes, reason))
        if reservation.bytes.held_bytes:
            account.keep_reservation(reservation_id)
        else:
            del self._reservations[reservation_id]
            account.unreserve(reservation_id)
            reservation.connection.reservation_id = None
        # Last: a client that does not read is dropped here, which ends what it still has
        reservation.connection.send(wire.refusal(MemoryNotFree(f"{reason}. Wait longer, or ask for less")))

    def _tell(self, reservation: ReservationAccount, crowd: _Crowd, now_ns: int) -> None:
        reservation.is_told = True
        reason = f"{_missing(reservation)} are not free yet: {crowd.holders(reservation)}"
        reservation.connection.send(wire.QueuedMessage(reservation.reservation_id, reason[: wire.MAX_SENTENCE]))


class _Crowd:
    """What has the memory of a device, and what waits for it, at one time: in words, for each reservation that waits."""

    def __init__(self, here: Sequence[ReservationAccount], others: str, now_ns: int) -> None:
        """`here` are the device's reservations, `others` says what else has its memory."""
        holding = sorted((one for one in here if one.bytes.held_bytes), key=lambda one: -one.bytes.held_bytes)
        self._holding = [
            (one, f"{one.named()} has reserved {format_bytes(one.bytes.held_bytes)} {_until(one, now_ns)}")
            for one in holding[: _MOST_NAMED + 1]
        ]
        self._num_holding = len(holding)
        waiting = sorted((one for one in here if one.bytes.missing_bytes), key=_place)
        self._places = [_place(one) for one in waiting]
        self._first = [f"{one.named()} waits before it for {format_bytes(one.bytes.missing_bytes)}" for one in waiting[:1]]
        self._others = others

    def holders(self, reservation: ReservationAccount) -> str:
        """What has the bytes that a reservation waits for, and until when."""
        said = [text for one, text in self._holding if one is not reservation][:_MOST_NAMED]
        ahead = bisect.bisect_left(self._places, _place(reservation))
        left = self._num_holding - (reservation.bytes.held_bytes > 0) - len(said)
        said += [f"{left} more have reserved memory"] if left else []
        said += self._first if ahead else []
        said += [f"{ahead - 1} more wait before it"] if ahead > 1 else []
        return "; ".join([*said, self._others])


def _event(reservation: ReservationAccount, kind: EventKind, num_bytes: int, reason: str | None = None) -> MemoryEvent:
    event = peer_event(reservation.connection.peer, reservation.device.info, kind, num_bytes, reason)
    return replace(event, pid=reservation.pid, command=reservation.request.name)


def _place(reservation: ReservationAccount) -> tuple[int, int]:
    """The place in the queue."""
    return reservation.bytes.priority, reservation.bytes.arrival


def _missing(reservation: ReservationAccount) -> str:
    return f"{format_bytes(reservation.bytes.missing_bytes)} of {reservation.device.info.index}"


def _left_ms(reservation: ReservationAccount, now_ns: int) -> int | None:
    if reservation.ends_ns is None:
        return None
    return min(max(0, reservation.ends_ns - now_ns) // 1_000_000, wire.MAX_RESERVATION_S * 1000)


def _until(reservation: ReservationAccount, now_ns: int) -> str:
    left_ms = _left_ms(reservation, now_ns)
    return "until it ends" if left_ms is None else f"for {format_seconds(left_ms / 1000)} more"


def _view(reservation: ReservationAccount, now_ns: int) -> wire.ReservationView:
    held, request = reservation.bytes, reservation.request
    return wire.ReservationView(
        reservation.reservation_id, request.name, reservation.pid, user_name(reservation.connection.peer.uid),
        reservation.device.info.uuid,
        held_bytes=held.held_bytes,
        wanted_bytes=held.wanted_bytes,
        priority=held.priority,
        waiting_ms=max(0, now_ns - reservation.asked_ns) // 1_000_000 if held.missing_bytes else None,
        left_ms=_left_ms(reservation, now_ns),
    )  # fmt: skip
