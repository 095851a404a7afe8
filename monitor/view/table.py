"""Columns of a table: which of them fit into a line, their widths and cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .symbols import Symbols
from .text import DIM, Line, blank, left, right

GAP = 2  # cells between two columns
MOST_NAME = 14  # cells of a user or engine name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column for items of type T."""

    title: str
    width: int  # cells; the minimum for a column that stretches
    priority: int  # if room is short, the lowest is dropped first
    cell: Callable[[T, int], Line]  # exactly as many cells as requested
    flush_right: bool = False
    stretches: bool = False  # takes the remaining width


def fitting(columns: Sequence[Column[T]], room: int) -> list[Column[T]]:
    """The most important of `columns` that fit into `room` cells, in the given order; columns without width are dropped."""
    chosen = [column for column in columns if column.width]
    while chosen and table_width(chosen) > room:
        chosen.remove(min(chosen, key=lambda column: column.priority))
    spare = room - table_width(chosen)
    return [replace(column, width=column.width + spare) if column.stretches else column for column in chosen]


def table_width(columns: Sequence[Column[T]]) -> int:
    """Cells of a line."""
    return sum(column.width for column in columns) + GAP * max(len(columns) - 1, 0)


def widest(title: str, texts: Iterable[str | None], most: int = MOST_NAME) -> int:
    """Cells for the title and the longest of `texts`, capped at `most`; 0 if all are unknown or empty."""
    longest = max((len(text) for text in texts if text), default=0)
    return max(len(title), min(longest, most)) if longest else 0


def titles(columns: Sequence[Column[T]], symbols: Symbols) -> Line:
    """The header line."""
    cells = [(right if column.flush_right else left)(column.title, column.width, symbols, DIM) for column in columns]
    return _spaced([[cell] for cell in cells])


def row(columns: Sequence[Column[T]], item: T) -> Line:
    """The line of `item`."""
    return _spaced([column.cell(item, column.width) for column in columns])


def _spaced(cells: Sequence[Line]) -> Line:
    line: Line = []
    for number, cell in enumerate(cells):
        line += [blank(GAP), *cell] if number else cell
    return line
