"""Bars and charts, cell by cell, and against a naive grouping of the history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols, bar, chart, chart_columns, chart_reach, stacked_bar


@pytest.mark.parametrize("symbols", [UNICODE, ASCII])
def test_every_symbol_takes_one_cell(symbols: Symbols) -> None:
    assert [len(s) for s in (symbols.bar, symbols.half, symbols.rest, symbols.dash, symbols.dot)] == [1] * 5
    assert len(symbols.levels) == len(set(symbols.levels)) == 8
    assert ASCII.levels.isascii()


@pytest.mark.parametrize(
    ("share", "drawn"),
    [
        (0.0, "────"),
        (0.06, "────"),
        (0.07, "╾───"),
        (0.5, "━━──"),
        (0.63, "━━╾─"),
        (1.0, "━━━━"),
        (1.7, "━━━━"),
        (-0.5, "────"),
        (None, "────"),
        (float("nan"), "────"),
        (float("inf"), "────"),
    ],
)
def test_a_bar_is_exact_to_half_a_cell(share: float | None, drawn: str) -> None:
    assert "".join(bar(share, 4, UNICODE)) == drawn


def test_a_bar_without_room_is_empty() -> None:
    assert bar(0.5, 0, UNICODE) == bar(0.5, -3, UNICODE) == ("", "")


def test_a_stacked_bar_is_the_bar_of_the_sum_in_pieces() -> None:
    assert stacked_bar([0.25, 0.25, 0.25], 8, UNICODE) == (["━━", "━━", "━━"], "──")
    assert stacked_bar([0.0, 0.0], 4, UNICODE) == (["", ""], "────")
    assert stacked_bar([0.5, 0.0, 0.13], 4, UNICODE) == (["━━", "", "╾"], "─")
    assert stacked_bar([0.9, 0.9], 4, UNICODE) == (["━━━━", ""], "")
    assert stacked_bar([0.5, 0.5], 0, UNICODE) == (["", ""], "")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 40))
def test_pieces_of_a_stacked_bar_are_the_bar_and_exact_to_a_cell(shares: list[float], width: int) -> None:
    pieces, rest = stacked_bar(shares, width, UNICODE)
    assert ("".join(pieces), rest) == bar(sum(shares), width, UNICODE)
    if sum(shares) <= 1:
        assert all(abs(len(piece) - share * width) <= 1.5 for piece, share in zip(pieces, shares, strict=True))


def test_a_chart_has_eight_heights_a_line() -> None:
    eighths = [height / 8 for height in range(9)]
    assert chart(eighths, 1, UNICODE) == ["▁▁▂▃▄▅▆▇█"]  # a known zero is seen
    assert chart([0.0, 0.25, 0.5, 0.625, 1.0, 1.5, None], 2, UNICODE) == ["   ▂██ ", "▁▄████ "]
    assert chart([0.0, 0.5, 1.0, None], 1, ASCII) == [".-# "]
    assert chart([], 3, UNICODE) == ["", "", ""]
    assert chart([0.5], 0, UNICODE) == []


def test_a_column_of_a_chart_is_the_highest_of_its_values() -> None:
    history = [1, 9, 2, 3, None, 4, None, None]
    assert chart_columns(history, 8, newest=7) == history
    assert chart_columns(history, 4, newest=7) == [9, 3, 4, None]
    assert chart_columns(history, 2, newest=7) == [9, 4]
    assert chart_columns(history, 3, newest=7) == [3, 4, None]
    assert chart_columns(history, 0, newest=7) == []
    assert chart_columns([], 5, newest=7) == []


@given(st.lists(st.none() | st.integers(0, 99), max_size=80), st.integers(1, 30), st.integers(0, 1000))
def test_columns_are_groups_of_values_by_their_number(history: list[int | None], width: int, newest: int) -> None:
    size = max(1, len(history) // width)
    groups: dict[int, list[int]] = {}
    for number, value in zip(range(newest - len(history) + 1, newest + 1), history, strict=True):
        groups.setdefault(number // size, []).extend([] if value is None else [value])
    expected = [max(values, default=None) for _, values in sorted(groups.items())]
    assert chart_columns(history, width, newest) == expected[-width:]


def test_a_full_history_moves_by_whole_columns() -> None:
    everything = [(second * 37) % 101 for second in range(400)]
    before = chart_columns(everything[:256], 64, newest=255)
    later = chart_columns(everything[4:260], 64, newest=259)
    assert later[:-1] == before[1:]
    # A second later the newest column has begun; those before it are what they were.
    assert chart_columns(everything[1:257], 64, newest=256)[:-1] == before[1:]


def test_how_far_back_a_chart_reaches() -> None:
    assert [chart_reach(256, width) for width in (300, 256, 200, 100, 60, 1, 0)] == [256, 256, 200, 200, 240, 256, 0]
    assert chart_reach(5, 60) == 5
