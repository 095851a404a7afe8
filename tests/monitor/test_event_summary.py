"""Summaries of events: what processes and engines held at the start, at most and at the end of a time."""

from __future__ import annotations

import pytest

from pagetide.monitor.events import EventKind, MemoryEvent
from pagetide.monitor.holders import HolderSummary, summarize

HEX = "ab" * 32


def event(kind: str, time: float, pid: int = 7, engine: str | None = None, **more: int | None) -> MemoryEvent:
    names = {"device": "0", "device_uuid": "GPU-a", "command": "python", "cgroup": f"/docker/{HEX}"}
    return MemoryEvent(kind=EventKind(kind), time=time, pid=pid, engine=engine, **names, **more)  # type: ignore[arg-type]


def took(time: float, held: int, peak: int | None = None, change: int | None = None, pid: int = 7) -> MemoryEvent:
    return event(
        "took" if (change or held) > 0 else "returned",
        time,
        pid,
        bytes=change or held,
        held_bytes=held,
        peak_bytes=peak or held,
    )


def amounts(one: HolderSummary) -> tuple[int, ...]:
    return one.began_bytes, one.peak_bytes, one.held_bytes, one.taken_bytes, one.returned_bytes


def test_a_holder_before_within_and_after_its_peak() -> None:
    events = [
        event("holds", 0, held_bytes=5, peak_bytes=99),
        took(50, 8, change=3),
        took(100, 20, change=12),
        took(110, 4, 25, change=-16),
        took(120, 6, change=2),
    ]
    (one,) = summarize(events, 90)
    assert amounts(one) == (8, 25, 6, 14, 16)
    (one,) = summarize(events, 1000)
    assert amounts(one) == (6, 6, 6, 0, 0), "what it holds without an event in that time"
    (one,) = summarize(events[:1], -10)
    assert amounts(one) == (5, 5, 5, 0, 0), "the log begins within it"


def test_ends_refusals_and_recalls() -> None:
    events = [
        took(10, 30, pid=1),
        event("refused", 11, 2, "chat", bytes=50, times=3),
        event("recalled", 12, 3, "demo", bytes=5),
        event("overdue", 13, 3, "demo", bytes=5),
        event("ended", 14, 1, bytes=-30, peak_bytes=40),
        event("died", 15, 3, "demo", held_bytes=9),
    ]
    first, second, third = summarize(events, 0)
    assert (first.last.pid, first.ended, amounts(first)) == (1, "ended", (0, 30, 0, 30, 0))
    assert {(one.last.engine, *one.counts.values(), one.ended) for one in (second, third)} == {
        ("chat", 3, 0, 0, None), ("demo", 0, 1, 1, "died"),
    }  # fmt: skip
    told = first.to_dict()
    assert (told["container"], told["pid"], told["peak_bytes"], told["ended"]) == (HEX[:12], 1, 30, "ended")
    assert summarize(events, 14.5)[0].last.pid == 3, "the other one was gone"


def test_the_end_of_a_reservation_is_not_that_of_its_process() -> None:
    events = [took(10, 30), event("reserved", 11, bytes=50), event("released", 12, bytes=50), event("released", 13, 8, bytes=1)]
    (one,) = summarize(events, 0)
    assert (one.ended, amounts(one)) == (None, (0, 30, 30, 30, 0)), "pid 8 has held nothing"


@pytest.mark.parametrize("gone", [True, False])
def test_what_went_while_no_monitor_ran_is_not_held(gone: bool) -> None:
    events = [
        took(10, 30, pid=1),
        took(11, 20, pid=2),
        *([] if gone else [event("holds", 100, 1, held_bytes=30)]),
        event("holds", 100, 2, held_bytes=20),
        MemoryEvent(kind=EventKind.STARTED, time=100.5),
        took(101, 21, change=1, pid=2),
    ]
    held = {one.last.pid: one.held_bytes for one in summarize(events, 0)}
    assert held == {1: 0 if gone else 30, 2: 21}


def test_nothing_gives_nothing() -> None:
    assert summarize([], 0) == []
    assert summarize([MemoryEvent(kind=EventKind.STARTED), MemoryEvent(kind=EventKind.LOST, times=4)], 0) == []
