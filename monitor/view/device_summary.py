"""The parts of one device's view: bar, chart, amounts, trend, load, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from ...common.units import MIB, format_seconds
from ..snapshot import Device, DeviceKind
from .numbers import URGENT_SECONDS, full_in, percent, rate, share_of, used_of_total
from .symbols import Symbols, bar, chart, chart_columns, chart_reach
from .table import Column
from .text import ALARM, BOLD, BUSY, DIM, GREEN, RED, YELLOW, Line, blank, cut, left, right

YELLOW_FROM, RED_FROM = 0.80, 0.95  # used shares of the memory
MOST_LABEL, MOST_NAME, PERCENTAGE_WIDTH = 8, 24, 4  # cells
_RANGE_WIDTH, _LEAST_CHART = len("143652 to 143771 MiB"), 12  # cells
# A chart spans at least this part of the device, so that noise looks like noise
_FLAT = 512


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """The layout shared by devices that are drawn together, so that their parts are aligned."""

    now_ns: int
    symbols: Symbols
    width: int
    # Of GPUs; the host's label may be longer, so that the others need not be
    label_width: int
    name_width: int  # includes what exceeds the label width
    used_width: int
    total_width: int

    @classmethod
    def for_devices(cls, devices: Sequence[Device], now_ns: int, width: int, symbols: Symbols) -> DeviceSummary:
        """Columns wide enough for each of `devices`, in lines of `width` cells."""
        label_width = min(max((len(d.info.index) for d in devices if d.info.kind is DeviceKind.GPU), default=1), MOST_LABEL)
        names = [len(name_of(d)) + max(len(d.info.index) - label_width, 0) for d in devices]
        parts = [used_of_total(d.memory.used_bytes, d.memory.total_bytes, symbols.dash) for d in devices]
        return cls(
            now_ns=now_ns,
            symbols=symbols,
            width=width,
            label_width=label_width,
            name_width=min(max(names, default=0), MOST_NAME),
            used_width=max((len(used) for used, _, _ in parts), default=0),
            total_width=max((len(total) for _, total, _ in parts), default=0),
        )

    @property
    def amounts_width(self) -> int:
        """Cells of the result of `amounts`."""
        return self.used_width + self.total_width + len(" /  GiB")


def name_of(device: Device) -> str:
    """The device's name, or its uuid without one."""
    return device.info.name or device.info.uuid


def label(device: Device, sheet: DeviceSummary) -> Segment:
    """The device's index, as displayed."""
    return Segment(f"{cut(device.info.index, MOST_LABEL, sheet.symbols):>{sheet.label_width}}", BOLD)


def notice(device: Device, now_ns: int) -> tuple[str, Style] | None:
    """Why the memory of `device` is unknown or outdated; None if it is current."""
    memory = device.memory
    if memory.error is not None:
        return memory.error, ALARM
    if not memory.at_ns:
        return "no answer yet", YELLOW
    if not memory.is_stale(now_ns):
        return None
    age = memory.age_ns(now_ns) / 1e9
    return (f"no answer for {format_seconds(age)}" if age > 0 else "no answer since the machine started"), YELLOW


def memory_bar(device: Device, width: int, sheet: DeviceSummary) -> Line:
    """The used share of the memory, coloured by pressure; grey while it is unknown or outdated."""
    used, rest = bar(share_of(device.memory.used_bytes, device.memory.total_bytes), width, sheet.symbols)
    return [Segment(used, _pressure(device, sheet)), Segment(rest, DIM)]


def memory_chart(device: Device, width: int, rows: int, sheet: DeviceSummary, *, own_scale: bool = False) -> list[Line]:
    """`rows` lines of `width` cells, the newest value at the right.

    They span the device's memory, or with `own_scale` the lowest to the highest value: then `chart_range` is to stand
    beside it.
    """
    total = device.memory.total_bytes
    values = _history(device, width) if total else []
    low, high = _scale(values, total) if total and own_scale else (0, total or 1)
    shares = [None if value is None else (value - low) / (high - low) for value in values]
    drawn = chart(shares, rows, sheet.symbols)
    return [[blank(width - len(values)), Segment(text, _pressure(device, sheet) + DIM)] for text in drawn]


def chart_range(device: Device, width: int, room: int, sheet: DeviceSummary) -> str:
    """The lowest and the highest value in a chart of `width` cells, and its time span: "84.2 to 98.2 GiB in 4 min".

    Without the time span if `room` is small, and "" if that is too long as well.
    """
    known = [value for value in _history(device, width) if value is not None]
    if not known or not device.memory.total_bytes:
        return ""
    low, high, unit = used_of_total(min(known), max(known), sheet.symbols.dash)
    if low == high:
        low, high, unit = f"{min(known) / MIB:.0f}", f"{max(known) / MIB:.0f}", "MiB"
    text = f"{low} to {high} {unit}" if low != high else f"{high} {unit}"
    if len(known) == 1:
        return text if len(text) <= room else ""  # nothing has changed yet: a time would read like a rate
    back = format_seconds(chart_reach(len(device.detail.history), width) * device.detail.interval_ns / 1e9)
    return next((said for said in (f"{text} in {back}", text) if len(said) <= room), "")


def ranged_chart(device: Device, width: int, sheet: DeviceSummary) -> Line:
    """A chart of one line on its own scale with its range, in `width` cells; of the device's memory if they are few."""
    narrow = width - _RANGE_WIDTH - 1
    said = chart_range(device, narrow, _RANGE_WIDTH, sheet) if narrow >= _LEAST_CHART else ""
    if narrow < _LEAST_CHART:
        return memory_chart(device, width, 1, sheet)[0]
    return [*memory_chart(device, narrow, 1, sheet, own_scale=True)[0], blank(1), left(said, _RANGE_WIDTH, sheet.symbols, DIM)]


def amounts(device: Device, sheet: DeviceSummary) -> Line:
    """ " 98.2 / 140.4 GiB"."""
    memory = device.memory
    used, total, unit = used_of_total(memory.used_bytes, memory.total_bytes, sheet.symbols.dash)
    return [
        Segment(f"{used:>{sheet.used_width}}", DIM if notice(device, sheet.now_ns) else BOLD),
        Segment(f" / {total:>{sheet.total_width}} {unit}", DIM),
    ]


def percentage(device: Device, sheet: DeviceSummary) -> Segment:
    """ " 70%", in the colour of the bar."""
    share = share_of(device.memory.used_bytes, device.memory.total_bytes)
    return right(percent(share, sheet.symbols.dash), PERCENTAGE_WIDTH, sheet.symbols, _pressure(device, sheet))


def trend(device: Device, room: int, sheet: DeviceSummary) -> list[tuple[str, Style]]:
    """The growth rate and the time to exhaustion: one text if both fit into `room` cells, else two; [] if unknown."""
    if notice(device, sheet.now_ns) is not None:
        return []
    seconds = device.memory.seconds_until_exhaustion
    speed, soon = rate(device.memory.bytes_per_second), full_in(seconds)
    if seconds is None or not soon:
        return [(speed, DIM)] if speed else []
    style = ALARM if seconds <= URGENT_SECONDS else YELLOW
    both = f"{speed} {sheet.symbols.dot} {soon}"
    return [(both, style)] if len(both) <= room else [(soon, style), (speed, DIM)]


def trend_column(sheet: DeviceSummary) -> Column[Device]:
    """A column with the time to exhaustion, or the growth rate."""

    def soon(device: Device, cells: int) -> Line:
        said = trend(device, cells, sheet)
        return [right(said[0][0], cells, sheet.symbols, said[0][1])] if said else [blank(cells)]

    return Column("TREND", len("full in 59 min"), 5, soon, flush_right=True)


def load_columns(devices: Sequence[Device], sheet: DeviceSummary) -> list[Column[Device]]:
    """Utilisation, temperature and power; values that none of `devices` reports get no width."""
    symbols = sheet.symbols
    readings = [device.detail.reading for device in devices]
    utilized = any(reading.utilization is not None for reading in readings)
    warm = any(reading.temperature_celsius is not None for reading in readings)
    powered = any(reading.power_watts is not None for reading in readings)

    def number(text: str | None, cells: int) -> Line:
        return [right(symbols.dash, cells, symbols, DIM) if text is None else right(text, cells, symbols)]

    def utilization(device: Device, cells: int) -> Line:
        share = device.detail.reading.utilization
        return number(None if share is None else percent(share, symbols.dash), cells)

    def temperature(device: Device, cells: int) -> Line:
        celsius = device.detail.reading.temperature_celsius
        return number(None if celsius is None else f"{celsius:.0f} {symbols.degree}C", cells)

    def power(device: Device, cells: int) -> Line:
        watts = device.detail.reading.power_watts
        return number(None if watts is None else f"{watts:.0f} W", cells)

    return [
        Column("UTIL", 4 if utilized else 0, 6, utilization, flush_right=True),
        Column("TEMP", 6 if warm else 0, 3, temperature, flush_right=True),
        Column("POWER", 6 if powered else 0, 4, power, flush_right=True),
    ]


def utilization_bar(devices: Sequence[Device], width: int, sheet: DeviceSummary) -> Column[Device]:
    """A column with the utilisation as a bar."""
    known = any(device.detail.reading.utilization is not None for device in devices)

    def draw(device: Device, cells: int) -> Line:
        if (share := device.detail.reading.utilization) is None:
            return [blank(cells)]
        used, rest = bar(share, cells - len("util "), sheet.symbols)
        return [Segment("util ", DIM), Segment(used, BUSY), Segment(rest, DIM)]

    return Column("", width if known else 0, 2, draw)


def power_limit(devices: Sequence[Device], sheet: DeviceSummary) -> Column[Device]:
    """A column with the power limit."""
    known = any(device.detail.reading.power_limit_watts is not None for device in devices)

    def limit(device: Device, cells: int) -> Line:
        watts = device.detail.reading.power_limit_watts
        return [left("" if watts is None else f"of {watts:.0f} W", cells, sheet.symbols, DIM)]

    return Column("", 8 if known else 0, 1, limit)


def _history(device: Device, width: int) -> list[int | None]:
    """The history in at most `width` columns."""
    detail = device.detail
    return chart_columns(detail.history, width, newest=detail.at_ns // max(detail.interval_ns, 1))


def _scale(values: Sequence[int | None], total_bytes: int) -> tuple[int, int]:
    """The lowest and the highest value of a chart's scale."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0), max(known, default=0)
    return low, max(high, low + max(total_bytes // _FLAT, 1))


def _pressure(device: Device, sheet: DeviceSummary) -> Style:
    """The colour for the used share of its memory."""
    share = share_of(device.memory.used_bytes, device.memory.total_bytes)
    if share is None or notice(device, sheet.now_ns) is not None:
        return DIM
    return GREEN if share < YELLOW_FROM else YELLOW if share < RED_FROM else RED
