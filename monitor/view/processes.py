"""The processes on the devices as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.segment import Segment
from rich.style import Style

from ..snapshot import Device, ProcessUse
from .numbers import amount, percent, share_of
from .symbols import Symbols, bar
from .table import Column, fitting, row, titles, widest
from .text import BOLD, BUSY, DIM, ENGINE, Line, cut, left, right

_ROOMY = 100  # minimum width, in cells, for share bars and full process kinds
_SHARE_BAR = 12
_SHORT_KINDS = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "host": "H"}  # as in nvidia-smi


class Order(StrEnum):
    """The sort order of the table."""

    MEMORY = "memory"  # the largest first
    PID = "pid"
    USER = "user"


@dataclass(frozen=True, slots=True)
class _Use:
    """A process on a device."""

    device: Device
    process: ProcessUse

    @property
    def share(self) -> float | None:
        """The share of the device's memory."""
        return share_of(self.process.used_bytes, self.device.memory.total_bytes)


def count_processes(devices: Sequence[Device]) -> int:
    """The number of processes to show."""
    return sum(len(device.detail.reading.processes or ()) for device in devices)


def process_lines(
    devices: Sequence[Device], *, width: int, most: int | None, order: Order, symbols: Symbols
) -> list[Line]:
    """A header line and one line per process, in at most `most` lines; the last line counts the omitted ones."""
    uses = [_Use(device, process) for device in devices for process in device.detail.reading.processes or ()]
    if not uses:
        known = any(device.detail.reading.processes is not None for device in devices)
        text = "no processes" if known else "the processes are not known"
        return [[Segment(cut(text, width, symbols), DIM)]][:most]
    if most is not None and most < 2:
        return []
    uses.sort(key=_sort_key(order))
    shown = uses if most is None or len(uses) < most else uses[: most - 2]
    columns = fitting(_columns(shown, order, width, symbols), width)
    lines = [titles(columns, symbols), *(row(columns, use) for use in shown)]
    if left_out := uses[len(shown) :]:
        held = sum(use.process.used_bytes or 0 for use in left_out)
        text = f"{symbols.ellipsis} {len(left_out)} more with {amount(held, symbols.dash)}"
        lines.append([Segment(cut(text, width, symbols), DIM)])
    return lines


def _columns(uses: Sequence[_Use], order: Order, width: int, symbols: Symbols) -> list[Column[_Use]]:
    """All columns, as wide as `uses` need them; an empty column has no width."""
    dash = symbols.dash

    def title(text: str, sorted_by: Order) -> str:
        return text + symbols.descending if order is sorted_by else text

    def kind(use: _Use) -> str:
        return use.process.kind if width >= _ROOMY else _SHORT_KINDS.get(use.process.kind, use.process.kind)

    def user(use: _Use, cells: int) -> Line:
        return [left(use.process.user or dash, cells, symbols)]

    def engine(use: _Use, cells: int) -> Line:
        return [left(use.process.engine or "", cells, symbols, ENGINE)]

    def number(read: Callable[[_Use], str], style: Style | None = None) -> Callable[[_Use, int], Line]:
        return lambda use, cells: [right(read(use), cells, symbols, style)]

    def share_bar(use: _Use, cells: int) -> Line:
        used, rest = bar(use.share, cells, symbols)
        return [Segment(used, ENGINE if use.process.engine else BUSY), Segment(rest, DIM)]

    def command(use: _Use, cells: int) -> Line:
        if use.process.command is None:
            return [left("not seen from here", cells, symbols, DIM)]
        return [left(use.process.command, cells, symbols)]

    by_pid, by_user, by_memory = title("PID", Order.PID), title("USER", Order.USER), title("MEMORY", Order.MEMORY)
    users = widest(by_user, (use.process.user for use in uses))
    engines = widest("ENGINE", (use.process.engine for use in uses))
    pids = widest(by_pid, (str(use.process.pid) for use in uses))
    return [
        Column(
            "DEV", widest("DEV", (use.device.info.index for use in uses)), 6, number(_index, BOLD), flush_right=True
        ),
        Column(by_pid, pids, 7, number(_pid), flush_right=True),
        Column(by_user, users, 4, user),
        Column(by_memory, 9, 9, number(lambda use: amount(use.process.used_bytes, dash)), flush_right=True),
        Column("SHARE", 5, 5, number(lambda use: percent(use.share, dash)), flush_right=True),
        Column("", _SHARE_BAR if width >= _ROOMY else 0, 1, share_bar),
        Column("KIND", widest("KIND", map(kind, uses)), 2, lambda use, cells: [left(kind(use), cells, symbols, DIM)]),
        Column("ENGINE", engines, 3, engine),
        Column("COMMAND", max(width // 4, 8), 8, command, stretches=True),
    ]


def _index(use: _Use) -> str:
    return use.device.info.index


def _pid(use: _Use) -> str:
    return str(use.process.pid)


def _sort_key(order: Order) -> Callable[[_Use], tuple[Any, ...]]:
    """The sort key for `order`; equals are sorted by size, largest first. Unknown values come last."""

    def key(use: _Use) -> tuple[Any, ...]:
        process = use.process
        by_memory = process.used_bytes is None, -(process.used_bytes or 0), process.pid
        if order is Order.USER:
            return process.user is None, process.user or "", *by_memory
        return (process.pid, *by_memory) if order is Order.PID else by_memory

    return key
