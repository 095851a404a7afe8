"""`vram-monitor events` and `owners`: times, tables, JSON, following; over logs that the test writes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from monitors import command, run_here

from pagetide.common.units import GIB
from pagetide.event_commands import span_of, time_of
from pagetide.monitor.config import LEAST_EVENTS_BYTES
from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.event_log import EventLog
from pagetide.monitor.events import EventKind, MemoryEvent

CGROUP = f"/system.slice/docker-{'4f' * 32}.scope"
NOW = datetime(2026, 11, 27, 10, 0, 0).timestamp()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "events"


def event(kind: str, seconds_ago: float, num_bytes: int, held: int, **names: object) -> MemoryEvent:
    known = {"device": "0", "device_uuid": "GPU-a", "pid": 7, "user": "ann", "command": "python", "cgroup": CGROUP} | names
    return MemoryEvent(
        kind=EventKind(kind), time=time.time() - seconds_ago, bytes=num_bytes, held_bytes=held, peak_bytes=held, **known
    )  # type: ignore[arg-type]


def written(directory: Path, *events: MemoryEvent) -> EventLog:
    clock = [0.0]
    log = EventLog(directory, LEAST_EVENTS_BYTES, clock=lambda: clock[0], monotonic=lambda: clock[0])
    for one in events:
        clock[0] = one.time
        log.write([one], list)
    return log


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("09:00", -3600), ("9:00", -3600), ("09:00:30", -3570), ("10:00", 0), ("10:01", -86340), ("23:59", -36060),
        ("2026-11-27 03:12", -6.8 * 3600), ("2026-11-27T09:00", -3600), ("2026-11-27", -36000), ("90s", -90), ("15min", -900),
        ("15m", -900), ("1.5h", -5400), ("2 d", -172800),
    ],
)  # fmt: skip
def test_times_are_of_day_of_a_date_or_ago(text: str, seconds: float) -> None:
    assert time_of("--since", text, NOW) == pytest.approx(NOW + seconds)


def test_an_hour_that_the_clock_has_twice_and_one_that_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        back_s = datetime(2026, 10, 25, 3).timestamp() - 3600  # 02:00 for the second time
        for text, ago_s in (("02:10", 600), ("02:30", 3000), ("01:30", 6600), ("03:00", 84000 + 3600)):
            assert time_of("--since", text, back_s + 1200) == back_s + 1200 - ago_s
        forward_s = datetime(2026, 3, 29, 3).timestamp()
        assert forward_s - 3600 <= time_of("--since", "02:30", forward_s + 300) <= forward_s
    finally:
        monkeypatch.undo()
        time.tzset()


def test_of_two_times_of_day_the_second_may_be_to_come() -> None:
    assert span_of("09:00", "11:00", NOW) == (NOW - 3600, math.inf)
    assert span_of("23:00", "01:00", NOW) == (NOW - 11 * 3600, NOW - 9 * 3600)
    for since, until in (("30min", "09:00"), ("09:00", "2h")):
        with pytest.raises(ConfigInvalid, match="is before --since"):
            span_of(since, until, NOW)


@pytest.mark.parametrize("text", ["", "25:00", "03:60", "yesterday", "-1h", "2026-13-01", "1y", "03"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"--since: cannot read .* as a time; write 03:12") as refused:
        time_of("--since", text, NOW)
    assert len(str(refused.value)) < 300


def test_events_of_a_time_as_table_and_json(directory: Path) -> None:
    written(
        directory,
        event("took", 7300, 5 * GIB, 5 * GIB, pid=6),
        event("took", 600, 3 * GIB, 8 * GIB, engine="chat"),
        event("refused", 300, GIB, 0, pid=9, engine="judge", reason="Lower the min to 2.00 GiB or less"),
    ).close()
    shown = run_here("events")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["TIME", "DEV", "EVENT", "BYTES", "HELD", "PEAK", "PID", "NAME", "USER", "OWNER"]
    words = lines[1].split()  # soon after midnight its time has a date
    assert words[words.index("took") :] == ["took", "+3.0", "GiB", "8.0", "GiB", "8.0", "GiB", "7", "chat", "ann", "4f" * 6]
    assert "refused" in lines[2] and lines[2].endswith("Lower the min to 2.00 GiB or less") and len(lines) == 3
    told = [json.loads(line) for line in run_here("events", "--json", "--since", "3h").stdout.splitlines()]
    assert [(one["kind"], one["pid"], one["id"]) for one in told] == [("took", 6, 1), ("took", 7, 2), ("refused", 9, 3)]
    assert told[1]["container"] == "4f" * 6 and told[1]["bytes"] == 3 * GIB and "reason" not in told[1]
    assert [
        json.loads(line)["pid"] for line in run_here("events", "--json", "--since", "3h", "--until", "1h").stdout.splitlines()
    ] == [6]
    assert run_here("events", "--since", "60s").stdout == "no events in that time\n"


def test_what_took_my_memory_is_one_command(directory: Path) -> None:
    written(
        directory,
        event("took", 900, 5 * GIB, 5 * GIB, pid=6),
        event("took", 500, 30 * GIB, 30 * GIB),
        event("returned", 400, -29 * GIB, GIB),
        event("ended", 300, -GIB, 0),
    ).close()
    shown = run_here("events", "--summary", "--since", "10min", "--until", "5s")
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["DEV", "PID", "NAME", "USER", "OWNER", "AT", "START", "PEAK", "AT", "END", "TOOK", "RETURNED"],
        ["0", "7", "python", "ann", "4f" * 6, "0", "MiB", "30.0", "GiB", "0", "MiB", "30.0", "GiB", "29.0", "GiB", "ended"],
        ["0", "6", "python", "ann", "4f" * 6, "5.0", "GiB", "5.0", "GiB", "5.0", "GiB", "0", "MiB", "0", "MiB"],
    ]
    told = json.loads(run_here("events", "--summary", "--since", "10min", "--json").stdout)
    assert [(one["pid"], one["peak_bytes"], one["began_bytes"]) for one in told] == [(7, 30 * GIB, 0), (6, 5 * GIB, 5 * GIB)]
    assert "nothing was held" in run_here("events", "--summary", "--since", "2d", "--until", "1d").stdout


def test_what_cannot_be_answered_is_said_with_status_2(directory: Path, tmp_path: Path) -> None:
    shown = run_here("events")
    assert shown.returncode == 2 and f"no events that you may read are kept in {directory}: they are kept while" in shown.stderr
    written(directory, event("took", 1, 1, 1)).close()
    for arguments, said in (
        (["--since", "5min", "--until", "10min"], "--until 10min is before --since 5min"),
        (["--follow", "--summary"], "--follow goes with neither"),
        (["--since", "noon"], "cannot read 'noon' as a time"),
    ):
        shown = run_here("events", *arguments)
        assert shown.returncode == 2 and said in shown.stderr and shown.stderr.count("\n") == 1
    elsewhere = tmp_path / "elsewhere"
    assert "no events that you may read are kept in" in run_here("events", "--events-dir", elsewhere).stderr
    written(elsewhere, event("took", 5, 1, 1, pid=77)).close()
    assert json.loads(run_here("events", "--json", "--events-dir", elsewhere).stdout)["pid"] == 77


def test_following_goes_on_with_what_comes(directory: Path) -> None:
    log = written(directory, event("took", 5, GIB, GIB, pid=1))
    follower = subprocess.Popen(command("events", "--follow", "--json"), stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["pid"] == 1
        for pid in (2, 3):
            log.write([event("took", 0, GIB, GIB, pid=pid)], list)
            assert json.loads(follower.stdout.readline())["pid"] == pid
    finally:
        follower.kill()
        follower.wait()
        log.close()


def test_owners_are_summed_for_each_device() -> None:
    told = json.loads(run_here("owners", "--json", "--source", "host").stdout)
    users = {one["name"]: one for one in told if one["kind"] == "user"}
    import pwd

    mine = users[pwd.getpwuid(os.getuid()).pw_name]
    assert mine["used_bytes"] > 0 and mine["num_processes"] > 0 and mine["device"] == "host" and mine["charged_bytes"] is None
    shown = run_here("owners", "--source", "host", "--idle", "30")
    assert shown.returncode == 0 and "IDLE 30 s" in shown.stdout.splitlines()[0]
    from pagetide.monitor.snapshot import MAX_HOST_PROCESSES

    is_cut = sum(one["num_processes"] for one in users.values()) >= MAX_HOST_PROCESSES
    assert {one["largest_only"] for one in told} == {is_cut}
    refused = run_here("owners", "--idle", "soon")
    assert refused.returncode == 2 and "--idle: cannot read 'soon' as a time" in refused.stderr
    nothing = run_here("owners", "--source", "host", "--capacity", "1GiB")
    assert (nothing.returncode, nothing.stdout) == (0, "no process is known to hold memory of these devices\n")
