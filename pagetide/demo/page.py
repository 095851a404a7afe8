"""The page of the demo: of one engine its pool and streaming texts, of several what they hold of their device over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from ..common.units import MIB
from ..monitor.view.symbols import Symbols, chart, chart_columns
from ..monitor.view.text import ALARM, BOLD, DIM, ENGINE, Line, blank, crop, cut, left, printable, right, spread, width_of
from .block_map import BlockHolders, legend, letter_of, map_lines, style_of

MOST_CHARACTERS = 6000  # of a text that is shown
_CONSOLE = Console(color_system=None)  # breaks lines, and prints nothing
COLUMN_S = 0.25  # of the chart of what is held
_NOW = Style(color="cyan", bold=True)
_PARTLY = ENGINE + Style(bgcolor="color(236)")
_SIDE_BY_SIDE = 76  # cells; narrower pages have one pane above the other, and shorter words
_LEAST_LINES = 3  # of a pane
_MOST_MAP = 0.42  # of the page's lines
_HISTORY_LINES = ((44, 6), (28, 4))  # from this height, so many lines of history
_HISTORY_WIDTH = 120
_HELD = {
    "A": Style(color="black", bgcolor="color(75)"),
    "B": Style(color="black", bgcolor="color(114)"),
    "x": Style(color="black", bgcolor="color(214)"),
    "#": Style(color="color(250)", bgcolor="color(239)"),
    ".": Style(color="color(240)"),
}
# Of the engines; the external process is "x", growth of programs "#", free memory "."
_SYMBOLS = "AB"
# Of the chart of what is held; with twice as many cells, columns are two cells wide
_COLUMNS = 80
_AXIS_WIDTH = 9  # cells left of it
_BAR_WIDTH = 24
_LEAST_OF_BOTH = 12  # rows, from which on there are two charts of it


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of an engine so far."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    done: int = 0
    total: int = 0
    recalls: int = 0
    steps: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pane:
    """A request whose text is shown: its number, a word on its state, its prompt and its text so far."""

    number: int
    state: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes held at one time, besides what the programs held at the start."""

    programs: int  # grown since then
    kv: tuple[int, ...]
    external: int
    recalled: tuple[bool, ...]  # whether each engine was being recalled


@dataclass(frozen=True, slots=True)
class DemoState:
    """What the page shows: of one engine its pool, of several what they hold of their device."""

    title: str
    now: str  # what happens
    alarm: bool = False  # whether memory is being taken
    intro: str = ""  # shown until there is more
    engines: tuple[Counts, ...] = ()
    pool: BlockHolders | None = None
    history: tuple[tuple[int, int], ...] = ()  # mapped and held blocks, of each sample
    panes: tuple[Pane, ...] = ()
    capacity_bytes: int = 0  # of the device
    contended_bytes: int = 0  # of these, what the programs did not hold at the start
    holdings: tuple[Holding, ...] = ()  # one for each column of the chart


def demo_page(state: DemoState, at_s: float, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The page, of at most `height` lines; the caller crops them to `width`."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    lines = _head(state, at_s, inner, symbols)
    gap: list[Line] = [[]] if height >= 20 else []
    if state.pool is not None:
        lines += [*gap, *_pool(state, inner, height, symbols), *gap]
        lines += pane_lines(state.panes, inner, height - len(lines), symbols)
    elif state.holdings:
        lines += [*gap, *_rows(state, inner, symbols), *gap]
        lines += holding_lines(state, inner, height - len(lines), symbols)
    else:
        lines += [[], *wrapped("", state.intro, inner)]
    return [[blank(margin), *crop(line, inner)] for line in lines]


def demo_line(state: DemoState, at_s: float) -> str:
    """The counts in a line of plain text; empty while there are none."""
    if (pool := state.pool) is not None:
        (counts,) = state.engines
        return (
            f"{at_s:5.1f}s  {counts.done:>2}/{counts.total} done  run {counts.running:>2}  wait {counts.waiting:>2}  "
            f"pool {pool.num_held:>3}/{pool.num_mapped:<3}  preempted {counts.preemptions:>2}  "
            f"{counts.tokens_per_s:>4,.0f} tokens/s"
        )
    if not state.holdings:
        return ""
    newest = state.holdings[-1]
    engines = "  ".join(
        f"{name} {held / MIB:>5.1f} MiB {counts.done:>2}/{counts.total} done"
        for name, held, counts in zip(_SYMBOLS, newest.kv, state.engines, strict=True)
    )
    return f"{at_s:5.1f}s  {engines}  external {newest.external / MIB:>5.1f} MiB"


def _head(state: DemoState, at_s: float, width: int, symbols: Symbols) -> list[Line]:
    """The title, what happens now, and the counts of the only engine."""
    clock = f"{int(at_s) // 60}:{int(at_s) % 60:02}"
    name: Line = [Segment("pagetide demo", BOLD), blank(3), Segment(cut(state.title, max(width - 22, 0), symbols), DIM)]
    lines = [spread(name, [Segment(clock, DIM)], width)]
    lines.append([Segment(cut(state.now, width, symbols), ALARM if state.alarm else _NOW)])
    if state.pool is not None:
        (counts,) = state.engines
        wide = width >= _SIDE_BY_SIDE
        running, waiting = ("running", "waiting") if wide else ("run", "wait")
        facts = (
            f"{running} {counts.running:>2}", f"{waiting} {counts.waiting:>2}", f"preempted {counts.preemptions:>2}",
            f"done {counts.done:>2}/{counts.total}", f"{counts.tokens_per_s:>4,.0f} tokens/s", f"step {counts.steps:,}",
        )  # fmt: skip
        lines.append([Segment(("   " if wide else "  ").join(facts))])
    return lines


# ---- one engine: its pool and texts ----------------------------------------------------------------------------------


def _pool(state: DemoState, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The pool's size, its history where there is room, its map and the legend."""
    pool = state.pool
    assert pool is not None
    said = f"   {pool.num_held} blocks held of {pool.num_mapped} with memory, {pool.num_blocks} at most"
    lines: list[Line] = [[Segment("KV pool", BOLD), Segment(said)]]
    rows = next((rows for least, rows in _HISTORY_LINES if height >= least), 0)
    if rows:
        rest = _rest(symbols)
        lines += _history(state.history, pool.num_blocks, min(width, _HISTORY_WIDTH), rows, symbols)
        caption = (
            f"the run so far: {symbols.levels[-1]} blocks held, {rest} with memory and free; full height "
            f"{pool.num_blocks}; below: the blocks now"
        )
        lines.append([Segment(caption, DIM)])
    lines += map_lines(pool, width, max(int(height * _MOST_MAP) - rows, 1), symbols)
    return [*lines, legend(state.engines[0].total, width, symbols)]


def _rest(symbols: Symbols) -> str:
    return "." if symbols.ascii_only else "░"


def _history(history: tuple[tuple[int, int], ...], num_blocks: int, width: int, rows: int, symbols: Symbols) -> list[Line]:
    """A chart of the pool over time: blocks held, and above them blocks with memory."""
    mapped, held = (
        [None if value is None else value / num_blocks for value in chart_columns(values, width, len(values))]
        for values in ([sample[0] for sample in history], [sample[1] for sample in history])
    )
    rest = _rest(symbols)
    lines = []
    for with_memory, in_use in zip(chart(mapped, rows, symbols), chart(held, rows, symbols), strict=True):
        cells = [
            (rest if here != " " else " ", DIM) if used == " " else (used, _PARTLY if here > used else ENGINE)
            for used, here in zip(in_use, with_memory, strict=True)
        ]
        lines.append([Segment(text, style) for text, style in cells])
    return lines


def pane_lines(panes: tuple[Pane, ...], width: int, height: int, symbols: Symbols) -> list[Line]:
    """`panes` in `height` lines, side by side if the width allows, else as many as fit one above the other."""
    if not panes or height < 2:
        return []
    if width >= _SIDE_BY_SIDE and len(panes) > 1:
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
    if not prompt and not text:
        return []
    lines = Text.assemble((prompt, DIM), text, end="").wrap(_CONSOLE, max(width, 1))
    for line in lines:
        line.rstrip()
    return [[Segment(part.text, part.style or None) for part in line.render(_CONSOLE)] for line in lines]


def _padded(lines: list[Line], width: int, height: int) -> list[Line]:
    lines = [crop(line, width) for line in [*lines, *([] for _ in range(height - len(lines)))]]
    return [[*line, blank(width - width_of(line))] for line in lines]


# ---- several engines: what they hold of their device -----------------------------------------------------------------


def _rows(state: DemoState, width: int, symbols: Symbols) -> list[Line]:
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


def holding_lines(state: DemoState, width: int, height: int, symbols: Symbols) -> list[Line]:
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
