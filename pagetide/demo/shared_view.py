"""The page of `pagetide demo --shared`: what each engine and the external process hold, now and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.segment import Segment
from rich.style import Style

from ..common.units import MIB
from ..monitor.view.symbols import Symbols
from ..monitor.view.text import ALARM, BOLD, DIM, Line, blank, crop, cut, left, right, spread
from .display import Drawings
from .text_panes import wrapped

COLUMN_S = 0.25  # of the chart
_NOW = Style(color="cyan", bold=True)
_HELD = {
    "A": Style(color="black", bgcolor="color(75)"),
    "B": Style(color="black", bgcolor="color(114)"),
    "x": Style(color="black", bgcolor="color(214)"),
    "#": Style(color="color(250)", bgcolor="color(239)"),
    ".": Style(color="color(240)"),
}
_SYMBOLS = "AB"  # of the engines; the external process is "x", growth of programs "#", free memory "."
_COLUMNS = 80  # of the chart; with twice as many cells, columns are two cells wide
_AXIS_WIDTH = 9  # cells left of the chart
_BAR_WIDTH = 24
_LEAST_OF_BOTH = 12  # rows, from which on there are two charts


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The numbers of one engine so far."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    recalls: int = 0
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes held at one time, besides what the programs held at the start."""

    programs: int  # grown since then
    kv: tuple[int, ...]
    external: int
    recalled: tuple[bool, ...]  # whether each engine was being recalled


@dataclass(frozen=True, slots=True)
class SharedState:
    """What the page shows."""

    now: str
    alarm: bool = False
    intro: str = ""  # shown until there is a sample
    capacity_bytes: int = 0
    contended_bytes: int = 0  # of these, what the programs did not hold at the start
    engines: tuple[EngineCounts, ...] = ()
    holdings: tuple[Holding, ...] = ()  # one for each column of the chart


def shared_page(state: SharedState, at_s: float, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The page, of at most `height` lines; the caller crops them to `width`."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    clock = f"{int(at_s) // 60}:{int(at_s) % 60:02}"
    title = "two engines and an external process on one device"
    name: Line = [Segment("pagetide demo", BOLD), blank(3), Segment(cut(title, max(inner - 22, 0), symbols), DIM)]
    lines = [spread(name, [Segment(clock, DIM)], inner)]
    lines.append([Segment(cut(state.now, inner, symbols), ALARM if state.alarm else _NOW)])
    gap: list[Line] = [[]] if height >= 20 else []
    lines += gap
    if not state.holdings:
        lines += wrapped("", state.intro, inner)
    else:
        lines += _rows(state, inner, symbols)
        lines += gap
        lines += chart_lines(state, inner, height - len(lines), symbols)
    return [[blank(margin), *crop(line, inner)] for line in lines]


def _rows(state: SharedState, width: int, symbols: Symbols) -> list[Line]:
    """A line for each engine and for the external process: its bar, its bytes, its counts."""
    newest = state.holdings[-1]
    rows = []
    for number, (held, counts) in enumerate(zip(newest.kv, state.engines, strict=True)):
        facts = (
            f"done {counts.done:>2}/{counts.total}  run {counts.running:>2}  wait {counts.waiting:>2}  "
            f"preempted {counts.preemptions:>2}  recalls {counts.recalls:>2}"
        )
        rows.append((_SYMBOLS[number], f"engine {_SYMBOLS[number]}", held, facts))
    rows.append(("x", "external", newest.external, "a process that knows nothing of the engines"))
    bar_width = max(min(_BAR_WIDTH, width - 78), 0)
    lines = []
    for symbol, name, held, facts in rows:
        filled = min(round(bar_width * held / max(state.contended_bytes, 1)), bar_width)
        bar = [Segment(symbol * filled, _HELD[symbol]), Segment("." * (bar_width - filled) + " ", _HELD["."])]
        lines.append([
            Segment(symbol, _HELD[symbol]), blank(1), left(name, 8, symbols),
            right(f"{held / MIB:,.1f} MiB", 10, symbols, BOLD), blank(2), *(bar if bar_width else []), Segment(facts),
        ])  # fmt: skip
    return lines


def chart_lines(state: SharedState, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The newest columns: above all memory up to the limit, below the engines' KV with a scale of its own.

    Of all memory, engines stack up from below and the external process from above. Where there is little room, that is all.
    """
    rows = height - 3  # a heading, the marks, the legend
    num_columns = width - _AXIS_WIDTH
    if rows < 1 or num_columns < 1:
        return []
    cells = max(1, num_columns // _COLUMNS)  # of a column
    holdings = state.holdings[-(num_columns // cells) :]
    device_rows = max(rows // 4, 3) if rows >= _LEAST_OF_BOTH else rows
    limit = f"limit: {state.capacity_bytes / MIB:,.0f} MiB of the device, less programs and weights"
    columns = [column_of(holding, state.contended_bytes, device_rows) for holding in holdings]
    lines = _chart(columns, cells, state.contended_bytes, limit, symbols)
    if rows > device_rows:
        top = _scale(max(sum(holding.kv) for holding in holdings))
        kv = [replace(holding, programs=0, external=0) for holding in holdings]
        columns = [column_of(holding, top, rows - device_rows - 1).replace(".", " ") for holding in kv]
        lines += _chart(columns, cells, top, "KV of the engines", symbols)
    marks = "".join(_mark(holding) * cells for holding in holdings)
    lines.append([right("recalls", _AXIS_WIDTH - 1, symbols, DIM), blank(1), Segment(marks, ALARM)])
    return [*lines, _legend()]


def _chart(columns: Sequence[str], cells: int, top_bytes: int, heading: str, symbols: Symbols) -> list[Line]:
    """A heading with the bytes of the whole height, and the rows of these columns, each `cells` wide."""
    label = f"{top_bytes / MIB:,.0f} MiB"
    lines: list[Line] = [[right(label, _AXIS_WIDTH - 1, symbols, DIM), blank(1), Segment(heading, DIM)]]
    for row in range(len(columns[0]) - 1, -1, -1):
        line: Line = [right("0" if row == 0 else "", _AXIS_WIDTH - 1, symbols, DIM), blank(1)]
        lines.append([*line, *(Segment(column[row] * cells, _HELD.get(column[row])) for column in columns)])
    return lines


def _scale(num_bytes: int) -> int:
    """The next larger of 16, 24, 32, 48, 64, 96, ... MiB: at least two thirds of the height are used, or 16 MiB are enough."""
    top = 16 * MIB
    while top < num_bytes:
        top = top * 3 // 2 if (top & (top - 1)) == 0 else top * 4 // 3
    return top


def column_of(holding: Holding, contended_bytes: int, rows: int) -> str:
    """The cells of one column of the chart, the lowest first. Edges are rounded to whole cells."""
    cells = ["."] * rows
    begin, below = 0, 0
    for symbol, held in zip("#" + _SYMBOLS, (holding.programs, *holding.kv), strict=False):
        below += held
        end = min(max(round(rows * below / contended_bytes), begin), rows)
        cells[begin:end] = symbol * (end - begin)
        begin = end
    top = rows - min(round(rows * holding.external / contended_bytes), rows)
    top = max(top, begin)
    cells[top:] = "x" * (rows - top)
    return "".join(cells)


def _mark(holding: Holding) -> str:
    """The engine that was being recalled; "*" for several."""
    names = [name for name, recalled in zip(_SYMBOLS, holding.recalled, strict=False) if recalled]
    return " " if not names else names[0] if len(names) == 1 else "*"


def _legend() -> Line:
    line: Line = []
    for marks, name in (("AB", "KV of the engines"), ("x", "external process"), ("#", "programs grown"), (".", "free")):
        line += [Segment(mark, _HELD[mark]) for mark in marks]
        line.append(Segment(f" {name}   ", DIM))
    return line


def shared_line(state: SharedState, at_s: float) -> str:
    """The holdings in a line of plain text; empty while there are none."""
    if not state.holdings:
        return ""
    newest = state.holdings[-1]
    engines = "  ".join(
        f"{name} {held / MIB:>5.1f} MiB {counts.done:>2}/{counts.total} done"
        for name, held, counts in zip(_SYMBOLS, newest.kv, state.engines, strict=True)
    )
    return f"{at_s:5.1f}s  {engines}  external {newest.external / MIB:>5.1f} MiB"


SHARED_DRAWINGS = Drawings(shared_page, shared_line, lambda state: state.now)
