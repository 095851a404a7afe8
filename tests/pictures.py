"""What is checked of the pictures of terminal views that examples draw."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 200_000


def check_picture(file: Path, width: int, height: int) -> set[str]:
    """The picture of so many cells loads nothing and keeps to its frame. Returns its words."""
    text = file.read_text("utf-8")
    assert text.count("http") == 1, "the name of the format"
    assert not any(word in text for word in ("url(", "href", "@import", "<script", "<image"))
    assert len(text) < MOST_BYTES
    root = ET.fromstring(text)
    assert (root.get("width"), root.get("height")) == (str(width * 9 + 32), str(height * 20 + 52))
    for shape in root.iter(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width", 0)) <= width * 9 + 32
    return {word.text or "" for word in root.iter(f"{SVG}text")}
