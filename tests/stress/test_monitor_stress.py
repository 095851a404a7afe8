"""Many lives of the monitor (PAGETIDE_MONITOR_ROUNDS): nothing of them is left, no files, descriptors or processes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import psutil
import pytest
from monitors import MonitorProcess, wait_until

from pagetide import monitor
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.stress

ROUNDS = int(os.environ.get("PAGETIDE_MONITOR_ROUNDS", "300"))
WATCHED_ROUNDS = 100


def held(directory: Path) -> tuple[int, int, list[str]]:
    """What this process and the directory hold: descriptors, children, files."""
    descriptors = len(os.listdir("/proc/self/fd"))
    files = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    return descriptors, len(psutil.Process().children(recursive=True)), files


def test_many_starts_and_ends_leave_nothing(tmp_path: Path) -> None:
    seed = 20261121
    print(f"seed {seed}")
    rng = random.Random(seed)
    running = MonitorProcess(tmp_path / "run", "--metrics-port", "0", "--interval", "0.005")
    running.start()
    with RecordReader.open(running.record) as reader:
        assert running.end() == 0
        before = held(tmp_path / "run")
        for i in range(ROUNDS):
            running.start()
            wait_until(lambda: reader.monitor_pid == running.pid and reader.is_live(), f"reading in round {i}")
            if rng.random() < 0.2:
                running.kill()
            else:
                assert running.end() == 0, running.said()
        running.start()
        assert running.end() == 0
        wait_until(lambda: not reader.is_live())
        assert held(tmp_path / "run") == before
        assert before[2] == ["events", "monitor.lock"]
    assert "Traceback" not in running.said()


def test_monitors_on_demand_leave_nothing(tmp_path: Path) -> None:
    def once() -> int:
        with monitor.watch(runtime_dir=tmp_path / "run", timeout_s=60) as watched:
            assert watched.devices()
            return watched.monitor_pid

    others = held(tmp_path / "run")[1]  # of what ran in this process before
    pids = [once()]
    wait_until(lambda: not psutil.pid_exists(pids[-1]))
    before = held(tmp_path / "run")
    for _ in range(WATCHED_ROUNDS):
        pids.append(once())
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids[-3:]))
    assert held(tmp_path / "run") == before
    assert before[1] == others
