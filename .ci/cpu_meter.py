"""A pytest plugin: the CPU seconds of each test, with its threads, its children and what those started.

    CPU_METER=build/cpu_seconds python -m pytest -p cpu_meter ...

Each process of pytest appends a line of JSON for each test to a file of its own in the folder CPU_METER. Linux only: it reads
/proc. A process that left its parent (a daemon) is not counted here, but in the sum that .ci/tiers.py takes of everything.
With CPU_ORDER, such a folder of an earlier run, cheap files of tests run first.

Between tests each process times a fixed piece of work every few seconds, which says how fast the machine is meanwhile, beside
the other processes of tests.
"""

from __future__ import annotations

import collections
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# CPU seconds of `_loop` on the reference machine, an AMD EPYC with AVX-512, on which the suite without tiers took 1,210.
REFERENCE_LOOP_S = 0.0265
EVERY_S = 5.0

_TICKS = os.sysconf("SC_CLK_TCK")


def _own_s(pid: int) -> float:
    """CPU seconds of a process and of the children that it waited for; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    # utime, stime, cutime, cstime: proc_pid_stat(5), fields 14 to 17; the name before them may hold spaces.
    return sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15])) / _TICKS


def _children(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, file.read_text("ascii").split())


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, of the children that it waited for, and of its living descendants."""
    return _own_s(pid) + sum(map(cpu_s, _children(pid)))


def _loop() -> float:
    """CPU seconds of a fixed piece of work: Python's bytecode and memory."""
    began = time.thread_time()
    numbers = list(range(100_000))
    for factor in range(5):
        numbers = [(number * 31 + factor) & 0xFFFFF for number in numbers]
        numbers.sort()
    return time.thread_time() - began


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text("utf-8").splitlines())


def loops(folder: Path) -> list[float]:
    """CPU seconds of each loop of a folder's files."""
    return [entry["loop_s"] for entry in _entries(folder) if "loop_s" in entry]


def read(folder: Path) -> list[tuple[str, float]]:
    """The tests of a folder's files, with their CPU seconds."""
    return [(entry["test"], entry["cpu_s"]) for entry in _entries(folder) if entry.get("test")]


class CpuMeter:
    """Writes the CPU and wall seconds of each test, those of start-up and collection under the empty name, and loops."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)
        self._looped_at = -math.inf

    def _write(self, test: str, cpu: float, wall: float) -> None:
        self._tell(test=test, cpu_s=round(cpu, 3), wall_s=round(wall, 3))

    def _tell(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, at = cpu_s(os.getpid()), time.monotonic()
        if self._looped_at < 0:
            self._write("", before, 0.0)
        if at - self._looped_at >= EVERY_S:
            self._tell(loop_s=round(_loop(), 5))
            before, at = cpu_s(os.getpid()), time.monotonic()
            self._looped_at = at
        try:
            return (yield)
        finally:
            self._write(item.nodeid, cpu_s(os.getpid()) - before, time.monotonic() - at)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of their costs in an earlier run; those that did not run then come last."""
    if folder := os.environ.get("CPU_ORDER"):
        costs: dict[str, float] = collections.Counter()
        for test, seconds in read(Path(folder)):
            costs[test.partition("::")[0]] += seconds
        items.sort(key=lambda item: costs.get(item.nodeid.partition("::")[0], math.inf))


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("CPU_METER")
    if folder:
        config.pluginmanager.register(CpuMeter(Path(folder)), "cpu_meter_of_tests")
