"""The pictures of the demo: of a real run with few tokens, in all sizes; and the choice of the moment."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "draw_demo.py"
IMAGES = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
SIZES = ((80, 24), (100, 30), (200, 50))
MOST_BYTES = 200_000


def check(file: Path, width: int, height: int) -> set[str]:
    """The picture loads nothing and keeps to its frame. Returns its words."""
    text = file.read_text("utf-8")
    assert text.count("http") == 1  # the name of the format
    assert not any(word in text for word in ("url(", "href", "@import", "<script", "<image"))
    assert len(text) < MOST_BYTES
    root = ET.fromstring(text)
    assert (root.get("width"), root.get("height")) == (str(width * 9 + 32), str(height * 20 + 52))
    for shape in root.iter(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width", 0)) <= width * 9 + 32
    return {word.text or "" for word in root.iter(f"{SVG}text")}


def test_a_small_run_is_drawn_in_all_sizes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--folder", tmp_path, "--prompts", "16", "--max-new-tokens", "6", "--seconds", "0"],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].endswith("0 tokens changed")
    for width, height in SIZES:
        words = check(tmp_path / f"demo-{width}x{height}.svg", width, height)
        assert {"pagetide", "running", "preempted", "KV", "pool", "A"} <= words
    assert len(list(tmp_path.iterdir())) == len(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_the_pictures_in_the_repository_show_a_recall(size: tuple[int, int]) -> None:
    width, height = size
    words = check(IMAGES / f"demo-{width}x{height}.svg", width, height)
    assert words & {"RECALL:", "Half"} and {"A", "B"} <= words
    assert len(list(IMAGES.glob("demo-*.svg"))) == len(SIZES) + 1


def test_the_picture_of_the_shared_device_shows_all_three() -> None:
    words = check(IMAGES / "demo-shared-100x30.svg", 100, 30)
    assert {"engine", "external", "recalls"} <= words
