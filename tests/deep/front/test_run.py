"""`pagetide run` is killed and goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from run_rig import SHORT, run_fixture, served_fixture, talker_fixture  # noqa: F401


def test_killed_and_started_again_it_comes_out_the_same(run: Any, tmp_path: Path) -> None:
    """Once, really. tests/stress does so at twenty moments."""
    flags = ["--device", "cpu", "--kv-memory", "16MiB", "--max-seqs", "4", "--no-share", "--max-new-tokens", "3"]
    whole = run([f"{i} Call me Ishmael" for i in range(24)], *flags, name="in.txt")
    whole.path.unlink()
    part, files = tmp_path / "out.jsonl.part", ["--input", str(tmp_path / "in.txt"), "--output", str(whole.path)]
    command = [sys.executable, "-P", "-m", "pagetide", "run", "--model", "talk", *files, *SHORT, *flags]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while not (part.exists() and part.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not whole.path.exists()
    again = run(None, *flags, name="in.txt")
    assert "resuming: " in again.err
    assert (again.status, again.content) == (0, whole.content)
    assert [record["line"] for record in again.records] == list(range(1, 25))
