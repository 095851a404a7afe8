"""The program that draws the pictures of the demo: of a real run with few tokens, in all sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pictures import check_picture

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "draw_demo.py"
SIZES = ((80, 24), (100, 30), (200, 50))


def test_a_small_run_is_drawn_in_all_sizes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--folder", tmp_path, "--prompts", "16", "--max-new-tokens", "6", "--seconds", "0"],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].endswith("0 tokens changed")
    for width, height in SIZES:
        words = check_picture(tmp_path / f"demo-{width}x{height}.svg", width, height)
        assert {"pagetide", "running", "preempted", "KV", "pool", "A"} <= words
    assert len(list(tmp_path.iterdir())) == len(SIZES)
