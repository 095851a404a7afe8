"""The symbols of the view, in Unicode and in ASCII: bars, charts, marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Symbols:
    """A set of characters, each one cell wide."""

    ascii_only: bool
    bar: str  # a used cell
    half: str  # a cell with its left half used
    rest: str  # a free cell
    levels: str  # eight heights of a column, the last one full
    ellipsis: str
    dash: str  # for unknown values
    degree: str
    dot: str  # between two facts
    descending: str
    ascending: str


UNICODE = Symbols(
    ascii_only=False,
    bar="━",
    half="╾",
    rest="─",
    levels="▁▂▃▄▅▆▇█",
    ellipsis="…",
    dash="–",
    degree="°",
    dot="·",
    descending="▾",
    ascending="▴",
)
ASCII = Symbols(
    ascii_only=True,
    bar="#",
    half="#",
    rest="-",
    levels=".,:-=+*#",
    ellipsis="...",
    dash="-",
    degree="",
    dot="-",
    descending="v",
    ascending="^",
)


def bar(share: float | None, width: int, symbols: Symbols) -> tuple[str, str]:
    """(used part, free part) of a bar `width` cells wide, exact to half a cell; `share` 0..1, None if unknown."""
    if share is None or not math.isfinite(share) or width < 1:
        return "", symbols.rest * max(width, 0)
    halves = round(min(max(share, 0.0), 1.0) * 2 * width)
    used = symbols.bar * (halves // 2) + symbols.half * (halves % 2)
    return used, symbols.rest * (width - len(used))


def stacked_bar(shares: Sequence[float], width: int, symbols: Symbols) -> tuple[list[str], str]:
    """(a piece for each of `shares`, free part): `bar` of their sum, each piece ending at the nearest cell."""
    used, rest = bar(sum(shares), width, symbols)
    ends = [min(round(share * width), len(used)) for share in accumulate(shares)]
    return [used[begin:end] for begin, end in pairwise([0, *ends[:-1], len(used)])], rest


def chart_columns(history: Sequence[int | None], width: int, newest: int) -> list[int | None]:
    """The newest part of `history` in at most `width` columns, oldest first: the maximum of each, None if unknown.

    `newest` is the number of the last value; values are numbered consecutively. Values share a column by number, so a
    column keeps its values while the chart moves to the left.
    """
    if width < 1:
        return []
    size = max(1, len(history) // width)
    columns: list[int | None] = []
    for number, value in enumerate(history, start=newest - len(history) + 1):
        if not columns or number % size == 0:
            columns.append(value)
        elif value is not None:
            columns[-1] = value if columns[-1] is None else max(columns[-1], value)
    return columns[-width:]


def chart_reach(samples: int, width: int) -> int:
    """How many of the last `samples` values `chart_columns` shows, up to the last column's share."""
    return min(samples, width * max(1, samples // width)) if width > 0 else 0


def chart(columns: Sequence[float | None], rows: int, symbols: Symbols) -> list[str]:
    """`rows` lines, the highest first, of columns between 0 and 1; a known zero is visible, an unknown value is blank."""
    heights = [0 if share is None else min(max(round(share * rows * 8), 1), rows * 8) for share in columns]
    return [
        "".join(" " if (height := total - 8 * below) <= 0 else symbols.levels[min(height, 8) - 1] for total in heights)
        for below in range(rows - 1, -1, -1)
    ]
