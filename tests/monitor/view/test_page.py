"""The whole page: exact pictures of samples, leases, devices in trouble, any keys; and that it fits any terminal.

Below: snapshots as plain data for scripts, with leases, and whose processes these name.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from snapshot_strategies import SNAPSHOT
from snapshots import (
    AT_NS,
    H200_BYTES,
    SECOND_NS,
    dead,
    host_device,
    leased_snapshot,
    mig_devices,
    sample_device,
    sample_lease,
    sample_leases,
    sample_reservations,
    sample_snapshot,
    snapshot_of,
    stale,
    unanswered,
)

from pagetide.common.units import GIB, MIB
from pagetide.monitor.snapshot import DetailReading, Device, LeaseUse, Origin, ProcessUse, Snapshot
from pagetide.monitor.snapshot_json import to_json
from pagetide.monitor.view.headings import heading
from pagetide.monitor.view.leases import lease_lines
from pagetide.monitor.view.listing import Listing, Order
from pagetide.monitor.view.page import render, render_live
from pagetide.monitor.view.state import LIMIT, RECALL, Action, Question, SizeInput, ViewState
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols
from pagetide.monitor.view.text import ALARM, BUSY, DIM, ENGINE, OTHER, YELLOW

CLOCK = datetime(2026, 11, 20, 14, 3, 27)
PAGES = Path(__file__).with_name("pages")


def page(snapshot: Snapshot, width: int, height: int | None = None, symbols: Symbols = UNICODE) -> list[str]:
    how = {"width": width, "symbols": symbols, "clock": CLOCK}
    got = render(snapshot, **how) if height is None else render_live(snapshot, ViewState(), height=height, **how).lines
    return texts(got.lines)


def texts(lines: list[list[Segment]]) -> list[str]:
    return ["".join(segment.text for segment in line) for line in lines]


def test_a_first_value_has_no_time_beside_it() -> None:
    """ "5120 MiB in 1 s" would read like a rate."""
    host = host_device()
    shown = "\n".join(page(snapshot_of(replace(host, detail=replace(host.detail, history=(5 * GIB,)))), 80))
    assert " 5120 MiB  " in shown
    shown = "\n".join(page(snapshot_of(replace(host, detail=replace(host.detail, history=(5 * GIB, 5 * GIB)))), 80))
    assert " 5120 MiB in 2 s  " in shown


def troubled() -> Snapshot:
    silent = dead(sample_device(2)), stale(sample_device(3)), unanswered(sample_device(4))
    return snapshot_of(sample_device(0), *mig_devices(1), *silent, host_device())


def line_with(lines: list[str], *texts: str) -> str:
    """The only line in which all of `texts` stand."""
    (line,) = [line for line in lines if all(text in line for text in texts)]
    return line


@pytest.mark.parametrize(
    ("name", "snapshot", "width", "height", "symbols"),
    [
        ("trouble-100x40", troubled(), 100, 40, UNICODE),
        ("2-gpus-ascii", sample_snapshot(2), 80, None, ASCII),
        ("2-gpus-40x10", sample_snapshot(2), 40, 10, UNICODE),
        ("16-gpus-80x12", sample_snapshot(16), 80, 12, UNICODE),
        ("leases-80x24", leased_snapshot(2), 80, 24, UNICODE),
        ("4-gpus-leases-200x24", leased_snapshot(4), 200, 24, UNICODE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_exactly(name: str, snapshot: Snapshot, width: int, height: int | None, symbols: Symbols) -> None:
    """Where a page is changed on purpose, look at the new one and put it into the file."""
    expected = (PAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert page(snapshot, width, height, symbols) == expected


def test_a_heading_too_long_for_its_line_omits_the_order_first() -> None:
    facts = ["by memory, largest first", "matching 'python'", "1 to 8 of 13", "25 below 16 MiB hidden"]
    whole = " · ".join(facts)
    for width in (120, 80, 40):
        (text,) = [part.text for part in heading("processes", facts, width, UNICODE) if "matching" in part.text]
        assert text == {120: whole, 80: " · ".join(facts[1:]), 40: "matching 'python' · 1 to …"}[width]


def test_the_head_says_who_watches_or_is_silent() -> None:
    assert "clock" not in page(sample_snapshot(1), 20)[0]
    waiting = replace(sample_snapshot(1), origin=Origin.WAITING)
    assert page(waiting, 80)[0].startswith(" vram-monitor  nvml+host · no monitor, read directly · 12 ms old  ")
    direct = replace(waiting, origin=Origin.DIRECT)
    assert page(direct, 80)[0].startswith(" vram-monitor  nvml+host · read directly · 12 ms old  ")
    played = replace(direct, source="replay:tape.jsonl")
    assert page(played, 80)[0].startswith(" vram-monitor  replay:tape.jsonl · a recording · 12 ms old  ")
    silent = replace(sample_snapshot(2), at_ns=AT_NS + 90 * SECOND_NS, silent_ns=90 * SECOND_NS)
    assert page(silent, 80)[0] == " vram-monitor  the monitor (pid 4242) has been silent for 1 min        14:03:27"


def test_devices_in_trouble_say_so_and_hide_no_others() -> None:
    rows = page(troubled(), 80, 18)  # one row each
    assert line_with(rows, "  2  H200", "GPU is lost") and line_with(rows, "  3  H200", "no answer for 12 s")
    assert line_with(rows, "  4  H200", "no answer yet") and line_with(rows, "1:0  MIG 4g.71gb", "48.2 /  69.5 GiB")
    gpu, first, second = mig_devices(1)
    lines = page(snapshot_of(gpu, stale(first), dead(second), sample_device(0)), 80)
    assert line_with(lines, "1:0 MIG 4g.71gb", "no answer for 12 s") and line_with(lines, "1:1 MIG", "GPU is lost")
    assert line_with(page(snapshot_of(first), 80), "1:0  MIG 4g.71gb"), "without its GPU"
    device = sample_device(0)
    lines = page(snapshot_of(replace(device, detail=replace(device.detail, error="timed out"))), 80)
    assert line_with(lines, "NVIDIA H200", "no details: timed out") and line_with(lines, "84.5 / 140.4 GiB")
    future = replace(device, memory=replace(device.memory, at_ns=AT_NS + SECOND_NS))
    assert line_with(page(snapshot_of(future, sample_device(1)), 80), "no answer since the machine started")


def test_when_memory_ends_is_told_only_where_it_does_soon_and_whole_in_every_form() -> None:
    for mib, said in (
        (212.5, "+212.5 MiB/s · full in 4 min"), (20, "+20.0 MiB/s · full in 47 min"), (10, "+10.0 MiB/s"),
        (-3072, "-3.0 GiB/s"), (0, "steady"),
    ):  # fmt: skip
        assert page(snapshot_of(sample_device(0, bytes_per_second=mib * MIB)), 80)[4][50:].strip() == said
    devices = [sample_device(2 * number, num_processes=0, bytes_per_second=60 * MIB) for number in range(4)]
    for height in (None, 24, 16, 14, 12):
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


def test_the_bar_and_the_percentage_have_the_colour_of_the_pressure() -> None:
    for used_percent, colour in ((79, "green"), (81, "yellow"), (94, "yellow"), (96, "red")):
        device = sample_device(0)
        free = (100 - used_percent) * GIB
        device = replace(device, memory=replace(device.memory, total_bytes=100 * GIB, free_bytes=free))
        for height in (None, 24, 8):
            lines = render(snapshot_of(device), width=80, height=height).lines
            for part in (f"{used_percent}%", UNICODE.bar * 4):
                styles = [segment.style for line in lines for segment in line if part in segment.text]
                colours = {style.color.name for style in styles if style is not None and style.color is not None}
                assert colours - {"blue", "cyan"} == {colour}, "those are of the load and of engines"


def test_leases_take_at_most_half_of_what_devices_leave_unless_processes_need_less() -> None:
    for height in range(21, 60):
        lines = page(leased_snapshot(8), 80, height)
        leases, processes = (lines.index(line_with(lines, title)) for title in ("HELD / GRANTED", "COMMAND"))
        all_processes = not any("more with" in line for line in lines)
        assert processes - leases <= len(lines) - processes + 1 or all_processes, height


def test_without_a_height_all_leases_and_processes_are_there() -> None:
    lines = page(leased_snapshot(40), 100)
    assert sum("embed-small" in line and "recalling to 8.5 GiB" in line for line in lines) == 20
    assert not any("more lease" in line for line in lines)
    lines = page(sample_snapshot(2, num_processes=250, host=False), 100)
    assert sum("worker --rank" in line for line in lines) == 500
    assert "…" not in lines[-1] and not any("GRANTED" in line or "leases  bar" in line for line in lines)


def test_leases_name_processes_and_are_told_to_be_unknown() -> None:
    device = sample_device(0)
    reading = DetailReading(processes=(ProcessUse(40961, GIB),))
    nameless = replace(device, detail=replace(device.detail, reading=reading))
    (lease,) = (lease for lease in leased_snapshot(1).leases if lease.pid == 40961)
    assert "llama-8b" in page(snapshot_of(nameless).with_leases([lease]), 100)[-1]
    unknown = replace(sample_snapshot(1), leases_error="the broker at /run/x did not answer in time")
    said = "leases are not known: the broker at /run/x did not answer in time"
    assert line_with(page(unknown, 100), said) and line_with(page(unknown, 100, 30), said)


def test_reservations_are_a_table_of_their_own_filtered_and_counted_where_room_is_short() -> None:
    snapshot = sample_snapshot(1).with_leases([], sample_reservations(20))
    lines = page(snapshot, 120)
    assert "reservations" in lines[lines.index(line_with(lines, "HELD / WANTED")) - 1]
    assert line_with(lines, "#1 ", "ada", "8.0 / 8.0 GiB", "for 2 h more")
    assert line_with(lines, "0  #2", "train.py", "2.0 / 6.0 GiB", "waits as number 2 since 40 s, priority 5")
    assert "RESERVATION" not in "\n".join(page(sample_snapshot(1), 120))
    for height in (24, 30, 60):
        lines = page(snapshot, 120, height)
        named = sum(re.search(r"  #\d+  50", line) is not None for line in lines)
        assert named == 20 or line_with(lines, f"{20 - named} more with"), height
    assert len(Listing(text="TRAIN").reservations(snapshot.reservations)) == 10
    assert json.loads(to_json(snapshot))["reservations"][0] == {
        "id": 1, "name": "comfy", "pid": 501, "user": "ada", "device_uuid": snapshot.devices[0].info.uuid, "state": "held",
        "held_bytes": 8 * GIB, "wanted_bytes": 8 * GIB, "priority": 0, "place": None, "waiting_seconds": None,
        "left_seconds": 7500.0,
    }  # fmt: skip


def test_processes_come_in_order_and_the_unknown_last() -> None:
    device = sample_device(0)
    processes = (
        ProcessUse(1, 5 * GIB, user="zoe"),
        ProcessUse(2, 5 * GIB, user="ada"),
        ProcessUse(3, 7 * GIB, user="ada"),
        ProcessUse(4, None, user=None),
    )

    def listed(processes: tuple[ProcessUse, ...] | None, order: Order = Order.MEMORY) -> list[str]:
        told = replace(device, detail=replace(device.detail, reading=DetailReading(processes=processes)))
        return texts(render(snapshot_of(told), width=70, listing=Listing(order)).lines)

    for order, pids in ((Order.MEMORY, [3, 1, 2, 4]), (Order.PID, [1, 2, 3, 4]), (Order.USER, [3, 2, 1, 4])):
        rows = [line.split() for line in listed(processes, order)[-4:]]
        assert [int(row[1]) for row in rows] == pids
        assert rows[3] == ["0", "4", "–", "–", "–", "C", "not", "seen", "from", "here"]
    assert listed(None)[-1] == " the processes are not known"
    assert listed(())[-1] == " no processes"


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
        lines = texts(render_live(snapshot_of(*devices), view, width=100, height=30).lines.lines)
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
    lines = texts(rendered.lines.lines)
    last = rendered.start + rendered.rows
    assert line_with(lines, "processes  by pid, highest first · matching 'worker' · 6 to " + f"{last} of 40")
    assert line_with(lines, "PID▾")
    pids = [int(line.split()[1]) for line in lines if "worker --rank" in line]
    assert pids == [60_039 - place for place in range(5, last)]
    assert line_with(lines, f"… {40 - rendered.rows} more with", "5 of them above")


def test_the_chart_of_steady_use_is_low() -> None:
    steady = sample_device(0)
    steady = replace(steady, detail=replace(steady.detail, history=(80 * GIB, 80 * GIB + MIB) * 128))
    assert not any("█" in line for line in page(snapshot_of(steady), 80, 30))


@given(SNAPSHOT, st.integers(1, 240), st.integers(1, 70), st.sampled_from([UNICODE, ASCII]))
def test_it_fits_whatever_the_snapshot_holds(snapshot: Snapshot, width: int, height: int, symbols: Symbols) -> None:
    for lines in (page(snapshot, width, height, symbols), page(snapshot, width, None, symbols)):
        check(lines, width, symbols)
    assert len(page(snapshot, width, height, symbols)) <= height


def check(lines: list[str], width: int, symbols: Symbols) -> None:
    for line in lines:
        assert cell_len(line) <= width and line.isprintable()
        line.encode("ascii" if symbols is ASCII else "utf-8")


DEVICES = (sample_device(0), sample_device(1))
UUID = DEVICES[0].info.uuid
SAMPLE = sample_leases()


def lines_of(*leases: LeaseUse, width: int = 160, most: int | None = None) -> list[list[Segment]]:
    return lease_lines(Listing().leases(leases, DEVICES), DEVICES, width=width, most=most, symbols=UNICODE)


def text_of(*leases: LeaseUse, width: int = 160, most: int | None = None) -> list[str]:
    return [line.rstrip() for line in texts(lines_of(*leases, width=width, most=most))]


def a_lease(engine: str = "a", pid: int = 1, granted: float = 8, uuid: str = UUID, **changes: object) -> LeaseUse:
    lease = sample_lease(engine, pid, uuid, granted, held=granted)
    return replace(lease, **changes)  # type: ignore[arg-type]


def test_where_there_is_little_the_engine_its_state_and_its_bytes_stay() -> None:
    assert text_of(*SAMPLE, width=43) == [
        "ENGINE          HELD / GRANTED  STATE",
        "llama-8b      62.4 /  78.0 GiB  ok",
        "embed-small   18.0 /  24.0 GiB  recalling",
        "qwen3-32b    104.5 / 104.5 GiB  overdue",
        "judge-1b       614 /   717 MiB  reaping",
    ]
    assert text_of(*SAMPLE, width=22)[1:3] == ["llama-8b     ok", "embed-small  recalling"]
    assert text_of(*SAMPLE, width=11)[1:3] == ["llama-8b", "embed-small"]
    assert text_of(a_lease("m" * 80, pid=71), a_lease("b", pid=9), width=78)[1:] == ["  9  b", " 71  " + "m" * 72 + "…"]
    assert "MAX" not in text_of(a_lease())[0] and "MAX" in text_of(a_lease(max_bytes=GIB))[0]
    assert [row.split()[0] for row in text_of(a_lease(), a_lease(uuid="GPU-gone"))[1:]] == ["0", "–"]


def test_process_ids_are_told_first_where_names_do_not_tell_engines_apart() -> None:
    """At 80 cells, in which not all has room. Names are shown whole, as a recall needs them."""
    for engines, told in (
        (("chat", "judge"), False),
        (("chat", "chat"), True),
        (("a-very-long-name-1", "b"), False),
        (("chat\x1b", "judge"), True),
    ):
        leases = [a_lease(engine, pid=70_001 + number) for number, engine in enumerate(engines)]
        recalled = replace(leases[0], state="recalling", recall_target_bytes=4 * GIB, recall_age_seconds=0.25)
        head, *rows = text_of(recalled, *leases[1:], width=78)
        assert ("PID" in head) is told
        assert ["7000" in row for row in rows] == [told] * 2


def test_by_device_and_then_the_largest_first() -> None:
    second = DEVICES[1].info.uuid
    leases = (
        a_lease("d", granted=9, uuid=second), a_lease("b"), a_lease("c", granted=3), a_lease("a"),
        *(a_lease(engine, pid, 7, second) for engine, pid in (("e", 1), ("f", 2), ("f", 1))),
    )  # fmt: skip
    rows = [row.split() for row in text_of(*leases)[1:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("0", "1", "a"), ("0", "1", "b"), ("0", "1", "c"),
        ("1", "1", "d"), ("1", "1", "e"), ("1", "1", "f"), ("1", "2", "f"),
    ]  # fmt: skip


def test_a_state_says_what_is_wanted_and_since_when() -> None:
    for told, style, state, target, age in (
        ("ok", DIM, "ok", None, None),
        ("loading", BUSY, "loading", None, None),
        ("recalling to 0 MiB, 12 ms", YELLOW, "recalling", 0, 0.012),
        ("recalling to 1.0 GiB", YELLOW, "recalling", GIB, None),
        ("overdue to 1.0 GiB, 1 min", ALARM, "overdue", GIB, 75.0),
        ("reaping", YELLOW, "reaping", None, None),
        ("reaping", YELLOW, "reaping", GIB, 3.0),
        ("something new", None, "something new", None, None),
    ):
        last = lines_of(a_lease(state=state, recall_target_bytes=target, recall_age_seconds=age))[1][-1]
        assert (last.text.rstrip(), last.style) == (told, style)
    assert lines_of(a_lease(asked_bytes=9 * GIB))[1][-1].text.rstrip() == "ok, asks for 9.0 GiB"
    assert ["WAITING" in text_of(a_lease(num_waiting=number), width=200)[0] for number in (0, 7)] == [False, True]
    assert text_of(a_lease(num_waiting=7), width=200)[1].split()[-2:] == ["7", "ok"]


def drawn(lease: LeaseUse) -> list[tuple[str, Style | None]]:
    line = lines_of(lease, width=60)[1]
    symbols = {UNICODE.bar, UNICODE.half, UNICODE.rest}
    return [(segment.text, segment.style) for segment in line if segment.text and set(segment.text) <= symbols]


def test_the_bar_shows_weights_then_the_rest_then_kv() -> None:
    lease = a_lease(granted=8, held_bytes=6 * GIB, held_by_class={"weights": 3 * GIB, "kv": 2 * GIB, "other": GIB})
    assert drawn(lease) == [("━━━", BUSY), ("━", OTHER), ("━━", ENGINE), ("──", DIM)]
    never_reported = a_lease(granted=8, held_bytes=4 * GIB, held_by_class={})
    assert drawn(never_reported) == [("━━━━", OTHER), ("────", DIM)]
    beyond_the_grant = a_lease(granted=2, held_bytes=4 * GIB, held_by_class={"kv": 4 * GIB})
    assert drawn(beyond_the_grant) == [("━━━━━━━━", ENGINE)]
    assert drawn(a_lease(granted=0)) == [("────────", DIM)]


def test_those_left_out_are_counted_and_those_overdue_among_them_are_an_alarm() -> None:
    leases = [a_lease(f"engine-{number}", granted=10 - number) for number in range(4)]
    leases[3] = replace(leases[3], state="overdue")
    assert len(text_of(*leases, most=5)) == 5
    lines = lines_of(*leases, most=4)
    assert [line.split()[2] for line in texts(lines[1:3])] == ["engine-0", "engine-1"]
    assert lines[-1] == [Segment("… 2 more leases with 15.0 GiB, 1 overdue", ALARM)]
    assert lines_of(*leases[:3], most=3)[-1] == [Segment("… 2 more leases with 17.0 GiB", DIM)]
    for most in (2, 1):
        assert lines_of(*leases, most=most) == [[Segment("… 4 leases with 34.0 GiB, 1 overdue", ALARM)]]
    assert lines_of(leases[0], most=1) == [[Segment("… 1 lease with 10.0 GiB", DIM)]]
    assert lines_of(*leases, most=0) == lines_of(*leases, most=-3) == lines_of() == lines_of(most=9) == []


NAMED = ("up", "down", "pageup", "pagedown", "home", "end", "tab", "enter", "escape", "backspace")
KEY = st.sampled_from((*NAMED, *"qjkmpurahRLyn?/0159GM")) | st.characters()


def press(view: ViewState, keys: str | list[str], snapshot: Snapshot) -> list[Action]:
    return [action for key in keys if (action := view.press(key, snapshot)) is not None]


def screen(view: ViewState, snapshot: Snapshot, width: int, height: int, symbols: Symbols = UNICODE) -> list[str]:
    """The page as text; the state hears what it had room for, as from the live view."""
    page = render_live(snapshot, view, width=width, height=height, symbols=symbols)
    if view.help_open:
        view.help_scroll = page.start
    else:
        view.scroll = page.start
    view.process_rows = page.rows
    return texts(page.lines.lines)


@given(
    st.lists(st.tuples(SNAPSHOT, st.lists(KEY, max_size=8)), min_size=1, max_size=3),
    st.integers(1, 210),
    st.integers(1, 60),
    st.sampled_from([UNICODE, ASCII]),
)
def test_any_keys(steps: list[tuple[Snapshot, list[str]]], width: int, height: int, symbols: Symbols) -> None:
    """Nothing raises, the selection is on a row, every page fills the window exactly."""
    view = ViewState(Listing(min_bytes=None), can_act=True)
    for snapshot, keys in steps:
        for key in keys:
            action = view.press(key, snapshot)
            assert action is None or action.num_bytes >= 1
            leases = view.listing.leases(snapshot.leases, snapshot.devices)
            place = view.selected(snapshot)
            assert place is None if not (view.on_leases and leases) else place in range(len(leases))
            lines = screen(view, snapshot, width, height, symbols)
            assert len(lines) == height
            check(lines, width, symbols)
            uses, _ = view.listing.uses(snapshot.devices)
            if not view.help_open:  # a page without the list does not clamp its place
                assert 0 <= view.scroll <= max(len(uses) - 1, 0)


def test_sort_keys_and_reverse() -> None:
    view, snapshot = ViewState(), sample_snapshot()
    for keys, order, descending in (
        ("", Order.MEMORY, True), ("p", Order.PID, False), ("r", Order.PID, True), ("u", Order.USER, False),
        ("m", Order.MEMORY, True), ("r", Order.MEMORY, False),
    ):  # fmt: skip
        press(view, keys, snapshot)
        assert (view.listing.order, view.listing.descending) == (order, descending)
    sizes = [use.process.used_bytes or 0 for use in view.listing.uses(snapshot.devices)[0]]
    assert sizes == sorted(sizes)


def test_scrolling_goes_by_lines_and_pages_and_stops_at_the_ends() -> None:
    view, snapshot = ViewState(), sample_snapshot(1, num_processes=50, host=False)
    screen(view, snapshot, 80, 24)
    rows = view.process_rows
    assert 1 < rows < 50
    for key, start in (
        ("up", 0), ("j", 1), ("down", 2), ("k", 1), ("pagedown", 1 + rows), ("pageup", 1), ("end", 50 - rows),
        ("down", 50 - rows), ("up", 49 - rows), ("home", 0),
    ):  # fmt: skip
        press(view, [key], snapshot)
        lines = screen(view, snapshot, 80, 24)
        assert view.scroll == start, key
        first = next(line for line in lines if "worker" in line)
        assert int(first.split()[1]) == 60_000 + start


def test_the_filter_finds_commands_users_pids_and_engines() -> None:
    view, snapshot = ViewState(), leased_snapshot(2)
    everything = view.listing.uses(snapshot.devices)[0]
    for text, engines in (("QWEN", {"qwen3-32b"}), ("40961", {"llama-8b"}), ("grace", {None}), ("judge", set())):
        press(view, ["/", *text, "x", "backspace", "enter"], snapshot)
        assert {use.process.engine for use in view.listing.uses(snapshot.devices)[0]} == engines
        assert view.prompt is None and not view.leaving
        press(view, ["escape"], snapshot)
        assert view.listing.uses(snapshot.devices)[0] == everything


def test_q_in_the_filter_is_a_letter_and_in_the_help_goes_back() -> None:
    view, snapshot = ViewState(), sample_snapshot()
    press(view, "/q", snapshot)
    assert view.listing.text == "q" and not view.leaving
    press(view, ["escape", "?"], snapshot)
    assert view.listing.text == "" and view.help_open
    assert "recall memory from the selected lease" in "\n".join(screen(view, snapshot, 100, 40))
    press(view, "q", snapshot)
    assert not view.help_open and not view.leaving
    press(view, "q", snapshot)
    assert view.leaving


def test_all_of_the_help_can_be_read_in_any_window() -> None:
    for width, height in ((80, 24), (60, 15), (40, 10)):
        view, snapshot = ViewState(), sample_snapshot()
        whole = screen(ViewState(help_open=True), snapshot, width, 200)
        press(view, "?", snapshot)
        seen = set(screen(view, snapshot, width, height))
        for _ in range(60):
            press(view, "j", snapshot)
            seen |= set(screen(view, snapshot, width, height))
        assert {line for line in whole if line} <= seen


def test_nothing_but_a_yes_sends() -> None:
    for key in ("n", "escape", "enter", "q", "R", "tab"):
        view, snapshot = ViewState(can_act=True), leased_snapshot(2)
        assert press(view, ["R", "enter", key, "y"], snapshot) == []
        assert view.prompt is None and not view.leaving
        assert press(view, ["L", "escape", "y"], snapshot) == []
    view = ViewState(can_act=True)
    press(view, "L", sample_snapshot(1))
    assert view.prompt is None and view.status == "nothing to limit: no engine holds a lease here"


def test_an_action_is_asked_for_and_confirmed() -> None:
    view, snapshot = ViewState(can_act=True), leased_snapshot(2)
    press(view, ["tab", "down"], snapshot)
    lease = view.listing.leases(snapshot.leases, snapshot.devices)[1]
    assert lease.engine == "embed-small"
    press(view, "R", snapshot)
    assert isinstance(view.prompt, SizeInput) and view.prompt.default_bytes == lease.spare_bytes
    assert press(view, [*"2 parsecs", "enter"], snapshot) == []
    assert isinstance(view.prompt, SizeInput) and "cannot read '2 parsecs'" in view.prompt.error
    assert "? 2 parsecs_  cannot read" in screen(view, snapshot, 200, 24)[-1]
    assert screen(view, snapshot, 80, 24)[-3:] == [
        " recall how much from 'embed-small' (pid 43210) [11.50 GiB]? 2 parsecs_",
        " cannot read '2 parsecs' as an amount of memory; write bytes (1073741824), or",
        " 1.5GiB, 512MiB, 2GB",
    ], "the reason has lines of its own where it does not fit"
    press(view, [*["backspace"] * 9, *"512MiB", "enter"], snapshot)
    assert view.prompt == Question(Action(RECALL, lease, 512 * MIB))
    assert screen(view, snapshot, 80, 24)[-1] == " recall 512.00 MiB from 'embed-small' (pid 43210)? y or n"
    assert press(view, "y", snapshot) == [Action(RECALL, lease, 512 * MIB)]
    assert view.prompt is None
    press(view, [*"L30G", "enter"], snapshot)
    assert screen(view, snapshot, 80, 24)[-1] == " limit 'embed-small' (pid 43210) to 30.00 GiB? y or n"
    assert press(view, "Y", snapshot) == [Action(LIMIT, lease, 30 * GIB)]


def test_the_selection_stays_with_its_lease_and_moves_on_when_that_ends() -> None:
    view, snapshot = ViewState(), leased_snapshot(2)
    press(view, ["tab", "end"], snapshot)
    leases = view.listing.leases(snapshot.leases, snapshot.devices)
    assert view.selected(snapshot) == len(leases) - 1
    fewer = snapshot.with_leases(leases[1:])
    assert view.selected(fewer) == len(leases) - 2
    assert view.selected(snapshot.with_leases(leases[:1])) == 0
    assert view.selected(replace(snapshot, leases=())) is None


def test_it_has_the_keys_that_are_promised_on_one_line_unless_it_is_to_be_read() -> None:
    assert "\n" not in to_json(sample_snapshot(2))
    assert json.loads(to_json(sample_snapshot(2), indent=1)) == json.loads(to_json(sample_snapshot(2)))
    told = json.loads(to_json(replace(sample_snapshot(1), unix_seconds=1_795_000_000.25)))
    assert told["time"] == 1_795_000_000.25 and json.loads(to_json(sample_snapshot(1)))["time"] is None
    assert list(told) == ["time", "source", "monitor_pid", "devices", "leases", "leases_error", "reservations"]
    assert (told["source"], told["monitor_pid"]) == ("nvml+host", 4242)
    device = told["devices"][0]
    assert list(device) == [
        "uuid", "index", "kind", "name", "pci_id", "parent_uuid", "memory",
        "utilization", "temperature_celsius", "power_watts", "power_limit_watts", "processes", "owners", "detail_error",
    ]  # fmt: skip
    assert list(device["memory"]) == [
        "total_bytes", "used_bytes", "free_bytes", "bytes_per_second", "seconds_until_exhaustion",
        "age_seconds", "stale", "polls", "failures", "error",
    ]  # fmt: skip
    assert list(device["processes"][0]) == [
        "pid", "used_bytes", "kind", "user", "command", "engine", "cgroup", "idle_seconds", "container", "pod", "unit",
    ]  # fmt: skip
    names = ["kind", "name", "num_processes", "used_bytes", "unknown", "idle_bytes"]
    assert device["owners"] and all(list(owner) == names for owner in device["owners"])
    assert (device["index"], device["kind"], device["memory"]["total_bytes"]) == ("0", "gpu", H200_BYTES)


def test_leases_that_are_not_known_are_null_and_not_none() -> None:
    told = json.loads(to_json(replace(sample_snapshot(1), leases_error="the broker did not answer")))
    assert (told["leases"], told["leases_error"], told["reservations"]) == (None, "the broker did not answer", None)
    assert json.loads(to_json(sample_snapshot(1)))["leases_error"] is None
    known = replace(sample_snapshot(1), leases_error="the broker did not answer").with_leases([])
    assert json.loads(to_json(known))["leases"] == json.loads(to_json(sample_snapshot(1)))["leases"] == []
    told = json.loads(to_json(known.with_leases(sample_leases(1))))["leases"]
    assert list(told[0]) == [
        "engine", "pid", "user", "device_uuid", "min_bytes", "max_bytes", "weight", "priority", "granted_bytes",
        "held_bytes", "held_by_class", "spare_bytes", "asked_bytes", "state", "recall_target_bytes", "recall_age_seconds",
        "kept_bytes", "num_waiting",
    ]  # fmt: skip
    assert [LeaseUse(**lease) for lease in told] == list(sample_leases(1))


def test_what_is_not_known_is_null() -> None:
    device = json.loads(to_json(snapshot_of(dead(sample_device(0)))))["devices"][0]
    assert device["memory"]["used_bytes"] is device["memory"]["bytes_per_second"] is device["processes"] is None
    assert device["memory"]["error"] == device["detail_error"] == "GPU is lost"


def test_numbers_and_text_that_json_does_not_have_are_not_written() -> None:
    device = sample_device(0, bytes_per_second=5e-324)  # a trend that died away
    assert device.memory.seconds_until_exhaustion == float("inf")
    process = ProcessUse(1, None, command="train \udcff\x1b[0m\u202e.py")
    device = replace(device, detail=replace(device.detail, reading=DetailReading(processes=(process,))))
    text = to_json(snapshot_of(device))
    assert text.isascii() and text.isprintable()
    told = json.loads(text)["devices"][0]
    assert told["memory"]["seconds_until_exhaustion"] is None
    assert told["processes"][0]["command"] == "train ?\x1b[0m\u202e.py"
    lease = replace(sample_leases(1)[0], engine="\udcff", held_by_class={"kv\udcff": 1})
    (told,) = json.loads(to_json(snapshot_of().with_leases([lease])))["leases"]
    assert (told["engine"], told["held_by_class"]) == ("?", {"kv?": 1})


def engines(device: Device) -> dict[int, str | None]:
    return {use.pid: use.engine for use in device.detail.reading.processes or ()}


def lease_on(device: Device, pid: int, engine: str) -> LeaseUse:
    return sample_lease(engine, pid, device.info.uuid, 8, held=8)


def test_processes_get_the_names_of_the_leases_on_their_device() -> None:
    gpu, other, host = sample_device(0), sample_device(1), host_device()
    assert (engines(gpu)[41877], engines(host)[41877]) == (None, None)
    leases = [lease_on(gpu, 41877, "tide"), lease_on(other, 40988, "new-name"), lease_on(gpu, 999_999, "elsewhere")]
    snapshot = snapshot_of(gpu, other, host).with_leases(leases)
    assert snapshot.leases == tuple(leases)
    named, renamed, untouched = snapshot.devices
    assert engines(named) == engines(gpu) | {41877: "tide"}
    assert engines(renamed) == engines(other) | {40988: "new-name"}
    assert untouched == host
    # All else stays as it was, and newer leases replace older ones.
    before = snapshot_of(gpu, dead(sample_device(1)))
    after = before.with_leases([lease_on(gpu, 41877, "tide")])
    assert replace(after, devices=before.devices, leases=()) == before
    assert (after.devices[0].memory, after.devices[1]) == (gpu.memory, before.devices[1])
    snapshot = sample_snapshot(2)
    assert snapshot.with_leases([]) == snapshot
    assert snapshot.with_leases(sample_leases()).with_leases(sample_leases(1)).leases == sample_leases(1)


def parts(held_bytes: int, **reported: int) -> dict[str, int]:
    return replace(sample_leases(1)[0], held_bytes=held_bytes, held_by_class=reported).held_parts()


def test_what_is_held_is_divided_by_the_report() -> None:
    assert parts(10, weights=4, kv=3, other=3) == {"weights": 4, "kv": 3, "other": 3}
    assert parts(10, weights=4, kv=3, graphs=2, other=1) == {"weights": 4, "kv": 3, "other": 3}
    assert parts(10) == {"weights": 0, "kv": 0, "other": 10}  # nothing is reported yet
    assert parts(12, weights=4, kv=3, other=3) == {"weights": 4, "kv": 3, "other": 5}  # more than at the last report
    assert parts(5, weights=4, kv=3, other=3) == {"weights": 4, "kv": 1, "other": 0}  # less


@given(st.integers(0, 1 << 62), st.dictionaries(st.sampled_from(["weights", "kv", "other"]), st.integers(0, 1 << 62)))
def test_the_parts_are_always_the_whole(held_bytes: int, reported: dict[str, int]) -> None:
    divided = parts(held_bytes, **reported)
    assert sum(divided.values()) == held_bytes
    assert min(divided.values()) >= 0
