"""Terminal text: neutralised, measured in cells, cut and padded. A line is a list of rich's segments.

Names and command lines come from other users' processes. Only printable characters of a known width may reach the
terminal: no escape sequence, no line break, no mark that changes the writing direction.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len, get_character_cell_size
from rich.segment import Segment
from rich.style import Style

from .symbols import Symbols

Line = list[Segment]

DIM, BOLD, REVERSE = Style(dim=True), Style(bold=True), Style(reverse=True)
GREEN, YELLOW, RED = Style(color="green"), Style(color="yellow"), Style(color="red")
ALARM = Style(color="red", bold=True)
BUSY = Style(color="blue")
ENGINE = Style(color="cyan")
OTHER = Style(color="magenta")

_MOST_CHARACTERS = 1024  # more than any terminal's width; a command line may have two million


def printable(text: str, *, ascii_only: bool) -> str:
    """`text` on one line: runs of white space become one space, unprintable characters "\N{REPLACEMENT CHARACTER}" or "?"."""
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():
        return text
    unknown = "?" if ascii_only else "\N{REPLACEMENT CHARACTER}"
    shown = []
    for character in unicodedata.normalize("NFC", text):
        if not character.isprintable() or (ascii_only and not character.isascii()):
            shown.append(unknown)
        elif get_character_cell_size(character):  # a zero-width mark is dropped
            shown.append(character)
    return "".join(shown)


def cut(text: str, width: int, symbols: Symbols) -> str:
    """`text`, neutralised, in at most `width` cells; ends in "…" if cut."""
    longer = len(text) > _MOST_CHARACTERS
    return _cut(text[:_MOST_CHARACTERS], longer, width, symbols)


@lru_cache(maxsize=1024)  # the same names and commands recur every second
def _cut(text: str, longer: bool, width: int, symbols: Symbols) -> str:
    text = printable(text, ascii_only=symbols.ascii_only)
    if not longer and cell_len(text) <= width:
        return text
    room = width - len(symbols.ellipsis)
    if room < 0:
        return symbols.ellipsis[: max(width, 0)]
    cells = 0
    for index, character in enumerate(text):
        cells += get_character_cell_size(character)
        if cells > room:
            return text[:index] + symbols.ellipsis
    return text + symbols.ellipsis


def left(text: str, width: int, symbols: Symbols, style: Style | None = None) -> Segment:
    """A table cell: cut, and padded with spaces on its right."""
    text = cut(text, width, symbols)
    return Segment(text + " " * (width - cell_len(text)), style)


def right(text: str, width: int, symbols: Symbols, style: Style | None = None) -> Segment:
    """A table cell: cut, and padded with spaces on its left."""
    text = cut(text, width, symbols)
    return Segment(" " * (width - cell_len(text)) + text, style)


def blank(width: int) -> Segment:
    """`width` spaces."""
    return Segment(" " * width)


def width_of(line: Iterable[Segment]) -> int:
    """Cells of `line`."""
    return sum(segment.cell_length for segment in line)


def spread(left_part: Line, right_part: Line, width: int) -> Line:
    """`left_part` at the left edge and `right_part` at the right edge; what does not fit is cropped at the right."""
    gap = width - width_of(left_part) - width_of(right_part)
    return crop([*left_part, blank(max(gap, 1)), *right_part], width)


def crop(line: Line, width: int) -> Line:
    """`line` cut to at most `width` cells."""
    return line if width_of(line) <= width else Segment.adjust_line_length(line, width, pad=False)


def trimmed(line: Line) -> Line:
    """`line` without trailing spaces."""
    line = list(line)
    while line and not (text := line[-1].text.rstrip(" ")):
        line.pop()
    return [*line[:-1], Segment(text, line[-1].style)] if line else []
