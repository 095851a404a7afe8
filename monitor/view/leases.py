"""The leases as a table: each engine's limits on a device, its use, and its pending recalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.segment import Segment

from ..snapshot import Device, LeaseUse
from .numbers import amount, brief, share_of, used_of_total
from .symbols import Symbols, stacked_bar
from .table import GAP, Column, fitting, row, titles, widest
from .text import ALARM, BOLD, BUSY, DIM, ENGINE, OTHER, REVERSE, YELLOW, Line, blank, cut, left, printable, right, width_of

_NARROW = 72  # minimum width, in cells, for full state texts
_MOST_STATE = 34
_STATE_STYLES = {"ok": DIM, "loading": BUSY, "recalling": YELLOW, "overdue": ALARM, "reaping": YELLOW}
_PARTS = ("weights", "live", "cached", "free", "other")
_PART_STYLES = {"weights": BUSY, "other": OTHER, "kv": ENGINE}  # in the order of the bar: the growing part at its end


def lease_lines(
    leases: Sequence[LeaseUse],
    devices: Sequence[Device],
    *,
    width: int,
    most: int | None,
    symbols: Symbols,
    selected: int | None = None,
) -> list[Line]:
    """A header line and one line per lease in the given order, in at most `most` lines; the selected one is among them.

    The last line counts the omitted ones; if there is room for nothing else, all of them. [] without leases.
    """
    if not leases or (most is not None and most < 1):
        return []
    rows = len(leases) if most is None or len(leases) < most else max(most - 2, 0)
    start = 0 if selected is None else max(selected - rows + 1, 0)
    shown = leases[start : start + rows]
    lines: list[Line] = []
    if shown:
        indices = {device.info.uuid: device.info.index for device in devices}
        columns = fitting(_columns(shown, indices, width, symbols), width)
        lines.append(titles(columns, symbols))
        for place, lease in enumerate(shown, start):
            line = row(columns, lease)
            lines.append([*Segment.apply_style(line, post_style=REVERSE)] if place == selected else line)
    if left_out := [*leases[:start], *leases[start + len(shown) :]] if shown else leases:
        lines.append(_counted(left_out, "more " if shown else "", width, symbols))
    return lines


def bar_legend(symbols: Symbols) -> Line:
    """What the pieces of a lease's bar are, from the left."""
    line: Line = [Segment("bar: ", DIM)]
    for name, style in _PART_STYLES.items():
        line += [Segment(symbols.bar * 2, style), Segment(f" {name}  ", DIM)]
    return [*line, Segment(f"{symbols.rest * 2} not held", DIM)]


def _counted(leases: Sequence[LeaseUse], more: str, width: int, symbols: Symbols) -> Line:
    """ "… 3 more leases with 40.2 GiB, 1 overdue"."""
    granted = amount(sum(lease.granted_bytes for lease in leases), symbols.dash)
    text = f"{symbols.ellipsis} {len(leases)} {more}{'lease' if len(leases) == 1 else 'leases'} with {granted}"
    overdue = sum(lease.state == "overdue" for lease in leases)
    if overdue:
        text += f", {overdue} overdue"
    return [Segment(cut(text, width, symbols), ALARM if overdue else DIM)]


def _columns(leases: Sequence[LeaseUse], indices: Mapping[str, str], width: int, symbols: Symbols) -> list[Column[LeaseUse]]:
    """All columns, as wide as `leases` need them; an empty column has no width."""
    dash = symbols.dash
    pids = widest("PID", (str(lease.pid) for lease in leases))
    engines, told_apart = _engine_names([lease.engine for lease in leases], width, width - pids - GAP, symbols)
    amounts = [used_of_total(lease.held_bytes, lease.granted_bytes, dash) for lease in leases]
    held_width, granted_width = max(len(held) for held, _, _ in amounts), max(len(granted) for _, granted, _ in amounts)

    def index(lease: LeaseUse) -> str:
        return indices.get(lease.device_uuid, dash)

    def state(lease: LeaseUse) -> str:
        return _state(lease, symbols) if width >= _NARROW else lease.state

    def bytes_cell(num_bytes: int | None, cells: int, unknown: str = dash) -> Line:
        return [right(amount(num_bytes, unknown), cells, symbols)]

    def held_of_granted(lease: LeaseUse, cells: int) -> Line:
        held, granted, unit = used_of_total(lease.held_bytes, lease.granted_bytes, dash)
        line = [Segment(f"{held:>{held_width}}", BOLD), Segment(f" / {granted:>{granted_width}} {unit}", DIM)]
        return [blank(cells - width_of(line)), *line]

    def part(name: str) -> Column[LeaseUse]:
        return Column(name.upper(), 9, -1, lambda lease, cells: bytes_cell(_parts(lease)[name], cells), flush_right=True)

    return [
        Column(
            "DEV", widest("DEV", map(index, leases)), 7,
            lambda lease, cells: [right(index(lease), cells, symbols, BOLD)], flush_right=True,
        ),
        Column(
            "PID", pids, 1 if told_apart else 10,
            lambda lease, cells: [right(str(lease.pid), cells, symbols)], flush_right=True,
        ),
        Column("ENGINE", engines, 10, lambda lease, cells: [left(lease.engine, cells, symbols, ENGINE)]),
        Column(
            "USER", widest("USER", (lease.user for lease in leases)), 0,
            lambda lease, cells: [left(lease.user, cells, symbols)],
        ),
        Column("MIN", 9, 3, lambda lease, cells: bytes_cell(lease.min_bytes, cells), flush_right=True),
        Column("", max(8, width // 8), 5, lambda lease, cells: _bar(lease, cells, symbols)),
        Column(
            "HELD / GRANTED", max(len("HELD / GRANTED"), held_width + granted_width + len(" /  GiB")), 8, held_of_granted,
            flush_right=True,
        ),
        *(part(name) for name in _PARTS if any(_parts(lease)[name] for lease in leases)),
        Column("SPARE", 9, 4, lambda lease, cells: bytes_cell(lease.spare_bytes, cells), flush_right=True),
        Column(
            "MAX", 9 if any(lease.max_bytes is not None for lease in leases) else 0, 2,
            lambda lease, cells: bytes_cell(lease.max_bytes, cells, "none"), flush_right=True,
        ),
        Column(
            "WAITING", len("WAITING") if any(lease.num_waiting for lease in leases) else 0, 6,
            lambda lease, cells: [right(str(lease.num_waiting), cells, symbols)], flush_right=True,
        ),
        Column(
            "STATE", widest("STATE", map(state, leases), _MOST_STATE), 9,
            lambda lease, cells: [left(state(lease), cells, symbols, _STATE_STYLES.get(lease.state))],
        ),
    ]  # fmt: skip


def _parts(lease: LeaseUse) -> dict[str, int]:
    """The held bytes: "weights", "live", "cached", "free" and "other"."""
    return lease.held_parts() | lease.kv_parts


def _engine_names(names: Sequence[str], alone: int, beside_pid: int, symbols: Symbols) -> tuple[int, bool]:
    """The cells of the engines' names, and whether these suffice to name each engine in a command.

    Names are shown whole where `alone` cells are enough; else, and where they are not unique, the pid is needed.
    """
    shown = [printable(name, ascii_only=symbols.ascii_only) for name in names]
    longest = max(len("ENGINE"), *map(cell_len, shown))
    told_apart = longest <= alone and shown == list(names) and len(set(names)) == len(names)
    return longest if told_apart else min(longest, max(beside_pid, 0)), told_apart


def _bar(lease: LeaseUse, width: int, symbols: Symbols) -> Line:
    """The held bytes by class, as shares of the granted bytes."""
    parts = lease.held_parts()
    whole = max(lease.granted_bytes, lease.held_bytes)
    pieces, rest = stacked_bar([share_of(parts[name], whole) or 0.0 for name in _PART_STYLES], width, symbols)
    drawn = zip(pieces, _PART_STYLES.values(), strict=True)
    return [*(Segment(piece, style) for piece, style in drawn), Segment(rest, DIM)]


def _state(lease: LeaseUse, symbols: Symbols) -> str:
    """The state with its recall target and age: "recalling to 48.0 GiB, 340 ms"; or with what the engine asks for."""
    if lease.state in ("recalling", "overdue") and lease.recall_target_bytes is not None:
        age = "" if lease.recall_age_seconds is None else f", {brief(lease.recall_age_seconds)}"
        return f"{lease.state} to {amount(lease.recall_target_bytes, symbols.dash)}{age}"
    if lease.state == "ok" and lease.asked_bytes is not None:
        return f"ok, asks for {amount(lease.asked_bytes, symbols.dash)}"
    return lease.state
