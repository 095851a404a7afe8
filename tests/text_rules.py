"""Rules of the repository's texts, as functions that list the breaches: words for persons, paths, what is left over, links."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from checkout import ROOT
from source_rules import SOURCES

SUFFIXES = (".py", ".md", ".yaml", ".toml", ".c", ".cpp", ".h")
MOST_PERSONS = 60  # for users, operators and other persons
PERSON = re.compile(r"\b(who|whom|whose|whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
LARGEST_BYTES = 16 << 20
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w./-])/" + r"(?:home/\w|Users/\w|root/|work/)")
LEFT_OVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
CODE = {".py", ".c", ".h", ".cu", ".sh", ".toml", ".yaml", ".yml"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
NAMED_FILE = r"`((?:tests|\.ci|examples|benchmarks)/[\w/.-]+\.(?:py|md|json|cpp|c|yaml))\b"  # in backticks
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)")


def person_words(root: Path) -> list[str]:
    """`file:line: word` of every word for a person, in the documents at the root and the folders besides tests."""
    files = [*root.glob("*.md"), *(path for folder in (*SOURCES, "docs") for path in (root / folder).rglob("*"))]
    return [
        f"{path.relative_to(root)}:{number}: {word}"
        for path in sorted(files)
        if path.suffix in SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in PERSON.findall(line)
    ]


def text_of(path: Path) -> str:
    """The file as text; nothing for binary files."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def is_code(path: Path) -> bool:
    return path.suffix in CODE or path.name == "Makefile" or path.read_bytes().startswith(b"#!")


def found(pattern: re.Pattern[str], paths: Iterable[Path]) -> list[str]:
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
    """Links to local files, or to headings in them, that are not there, and tests and tools that a document names."""
    text = FENCE.sub("", text_of(document))
    dead = [f"{document.name}: {path}" for path in re.findall(NAMED_FILE, text) if not (ROOT / path).exists()]
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in LINK.findall(text):
        local, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path = (ROOT / local[1:] if local.startswith("/") else document.parent / local) if local else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            dead.append(f"{document.name}: {target}")
    return dead
