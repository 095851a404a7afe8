"""Events, their summary, and the memory of owners, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from rich.style import Style

from ...common.units import format_seconds
from ..events import EventKind, MemoryEvent
from ..holders import HolderSummary
from ..owners import OwnerUse, owner_text
from ..snapshot import Device
from .numbers import amount
from .symbols import Symbols
from .table import Column, fitting, row, titles, widest
from .text import ALARM, BOLD, DIM, ENGINE, GREEN, YELLOW, Line, left, right

_STYLES: dict[EventKind, Style] = {
    EventKind.TOOK: YELLOW,
    EventKind.RETURNED: GREEN,
    EventKind.DIED: ALARM,
    EventKind.REFUSED: ALARM,
    EventKind.OVERDUE: ALARM,
    EventKind.ALERT: ALARM,
    EventKind.LOST: ALARM,
    EventKind.UNREADABLE: ALARM,
}
_MOST_OWNER, _MOST_OWNER_NAME = 28, 40  # cells

OwnerRow = tuple[Device, OwnerUse]

T = TypeVar("T")


def event_lines(
    events: Sequence[MemoryEvent], *, width: int, symbols: Symbols, with_titles: bool = True, now: datetime | None = None
) -> list[Line]:
    """A line per event, under a header line. Without the date where all are of the day of `now`."""
    today = None if now is None else now.date()
    dated = any(datetime.fromtimestamp(event.time).date() != today for event in events)
    columns = fitting(_event_columns(events, symbols, dated=dated), width)
    return [*([titles(columns, symbols)] if with_titles else []), *(row(columns, event) for event in events)]


def summary_lines(holders: Sequence[HolderSummary], *, width: int, symbols: Symbols) -> list[Line]:
    """A line per process or engine, under a header line."""
    columns = fitting(_summary_columns(holders, symbols), width)
    return [titles(columns, symbols), *(row(columns, holder) for holder in holders)]


def _event_columns(events: Sequence[MemoryEvent], symbols: Symbols, *, dated: bool) -> list[Column[MemoryEvent]]:
    form = "%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S"

    def change(event: MemoryEvent) -> str:
        if event.bytes is None:
            return f"{event.times} times" if event.times > 1 else ""
        sign = "+" if event.kind is EventKind.TOOK else ""
        return sign + amount(event.bytes, "")

    def said(event: MemoryEvent) -> str:
        times = f"({event.times} times)" if event.times > 1 and event.bytes is not None else ""
        return " ".join(filter(None, (times, event.reason)))

    def text(read: Callable[[MemoryEvent], str], style: Style | None = None) -> Callable[[MemoryEvent, int], Line]:
        return lambda event, cells: [left(read(event), cells, symbols, style)]

    def number(read: Callable[[MemoryEvent], str]) -> Callable[[MemoryEvent, int], Line]:
        return lambda event, cells: [right(read(event), cells, symbols)]

    def kind(event: MemoryEvent, cells: int) -> Line:
        return [left(event.kind.value, cells, symbols, _STYLES.get(event.kind))]

    return [
        Column("TIME", 19 if dated else 8, 10, text(lambda event: f"{datetime.fromtimestamp(event.time):{form}}", DIM)),
        Column("DEV", widest("DEV", (event.device for event in events)), 5, text(lambda event: event.device or "", BOLD)),
        Column("EVENT", 10, 9, kind),
        Column("BYTES", 9, 8, number(change), flush_right=True),
        Column("HELD", 9, 6, number(lambda event: amount(event.held_bytes, "")), flush_right=True),
        Column("PEAK", 9, 3, number(lambda event: amount(event.peak_bytes, "")), flush_right=True),
        *_who(events, symbols, lambda event: event),
        Column("", 12, 4, text(said, DIM), stretches=True),
    ]


def _summary_columns(holders: Sequence[HolderSummary], symbols: Symbols) -> list[Column[HolderSummary]]:
    def size(name: str, priority: int, read: Callable[[HolderSummary], int]) -> Column[HolderSummary]:
        return Column(name, 9, priority, lambda one, cells: [right(amount(read(one), ""), cells, symbols)], flush_right=True)

    def happened(one: HolderSummary, cells: int) -> Line:
        said = [f"{kind} {count} times" for kind, count in one.counts.items() if count]
        said += [one.ended] if one.ended else []
        return [left(", ".join(said), cells, symbols, ALARM if one.ended == EventKind.DIED else DIM)]

    return [
        Column("DEV", widest("DEV", (one.last.device for one in holders)), 5,
               lambda one, cells: [left(one.last.device or "", cells, symbols, BOLD)]),
        *_who([one.last for one in holders], symbols, lambda one: one.last),
        size("AT START", 6, lambda one: one.began_bytes),
        size("PEAK", 9, lambda one: one.peak_bytes),
        size("AT END", 6, lambda one: one.held_bytes),
        size("TOOK", 4, lambda one: one.taken_bytes),
        size("RETURNED", 3, lambda one: one.returned_bytes),
        Column("", 10, 4, happened, stretches=True),
    ]  # fmt: skip


def _who(events: Sequence[MemoryEvent], symbols: Symbols, of: Callable[[T], MemoryEvent]) -> list[Column[T]]:
    """The columns that name a process or lease."""

    def name(one: T, cells: int) -> Line:
        event = of(one)
        return [left(event.engine or event.command or "", cells, symbols, ENGINE if event.engine else None)]

    def text(read: Callable[[MemoryEvent], str | None]) -> Callable[[T, int], Line]:
        return lambda one, cells: [left(read(of(one)) or "", cells, symbols)]

    pids = widest("PID", (str(event.pid or "") for event in events))
    return [
        Column("PID", pids, 7, lambda one, cells: [right(str(of(one).pid or ""), cells, symbols)], flush_right=True),
        Column("NAME", widest("NAME", (event.engine or event.command for event in events), 20), 8, name),
        Column("USER", widest("USER", (event.user for event in events)), 2, text(lambda event: event.user)),
        Column(
            "OWNER", widest("OWNER", (owner_text(event.cgroup) for event in events), _MOST_OWNER), 1,
            text(lambda event: owner_text(event.cgroup)),
        ),
    ]  # fmt: skip


def owner_lines(rows: Sequence[OwnerRow], idle_after_s: float, *, width: int, symbols: Symbols) -> list[Line]:
    """A header line and a line per device and owner. `charged` only where it was read."""
    dash = symbols.dash

    def size(title: str, priority: int, name: str) -> Column[OwnerRow]:
        there = any(getattr(owner, name) is not None for _, owner in rows)
        return Column(
            title, max(9, len(title)) if there else 0, priority,
            lambda one, cells: [right(amount(getattr(one[1], name), dash), cells, symbols)], flush_right=True,
        )  # fmt: skip

    def used(one: OwnerRow, cells: int) -> Line:
        mark = "+?" if one[1].unknown else ""
        return [right(amount(one[1].used_bytes, dash) + mark, cells, symbols, BOLD)]

    columns: list[Column[OwnerRow]] = [
        Column("DEV", widest("DEV", (device.info.index for device, _ in rows)), 6,
               lambda one, cells: [left(one[0].info.index, cells, symbols, BOLD)]),
        Column("OWNER", 9, 5, lambda one, cells: [left(one[1].kind.value, cells, symbols, DIM)]),
        Column("NAME", widest("NAME", (owner.name for _, owner in rows), _MOST_OWNER_NAME), 8,
               lambda one, cells: [left(one[1].name, cells, symbols)]),
        Column("PROCESSES", 9, 2, lambda one, cells: [right(str(one[1].num_processes), cells, symbols)], flush_right=True),
        Column("MEMORY", 11, 9, used, flush_right=True),
        size("CHARGED", 3, "charged_bytes"),
        size(f"IDLE {format_seconds(idle_after_s)}", 4, "idle_bytes"),
    ]  # fmt: skip
    chosen = fitting(columns, width)
    return [titles(chosen, symbols), *(row(chosen, one) for one in rows)]
