"""Memory is what the plan says, over hundreds of random batches; and a minute of `make soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resident_memory_over_random_batches(dtype: str, tmp_path: Path) -> None:
    """In a process of its own: resident memory besides mapped KV and the host tier, the lease, and what a close leaves."""
    file = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--batches", "300", "--dtype", dtype, "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    held = [figure for figure in json.loads(file.read_text())["figures"] if figure["target"] is not None]
    assert len(held) == 5
    for figure in held:
        assert figure["meets"], figure


def test_a_minute_of_soak(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, "-m", "soak", "--seconds", "60", "--requests", "60", "--json", str(file)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    figures = json.loads(file.read_text())
    assert figures["random walks, of 5,000"] > 0 and figures["batches"] > 0 and not figures["failed"]
