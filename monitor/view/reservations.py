"""The reservations as a table: what each program has, what it waits for, and until when."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from ...common.units import format_seconds
from ..snapshot import Device, ReservationUse
from .numbers import amount, used_of_total
from .symbols import Symbols
from .table import Column, fitting, row, titles, widest
from .text import BOLD, DIM, YELLOW, Line, blank, cut, left, right, width_of

_MOST_NAME, _MOST_STATE = 30, 44  # cells


def reservation_lines(
    reservations: Sequence[ReservationUse], devices: Sequence[Device], *, width: int, most: int | None, symbols: Symbols
) -> list[Line]:
    """A header line and one line per reservation, in at most `most` lines, the last of which counts those left out; [] without
    reservations, or without room for one.
    """
    if not reservations or (most is not None and most < 2):
        return []
    rows = len(reservations) if most is None or len(reservations) < most else most - 2
    columns = fitting(_columns(reservations, {one.info.uuid: one.info.index for one in devices}, symbols), width)
    lines = [titles(columns, symbols), *(row(columns, one) for one in reservations[:rows])]
    if left_out := reservations[rows:]:
        held = amount(sum(one.held_bytes for one in left_out), symbols.dash)
        text = f"{symbols.ellipsis} {len(left_out)} more with {held}; vram-monitor reservations lists all"
        lines.append([Segment(cut(text, width, symbols), DIM)])
    return lines


def _columns(found: Sequence[ReservationUse], indices: dict[str, str], symbols: Symbols) -> list[Column[ReservationUse]]:
    dash = symbols.dash
    amounts = [used_of_total(one.held_bytes, one.wanted_bytes, dash) for one in found]
    held_width, wanted_width = max(len(held) for held, _, _ in amounts), max(len(wanted) for _, wanted, _ in amounts)

    def index(one: ReservationUse) -> str:
        return indices.get(one.device_uuid, dash)

    def held_of_wanted(one: ReservationUse, cells: int) -> Line:
        held, wanted, unit = used_of_total(one.held_bytes, one.wanted_bytes, dash)
        line = [Segment(f"{held:>{held_width}}", BOLD), Segment(f" / {wanted:>{wanted_width}} {unit}", DIM)]
        return [blank(cells - width_of(line)), *line]

    return [
        Column("DEV", widest("DEV", map(index, found)), 6, lambda one, cells: [right(index(one), cells, symbols, BOLD)],
               flush_right=True),
        Column("ID", widest("ID", (f"#{one.id}" for one in found)), 9,
               lambda one, cells: [right(f"#{one.id}", cells, symbols)], flush_right=True),
        Column("PID", widest("PID", (str(one.pid) for one in found)), 4,
               lambda one, cells: [right(str(one.pid), cells, symbols)], flush_right=True),
        Column("RESERVATION", widest("RESERVATION", (one.name for one in found), _MOST_NAME), 7,
               lambda one, cells: [left(one.name, cells, symbols)]),
        Column("USER", widest("USER", (one.user for one in found)), 3, lambda one, cells: [left(one.user, cells, symbols)]),
        Column("HELD / WANTED", max(len("HELD / WANTED"), held_width + wanted_width + len(" /  GiB")), 8, held_of_wanted,
               flush_right=True),
        Column("STATE", widest("STATE", map(_state, found), _MOST_STATE), 10,
               lambda one, cells: [left(_state(one), cells, symbols, DIM if one.place is None else YELLOW)]),
    ]  # fmt: skip


def _state(one: ReservationUse) -> str:
    """ "for 2 h more"; "waits as number 2 since 40 s, priority 0"."""
    if one.place is not None:
        return f"waits as number {one.place} since {format_seconds(one.waiting_seconds or 0)}, priority {one.priority}"
    return "until it ends" if one.left_seconds is None else f"for {format_seconds(one.left_seconds)} more"
