"""README and its Chinese translation say the same: code blocks, headings, links, pictures and figures are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    return BLOCK.findall(text)


def headings(text: str) -> list[int]:
    """The level of each heading, in order."""
    return [len(line) - len(line.lstrip("#")) for line in BLOCK.sub("", text).splitlines() if line.startswith("#")]


def links(text: str) -> list[str]:
    """The targets of all links and pictures, without the anchor within this document."""
    targets = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text))
    return sorted(target for target in targets if not target.startswith("#"))


def figures(text: str) -> list[list[str]]:
    """The numbers of each row of a table that has some."""
    rows = [line for line in BLOCK.sub("", text).splitlines() if line.startswith("|")]
    numbers = [re.findall(r"\d+(?:\.\d+)*", re.sub(r"\]\([^)]*\)", "", row).replace(",", "")) for row in rows]
    return [sorted(row) for row in numbers if row]


@pytest.mark.parametrize("part", [code_blocks, headings, links, figures])
def test_the_translation_has_the_same(part) -> None:
    english = part(ENGLISH.read_text("utf-8"))
    assert english, "the documents have some"
    assert part(CHINESE.read_text("utf-8")) == english


def test_it_is_short() -> None:
    assert len(ENGLISH.read_text("utf-8").split()) <= 1000, "as `wc -w README.md` counts"


def test_each_names_the_other() -> None:
    for document in (ENGLISH, CHINESE):
        assert {"README.md", "README.zh-CN.md"} <= set(links(document.read_text("utf-8")))
