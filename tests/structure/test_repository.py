"""What the repository holds: no huge files, no paths of one machine, nothing left half done, no dead links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT, files

LARGEST_BYTES = 16 << 20
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w./-])/" + r"(?:home/\w|Users/\w|root/|work/)")
LEFT_OVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
CODE = {".py", ".c", ".h", ".cu", ".sh", ".toml", ".yaml", ".yml"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)")


def text_of(path: Path) -> str:
    """The file as text; nothing for binary files."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def is_code(path: Path) -> bool:
    return path.suffix in CODE or path.name == "Makefile" or path.read_bytes().startswith(b"#!")


def found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """`file:line: text` of every line that matches."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]


def anchors(document: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as git hosts and the documentation make them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", text_of(document)), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    slugs: list[str] = []
    for text in texts:
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in slugs)
        slugs.append(f"{slug}-{count}" if count else slug)
    return set(slugs)


def dead_links(document: Path) -> list[str]:
    """Links of a Markdown file to local files, or to headings in them, that are not there."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(document)))
    dead = []
    for target in LINK.findall(text):
        local, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path = (ROOT / local[1:] if local.startswith("/") else document.parent / local) if local else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            dead.append(f"{document.name}: {target}")
    return dead


def test_no_file_is_huge() -> None:
    assert [str(path) for path in files() if path.stat().st_size > LARGEST_BYTES] == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    # A tokenizer's vocabulary may hold anything.
    readable = [path for path in files() if path.suffix != ".json" and path.name != "LICENSE"]
    assert found(MACHINE_PATH, readable) == []


def test_nothing_is_left_half_done_in_the_code() -> None:
    assert found(LEFT_OVER, [path for path in files() if is_code(path)]) == []


def test_every_local_link_resolves() -> None:
    documents = [path for path in files() if path.suffix == ".md"]
    assert documents
    assert [link for document in documents for link in dead_links(document)] == []


# ---- the test tested ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/" + "home/me/x", "`/" + "root/.cache`", "at /" + "work/x", "/" + "Users/me/x"])
def test_a_machine_path_is_seen(path: str) -> None:
    assert MACHINE_PATH.search(path)


@pytest.mark.parametrize(
    "text",
    [
        "/run/pagetide",
        "https://example.org/home/x",
        "/".join(["docs", "work", "x"]),
        "home/x",
        "/".join(["a", "root", "b"]),
    ],
)
def test_other_paths_are_not(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "# The first `one`: a, b\n[a](a.md) [b](gone.md#x) [c](https://example.org/c) [d](#the-first-one-a-b)\n"
        "```\n[e](code.md)\n```\n[f](#f) `[g](g.md)` ![h](h.png) [i](a.md#the-first-one)\n"
    )
    assert dead_links(document) == ["a.md: gone.md#x", "a.md: #f", "a.md: h.png", "a.md: a.md#the-first-one"]
