"""Which columns fit, and who takes what is left."""

from __future__ import annotations

from rich.segment import Segment

from pagetide.monitor.view.symbols import UNICODE
from pagetide.monitor.view.table import Column, fitting, row, table_width, titles, widest
from pagetide.monitor.view.text import Line, left, right


def name(item: str, cells: int) -> Line:
    return [left(item, cells, UNICODE)]


def length(item: str, cells: int) -> Line:
    return [right(str(len(item)), cells, UNICODE)]


COLUMNS = [
    Column("NAME", 6, 3, name),
    Column("LENGTH", 6, 1, length, flush_right=True),
    Column("", 0, 9, length),
    Column("AGAIN", 4, 2, name, stretches=True),
]


def text_of(line: Line) -> str:
    return "".join(segment.text for segment in line)


def test_all_fit_and_one_takes_what_is_left() -> None:
    columns = fitting(COLUMNS, 26)
    assert [(column.title, column.width) for column in columns] == [("NAME", 6), ("LENGTH", 6), ("AGAIN", 10)]
    assert table_width(columns) == 26
    assert text_of(titles(columns, UNICODE)) == "NAME    LENGTH  AGAIN     "
    assert text_of(row(columns, "pagetide")) == "paget…       8  pagetide  "


def test_the_least_important_goes_first() -> None:
    assert [[column.title for column in fitting(COLUMNS, room)] for room in (20, 19, 12, 11, 6, 5)] == [
        ["NAME", "LENGTH", "AGAIN"], ["NAME", "AGAIN"], ["NAME", "AGAIN"], ["NAME"], ["NAME"], [],
    ]  # fmt: skip
    assert [table_width(fitting(COLUMNS, room)) for room in (19, 12, 11)] == [19, 12, 6]


def test_a_column_is_as_wide_as_its_longest_text_within_limits() -> None:
    assert widest("NAME", ["ab", None, "abcdef", ""]) == 6
    assert widest("NAME", ["ab"]) == 4
    assert widest("NAME", ["x" * 99]) == 14
    assert widest("NAME", ["x" * 99], most=30) == 30
    assert widest("NAME", [None, ""]) == widest("NAME", []) == 0


def test_without_columns_there_is_nothing() -> None:
    assert fitting(COLUMNS, -3) == []
    assert (titles([], UNICODE), row([], "x"), table_width([])) == ([], [], 0)
    assert row(COLUMNS[:1], "x") == [Segment("x     ")]
