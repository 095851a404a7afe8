"""`pagetide demo --shared` as processes: those that end early, and the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from monitors import wait_until

from pagetide.common.units import MIB
from pagetide.demo import shared
from pagetide.demo.engine_process import Arrival, EngineJob, TraceEngineProcess

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
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
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


@pytest.mark.stress
def test_the_whole_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared", "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["claim"] == "32 requests served, none failed, 0 tokens changed, memory never above the limit"
    assert sum(engine["memory"]["recalls"] for engine in told["engines"]) > 0
