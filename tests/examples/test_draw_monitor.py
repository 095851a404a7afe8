"""The README's picture: the one that the script draws, the same every time, and nothing in it from elsewhere."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "draw_monitor.py"
PICTURE = ROOT / "docs" / "images" / "vram-monitor.svg"
SVG = "{http://www.w3.org/2000/svg}"


def draw(output: Path, *arguments: str) -> bytes:
    subprocess.run([sys.executable, "-P", SCRIPT, "--output", output, *arguments], check=True)
    return output.read_bytes()


def test_the_picture_in_the_repository_is_what_the_script_draws_every_time(tmp_path: Path) -> None:
    """Where it differs on purpose, run the script and look at what it drew."""
    first, second = draw(tmp_path / "a" / "new.svg"), draw(tmp_path / "second.svg")
    assert first == second
    assert first == PICTURE.read_bytes()


def test_it_loads_nothing_and_keeps_to_its_frame(tmp_path: Path) -> None:
    text = draw(tmp_path / "picture.svg", "--width", "80", "--height", "24").decode()
    assert text.count("http") == 1  # the name of the format
    assert not any(word in text for word in ("url(", "href", "@import", "<script", "<image"))
    root = ET.fromstring(text)
    assert (root.get("width"), root.get("height")) == (str(80 * 9 + 32), str(24 * 20 + 52))
    for shape in root.iter(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width", 0)) <= 80 * 9 + 32
    words = [word.text for word in root.iter(f"{SVG}text")]
    assert {"vram-monitor", "H200", "llama-8b", "COMMAND"} <= set(words)


@pytest.mark.parametrize("size", [("--width", "0"), ("--height", "-1")])
def test_a_picture_without_a_size_is_refused(tmp_path: Path, size: tuple[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--output", tmp_path / "none.svg", *size], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "must have at least one cell and one line" in run.stderr
    assert not (tmp_path / "none.svg").exists()
