"""`pagetide demo --shared`: its load, the external process's visits, and processes that end early.

One engine process serves a trace in tests/examples/test_tide.py; here they are stopped or fakes behind `poll`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import psutil
import pytest
from monitors import wait_until

from pagetide.demo import shared
from pagetide.demo.device_use import DeviceSample, Visitor
from pagetide.demo.display import NoDisplay
from pagetide.demo.engine_process import Arrival, EngineJob, TraceEngineProcess
from pagetide.demo.shared_view import SharedState
from pagetide.monitor.units import MIB

JOB = EngineJob([Arrival(0.0, 20, 2)], 0, 8 * MIB, 128 * MIB)


def test_a_process_that_dies_is_told_with_its_last_words() -> None:
    engine = TraceEngineProcess("engine A", JOB)
    try:
        psutil.Process(engine.pid).kill()
        for _ in range(2):
            with pytest.raises(ChildProcessError, match=r"^engine A \(process \d+\) has ended with status -9$"):
                engine.hear()
        with pytest.raises(ChildProcessError, match="has ended with status -9"):
            engine.poll()
        engine.tell("to nobody")
    finally:
        engine.close()
    broken = TraceEngineProcess("engine B", replace(JOB, max_seqs=0))
    try:
        with pytest.raises(ChildProcessError, match=r"has ended with status 1: .*max_seqs must be at least 1, got 0"):
            broken.hear()
    finally:
        broken.close()


@pytest.mark.parametrize("stopped_by", ["a killed engine", "an interrupt"])
def test_no_process_outlives_the_demo(stopped_by: str) -> None:
    """The demo in a process of its own loses an engine, or gets an interrupt, while its engines load."""
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        parent = psutil.Process(demo.pid)
        wait_until(lambda: len(parent.children(recursive=True)) >= 3, "two engines and an external process run")
        children = parent.children(recursive=True)
        if stopped_by == "an interrupt":
            parent.send_signal(2)
        else:
            next(one for one in children if "pagetide.demo.engine_process" in one.cmdline()).kill()
        out, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert not psutil.wait_procs(children, timeout=10)[1], "a process is left over"
    assert out.splitlines() == [shared.FIRST_STATE.now]
    assert err.count("\n") == 1
    if stopped_by == "an interrupt":
        assert (demo.returncode, err) == (130, "interrupted\n")
    else:
        assert demo.returncode == 2 and "has ended with status -9" in err


class Process:
    """What the external process and its device answer."""

    def __init__(self, free_bytes: int) -> None:
        self.held_bytes, self._total = 0, free_bytes

    def hold(self, num_bytes: int) -> None:
        self.held_bytes = num_bytes

    def free_bytes(self) -> int:
        return self._total - self.held_bytes


def test_the_external_process_comes_and_goes_in_pieces() -> None:
    process: Any = Process(40 * MIB)
    visitor = Visitor(process, process, piece_bytes=16 * MIB, piece_s=1.0)
    held = []
    for at_s, wanted in ((0.0, 64), (0.5, 64), (1.0, 64), (2.0, 64), (3.0, 0), (4.0, 0), (5.0, 0)):
        visitor.advance(at_s, wanted * MIB)
        held.append(process.held_bytes // MIB)
    assert held == [16, 16, 32, 32, 16, 0, 0]
    assert (visitor.pieces, visitor.refused) == (2, 1)


class Engine:
    """The messages of an engine process, as given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        messages, self.messages = self.messages, []
        return messages


def test_what_is_watched_becomes_states_and_figures() -> None:
    shown: list[SharedState] = []

    class Display(NoDisplay):
        def show(self, state: object) -> None:
            assert isinstance(state, SharedState)
            shown.append(state)

    engines: Any = [Engine(), Engine()]
    counts = tuple(replace(shared.EngineCounts(), total=16) for _ in engines)
    state = replace(shared.FIRST_STATE, capacity_bytes=1000 * MIB, engines=counts)
    watched = shared.SharedRun(Display(), state, engines, [16, 16])

    def sample(
        at_s: float, other: int, kv: tuple[int, int], external: int, recalling: tuple[bool, bool]
    ) -> SharedState:
        one = DeviceSample(at_s, (other * MIB, 300 * MIB), (kv[0] * MIB, kv[1] * MIB), external * MIB, 0, recalling)
        watched._show(one, [watched._counts(number) for number in range(2)])
        return shown[-1]

    first = sample(0.0, 300, (8, 8), 10, (False, False))
    assert watched._wanted(0.0) == 0, "the pools are small"
    assert first.contended_bytes == 390 * MIB and first.now == "Idle: pools give their memory back."
    engines[0].messages = [{"progress": {"running": 3, "waiting": 1, "preemptions": 0, "done": 2, "recalls": 0}}]
    busy = sample(0.3, 305, (40, 8), 10, (False, False))
    assert busy.now == "Engine A has requests: pools grow as these need memory."
    assert busy.holdings[-1].programs == 5 * MIB and busy.engines[0].done == 2
    sample(0.4, 300, (40, 24), 10, (False, False))
    assert watched._wanted(0.4) == watched._wanted(0.4 + shared.VISIT_S - 0.1) == shared.VISIT_BYTES
    assert watched._wanted(0.5 + shared.VISIT_S) == 0
    engines[0].messages = [{"progress": {"running": 3, "waiting": 1, "preemptions": 2, "done": 2, "recalls": 1}}]
    recalled = sample(0.6, 300, (30, 24), 110, (False, True))
    assert recalled.now == "RECALL: engine A and engine B must give memory back." and recalled.alarm
    assert sample(0.7, 300, (30, 24), 110, (False, False)).holdings[-1].recalled == (True, True), "in the same column"
    later = sample(0.7 + shared.RECALL_SHOWN_S, 300, (30, 8), 110, (False, False))
    assert later.now == "The external process holds 100 MiB; the engines share the rest." and not later.alarm
    engines[1].messages = [{"served": True}]
    assert sample(3.0, 300, (30, 8), 10, (False, False)).engines[1].done == 16
    assert [len(one.holdings) for one in shown] == [1, 2, 2, 3, 3, 4, 5], "a column for each quarter of a second"
    visitor: Any = Visitor(Process(0), Process(0), 1, 1.0)  # type: ignore[arg-type]
    result = watched.result(visitor, ())
    assert result.most_kv_bytes == (40 * MIB, 24 * MIB) and result.most_external_bytes == 100 * MIB
    assert result.most_held_bytes == (600 + 54 + 110) * MIB and result.capacity_bytes == 1000 * MIB


def test_the_load_suits_the_model() -> None:
    for number, job in enumerate(shared.engine_jobs(seed=3)):
        assert len(job.arrivals) == sum(requests for _, requests in shared.BURSTS[number])
        assert all(one.prompt_tokens + one.output_tokens < 1024 for one in job.arrivals)
        assert [one.at_s for one in job.arrivals] == sorted(one.at_s for one in job.arrivals)
    assert shared.engine_jobs(3) == shared.engine_jobs(3) != shared.engine_jobs(4)
    assert shared.PIECE_BYTES < shared.HEADROOM


@pytest.mark.stress
def test_the_whole_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared", "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["claim"] == "32 requests served, none failed, 0 tokens changed, memory never above the limit"
    assert sum(engine["memory"]["recalls"] for engine in told["engines"]) > 0
