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

from ..common.on_error import OnError
from . import wire
from .broker_link import BrokerLink
from .errors import InvalidLease, LeaseClosed, LeaseError, ProtocolViolation
from .lease_balance import LeaseBalance
from .lease_events import Denied, Event, Recalled, Rejoined
from .lease_record import LeaseRecordWriter

_of_this_process: weakref.WeakSet[Lease] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lease in _of_this_process:
        lease._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Lease:
    """One lease of one device, made by `register`. After `close`, calls that talk to the broker raise LeaseClosed."""

    def __init__(self, path: Path, request: wire.RegisterMessage, clock: Callable[[], float]) -> None:
        """Internal: use `register`."""
        self._request = request
        self._lock = threading.RLock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._waiters = 0
        self._closed = False
        self._ended = "has ended"
        self._link = BrokerLink(path, clock, self._epoll)
        self._balance = LeaseBalance(request.held_bytes, request.max_bytes, f"the broker at {path}", clock)
        self._report: wire.ReportMessage | None = None

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
            name: A label for logs and commands; two engines may share one.
            device_uuid: The device, by the monitor's uuid.
            min_bytes: Guaranteed against other engines: everything but KV, and one sequence.
            max_bytes: Upper limit; None: the whole device.
            weight: Weight of the share above the minimum, 0.001 to 1000.
            priority: A lower number is served first, as with requests.
            granule_bytes: Grants above the minimum are whole multiples of this.
            clock: Seconds.

        Raises:
            InvalidLease: The numbers contradict each other.
            MinimumsExceedCapacity: The minimum does not fit beside those of other leases.
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
        with OnError(lease._free):
            lease._start(lease._link.register(request, time.monotonic() + timeout_s))
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
        return self._balance.max_bytes

    @property
    def granted_bytes(self) -> int:
        """Bytes that the lease may hold in all; without a broker, the upper bound of what it holds."""
        return self._balance.granted_bytes

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes held, as in the lease's record."""
        return self._balance.upper_bytes

    @property
    def recall(self) -> Recalled | None:
        """The recall that is still to be answered."""
        return self._balance.recall

    @property
    def connected(self) -> bool:
        """Whether a broker has registered the lease."""
        return self._link.registered

    @property
    def closed(self) -> bool:
        """Whether the lease has ended for this process."""
        return self._closed

    @property
    def generation(self) -> wire.OrderGeneration:
        """The generation of the newest order received."""
        return self._balance.generation

    # ---- messages to the broker -----------------------------------------------------------------

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        """Move the lower and the upper bound of the held bytes by these amounts, up or down.

        Call it before a change that widens the bounds and after one that narrows them: what is held must lie between
        them at every instant. Raises GrantExceeded, with nothing changed, if the upper bound would exceed the grant,
        and LeaseClosed if it would rise on a closed lease.
        """
        with self._lock:
            if upper_bytes > 0:
                self._check_open()
            self._balance.shift(lower_bytes, upper_bytes)

    def report(
        self,
        held: Mapping[str, int],
        free_bytes: int,
        kept_bytes: int = 0,
        *,
        moving_bytes: int = 0,
        num_waiting: int = 0,
        reused: bool = True,
    ) -> None:
        """Report the held bytes by class ("weights", "kv", ...), and how many of them are free, or only keep prefixes.

        The sum becomes the upper bound. `free_bytes` is what could be returned without affecting a request or a cached
        prefix, `kept_bytes` what holds such prefixes; `reused`: prompts find half of their tokens or more in these.
        `moving_bytes` may come or go in the background; the lower bound excludes them. `num_waiting` requests do not run. Not
        between the two shifts of a change. Raises ValueError for more classes or larger amounts than the protocol allows.
        """
        with self._lock:
            self._check_open()
            report = wire.ReportMessage(dict(held), free_bytes, kept_bytes, num_waiting, reused)
            try:
                wire.to_frame(report)
            except ProtocolViolation as error:
                raise ValueError(str(error)) from None
            total = sum(held.values())
            self._balance.set_bounds(total - moving_bytes, total)
            if report != self._report:
                self._report = report
                self._link.send(report)

    def ask(self, target_bytes: int, *, expires_s: float = 1.0, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
        """Ask for `target_bytes` in all for requests, of which the oldest has waited `waiting_s`, and for `keep_bytes` in all
        so that cached prefixes stay. The last ask counts until it expires. Does nothing without a broker.
        """
        with self._lock:
            self._check_open()
            self._link.send(wire.AskMessage(target_bytes, wire.milliseconds(expires_s), int(1e3 * waiting_s), keep_bytes))

    def lower_min(self, min_bytes: int) -> None:
        """Lower the minimum to `min_bytes`. Raises InvalidLease if that is above the current minimum."""
        with self._lock:
            self._check_open()
            if min_bytes > self._request.min_bytes:
                raise InvalidLease(f"the min of {self.name!r} is {self._request.min_bytes:,} bytes, not {min_bytes:,}")
            self._request = replace(self._request, min_bytes=min_bytes)
            self._link.send(wire.LowerMinMessage(min_bytes))

    def answer_unmapped(self, keep_bytes: int) -> None:
        """Declare that at most `keep_bytes` are held until a new grant. Answers a recall, or returns memory unasked.

        The grant does not fall below the minimum. Without a pending recall the call also cancels the last ask. Raises
        ValueError if more is held.
        """
        with self._lock:
            self._check_open()
            self._balance.reduce(keep_bytes, self._request.min_bytes)
            self._link.send(wire.UnmappedMessage(keep_bytes, self._balance.generation))

    def close(self) -> None:
        """End the lease; unmap first. A thread in `wait` gets LeaseClosed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._link.send(wire.ReleaseMessage())
            self._closed = True
            self._balance.end()
            if self._waiters:
                os.eventfd_write(self._wake, 1)  # the last waiting thread cleans up
            else:
                self._free()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
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
                if not self._link.is_open:
                    if not self._link.retry_due:
                        return ()
                    self._link.connect(replace(self._request, held_bytes=self.held_bytes))
                for message in self._link.receive():
                    if (event := self._apply(message)) is not None:
                        events.append(event)
                self._link.check_answered()
            except LeaseError as error:
                lost = self._link.lose(error)
                self._balance.lose_broker()
                if lost is not None:
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
                with self._lock:
                    idle_s = self._link.idle_s
                self._epoll.poll(min(left, idle_s))
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    self._free()

    def wait_granted(self, total_bytes: int, timeout_s: float) -> bool:
        """Wait until `total_bytes` are granted in all and no recall to less is pending; return whether that is so.

        Other events are applied but not returned.
        """
        until = time.monotonic() + timeout_s
        while not self._balance.allows(total_bytes) and (left := until - time.monotonic()) > 0:
            self.wait(left)
        return self._balance.allows(total_bytes)

    # ---- internal: with the lock held -----------------------------------------------------------

    def _start(self, message: wire.RegisteredMessage) -> None:
        """Begin with a broker that has registered the lease. Raises ProtocolViolation if its answer has no record."""
        try:
            record = LeaseRecordWriter(self._link.take_fd())
        except (OSError, ValueError) as error:
            raise ProtocolViolation(f"the broker sent no record of a lease: {error}") from error
        self._balance.register(message, record, self._request.max_bytes)
        self._link.set_registered()

    def _apply(self, message: wire.Message) -> Event | None:
        """Apply a message. Raises ProtocolViolation for a message that no broker may send."""
        match message:
            case wire.RegisteredMessage() if not self._link.registered:
                self._start(message)
                if self._report is not None:
                    self._link.send(self._report)
                return Rejoined(self.granted_bytes)
            case wire.GrantMessage() | wire.RecallMessage() | wire.WithdrawMessage() | wire.LimitMessage():
                return self._balance.apply(message)
            case wire.RefusedMessage():
                error = wire.error_of(message)
                if not self._link.registered:
                    raise error
                return Denied(error)
            case _:
                raise ProtocolViolation(f"the broker said {type(message).__name__} unasked")

    def _leave_to_parent(self) -> None:
        """In a fork of the process that holds the lease: drop everything here without sending a message."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._waiters = 0
        if not self._closed:
            self._ended = "is that of the process which this one is a fork of"
            self._balance.leave_to_parent()
            self._free()

    def _free(self) -> None:
        self._closed = True
        self._link.close()
        self._epoll.close()
        os.close(self._wake)

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseClosed(f"the lease of {self._request.name!r} {self._ended}; register another")
