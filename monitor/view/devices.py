"""All devices in one of two forms: cards with charts as high as fit, or rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.segment import Segment

from ..snapshot import Device
from .cards import Group, cards_height, cards_lines
from .device_summary import (
    MOST_LABEL,
    PERCENTAGE_WIDTH,
    DeviceSummary,
    amounts,
    load_columns,
    memory_bar,
    name_of,
    notice,
    percentage,
    ranged_chart,
    trend_column,
)
from .symbols import Symbols
from .table import GAP, Column, fitting, row, titles
from .text import BOLD, DIM, Line, blank, crop, cut, left, right, width_of

_CHART_ROWS = range(8, 0, -1)
_LEAST_WIDTH = 80  # of a column, if devices are shown side by side
_GAP = 3  # between columns of devices
# Of a row: cells of a name at most, of the bar at least, of the chart
_MOST_NAME, _LEAST_BAR, _CHART = 18, 8, 34

T = TypeVar("T")


def device_lines(
    devices: Sequence[Device], now_ns: int, *, width: int, good: int | None, most: int | None, symbols: Symbols
) -> list[Line]:
    """The devices in lines of `width` cells: cards with the highest charts within `good` lines, else rows cut to `most` lines.

    Without limits: cards with a chart of one line.
    """
    if not devices:
        return [[Segment(cut("no devices", width, symbols), DIM)]][:most]
    groups = _groups(devices)
    columns = max(1, min(width // _LEAST_WIDTH, len(groups) // 2))
    sheet = DeviceSummary.for_devices(devices, now_ns, (width + _GAP) // columns - _GAP, symbols)
    parts = _parts(groups, columns)
    if good is None or most is None:
        return _beside(cards_lines(parts, 1, sheet), sheet.width)
    for chart_rows in _CHART_ROWS:
        if max(cards_height(part, chart_rows) for part in parts) <= good:
            return _beside(cards_lines(parts, chart_rows, sheet), sheet.width)
    return _rows([device for group in groups for device in (group.device, *group.instances)], columns, most, sheet)


def _groups(devices: Sequence[Device]) -> list[Group]:
    """Instances grouped with their GPU; an instance of a GPU that is not shown stands alone."""
    shown = {device.info.uuid for device in devices if device.info.parent_uuid is None}
    instances: dict[str, list[Device]] = {}
    alone = []
    for device in devices:
        if (parent := device.info.parent_uuid) is not None and parent in shown:
            instances.setdefault(parent, []).append(device)
        else:
            alone.append(device)
    return [Group(device, tuple(instances.get(device.info.uuid, ()))) for device in alone]


def _rows(devices: Sequence[Device], columns: int, most: int, sheet: DeviceSummary) -> list[Line]:
    """Rows, and the number of devices that do not fit into `most` lines."""
    shown = devices if -(-len(devices) // columns) + 1 <= most else devices[: max(most - 2, 0) * columns]
    lines = _beside(_rows_lines(_parts(shown, columns), sheet), sheet.width) if shown else []
    if len(shown) < len(devices):
        text = f"{sheet.symbols.ellipsis} {len(devices) - len(shown)} more devices"
        lines.append([Segment(cut(text, sheet.width, sheet.symbols), DIM)])
    return lines[:most]


def _rows_lines(parts: Sequence[Sequence[Device]], sheet: DeviceSummary) -> list[list[Line]]:
    """Each of `parts` as a header line and a line per device, with equal columns."""
    devices = [device for part in parts for device in part]
    labels = min(max(len(device.info.index) for device in devices), MOST_LABEL)
    names = min(max(len("NAME"), *(len(_short_name(device)) for device in devices)), _MOST_NAME)
    columns = fitting(_columns(devices, names, sheet), sheet.width - labels - GAP)

    def line(device: Device) -> Line:
        head: Line = [right(device.info.index, labels, sheet.symbols, BOLD), blank(GAP)]
        if (wrong := notice(device, sheet.now_ns)) is None:
            return [*head, *row(columns, device)]
        head += [left(_short_name(device), names, sheet.symbols), blank(GAP)]
        return [*head, Segment(cut(wrong[0], max(sheet.width - width_of(head), 0), sheet.symbols), wrong[1])]

    head = [blank(labels + GAP), *titles(columns, sheet.symbols)]
    return [[crop(text, sheet.width) for text in (head, *map(line, part))] for part in parts]


def _columns(devices: Sequence[Device], names: int, sheet: DeviceSummary) -> list[Column[Device]]:
    """All columns; the bar takes the remaining width."""
    return [
        Column("NAME", names, 7, lambda device, cells: [left(_short_name(device), cells, sheet.symbols)]),
        Column("MEMORY", _LEAST_BAR, 8, lambda device, cells: memory_bar(device, cells, sheet), stretches=True),
        Column("USED / TOTAL", sheet.amounts_width, 9, lambda device, _: amounts(device, sheet), flush_right=True),
        Column("", PERCENTAGE_WIDTH, 10, lambda device, _: [percentage(device, sheet)]),
        *load_columns(devices, sheet),
        Column("LAST MINUTES", _CHART, 0, lambda device, cells: ranged_chart(device, cells, sheet)),
        trend_column(sheet),
    ]


def _short_name(device: Device) -> str:
    return name_of(device).removeprefix("NVIDIA ")


def _parts(items: Sequence[T], number: int) -> list[Sequence[T]]:
    """At most `number` parts of equal length, except the last."""
    length = -(-len(items) // number)
    return [items[start : start + length] for start in range(0, len(items), length)]


def _beside(parts: Sequence[Sequence[Line]], width: int) -> list[Line]:
    """Columns of `width` cells side by side."""
    lines = []
    for place in range(max(len(part) for part in parts)):
        line: Line = []
        for number, part in enumerate(parts):
            own = part[place] if place < len(part) else []
            line += own if number == len(parts) - 1 else [*own, blank(width - width_of(own) + _GAP)]
        lines.append(line)
    return lines
