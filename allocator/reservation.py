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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..common.on_error import OnError
from ..common.units import parse_bytes, parse_seconds
from ..monitor.poller import select as select_devices
from ..monitor.snapshot import DeviceInfo, DeviceKind
from ..monitor.watching import watch
from . import wire
from .broker_client import Channel
from .errors import BrokerUnavailable, InvalidLease, LeaseClosed, LeaseError, LeaseRefused, ProtocolViolation

CONNECT_S = 5.0  # also what an answer may take beyond the wait that was asked for
_RETRY_S = 1.0  # between attempts to renew a reservation
_LOOK_S = 0.05  # another thread may read the answer that a thread waits for


class _Closes(Protocol):
    def close(self) -> None: ...


class Reservation:
    """Bytes of a device kept free for a process. Thread-safe.

    Attributes:
        kept: Whether a broker keeps the bytes free now.
        trouble: Why not; None while it does.
        ended: Whether the reservation has ended for good: it was closed, or its time is over.
    """

    def __init__(self, path: Path, request: wire.ReserveMessage, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect to the broker and ask; the answer comes later. Raises InvalidLease, BrokerUnavailable."""
        try:
            wire.to_frame(request)
        except ProtocolViolation as error:
            raise InvalidLease(str(error)) from None
        self._path, self._request, self._clock = path, request, clock
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self.kept, self.ended = False, False
        self.trouble: str | None = None
        self.reservation_id = 0
        self._waits = True  # for the answer to a question
        self._refusal: LeaseRefused | None = None  # the last answer, if it was a refusal
        self._ends_at: float | None = None
        self._retry_at = 0.0
        self._keeper: threading.Thread | None = None
        self._closes: _Closes | None = None
        self._channel: Channel | None = Channel(path, time.monotonic() + CONNECT_S, protocol=wire.PROTOCOL)
        self._channel.send(request)

    @classmethod
    def granted(cls, path: Path, request: wire.ReserveMessage) -> Reservation:
        """A reservation whose bytes are free.

        Raises MemoryNotFree after the request's wait, another LeaseRefused if the bytes can never be reserved, InvalidLease,
        BrokerUnavailable, ProtocolMismatch.
        """
        reservation = cls(path, request)
        with OnError(reservation.close):
            reservation.wait(request.wait_ms / 1000 + CONNECT_S)
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

    @property
    def waits(self) -> bool:
        """Whether the broker has not answered yet."""
        return self._waits and not self.ended

    def fileno(self) -> int | None:
        """Readable when `poll` has work; None without a broker: then call `poll` now and then."""
        return None if self._channel is None else self._channel.fileno()

    def poll(self) -> None:
        """Read what the broker says; if it is gone, ask its successor for the same bytes. Never blocks."""
        with self._lock:
            if self.ended or os.getpid() != self._owner:
                return
            if self.left_s == 0:
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
            except LeaseError as error:
                self._lose(str(error))

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer to the last question. Raises its refusal, BrokerUnavailable, and LeaseClosed after the end."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if self._refusal is not None:
                raise self._refusal
            if self.ended:
                raise LeaseClosed(f"the reservation of {self._request.name!r} has ended: {self.trouble}; reserve again")
            if self._channel is None:
                raise BrokerUnavailable(str(self.trouble))
            if not self._waits:
                return
            if (left := deadline - time.monotonic()) <= 0:
                raise BrokerUnavailable(f"the broker at {self._path} did not answer in time")
            fd = self.fileno()
            select.select([] if fd is None else [fd], [], [], min(left, _LOOK_S))

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
        wait_s = parse_seconds(wait)
        self.ask_size(size, wait_s)
        self.wait(wait_s + CONNECT_S)

    def ask_size(self, size: int | str, wait_s: float) -> None:
        """Ask for another size; the answer comes later. Raises LeaseClosed, BrokerUnavailable, ValueError."""
        message = wire.ResizeMessage(parse_bytes(size), _wait_ms(wait_s))
        with self._lock:
            if self.ended or os.getpid() != self._owner:
                raise LeaseClosed(f"the reservation of {self._request.name!r} has ended; reserve again")
            if self._channel is None:
                raise BrokerUnavailable(str(self.trouble))
            self._channel.send(message)
            self._waits, self._refusal = True, None

    def keep(self, closes: _Closes | None = None) -> None:
        """Renew the reservation in a thread, if its monitor is replaced. `close` closes `closes` too."""
        self._closes = closes
        self._keeper = threading.Thread(target=self._keep, name="pagetide-reservation", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End the reservation. Idempotent. A fork of the process that made it ends nothing."""
        with self._lock:
            if not self.ended and self._channel is not None and os.getpid() == self._owner:
                self._channel.send(wire.ReleaseMessage())
            self._end("it was released")
        closes, self._closes = self._closes, None
        if closes is not None and os.getpid() == self._owner:
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
                self.kept, self.trouble = True, None
                self._waits, self._refusal = False, None
            case wire.RefusedMessage():
                self._waits, self._refusal = False, wire.error_of(message)
                if not self.kept:
                    raise self._refusal
            case wire.ReservationEndedMessage(reason):
                self._end(reason)
            case _:
                raise ProtocolViolation(f"the broker answered with {type(message).__name__}")

    def _renew(self) -> None:
        """Ask the broker's successor, which may know nothing of what was granted."""
        left_s = self.left_s
        duration_ms = self._request.duration_ms if left_s is None else round(left_s * 1000)
        longest_ms = wire.MAX_RESERVATION_S * 1000
        self._request = replace(self._request, duration_ms=duration_ms, wait_ms=longest_ms, renewed=True)
        self._channel = Channel(self._path, protocol=wire.PROTOCOL)
        self._channel.send(self._request)
        self._waits, self._refusal = True, None

    def _lose(self, trouble: str) -> None:
        self._close_channel()
        self.trouble = trouble
        self._retry_at = self._clock() + _RETRY_S

    def _end(self, reason: str) -> None:
        self._close_channel()
        if not self.ended:
            self.ended, self.trouble = True, reason

    def _close_channel(self) -> None:
        self.kept = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _keep(self) -> None:
        while not self.ended:
            with self._lock:
                fd = self.fileno()
                left_s = self.left_s
            idle_s = min(_RETRY_S, _RETRY_S if left_s is None else left_s + 0.001)
            try:
                select.select([] if fd is None else [fd], [], [], idle_s)
            except (OSError, ValueError):  # closed meanwhile
                continue
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
        name: For lists and messages; None: the program's file name.
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
        request = request_of(info, num_bytes, name=name or program_name(), priority=priority, duration_s=duration_s, wait_s=wait_s)
        reservation = Reservation.granted(watched.directory.socket, request)
    reservation.keep(watched)
    return reservation


def request_of(
    info: DeviceInfo, num_bytes: int, *, name: str, priority: int = 0, duration_s: float | None = None, wait_s: float = 60.0,
    pid: int = 0,
) -> wire.ReserveMessage:  # fmt: skip
    """The message that asks for a reservation. Raises ValueError for a time that is none."""
    if duration_s is not None and not 0 < duration_s <= wire.MAX_RESERVATION_S:
        raise ValueError(f"a reservation lasts more than 0 seconds and at most 30 days, got {duration_s:g} s")
    duration_ms = None if duration_s is None else wire.milliseconds(duration_s, wire.MAX_RESERVATION_S)
    return wire.ReserveMessage(info.uuid, num_bytes, name, priority, duration_ms, _wait_ms(wait_s), pid)


def choose_device(infos: Sequence[DeviceInfo], named: str | None) -> DeviceInfo:
    """The named device; without a name the first GPU, or the only device. Raises NoSuchDevice."""
    if named is not None:
        return select_devices(infos, (named,))[0]
    gpus = [info for info in infos if info.kind is not DeviceKind.HOST]
    return select_devices(infos, ())[0] if not gpus else gpus[0]


def program_name() -> str:
    """The file name of this program, as far as it can be shown."""
    name = "".join(c if c.isprintable() else "_" for c in os.path.basename(sys.argv[0] if sys.argv else ""))
    return name[-80:] or "python"


def _wait_ms(wait_s: float) -> int:
    return min(round(wait_s * 1000), wire.MAX_RESERVATION_S * 1000)
