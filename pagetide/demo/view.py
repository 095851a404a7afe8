"""The page of `pagetide demo`: what happens now, counts, the map of the pool, its history, and streaming text."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from ..monitor.view.symbols import Symbols, chart, chart_columns
from ..monitor.view.text import ALARM, BOLD, DIM, ENGINE, Line, blank, crop, cut, spread
from .block_map import BlockHolders, legend, map_lines
from .display import Drawings
from .text_panes import SIDE_BY_SIDE, Pane, pane_lines, wrapped

_NOW = Style(color="cyan", bold=True)
_PARTLY = ENGINE + Style(bgcolor="color(236)")
_MOST_MAP = 0.42  # of the page's lines
_CHART_LINES = ((44, 6), (28, 4))  # from this height, so many lines of history
_HISTORY_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of the run so far."""

    steps: int
    running: int
    waiting: int
    preemptions: int
    done: int
    total: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DemoState:
    """What the page shows."""

    title: str
    now: str  # what happens
    alarm: bool = False  # whether memory is being taken
    intro: str = ""  # shown until there is a pool
    counts: Counts | None = None
    pool: BlockHolders | None = None
    history: tuple[tuple[int, int], ...] = ()  # mapped and held blocks, of each sample
    panes: tuple[Pane, ...] = ()


def demo_page(state: DemoState, at_s: float, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The page, of at most `height` lines; the caller crops them to `width`."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    lines = _head(state, at_s, inner, symbols)
    gap: list[Line] = [[]] if height >= 20 else []
    if state.pool is None or state.counts is None:
        lines += [[], *wrapped("", state.intro, inner)]
    else:
        lines += gap
        lines += _pool(state.pool, state.history, state.counts.total, inner, height, symbols)
        lines += gap
        lines += pane_lines(state.panes, inner, height - len(lines), symbols)
    return [[blank(margin), *crop(line, inner)] for line in lines]


def _head(state: DemoState, at_s: float, width: int, symbols: Symbols) -> list[Line]:
    """The title, what happens now, the counts."""
    clock = f"{int(at_s) // 60}:{int(at_s) % 60:02}"
    name: Line = [Segment("pagetide demo", BOLD), blank(3), Segment(cut(state.title, max(width - 22, 0), symbols), DIM)]
    lines = [spread(name, [Segment(clock, DIM)], width)]
    lines.append([Segment(cut(state.now, width, symbols), ALARM if state.alarm else _NOW)])
    if (counts := state.counts) is not None:
        wide = width >= SIDE_BY_SIDE
        running, waiting = ("running", "waiting") if wide else ("run", "wait")
        facts = (
            f"{running} {counts.running:>2}",
            f"{waiting} {counts.waiting:>2}",
            f"preempted {counts.preemptions:>2}",
            f"done {counts.done:>2}/{counts.total}",
            f"{counts.tokens_per_s:>4,.0f} tokens/s",
            f"step {counts.steps:,}",
        )
        lines.append([Segment(("   " if wide else "  ").join(facts))])
    return lines


def _pool(
    pool: BlockHolders, history: tuple[tuple[int, int], ...], num_requests: int, width: int, height: int, symbols: Symbols
) -> list[Line]:
    """The pool's size, its history where there is room, its map and the legend."""
    said: Line = [
        Segment("KV pool", BOLD),
        Segment(f"   {pool.num_held} blocks held of {pool.num_mapped} with memory, {pool.num_blocks} at most"),
    ]
    lines = [said]
    rows = next((rows for least, rows in _CHART_LINES if height >= least), 0)
    if rows:
        lines += history_lines(history, pool.num_blocks, min(width, _HISTORY_WIDTH), rows, symbols)
        lines.append([Segment(_caption(pool.num_blocks, symbols), DIM)])
    lines += map_lines(pool, width, max(int(height * _MOST_MAP) - rows, 1), symbols)
    return [*lines, legend(num_requests, width, symbols)]


def _caption(num_blocks: int, symbols: Symbols) -> str:
    """What the chart shows, in a line below it."""
    rest, used = _rest(symbols), symbols.levels[-1]
    return f"the run so far: {used} blocks held, {rest} with memory and free; full height {num_blocks}; below: the blocks now"


def _rest(symbols: Symbols) -> str:
    return "." if symbols.ascii_only else "░"


def history_lines(history: tuple[tuple[int, int], ...], num_blocks: int, width: int, rows: int, symbols: Symbols) -> list[Line]:
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


def demo_line(state: DemoState, at_s: float) -> str:
    """The counts in a line of plain text; empty while there are none."""
    if state.counts is None or state.pool is None:
        return ""
    counts, pool = state.counts, state.pool
    return (
        f"{at_s:5.1f}s  {counts.done:>2}/{counts.total} done  run {counts.running:>2}  wait {counts.waiting:>2}  "
        f"pool {pool.num_held:>3}/{pool.num_mapped:<3}  preempted {counts.preemptions:>2}  "
        f"{counts.tokens_per_s:>4,.0f} tokens/s"
    )


DRAWINGS = Drawings(demo_page, demo_line, lambda state: state.now)
