"""The pane of events, the columns of owners and idle time, and what a printed view says that it does not show."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from rich.cells import cell_len
from snapshots import AT_NS, host_device, leased_snapshot, sample_snapshot, snapshot_of

from pagetide.common.units import GIB
from pagetide.monitor.events import EventKind, MemoryEvent
from pagetide.monitor.snapshot import Origin, ProcessUse, Snapshot
from pagetide.monitor.view.listing import Listing
from pagetide.monitor.view.page import render, render_live
from pagetide.monitor.view.state import ViewState
from pagetide.monitor.view.symbols import UNICODE

AT = datetime(2026, 11, 27, 14, 3, 27)


def events(count: int) -> tuple[MemoryEvent, ...]:
    return tuple(
        MemoryEvent(
            kind=EventKind.TOOK, time=AT.timestamp() - count + number, device="0", pid=number, command="evil\x1b[2J\nname",
            bytes=GIB, held_bytes=2 * GIB, user="ann", reason="x" * 300,
        )
        for number in range(count)
    )  # fmt: skip


def live(snapshot: Snapshot, view: ViewState, width: int = 120, height: int = 50) -> list[str]:
    page = render_live(snapshot, view, width=width, height=height, symbols=UNICODE, clock=AT)
    return ["".join(segment.text for segment in line) for line in page.lines.lines]


def once(snapshot: Snapshot, width: int = 80, listing: Listing | None = None) -> list[str]:
    rendered = render(snapshot, width=width, listing=listing)
    return ["".join(segment.text for segment in line) for line in rendered.lines]


def test_a_key_shows_the_newest_events_and_hides_them_again() -> None:
    snapshot = replace(leased_snapshot(2), events=events(30), unix_seconds=AT.timestamp())
    view = ViewState()
    assert not any("took" in line for line in live(snapshot, view))
    view.press("e", snapshot)
    lines = live(snapshot, view)
    shown = [line for line in lines if "took" in line]
    assert 3 <= len(shown) <= 12 and all("\x1b" not in line and "\n" not in line for line in shown)
    assert shown[-1].split()[:2] == ["14:03:26", "0"] and " 29 " in shown[-1] and any("events" in line for line in lines)
    view.press("e", snapshot)
    assert not any("took" in line for line in live(snapshot, view))


@pytest.mark.parametrize("height", [4, 8, 12, 24, 60])
@pytest.mark.parametrize("width", [20, 60, 200])
@pytest.mark.parametrize("count", [0, 1, 16])
def test_the_pane_fits_every_window(width: int, height: int, count: int) -> None:
    view = ViewState(events_open=True)
    lines = live(replace(leased_snapshot(4), events=events(count), unix_seconds=AT.timestamp()), view, width, height)
    assert len(lines) == height and all(cell_len(line) <= width for line in lines)
    if count == 0 and height == 60 and width > 20:
        assert any("no events are kept, or none yet" in line for line in lines)


def test_owners_and_idle_time_are_columns_where_they_are_known_and_the_filter_finds_owners() -> None:
    cgroup = f"/system.slice/docker-{'4f' * 32}.scope"
    uses = (
        ProcessUse(1, 3 * GIB, user="ann", command="python", cgroup=cgroup, idle_seconds=720.0),
        ProcessUse(2, 2 * GIB, user="bob", command="ollama", cgroup="/system.slice/ollama.service", idle_seconds=59.0),
    )
    host = host_device()
    device = replace(host, detail=replace(host.detail, reading=replace(host.detail.reading, processes=uses)))
    lines = once(snapshot_of(device), 120)
    (header,) = [line for line in lines if "PID" in line]
    assert "IDLE" in header and "OWNER" in header
    first, second = [line for line in lines if "GiB" in line and ("ann" in line or "bob" in line)]
    assert "12 min" in first and "4f" * 6 in first and "ollama.service" in second and " s " not in second
    assert not any("OWNER" in line for line in once(sample_snapshot(1), 120)), "none is known"
    found = once(snapshot_of(device), 120, Listing(text="OLLAMA.serv"))
    assert any("bob" in line for line in found) and not any("ann" in line for line in found)


def test_a_printed_view_without_a_gpu_or_a_monitor_says_so_and_what_to_do() -> None:
    bare = replace(
        snapshot_of(host_device()), at_ns=AT_NS, origin=Origin.WAITING, unavailable={"nvml": "the driver was not found"}
    )
    text = " ".join(line.strip() for line in once(bare))
    assert "No NVIDIA GPU is seen: the driver was not found. In a container, start it with the GPUs" in text
    assert (
        "What is shown is the memory of this machine." in text
        and "No monitor runs, so there are no leases and no events." in text
    )
    assert all(cell_len(line) <= 40 for line in once(bare, 40))
    asked = " ".join(once(replace(bare, origin=Origin.MONITOR, unavailable={})))
    assert "No NVIDIA GPU is seen: its driver is missing, or it is hidden" in asked and "No monitor runs" not in asked
    for fine in (sample_snapshot(1), replace(bare, origin=Origin.DIRECT, source="host")):
        assert not any("No NVIDIA" in line or "No monitor" in line for line in once(fine))
    assert not any("No NVIDIA" in line for line in live(bare, ViewState())), "the live view has no room for it"
