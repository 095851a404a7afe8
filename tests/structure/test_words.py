"""Things are not called who: the words for persons are rare outside tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "monitor", "allocator", "cache", "scheduler", "native", "engine", "server", "fleet", "pagetide", "configs", "benchmarks",
    "examples", "docs", ".ci",
)  # fmt: skip
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".c", ".cpp", ".h")
MOST = 60  # for users, operators and other persons
PERSON = re.compile(r"\b(who|whom|whose|whoever|nobody|somebody|everybody)\b", re.IGNORECASE)


def person_words(root: Path) -> list[str]:
    """`file:line: word` of every word for a person, in the documents at the root and the folders besides tests."""
    files = [*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    return [
        f"{path.relative_to(root)}:{number}: {word}"
        for path in sorted(files)
        if path.suffix in SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in PERSON.findall(line)
    ]


def test_words_for_persons_are_rare() -> None:
    found = person_words(ROOT)
    assert len(found) <= MOST, "\n".join(found)


def test_planted_words_are_found(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.py").write_text("# A block that nobody holds.\n# The whole block.\n# Whose block?\n")
    (tmp_path / "README.md").write_text("whom it may concern\n")
    assert person_words(tmp_path) == ["README.md:1: whom", "cache/a.py:1: nobody", "cache/a.py:3: Whose"]
