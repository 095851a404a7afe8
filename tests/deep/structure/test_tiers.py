"""A run of tests counts the CPU seconds of what its tests leave behind, and sees failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_meter  # .ci/cpu_meter.py
from checkout import ROOT

# A test whose child starts a process that outlives both, and burns four seconds.
DAEMON = """
import subprocess, sys

BURN = "import time\\nwhile time.process_time() < 4: pass"
LEAVE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"

def test_leaves_a_daemon():
    subprocess.run([sys.executable, "-c", LEAVE], check=True)

def test_leaves_nothing():
    pass

def test_fails():
    assert False
"""
RUN = """
import json, sys
from pathlib import Path
import tiers

tiers.METER = Path(sys.argv[2])
tiers._adopt()
spent = tiers.Spent()
status = tiers.run(["-c", "/dev/null", "--rootdir", sys.argv[1], sys.argv[3]], spent)
print(json.dumps([status, spent.cpu_s]))
"""


def run(tmp_path: Path, test: str) -> tuple[int, float]:
    """Exit status and CPU seconds of a run of one of DAEMON's tests."""
    folder = tmp_path / "sample"
    folder.mkdir(exist_ok=True)
    (folder / "test_sample.py").write_text(DAEMON)
    command = [sys.executable, "-c", RUN, str(folder), str(tmp_path / "meter"), f"{folder}/test_sample.py::{test}"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / ".ci")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, cpu_s = json.loads(done.stdout.splitlines()[-1])
    return status, cpu_s


def test_daemons_are_counted(tmp_path: Path) -> None:
    status, with_daemon = run(tmp_path, "test_leaves_a_daemon")
    assert status == 0
    status, without = run(tmp_path, "test_leaves_nothing")
    assert status == 0
    assert with_daemon - without > 2, "both runs start the same, and the daemon burns four"
    status, _ = run(tmp_path, "test_fails")
    assert status == 1
    tests = {test.rpartition("::")[2] for test, _ in cpu_meter.read(tmp_path / "meter")}
    assert tests == {"test_leaves_a_daemon", "test_leaves_nothing", "test_fails"}
