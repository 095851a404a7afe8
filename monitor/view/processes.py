"""The processes on the devices as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.segment import Segment
from rich.style import Style

from ...common.units import format_bytes, format_seconds
from ..owners import owner_text
from .listing import HOST_MIN_BYTES, Listing, Order, Use
from .numbers import amount, percent
from .symbols import Symbols, bar
from .table import Column, fitting, row, titles, widest
from .text import BOLD, BUSY, DIM, ENGINE, Line, cut, left, right

_ROOMY = 100  # minimum width, in cells, for share bars and full process kinds
_SHARE_BAR = 12
_MOST_OWNER = 24  # cells
_IDLE_SHOWN_S = 60  # a process that was idle for less has an empty cell
_SHORT_KINDS = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "host": "H"}  # as in nvidia-smi


def process_lines(
    uses: Sequence[Use], start: int, *, width: int, most: int | None, listing: Listing, symbols: Symbols
) -> list[Line]:
    """A header line and one line per process from number `start` on, in at most `most` lines.

    The last line counts the processes above and below.
    """
    if most is not None and most < 2:
        return []
    shown = uses if most is None or len(uses) < most else uses[start : start + most - 2]
    columns = fitting(_columns(shown, listing, width, symbols), width)
    lines = [titles(columns, symbols), *(row(columns, use) for use in shown)]
    if left_out := [*uses[:start], *uses[start + len(shown) :]]:
        held = sum(use.process.used_bytes or 0 for use in left_out)
        where = f", {start} of them above" if start else ""
        text = f"{symbols.ellipsis} {len(left_out)} more with {amount(held, symbols.dash)}{where}"
        lines.append([Segment(cut(text, width, symbols), DIM)])
    return lines


def process_rows(num_processes: int, most: int | None) -> int:
    """The number of processes that `process_lines` shows in `most` lines."""
    return num_processes if most is None or num_processes < most else max(most - 2, 0)


def process_facts(listing: Listing, num_shown: int, start: int, rows: int, hidden: int) -> list[str]:
    """What the heading of the table says: the order, the filter, the place in the list, what is hidden."""
    ends = {Order.MEMORY: ("smallest", "largest"), Order.PID: ("lowest", "highest"), Order.USER: ("a to z", "z to a")}
    end = ends[listing.order][listing.descending]
    facts = [f"by {listing.order}, {end}" + ("" if listing.order is Order.USER else " first")]
    if listing.text:
        facts.append(f"matching {listing.text!r}")
    if rows < num_shown:
        facts.append(f"{start + 1} to {start + rows} of {num_shown}" if rows else f"none of {num_shown}")
    if hidden:
        size = format_bytes(HOST_MIN_BYTES if listing.min_bytes is None else listing.min_bytes).replace(".00", "")
        facts.append(f"{hidden} below {size} hidden")
    return facts


def _columns(uses: Sequence[Use], listing: Listing, width: int, symbols: Symbols) -> list[Column[Use]]:
    """All columns, as wide as `uses` need them; an empty column has no width."""
    dash = symbols.dash

    def title(text: str, sorted_by: Order) -> str:
        mark = symbols.descending if listing.descending else symbols.ascending
        return text + mark if listing.order is sorted_by else text

    def kind(use: Use) -> str:
        return use.process.kind if width >= _ROOMY else _SHORT_KINDS.get(use.process.kind, use.process.kind)

    def user(use: Use, cells: int) -> Line:
        return [left(use.process.user or dash, cells, symbols)]

    def engine(use: Use, cells: int) -> Line:
        return [left(use.process.engine or "", cells, symbols, ENGINE)]

    def owner(use: Use, cells: int) -> Line:
        return [left(owner_text(use.process.cgroup) or "", cells, symbols, DIM)]

    def idle(use: Use) -> str:
        seconds = use.process.idle_seconds
        return format_seconds(seconds) if seconds is not None and seconds >= _IDLE_SHOWN_S else ""

    def number(read: Callable[[Use], str], style: Style | None = None) -> Callable[[Use, int], Line]:
        return lambda use, cells: [right(read(use), cells, symbols, style)]

    def share_bar(use: Use, cells: int) -> Line:
        used, rest = bar(use.share, cells, symbols)
        return [Segment(used, ENGINE if use.process.engine else BUSY), Segment(rest, DIM)]

    def command(use: Use, cells: int) -> Line:
        if use.process.command is None:
            return [left("not seen from here", cells, symbols, DIM)]
        return [left(use.process.command, cells, symbols)]

    by_pid, by_user, by_memory = title("PID", Order.PID), title("USER", Order.USER), title("MEMORY", Order.MEMORY)
    users = widest(by_user, (use.process.user for use in uses))
    engines = widest("ENGINE", (use.process.engine for use in uses))
    pids = widest(by_pid, (str(use.process.pid) for use in uses))
    return [
        Column("DEV", widest("DEV", (use.device.info.index for use in uses)), 6, number(_index, BOLD), flush_right=True),
        Column(by_pid, pids, 7, number(_pid), flush_right=True),
        Column(by_user, users, 4, user),
        Column(by_memory, 9, 9, number(lambda use: amount(use.process.used_bytes, dash)), flush_right=True),
        Column("SHARE", 5, 5, number(lambda use: percent(use.share, dash)), flush_right=True),
        Column("", _SHARE_BAR if width >= _ROOMY else 0, 1, share_bar),
        Column("IDLE", max((len(idle(use)) for use in uses), default=0), 3, number(idle), flush_right=True),
        Column("KIND", widest("KIND", map(kind, uses)), 2, lambda use, cells: [left(kind(use), cells, symbols, DIM)]),
        Column("ENGINE", engines, 3, engine),
        Column("OWNER", widest("OWNER", (owner_text(use.process.cgroup) for use in uses), _MOST_OWNER), 2, owner),
        Column("COMMAND", max(width // 4, 8), 8, command, stretches=True),
    ]


def _index(use: Use) -> str:
    return use.device.info.index


def _pid(use: Use) -> str:
    return str(use.process.pid)
