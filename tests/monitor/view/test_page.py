"""The whole page: exact pictures of samples, what is said of devices in trouble, and that it fits any terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from snapshot_strategies import SNAPSHOT
from snapshots import (
    AT_NS,
    SECOND_NS,
    dead,
    host_device,
    leased_snapshot,
    mig_devices,
    sample_device,
    sample_snapshot,
    snapshot_of,
    stale,
    unanswered,
)

from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceInfo,
    DeviceKind,
    Origin,
    ProcessUse,
    Snapshot,
)
from pagetide.monitor.units import GIB, MIB
from pagetide.monitor.view.headings import heading
from pagetide.monitor.view.listing import Listing, Order
from pagetide.monitor.view.page import render, render_live
from pagetide.monitor.view.state import ViewState
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols

CLOCK = datetime(2026, 11, 20, 14, 3, 27)
PAGES = Path(__file__).with_name("pages")


def page(snapshot: Snapshot, width: int, height: int | None = None, symbols: Symbols = UNICODE) -> list[str]:
    """The lines as text."""
    if height is None:
        lines = render(snapshot, width=width, symbols=symbols, clock=CLOCK).lines
    else:
        lines = render_live(snapshot, ViewState(), width=width, height=height, symbols=symbols, clock=CLOCK).lines.lines
    return ["".join(segment.text for segment in line) for line in lines]


def troubled() -> Snapshot:
    """A machine on which all that can happen to a device has happened."""
    return snapshot_of(
        sample_device(0),
        *mig_devices(1),
        dead(sample_device(2)),
        stale(sample_device(3)),
        unanswered(sample_device(4)),
        host_device(),
    )


def line_with(lines: list[str], *texts: str) -> str:
    """The only line in which all of `texts` stand."""
    (line,) = [line for line in lines if all(text in line for text in texts)]
    return line


# ---- exactly ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "snapshot", "width", "height", "symbols"),
    [
        ("2-gpus-80x24", sample_snapshot(2), 80, 24, UNICODE),
        ("8-gpus-80x24", sample_snapshot(8), 80, 24, UNICODE),
        ("8-gpus-200x50", sample_snapshot(8), 200, 50, UNICODE),
        ("trouble-80x24", troubled(), 80, 24, UNICODE),
        ("trouble-100x40", troubled(), 100, 40, UNICODE),
        ("2-gpus-ascii", sample_snapshot(2), 80, None, ASCII),
        ("2-gpus-40x10", sample_snapshot(2), 40, 10, UNICODE),
        ("leases-40x10", leased_snapshot(2), 40, 10, UNICODE),
        ("leases-80x24", leased_snapshot(2), 80, 24, UNICODE),
        ("leases-ascii", leased_snapshot(2), 80, 24, ASCII),
        ("8-gpus-leases-80x24", leased_snapshot(8), 80, 24, UNICODE),
        ("8-gpus-leases-200x50", leased_snapshot(8), 200, 50, UNICODE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_exactly(name: str, snapshot: Snapshot, width: int, height: int | None, symbols: Symbols) -> None:
    """Where a page is changed on purpose, look at the new one and put it into the file."""
    expected = (PAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert page(snapshot, width, height, symbols) == expected


# ---- what must be said --------------------------------------------------------------------------


def test_a_heading_too_long_for_its_line_omits_the_order_first() -> None:
    facts = ["by memory, largest first", "matching 'python'", "1 to 8 of 13", "25 below 16 MiB hidden"]
    whole = " · ".join(facts)
    for width in (120, 80, 40):
        (text,) = [
            segment.text for segment in heading("processes", facts, width, UNICODE) if "matching" in segment.text
        ]
        assert text == {120: whole, 80: " · ".join(facts[1:]), 40: "matching 'python' · 1 to …"}[width]


def test_the_head_says_who_watches_and_how_old_the_answers_are() -> None:
    assert page(sample_snapshot(1), 80)[0] == (
        " vram-monitor  nvml+host · monitor 4242 · up 3 h · 12 ms old           14:03:27"
    )
    assert "clock" not in page(sample_snapshot(1), 20)[0]
    waiting = replace(sample_snapshot(1), origin=Origin.WAITING)
    assert page(waiting, 80)[0].startswith(" vram-monitor  nvml+host · no monitor, read directly · 12 ms old  ")
    direct = replace(waiting, origin=Origin.DIRECT)
    assert page(direct, 80)[0].startswith(" vram-monitor  nvml+host · read directly · 12 ms old  ")
    played = replace(direct, source="replay:tape.jsonl")
    assert page(played, 80)[0].startswith(" vram-monitor  replay:tape.jsonl · a recording · 12 ms old  ")


def test_a_silent_monitor_is_an_alarm() -> None:
    silent = replace(sample_snapshot(2), at_ns=AT_NS + 90 * SECOND_NS, silent_ns=90 * SECOND_NS)
    assert page(silent, 80)[0] == (" vram-monitor  the monitor (pid 4242) has been silent for 1 min        14:03:27")


def test_devices_that_do_not_answer_are_no_silence_of_the_monitor() -> None:
    lost_and_slow = snapshot_of(dead(sample_device(0)), stale(sample_device(1)))
    assert page(lost_and_slow, 80)[0].startswith(" vram-monitor  nvml+host · monitor 4242 · up 3 h · 12 s old   ")


def test_devices_in_trouble_say_so_and_hide_no_others() -> None:
    for lines in (page(troubled(), 100, 40), page(troubled(), 80, 24), page(troubled(), 80)):
        assert "GPU is lost" in line_with(lines, " 2  NVIDIA H200")
        assert "no answer for 12 s" in line_with(lines, " 3  NVIDIA H200")
        assert "no answer yet" in line_with(lines, " 4  NVIDIA H200")
        assert line_with(lines, "84.5 / 140.4 GiB", "60%")
        assert line_with(lines, "1:0 MIG 4g.71gb", "48.2 /  69.5 GiB", "69%")
        assert line_with(lines, "1:1 MIG 3g.71gb", "3.1 /  69.5 GiB", "4%")
        assert line_with(lines, "187 /  1007 GiB", "19%")


def test_in_rows_too() -> None:
    lines = page(troubled(), 80, 18)
    assert line_with(lines, "  2  H200", "GPU is lost")
    assert line_with(lines, "  3  H200", "no answer for 12 s")
    assert line_with(lines, "1:0  MIG 4g.71gb", "48.2 /  69.5 GiB")


def test_an_instance_whose_gpu_is_not_shown_stands_alone() -> None:
    _, first, _ = mig_devices(1)
    assert line_with(page(snapshot_of(first), 80), "1:0  MIG 4g.71gb")


def test_instances_in_trouble_say_so() -> None:
    gpu, first, second = mig_devices(1)
    lines = page(snapshot_of(gpu, stale(first), dead(second), sample_device(0)), 80)
    assert line_with(lines, "1:0 MIG 4g.71gb", "no answer for 12 s")
    assert line_with(lines, "1:1 MIG 3g.71gb", "GPU is lost")


def test_load_that_cannot_be_read_is_told_beside_the_memory_that_can() -> None:
    device = sample_device(0)
    lines = page(snapshot_of(replace(device, detail=replace(device.detail, error="timed out"))), 80)
    assert line_with(lines, "NVIDIA H200", "no details: timed out")
    assert line_with(lines, "84.5 / 140.4 GiB")


def test_numbers_from_before_a_restart_of_the_machine_are_not_shown_as_new() -> None:
    device = sample_device(0)
    future = replace(device, memory=replace(device.memory, at_ns=AT_NS + SECOND_NS))
    assert line_with(page(snapshot_of(future, sample_device(1)), 80), "no answer since the machine started")


def test_when_memory_ends_is_told_only_where_it_does_soon() -> None:
    def said(bytes_per_second: float) -> str:
        lines = page(snapshot_of(sample_device(0, bytes_per_second=bytes_per_second)), 80)
        return lines[4][50:].strip()

    assert said(212.5 * MIB) == "+212.5 MiB/s · full in 4 min"
    assert said(20 * MIB) == "+20.0 MiB/s · full in 47 min"
    assert said(10 * MIB) == "+10.0 MiB/s"
    assert said(-3 * GIB) == "-3.0 GiB/s"
    assert said(0.0) == "steady"


@pytest.mark.parametrize("height", [None, 24, 16, 14, 12])
def test_when_memory_ends_is_told_whole_in_every_form(height: int | None) -> None:
    devices = [sample_device(2 * number, num_processes=0, bytes_per_second=60 * MIB) for number in range(4)]
    lines = page(snapshot_of(*devices), 80, height)
    assert [line for line in lines if "…" in line] == []
    assert sum(bool(re.search(r"full in \d\d min(  |$)", line)) for line in lines) == 4


def test_without_devices() -> None:
    nothing = snapshot_of()
    assert page(nothing, 80)[2:] == [
        " no devices",
        " ─ processes  by memory, largest first ────────────────────────────────────────",
        " the processes are not known",
    ]
    assert page(nothing, 40, 1) == ["vram-monitor  nvml+host · mon…  14:03:27"]


@pytest.mark.parametrize(("used_percent", "colour"), [(79, "green"), (81, "yellow"), (94, "yellow"), (96, "red")])
def test_the_bar_and_the_percentage_have_the_colour_of_the_pressure(used_percent: int, colour: str) -> None:
    device = sample_device(0)
    free = (100 - used_percent) * GIB
    device = replace(device, memory=replace(device.memory, total_bytes=100 * GIB, free_bytes=free))
    for height in (None, 24, 8):
        segments = [segment for line in render(snapshot_of(device), width=80, height=height).lines for segment in line]
        for part in (f"{used_percent}%", UNICODE.bar * 4):
            styles = [segment.style for segment in segments if part in segment.text]
            colours = {style.color.name for style in styles if style is not None and style.color is not None}
            assert colours - {"blue", "cyan"} == {colour}  # which are those of the load and of engines


# ---- leases -------------------------------------------------------------------------------------


def test_without_leases_nothing_is_said_of_them() -> None:
    for height in (None, 24, 10):
        assert not any("GRANTED" in line or "leases  bar" in line for line in page(sample_snapshot(2), 100, height))


def test_without_a_height_all_leases_are_there() -> None:
    lines = page(leased_snapshot(40), 100)
    assert sum("embed-small" in line and "recalling to 8.5 GiB" in line for line in lines) == 20
    assert not any("more lease" in line for line in lines)


@pytest.mark.parametrize("height", range(21, 60))
def test_leases_take_at_most_half_of_what_devices_leave_unless_processes_need_less(height: int) -> None:
    lines = page(leased_snapshot(8), 80, height)
    leases, processes = (lines.index(line_with(lines, title)) for title in ("HELD / GRANTED", "COMMAND"))
    all_processes = not any("more with" in line for line in lines)
    assert processes - leases <= len(lines) - processes + 1 or all_processes


def test_processes_have_the_names_under_which_their_engines_hold_leases() -> None:
    device = sample_device(0)
    nameless = replace(
        device, detail=replace(device.detail, reading=DetailReading(processes=(ProcessUse(40961, GIB),)))
    )
    (lease,) = (lease for lease in leased_snapshot(1).leases if lease.pid == 40961)
    assert "llama-8b" in page(snapshot_of(nameless).with_leases([lease]), 100)[-1]


def test_leases_that_are_not_known_are_told_apart_from_none() -> None:
    unknown = replace(sample_snapshot(1), leases_error="the broker at /run/x did not answer in time")
    said = "leases are not known: the broker at /run/x did not answer in time"
    assert line_with(page(unknown, 100), said) and line_with(page(unknown, 100, 30), said)
    assert not any("leases are not known" in line for line in page(sample_snapshot(1), 100))


# ---- processes ----------------------------------------------------------------------------------


def test_without_a_height_all_processes_are_there() -> None:
    lines = page(sample_snapshot(2, num_processes=250, host=False), 100)
    assert sum("worker --rank" in line for line in lines) == 500
    assert "…" not in lines[-1]


def test_those_left_out_are_counted_with_what_they_hold() -> None:
    lines = page(sample_snapshot(1, num_processes=12, host=False), 80, 14)
    shown = [line for line in lines if "worker" in line]
    left_out = range(len(shown), 12)
    assert lines[-1] == f" … {len(left_out)} more with {sum(12 - rank for rank in left_out)} MiB"
    assert [int(line.split()[1]) for line in shown] == [60_000 + rank for rank in range(len(shown))]


@pytest.mark.parametrize(
    ("order", "pids"),
    [
        (Order.MEMORY, [3, 1, 2, 4]),
        (Order.PID, [1, 2, 3, 4]),
        (Order.USER, [3, 2, 1, 4]),
    ],
)
def test_processes_come_in_order_and_the_unknown_last(order: Order, pids: list[int]) -> None:
    device = sample_device(0)
    processes = (
        ProcessUse(1, 5 * GIB, user="zoe"),
        ProcessUse(2, 5 * GIB, user="ada"),
        ProcessUse(3, 7 * GIB, user="ada"),
        ProcessUse(4, None, user=None),
    )
    device = replace(device, detail=replace(device.detail, reading=DetailReading(processes=processes)))
    lines = render(snapshot_of(device), width=70, listing=Listing(order)).lines
    rows = ["".join(segment.text for segment in line).split() for line in lines][-4:]
    assert [int(row[1]) for row in rows] == pids
    assert rows[3] == ["0", "4", "–", "–", "–", "C", "not", "seen", "from", "here"]


def test_a_source_that_tells_no_processes_is_not_one_without_processes() -> None:
    device = sample_device(0)
    untold = replace(device, detail=replace(device.detail, reading=DetailReading()))
    none = replace(device, detail=replace(device.detail, reading=DetailReading(processes=())))
    assert page(snapshot_of(untold), 80)[-1] == " the processes are not known"
    assert page(snapshot_of(none), 80)[-1] == " no processes"


def test_small_processes_of_the_host_are_hidden_and_counted() -> None:
    gpu, host = sample_device(0), host_device()
    processes = (
        ProcessUse(1, 17 * MIB, command="large"),
        ProcessUse(2, 15 * MIB, command="small"),
        ProcessUse(3, MIB, command="engine", engine="demo"),
        ProcessUse(4, None, command="unknown"),
    )
    reading = DetailReading(processes=processes)
    gpu, host = (replace(device, detail=replace(device.detail, reading=reading)) for device in (gpu, host))

    def listed(min_bytes: int | None, *devices: Device) -> tuple[list[str], str]:
        view = ViewState(Listing(min_bytes=min_bytes))
        rendered = render_live(snapshot_of(*devices), view, width=100, height=30).lines.lines
        lines = ["".join(segment.text for segment in line) for line in rendered]
        begin = lines.index(line_with(lines, "COMMAND"))
        return [line.split()[-1] for line in lines[begin + 1 : -1] if line], lines[begin - 1]

    shown, heading = listed(None, host)
    assert shown == ["large", "engine", "unknown"] and "1 below 16 MiB hidden" in heading
    shown, heading = listed(None, gpu)
    assert shown == ["large", "small", "engine", "unknown"] and "hidden" not in heading
    shown, heading = listed(20 * MIB, gpu)
    assert shown == ["engine", "unknown"] and "2 below 20 MiB hidden" in heading


def test_the_heading_has_the_order_the_filter_and_the_place() -> None:
    snapshot = sample_snapshot(1, num_processes=40, host=False)
    view = ViewState(Listing(Order.PID, reverse=True, text="worker"), scroll=5)
    rendered = render_live(snapshot, view, width=100, height=24)
    lines = ["".join(segment.text for segment in line) for line in rendered.lines.lines]
    last = rendered.start + rendered.rows
    assert line_with(lines, "processes  by pid, highest first · matching 'worker' · 6 to " + f"{last} of 40")
    assert line_with(lines, "PID▾")
    pids = [int(line.split()[1]) for line in lines if "worker --rank" in line]
    assert pids == [60_039 - place for place in range(5, last)]
    assert line_with(lines, f"… {40 - rendered.rows} more with", "5 of them above")


def test_the_chart_spans_what_it_shows_where_its_range_is_written() -> None:
    device = sample_device(0, bytes_per_second=0.0)
    device = replace(device, detail=replace(device.detail, history=(20 * GIB,) * 128 + (40 * GIB,) * 128))
    lines = page(snapshot_of(device), 80, 30)
    charts = [line for line in lines if "█" in line]
    assert len(charts) >= 2 and not any("▁" in line for line in charts[:-1])
    assert re.search(r" ▁{10,}█{10,} +20.0 to 40.0 GiB in 3 min$", charts[-1])
    steady = sample_device(0)
    steady = replace(steady, detail=replace(steady.detail, history=(80 * GIB, 80 * GIB + MIB) * 128))
    assert not any("█" in line for line in page(snapshot_of(steady), 80, 30))


# ---- fits ---------------------------------------------------------------------------------------


def test_nothing_of_a_command_line_or_a_name_steers_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b5A\r\nline\u202e[red]模"
    device = sample_device(0)
    process = ProcessUse(7, GIB, kind=evil, user=evil, command=evil, engine=evil)
    device = Device(
        info=DeviceInfo(evil, evil, DeviceKind.GPU, evil),
        memory=device.memory,
        detail=replace(device.detail, reading=DetailReading(processes=(process,))),
    )
    for troubled_device in (device, dead(device, evil), replace(device, detail=replace(device.detail, error=evil))):
        lease = replace(leased_snapshot(1).leases[0], engine=evil, user=evil, state=evil, device_uuid=evil)
        snapshot = snapshot_of(troubled_device, source=evil).with_leases([lease])
        for height in (None, 24, 12):
            lines = page(snapshot, 160, height)
            assert all(line.isprintable() for line in lines)
            assert "[red]" in "".join(lines)
        assert all(line.isascii() for line in page(snapshot, 160, 24, ASCII))


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 4, 8, 64])
def test_it_fits_terminals_of_every_size(num_gpus: int) -> None:
    unleased = sample_snapshot(num_gpus, num_processes=0 if num_gpus > 8 else 500 // max(num_gpus, 1))
    snapshot = unleased.with_leases(leased_snapshot(num_gpus).leases)
    for width in (*range(1, 12), 20, 39, 40, 59, 60, 79, 80, 111, 160, 200, 333):
        for height in (1, 2, 3, 5, 8, 10, 15, 16, 24, 50, 120):
            check(snapshot, width, height, UNICODE)


@settings(deadline=None)
@given(SNAPSHOT, st.integers(1, 240), st.integers(1, 70), st.sampled_from([UNICODE, ASCII]))
def test_it_fits_whatever_the_snapshot_holds(snapshot: Snapshot, width: int, height: int, symbols: Symbols) -> None:
    check(snapshot, width, height, symbols)
    check(snapshot, width, None, symbols)


def check(snapshot: Snapshot, width: int, height: int | None, symbols: Symbols) -> None:
    """At most so wide and so high, printable, and encodable."""
    lines = page(snapshot, width, height, symbols)
    assert height is None or len(lines) <= height
    for line in lines:
        assert cell_len(line) <= width
        assert line.isprintable()
        line.encode("ascii" if symbols is ASCII else "utf-8")
