"""What processes and leases hold, as events: growth, shrinking, ends, leases of known processes, silence of a driver."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import host_device, sample_device, sample_lease, snapshot_of

from pagetide.common.units import GIB, MIB
from pagetide.monitor.events import EventKind, MemoryEvent
from pagetide.monitor.holders import MAX_EVENTS, MOST_STEP_BYTES, Holders, step_bytes
from pagetide.monitor.snapshot import MAX_HOST_PROCESSES, Device, LeaseUse, ProcessUse, Snapshot

DEVICE = sample_device(0)
UUID = DEVICE.info.uuid


def seen(*uses: ProcessUse, leases: tuple[LeaseUse, ...] = (), unknown: bool = False) -> Snapshot:
    reading = replace(DEVICE.detail.reading, processes=None if unknown else uses)
    device: Device = replace(DEVICE, detail=replace(DEVICE.detail, reading=reading))
    return snapshot_of(device).with_leases(leases)


def train(used_bytes: int | None, **changes: object) -> ProcessUse:
    return replace(ProcessUse(7, used_bytes, user="ann", command="/usr/bin/python train.py --key s3cret"), **changes)


def lease(held_gib: int, **changes: object) -> LeaseUse:
    made = sample_lease("chat", 7, UUID, 40, held=held_gib, weights=1, kv=1, free=0, minimum=1)
    return replace(made, **changes)


def holders(alive: bool = False, idle_after_s: float = 600.0) -> Holders:
    return Holders(idle_after_s=idle_after_s, alive=lambda pid: alive)


def said(events: list[MemoryEvent]) -> list[tuple[object, ...]]:
    return [
        (event.kind.value, event.engine or event.command, event.bytes, event.held_bytes, event.peak_bytes) for event in events
    ]


def test_a_process_takes_gives_back_and_ends_with_its_peak() -> None:
    found = holders()
    assert found.look(seen()) == []
    (event,) = found.look(seen(train(2 * GIB)))
    assert said([event]) == [("took", "python", 2 * GIB, 2 * GIB, 2 * GIB)]
    assert (event.device, event.pid, event.user) == (DEVICE.info.index, 7, "ann") and "s3cret" not in repr(event)
    assert found.look(seen(train(2 * GIB + MOST_STEP_BYTES - 1))) == [], "less than a step"
    assert said(found.look(seen(train(5 * GIB)))) == [("took", "python", 3 * GIB, 5 * GIB, 5 * GIB)]
    assert said(found.look(seen(train(GIB)))) == [("returned", "python", -4 * GIB, GIB, 5 * GIB)]
    assert [event.held_bytes for event in found.held()] == [GIB]
    assert said(found.look(seen())) == [("ended", "python", -GIB, None, 5 * GIB)]
    assert found.look(seen()) == [] and found.held() == []


def test_what_grows_slowly_is_an_event_at_each_step() -> None:
    found = holders()
    found.look(seen())
    events = [event for used in range(0, 3 * GIB, 10 * MIB) for event in found.look(seen(train(used)))]
    steps = [event.bytes or 0 for event in events]
    assert 10 <= len(steps) <= 12 and all(MOST_STEP_BYTES <= step < MOST_STEP_BYTES + 10 * MIB for step in steps)


def test_what_was_there_first_is_held_and_not_taken() -> None:
    found = holders()
    assert found.look(seen(train(3 * GIB), ProcessUse(8, MIB))) == []
    assert [(event.kind, event.pid, event.held_bytes) for event in found.held()] == [(EventKind.HOLDS, 7, 3 * GIB)]
    assert said(found.look(seen())) == [("ended", "python", -3 * GIB, None, 3 * GIB)], "the small one was never told"
    leased = holders().look(seen(leases=(lease(2),)))
    assert said(leased) == [("took", "chat", 2 * GIB, 2 * GIB, 2 * GIB)], "no lease is older than its monitor"


def test_a_process_that_left_the_device_and_runs_on_has_returned_its_memory() -> None:
    found = holders(alive=True)
    found.look(seen(train(3 * GIB)))
    assert said(found.look(seen())) == [("returned", "python", -3 * GIB, 0, 3 * GIB)]


def test_a_lease_of_a_known_process_is_no_news_and_its_end_is_told_by_the_broker_alone() -> None:
    found = holders()
    found.look(seen(train(4 * GIB)))
    assert found.look(seen(train(4 * GIB), leases=(lease(4),))) == []
    assert said(found.look(seen(train(6 * GIB), leases=(lease(6),)))) == [("took", "chat", 2 * GIB, 6 * GIB, 6 * GIB)]
    found.raise_peaks([lease(9)])
    ended = MemoryEvent(kind=EventKind.DIED, device_uuid=UUID, pid=7, engine="chat", user="ann")
    told = found.completed(ended)
    assert (told.peak_bytes, told.command, told.reason) == (9 * GIB, "python", None)
    assert found.look(seen(train(6 * GIB), leases=(lease(6, state="reaping"),))) == []
    assert found.look(seen()) == []
    assert found.completed(ended).peak_bytes == 9 * GIB, "an end that is told after the look"
    found.look(seen())
    assert found.completed(ended) == ended


def test_a_refusal_is_completed_with_what_is_known_of_its_process() -> None:
    found = holders()
    found.look(seen(train(4 * GIB, cgroup="/system.slice/ssh.service")))
    event = found.completed(MemoryEvent(kind=EventKind.REFUSED, device_uuid=UUID, pid=7, engine="chat", bytes=GIB))
    assert (event.command, event.cgroup, event.peak_bytes, event.bytes) == ("python", "/system.slice/ssh.service", None, GIB)
    unknown = MemoryEvent(kind=EventKind.REFUSED, device_uuid=UUID, pid=9)
    assert found.completed(unknown) == unknown


def test_leases_where_the_driver_names_no_process() -> None:
    """WSL2, and containers with an old driver."""
    found = holders()
    assert found.look(seen(unknown=True)) == []
    assert said(found.look(seen(unknown=True, leases=(lease(3),)))) == [("took", "chat", 3 * GIB, 3 * GIB, 3 * GIB)]
    assert found.look(seen(train(5 * GIB), leases=(lease(3),))) == [], "the first list is where processes begin"


def test_a_driver_that_does_not_answer_ends_no_process() -> None:
    found = holders()
    found.look(seen(train(3 * GIB)))
    assert found.look(seen(unknown=True)) == []
    assert found.look(seen(train(3 * GIB))) == []


def test_unknown_memory_is_told_once() -> None:
    found = holders()
    found.look(seen())
    (event,) = found.look(seen(train(None)))
    assert (event.kind, event.bytes, event.reason) == (EventKind.TOOK, None, "the driver does not say how much")
    assert found.look(seen(train(None))) == []
    assert [event.kind for event in found.look(seen())] == [EventKind.ENDED]


def test_idleness_is_told_once_and_again_after_use() -> None:
    found = holders(idle_after_s=60)
    found.look(seen(train(3 * GIB, idle_seconds=0.0), ProcessUse(8, MIB, idle_seconds=1e6)))
    for idle, count in ((59.0, 0), (60.0, 1), (61.0, 0), (0.0, 0), (70.0, 1)):
        events = found.look(seen(train(3 * GIB, idle_seconds=idle)))
        assert [event.kind for event in events] == [EventKind.IDLE] * count
        assert all(event.held_bytes == 3 * GIB for event in events)


def test_a_flood_of_processes_is_bounded_and_the_largest_are_told() -> None:
    found = holders()
    found.look(seen())
    events = found.look(seen(*(ProcessUse(pid, pid * GIB) for pid in range(1, 1001))))
    assert len(events) == MAX_EVENTS + 1 and (events[-1].kind, events[-1].times) == (EventKind.LOST, 1000 - MAX_EVENTS)
    assert [event.pid for event in events[:-1]] == list(range(1000, 1000 - MAX_EVENTS, -1))


def test_a_device_that_goes_is_forgotten() -> None:
    found = holders()
    found.look(seen(train(3 * GIB)))
    found.look(snapshot_of())
    assert found.held() == [] and found._holders == {} and found._known == set()
    assert found.look(seen(train(3 * GIB))) == []


@pytest.mark.parametrize(("total", "step"), [(None, MOST_STEP_BYTES), (80 * GIB, MOST_STEP_BYTES), (2 * GIB, 16 * MIB), (5, 1)])
def test_the_step_is_a_share_of_the_device(total: int | None, step: int) -> None:
    assert step_bytes(total) == step


def test_a_process_that_is_not_among_the_largest_of_the_host_any_more_may_hold_its_memory() -> None:
    host = host_device()

    def listed(*uses: ProcessUse) -> Snapshot:
        return snapshot_of(replace(host, detail=replace(host.detail, reading=replace(host.detail.reading, processes=uses))))

    others = [ProcessUse(pid, 9 * GIB) for pid in range(100, 100 + MAX_HOST_PROCESSES)]
    found = holders(alive=True)
    found.look(listed(train(3 * GIB)))
    assert found.look(listed(*others)) and 7 in {event.pid for event in found.held()}
    assert [event.kind for event in found.look(listed(train(GIB))) if event.pid == 7] == [EventKind.RETURNED]


def test_two_leases_of_one_name_in_a_process_are_one_holder() -> None:
    found = holders()
    found.look(seen(unknown=True))
    (event,) = found.look(seen(unknown=True, leases=(lease(3, state="reaping"), lease(2))))
    assert said([event]) == [("took", "chat", 5 * GIB, 5 * GIB, 5 * GIB)]


def test_a_process_whose_reservation_has_ended_goes_on_and_its_end_is_told() -> None:
    found = holders()
    found.look(seen())
    found.look(seen(train(5 * GIB)))
    found.look(seen(train(GIB)))
    released = MemoryEvent(kind=EventKind.RELEASED, device_uuid=UUID, pid=7, bytes=8 * GIB, reason="its time is over")
    told = found.completed(released)
    assert (told.user, told.bytes, told.peak_bytes) == ("ann", 8 * GIB, None)
    assert said(found.look(seen())) == [("ended", "python", -GIB, None, 5 * GIB)]
