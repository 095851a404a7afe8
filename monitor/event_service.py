"""The part of the monitor's process that finds events, keeps them and sends alerts: one thread, which nothing waits for.

    the broker ──► EventService.tell ──► EventQueue ──┐
    snapshots, once a second ──► Holders ─────────────┴──► EventLog        ──► `vram-monitor events`, the view
                            └──► Alerts ──► AlertDelivery ──► commands, webhooks

A full disk, a hanging command or a flood of events costs events, which are counted, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .alerts import Alert, AlertRule, Alerts
from .errors import MonitorError
from .event_log import EventLog
from .events import UNDELIVERED, EventKind, MemoryEvent
from .holders import Holders
from .log_throttle import LogThrottle, Occurrences
from .snapshot import LeaseUse, Snapshot

if TYPE_CHECKING:
    from .alert_delivery import AlertDelivery

log = logging.getLogger(__name__)

PEAK_S = 0.2  # between two looks at what leases hold
LOOK_S = 1.0  # between two snapshots, and two writes
MAX_PENDING = 256  # distinct events between two writes
MAX_REFUSALS, MAX_RESERVATIONS = 8, 32  # of them, of one user: refused; reserved, and as many released
_BOUNDED = {
    EventKind.REFUSED: (MAX_REFUSALS, "more requests of this user were refused"),
    EventKind.RESERVED: (MAX_RESERVATIONS, "more reservations of this user"),
    EventKind.RELEASED: (MAX_RESERVATIONS, "more reservations of this user"),
}


class EventQueue:
    """The broker's events until they are written. Equal ones count as one; their number is bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[object, MemoryEvent] = {}
        self._of_users: Counter[tuple[EventKind, str | None]] = Counter()
        self._lost = 0

    def add(self, event: MemoryEvent) -> None:
        """Add an event that happens now."""
        # Reservations of one process, such as those over HTTP, have names
        key: object = (event.kind, event.holder, event.command, event.reason)
        with self._lock:
            if event.kind in _BOUNDED and key not in self._events:
                most, more = _BOUNDED[event.kind]
                user = event.kind, event.user
                self._of_users[user] += 1
                if self._of_users[user] > most:
                    key, num_bytes = user, None if event.kind is EventKind.REFUSED else event.bytes
                    event = MemoryEvent(kind=event.kind, user=event.user, bytes=num_bytes, reason=more)
            if (before := self._events.get(key)) is not None:
                amount = None if event.bytes is None else event.bytes + (before.bytes or 0)
                merged = amount if event.kind is not EventKind.REFUSED else before.bytes
                self._events[key] = replace(event, bytes=merged, time=before.time, times=before.times + event.times)
            elif len(self._events) < MAX_PENDING:
                self._events[key] = replace(event, time=time.time())
            else:
                self._lost += 1

    def take(self) -> list[MemoryEvent]:
        """What came since the last call, oldest first."""
        with self._lock:
            events, self._events = list(self._events.values()), {}
            lost, self._lost = self._lost, 0
            self._of_users.clear()
        if lost:
            events.append(MemoryEvent(kind=EventKind.LOST, time=time.time(), times=lost, reason="too many at once"))
        return events


class EventService:
    """Finds, keeps and tells events until it is closed."""

    def __init__(
        self,
        read: Callable[[], Snapshot],
        leases: Callable[[], Sequence[LeaseUse]],
        open_log: Callable[[], EventLog] | None,
        *,
        rules: Sequence[AlertRule] = (),
        idle_after_s: float = 600.0,
    ) -> None:
        """Does nothing before `start`.

        Args:
            read, leases: All there is, and the leases alone, which are read more often.
            open_log: None: events are counted, and not kept.
        """
        self._read, self._leases, self._open_log = read, leases, open_log
        self._pending = EventQueue()
        self._holders = Holders(idle_after_s=idle_after_s)
        self._rules = tuple(rules)
        self._alerts = Alerts(rules)
        self._delivery: AlertDelivery | None = None  # once there is an alert
        self._log: EventLog | None = None
        self._lost = 0  # events that could not be written
        self._counts: Counter[str] = Counter()
        self._log_throttle, self._faults = LogThrottle(), Occurrences()
        self._unreadable: dict[str, LogThrottle] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    @property
    def tell(self) -> Callable[[MemoryEvent], None]:
        """Takes an event of the broker. Thread-safe, and never waits for the disk."""
        return self._pending.add

    @property
    def counts(self) -> Mapping[str, int]:
        """Events by kind since the start, and undelivered alerts. Thread-safe."""
        return {**self._counts, UNDELIVERED: 0 if self._delivery is None else self._delivery.failures}

    def change(self, rules: Sequence[AlertRule]) -> None:
        """Take these rules from the next look on. Thread-safe."""
        self._rules = tuple(rules)

    def start(self) -> None:
        """Begin. The log is opened by the thread: its disk may hang."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is pending, and end. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._delivery is not None:
            self._delivery.close()

    def _open(self) -> None:
        """Open the log, and tell how the previous monitor ended."""
        reason = None
        try:
            self._log = None if self._open_log is None else self._open_log()
        except (MonitorError, OSError) as error:
            log.warning("events are not kept: %s", error)
        except Exception:  # alerts go on without a log
            log.exception("events are not kept: the log cannot be opened")
        if self._log is not None and self._log.last is not None and self._log.last.kind is not EventKind.STOPPED:
            reason = "the monitor before it did not stop by itself: it was killed, or the machine went down"
        self._pending.add(MemoryEvent(kind=EventKind.STARTED, reason=reason))

    def _run(self) -> None:
        self._open()
        self._watch()
        self._pending.add(MemoryEvent(kind=EventKind.STOPPED))
        self._write(self._pending.take())
        if self._log is not None:
            self._log.close()

    def _watch(self) -> None:
        looked = 0.0
        while not self._stopping.wait(PEAK_S):
            try:
                self._holders.raise_peaks(self._leases())
                if time.monotonic() - looked >= LOOK_S:
                    looked = time.monotonic()
                    self._look()
            except Exception as error:  # a fault here must not end events and alerts for good
                if times := self._faults.record(f"{type(error).__name__}: {error}", time.monotonic_ns()):
                    log.error("looking for events failed (%d times)", times, exc_info=error)

    def _look(self) -> None:
        snapshot = self._read()
        told = [self._holders.completed(event) for event in self._pending.take()]  # before what has ended is forgotten
        changes = [*self._holders.look(snapshot), *self._readability(snapshot)]
        if self._rules != self._alerts.rules:
            self._alerts.change(self._rules)
        alerts = self._alerts.look(snapshot)
        self._deliver(alerts)
        now_s = time.time()
        found = [replace(event, time=event.time or now_s) for event in (*told, *changes, *map(_alert_event, alerts))]
        if found:
            self._write(sorted(found, key=lambda event: event.time))

    def _deliver(self, alerts: Sequence[Alert]) -> None:
        if alerts and self._delivery is None:
            from .alert_delivery import AlertDelivery  # a monitor without rules does not need it

            self._delivery = AlertDelivery()
        for alert in alerts:
            assert self._delivery is not None
            self._delivery.send(alert)

    def _readability(self, snapshot: Snapshot) -> list[MemoryEvent]:
        """Devices that cannot be read any more, or again."""
        events = []
        for device in snapshot.devices:
            throttle = self._unreadable.setdefault(device.info.uuid, LogThrottle())
            if device.memory.at_ns and (times := throttle.record(device.memory.error, snapshot.at_ns)):
                kind = EventKind.READABLE if device.memory.error is None else EventKind.UNREADABLE
                event = MemoryEvent(kind=kind, device=device.info.index, device_uuid=device.info.uuid)
                events.append(replace(event, reason=device.memory.error, times=times))
        return events

    def _write(self, events: Sequence[MemoryEvent]) -> None:
        for event in events:
            self._counts[event.kind] += event.times
        if self._log is None:
            return
        lost = [MemoryEvent(kind=EventKind.LOST, times=self._lost, reason="they could not be written")] if self._lost else []
        try:
            self._log.write([*lost, *events], self._holders.held)
            state, self._lost = None, 0
        except OSError as error:
            state = f"events cannot be written: {error.strerror or error}"
            self._lost += len(events)
            self._counts[EventKind.LOST] += len(events)
        if self._log_throttle.record(state, time.monotonic_ns()):
            log.warning("%s", state or "events are written again")


def _alert_event(alert: Alert) -> MemoryEvent:
    info = alert.device.info
    text = f"{alert.rule.title}: {alert.text}"
    return MemoryEvent(
        kind=EventKind.ALERT, device=info.index, device_uuid=info.uuid, pid=alert.pid, engine=alert.engine, reason=text
    )
