"""`pagetide run`, killed at twenty random moments: no line is lost, none is there twice, the file is that of a quiet run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

KILLS = 20
LINES = 500
LONGEST_WAIT_S = 300


def line(number: int, rng: random.Random) -> str:
    """Most are prompts, of different lengths; some are no requests at all."""
    if number % 50 == 17:
        return "{not JSON"
    if number % 50 == 33:
        return json.dumps({"id": number, "prompt": "word " * 3000})
    words = " ".join(rng.choice(("whale", "Natásha", "prince", "sea", "To be")) for _ in range(rng.randint(1, 20)))
    return json.dumps({"id": number, "prompt": words, "max_new_tokens": rng.randint(1, 12)}, ensure_ascii=False)


@pytest.mark.stress
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    rng = random.Random(7)
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line(number, rng) for number in range(1, LINES + 1)), "utf-8")
    command = [
        sys.executable, "-P", "-m", "pagetide", "run", "--model", "demo", "--device", "cpu", "--kv-memory", "16MiB",
        "--max-seqs", "6", "--input", str(source), "--temperature", "1", "--output-token-ids",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PAGETIDE_CONFIG", None)
    quiet, killed = tmp_path / "quiet.jsonl", tmp_path / "killed.jsonl"
    part = tmp_path / "killed.jsonl.part"
    assert subprocess.run([*command, "--output", str(quiet)], env=environment, check=False).returncode == 1

    whole_bytes = quiet.stat().st_size
    moments: list[int] = []
    for _ in range(KILLS):
        process = subprocess.Popen([*command, "--output", str(killed)], env=environment, start_new_session=True)
        begun_bytes = part.stat().st_size if part.exists() else 0
        # Now and then before anything is written, else after a random piece of what is left for all of the kills.
        aim = begun_bytes + (0 if rng.random() < 0.2 else rng.randint(1, whole_bytes // (KILLS + 2)))
        late_s = time.monotonic() + rng.uniform(0, 4) if aim == begun_bytes else LONGEST_WAIT_S + time.monotonic()
        try:
            while time.monotonic() < late_s and (not part.exists() or part.stat().st_size < aim or aim == begun_bytes):
                assert process.poll() is None
                time.sleep(0.001)
            assert part.exists() or aim == begun_bytes
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert not killed.exists()
        moments.append(part.stat().st_size if part.exists() else 0)
    assert len(set(moments)) > KILLS // 2, moments  # it was really working

    last = subprocess.run([*command, "--output", str(killed)], env=environment, check=False, stderr=subprocess.PIPE)
    assert last.returncode == 1
    assert b"resuming: " in last.stderr
    assert killed.read_bytes() == quiet.read_bytes()
    records = [json.loads(raw) for raw in killed.read_bytes().splitlines()]
    assert [record["line"] for record in records] == list(range(1, LINES + 1))
    assert sum("error" in record for record in records) == 20
    assert not part.exists()
