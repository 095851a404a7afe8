"""Draws the terminal view of vram-monitor as an SVG, of an invented machine: the picture in docs/monitor.md.

    python examples/draw_monitor.py

The lines are those that a terminal of that size gets, drawn by `pagetide.monitor.view.picture`: the same arguments give
the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from pagetide.common.units import GIB, MIB
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    LeaseUse,
    ProcessUse,
    Snapshot,
)
from pagetide.monitor.view.page import render_live
from pagetide.monitor.view.picture import picture
from pagetide.monitor.view.state import ViewState

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "vram-monitor.svg"
WIDTH, HEIGHT = 110, 33
CLOCK = datetime(2026, 11, 20, 14, 3, 27)

SECOND_NS = 1_000_000_000
NOW_NS = 50_000 * SECOND_NS


def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw the terminal view of vram-monitor as an SVG.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file to write (default: that picture)")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"cells (default {WIDTH})")
    parser.add_argument("--height", type=int, default=HEIGHT, help=f"lines (default {HEIGHT})")
    args = parser.parse_args(argv)
    if args.width < 1 or args.height < 1:
        parser.error(f"the picture must have at least one cell and one line, got {args.width} x {args.height}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(draw(args.width, args.height), encoding="utf-8")


def draw(width: int, height: int) -> str:
    """The SVG of the view in a terminal of `width` cells and `height` lines."""
    page = render_live(machine(), ViewState(can_act=True), width=width, height=height, clock=CLOCK)
    return picture(page.lines.lines, width, height, "vram-monitor", "The terminal view of vram-monitor")


# -------------------------------------------------------------------------------------------------------- the machine


def machine() -> Snapshot:
    """Two GPUs with a training job and a notebook on one, and on the other two engines, one growing where the other yields."""
    serve = ProcessUse(40961, 71 * GIB, user="ada", command="python serve.py --model llama-3.1-8b")
    judge = ProcessUse(40988, 18 * GIB, user="ada", command="python serve.py --model judge-1b")
    train = ProcessUse(41877, 108 * GIB, user="grace", command="python train.py --config finetune.yaml --resume")
    loader = ProcessUse(41877, 46 * GIB, "host", user="grace", command="python train.py --config finetune.yaml --resume")
    notebook = ProcessUse(53011, 9 * GIB, user="linus", command="python -m ipykernel_launcher -f kernel-7f3a.json")
    tide = _curve((0, 30), (52, 34), (84, 66), (112, 47), (146, 79), (182, 58), (255, 90))
    training = _curve((0, 9), (66, 9), (78, 96), (90, 104), (120, 104), (124, 118), (255, 118))
    host = _curve((0, 96), (66, 96), (92, 187), (255, 187))
    snapshot = Snapshot(
        at_ns=NOW_NS,
        source="nvml+host",
        monitor_pid=40120,
        started_ns=NOW_NS - 11_520 * SECOND_NS,
        devices=(
            _gpu(0, tide, 212.5 * MIB, 0.62, 61.0, 412.0, serve, judge),
            _gpu(1, training, 0.0, 0.98, 74.0, 688.0, train, notebook),
            _device(
                DeviceInfo("HOST-4c4c4544", "host", DeviceKind.HOST, "Host memory"),
                1007 * GIB,
                host,
                -1.4 * MIB,
                DetailReading(utilization=0.17, processes=(loader,)),
            ),
        ),
    )
    growing = _lease("llama-8b", serve, 76 * GIB, {"weights": 15 * GIB, "kv": 53 * GIB}, 410 * MIB)
    yielding = _lease("judge-1b", judge, 24 * GIB, {"weights": 3 * GIB, "kv": 14 * GIB}, 9 * GIB)
    recall = {"state": "recalling", "recall_target_bytes": 10 * GIB, "recall_age_seconds": 0.04}
    return snapshot.with_leases((replace(growing, asked_bytes=92 * GIB), replace(yielding, **recall)))


def _lease(engine: str, process: ProcessUse, granted_bytes: int, held: dict[str, int], spare_bytes: int) -> LeaseUse:
    """Of the first GPU."""
    assert process.user is not None and process.used_bytes is not None
    return LeaseUse(
        engine=engine,
        pid=process.pid,
        user=process.user,
        device_uuid="GPU-0",
        min_bytes=held["weights"] + 2 * GIB,
        max_bytes=None,
        weight=1.0,
        priority=0,
        granted_bytes=granted_bytes,
        held_bytes=process.used_bytes,
        held_by_class=held,
        spare_bytes=spare_bytes,
        asked_bytes=None,
        state="ok",
        recall_target_bytes=None,
        recall_age_seconds=None,
    )


def _gpu(
    number: int,
    history: tuple[int, ...],
    bytes_per_second: float,
    utilization: float,
    celsius: float,
    watts: float,
    *processes: ProcessUse,
) -> Device:
    info = DeviceInfo(f"GPU-{number}", str(number), DeviceKind.GPU, "NVIDIA H200")
    reading = DetailReading(utilization, celsius, watts, 700.0, processes)
    return _device(info, 143_771 * MIB, history, bytes_per_second, reading)


def _device(
    info: DeviceInfo, total_bytes: int, history: tuple[int, ...], bytes_per_second: float, reading: DetailReading
) -> Device:
    memory = DeviceMemory(
        at_ns=NOW_NS - 12_000_000,
        interval_ns=20_000_000,
        total_bytes=total_bytes,
        free_bytes=total_bytes - history[-1],
        bytes_per_second=bytes_per_second,
        polls=576_000,
        failures=0,
    )
    return Device(info, memory, DeviceDetail(NOW_NS, SECOND_NS, reading, history))


def _curve(*points: tuple[int, int]) -> tuple[int, ...]:
    """Bytes at each second along straight lines between `points` (second, GiB). Whole numbers: alike on every machine."""
    values = []
    for (begin, low), (end, high) in pairwise(points):
        values += [low * GIB + (high - low) * GIB * (second - begin) // (end - begin) for second in range(begin, end)]
    return (*values, points[-1][1] * GIB)


if __name__ == "__main__":
    main()
