"""The log of events against a list of them: any times, a clock that jumps, ends and kills of its writer, its bound."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagetide.monitor.config import LEAST_EVENTS_BYTES
from pagetide.monitor.event_log import EventLog, EventLogBusy, EventReader, files_of
from pagetide.monitor.events import MAX_TEXT_CHARS, EventKind, MemoryEvent, from_dict, from_line, to_dict

HOLDERS = [
    MemoryEvent(
        kind=EventKind.HOLDS, device="0", device_uuid="GPU-a", pid=pid, user="ann", command="python", held_bytes=pid << 20
    )
    for pid in (100, 200, 300)
]
NOTHING: list[MemoryEvent] = []


@dataclass
class Clocks:
    """The system's clock and the monotonic one."""

    wall_s: float = 1.8e9
    monotonic_s: float = 50.0

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def log(self, directory: Path, most_bytes: int = LEAST_EVENTS_BYTES) -> EventLog:
        return EventLog(directory, most_bytes, clock=lambda: self.wall_s, monotonic=lambda: self.monotonic_s)


@dataclass
class Kept:
    """What a naive log would hold: all events, in a list."""

    events: list[MemoryEvent] = field(default_factory=list)

    def between(self, since_s: float, until_s: float) -> list[tuple[int | None, str | None]]:
        return [(event.pid, event.reason) for event in self.events if since_s <= event.time <= until_s]


def took(clocks: Clocks, number: int) -> MemoryEvent:
    return MemoryEvent(kind=EventKind.TOOK, time=clocks.wall_s, pid=number, bytes=1 << 30, reason=f"event {number}")


def listed(directory: Path, since_s: float = -math.inf, until_s: float = math.inf) -> list[MemoryEvent]:
    events = EventReader(directory).events(since_s, until_s)
    return [event for event in events if event.kind is not EventKind.HOLDS and event.time >= since_s]


def told(events: Sequence[MemoryEvent]) -> list[tuple[int | None, str | None]]:
    return [(event.pid, event.reason) for event in events if event.kind is EventKind.TOOK]


@pytest.mark.parametrize("seed", range(4))
def test_any_window_has_the_events_of_a_list_whatever_clock_and_writer_do(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    clocks, kept = Clocks(), Kept()
    log = clocks.log(tmp_path)
    for step in range(120):
        clocks.pass_s(random_.choice([0.2, 1.0, 30.0, 4000.0]))
        if random_.random() < 0.1:
            clocks.wall_s += random_.choice([-7200.0, -30.0, 500.0, 1e8, -1e8])
        if random_.random() < 0.1:  # another run; a killed one completes nothing
            log.close() if random_.random() < 0.5 else log._lock.close()
            log = clocks.log(tmp_path)
        event = took(clocks, step)
        log.write([event], lambda: HOLDERS)
        kept.events.append(event)
    everything = told(listed(tmp_path))
    assert everything == [(event.pid, event.reason) for event in kept.events]
    ids = [event.id for event in listed(tmp_path)]
    assert ids == sorted(set(ids)) and ids[0] == 1
    for _ in range(60):
        at_s = random_.choice(kept.events).time
        since_s, until_s = at_s - random_.choice([0.0, 10.0, 5000.0]), at_s + random_.choice([0.0, 10.0, 5000.0])
        assert set(told(listed(tmp_path, since_s - 0.001, until_s + 0.001))) == set(kept.between(since_s, until_s))
    log.close()


def test_a_jump_of_the_clock_is_an_event_and_time_goes_on(tmp_path: Path) -> None:
    clocks = Clocks()
    log = clocks.log(tmp_path)
    for number, jump in enumerate([0.0, -3600.0, 7200.0]):
        clocks.pass_s(1)
        clocks.wall_s += jump
        log.write([took(clocks, number)], lambda: NOTHING)
    jumps = [event.reason for event in listed(tmp_path) if event.kind is EventKind.CLOCK]
    assert jumps == [
        f"the clock went {way} by {amount} s: it was set, or the machine slept"
        for way, amount in (("back", "3,600"), ("forward", "7,200"))
    ]
    assert told(listed(tmp_path)) == [(number, f"event {number}") for number in range(3)]


def test_what_was_held_before_a_window_is_there(tmp_path: Path) -> None:
    clocks = Clocks()
    log = clocks.log(tmp_path)
    log.write([took(clocks, 1)], lambda: HOLDERS)
    clocks.pass_s(10 * 3600)
    before = list(EventReader(tmp_path).events(clocks.wall_s, clocks.wall_s + 60))
    assert [event.pid for event in before] == [100, 200, 300, 1], "the last segment before it, however old"
    assert before[0].held_bytes == 100 << 20 and all(event.time < clocks.wall_s for event in before)


def test_the_size_stays_within_the_bound_and_the_newest_are_kept(tmp_path: Path) -> None:
    random_, clocks = random.Random(1), Clocks()
    most_bytes = 1 << 18
    log = clocks.log(tmp_path, most_bytes)
    sizes = []
    for step in range(120):
        clocks.pass_s(1)
        noise = [random_.randbytes(64).hex() for _ in range(64)]  # does not compress well
        events = [MemoryEvent(kind=EventKind.REFUSED, time=clocks.wall_s, pid=step, reason=text) for text in noise]
        log.write(events, lambda: HOLDERS)
        sizes.append(sum(path.stat().st_size for path in files_of(tmp_path).values()))
    assert max(sizes) <= most_bytes and sizes[-1] > most_bytes // 2
    pids = [event.pid or 0 for event in listed(tmp_path)]
    assert pids[-1] == 119 and 0 not in pids and pids == sorted(pids)
    first = min(event.time for event in listed(tmp_path))
    assert [event.pid for event in listed(tmp_path, clocks.wall_s - 0.5)] == [119] * 64
    assert listed(tmp_path, 0, first - 1) == []
    log.close()
    smaller = clocks.log(tmp_path, most_bytes // 2)
    assert smaller.last is not None and smaller.last.pid == 119
    smaller.write([took(clocks, 120)], lambda: HOLDERS)
    assert sum(path.stat().st_size for path in files_of(tmp_path).values()) <= most_bytes // 2
    smaller.close()


def test_a_cut_or_damaged_file_loses_its_end_alone(tmp_path: Path) -> None:
    clocks = Clocks()
    log = clocks.log(tmp_path)
    for number in range(50):
        clocks.pass_s(1)
        log.write([took(clocks, number)], lambda: HOLDERS)
    log._lock.close()  # killed
    (path,) = files_of(tmp_path).values()
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 40, 1, 0):
        path.write_bytes(whole[:cut])
        found = told(listed(tmp_path))
        assert found == [(number, f"event {number}") for number in range(len(found))]
        again = clocks.log(tmp_path)  # goes on behind it
        again.write([took(clocks, 999)], lambda: NOTHING)
        assert told(listed(tmp_path)) == [*found, (999, "event 999")]
        again.close()
        for file in files_of(tmp_path).values():
            file.unlink()
    path.write_bytes(b"no gzip at all" * 100)
    again = clocks.log(tmp_path)
    again.write([took(clocks, 5)], lambda: NOTHING)
    assert told(listed(tmp_path)) == [(5, "event 5")], "in a file of its own"
    again.close()
    newest = list(files_of(tmp_path).values())[-1]
    newest.unlink()
    os.mkfifo(newest)  # which would hold up what opens it
    again = clocks.log(tmp_path)
    again.write([took(clocks, 6)], lambda: NOTHING)
    assert told(listed(tmp_path)) == [(6, "event 6")]
    again.close()


def test_a_write_that_fails_is_taken_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full in the middle of a write; tests/deep has a real one."""
    clocks = Clocks()
    log = clocks.log(tmp_path)
    log.write([took(clocks, 1)], lambda: HOLDERS)
    real = os.write

    def short(file: int, data: bytes) -> int:
        real(file, bytes(data)[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pagetide.common.recording.os.write", short)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            log.write([took(clocks, 2)], lambda: HOLDERS)
    monkeypatch.undo()
    log.write([took(clocks, 3)], lambda: HOLDERS)
    assert told(listed(tmp_path)) == [(1, "event 1"), (3, "event 3")]
    assert log._fd is not None and len(files_of(tmp_path)) == 1
    log.close()


def test_one_process_writes_and_readers_follow_by_ids(tmp_path: Path) -> None:
    clocks = Clocks()
    log = clocks.log(tmp_path)
    with pytest.raises(EventLogBusy, match="set events_dir"):
        clocks.log(tmp_path)
    reader, seen = EventReader(tmp_path), 0
    assert reader.newest(5) == () and reader.since_id(0) == []
    followed: list[MemoryEvent] = []
    for number in range(2500):
        clocks.pass_s(0.5)
        log.write([took(clocks, number)], lambda: HOLDERS)
        if number % 500 == 7:
            followed += reader.since_id(seen)
            seen = followed[-1].id
    followed += reader.since_id(seen)
    assert told(followed) == [(number, f"event {number}") for number in range(2500)]
    assert told(reader.newest(1200)) == [(number, f"event {number}") for number in range(1300, 2500)]
    log.close()
    shutil.rmtree(tmp_path)
    assert reader.newest(3) == () and list(reader.events(0, math.inf)) == []


def test_an_event_is_the_same_after_json_and_damage_is_left_out() -> None:
    event = MemoryEvent(
        kind=EventKind.DIED, time=1.5, id=7, device="0", device_uuid="GPU-a", pid=1, engine="demo \udcff", user="ann",
        command="python", cgroup="/a", bytes=-5, held_bytes=0, peak_bytes=9, reason="x", times=3,
    )  # fmt: skip
    assert from_dict(to_dict(event)) == event
    assert to_dict(MemoryEvent(kind=EventKind.TOOK)) == {"kind": "took"}
    long = MemoryEvent(kind=EventKind.TOOK, time=1, reason="r" * 10_000)
    assert to_dict(long)["reason"] == "r" * (MAX_TEXT_CHARS - 1) + "…"
    for damaged in (None, [], {}, {"kind": "took"}, {"kind": "?", "time": 1}, {"kind": "took", "time": "nan"},
                    {"kind": "took", "time": 1, "pid": "x"}, {"kind": "took", "time": 1, "pid": math.inf}):  # fmt: skip
        assert from_dict(damaged) is None
    for line in (b"", b"[]", b"{}", b'{"events":3}', b"\xff", b"[" * 100_000):
        assert from_line(line) == ()
    assert [event.pid for event in from_line(b'{"events":[{"kind":"took","time":1,"pid":4},{"kind":8}]}')] == [4]
