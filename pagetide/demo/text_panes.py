"""Panes of streaming text: the end of a request's prompt, dim, and what is generated so far, wrapped to the pane."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment

from ..monitor.view.symbols import Symbols
from ..monitor.view.text import BOLD, DIM, Line, blank, crop, cut, printable, width_of
from .block_map import letter_of, style_of

MOST_CHARACTERS = 6000  # of a text that is shown
SIDE_BY_SIDE = 76  # cells; narrower pages have one pane above the other
_LEAST_LINES = 3  # of a pane


@dataclass(frozen=True, slots=True)
class Pane:
    """A request whose text is shown: its number, a word on its state, its prompt and its text so far."""

    number: int
    state: str
    prompt: str
    text: str


def pane_lines(panes: tuple[Pane, ...], width: int, height: int, symbols: Symbols) -> list[Line]:
    """`panes` in `height` lines, side by side if the width allows, else as many as fit one above the other."""
    if not panes or height < 2:
        return []
    if width >= SIDE_BY_SIDE and len(panes) > 1:
        inner = (width - 3 * (len(panes) - 1)) // len(panes)
        columns = [_padded(_pane(pane, inner, height, symbols), inner, height) for pane in panes]
        bar = Segment(" | " if symbols.ascii_only else " │ ", DIM)
        return [
            list(itertools.chain.from_iterable([bar, *part] if i else part for i, part in enumerate(parts)))
            for parts in zip(*columns, strict=True)
        ]
    shown = panes[: max(1, height // _LEAST_LINES)]
    each = height // len(shown)
    return [line for pane in shown for line in _padded(_pane(pane, width, each, symbols), width, each)]


def _pane(pane: Pane, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The title, then the last lines of the text."""
    title: Line = [Segment(f" {letter_of(pane.number)} ", style_of(pane.number)), blank(1)]
    title.append(Segment(cut(pane.state, max(width - 4, 0), symbols), BOLD))
    text = pane.text[-MOST_CHARACTERS:]
    prompt = _one_line(pane.prompt[-MOST_CHARACTERS:], symbols)
    text = " " * text[:1].isspace() + _one_line(text, symbols)  # a space between the two stays
    lines = wrapped(prompt, text, width)
    return [title, *(lines[-(height - 1) :] if height > 1 else [])]


def _one_line(text: str, symbols: Symbols) -> str:
    return printable(text, ascii_only=symbols.ascii_only)


def wrapped(prompt: str, text: str, width: int) -> list[Line]:
    """`prompt`, dim, followed by `text`, broken at spaces into lines of at most `width` cells."""
    whole = prompt + text
    lines: list[Line] = []
    for begin, end in _breaks(whole, max(width, 1)):
        middle = min(max(begin, len(prompt)), end)
        parts = (Segment(whole[begin:middle], DIM), Segment(whole[middle:end]))
        lines.append([part for part in parts if part.text])
    return lines


def _breaks(text: str, width: int) -> list[tuple[int, int]]:
    """Begin and end of each line."""
    lines, begin, at = [], 0, 0
    while at < len(text):
        end = text.find(" ", at + 1)
        end = len(text) if end < 0 else end
        if cell_len(text[begin:end]) <= width:
            at = end
        elif at > begin:
            lines.append((begin, at))
            begin = at = at + (text[at] == " ")
        else:  # a word longer than a line
            end = begin + 1
            while cell_len(text[begin : end + 1]) <= width:
                end += 1
            lines.append((begin, end))
            begin = at = end
    return [*lines, (begin, len(text))] if begin < len(text) else lines


def _padded(lines: list[Line], width: int, height: int) -> list[Line]:
    lines = [crop(line, width) for line in [*lines, *([] for _ in range(height - len(lines)))]]
    return [[*line, blank(width - width_of(line))] for line in lines]
