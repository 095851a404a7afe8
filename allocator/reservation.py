"""Device memory reserved for a program that is no engine: engines give it back first, and take none of it.

    with reserve("8GiB", duration="2h") as lease:   # the bytes are free now, or MemoryNotFree says which processes hold them
        ...
        lease.resize("12GiB")                       # waits until 4 GiB more are free
        lease.resize("2GiB")                        # engines may have the rest at once

A reservation ends with its process, with its time, or by `close`. If the monitor dies, its successor is asked for the same
bytes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..common.on_error import OnError
from ..common.units import format_bytes, parse_bytes, parse_seconds
from ..monitor.poller import select as select_devices
from ..monitor.snapshot import DeviceInfo, DeviceKind, ReservationUse
from ..monitor.watching import watch
from . import wire
from .broker_client import Channel
from .errors import BrokerUnavailable, InvalidLease, LeaseClosed, LeaseError, ProtocolViolation

CONNECT_S = 5.0  # also what an answer may take beyond the wait that was asked for
_RETRY_S = 1.0  # between attempts to renew a reservation
_TOLD_S = 0.5  # beyond its time, within which the broker ends it, and not the socket, for which others would see no reason
_LOOK_S = 0.05  # between looks at how long a thread has waited for an answer


class _Closes(Protocol):
    def close(self) -> None: ...


_of_this_process: weakref.WeakSet[Reservation] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for reservation in _of_this_process:
        reservation._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Reservation:
    """Bytes of a device kept free for a process. Thread-safe.

    Attributes:
        kept: Whether a broker keeps the bytes free now.
        trouble: Why not; None while it does.
        ended: Whether the reservation has ended for good: it was closed, or its time is over.
        queued: What it waits for, by the broker; None if it does not wait.
        reservation_id: Its number in `vram-monitor reservations`; 0 until the broker has said it.
    """

    def __init__(self, path: Path, request: wire.ReserveMessage, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect to the broker and ask; the answer comes later. Raises InvalidLease, BrokerUnavailable."""
        try:
            wire.to_frame(request)
        except ProtocolViolation as error:
            raise InvalidLease(str(error)) from None
        self._path, self._request, self._clock = path, request, clock
        self._make_locks()
        self.kept, self.ended = False, False
        self.trouble: str | None = None
        self.reservation_id = 0
        self.queued: str | None = None
        self._asked: int | None = request.num_bytes  # the size in the question that is not answered yet
        self._refusal: LeaseError | None = None  # the last answer, if it was a refusal, or why there was none
        self._was_granted = False
        self._ends_at: float | None = None
        self._retry_at = 0.0
        self._keeper: threading.Thread | None = None
        self._closes: _Closes | None = None
        self._channel: Channel | None = Channel(path, time.monotonic() + CONNECT_S)
        self._channel.send(request)
        _of_this_process.add(self)

    @classmethod
    def ask(
        cls,
        path: Path,
        device_uuid: str,
        num_bytes: int,
        *,
        name: str | None = None,
        priority: int = 0,
        duration_s: float | None = None,
        wait_s: float = 60.0,
        pid: int = 0,
    ) -> Reservation:
        """Ask the broker at `path`; the answer comes later. For the arguments and errors see `reserve`.

        `pid`: Another process that the reservation is for, and ends with.
        """
        if duration_s is not None and not 0 < duration_s <= wire.MAX_RESERVATION_S:
            raise InvalidLease(f"a reservation lasts more than 0 seconds and at most 30 days, got {duration_s:,.0f} s")
        duration_ms = None if duration_s is None else wire.milliseconds(duration_s, wire.MAX_RESERVATION_S)
        name = shown(os.path.basename(sys.argv[0])) if name is None else name
        return cls(path, wire.ReserveMessage(device_uuid, num_bytes, name, priority, duration_ms, _wait_ms(wait_s), pid))

    @classmethod
    def granted(
        cls, path: Path, device_uuid: str, num_bytes: int, *, on_queued: Callable[[str], None] | None = None, **more: Any
    ) -> Reservation:
        """A reservation with its bytes free. Arguments and errors as of `ask`, and MemoryNotFree after the wait.

        `on_queued` is called with what the reservation waits for, if it does.
        """
        reservation = cls.ask(path, device_uuid, num_bytes, **more)
        with OnError(reservation.close):
            reservation.wait_answered(reservation._request.wait_ms / 1000, on_queued)
        return reservation

    @property
    def device_uuid(self) -> str:
        """The device."""
        return self._request.device_uuid

    @property
    def num_bytes(self) -> int:
        """The size of the reservation."""
        return self._request.num_bytes

    @property
    def left_s(self) -> float | None:
        """Seconds until its end; None without a time limit, or before the bytes are free."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def fileno(self) -> int | None:
        """Readable when `poll` has work; None without a broker: then call `poll` now and then."""
        return None if self._channel is None else self._channel.fileno()

    def poll(self) -> None:
        """Read what the broker says; if it is gone, ask its successor for the same bytes. Never blocks."""
        with self._lock:
            if self.ended:
                return
            told_s = 0.0 if self._channel is None else _TOLD_S
            if self._ends_at is not None and self._clock() >= self._ends_at + told_s:
                self._end("its time is over")
                return
            try:
                if self._channel is None:
                    if self._clock() < self._retry_at:
                        return
                    self._renew()
                assert self._channel is not None
                for message in self._channel.receive():
                    self._apply(message)
                self._heard.notify_all()
            except LeaseError as error:
                self._lose(error)

    def wait_answered(self, wait_s: float, on_queued: Callable[[str], None] | None = None) -> None:
        """Wait for the answer to the last question, which the broker gives after `wait_s` at the latest.

        Raises the refusal, BrokerUnavailable, and LeaseClosed after the end.
        """
        deadline = time.monotonic() + wait_s + CONNECT_S
        while self.look():
            if on_queued is not None and self.queued is not None:
                on_queued(self.queued)
                on_queued = None
            if time.monotonic() > deadline:
                raise BrokerUnavailable(f"the broker at {self._path} did not answer in time")

    def look(self) -> bool:
        """Wait a moment for the answer to the last question; return whether it is still to come. Raises as `wait_answered`."""
        self.poll()
        if self._refusal is not None:
            raise self._refusal
        if self.ended:
            raise self._closed()
        fd = self.fileno()
        if fd is None:
            raise BrokerUnavailable(str(self.trouble))
        if self._keeper is None and self._asked is not None:
            _wait_readable(fd, _LOOK_S)
        elif self._asked is not None:
            with self._heard:
                self._heard.wait_for(lambda: self._asked is None, _LOOK_S)
        return self._asked is not None

    def resize(self, size: int | str, *, wait: float | str = 60.0) -> None:
        """Change the size. More waits until it is free, as a new reservation does; less is free for engines at once.

        Args:
            wait: The longest wait, in seconds or as "10min".

        Raises:
            MemoryNotFree: The bytes were not free in time. The size is what it was, as with every error.
            LeaseRefused: So much can never be reserved.
            LeaseClosed: The reservation has ended.
            BrokerUnavailable: There is no broker now.
        """
        num_bytes, wait_s = parse_bytes(size), parse_seconds(wait)
        with self._resizing, OnError(self._call_off):
            self.ask_size(num_bytes, wait_s)
            self.wait_answered(wait_s)
        if self.num_bytes != num_bytes:  # another broker has answered, which knows only of the old size
            raise BrokerUnavailable(f"the broker has ended before it answered; {format_bytes(self.num_bytes)} are reserved")

    def ask_size(self, size: int | str, wait_s: float) -> None:
        """Ask for another size; the answer comes later. Raises LeaseClosed, BrokerUnavailable, ValueError."""
        message = wire.ResizeMessage(parse_bytes(size), _wait_ms(wait_s))
        with self._lock:
            if self.ended:
                raise self._closed()
            if self._channel is None or not self.kept:
                raise BrokerUnavailable(self.trouble or f"the reservation of {self._request.name!r} still waits for its memory")
            self._channel.send(message)
            self._asked, self._refusal = message.num_bytes, None

    def keep(self, closes: _Closes | None = None) -> None:
        """Renew the reservation in a thread, if its monitor is replaced. `close` closes `closes` too."""
        self._closes = closes
        self._keeper = threading.Thread(target=self._keep, name="pagetide-reservation", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End the reservation. Idempotent. In a fork of the process that made it, it ends nothing."""
        with self._lock:
            if self._channel is not None:
                self._channel.send(wire.ReleaseMessage())
            self._end("it was released")
        closes, self._closes = self._closes, None
        if closes is not None:
            closes.close()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # ---- internal: with the lock held, except `_keep` -------------------------------------------

    def _apply(self, message: wire.Message) -> None:
        match message:
            case wire.ReservedMessage(num_bytes, reservation_id, left_ms):
                self._request = replace(self._request, num_bytes=num_bytes)
                self.reservation_id = reservation_id
                self._ends_at = None if left_ms is None else self._clock() + left_ms / 1000
                self.kept, self._was_granted, self.trouble = True, True, None
                if num_bytes == self._asked:  # else it answers an earlier question, which was given up
                    self._asked = self._refusal = self.queued = None
            case wire.QueuedMessage(reservation_id, reason):
                self.reservation_id, self.queued = reservation_id, reason
            case wire.RefusedMessage():
                self._asked, self._refusal, self.queued = None, wire.error_of(message), None
                if not self.kept:
                    raise self._refusal
            case wire.ReservationEndedMessage(reason):
                self._end(reason)
            case _:
                raise ProtocolViolation(f"the broker answered with {type(message).__name__}")

    def _call_off(self) -> None:
        """After an interrupt, ask for the size that there is, in place of the question that the broker may yet answer."""
        with self._lock:
            if self._asked is not None and self._channel is not None and self.kept:
                self._channel.send(wire.ResizeMessage(self.num_bytes, 0))
                self._asked = self.num_bytes

    def _renew(self) -> None:
        """Ask the broker's successor, which may know nothing of what was granted."""
        left_s = self.left_s
        duration_ms = self._request.duration_ms if left_s is None else round(left_s * 1000)
        longest_ms = wire.MAX_RESERVATION_S * 1000
        self._request = replace(self._request, duration_ms=duration_ms, wait_ms=longest_ms, renewed=True)
        self._channel = Channel(self._path)
        self._channel.send(self._request)
        self._asked, self._refusal = self._request.num_bytes, None

    def _lose(self, error: LeaseError) -> None:
        """Try again later what was granted once; without that the caller asks again."""
        self._close_channel()
        if not self._was_granted:
            self._refusal = error
            self._end(str(error))
            return
        self.trouble = str(error)
        self._retry_at = self._clock() + _RETRY_S

    def _end(self, reason: str) -> None:
        self._close_channel()
        if not self.ended:
            self.ended, self.trouble = True, reason

    def _closed(self) -> LeaseClosed:
        return LeaseClosed(f"the reservation of {self._request.name!r} has ended: {self.trouble}; reserve again")

    def _close_channel(self) -> None:
        self.kept = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _make_locks(self) -> None:
        self._lock, self._resizing = threading.RLock(), threading.Lock()
        self._heard = threading.Condition(self._lock)  # something from the broker, by the thread of `keep`

    def _leave_to_parent(self) -> None:
        """In a fork of the process that holds the reservation: drop everything here without sending a message."""
        self._make_locks()  # another thread of the parent may have held the old ones
        self._closes = None
        self._end("it is that of the process which this one is a fork of")

    def _keep(self) -> None:
        while not self.ended:
            with self._lock:
                fd = self.fileno()
                left_s = self.left_s
            idle_s = min(_RETRY_S, _RETRY_S if left_s is None else max(left_s, _LOOK_S))
            _wait_readable(fd, idle_s)
            self.poll()


def reserve(
    size: int | str,
    *,
    duration: float | str | None = None,
    priority: int = 0,
    device: str | int | None = None,
    name: str | None = None,
    wait: float | str = 60.0,
) -> Reservation:
    """Reserve device memory for this process, through the running monitor or one that is started now. Linux.

    Args:
        size: Bytes, or a text such as "8GiB".
        duration: Seconds, or a text such as "2h", after which the reservation ends; None: with the process, or by `close`.
        priority: Waiting reservations of a lower number are served first, those of one number in order of arrival.
        device: Index or uuid, as `vram-monitor` shows them; None: the first GPU, or the only device.
        name: For lists and messages; None: the program's.
        wait: The longest wait for the memory, in seconds or as "10min".

    Raises:
        MemoryNotFree: The bytes were not free in time; the message says which processes hold them, and until when.
        LeaseRefused: The bytes can never be reserved, or the user has reserved too much.
        BrokerUnavailable, MonitorError: No broker or monitor answers.
        ValueError: An argument is none.
    """
    num_bytes, wait_s = parse_bytes(size), parse_seconds(wait)
    duration_s = None if duration is None else parse_seconds(duration)
    watched = watch()
    with OnError(watched.close):
        info = choose_device(watched.devices(), None if device is None else str(device))
        reservation = Reservation.granted(
            watched.directory.socket, info.uuid, num_bytes,
            name=name, priority=priority, duration_s=duration_s, wait_s=wait_s,
        )  # fmt: skip
    reservation.keep(watched)
    return reservation


def choose_device(infos: Sequence[DeviceInfo], named: str | None) -> DeviceInfo:
    """The named device; without a name the first GPU, or the only device. Raises NoSuchDevice."""
    if named is not None:
        return select_devices(infos, (named,))[0]
    gpus = [info for info in infos if info.kind is not DeviceKind.HOST]
    return select_devices(infos, ())[0] if not gpus else gpus[0]


def shown(name: str) -> str:
    """A name for a reservation: what of `name` can be shown, or "a program"."""
    return "".join(c if c.isprintable() else "_" for c in name)[-80:] or "a program"


def _wait_readable(fd: int | None, timeout_s: float) -> None:
    """Wait until a descriptor, of any number, is readable or closed; without one, for the whole time."""
    poller = select.poll()
    if fd is not None:
        poller.register(fd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def _wait_ms(wait_s: float) -> int:
    return min(round(wait_s * 1000), wire.MAX_RESERVATION_S * 1000)


def reservation_uses(views: Sequence[wire.ReservationView]) -> list[ReservationUse]:
    """The reservations as users see them, with their places in the queue of each device."""
    waiting = [view for view in views if view.waiting_ms is not None]
    waiting.sort(key=lambda view: (view.priority, -(view.waiting_ms or 0)))
    ahead = Counter[str]()
    places = {}
    for view in waiting:
        ahead[view.device_uuid] += 1
        places[view.reservation_id] = ahead[view.device_uuid]
    return [
        ReservationUse(
            view.reservation_id, view.name, view.pid, view.user, view.device_uuid,
            state="held" if view.waiting_ms is None else "waiting",
            held_bytes=view.held_bytes,
            wanted_bytes=view.wanted_bytes,
            priority=view.priority,
            place=places.get(view.reservation_id),
            waiting_seconds=None if view.waiting_ms is None else view.waiting_ms / 1000,
            left_seconds=None if view.left_ms is None else view.left_ms / 1000,
        )
        for view in views
    ]  # fmt: skip
