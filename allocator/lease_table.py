"""The broker's table of leases: the leased devices with their accounts, and the connection behind each lease.

The table stands between the device accounts, which only handle numbers, and the broker, which handles sockets.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from ..common.units import format_bytes
from ..monitor.errors import MonitorError
from ..monitor.events import EventKind, MemoryEvent
from ..monitor.snapshot import DeviceInfo, DeviceMemory
from ..monitor.sources.process_facts import user_name
from . import wire
from .broker_connection import Connection, Peer
from .device_account import DeviceAccount
from .errors import LeaseRefused, MinimumsExceedCapacity, NotPermitted, UnknownEngine
from .lease_account import DeviceView, LeaseAccount, LeasedDevice, device_view, lease_view, named, peer_event
from .lease_policy import Grant, LeaseDemand, LeaseState, Order, Ready, Recall, Rules, Withdraw
from .lease_record import RecordOwner, Sums
from .quota import Promise, Quota
from .reservation_table import ReservationTable

log = logging.getLogger(__name__)

_TROUBLE_LOGGED_AFTER_NS = 1_000_000_000


class Readings(Protocol):
    """The broker's source of memory readings; the monitor's `RecordReader` and `Watch` implement it."""

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The watched devices."""
        ...

    def memory(self, uuid: str) -> DeviceMemory:
        """The newest readings of one device. Raises MonitorError."""
        ...


def default_rules(info: DeviceInfo, capacity_bytes: int) -> Rules:
    """The default rules, the same for every kind of device."""
    return Rules.of(capacity_bytes)


class LeaseTable:
    """All devices and leases. Used by one thread; any thread may read the views.

    Args:
        rules: Makes a device's rules from its info and capacity in bytes, at its first lease and when its capacity changes.
        quota: The bounds for each user; None: none.
        set_engines: Called with the pids that hold leases on a device whenever they change. A source that counts only named
            processes, as a test device does, must count these too: used bytes include the engines'.
        clock: Monotonic ns, the clock of the readings.
        tell: Takes events of leases and reservations: refusals, recalls, ends. Must not wait.
    """

    def __init__(
        self,
        readings: Readings,
        rules: Callable[[DeviceInfo, int], Rules] = default_rules,
        quota: Quota | None = None,
        set_engines: Callable[[str, frozenset[int]], None] = lambda uuid, pids: None,
        clock: Callable[[], int] = time.monotonic_ns,
        tell: Callable[[MemoryEvent], None] = lambda event: None,
    ) -> None:
        self.epoch = secrets.randbits(53)
        self.decide_from_ns = 0  # before this, engines that have not returned yet would count as foreign
        self.leases: dict[int, LeaseAccount] = {}
        self.lease_views: tuple[wire.LeaseView, ...] = ()
        self.reservation_views: tuple[wire.ReservationView, ...] = ()
        self.device_views: tuple[DeviceView, ...] = ()
        self._readings, self._rules, self.quota = readings, rules, quota
        self._set_engines, self.clock, self._tell = set_engines, clock, tell
        self._devices: dict[str, LeasedDevice] = {}
        self.reservations = ReservationTable(clock, tell)
        self._ids = itertools.count(1)
        self._counter = itertools.count(1)

    # ---- requests -------------------------------------------------------------------------------

    def register(self, connection: Connection, request: wire.RegisterMessage) -> LeaseAccount:
        """Register a lease and answer with its first grant. Raises LeaseRefused, with nothing changed."""
        device, lease_id = self._device(request.device_uuid), next(self._ids)
        self._check_promise(
            device, connection.peer, Promise(f"a min for {request.name!r}", request.min_bytes, MinimumsExceedCapacity)
        )
        record = RecordOwner(request.held_bytes)
        state = LeaseState(
            lease_id, request.name, request.min_bytes, request.max_bytes, request.granule_bytes, request.weight,
            request.priority, request.held_bytes,
        )  # fmt: skip
        device.account.register(state)
        if (former := self._former(connection.peer, request)) is not None:
            self._drop(device, former)
        lease = LeaseAccount(state, request.device_uuid, connection.peer, record, connection, self._next_generation())
        self.leases[lease_id] = lease
        connection.lease_id = lease_id
        self._update_engines(device)
        # Only now: earlier measurements may not include it.
        lease.readings.append((self.clock(), record.read()))
        self.measure(device)
        orders = [order for order in self._decide(device) if not _grants(order, lease_id)]
        self._publish()
        connection.send(wire.RegisteredMessage(lease_id, lease.generation, state.granted_bytes), record.take_fd())
        self.carry_out(device, orders)
        log.info(
            "engine %r (pid %d) holds a lease on %s: %s now, at least %s%s",
            lease.name,
            lease.peer.pid,
            device.info.index,
            format_bytes(state.granted_bytes),
            format_bytes(state.min_bytes),
            "" if former is None else "; it has come back",
        )
        return lease

    def ask(self, lease: LeaseAccount, message: wire.AskMessage) -> None:
        """Record the engine's demand."""
        now_ns = self.clock()
        demand = LeaseDemand(
            message.target_bytes,
            now_ns + message.expires_ms * 1_000_000,
            now_ns - message.waiting_ms * 1_000_000,
            message.keep_bytes,
        )
        self._devices[lease.device_uuid].account.ask(lease.lease_id, demand, now_ns)

    def report(self, lease: LeaseAccount, message: wire.ReportMessage) -> None:
        """Record the engine's report of what it holds."""
        lease.held, lease.num_waiting = message.held, message.num_waiting
        sums = self._read(lease)  # after its maps: the next measurement need not count them as another process's
        lease.add_reading(self.clock(), sums)
        account = self._devices[lease.device_uuid].account
        account.report(lease.lease_id, message.free_bytes, message.kept_bytes, self.clock(), reused=message.reused)

    def unmapped(self, lease: LeaseAccount, message: wire.UnmappedMessage) -> None:
        """Lower the engine's grant. Raises LeaseRefused if the message predates its newest grant."""
        if message.generation.epoch != self.epoch or message.generation.counter < lease.generation.counter:
            raise LeaseRefused(
                f"the answer {tuple(message.generation)} is older than the newest grant {tuple(lease.generation)}"
            )
        self._devices[lease.device_uuid].account.unmapped(lease.lease_id, message.held_bytes)
        lease.overdue_logged = False

    def lower_min(self, lease: LeaseAccount, message: wire.LowerMinMessage) -> None:
        """Lower the engine's minimum. Raises LeaseRefused if it would rise."""
        self._devices[lease.device_uuid].account.lower_min(lease.lease_id, message.min_bytes)

    def limit(self, lease: LeaseAccount, max_bytes: int) -> wire.LimitSetMessage:
        """Set the engine's max by user command. Raises LeaseRefused."""
        account = self._devices[lease.device_uuid].account
        over_bytes = account.limit(lease.lease_id, max_bytes)
        now = lease.state.max_bytes
        assert now is not None
        if lease.connection is not None:
            lease.connection.send(wire.LimitMessage(lease.lease_id, now, self._next_generation()))
        self._tell(self._event(lease, EventKind.LIMITED, now, "by hand"))
        log.info("%s is limited to %s by hand; %s above it", named(lease), format_bytes(now), format_bytes(over_bytes))
        return wire.LimitSetMessage(now, over_bytes)

    def recall(self, lease: LeaseAccount, num_bytes: int) -> wire.RecallingMessage:
        """Recall bytes from the engine by user command. Raises LeaseRefused."""
        device = self._devices[lease.device_uuid]
        self._read(lease)
        order = device.account.recall(lease.lease_id, num_bytes, self.clock())
        log.info("%s of %s are recalled by hand", format_bytes(num_bytes), named(lease))
        self.carry_out(device, (order,))
        return wire.RecallingMessage(order.target_bytes, wire.milliseconds(order.deadline_s))

    def reserve(self, connection: Connection, message: wire.ReserveMessage) -> int:
        """Reserve bytes; `ReservedMessage` is sent once they are free. Returns the reservation's id. Raises LeaseRefused."""
        device, reservation_id = self._device(message.device_uuid), next(self._ids)
        self._check_promise(device, connection.peer, Promise("a reservation", message.num_bytes, LeaseRefused))
        if self.quota is not None:
            uid = connection.peer.uid
            self.quota.check_priority(uid, user_name(uid), message.priority)
            message = replace(message, wait_ms=self.quota.wait_ms(uid, message.wait_ms))
        # What the last broker had granted may be in use, so it is not waited for until it is free.
        held = message.renewed and self.clock() < self.decide_from_ns
        self.reservations.reserve(reservation_id, device, connection, message, held=held)
        self.measure(device)
        return reservation_id

    def resize(self, reservation_id: int, message: wire.ResizeMessage, peer: Peer) -> None:
        """Change the size of a reservation; `ReservedMessage` is sent once its bytes are free. Raises LeaseRefused."""
        device = self.reservations.device_of(reservation_id)
        self._check_promise(device, peer, Promise("a reservation", message.num_bytes, LeaseRefused), but=reservation_id)
        wait_ms = message.wait_ms if self.quota is None else self.quota.wait_ms(peer.uid, message.wait_ms)
        self.reservations.resize(reservation_id, replace(message, wait_ms=wait_ms))

    def check_times(self) -> bool:
        """End and refuse the reservations with no time left. After `decide_all`, so that what is free is given first.

        Returns whether others may be served now.
        """
        return self.clock() >= self.decide_from_ns and self.reservations.check_times(self._describe)

    def end(self, lease: LeaseAccount, why: str, *, may_return: bool) -> None:
        """End a lease: it is reaped, or its engine returns. A second call with `may_return` False rules the return out."""
        if lease.connection is not None:
            lease.connection.lease_id = None
            lease.connection = None
            self._read(lease)
            self._tell(self._event(lease, EventKind.DIED if may_return else EventKind.ENDED, reason=why))
            log.info("the lease of %r (pid %d) has ended: %s", lease.name, lease.peer.pid, why)
        lease.may_return = lease.may_return and may_return
        if lease.lease_id in self.leases:
            account = self._devices[lease.device_uuid].account
            account.end(lease.lease_id, self.clock(), may_return=lease.may_return)

    def refused(self, peer: Peer, message: wire.Message, error: LeaseRefused) -> None:
        """Tell that a lease or a reservation was refused."""
        match message:
            case wire.RegisterMessage():
                event = MemoryEvent(kind=EventKind.REFUSED, engine=message.name, bytes=message.min_bytes)
            case wire.ReserveMessage():
                event = MemoryEvent(kind=EventKind.REFUSED, command=message.name, bytes=message.num_bytes)
            case _:
                return
        info = next((info for info in self._readings.devices() if info.uuid == message.device_uuid), None)
        told = peer_event(peer, info, event.kind, event.bytes, str(error))
        self._tell(replace(told, engine=event.engine, command=event.command))

    def find(self, engine: str, peer: Peer, owner_uid: int) -> LeaseAccount:
        """The lease of an engine by name, pid or #number, if `peer` may control it. Raises UnknownEngine, NotPermitted."""
        living = [lease for lease in self.leases.values() if lease.connection is not None]
        found = [lease for lease in living if engine in (lease.name, str(lease.peer.pid), f"#{lease.lease_id}")]
        if not found:
            there = ", ".join(sorted(named(lease) for lease in living)) or "none"
            raise UnknownEngine(f"no engine {engine!r} holds a lease; those that do: {there}")
        if len(found) > 1:
            there = ", ".join(named(lease) for lease in found)
            raise UnknownEngine(f"{len(found)} leases match {engine!r}; name one by its pid or #number: {there}")
        if peer.uid not in (0, owner_uid, found[0].peer.uid):
            may = " and ".join(dict.fromkeys(map(user_name, (found[0].peer.uid, 0, owner_uid))))
            raise NotPermitted(f"{named(found[0])} is {user_name(found[0].peer.uid)}'s; only {may} may do that")
        return found[0]

    def holds(self, number: int) -> bool:
        """Whether there is a lease or a reservation of this id."""
        return number in self.leases or number in self.reservations

    def count_ended(self, uid: int) -> int:
        """How many leases of a user have ended and are still being reaped."""
        return sum(lease.connection is None for lease in self.leases.values() if lease.peer.uid == uid)

    # ---- measurements and orders ----------------------------------------------------------------

    def measure_all(self) -> None:
        """Measure every device in use, and drop devices without leases and reservations."""
        for uuid, device in list(self._devices.items()):
            if device.account.state.leases or device.account.state.reservations:
                self.measure(device)
            else:
                del self._devices[uuid]

    def measure(self, device: LeasedDevice) -> None:
        """Give the account the newest measurement, if any, with the leases' bounds then and now."""
        account, uuid = device.account, device.info.uuid
        memory, trouble = None, None
        try:
            memory = self._readings.memory(uuid)
            trouble = memory.error
        except MonitorError as error:
            trouble = str(error)
        now_ns = self.clock()
        leases = self._leases_on(device)
        # read after the measurement, whether or not there is one
        sums = {lease.lease_id: self._read(lease) for lease in leases}
        if memory is None or memory.total_bytes is None or memory.free_bytes is None or memory.is_stale(now_ns):
            account.unmeasured()
            trouble = trouble or "its numbers are old"
        elif memory.at_ns > device.measured_ns:
            bounds = {
                lease.lease_id: lease.bounds_since(memory.at_ns, sums[lease.lease_id])
                for lease in leases
                if lease.connection is not None
            }
            if memory.total_bytes != account.state.capacity_bytes:
                self._follow(device, memory.total_bytes)
            account.measured(memory.total_bytes, memory.free_bytes, bounds, memory.at_ns)
            device.measured_ns = memory.at_ns
        for lease in leases:
            lease.readings.append((now_ns, sums[lease.lease_id]))
        _log_trouble(device, trouble, now_ns)
        for lease_id in account.reaped(now_ns):
            self._drop(device, self.leases[lease_id])

    def _follow(self, device: LeasedDevice, capacity_bytes: int) -> None:
        """Take over a limit of the device's memory that has changed: of a cgroup, or of a container's share of a GPU."""
        state = device.account.state
        before, minimums = state.capacity_bytes, sum(lease.min_bytes for lease in state.living())
        device.account.set_rules(self._rules(device.info, capacity_bytes))
        log.info(
            "device %s has %s of memory, and had %s; the minimums of its leases are %s",
            device.info.index,
            *map(format_bytes, (capacity_bytes, before, minimums)),
        )

    def decide_all(self) -> None:
        """Decide for every device, and send the orders."""
        decided = [(device, self._decide(device)) for device in self._devices.values()]
        # Publish first, so that an engine that gets an order sees it in the views
        self._publish()
        for device, orders in decided:
            self.carry_out(device, orders)

    def carry_out(self, device: LeasedDevice, orders: Iterable[Order]) -> None:
        """Send the account's orders to the engines."""
        for order in orders:
            if isinstance(order, Ready):
                self.reservations.ready(order.reservation_id)
                continue
            lease = self.leases[order.lease_id]
            if lease.connection is None:
                continue
            generation = self._next_generation()
            if isinstance(order, Grant):
                lease.generation = generation
                lease.connection.send(wire.GrantMessage(order.lease_id, generation, order.granted_bytes))
            elif isinstance(order, Withdraw):
                lease.overdue_logged = False
                lease.connection.send(wire.WithdrawMessage(order.lease_id, generation))
            else:
                deadline_ms = wire.milliseconds(order.deadline_s)
                over_bytes = device.account.state.leases[order.lease_id].granted_bytes - order.target_bytes
                self._tell(self._event(lease, EventKind.RECALLED, over_bytes, _why(order)))
                log.info(
                    "%s is recalled to %s within %d ms, %s: it is granted %s; external processes hold %s of the device",
                    named(lease),
                    format_bytes(order.target_bytes),
                    deadline_ms,
                    _why(order),
                    format_bytes(lease.state.granted_bytes),
                    format_bytes(device.account.state.foreign_bytes),
                )
                lease.connection.send(
                    wire.RecallMessage(order.lease_id, generation, order.target_bytes, deadline_ms, order.spares_requests)
                )

    def _decide(self, device: LeasedDevice) -> tuple[Order, ...]:
        for lease in self._leases_on(device):
            self._read(lease)
        now_ns = self.clock()
        return () if now_ns < self.decide_from_ns else device.account.decide(now_ns)

    def _publish(self) -> None:
        """Rebuild the views, and log each overdue recall once."""
        now_ns = self.clock()
        views = []
        for lease in self.leases.values():
            view = lease_view(lease, now_ns)
            views.append(view)
            if view.state == "overdue" and not lease.overdue_logged:
                lease.overdue_logged = True
                over_bytes = view.granted_bytes - (view.recall_target_bytes or 0)
                self._tell(self._event(lease, EventKind.OVERDUE, over_bytes, "others are served without it"))
                log.warning(
                    "%s is overdue: it was to be at %s and is granted %s; others are served without it",
                    named(lease),
                    format_bytes(view.recall_target_bytes or 0),
                    format_bytes(view.granted_bytes),
                )
        self.lease_views = tuple(views)
        self.reservation_views = tuple(self.reservations.views())
        self.device_views = tuple(device_view(device) for device in self._devices.values())

    def close(self) -> None:
        """Drop all state."""
        self.leases.clear()
        self._devices.clear()
        self.reservations.clear()
        self.lease_views, self.reservation_views, self.device_views = (), (), ()

    # ---- internal -------------------------------------------------------------------------------

    def _device(self, uuid: str) -> LeasedDevice:
        """The device's device, created on first use. Raises LeaseRefused for an unknown device or one without a reading."""
        if (device := self._devices.get(uuid)) is not None:
            return device
        try:
            memory = self._readings.memory(uuid)
            info = next(info for info in self._readings.devices() if info.uuid == uuid)
        except (MonitorError, StopIteration) as error:
            there = ", ".join(info.uuid for info in self._readings.devices()) or "none"
            raise LeaseRefused(f"device {uuid!r} is not watched; those that are: {there}") from error
        if memory.total_bytes is None:
            raise LeaseRefused(f"device {uuid!r} does not say how much memory it has: {memory.error or 'no answer yet'}")
        account = DeviceAccount(self._rules(info, memory.total_bytes), memory.total_bytes)
        return self._devices.setdefault(uuid, LeasedDevice(info, account))

    def _describe(self, device: LeasedDevice) -> str:
        """What leases and external processes hold of a device."""
        state = device.account.state
        leases = sorted((one for one in self._leases_on(device) if one.connection), key=lambda one: -one.state.min_bytes)
        minimums = sum(lease.min_bytes for lease in state.living())
        said = []
        if leases and minimums:
            more = f" and {len(leases) - 1} more" if len(leases) > 1 else ""
            said.append(f"{format_bytes(minimums)} are guaranteed to {named(leases[0])}{more} until they end")
        said.append(f"external processes hold {format_bytes(state.foreign_bytes)} (`vram-monitor --once` names them)")
        return "; ".join(said)

    def _check_promise(self, device: LeasedDevice, peer: Peer, asked: Promise, but: int | None = None) -> None:
        """Raise the promise's refusal if it exceeds the user's quota of the device, beside all but the reservation `but`."""
        if self.quota is None:
            return
        state = device.account.state
        promised_bytes = sum(
            lease.state.min_bytes
            for lease in self._leases_on(device)
            if lease.peer.uid == peer.uid and lease.connection is not None
        ) + self.reservations.promised_bytes(device, peer.uid, but)
        leasable_bytes = max(0, state.capacity_bytes - state.rules.headroom_bytes)
        self.quota.check_promise(peer.uid, user_name(peer.uid), asked, promised_bytes, leasable_bytes)

    def _former(self, peer: Peer, request: wire.RegisterMessage) -> LeaseAccount | None:
        """The ended lease that this engine held before; None if none, or if its pid is not visible here."""
        for lease in self.leases.values():
            same = (lease.peer.pid, lease.name, lease.device_uuid) == (peer.pid, request.name, request.device_uuid)
            if same and peer.pid and lease.connection is None and lease.may_return:
                return lease
        return None

    def _leases_on(self, device: LeasedDevice) -> list[LeaseAccount]:
        return [lease for lease in self.leases.values() if lease.device_uuid == device.info.uuid]

    def _read(self, lease: LeaseAccount) -> Sums:
        """Read the lease's record, and pass its upper bound to the account."""
        sums = lease.record.read()
        held_bytes = min(wire.MAX_BYTES, sums.upper_bytes)
        self._devices[lease.device_uuid].account.hold(lease.lease_id, held_bytes)
        return sums

    def _drop(self, device: LeasedDevice, lease: LeaseAccount) -> None:
        device.account.drop(lease.lease_id)
        del self.leases[lease.lease_id]
        self._update_engines(device)

    def _update_engines(self, device: LeasedDevice) -> None:
        pids = frozenset(lease.peer.pid for lease in self._leases_on(device))
        try:
            self._set_engines(device.info.uuid, pids - {0})
        except (MonitorError, OSError) as error:  # the process ended first, or no descriptors are left
            log.warning("the engines of device %s cannot all be counted: %s", device.info.index, error)

    def _event(
        self, lease: LeaseAccount, kind: EventKind, num_bytes: int | None = None, reason: str | None = None
    ) -> MemoryEvent:
        device = self._devices[lease.device_uuid]
        state = device.account.state.leases.get(lease.lease_id)
        event = peer_event(lease.peer, device.info, kind, num_bytes, reason)
        return replace(event, engine=lease.name, held_bytes=None if state is None else state.held_bytes)

    def _next_generation(self) -> wire.OrderGeneration:
        return wire.OrderGeneration(self.epoch, next(self._counter))


def _why(order: Recall) -> str:
    """The reason for a recall, for the log."""
    if order.by_hand:
        return "by hand"
    if order.spares_requests and not order.for_growth:
        return "as it is idle, and external processes use the device"
    return "so that another may grow" if order.for_growth else "for minimums, reservations and headroom"


def _log_trouble(device: LeasedDevice, trouble: str | None, now_ns: int) -> None:
    """Log why a device is not measured, once that has lasted a second, and its recovery."""
    if trouble is not None and device.trouble is None:
        device.trouble_since_ns = now_ns
    device.trouble = trouble
    if trouble is None:
        if device.trouble_logged is not None:
            log.info("device %s is measured, and leased, again", device.info.index)
        device.trouble_logged = None
    elif trouble != device.trouble_logged and now_ns - device.trouble_since_ns > _TROUBLE_LOGGED_AFTER_NS:
        device.trouble_logged = trouble
        log.warning("device %s is not leased any further: %s", device.info.index, trouble)


def _grants(order: Order, lease_id: int) -> bool:
    return isinstance(order, Grant) and order.lease_id == lease_id
