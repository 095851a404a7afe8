"""Amounts of memory, read and written."""

from __future__ import annotations

import pytest

from pagetide.common.units import format_bytes, format_seconds, parse_bytes, parse_seconds


def test_parse_bytes() -> None:
    amounts = {
        1: 1, "17": 17, "2GiB": 2 << 30, "512MiB": 512 << 20, "1.5G": 3 << 29, "1.5 gib": 3 << 29, "2GB": 2 * 10**9,
        "4k": 4096, " 3 MB ": 3_000_000, "1T": 1 << 40, ".5KiB": 512, "9007199254740993": 9007199254740993,
    }  # fmt: skip
    assert [parse_bytes(text) for text in amounts] == list(amounts.values())
    for text in ("", "GiB", "-1", "1e9", "1 PiB", "10%", "two", 0, -5, True, 1.5, None, "0", "0.1B", "inf"):
        with pytest.raises(ValueError, match="memory"):
            parse_bytes(text)  # type: ignore[arg-type]


def test_times() -> None:
    times = {
        2: 2.0,
        "7200": 7200.0,
        "2h": 7200.0,
        "1.5 min": 90.0,
        "5m": 300.0,
        " 90s ": 90.0,
        "20ms": 0.02,
        "1d": 86400.0,
        ".5h": 1800.0,
        0: 0.0,
    }
    assert [parse_seconds(text) for text in times] == list(times.values())
    for text in (
        "",
        "h",
        "-1",
        -1,
        "1 week",
        "2H",
        "nan",
        float("nan"),
        float("inf"),
        10**400,
        "9" * 400,
        True,
        None,
        "1h30min",
    ):
        with pytest.raises(ValueError, match="as a time"):
            parse_seconds(text)  # type: ignore[arg-type]
    shown = {0.0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 86_399: "23 h", 86_400: "1 d", 200_000: "2 d"}
    assert [format_seconds(seconds) for seconds in shown] == list(shown.values()), "rounded down"


def test_format_bytes() -> None:
    amounts = [format_bytes(n) for n in (0, 1, 1023, 1024, 3 << 29, 5 << 40, -(3 << 20))]
    assert amounts == ["0 bytes", "1 byte", "1023 bytes", "1.00 KiB", "1.50 GiB", "5.00 TiB", "-3.00 MiB"]
