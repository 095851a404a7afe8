"""The pictures of the documents: those of the demo show a recall, that of the monitor is what the script draws every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pictures import check_picture

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


def draw_monitor(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", ROOT / "examples" / "draw_monitor.py", "--output", output, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_pictures_of_the_demo_show_a_recall_and_a_shared_device() -> None:
    for width, height in ((80, 24), (100, 30), (200, 50)):
        words = check_picture(IMAGES / f"demo-{width}x{height}.svg", width, height)
        assert words & {"RECALL:", "Half"} and {"A", "B"} <= words
    assert {"engine", "external", "recalls"} <= check_picture(IMAGES / "demo-shared-100x30.svg", 100, 30)
    assert len(list(IMAGES.glob("demo-*.svg"))) == 4


def test_the_picture_of_the_monitor_is_what_the_script_draws_every_time(tmp_path: Path) -> None:
    """Where it differs on purpose, run the script and look at what it drew."""
    for path in (tmp_path / "a" / "new.svg", tmp_path / "second.svg"):
        assert draw_monitor(path).returncode == 0
        assert path.read_bytes() == (IMAGES / "vram-monitor.svg").read_bytes()


def test_the_picture_of_the_monitor_has_the_size_that_is_asked(tmp_path: Path) -> None:
    assert draw_monitor(tmp_path / "small.svg", "--width", "80", "--height", "24").returncode == 0
    assert {"vram-monitor", "H200", "llama-8b", "COMMAND"} <= check_picture(tmp_path / "small.svg", 80, 24)
    for size in (("--width", "0"), ("--height", "-1")):
        refused = draw_monitor(tmp_path / "none.svg", *size)
        assert refused.returncode == 2 and "must have at least one cell and one line" in refused.stderr
        assert not (tmp_path / "none.svg").exists()
