"""The index of files in docs/architecture.md is what the docstrings say, and the glossary names classes that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("index", ROOT / ".ci" / "index.py")
assert SPEC is not None and SPEC.loader is not None
index = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(index)

TERM = re.compile(r"\(\[`(\w+)`\]\(\.\./([\w/.]+)\)\)")  # ([`Name`](../path.py))


def test_the_index_is_up_to_date() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert index.updated(text, ROOT) == text, "run python .ci/index.py"


def test_a_new_file_and_a_changed_docstring_change_the_index(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "__init__.py").write_text("")
    (tmp_path / "cache" / "blocks.py").write_text('"""Blocks | pages\nof the pool. More.\n\nEven more."""')
    table = "| `cache/` | |\n|---|---|\n| `blocks.py` | Blocks \\| pages of the pool |\n"
    assert index.index(tmp_path) == table
    text = f"before\n{index.BEGIN}\nold\n{index.END}\nafter\n"
    assert index.updated(text, tmp_path) == f"before\n{index.BEGIN}\n\n{table}\n{index.END}\nafter\n"
    assert index.updated(index.updated(text, tmp_path), tmp_path) == index.updated(text, tmp_path)


def test_a_file_without_a_docstring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
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
