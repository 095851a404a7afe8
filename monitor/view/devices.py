"""All devices in one of two forms: cards with charts as high as fit, or rows of a table.

A card is name and load, a memory bar with amounts, and a chart of the last minutes with the trend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.segment import Segment

from ..snapshot import Device
from .device_summary import (
    MOST_LABEL,
    PERCENTAGE_WIDTH,
    DeviceSummary,
    amounts,
    chart_range,
    label,
    load_columns,
    memory_bar,
    memory_chart,
    name_of,
    notice,
    percentage,
    power_limit,
    ranged_chart,
    trend,
    trend_column,
    utilization_bar,
)
from .symbols import Symbols
from .table import GAP, Column, fitting, row, titles
from .text import BOLD, DIM, YELLOW, Line, blank, crop, cut, left, right, spread, width_of

_CHART_ROWS = range(8, 0, -1)
_LEAST_WIDTH = 80  # of a column, if devices are shown side by side
_GAP = 3  # between columns of devices
# Of a row: cells of a name at most, of the bar at least, of the chart
_MOST_NAME, _LEAST_BAR, _CHART = 18, 8, 34
# Of a card
_TREND_WIDTH = 29  # "+212.5 MiB/s · full in 59 min"
_ROOMY = 72  # minimum line width, in cells, for the trend at full width
_LOAD_BAR = 15
_INDENT = 2  # cells after the label, before name, bar and chart

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
        return _beside(_cards_lines(parts, 1, sheet), sheet.width)
    for chart_rows in _CHART_ROWS:
        if max(_cards_height(part, chart_rows) for part in parts) <= good:
            return _beside(_cards_lines(parts, chart_rows, sheet), sheet.width)
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


# ---- cards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """A device and the MIG instances into which it is partitioned."""

    device: Device
    instances: tuple[Device, ...] = ()

    @property
    def has_memory(self) -> bool:
        """Whether there is memory to draw: false for a dead GPU, or if all of it belongs to the instances."""
        return self.device.memory.total_bytes is not None

    def height(self, chart_rows: int) -> int:
        """Lines of its card."""
        return 1 + (1 + chart_rows if self.has_memory else 0) + len(self.instances)


def _cards_height(groups: Sequence[Group], chart_rows: int) -> int:
    """The number of lines that `_cards_lines` returns."""
    return sum(group.height(chart_rows) for group in groups) + max(len(groups) - 1, 0)


def _cards_lines(parts: Sequence[Sequence[Group]], chart_rows: int, sheet: DeviceSummary) -> list[list[Line]]:
    """The cards of each of `parts`, stacked, with charts of `chart_rows` lines."""
    devices = [group.device for part in parts for group in part]
    load = [utilization_bar(devices, _LOAD_BAR, sheet), *load_columns(devices, sheet), power_limit(devices, sheet)]
    name_width = min(sheet.name_width, max(sheet.width // 3, 8))
    load = fitting(load, sheet.width - sheet.label_width - _INDENT - name_width - _INDENT)
    stacks = []
    for part in parts:
        lines: list[Line] = []
        for group in part:
            lines += [[]] if lines else []
            lines += _card(group, load, chart_rows, sheet)
        stacks.append(lines)
    return stacks


def _card(group: Group, load: Sequence[Column[Device]], chart_rows: int, sheet: DeviceSummary) -> list[Line]:
    lines = [_title(group.device, load, sheet)]
    if group.has_memory:
        lines += _memory(group.device, chart_rows, sheet)
    return lines + [_instance(device, sheet) for device in group.instances]


def _title(device: Device, load: Sequence[Column[Device]], sheet: DeviceSummary) -> Line:
    """Index and name; on the right the load, or the problem."""
    head = [label(device, sheet), blank(_INDENT)]
    room = max(sheet.width - width_of(head), 0)
    wrong = notice(device, sheet.now_ns)
    if wrong is None and device.detail.error is not None:
        wrong = f"no details: {device.detail.error}", YELLOW
    if wrong is None:
        tail = row(load, device)
    else:
        text, style = wrong
        tail = [Segment(cut(text, max(room - 2 - min(sheet.name_width, room // 2), 0), sheet.symbols), style)]
    name = cut(name_of(device), max(room - width_of(tail) - 1, 0), sheet.symbols)
    return spread([*head, Segment(name, BOLD)], tail, sheet.width)


def _memory(device: Device, chart_rows: int, sheet: DeviceSummary) -> list[Line]:
    """The bar with its amounts, then the chart with the trend."""
    body, side = _body_width(sheet), _side_width(sheet)
    said = trend(device, side, sheet)[:chart_rows]
    beside = [right(text, side, sheet.symbols, style) for text, style in said]
    if len(beside) < chart_rows:
        beside += [blank(side)] * (chart_rows - len(beside) - 1)
        beside.append(right(chart_range(device, body, side, sheet), side, sheet.symbols, DIM))
    lines = [[*memory_bar(device, body, sheet), blank(2), *_amounts(device, sheet)]]
    ranged = len(said) < chart_rows
    charts = memory_chart(device, body, chart_rows, sheet, own_scale=True)
    if not ranged and chart_rows == 1:
        charts = [ranged_chart(device, body, sheet)]
    elif not ranged:
        charts = memory_chart(device, body, chart_rows, sheet)
    for line, text in zip(charts, beside, strict=True):
        lines.append([*line, blank(2), text])
    return [crop([blank(sheet.label_width + _INDENT), *line], sheet.width) for line in lines]


def _instance(device: Device, sheet: DeviceSummary) -> Line:
    """An instance of a partitioned GPU in one line; its bar ends where those of whole devices end."""
    body, symbols = _body_width(sheet), sheet.symbols
    head = [blank(sheet.label_width + _INDENT), label(device, sheet), blank(1)]
    name = cut(name_of(device), max(min(sheet.name_width, body // 2 - sheet.label_width), 0), symbols)
    head += [Segment(name), blank(2)]
    wrong = notice(device, sheet.now_ns)
    if wrong is not None:
        text = cut(wrong[0], max(sheet.width - width_of(head), 0), symbols)
        return spread(head, [Segment(text, wrong[1])], sheet.width)
    drawn = memory_bar(device, body + sheet.label_width + _INDENT - width_of(head), sheet)
    return crop([*head, *drawn, blank(2), *_amounts(device, sheet)], sheet.width)


def _amounts(device: Device, sheet: DeviceSummary) -> Line:
    line = [*amounts(device, sheet), blank(1), percentage(device, sheet)]
    return [blank(_side_width(sheet) - width_of(line)), *line]


def _side_width(sheet: DeviceSummary) -> int:
    """Cells to the right of bar and chart, for amounts and trend."""
    return max(sheet.amounts_width + 1 + PERCENTAGE_WIDTH, _TREND_WIDTH if sheet.width >= _ROOMY else 0)


def _body_width(sheet: DeviceSummary) -> int:
    """Cells of bar and chart."""
    return max(sheet.width - sheet.label_width - _INDENT - 2 - _side_width(sheet), 0)
