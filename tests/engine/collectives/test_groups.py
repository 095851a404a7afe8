"""Groups of real processes: sums in the order of ranks, gathered columns, exchanged bytes; aborts, and killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagetide import native
from pagetide.engine.collectives.factory import create_store
from pagetide.engine.collectives.shared_memory_group import create_group_memory, stop_from_outside

PROGRAM = Path(__file__).with_name("member.py")
needs_native = pytest.mark.skipif(native.instructions() is None, reason="the shared memory's operators are native")
KINDS = [pytest.param("shared-memory", marks=needs_native), "gloo"]


def start(kind: str, size: int, scenario: str, seed: int = 0) -> tuple[list[subprocess.Popen[str]], int]:
    """The processes of a group, and the descriptor of their memory."""
    memory, store = create_group_memory(size), create_store()
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), kind, str(rank), str(size), str(memory), str(store), scenario, str(seed)],
            pass_fds=(memory, store), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    os.close(store)
    return processes, memory


def outcomes(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each has printed; all must have ended well."""
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(err for _, err in said)
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_random_collectives_equal_a_naive_model(kind: str, size: int) -> None:
    processes, memory = start(kind, size, "random", seed=size)
    assert len(set(outcomes(processes))) == 1, "all shards have the same bits"
    os.close(memory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_aborts_stops_all_and_they_go_on_after_a_reset(kind: str) -> None:
    processes, memory = start(kind, 3, "abort")
    assert outcomes(processes) == ["aborted 6.0 aborted 6.0"] * 3
    os.close(memory)


@needs_native
def test_a_killed_shard_is_waited_for_until_the_driver_stops_the_others() -> None:
    processes, memory = start("shared-memory", 2, "wait")
    assert processes[1].stdout is not None and processes[1].stdout.readline() == "ready\n"
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    assert processes[0].poll() is None
    stop_from_outside(memory)
    out, err = processes[0].communicate(timeout=60)
    assert out.split() == ["ready", "stopped", "alive"], err
    processes[1].communicate()
    os.close(memory)
