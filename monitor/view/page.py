"""A snapshot as the lines of a page: the monitor, the devices, their leases, their processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.segment import Segment, SegmentLines

from ..snapshot import Snapshot
from .devices import device_lines
from .leases import lease_lines
from .numbers import brief, duration
from .processes import Order, count_processes, process_lines
from .symbols import UNICODE, Symbols
from .text import ALARM, BOLD, DIM, Line, blank, crop, cut, spread, trimmed, width_of

_NARROW = 60  # cells; narrower pages have no margin
_CLOCK_FROM = 24  # cells
_LOW = 16  # lines; lower pages omit the keys and the gaps below the head and above the leases
_PROCESSES_WANTED, _LEASES_WANTED = 6, 4  # minimum lines that devices leave to these before they take a richer form


def render(
    snapshot: Snapshot,
    *,
    width: int,
    height: int | None = None,
    symbols: Symbols = UNICODE,
    order: Order = Order.MEMORY,
    clock: datetime | None = None,
    keys: Line | None = None,
) -> SegmentLines:
    """The page in at most `width` cells and `height` lines; None: in as many lines as needed.

    `clock` is the time to display, `keys` a last line with key hints. Text from other users' processes is neutralised.
    """
    inner = _inner(width)
    low = height is not None and height < _LOW
    foot = [] if keys is None or height is None or low else [keys]
    gap: list[Line] = [] if low else [[]]
    lines = [_head(snapshot, clock, inner, symbols), *gap]
    devices, leases = snapshot.devices, snapshot.leases
    num_processes = count_processes(devices)
    good = most = room = None
    if height is not None:
        most = max(height - len(lines) - len(foot), 0)
        good = most - min(num_processes, max(_PROCESSES_WANTED, height // 4)) - 2
        good -= min(len(leases), max(_LEASES_WANTED, height // 6)) + 2 if leases else 0
    lines += device_lines(devices, snapshot.at_ns, width=inner, good=good, most=most, symbols=symbols)
    if height is not None:
        most = height - len(lines) - len(foot)
        room = max(most // 2, most - num_processes - 2) - len(gap)  # what processes do not need, and at least half
    if shown := _leases_unknown(snapshot, inner, room, symbols) or lease_lines(
        leases, devices, width=inner, most=room, symbols=symbols
    ):
        lines += [*gap, *shown]
    if height is not None:
        room = max(height - len(lines) - len(foot) - 1, 0)
    if shown := process_lines(devices, width=inner, most=room, order=order, symbols=symbols):
        lines += [[], *shown]
    if height is not None:
        lines = lines[: height - len(foot)]
        lines += [[] for _ in range(height - len(foot) - len(lines))] if foot else []
    return _page(lines + foot, width)


def render_leases(snapshot: Snapshot, *, width: int, symbols: Symbols = UNICODE) -> SegmentLines:
    """Only the leases, all of them, in at most `width` cells. Otherwise like `render`."""
    inner = _inner(width)
    lines = lease_lines(snapshot.leases, snapshot.devices, width=inner, most=None, symbols=symbols)
    return _page(lines or [[Segment(cut("no engine holds a lease", inner, symbols), DIM)]], width)


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


def _head(snapshot: Snapshot, clock: datetime | None, width: int, symbols: Symbols) -> Line:
    """The monitor, its uptime, and the age of the oldest answer; or that the monitor is silent.

    Silence is judged by the monitor's heartbeat.
    """
    said: Line = [Segment("vram-monitor", BOLD), blank(2)]
    time_of_day = [] if clock is None or width < _CLOCK_FROM else [Segment(f"{clock:%H:%M:%S}", DIM)]
    room = max(width - width_of(said) - width_of(time_of_day) - 2, 0)
    if snapshot.silent_ns is not None:
        text = f"the monitor (pid {snapshot.monitor_pid}) has been silent for {duration(snapshot.silent_ns / 1e9)}"
        return spread([*said, Segment(cut(text, room, symbols), ALARM)], time_of_day, width)
    facts = [snapshot.source, f"pid {snapshot.monitor_pid}"]
    facts.append(f"up {duration(max(snapshot.at_ns - snapshot.started_ns, 0) / 1e9)}")
    memories = [device.memory for device in snapshot.devices if device.memory.error is None and device.memory.at_ns]
    if ages := [memory.age_ns(snapshot.at_ns) for memory in memories]:
        facts.append(f"{brief(max(ages) / 1e9)} old")
    return spread([*said, Segment(cut(f" {symbols.dot} ".join(facts), room, symbols), DIM)], time_of_day, width)
