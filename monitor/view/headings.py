"""The lines around the tables: the head, the headings of sections, the last line with its question or hint."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import datetime

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from ...common.units import format_bytes, format_seconds
from ..snapshot import Origin, Snapshot
from .numbers import brief
from .state import FilterInput, Question, SizeInput, ViewState, action_text
from .symbols import Symbols
from .text import ALARM, BOLD, DIM, GREEN, RED, YELLOW, Line, blank, crop, cut, printable, spread, width_of

_CLOCK_FROM = 24  # cells
_STATUS_LINES, _MOST_STATUS = 3, 2000


def head(snapshot: Snapshot, clock: datetime | None, width: int, symbols: Symbols) -> Line:
    """The monitor, its uptime, and the age of the oldest answer; or that the monitor is silent, or that none is read.

    Silence is judged by the monitor's heartbeat.
    """
    said: Line = [Segment("vram-monitor", BOLD), blank(2)]
    time_of_day = [] if clock is None or width < _CLOCK_FROM else [Segment(f"{clock:%H:%M:%S}", DIM)]
    room = max(width - width_of(said) - width_of(time_of_day) - 2, 0)
    if snapshot.silent_ns is not None:
        text = f"the monitor (pid {snapshot.monitor_pid}) has been silent for {format_seconds(snapshot.silent_ns / 1e9)}"
        return spread([*said, Segment(cut(text, room, symbols), ALARM)], time_of_day, width)
    facts = [snapshot.source]
    match snapshot.origin:
        case Origin.MONITOR:
            up = format_seconds(max(snapshot.at_ns - snapshot.started_ns, 0) / 1e9)
            facts += [f"monitor {snapshot.monitor_pid}", f"up {up}"]
        case Origin.WAITING:
            facts.append("no monitor, read directly")
        case Origin.DIRECT:
            facts.append("a recording" if snapshot.source.startswith("replay:") else "read directly")
    memories = [device.memory for device in snapshot.devices if device.memory.error is None and device.memory.at_ns]
    if ages := [memory.age_ns(snapshot.at_ns) for memory in memories]:
        facts.append(f"{brief(max(ages) / 1e9)} old")
    return spread([*said, Segment(cut(f" {symbols.dot} ".join(facts), room, symbols), DIM)], time_of_day, width)


def heading(title: str, facts: Sequence[str], width: int, symbols: Symbols, legend: Line | None = None) -> Line:
    """A rule with the title of a section, facts about it, and a legend if there is room.

    Where the facts do not fit, the first one goes: the order, which a mark in the table's header shows too.
    """
    room, between = max(width - len(title) - 5, 0), f" {symbols.dot} "
    whole = between.join(facts)
    text = cut(whole if len(facts) < 2 or cell_len(whole) <= room else between.join(facts[1:]), room, symbols)
    line: Line = [Segment(f"{symbols.rest} ", DIM), Segment(title, BOLD), *([blank(2), Segment(text, DIM)] if text else [])]
    if legend is not None and width_of(line) + 2 + width_of(legend) <= width:
        line += [blank(2), *legend]
    rest = width - width_of(line) - 1
    return crop([*line, Segment(f" {symbols.rest * rest}", DIM)] if rest > 0 else line, width)


def last_lines(view: ViewState, width: int, symbols: Symbols) -> list[Line]:
    """The question that waits for keys, the result of the last command, or the keys: one line, or a few in all."""
    match view.prompt:
        case FilterInput():
            return _input("filter:", view.listing.text, "Enter keeps it, Esc clears it", width, symbols)
        case SizeInput() as prompt:
            engine = f"{prompt.lease.engine!r} (pid {prompt.lease.pid})"
            ask = f"recall how much from {engine}" if prompt.kind == "recall" else f"limit {engine} to how much"
            ask += f" [{format_bytes(prompt.default_bytes).replace(',', '')}]?"
            hint = prompt.error or "Enter, or Esc to cancel"
            return _input(ask, prompt.text, hint, width, symbols, wrong=bool(prompt.error))
        case Question(action):
            return _wrapped(f"{action_text(action)}? y or n", YELLOW, width, symbols)
    if view.status:
        return _wrapped(view.status, RED if view.failed else GREEN, width, symbols)
    return [_hint(view, width)]


def _wrapped(text: str, style: Style, width: int, symbols: Symbols) -> list[Line]:
    """The text in a few lines, the last of which is cut."""
    text = printable(text[:_MOST_STATUS], ascii_only=symbols.ascii_only)
    lines = textwrap.wrap(text, width)
    shown = [*lines[: _STATUS_LINES - 1], " ".join(lines[_STATUS_LINES - 1 :])]
    return [[Segment(cut(line, width, symbols), style)] for line in shown if line]


def _input(ask: str, text: str, hint: str, width: int, symbols: Symbols, *, wrong: bool = False) -> list[Line]:
    """The end of the typed text is always visible. The hint stands behind it, or below it where that is too narrow."""
    room = max(width - 2, 0)
    ask = cut(ask, max(room - min(cell_len(text), 12), 0), symbols)
    shown = cut(text[::-1], max(room - cell_len(ask), 0), symbols)[::-1]
    line: Line = [Segment(ask, BOLD), blank(1), Segment(shown), Segment("_", BOLD)]
    style = RED if wrong else DIM
    if width_of(line) + 2 + cell_len(hint) <= width:
        return [[*line, blank(2), Segment(printable(hint, ascii_only=symbols.ascii_only), style)]]
    return [crop(line, width), *_wrapped(hint, style, width, symbols)]


def _hint(view: ViewState, width: int) -> Line:
    pairs = [("q", "quit"), ("?", "help")]
    if view.help_open:
        pairs = [("q", "back"), ("j k", "scroll")]
    else:
        pairs += [("/", "filter"), ("m p u r", "sort"), ("a", "all"), ("e", "events"), ("Tab", "leases")]
        pairs += [("R", "recall"), ("L", "limit")] if view.can_act else []
    line: Line = []
    for key, name in pairs:
        piece = [Segment(key), Segment(f" {name}  ", DIM)]
        if width_of(line) + width_of(piece) <= width:
            line += piece
    return crop(line, width)
