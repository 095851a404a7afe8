"""Devices as a table, one line each: the form for many devices, or for few lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from ..snapshot import Device
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
from .table import GAP, Column, fitting, row, titles
from .text import BOLD, Line, blank, crop, cut, left, right, width_of

_MOST_NAME, _LEAST_BAR, _CHART = 18, 8, 34


def rows_lines(parts: Sequence[Sequence[Device]], sheet: DeviceSummary) -> list[list[Line]]:
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
