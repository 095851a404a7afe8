"""The table of leases: its columns and their order, what is said of each state, and which of them find room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.segment import Segment
from rich.style import Style
from snapshots import sample_device, sample_lease, sample_leases

from pagetide.monitor.snapshot import LeaseUse
from pagetide.monitor.units import GIB, MIB
from pagetide.monitor.view.leases import lease_lines
from pagetide.monitor.view.listing import Listing
from pagetide.monitor.view.symbols import ASCII, UNICODE
from pagetide.monitor.view.text import ALARM, BUSY, DIM, ENGINE, OTHER, YELLOW

DEVICES = (sample_device(0), sample_device(1))
UUID = DEVICES[0].info.uuid
SAMPLE = sample_leases()


def lines_of(*leases: LeaseUse, width: int = 160, most: int | None = None) -> list[list[Segment]]:
    return lease_lines(Listing().leases(leases, DEVICES), DEVICES, width=width, most=most, symbols=UNICODE)


def text_of(*leases: LeaseUse, width: int = 160, most: int | None = None) -> list[str]:
    return ["".join(segment.text for segment in line).rstrip() for line in lines_of(*leases, width=width, most=most)]


def a_lease(engine: str = "a", pid: int = 1, granted: float = 8, uuid: str = UUID, **changes: object) -> LeaseUse:
    lease = sample_lease(engine, pid, uuid, granted, held=granted)
    return replace(lease, **changes)  # type: ignore[arg-type]


def styles_of(line: list[Segment], text: str) -> Style | None:
    """The style of the only piece of `line` in which `text` stands."""
    (style,) = [segment.style for segment in line if text in segment.text]
    return style


# ---- columns ------------------------------------------------------------------------------------


def test_all_of_a_lease_is_told_where_there_is_room() -> None:
    assert text_of(*SAMPLE) == [
        "DEV    PID  ENGINE       USER         MIN                           HELD / GRANTED       FREE        MAX  STATE",
        "  0  40961  llama-8b     ada     20.0 GiB  ━━━━━━━━━━━━━━━━────   62.4 /  78.0 GiB    410 MiB       none"
        "  ok, asks for 96.0 GiB",
        "  0  43210  embed-small  ada      4.0 GiB  ━━━━━━━━━━━━━━━─────   18.0 /  24.0 GiB   11.5 GiB   32.0 GiB"
        "  recalling to 8.5 GiB, 340 ms",
        "  1  40988  qwen3-32b    ada     70.0 GiB  ━━━━━━━━━━━━━━━━━━━━  104.5 / 104.5 GiB      0 MiB       none"
        "  overdue to 88.0 GiB, 12 s",
        "  1  39007  judge-1b     grace      0 MiB  ━━━━━━━━━━━━━━━━━───    614 /   717 MiB      0 MiB       none  reaping",
    ]


def test_where_there_is_little_the_engine_its_state_and_its_bytes_stay() -> None:
    assert text_of(*SAMPLE, width=40) == [
        "ENGINE         HELD / GRANTED  STATE",
        "llama-8b     62.4 /  78.0 GiB  ok",
        "embed-sma…   18.0 /  24.0 GiB  recalling",
        "qwen3-32b   104.5 / 104.5 GiB  overdue",
        "judge-1b      614 /   717 MiB  reaping",
    ]
    assert text_of(*SAMPLE, width=21)[1:3] == ["llama-8b    ok", "embed-sma…  recalling"]
    assert text_of(*SAMPLE, width=12)[1] == "llama-8b"


def test_a_maximum_that_nobody_has_takes_no_room() -> None:
    assert "MAX" not in text_of(a_lease())[0]
    assert "MAX" in text_of(a_lease(max_bytes=GIB))[0]


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        (("chat", "judge"), False),
        (("chat", "chat"), True),
        (("a-very-long-name-1", "b"), True),  # cut: it could not be typed
        (("chat\x1b", "judge"), True),
    ],
)
def test_process_ids_are_told_first_where_names_do_not_tell_engines_apart(engines: tuple[str, ...], told: bool) -> None:
    """At 80 cells, in which not all has room."""
    leases = [a_lease(engine, pid=70_001 + number) for number, engine in enumerate(engines)]
    recalled = replace(leases[0], state="recalling", recall_target_bytes=4 * GIB, recall_age_seconds=0.25)
    head, *rows = text_of(recalled, *leases[1:], width=78)
    assert ("PID" in head) is told
    assert ["7000" in row for row in rows] == [told] * 2


def test_a_device_that_is_not_there_has_no_index() -> None:
    rows = text_of(a_lease("here"), a_lease("gone", uuid="GPU-gone"))[1:]
    assert [row.split()[0] for row in rows] == ["0", "–"]


# ---- order --------------------------------------------------------------------------------------


def test_by_device_and_then_the_largest_first() -> None:
    second = DEVICES[1].info.uuid
    leases = (
        a_lease("d", granted=9, uuid=second),
        a_lease("b", granted=8),
        a_lease("c", granted=3),
        a_lease("a", granted=8),
        a_lease("e", granted=7, uuid=second),
        a_lease("f", pid=2, granted=7, uuid=second),
        a_lease("f", pid=1, granted=7, uuid=second),
    )
    rows = [row.split() for row in text_of(*leases)[1:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("0", "1", "a"), ("0", "1", "b"), ("0", "1", "c"),
        ("1", "1", "d"), ("1", "1", "e"), ("1", "1", "f"), ("1", "2", "f"),
    ]  # fmt: skip


# ---- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told", "style"),
    [
        ({}, "ok", DIM),
        ({"asked_bytes": 9 * GIB}, "ok, asks for 9.0 GiB", DIM),
        ({"state": "recalling", "recall_target_bytes": 0, "recall_age_seconds": 0.012}, "recalling to 0 MiB, 12 ms", YELLOW),
        ({"state": "recalling", "recall_target_bytes": GIB, "recall_age_seconds": None}, "recalling to 1.0 GiB", YELLOW),
        ({"state": "overdue", "recall_target_bytes": GIB, "recall_age_seconds": 75.0}, "overdue to 1.0 GiB, 1 min", ALARM),
        ({"state": "reaping"}, "reaping", YELLOW),
        ({"state": "reaping", "recall_target_bytes": GIB, "recall_age_seconds": 3.0}, "reaping", YELLOW),
        ({"state": "something new"}, "something new", None),
    ],
)  # fmt: skip
def test_a_state_says_what_is_wanted_and_since_when(changes: dict[str, object], told: str, style: Style | None) -> None:
    line = lines_of(a_lease(**changes))[1]
    assert line[-1].text.rstrip() == told
    assert line[-1].style == style


# ---- what is held -------------------------------------------------------------------------------


def drawn(lease: LeaseUse) -> list[tuple[str, Style | None]]:
    """The bar of eight cells."""
    line = lines_of(lease, width=60)[1]
    symbols = {UNICODE.bar, UNICODE.half, UNICODE.rest}
    return [(segment.text, segment.style) for segment in line if segment.text and set(segment.text) <= symbols]


def test_the_bar_shows_weights_then_the_rest_then_kv() -> None:
    lease = a_lease(granted=8, held_bytes=6 * GIB, held_by_class={"weights": 3 * GIB, "kv": 2 * GIB, "other": GIB})
    assert drawn(lease) == [("━━━", BUSY), ("━", OTHER), ("━━", ENGINE), ("──", DIM)]


def test_what_was_never_reported_is_other() -> None:
    assert drawn(a_lease(granted=8, held_bytes=4 * GIB, held_by_class={})) == [("━━━━", OTHER), ("────", DIM)]


def test_what_is_held_beyond_the_grant_fills_the_bar() -> None:
    assert drawn(a_lease(granted=2, held_bytes=4 * GIB, held_by_class={"kv": 4 * GIB})) == [("━━━━━━━━", ENGINE)]
    assert drawn(a_lease(granted=0)) == [("────────", DIM)]


# ---- room ---------------------------------------------------------------------------------------


def test_those_left_out_are_counted_and_those_overdue_among_them_are_an_alarm() -> None:
    leases = [a_lease(f"engine-{number}", granted=10 - number) for number in range(4)]
    leases[3] = replace(leases[3], state="overdue")
    assert len(text_of(*leases, most=5)) == 5
    lines = lines_of(*leases, most=4)
    assert ["".join(segment.text for segment in line).split()[2] for line in lines[1:3]] == ["engine-0", "engine-1"]
    assert lines[-1] == [Segment("… 2 more leases with 15.0 GiB, 1 overdue", ALARM)]
    assert lines_of(*leases[:3], most=3)[-1] == [Segment("… 2 more leases with 17.0 GiB", DIM)]
    assert (
        lines_of(*leases, most=2)
        == lines_of(*leases, most=1)
        == [[Segment("… 4 leases with 34.0 GiB, 1 overdue", ALARM)]]
    )
    assert lines_of(leases[0], most=1) == [[Segment("… 1 lease with 10.0 GiB", DIM)]]
    assert lines_of(*leases, most=0) == lines_of(*leases, most=-3) == []


def test_without_leases_there_is_nothing() -> None:
    assert lines_of() == lines_of(most=9) == []


def test_names_of_others_are_cut_and_neutralised() -> None:
    evil = "\x1b[2J\r\nline\u202e[red]" + "x" * 5000
    hostile = a_lease(evil, user=evil, uuid=evil, state=evil, max_bytes=1 << 62, min_bytes=1 << 62)
    for width in (20, 40, 80, 200):
        for symbols in (UNICODE, ASCII):
            for line in lease_lines([hostile], DEVICES, width=width, most=None, symbols=symbols):
                text = "".join(segment.text for segment in line)
                assert text.isprintable()
                assert len(text) <= width
                assert symbols is UNICODE or text.isascii()


def test_amounts_of_mixed_units_stand_in_line() -> None:
    head, *rows = text_of(a_lease("a", granted=100), a_lease("b", held_bytes=5 * MIB, granted_bytes=900 * MIB))
    end = head.index("HELD / GRANTED") + len("HELD / GRANTED")
    assert [row[:end][-19:] for row in rows] == ["  100.0 / 100.0 GiB", "      5 /   900 MiB"]
