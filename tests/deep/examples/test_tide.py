"""The tide: its traces, and a few seconds of it with real engines, a real broker and a real external process."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT, loaded

SCRIPT = ROOT / "examples" / "tide.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def tide() -> ModuleType:
    return loaded(SCRIPT)


def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    """The exit status says that every request is served and unchanged; the pictures are there."""
    pytest.importorskip("matplotlib", reason='the picture needs the extra "examples"')
    prefix = tmp_path / "new" / "tide"
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--seconds", "3", "--data", tmp_path / "none", "--output", prefix],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = {line[:36].strip(): line[36:].split() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert "a synthetic trace" in done.stdout
    assert table["failed"] == ["0", "0"]
    assert table["requests"] == table["outputs as without pressure"]
    assert all(int(count) > 0 for count in table["requests"])
    assert prefix.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    root = ET.parse(prefix.with_suffix(".svg")).getroot()
    assert root.tag == f"{SVG}svg"
    assert len(list(root.iter(f"{SVG}path"))) > 10


def test_the_synthetic_trace_is_bursty_and_suits_the_model(tide: ModuleType) -> None:
    for ahead in (0.0, 0.15):
        arrivals = tide.synthetic(60.0, ahead)
        times = [arrival.at_s for arrival in arrivals]
        assert times == sorted(times) and 0 <= times[0] and times[-1] < 60
        assert len(arrivals) == pytest.approx(60 * tide.PER_SECOND, rel=0.1)
        per_second = [sum(int(at) == second for at in times) for second in range(60)]
        assert max(per_second) > 4 * len(times) / 60 and per_second.count(0) > 15
        assert all(tide.LEAST_PROMPT <= arrival.prompt_tokens <= tide.MOST_PROMPT for arrival in arrivals)
        assert all(arrival.prompt_tokens + arrival.output_tokens <= 1024 for arrival in arrivals)


def test_the_real_trace_is_thinned_scaled_and_turned(tide: ModuleType, tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:{17 + i // 60:02}:{i % 60:02}.0000000,{100 * i},{i}" for i in range(600)]
    (tmp_path / tide.TRACE).write_text("\n".join(rows))
    (first, second), source = tide.load(tmp_path, 60.0)
    assert source == tide.TRACE
    step = round(600 / (60 * tide.PER_SECOND))
    assert [arrival.at_s for arrival in first] == pytest.approx([i / 20 for i in range(0, 600, step)])
    assert (first[1].prompt_tokens, first[1].output_tokens) == (100 * step // tide.CONTEXT_DIVISOR, tide.LEAST_OUTPUT)
    assert first[-1].prompt_tokens == tide.MOST_PROMPT
    turned = sorted(((i / 20) - 60 * tide.SHIFT) % 60 for i in range(0, 600, step))
    assert [arrival.at_s for arrival in second] == pytest.approx(turned)


def test_too_short_a_time_is_refused() -> None:
    done = subprocess.run([sys.executable, "-P", SCRIPT, "--seconds", "0.5"], capture_output=True, text=True)
    assert done.returncode == 2 and "must be at least 1" in done.stderr
