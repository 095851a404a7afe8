"""A profile of decode steps: time per kernel, and idle time of the device.

Kernels that a CUDA graph replays show by their names, as all others do. A step begins on the device with its one upload: so
what the device waits for before a copy from the host it waits for between two steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.figures import Figure
from pagetide import LLM

from .bench import Bench
from .report import Item, Note
from .steps import watched

PROFILED_STEPS = 16
PARTS = {  # a kernel is of the first part that has a piece of its name
    "attention": ("_decode", "_merge", "_prefill", "_write", "flash", "fmha", "attention", "paged", "sdpa"),
    "linears": (
        "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "matmul", "aten::mm", "aten::addmm", "mkl", "linear",
    ),
    "copies": ("memcpy", "memset", "copy"),
}  # fmt: skip
UPLOAD = "memcpy htod"

Event = tuple[str, float, float]  # a kernel or a copy: its name, when it began and ended, in µs


def profiled(bench: Bench, llm: LLM, rows: int, new_tokens: int, generate: Callable[[], None]) -> Iterator[Item]:
    """Of steps in the midst of `generate`, in which `rows` sequences decode `new_tokens` each."""
    most = max(1, min(PROFILED_STEPS, new_tokens // 2 - 1))
    title = f"a decode step of {rows} under the profiler"
    profiler, seconds = _profile(bench, llm, rows, most, generate)
    if seconds is None:
        yield Note(title, ("no profile: too few steps decoded all sequences",))
        return
    cuda = bench.clock.cuda
    kernels, spent = _kernels(profiler, cuda, most)
    if not kernels:
        yield Note(title, ("no profile: the profiler saw nothing of the device",))
        return
    whole = 1e3 * seconds / most
    spent["device idle" if cuda else "outside of operators"] = whole - sum(spent.values())
    yield Figure(title, whole, "ms")
    for part, ms in sorted(spent.items(), key=lambda item: -item[1]):
        yield Figure(f"... {rows}: {part}", ms, "ms")
    before, within = idle(_events(profiler, DeviceType.CUDA if cuda else DeviceType.CPU))
    yield Figure(f"... {rows}: device idle between two steps", before / 1e3 / max(1, most - 1), "ms")
    yield Figure(f"... {rows}: device idle within a step", within / 1e3 / most, "ms")
    yield Figure(f"... {rows}: kernels launched", sum(count for _, count, _, _ in kernels), "count")
    top = sorted(kernels, reverse=True)[:24]
    yield Note(
        title, tuple(f"{ms:8.3f} ms  {count:6.1f} x  {part:12.12s}  {name[:90]}" for ms, count, part, name in top)
    )


def idle(events: Iterable[Event]) -> tuple[float, float]:
    """µs between the first of the events and the last in which none ran: before uploads, and before all others."""
    before = within = 0.0
    busy_until: float | None = None
    for name, began, ended in sorted(events, key=lambda event: event[1:]):
        gap = 0.0 if busy_until is None else max(0.0, began - busy_until)
        if UPLOAD in name.lower():
            before += gap
        else:
            within += gap
        busy_until = ended if busy_until is None else max(busy_until, ended)
    return before, within


def _profile(
    bench: Bench, llm: LLM, rows: int, most: int, generate: Callable[[], None]
) -> tuple[torch.profiler.profile, float | None]:
    """A profile of `most` steps, and their seconds; None where there were not so many.

    It begins and ends with a device that has done all that was queued, so as many steps are in it as were begun meanwhile.
    """
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activity.CUDA if bench.clock.cuda else activity.CPU])
    marks: list[float] = []

    def before(num_full: int) -> None:
        if num_full == 2 and not marks:
            bench.clock.synchronize()
            profiler.start()
            marks.append(time.perf_counter())
        elif num_full == 2 + most and len(marks) == 1:
            bench.clock.synchronize()
            marks.append(time.perf_counter())
            profiler.stop()

    with watched(llm, rows) as steps:
        steps.before = before
        generate()
    if len(marks) == 1:
        profiler.stop()
    return profiler, marks[1] - marks[0] if len(marks) == 2 else None


def _kernels(
    profiler: torch.profiler.profile, cuda: bool, steps: int
) -> tuple[list[tuple[float, float, str, str]], dict[str, float]]:
    """Of each kernel: ms and launches a step, its part and its name; and the ms a step of each part."""
    spent: dict[str, float] = defaultdict(float)
    kernels = []
    for event in profiler.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        if micros <= 0:
            continue
        name = event.key.lower()
        part = next((part for part, pieces in PARTS.items() if any(p in name for p in pieces)), "rest of the device")
        spent[part] += micros / 1e3 / steps
        kernels.append((micros / 1e3 / steps, event.count / steps, part, event.key))
    return kernels, spent


def _events(profiler: torch.profiler.profile, device: DeviceType) -> Iterator[Event]:
    found: Any = profiler.events()
    return (
        (event.name, event.time_range.start, event.time_range.end) for event in found if event.device_type == device
    )
