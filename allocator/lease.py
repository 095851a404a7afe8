"""The engine's side of a lease: grants, recalls and reports to the broker. Needs no event loop.

    lease = Lease.register(path, name="chat", device_uuid=..., min_bytes=..., granule_bytes=...)
    lease.shift(0, n)                      # raises GrantExceeded beyond the grant
    arena.map(...)                         # n bytes more: the broker sees them and knows which engine holds them
    lease.shift(n, 0)                      # (LeasedArena makes these calls)
    for event in lease.poll():             # between steps: never blocks
        ...
    lease.ask(held + m)                    # ahead of need; the grant comes later
    lease.answer_unmapped(lease.recall.target_bytes)

The lease's attributes hold the current grant, recall and limit; events report that they changed, and why. One thread
may step while another waits (in `wait`, or on `fileno` in its own loop); every call is thread-safe.

If the broker dies, the engine keeps what it holds and takes no more. `poll` looks for a successor and reports to it
what is held.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from . import wire
from .broker_client import Channel
from .errors import (
    BrokerUnavailable,
    GrantExceeded,
    InvalidLease,
    LeaseClosed,
    LeaseError,
    LeaseRefused,
    LeaseTooSmall,
    ProtocolMismatch,
    ProtocolViolation,
)
from .lease_events import Denied, Event, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn
from .lease_record import LeaseRecordWriter

__all__ = ("Denied", "Event", "Granted", "Lease", "Limited", "Lost", "Recalled", "Rejoined", "Withdrawn")

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 0.5  # retries for a successor; its grace period is longer
_REFUSED_RETRY_S = 5.0
_ANSWER_WITHIN_S = 5.0

_Order: TypeAlias = wire.GrantMessage | wire.RecallMessage | wire.WithdrawMessage | wire.LimitMessage

_of_this_process: weakref.WeakSet[Lease] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lease in _of_this_process:
        lease._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Lease:
    """One lease of one device, made by `register`. After `close`, calls that talk to the broker raise LeaseClosed."""

    def __init__(self, path: Path, request: wire.RegisterMessage, clock: Callable[[], float]) -> None:
        """Internal: use `register`."""
        self._path, self._request, self._clock = path, request, clock
        self._lock = threading.RLock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._waiters = 0
        self._closed = False
        self._ended = "has ended"
        self._channel: Channel | None = None
        self._registered = False
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._refusal: str | None = None  # why the last broker refused the lease
        self._answer_by = 0.0
        self._record: LeaseRecordWriter | None = None
        self._lower = self._upper = request.held_bytes
        self._report: wire.ReportMessage | None = None
        self._protocol = wire.PROTOCOL  # the version to use with the next broker
        self._newest: _Order = wire.GrantMessage(-1, wire.OrderGeneration(0, 0), 0)  # the newest order applied
        self._granted = request.held_bytes
        self._max_bytes = request.max_bytes
        self._recall: Recalled | None = None

    @classmethod
    def register(
        cls,
        socket_path: Path,
        *,
        name: str,
        device_uuid: str,
        min_bytes: int,
        max_bytes: int | None = None,
        weight: float = 1.0,
        priority: int = 0,
        granule_bytes: int,
        held_bytes: int = 0,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Lease:
        """Register a lease, before anything large is loaded. The first grant may be less than the minimum.

        Args:
            socket_path: The broker's socket.
            name: A label for logs and commands; two engines may share one.
            device_uuid: The device, by the monitor's uuid.
            min_bytes: Guaranteed against other engines: everything but KV, and one sequence.
            max_bytes: Upper limit; None: the whole device.
            weight: Weight of the share above the minimum, 0.001 to 1000.
            priority: A lower number is served first, as with requests.
            granule_bytes: Grants above the minimum are whole multiples of this.
            held_bytes: Bytes that the process holds already.
            timeout_s: How long to wait for the broker's answer.
            clock: Seconds; used for retries and recall deadlines.

        Raises:
            InvalidLease: The numbers contradict each other.
            MinimumsExceedCapacity: The minimum does not fit beside those of other leases; the message names both
                numbers.
            LeaseRefused: The broker refused for another reason, such as an unknown device.
            BrokerUnavailable, ProtocolMismatch: No broker answers, or it speaks no known version.
        """
        if max_bytes is not None and max_bytes < max(1, min_bytes):
            raise InvalidLease(f"max_bytes ({max_bytes:,}) must be at least 1 and not below min_bytes ({min_bytes:,})")
        request = wire.RegisterMessage(
            name, device_uuid, min_bytes, max_bytes, float(weight), priority, granule_bytes, held_bytes
        )
        try:
            wire.to_frame(request)
        except ProtocolViolation as error:
            raise InvalidLease(str(error)) from None
        lease = cls(socket_path, request, clock)
        _of_this_process.add(lease)
        try:
            lease._wait_registered(time.monotonic() + timeout_s)
        except BaseException:
            lease._free()
            raise
        return lease

    # ---- state ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name as registered."""
        return self._request.name

    @property
    def device_uuid(self) -> str:
        """The device's uuid as registered."""
        return self._request.device_uuid

    @property
    def min_bytes(self) -> int:
        """The minimum as registered, or as lowered since."""
        return self._request.min_bytes

    @property
    def max_bytes(self) -> int | None:
        """The max as registered, or as limited by the user since; None: the whole device."""
        return self._max_bytes

    @property
    def granted_bytes(self) -> int:
        """Bytes that the lease may hold in all; without a broker, the upper bound of what it holds."""
        return self._granted

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes held, as in the lease's record."""
        return self._upper

    @property
    def recall(self) -> Recalled | None:
        """The recall that is still to be answered."""
        return self._recall

    @property
    def connected(self) -> bool:
        """Whether a broker has registered the lease."""
        return self._registered

    @property
    def closed(self) -> bool:
        """Whether the lease has ended for this process."""
        return self._closed

    @property
    def generation(self) -> wire.OrderGeneration:
        """The generation of the newest order received."""
        assert self._newest.generation is not None, "one without does not become the newest"
        return self._newest.generation

    def require(self, needed_bytes: int, what: str) -> None:
        """Raise LeaseTooSmall if the max is below what the engine needs; `what` is such as "the weights and one sequence"."""
        if self._max_bytes is not None and needed_bytes > self._max_bytes:
            raise LeaseTooSmall(needed_bytes, self._max_bytes, what)

    # ---- messages to the broker -----------------------------------------------------------------

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        """Move the lower and the upper bound of the held bytes by these amounts, up or down.

        Call it before a change that widens the bounds and after one that narrows them: what is held must lie between
        them at every instant. Raises GrantExceeded, with nothing changed, if the upper bound would exceed the grant,
        and LeaseClosed if it would rise on a closed lease. Other changes to a closed lease have no effect on the
        broker.
        """
        with self._lock:
            upper = self._upper + upper_bytes
            if upper_bytes > 0:
                self._check_open()
                if upper > self._granted:
                    raise GrantExceeded(upper, self._granted)
            self._set_bounds(self._lower + lower_bytes, upper)

    def report(self, held: Mapping[str, int], free_bytes: int, *, moving_bytes: int = 0) -> None:
        """Report the held bytes by class ("weights", "kv", ...), and how many of them are free.

        The sum becomes the upper bound. `free_bytes` is what could be returned without affecting a request.
        `moving_bytes` may come or go in the background; the lower bound excludes them. Not between the two shifts of a
        change. Cheap if nothing has changed. Raises ValueError for more classes or larger amounts than the protocol
        allows.
        """
        with self._lock:
            self._check_open()
            report = wire.ReportMessage(dict(held), free_bytes)
            try:
                wire.to_frame(report)
            except ProtocolViolation as error:
                raise ValueError(str(error)) from None
            total = sum(held.values())
            self._set_bounds(total - moving_bytes, total)
            if report != self._report:
                self._report = report
                self._send(report)

    def ask(self, target_bytes: int, *, expires_s: float = 1.0) -> None:
        """Ask for `target_bytes` in all. The last ask counts until it expires. Does nothing without a broker."""
        with self._lock:
            self._check_open()
            self._send(wire.AskMessage(target_bytes, wire.milliseconds(expires_s)))

    def lower_min(self, min_bytes: int) -> None:
        """Lower the minimum to `min_bytes`. Raises InvalidLease if that is above the current minimum."""
        with self._lock:
            self._check_open()
            if min_bytes > self._request.min_bytes:
                raise InvalidLease(f"the min of {self.name!r} is {self._request.min_bytes:,} bytes, not {min_bytes:,}")
            self._request = replace(self._request, min_bytes=min_bytes)
            self._send(wire.LowerMinMessage(min_bytes))

    def answer_unmapped(self, keep_bytes: int) -> None:
        """Declare that at most `keep_bytes` are held until a new grant. Answers a recall, or returns memory unasked.

        The grant does not fall below the minimum. Without a pending recall the call also cancels the last ask. Raises
        ValueError if more is held.
        """
        with self._lock:
            self._check_open()
            if keep_bytes < self._upper:
                raise ValueError(f"{self._upper:,} bytes are held still, not {keep_bytes:,}; unmap first, and shift")
            self._granted = min(self._granted, max(keep_bytes, self._request.min_bytes))
            if self._recall is not None and self._granted <= self._recall.target_bytes:
                self._recall = None
            self._send(wire.UnmappedMessage(keep_bytes, self.generation))

    def close(self) -> None:
        """End the lease; unmap first. A thread in `wait` gets LeaseClosed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._send(wire.ReleaseMessage())
            self._closed, self._granted, self._recall = True, 0, None
            if self._waiters:
                os.eventfd_write(self._wake, 1)  # the last waiting thread cleans up
            else:
                self._free()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- messages from the broker ---------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has work; it stays the same for the lease's lifetime.

        Without a broker it never becomes readable: then call `poll` now and then. Call `poll` once after `register`
        too, since messages may have come with the answer.
        """
        return self._epoll.fileno()

    def poll(self) -> tuple[Event, ...]:
        """The events since the last call. Never blocks; tries to connect if there is no broker."""
        with self._lock:
            self._check_open()
            events: list[Event] = []
            try:
                if self._channel is None:
                    if self._clock() < self._retry_at:
                        return ()
                    self._connect()
                assert self._channel is not None
                for message in self._channel.receive():
                    if (event := self._take_in(message)) is not None:
                        events.append(event)
                if not self._registered and self._clock() > self._answer_by:
                    raise BrokerUnavailable(f"the broker at {self._path} does not answer")
            except LeaseError as error:
                if (lost := self._lose(error)) is not None:
                    events.append(lost)
            return tuple(events)

    def wait(self, timeout_s: float) -> tuple[Event, ...]:
        """Like `poll`, but wait for an event; () after `timeout_s` without one."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            self._waiters += 1
        try:
            while True:
                if events := self.poll():
                    return events
                left = until - time.monotonic()
                if left <= 0:
                    return ()
                self._epoll.poll(min(left, self._longest_sleep()))
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    self._free()

    def wait_granted(self, total_bytes: int, timeout_s: float) -> bool:
        """Wait until `total_bytes` are granted in all; return whether they are. Other events are applied but not returned."""
        until = time.monotonic() + timeout_s
        while self._granted < total_bytes and (left := until - time.monotonic()) > 0:
            self.wait(left)
        return self._granted >= total_bytes

    # ---- internal: with the lock held -----------------------------------------------------------

    def _connect(self, deadline: float | None = None) -> None:
        """Connect and send the registration; the answer comes later. Raises BrokerUnavailable."""
        self._channel = Channel(self._path, deadline, protocol=self._protocol)
        self._epoll.register(self._channel, select.EPOLLIN)
        self._answer_by = self._clock() + _ANSWER_WITHIN_S
        self._channel.send(replace(self._request, held_bytes=self._upper))

    def _wait_registered(self, deadline: float) -> None:
        """Connect until the broker has registered the lease, by an older protocol if it speaks no newer one."""
        while not self._registered:
            self._connect(deadline)
            assert self._channel is not None
            try:
                self._admitted(self._channel.wait(deadline, wire.RegisteredMessage))
            except ProtocolMismatch as error:
                if not self._speaks_older(error):
                    raise
                self._drop_channel()

    def _admitted(self, message: wire.RegisteredMessage) -> None:
        assert self._channel is not None
        try:
            record = LeaseRecordWriter(self._channel.take_fd())
        except (OSError, ValueError) as error:
            raise ProtocolViolation(f"the broker sent no record of a lease: {error}") from error
        record.set(self._lower, self._upper)
        self._record, self._registered, self._retry_s, self._refusal = record, True, _FIRST_RETRY_S, None
        self._newest = wire.GrantMessage(message.lease_id, message.generation, message.granted_bytes)
        self._granted, self._max_bytes, self._recall = message.granted_bytes, self._request.max_bytes, None

    def _take_in(self, message: wire.Message) -> Event | None:
        """Apply a message. Raises ProtocolViolation for a message that no broker may send."""
        match message:
            case wire.RegisteredMessage() if not self._registered:
                self._admitted(message)
                if self._report is not None:
                    self._send(self._report)
                return Rejoined(self._granted)
            case wire.GrantMessage() | wire.RecallMessage() | wire.WithdrawMessage() | wire.LimitMessage():
                return self._obey(message) if self._is_news(message) else None
            case wire.RefusedMessage():
                error = wire.error_of(message)
                if not self._registered:
                    raise error
                return Denied(error)
            case _:
                raise ProtocolViolation(f"the broker said {type(message).__name__} unasked")

    def _obey(self, order: _Order) -> Event:
        """Apply a new order."""
        match order:
            case wire.GrantMessage(_, _, granted_bytes):
                self._granted = granted_bytes
                return Granted(granted_bytes)
            case wire.RecallMessage(_, _, target_bytes, deadline_ms):
                self._recall = Recalled(target_bytes, self._clock() + deadline_ms / 1000)
                return self._recall
            case wire.WithdrawMessage():
                self._recall = None
                return Withdrawn()
            case wire.LimitMessage(_, max_bytes):
                self._max_bytes = max_bytes
                return Limited(max_bytes)

    def _is_news(self, order: _Order) -> bool:
        """Whether an order is for this lease and newer than the last one; if so, record it as the newest.

        An older order is superseded, and a repeated one has been applied. Raises ProtocolViolation for a different
        order of the same generation: one of the two is wrong, and only a new registration shows which.
        """
        newest, known = self._newest, self.generation
        if order.lease_id != newest.lease_id:
            return False
        if order.generation is None:  # a limit from a broker that speaks version 1
            return True
        if order.generation == known and order != newest:
            raise ProtocolViolation(
                f"the broker at {self._path} sent two orders of generation {tuple(known)}, {newest} and {order}"
            )
        if order.generation.epoch != known.epoch or order.generation.counter <= known.counter:
            return False
        self._newest = order
        return True

    def _speaks_older(self, error: ProtocolMismatch) -> bool:
        """Whether the broker speaks an older version known here; the next connection then uses that version."""
        is_known = wire.OLDEST_PROTOCOL <= error.theirs < self._protocol
        if is_known:
            self._protocol = error.theirs
        return is_known

    def _lose(self, error: LeaseError) -> Lost | None:
        """Drop the broker and schedule a retry. Returns `Lost` only for a lost registration or a new refusal."""
        was_registered = self._registered
        self._drop_channel()
        if was_registered:
            self._protocol = wire.PROTOCOL  # the next broker may speak a newer version
        elif isinstance(error, ProtocolMismatch):
            self._speaks_older(error)
        refused = isinstance(error, LeaseRefused)
        self._retry_at = self._clock() + (_REFUSED_RETRY_S if refused else 0.0 if was_registered else self._retry_s)
        self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)
        self._granted, self._recall = self._upper, None
        news = was_registered or (refused and str(error) != self._refusal)
        if refused:
            self._refusal = str(error)
        return Lost(str(error), refused) if news else None

    def _send(self, message: wire.FromClient) -> None:
        """Send if connected. `poll` reports a broker that stops reading."""
        if self._channel is not None and self._registered:
            self._channel.send(message)

    def _set_bounds(self, lower_bytes: int, upper_bytes: int) -> None:
        self._lower, self._upper = lower_bytes, upper_bytes
        if self._record is not None:
            self._record.set(lower_bytes, upper_bytes)

    def _longest_sleep(self) -> float:
        """Seconds until `poll` has work that no descriptor signals."""
        with self._lock:
            if self._channel is None:
                return max(0.001, self._retry_at - self._clock())
            return 0.05 if self._channel.unsent or not self._registered else 60.0

    def _drop_channel(self) -> None:
        self._registered = False
        if self._channel is not None:
            self._channel.close()  # this also removes it from the epoll set
            self._channel = None

    def _leave_to_parent(self) -> None:
        """In a fork of the process that holds the lease: drop everything here without sending a message."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._waiters = 0
        if not self._closed:
            self._ended = "is that of the process which this one is a fork of"
            self._record, self._granted, self._recall = None, 0, None
            self._free()

    def _free(self) -> None:
        self._closed = True
        self._drop_channel()
        self._epoll.close()
        os.close(self._wake)

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseClosed(f"the lease of {self._request.name!r} {self._ended}; register another")
