"""`pagetide demo --shared` as processes: those that end early, and the whole of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import psutil
import pytest
from monitors import wait_until

from pagetide.demo import shared
from pagetide.demo.engines import DemoEngine, DemoRequest, start_with_room


def test_a_process_that_dies_is_told_and_a_model_that_cannot_be_loaded() -> None:
    async def killed() -> None:
        engine = await start_with_room()
        try:
            psutil.Process(engine.pid).kill()
            with pytest.raises(ChildProcessError, match=r"^the engine of the engine with room "):
                await engine.serve([DemoRequest("It", {"max_new_tokens": 900})])
        finally:
            await engine.close()
        with pytest.raises(ValueError, match="engine B: max_seqs must be an integer from 1 to"):
            await DemoEngine.start("engine B", {"max_seqs": 0})

    asyncio.run(killed())


def engines_of(parent: psutil.Process) -> list[psutil.Process]:
    """The processes of engines that it has started."""
    found = []
    for one in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is just ending
            found += [one] if "pagetide.server.engine_process" in one.cmdline() else []
    return found


@pytest.mark.parametrize("stopped_by", ["a killed engine", "an interrupt"])
def test_no_process_outlives_the_demo(stopped_by: str) -> None:
    """The demo in a process of its own loses an engine, or gets an interrupt, while its engines load."""
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        parent = psutil.Process(demo.pid)
        wait_until(
            lambda: len(parent.children(recursive=True)) >= 2 and engines_of(parent), "an engine and another process run"
        )
        children = parent.children(recursive=True)
        if stopped_by == "an interrupt":
            parent.send_signal(2)
        else:
            engines_of(parent)[0].kill()
        out, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert not psutil.wait_procs(children, timeout=10)[1], "a process is left over"
    assert out.splitlines() == [shared.FIRST_STATE.now]
    assert err.count("\n") == 1
    if stopped_by == "an interrupt":
        assert (demo.returncode, err) == (130, "interrupted\n")
    else:
        assert demo.returncode == 2 and "ended while it was loading" in err


@pytest.mark.stress
def test_the_whole_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pagetide", "demo", "--shared", "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    served, rest = told["claim"].split(" ", 1)
    assert rest == "requests served, none failed, 0 tokens changed, memory never above the limit"
    assert int(served) >= 32
    assert sum(engine["memory"]["recalls"] for engine in told["engines"]) > 0
