"""The index of files on the documentation site has every module, and the glossary names classes that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from checkout import ROOT, files, loaded

index = loaded(ROOT / ".ci" / "index.py")
TERM = re.compile(r"\(\[`(\w+)`\]\(\.\./([\w/.]+)\)\)")  # ([`Name`](../path.py))


def test_every_module_has_a_row() -> None:
    listed = re.findall(r"^\| `([\w/.]+)(?:/` \| \||` \| (.+) \|)$", index.index(ROOT), re.MULTILINE)
    folder, found = "", set()
    for name, summary in listed:
        folder = folder if summary else name
        found |= {f"{folder}/{name}"} if summary else set()
    tracked = (path.relative_to(ROOT) for path in files() if path.suffix == ".py" and path.name != "__init__.py")
    assert found == {str(path) for path in tracked if path.parts[0] in index.FOLDERS}


def test_a_row_is_the_first_sentence_of_the_docstring(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "__init__.py").write_text("")
    (tmp_path / "cache" / "blocks.py").write_text('"""Blocks | pages\nof the pool. More.\n\nEven more."""')
    table = "| `cache/` | |\n|---|---|\n| `blocks.py` | Blocks \\| pages of the pool |\n"
    assert index.index(tmp_path) == table
    (tmp_path / "cache" / "blocks.py").write_text("x = 1")
    with pytest.raises(ValueError, match="has no docstring"):
        index.index(tmp_path)


def test_the_glossary_names_what_exists() -> None:
    terms = TERM.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert len(terms) > 40
    missing = [(name, path) for name, path in terms if name not in defined_in(ROOT / path)]
    assert missing == []


def defined_in(path: Path) -> set[str]:
    """The classes, functions and constants of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}
