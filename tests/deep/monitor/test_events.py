"""Events of a real daemon: engines and processes, kills, a full disk; a log of many files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broker_rig import Process, processes, test_device
from monitors import MonitorProcess, run, wait_until

from pagetide.allocator.errors import LeaseRefused
from pagetide.allocator.reservation import Reservation
from pagetide.common.recording import FrameRecording
from pagetide.monitor.event_log import EventLog, EventReader, files_of
from pagetide.monitor.events import EventKind, MemoryEvent
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")

MIB = 1 << 20
GRANULE = 2 * MIB
CAPACITY = 2048 * MIB


def told(directory: Path) -> list[MemoryEvent]:
    return list(EventReader(directory / "events").newest(10_000))


def kinds(directory: Path) -> list[tuple[str, str | None]]:
    return [(event.kind.value, event.engine) for event in told(directory)]


def be_refused(directory: Path, uuid: str, count: int) -> None:
    """Ask for reservations that no device has room for, each with another answer."""
    for number in range(count):
        with pytest.raises(LeaseRefused, match="cannot be reserved"):
            Reservation.granted(directory / "broker.sock", uuid, 10 * CAPACITY + number, name="greedy", wait_s=20).close()


def test_engines_and_processes_leave_their_story_also_when_the_monitor_is_killed(tmp_path: Path) -> None:
    """What took, was recalled, died, with its peak; the next monitor says that the last one was killed."""
    directory, uuid = tmp_path / "run", test_device(CAPACITY).uuid
    with MonitorProcess(directory, "--capacity", str(CAPACITY)) as monitor, processes() as start:
        path = directory / "broker.sock"
        engine = start("engine", path, "demo", 0, 900 * MIB, GRANULE, uuid).start()
        engine.tell(f"ask {800 * MIB}")
        wait_until(lambda: ("took", "demo") in kinds(directory))
        wait_until(lambda: engine.tell("held")["held"] >= 700 * MIB)
        wait_until(lambda: max(event.held_bytes or 0 for event in told(directory)) > 700 * MIB)
        recalled = run("recall", "demo", "300MiB", "--runtime-dir", directory)
        assert recalled.returncode == 0, recalled.stderr
        be_refused(directory, uuid, 1)
        wait_until(lambda: ("returned", "demo") in kinds(directory) and ("refused", None) in kinds(directory))
        engine.kill()
        wait_until(lambda: ("died", "demo") in kinds(directory))
        before = told(directory)
        monitor.kill()
        assert told(directory)[: len(before)] == before, "what was written survives"
    assert kinds(directory)[0] == ("started", None) and ("recalled", "demo") in kinds(directory)
    died = next(event for event in before if event.kind is EventKind.DIED)
    assert died.pid == engine.pid and (died.peak_bytes or 0) > 700 * MIB and died.command is not None
    with MonitorProcess(directory, "--capacity", str(CAPACITY)) as monitor:
        wait_until(lambda: kinds(directory).count(("started", None)) == 2)
        assert monitor.end() == 0
    assert "was killed" in (next(event for event in told(directory)[::-1] if event.kind is EventKind.STARTED).reason or "")
    assert kinds(directory)[-1] == ("stopped", None)
    shown = run("events", "--summary", "--json", "--runtime-dir", directory)
    (summary,) = [one for one in json.loads(shown.stdout) if one["engine"] == "demo"]
    assert summary["peak_bytes"] > 700 * MIB and summary["ended"] == "died" and summary["recalled"] >= 1
    ids = [event.id for event in told(directory)]
    assert ids == sorted(set(ids))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    """The log lies on a tmpfs of 1 MiB, in namespaces of the monitor's own, that is full until a file is removed."""
    disk, directory = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    within = f'mount -t tmpfs -o size=1m none {disk} && head -c 2m /dev/zero > {disk}/ballast; exec "$@"'
    probe = subprocess.run(["unshare", "-Urm", "sh", "-c", within, "sh", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.decode()}")
    monitor = MonitorProcess(directory, "--events-dir", str(disk / "events"))
    monitor.command[:0] = ["unshare", "-Urm", "sh", "-c", within.replace("2m /dev/zero", "1000000 /dev/zero"), "sh"]
    uuid = test_device(CAPACITY).uuid
    monitor.command += ["--capacity", str(CAPACITY)]

    with monitor:
        seen_disk = Path(f"/proc/{monitor.pid}/root{disk}")
        filler = seen_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        wait_until(
            lambda: be_refused(directory, uuid, 20) or "events cannot be written: No space left on device" in monitor.said()
        )
        with RecordReader.open(directory / "record") as reader:
            polls = reader.snapshot().devices[0].memory.polls
            wait_until(lambda: reader.snapshot().devices[0].memory.polls > polls + 50)
            assert reader.is_live() and not reader.snapshot().devices[0].memory.is_stale()
        assert monitor.said().count("cannot be written") == 1
        descriptors = len(os.listdir(f"/proc/{monitor.pid}/fd"))
        filler.unlink()
        (seen_disk / "ballast").unlink()
        wait_until(
            lambda: (
                be_refused(directory, uuid, 1)
                or EventKind.LOST in {event.kind for event in EventReader(seen_disk / "events").newest(100)}
            )
        )
        lost = next(event for event in EventReader(seen_disk / "events").newest(100) if event.kind is EventKind.LOST)
        assert lost.times > 0 and lost.reason == "they could not be written"
        assert len(os.listdir(f"/proc/{monitor.pid}/fd")) <= descriptors + 2
        assert monitor.end() == 0


def test_a_flood_of_refusals_is_kept_within_its_bound(tmp_path: Path) -> None:
    """From one user: some of them whole, all of them counted; the broker answers each."""
    directory, uuid = tmp_path / "run", test_device(CAPACITY).uuid
    with MonitorProcess(directory, "--capacity", str(CAPACITY)) as monitor:
        began = time.monotonic()
        be_refused(directory, uuid, 600)
        seconds = time.monotonic() - began
        wait_until(lambda: sum(event.times for event in told(directory) if event.kind is EventKind.REFUSED) == 600)
        assert len(told(directory)) <= 12 + 9 * (seconds + 3)
        monitor.end(signal.SIGTERM)


def test_a_hundred_thousand_events_stay_within_the_bound_and_a_window_reads_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a window reads is counted; seconds are measured by `python -m benchmarks.monitor`."""
    random_, now_s, most_bytes = random.Random(1), [1.8e9], 6 << 20
    log = EventLog(tmp_path, most_bytes, clock=lambda: now_s[0], monotonic=lambda: now_s[0])
    held = [MemoryEvent(kind=EventKind.HOLDS, pid=pid, held_bytes=random_.getrandbits(36)) for pid in range(64)]
    for _ in range(1000):
        now_s[0] += 1
        events = [
            replace(random_.choice(held), kind=EventKind.TOOK, time=now_s[0], bytes=random_.getrandbits(36),
                    held_bytes=random_.getrandbits(36), reason=random_.randbytes(12).hex())
            for _ in range(100)
        ]  # fmt: skip
        log.write(events, lambda: held)
    log.close()
    assert sum(path.stat().st_size for path in files_of(tmp_path).values()) <= most_bytes and len(files_of(tmp_path)) > 3
    opened: list[Any] = []
    segments: list[int] = []
    segment, begin = FrameRecording.segment, FrameRecording.__init__
    monkeypatch.setattr(FrameRecording, "segment", lambda self, number: segments.append(number) or segment(self, number))
    monkeypatch.setattr(FrameRecording, "__init__", lambda self, *of: opened.append(of) or begin(self, *of))
    for back_s in (5, 300, 600):
        opened.clear(), segments.clear()
        found = list(EventReader(tmp_path).events(now_s[0] - back_s, now_s[0] - back_s + 2))
        assert len([event for event in found if event.time >= now_s[0] - back_s]) == 300
        assert len(opened) <= 3 and len(segments) <= 8


def test_a_process_that_is_started_and_killed_again_and_again_leaks_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with MonitorProcess(directory, "--detail-interval", "0.05", "--capacity", str(CAPACITY)) as monitor:
        uuid = test_device(CAPACITY).uuid
        wait_until(lambda: kinds(directory))  # the log is open
        descriptors = len(os.listdir(f"/proc/{monitor.pid}/fd"))
        for _ in range(6):
            with processes() as start:
                engine: Process = start("engine", directory / "broker.sock", "demo", 0, 200 * MIB, GRANULE, uuid).start()
                engine.tell(f"ask {100 * MIB}")
                engine.kill()
        wait_until(lambda: kinds(directory).count(("died", "demo")) == 6)
        wait_until(lambda: len(os.listdir(f"/proc/{monitor.pid}/fd")) <= descriptors + 1)  # it reads files now and then
        assert monitor.end() == 0
