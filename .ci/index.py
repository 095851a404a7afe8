"""The index of files: one line per module, from the first sentence of its docstring.

    python .ci/index.py

prints it as Markdown. docs/conf.py puts it on the documentation site (docs/api/files.md).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "common",
    "monitor",
    "allocator",
    "cache",
    "scheduler",
    "api",
    "frames",
    "native",
    "engine",
    "server",
    "fleet",
    "pagetide",
    "configs",
    "benchmarks",
    "examples",
)
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def summary(path: Path) -> str:
    """The first sentence of a module's docstring on one line. Raises ValueError if there is none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} has no docstring: the index of files needs its first sentence")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = _SENTENCE.match(paragraph)
    return (sentence[1] if sentence else paragraph).removesuffix(".").replace("|", "\\|")


def index(root: Path) -> str:
    """The index as Markdown: a table for each folder, with a row for each of its modules that has content."""
    parts = []
    for folder in FOLDERS:
        for package in sorted({path.parent for path in (root / folder).rglob("*.py")}):
            files = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
            if files:
                parts += [f"| `{package.relative_to(root)}/` | |", "|---|---|"]
                parts += [f"| `{path.name}` | {summary(path)} |" for path in files] + [""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(index(ROOT))
