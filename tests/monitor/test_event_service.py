"""The service of events with a made-up source: floods, logs that cannot be written, what monitors leave behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from monitors import wait_until
from snapshots import dead, sample_device, snapshot_of

from pagetide.common.units import GIB
from pagetide.monitor import event_service
from pagetide.monitor.config import LEAST_EVENTS_BYTES
from pagetide.monitor.event_log import EventLog, EventReader
from pagetide.monitor.event_service import MAX_PENDING, MAX_REFUSALS, MAX_RESERVATIONS, EventQueue, EventService
from pagetide.monitor.events import EventKind, MemoryEvent
from pagetide.monitor.snapshot import ProcessUse, Snapshot

DEVICE = sample_device(0)


@dataclass
class World:
    """A service of which the snapshots are set by the test."""

    directory: Path
    snapshot: Snapshot = field(default_factory=lambda: snapshot_of(DEVICE))
    looks: int = 0

    def read(self) -> Snapshot:
        self.looks += 1
        return self.snapshot

    def holds(self, *uses: ProcessUse) -> None:
        reading = replace(DEVICE.detail.reading, processes=uses)
        self.snapshot = snapshot_of(replace(DEVICE, detail=replace(DEVICE.detail, reading=reading)))

    def look(self) -> None:
        """Wait until what is set now was seen."""
        seen = self.looks + 2
        wait_until(lambda: self.looks >= seen)

    @contextmanager
    def running(self, **more: Any) -> Iterator[EventService]:
        service = EventService(self.read, list, lambda: EventLog(self.directory, LEAST_EVENTS_BYTES), **more)
        service.start()
        try:
            yield service
        finally:
            service.close()

    def kinds(self) -> list[str]:
        return [event.kind.value for event in EventReader(self.directory).newest(1000)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(event_service, "LOOK_S", 0.01)
    monkeypatch.setattr(event_service, "PEAK_S", 0.005)
    return World(tmp_path / "events")


def test_events_are_kept_counted_and_survive_a_restart(world: World) -> None:
    with world.running() as service:
        world.look()
        world.holds(ProcessUse(7, 3 * GIB, user="ann", command="python"))
        world.look()
        service.tell(MemoryEvent(kind=EventKind.REFUSED, device_uuid=DEVICE.info.uuid, pid=7, bytes=GIB, reason="no room"))
        world.look()
        world.snapshot = snapshot_of(dead(DEVICE))
        world.look()
        counts = service.counts
    first = ["started", "ended", "ended", "ended", "took", "refused", "unreadable", "stopped"]
    assert sorted(world.kinds()) == sorted(first) and world.kinds()[0] == "started" and world.kinds()[-1] == "stopped"
    assert (counts["took"], counts["refused"], counts["started"], counts["undelivered"]) == (1, 1, 1, 0)
    refused = next(event for event in EventReader(world.directory).newest(100) if event.kind is EventKind.REFUSED)
    assert (refused.command, refused.user, refused.reason) == ("python", "ann", "no room")
    with world.running():
        world.look()
    started = [event.reason for event in EventReader(world.directory).newest(100) if event.kind is EventKind.STARTED]
    assert started == [None, None]


def test_a_monitor_that_was_killed_is_told_by_the_next_one(world: World) -> None:
    log = EventLog(world.directory, LEAST_EVENTS_BYTES)
    log.write([MemoryEvent(kind=EventKind.STARTED)], list)
    log._lock.close()
    with world.running():
        world.look()
    reasons = [event.reason or "" for event in EventReader(world.directory).newest(100) if event.kind is EventKind.STARTED]
    assert "was killed, or the machine went down" in reasons[-1]


def test_a_log_that_cannot_be_written_costs_events_alone_and_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with world.running() as service:
        world.look()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(EventLog, "_write", full)
            for number in range(20):
                service.tell(MemoryEvent(kind=EventKind.REFUSED, pid=number, user=str(number), reason=f"{number}"))
            wait_until(lambda: service.counts.get("lost") == 20)
        service.tell(MemoryEvent(kind=EventKind.LIMITED))
        wait_until(lambda: "limited" in world.kinds())
    lost = [event for event in EventReader(world.directory).newest(100) if event.kind is EventKind.LOST]
    assert [(event.times, event.reason) for event in lost] == [(20, "they could not be written")]
    assert [record.message for record in caplog.records if "written" in record.message] == [
        "events cannot be written: No space left on device"
    ]


def test_without_a_directory_events_are_counted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.directory.parent.joinpath("events").write_text("a file")
    with world.running() as service:
        service.tell(MemoryEvent(kind=EventKind.LIMITED))
        wait_until(lambda: service.counts.get("limited") == 1)
    assert "events are not kept: " in caplog.text
    service.close()


def test_a_fault_of_a_look_is_logged_and_the_next_one_goes_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with world.running() as service:
        good, world.snapshot = world.snapshot, None  # type: ignore[assignment]
        world.look()
        world.snapshot = good
        service.tell(MemoryEvent(kind=EventKind.LIMITED))
        wait_until(lambda: service.counts.get("limited") == 1)
    assert caplog.text.count("looking for events failed") == 1


def test_a_flood_is_merged_bounded_and_counted() -> None:
    pending = EventQueue()
    for _ in range(10_000):
        pending.add(MemoryEvent(kind=EventKind.RECALLED, pid=7, bytes=5, reason="by hand"))
    (event,) = pending.take()
    assert (event.times, event.bytes) == (10_000, 50_000) and event.time > 0
    for number in range(10_000):  # one user, whose requests differ
        pending.add(MemoryEvent(kind=EventKind.REFUSED, pid=number, user="eve", bytes=GIB, reason=f"{number}"))
    events = pending.take()
    assert [event.times for event in events] == [1] * MAX_REFUSALS + [10_000 - MAX_REFUSALS]
    assert events[-1].reason == "more requests of this user were refused"
    for number in range(300):  # of one process, as over HTTP
        pending.add(MemoryEvent(kind=EventKind.RESERVED, pid=7, user="eve", command=f"job {number}", bytes=2))
    events = pending.take()
    assert [event.command for event in events] == [*(f"job {number}" for number in range(MAX_RESERVATIONS)), None]
    assert (sum(event.bytes or 0 for event in events), events[-1].times) == (600, 300 - MAX_RESERVATIONS)
    for number in range(10_000):
        pending.add(MemoryEvent(kind=EventKind.DIED, pid=number))
    events = pending.take()
    assert len(events) == MAX_PENDING + 1 and (events[-1].kind, events[-1].times) == (EventKind.LOST, 10_000 - MAX_PENDING)
    assert pending.take() == []


def test_events_of_many_threads_are_all_counted() -> None:
    pending, taken = EventQueue(), []

    def add(pid: int) -> None:
        for _ in range(2000):
            pending.add(MemoryEvent(kind=EventKind.RECALLED, pid=pid))

    threads = [threading.Thread(target=add, args=(pid,)) for pid in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += pending.take()
    taken += pending.take()
    assert sum(event.times for event in taken) == 8000
