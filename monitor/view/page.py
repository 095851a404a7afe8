"""A snapshot as the lines of a page: the monitor, the devices, their leases, their processes; or the help page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.segment import Segment, SegmentLines

from ..snapshot import Device, DeviceKind, Origin, Snapshot
from .devices import device_lines
from .events import event_lines
from .headings import head, heading, last_lines
from .help import help_lines
from .leases import bar_legend, lease_lines
from .listing import Listing
from .processes import process_facts, process_lines, process_rows
from .reservations import reservation_lines
from .state import ViewState
from .symbols import UNICODE, Symbols
from .text import ALARM, DIM, Line, blank, crop, cut, printable, trimmed

_NARROW = 60  # cells; narrower pages have no margin
# Lines; lower pages omit the keys, the gap below the head and the headings of sections
_LOW = 16
_MOST_EVENTS = 12  # lines
_CONTAINED = "In a container, start it with the GPUs (docker run --gpus all)."
_OTHERS = "GPUs of other makers than NVIDIA are not read."
_NO_MONITOR = (
    "No monitor runs, so there are no leases and no events. An engine starts one, and so does `vram-monitor serve`; "
    "`vram-monitor events` then lists what took memory."
)
_PROCESSES_WANTED, _LEASES_WANTED = 6, 4  # minimum lines that devices leave to these before they take a richer form


@dataclass(frozen=True, slots=True)
class Page:
    """The lines, and which part of the scrolled list they show."""

    lines: SegmentLines
    start: int  # items above the first one shown
    rows: int  # items that have room


def render(
    snapshot: Snapshot,
    *,
    width: int,
    height: int | None = None,
    symbols: Symbols = UNICODE,
    listing: Listing | None = None,
    clock: datetime | None = None,
) -> SegmentLines:
    """The page in at most `width` cells and `height` lines; None: in as many lines as needed, with what is not shown and why.

    `clock` is the time to display. Text from other users' processes is neutralised.
    """
    view = ViewState(Listing() if listing is None else listing)
    page = _composed(snapshot, view, width, height, symbols, clock, keys=False).lines
    if height is None and (notes := _note_lines(snapshot, _inner(width), symbols)):
        return SegmentLines([*page.lines, *_page(notes, width).lines], new_lines=True)
    return page


def render_live(
    snapshot: Snapshot,
    view: ViewState,
    *,
    width: int,
    height: int,
    symbols: Symbols = UNICODE,
    clock: datetime | None = None,
    keys: bool = True,
) -> Page:
    """The page of the live view, which fills the window; with `keys` its last line is for them."""
    if view.help_open:
        return _help(view, width, height, symbols)
    return _composed(snapshot, view, width, height, symbols, clock, keys=keys)


def render_leases(snapshot: Snapshot, *, width: int, symbols: Symbols = UNICODE) -> SegmentLines:
    """Only the leases and the reservations, all of them, in at most `width` cells. Otherwise like `render`."""

    def lines(inner: int, symbols: Symbols) -> list[Line]:
        leases = Listing().leases(snapshot.leases, snapshot.devices)
        found = lease_lines(leases, snapshot.devices, width=inner, most=None, symbols=symbols)
        found = found or [[Segment(cut("no engine holds a lease", inner, symbols), DIM)]]
        reserved = reservation_lines(snapshot.reservations, snapshot.devices, width=inner, most=None, symbols=symbols)
        return [*found, [], *reserved] if reserved else found

    return render_lines(lines, width=width, symbols=symbols)


def render_reservations(snapshot: Snapshot, *, width: int, symbols: Symbols = UNICODE) -> SegmentLines:
    """Only the reservations, all of them, in at most `width` cells. Otherwise like `render`."""

    def lines(inner: int, symbols: Symbols) -> list[Line]:
        found = reservation_lines(snapshot.reservations, snapshot.devices, width=inner, most=None, symbols=symbols)
        return found or [[Segment(cut("no memory is reserved", inner, symbols), DIM)]]

    return render_lines(lines, width=width, symbols=symbols)


def render_lines(lines: Callable[[int, Symbols], list[Line]], *, width: int, symbols: Symbols = UNICODE) -> SegmentLines:
    """What `lines` makes for a number of cells, in at most `width` cells."""
    return _page(lines(_inner(width), symbols), width)


def _composed(
    snapshot: Snapshot, view: ViewState, width: int, height: int | None, symbols: Symbols, clock: datetime | None, *, keys: bool
) -> Page:
    inner = _inner(width)
    low = height is not None and height < _LOW
    foot = last_lines(view, inner, symbols)[:height] if keys and (not low or view.speaks) else []
    lines = [head(snapshot, clock, inner, symbols), *([] if low else [[]])]
    devices = snapshot.devices
    leases = view.listing.leases(snapshot.leases, devices)
    uses, hidden = view.listing.uses(devices)
    good = most = room = None
    if height is not None:
        most = max(height - len(lines) - len(foot), 0)
        good = most - min(len(uses), max(_PROCESSES_WANTED, height // 4)) - 2
        good -= min(len(leases), max(_LEASES_WANTED, height // 6)) + 2 if leases else 0
        good -= min(len(snapshot.reservations), _LEASES_WANTED) + 2 if snapshot.reservations else 0
        good -= _MOST_EVENTS if view.events_open else 0
    lines += device_lines(devices, snapshot.at_ns, width=inner, good=good, most=most, symbols=symbols)
    if height is not None:
        most = height - len(lines) - len(foot)
        room = max(most // 2, most - len(uses) - 2) - (not low)  # what processes do not need, and at least half
    if shown := _leases_unknown(snapshot, inner, room, symbols):
        lines += [*([] if low else [[]]), *shown]
    elif shown := lease_lines(leases, devices, width=inner, most=room, symbols=symbols, selected=view.selected(snapshot)):
        lines += [*([] if low else [heading("leases", [], inner, symbols, bar_legend(symbols))]), *shown]
    left = None if height is None else height - len(lines) - len(foot)
    lines += _reservations(snapshot, view.listing, inner, left, low, symbols)
    if view.events_open:
        left = None if height is None else height - len(lines) - len(foot)
        lines += _events(snapshot, inner, left, low, symbols)
    if height is not None:
        room = max(height - len(lines) - len(foot) - 1, 0)
    rows = process_rows(len(uses), room)
    start = max(min(view.scroll, len(uses) - max(rows, 1)), 0)
    facts = process_facts(view.listing, len(uses), start, rows, hidden)
    lines.append(heading("processes", facts, inner, symbols))
    if uses:
        lines += process_lines(uses, start, width=inner, most=room, listing=view.listing, symbols=symbols)
    else:
        lines += _no_processes(devices, view.listing, hidden, inner, symbols)
    return Page(_page(_fitted(lines, foot, height, fill=keys), width), start, max(rows, 1))


def _reservations(
    snapshot: Snapshot, listing: Listing, width: int, left: int | None, low: bool, symbols: Symbols
) -> list[Line]:
    """The reservations, in a third of the lines that are left; [] if that is too little for one."""
    found, most = listing.reservations(snapshot.reservations), None if left is None else left // 3 - (not low)
    shown = reservation_lines(found, snapshot.devices, width=width, most=most, symbols=symbols)
    head_line = [heading("reservations", [], width, symbols)] if shown and not low else []
    return [*head_line, *shown]


def _events(snapshot: Snapshot, width: int, left: int | None, low: bool, symbols: Symbols) -> list[Line]:
    """The newest events, the last one at the bottom, in a third of the lines that are left; [] if that is less than two."""
    room = _MOST_EVENTS if left is None else min(_MOST_EVENTS, left // 3)
    if room < 2:
        return []
    lines = [] if low else [heading("events", ["vram-monitor events lists all"], width, symbols)]
    if not snapshot.events:
        return [*lines, [Segment(cut("no events are kept, or none yet", width, symbols), DIM)]]
    now = None if snapshot.unix_seconds is None else datetime.fromtimestamp(snapshot.unix_seconds)
    return lines + event_lines(snapshot.events[-(room - 1) :], width=width, symbols=symbols, now=now)


def _fitted(lines: list[Line], foot: list[Line], height: int | None, *, fill: bool) -> list[Line]:
    """The lines in the window, with the last one at its lower edge."""
    if height is None:
        return lines
    room = max(height - len(foot), 0)
    lines = lines[:room]
    return (lines + [[] for _ in range(room - len(lines))] if fill else lines) + foot


def _no_processes(devices: Sequence[Device], listing: Listing, hidden: int, width: int, symbols: Symbols) -> list[Line]:
    text = "the processes are not known"
    if any(device.detail.reading.processes is not None for device in devices):
        text = "no process matches the filter" if listing.text else "no larger processes" if hidden else "no processes"
    return [[Segment(cut(text, width, symbols), DIM)]]


def _help(view: ViewState, width: int, height: int, symbols: Symbols) -> Page:
    inner = _inner(width)
    lines = help_lines(inner, symbols)
    foot = last_lines(view, inner, symbols) if height > 1 else []
    rows = max(height - len(foot), 1)
    start = max(min(view.help_scroll, len(lines) - rows), 0)
    return Page(_page(_fitted(lines[start : start + rows], foot, height, fill=True), width), start, rows)


def _leases_unknown(snapshot: Snapshot, width: int, most: int | None, symbols: Symbols) -> list[Line]:
    """A line with the reason why the leases are unknown, if there is room; [] if they are known."""
    if snapshot.leases_error is None or (most is not None and most < 1):
        return []
    return [[Segment(cut(f"leases are not known: {snapshot.leases_error}", width, symbols), ALARM)]]


def _inner(width: int) -> int:
    """Cells between the margins."""
    return max(width - 2 * _margin(width), 1)


def _margin(width: int) -> int:
    return 1 if width >= _NARROW else 0


def _page(lines: Sequence[Line], width: int) -> SegmentLines:
    return SegmentLines([trimmed(crop([blank(_margin(width)), *line], width)) for line in lines], new_lines=True)


def _note_lines(snapshot: Snapshot, width: int, symbols: Symbols) -> list[Line]:
    """What a printed view does not show, and why, in lines of at most `width` cells; [] if nothing is missing."""
    lines: list[Line] = []
    for note in _notes(snapshot):
        text = printable(note, ascii_only=symbols.ascii_only)
        lines += [[Segment(part, DIM)] for part in textwrap.wrap(text, width)]
    return [[], *lines] if lines else []


def _notes(snapshot: Snapshot) -> list[str]:
    notes = []
    if "nvml" in snapshot.source.split("+") and {device.info.kind for device in snapshot.devices} == {DeviceKind.HOST}:
        why = snapshot.unavailable.get("nvml", "its driver is missing, or it is hidden from this process")
        notes.append(f"No NVIDIA GPU is seen: {why}. {_CONTAINED} {_OTHERS} What is shown is the memory of this machine.")
    if snapshot.origin is Origin.WAITING:
        notes.append(_NO_MONITOR)
    return notes
