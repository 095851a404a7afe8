"""The memory of owners as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.units import format_seconds
from ..owners import OwnerUse
from ..snapshot import Device
from .numbers import amount
from .symbols import Symbols
from .table import Column, fitting, row, titles, widest
from .text import BOLD, DIM, Line, left, right

_MOST_NAME = 40  # cells

Row = tuple[Device, OwnerUse]


def owner_lines(rows: Sequence[Row], idle_after_s: float, *, width: int, symbols: Symbols) -> list[Line]:
    """A header line and a line per device and owner. `charged` only where it was read."""
    dash = symbols.dash

    def size(title: str, priority: int, name: str) -> Column[Row]:
        there = any(getattr(owner, name) is not None for _, owner in rows)
        return Column(
            title, max(9, len(title)) if there else 0, priority,
            lambda one, cells: [right(amount(getattr(one[1], name), dash), cells, symbols)], flush_right=True,
        )  # fmt: skip

    def used(one: Row, cells: int) -> Line:
        mark = "+?" if one[1].unknown else ""
        return [right(amount(one[1].used_bytes, dash) + mark, cells, symbols, BOLD)]

    columns: list[Column[Row]] = [
        Column("DEV", widest("DEV", (device.info.index for device, _ in rows)), 6,
               lambda one, cells: [left(one[0].info.index, cells, symbols, BOLD)]),
        Column("OWNER", 9, 5, lambda one, cells: [left(one[1].kind.value, cells, symbols, DIM)]),
        Column("NAME", widest("NAME", (owner.name for _, owner in rows), _MOST_NAME), 8,
               lambda one, cells: [left(one[1].name, cells, symbols)]),
        Column("PROCESSES", 9, 2, lambda one, cells: [right(str(one[1].num_processes), cells, symbols)], flush_right=True),
        Column("MEMORY", 11, 9, used, flush_right=True),
        size("CHARGED", 3, "charged_bytes"),
        size(f"IDLE {format_seconds(idle_after_s)}", 4, "idle_bytes"),
    ]  # fmt: skip
    chosen = fitting(columns, width)
    return [titles(chosen, symbols), *(row(chosen, one) for one in rows)]
