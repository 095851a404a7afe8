"""Terminal lines as an SVG picture: bars and charts become rectangles, words are held to their cells.

Not rich's own export: its picture loads a font from the network, its charts fall apart in any other font, and its bytes
change with rich's version. Here the same lines give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from rich.color import blend_rgb
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme

from .symbols import UNICODE

THEME = TerminalTheme(
    background=(16, 20, 28),
    foreground=(208, 215, 226),
    normal=[
        (48, 54, 66),
        (240, 113, 120),
        (126, 200, 136),
        (232, 190, 106),
        (112, 164, 240),
        (200, 146, 234),
        (96, 200, 214),
        (208, 215, 226),
    ],
)
DIMMED = 0.5  # how far a dim colour goes into the background
FONT = "ui-monospace, 'SF Mono', SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, BASELINE = 9, 20, 15, 15  # pixels
PADDING, TITLE_BAR = 16, 36
HEAVY, LIGHT = 5, 1  # thickness of a bar's used and free part
BUTTONS = ("#ff5f57", "#febc2e", "#28c840")
SHADE = "░"  # drawn as a thin tint of the whole cell
_TINT = 0.25


def picture(lines: Sequence[Sequence[Segment]], width: int, height: int, title: str, label: str) -> str:
    """The SVG of `lines` in a terminal of `width` cells and `height` lines; `label` describes it to screen readers."""
    outer_width, outer_height = width * CELL_WIDTH + 2 * PADDING, height * CELL_HEIGHT + TITLE_BAR + PADDING
    background, foreground = THEME.background_color.hex, THEME.foreground_color.hex
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}"'
        f' width="{outer_width}" height="{outer_height}" viewBox="0 0 {outer_width} {outer_height}">',
        f'<rect width="{outer_width}" height="{outer_height}" rx="10" fill="{background}"/>',
        *(f'<circle cx="{22 + 20 * place}" cy="18" r="6" fill="{fill}"/>' for place, fill in enumerate(BUTTONS)),
        f'<g font-family="{FONT}" font-size="{FONT_SIZE}" fill="{foreground}">',
        f'<text x="{outer_width // 2}" y="23" text-anchor="middle" font-size="13" opacity="0.6">{escape(title)}</text>',
        f'<g transform="translate({PADDING},{TITLE_BAR})">',
    ]
    for number, line in enumerate(lines):
        parts += _backgrounds(line, number * CELL_HEIGHT)
        parts += _drawn(line, number * CELL_HEIGHT)
    return "\n".join([*parts, "</g>", "</g>", "</svg>", ""])


def _backgrounds(line: Sequence[Segment], top: int) -> Iterator[str]:
    """A rectangle for each run of cells with the same background colour."""
    x = 0
    for fill, run in groupby(line, key=_background):
        width = sum(segment.cell_length for segment in run) * CELL_WIDTH
        if fill is not None:
            yield f'<rect x="{x}" y="{top}" width="{width}" height="{CELL_HEIGHT}" fill="{fill}"/>'
        x += width


def _drawn(line: Sequence[Segment], top: int) -> Iterator[str]:
    """One line: a run of the same bar or chart symbol as rectangles, a word as text as wide as its cells."""
    x = 0
    for segment in line:
        colour = _colour(segment.style)
        for kind, run in groupby(segment.text, key=_kind):
            text = "".join(run)
            width = len(text) * CELL_WIDTH
            if kind == "word":
                weight = ' font-weight="bold"' if segment.style and segment.style.bold else ""
                place = f'x="{x}" y="{top + BASELINE}" textLength="{width}"'
                yield f'<text {place} fill="{colour}"{weight}>{escape(text)}</text>'
            elif kind != " ":
                tint = f' opacity="{_TINT}"' if kind == SHADE else ""
                for left, upper, wide, high in _shapes(kind, width):
                    place = f'x="{x + left:g}" y="{top + upper:g}" width="{wide:g}" height="{high:g}"'
                    yield f'<rect {place} fill="{colour}"{tint}/>'
            x += width


def _kind(character: str) -> str:
    """What has to be drawn for it: a space and a symbol stand for themselves, other characters are part of a "word"."""
    return character if character in f" {SHADE}{UNICODE.bar}{UNICODE.half}{UNICODE.rest}{UNICODE.levels}" else "word"


def _shapes(symbol: str, width: int) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height) for a run of `symbol` that is `width` pixels wide."""
    if symbol == SHADE:
        return [(0, 0, width, CELL_HEIGHT)]
    if symbol in UNICODE.levels:
        height = CELL_HEIGHT * (UNICODE.levels.index(symbol) + 1) / 8
        return [(0, CELL_HEIGHT - height, width, height)]
    heavy, light = (CELL_HEIGHT - HEAVY) / 2, (CELL_HEIGHT - LIGHT) / 2
    if symbol == UNICODE.bar:
        return [(0, heavy, width, HEAVY)]
    if symbol == UNICODE.rest:
        return [(0, light, width, LIGHT)]
    return [(0, heavy, width / 2, HEAVY), (width / 2, light, width / 2, LIGHT)]


def _background(segment: Segment) -> str | None:
    colour = segment.style.bgcolor if segment.style else None
    return None if colour is None else colour.get_truecolor(THEME).hex


def _colour(style: Style | None) -> str:
    colour = THEME.foreground_color
    if style and style.color:
        colour = style.color.get_truecolor(THEME)
    return (blend_rgb(colour, THEME.background_color, DIMMED) if style and style.dim else colour).hex
