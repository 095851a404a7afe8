"""Devices as cards: name and load, a memory bar with amounts, a chart of the last minutes with the trend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment

from ..snapshot import Device
from .device_summary import (
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
    utilization_bar,
)
from .table import Column, fitting, row
from .text import BOLD, DIM, YELLOW, Line, blank, crop, cut, right, spread, width_of

_TREND_WIDTH = 29  # "+212.5 MiB/s · full in 59 min"
_ROOMY = 72  # minimum line width, in cells, for the trend at full width
_LOAD_BAR = 15
_INDENT = 2  # cells after the label, before name, bar and chart


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


def cards_height(groups: Sequence[Group], chart_rows: int) -> int:
    """The number of lines that `cards_lines` returns."""
    return sum(group.height(chart_rows) for group in groups) + max(len(groups) - 1, 0)


def cards_lines(parts: Sequence[Sequence[Group]], chart_rows: int, sheet: DeviceSummary) -> list[list[Line]]:
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
