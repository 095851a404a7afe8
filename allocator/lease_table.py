"""The broker's state: the leased devices, a ledger for each, and the connection behind each lease.

It stands between the ledgers, which only handle numbers, and the broker, which handles sockets. Measurements and lease
records come in; orders go to the engines, views to users and metrics.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..monitor.errors import MonitorError
from ..monitor.snapshot import DeviceInfo, DeviceMemory
from ..monitor.units import format_bytes
from . import wire
from .broker_connection import Connection, Peer
from .broker_views import DeviceView, device_view, lease_view, named, user_name
from .errors import LeaseRefused, MinimumsExceedCapacity, NotPermitted, UnknownEngine
from .lease_policy import Grant, Order, Ready, Recall, Rules, Withdraw
from .lease_record import HeldBounds, RecordOwner, Sums, bounds_between
from .ledger import LeaseTerms, Ledger
from .quota import Promise, Quota

log = logging.getLogger(__name__)

_MAX_READINGS = 64  # readings of a record kept until the next measurement
_TROUBLE_TOLD_AFTER_NS = 1_000_000_000


class Readings(Protocol):
    """The broker's source of memory readings; the monitor's `RecordReader` and `Watch` implement it."""

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The watched devices."""
        ...

    def memory(self, uuid: str) -> DeviceMemory:
        """The newest readings of one device. Raises MonitorError."""
        ...


@dataclass(slots=True, eq=False)
class LeaseAccount:
    """A lease, with what the ledger does not store. Only `LeaseTable` changes it."""

    lease_id: int
    terms: LeaseTerms
    device_uuid: str
    peer: Peer
    record: RecordOwner
    connection: Connection | None  # None: it has ended and is being reaped
    generation: wire.OrderGeneration  # the generation of its newest grant
    may_return: bool = True  # after its end: whether its engine may continue it
    held: Mapping[str, int] = field(default_factory=dict)  # bytes by class, as reported
    overdue_told: bool = False
    readings: deque[tuple[int, Sums]] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))

    def bounds_since(self, at_ns: int, now: Sums) -> HeldBounds:
        """Bounds that held at every instant from `at_ns` until now; the lower one is 0 if no reading is that old."""
        while len(self.readings) > 1 and self.readings[1][0] <= at_ns:
            self.readings.popleft()
        known = bool(self.readings) and self.readings[0][0] <= at_ns
        return bounds_between(self.readings[0][1] if known else Sums(), now)


@dataclass(slots=True, eq=False)
class Book:
    """A leased device."""

    info: DeviceInfo
    ledger: Ledger
    measured_ns: int = -1  # the time of the newest measurement applied
    trouble: str | None = None  # why the device is not measured
    trouble_since_ns: int = 0  # since when
    trouble_told: str | None = None  # the trouble last logged


class LeaseTable:
    """All devices and leases. Used by one thread; any thread may read the views."""

    def __init__(
        self,
        readings: Readings,
        rules: Callable[[DeviceInfo, int], Rules],
        quota: Quota | None,
        set_engines: Callable[[str, frozenset[int]], None],
        clock: Callable[[], int],
    ) -> None:
        """The arguments are those of `Broker`."""
        self.epoch = secrets.randbits(53)
        self.decide_from_ns = 0  # before this, engines that have not returned yet would count as foreign
        self.entries: dict[int, LeaseAccount] = {}
        self.lease_views: tuple[wire.LeaseView, ...] = ()
        self.device_views: tuple[DeviceView, ...] = ()
        self._readings, self._rules, self._quota = readings, rules, quota
        self._set_engines, self._clock = set_engines, clock
        self._books: dict[str, Book] = {}
        self._reservations: dict[int, tuple[Book, Connection]] = {}
        self._ids = itertools.count(1)
        self._counter = itertools.count(1)

    # ---- requests -------------------------------------------------------------------------------

    def register(self, connection: Connection, request: wire.RegisterMessage) -> LeaseAccount:
        """Register a lease and answer with its first grant. Raises LeaseRefused, with nothing changed."""
        terms = LeaseTerms(
            request.name, request.min_bytes, request.max_bytes, request.weight, request.priority, request.granule_bytes
        )
        book, lease_id = self._book(request.device_uuid), next(self._ids)
        self._check_promise(
            book, connection.peer, Promise(f"a min for {request.name!r}", request.min_bytes, MinimumsExceedCapacity)
        )
        record = RecordOwner(request.held_bytes)
        tenant = book.ledger.register(lease_id, terms, request.held_bytes)
        if (former := self._former(connection.peer, request)) is not None:
            self._drop(book, former)
        entry = LeaseAccount(
            lease_id, terms, request.device_uuid, connection.peer, record, connection, self._next_generation()
        )
        self.entries[lease_id] = entry
        connection.lease_id = lease_id
        self._tell_engines(book)
        # Only now: earlier measurements may not include it.
        entry.readings.append((self._clock(), record.read()))
        self.measure(book)
        orders = [order for order in self._decide(book) if not _grants(order, lease_id)]
        self._publish()
        connection.send(wire.RegisteredMessage(lease_id, entry.generation, tenant.granted_bytes), record.take_fd())
        self.carry_out(book, orders)
        log.info(
            "engine %r (pid %d) holds a lease on %s: %s now, at least %s%s",
            terms.name, entry.peer.pid, book.info.index, format_bytes(tenant.granted_bytes),
            format_bytes(terms.min_bytes), "" if former is None else "; it has come back",
        )  # fmt: skip
        return entry

    def ask(self, entry: LeaseAccount, message: wire.AskMessage) -> None:
        """Record the engine's demand."""
        expires_ns = self._clock() + message.expires_ms * 1_000_000
        self._books[entry.device_uuid].ledger.ask(entry.lease_id, message.target_bytes, expires_ns)

    def report(self, entry: LeaseAccount, message: wire.ReportMessage) -> None:
        """Record the engine's report of what it holds."""
        entry.held = message.held
        self._books[entry.device_uuid].ledger.report(entry.lease_id, message.free_bytes)

    def unmapped(self, entry: LeaseAccount, message: wire.UnmappedMessage) -> None:
        """Lower the engine's grant. Raises LeaseRefused if the message predates its newest grant."""
        if message.generation.epoch != self.epoch or message.generation.counter < entry.generation.counter:
            raise LeaseRefused(
                f"the answer {tuple(message.generation)} is older than the newest grant {tuple(entry.generation)}"
            )
        self._books[entry.device_uuid].ledger.unmapped(entry.lease_id, message.held_bytes)
        entry.overdue_told = False

    def lower_min(self, entry: LeaseAccount, message: wire.LowerMinMessage) -> None:
        """Lower the engine's minimum. Raises LeaseRefused if it would rise."""
        self._books[entry.device_uuid].ledger.lower_min(entry.lease_id, message.min_bytes)

    def limit(self, entry: LeaseAccount, max_bytes: int) -> wire.LimitSetMessage:
        """Set the engine's max by user command. Raises LeaseRefused."""
        ledger = self._books[entry.device_uuid].ledger
        over_bytes = ledger.limit(entry.lease_id, max_bytes)
        now = ledger.state.tenants[entry.lease_id].max_bytes
        assert now is not None
        if entry.connection is not None:
            revised = entry.connection.protocol >= wire.REVISED_LIMITS
            generation = self._next_generation() if revised else None
            entry.connection.send(wire.LimitMessage(entry.lease_id, now, generation))
        log.info("%s is limited to %s by hand; %s above it", named(entry), format_bytes(now), format_bytes(over_bytes))
        return wire.LimitSetMessage(now, over_bytes)

    def recall(self, entry: LeaseAccount, num_bytes: int) -> wire.RecallingMessage:
        """Recall bytes from the engine by user command. Raises LeaseRefused."""
        book = self._books[entry.device_uuid]
        self._read(entry)
        order = book.ledger.recall(entry.lease_id, num_bytes, self._clock())
        log.info("%s of %s are recalled by hand", format_bytes(num_bytes), named(entry))
        self.carry_out(book, (order,))
        return wire.RecallingMessage(order.target_bytes, wire.milliseconds(order.deadline_s))

    def reserve(self, connection: Connection, message: wire.ReserveMessage) -> None:
        """Reserve bytes; `ReservedMessage` is sent once they are free. Raises LeaseRefused."""
        book, reservation_id = self._book(message.device_uuid), next(self._ids)
        self._check_promise(book, connection.peer, Promise("a reservation", message.num_bytes, LeaseRefused))
        book.ledger.reserve(reservation_id, message.num_bytes)
        self._reservations[reservation_id] = (book, connection)
        connection.reservation_id = reservation_id
        self.measure(book)

    def unreserve(self, reservation_id: int) -> None:
        """End a reservation after its connection has closed."""
        book, _ = self._reservations.pop(reservation_id)
        book.ledger.unreserve(reservation_id)

    def end(self, entry: LeaseAccount, why: str, *, may_return: bool) -> None:
        """End a lease: it is reaped, or its engine returns. A second call with `may_return` False rules the return out."""
        if entry.connection is not None:
            entry.connection.lease_id = None
            entry.connection = None
            self._read(entry)
            log.info("the lease of %r (pid %d) has ended: %s", entry.terms.name, entry.peer.pid, why)
        entry.may_return = entry.may_return and may_return
        if entry.lease_id in self.entries:
            ledger = self._books[entry.device_uuid].ledger
            ledger.end(entry.lease_id, self._clock(), may_return=entry.may_return)

    def find(self, engine: str, peer: Peer, owner_uid: int) -> LeaseAccount:
        """The lease of an engine by name, pid or #number, if `peer` may control it. Raises UnknownEngine, NotPermitted."""
        living = [entry for entry in self.entries.values() if entry.connection is not None]
        found = [entry for entry in living if engine in (entry.terms.name, str(entry.peer.pid), f"#{entry.lease_id}")]
        if not found:
            there = ", ".join(sorted(named(entry) for entry in living)) or "none"
            raise UnknownEngine(f"no engine {engine!r} holds a lease; those that do: {there}")
        if len(found) > 1:
            there = ", ".join(named(entry) for entry in found)
            raise UnknownEngine(f"{len(found)} leases match {engine!r}; name one by its pid or #number: {there}")
        if peer.uid not in (0, owner_uid, found[0].peer.uid):
            raise NotPermitted(
                f"{named(found[0])} is {user_name(found[0].peer.uid)}'s; "
                f"only that user, root and {user_name(owner_uid)} may do that"
            )
        return found[0]

    def count_ended(self, uid: int) -> int:
        """How many leases of a user have ended and are still being reaped."""
        return sum(entry.connection is None for entry in self.entries.values() if entry.peer.uid == uid)

    # ---- measurements and orders ----------------------------------------------------------------

    def measure_all(self) -> None:
        """Measure every device in use, and drop devices without leases and reservations."""
        for uuid, book in list(self._books.items()):
            if book.ledger.state.tenants or book.ledger.state.reservations:
                self.measure(book)
            else:
                del self._books[uuid]

    def measure(self, book: Book) -> None:
        """Give the ledger the newest measurement, if any, with the leases' bounds then and now."""
        ledger, uuid = book.ledger, book.info.uuid
        memory, trouble = None, None
        try:
            memory = self._readings.memory(uuid)
            trouble = memory.error
        except MonitorError as error:
            trouble = str(error)
        now_ns = self._clock()
        entries = self._entries_of(book)
        # read after the measurement, whether or not there is one
        sums = {entry.lease_id: self._read(entry) for entry in entries}
        if memory is None or memory.total_bytes is None or memory.free_bytes is None or memory.is_stale(now_ns):
            ledger.unmeasured()
            trouble = trouble or "its numbers are old"
        elif memory.at_ns > book.measured_ns:
            bounds = {
                entry.lease_id: entry.bounds_since(memory.at_ns, sums[entry.lease_id])
                for entry in entries
                if entry.connection is not None
            }
            ledger.measured(memory.total_bytes, memory.free_bytes, bounds, memory.at_ns)
            book.measured_ns = memory.at_ns
        for entry in entries:
            entry.readings.append((now_ns, sums[entry.lease_id]))
        _tell_trouble(book, trouble, now_ns)
        for lease_id in ledger.reaped(now_ns):
            self._drop(book, self.entries[lease_id])

    def settle(self) -> None:
        """Decide for every device, and send the orders."""
        decided = [(book, self._decide(book)) for book in self._books.values()]
        self._publish()  # publish first, so that an engine that gets an order sees it in the views
        for book, orders in decided:
            self.carry_out(book, orders)

    def carry_out(self, book: Book, orders: Iterable[Order]) -> None:
        """Send the ledger's orders to the engines."""
        for order in orders:
            if isinstance(order, Ready):
                _, connection = self._reservations[order.reservation_id]
                num_bytes = book.ledger.state.reservations[order.reservation_id].num_bytes
                connection.send(wire.ReservedMessage(num_bytes))
                log.info(
                    "%s are free for the process that reserved them (pid %d)",
                    format_bytes(num_bytes),
                    connection.peer.pid,
                )
                continue
            entry = self.entries[order.lease_id]
            if entry.connection is None:
                continue
            generation = self._next_generation()
            if isinstance(order, Grant):
                entry.generation = generation
                entry.connection.send(wire.GrantMessage(order.lease_id, generation, order.granted_bytes))
            elif isinstance(order, Withdraw):
                entry.overdue_told = False
                entry.connection.send(wire.WithdrawMessage(order.lease_id, generation))
            else:
                deadline_ms = wire.milliseconds(order.deadline_s)
                log.info(
                    "%s is recalled to %s within %d ms, %s: it is granted %s; strangers hold %s of the device", named(entry),
                    format_bytes(order.target_bytes), deadline_ms, _why(order),
                    format_bytes(book.ledger.state.tenants[order.lease_id].granted_bytes),
                    format_bytes(book.ledger.state.foreign_bytes),
                )  # fmt: skip
                entry.connection.send(wire.RecallMessage(order.lease_id, generation, order.target_bytes, deadline_ms))

    def _decide(self, book: Book) -> tuple[Order, ...]:
        for entry in self._entries_of(book):
            self._read(entry)
        now_ns = self._clock()
        return () if now_ns < self.decide_from_ns else book.ledger.settle(now_ns)

    def _publish(self) -> None:
        """Rebuild the views, and log each overdue recall once."""
        now_ns = self._clock()
        views = []
        for entry in self.entries.values():
            tenant = self._books[entry.device_uuid].ledger.state.tenants[entry.lease_id]
            view = lease_view(entry, tenant, now_ns)
            views.append(view)
            if view.state == "overdue" and not entry.overdue_told:
                entry.overdue_told = True
                log.warning(
                    "%s is overdue: it was to be at %s and is granted %s; others are served without it",
                    named(entry), format_bytes(view.recall_target_bytes or 0), format_bytes(view.granted_bytes),
                )  # fmt: skip
        self.lease_views = tuple(views)
        self.device_views = tuple(device_view(book) for book in self._books.values())

    def close(self) -> None:
        """Drop all state."""
        self.entries.clear()
        self._books.clear()
        self._reservations.clear()
        self.lease_views, self.device_views = (), ()

    # ---- internal -------------------------------------------------------------------------------

    def _book(self, uuid: str) -> Book:
        """The device's book, created on first use. Raises LeaseRefused for an unknown device or one without a reading."""
        if (book := self._books.get(uuid)) is not None:
            return book
        try:
            memory = self._readings.memory(uuid)
            info = next(info for info in self._readings.devices() if info.uuid == uuid)
        except (MonitorError, StopIteration) as error:
            there = ", ".join(info.uuid for info in self._readings.devices()) or "none"
            raise LeaseRefused(f"device {uuid!r} is not watched; those that are: {there}") from error
        if memory.total_bytes is None:
            raise LeaseRefused(
                f"device {uuid!r} does not say how much memory it has: {memory.error or 'no answer yet'}"
            )
        ledger = Ledger(self._rules(info, memory.total_bytes), memory.total_bytes)
        return self._books.setdefault(uuid, Book(info, ledger))

    def _check_promise(self, book: Book, peer: Peer, asked: Promise) -> None:
        """Raise the promise's refusal if it exceeds the user's quota of the device."""
        if self._quota is None:
            return
        state = book.ledger.state
        promised_bytes = sum(
            state.tenants[entry.lease_id].min_bytes
            for entry in self._entries_of(book)
            if entry.peer.uid == peer.uid and entry.connection is not None
        ) + sum(
            state.reservations[reservation_id].num_bytes
            for reservation_id, (of, connection) in self._reservations.items()
            if of is book and connection.peer.uid == peer.uid
        )
        leasable_bytes = max(0, state.capacity_bytes - state.rules.headroom_bytes)
        self._quota.check_promise(peer.uid, user_name(peer.uid), asked, promised_bytes, leasable_bytes)

    def _former(self, peer: Peer, request: wire.RegisterMessage) -> LeaseAccount | None:
        """The ended lease that this engine held before; None if none, or if its pid is not visible here."""
        for entry in self.entries.values():
            same = (entry.peer.pid, entry.terms.name, entry.device_uuid) == (
                peer.pid,
                request.name,
                request.device_uuid,
            )
            if same and peer.pid and entry.connection is None and entry.may_return:
                return entry
        return None

    def _entries_of(self, book: Book) -> list[LeaseAccount]:
        return [entry for entry in self.entries.values() if entry.device_uuid == book.info.uuid]

    def _read(self, entry: LeaseAccount) -> Sums:
        """Read the lease's record, and pass its upper bound to the ledger."""
        sums = entry.record.read()
        held_bytes = min(wire.MAX_BYTES, sums.upper_bytes)
        self._books[entry.device_uuid].ledger.hold(entry.lease_id, held_bytes)
        return sums

    def _drop(self, book: Book, entry: LeaseAccount) -> None:
        book.ledger.drop(entry.lease_id)
        del self.entries[entry.lease_id]
        self._tell_engines(book)

    def _tell_engines(self, book: Book) -> None:
        pids = frozenset(entry.peer.pid for entry in self._entries_of(book))
        try:
            self._set_engines(book.info.uuid, pids - {0})
        except (MonitorError, OSError) as error:  # the process ended first, or no descriptors are left
            log.warning("the engines of device %s cannot all be counted: %s", book.info.index, error)

    def _next_generation(self) -> wire.OrderGeneration:
        return wire.OrderGeneration(self.epoch, next(self._counter))


def _why(order: Recall) -> str:
    """The reason for a recall, for the log."""
    if order.by_hand:
        return "by hand"
    return "so that another may grow" if order.for_growth else "for minimums, reservations and headroom"


def _tell_trouble(book: Book, trouble: str | None, now_ns: int) -> None:
    """Log why a device is not measured, once that has lasted a second, and its recovery: short gaps are normal."""
    if trouble is not None and book.trouble is None:
        book.trouble_since_ns = now_ns
    book.trouble = trouble
    if trouble is None:
        if book.trouble_told is not None:
            log.info("device %s is measured, and leased, again", book.info.index)
        book.trouble_told = None
    elif trouble != book.trouble_told and now_ns - book.trouble_since_ns > _TROUBLE_TOLD_AFTER_NS:
        book.trouble_told = trouble
        log.warning("device %s is not leased any further: %s", book.info.index, trouble)


def _grants(order: Order, lease_id: int) -> bool:
    return isinstance(order, Grant) and order.lease_id == lease_id
