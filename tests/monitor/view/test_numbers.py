"""Amounts, rates and times as they are written."""

from __future__ import annotations

import pytest

from pagetide.monitor.units import GIB, MIB
from pagetide.monitor.view.numbers import amount, brief, duration, full_in, percent, rate, share_of, used_of_total


def test_shares_and_percentages() -> None:
    assert share_of(1, 4) == 0.25
    assert share_of(None, 4) is share_of(1, None) is share_of(1, 0) is None
    assert [percent(share, "–") for share in (0.0, 0.704, 1.0, None, float("nan"))] == ["0%", "70%", "100%", "–", "–"]


def test_amounts_have_the_unit_that_suits_them() -> None:
    assert amount(None, "–") == "–"
    assert [amount(b, "–") for b in (0, 614 * MIB, 1000 * MIB, 98 * GIB + 205 * MIB, 1007 * GIB)] == [
        "0 MiB", "614 MiB", "1.0 GiB", "98.2 GiB", "1007 GiB",
    ]  # fmt: skip


def test_used_and_total_share_a_unit() -> None:
    assert used_of_total(98 * GIB, 141 * GIB, "–") == ("98.0", "141.0", "GiB")
    assert used_of_total(98 * GIB, 1007 * GIB, "–") == ("98", "1007", "GiB")
    assert used_of_total(90 * MIB, 512 * MIB, "–") == ("90", "512", "MiB")
    assert used_of_total(None, 141 * GIB, "–") == ("–", "141.0", "GiB")
    assert used_of_total(None, None, "–") == ("–", "–", "GiB")


@pytest.mark.parametrize(
    ("bytes_per_second", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (0.0, "steady"),
        (-0.04 * MIB, "steady"),
        (12.3 * MIB, "+12.3 MiB/s"),
        (-1.4 * MIB, "-1.4 MiB/s"),
        (2.5 * GIB, "+2.5 GiB/s"),
    ],
)
def test_rates(bytes_per_second: float | None, text: str) -> None:
    assert rate(bytes_per_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (float("inf"), ""),
        (3601.0, ""),
        (3599.0, "full in 59 min"),
        (59.9, "full in 59 s"),
        (0.2, "full now"),
    ],
)
def test_the_end_of_memory_is_told_within_an_hour(seconds: float | None, text: str) -> None:
    assert full_in(seconds) == text


def test_durations_are_rounded_down() -> None:
    assert [duration(s) for s in (0.0, 59.9, 60, 3599, 3600, 86_399, 86_400, 200_000)] == [
        "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "2 d",
    ]  # fmt: skip
    assert [brief(s) for s in (0.0124, 0.999, 1.0, 61)] == ["12 ms", "999 ms", "1 s", "1 min"]
