"""The three walks of docs/architecture.md, followed in the code: each function is there and is reached as the table says."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from checkout import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
WALKS = re.findall(r"^### (Walk: .+)\n((?:.*\n)+?)(?=^##)", TEXT, re.MULTILINE)
ROW = re.compile(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \| (?:`([\w.]+)`)? *\|", re.MULTILINE)


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text("utf-8"))


def names_in(file: str, function: str) -> set[str]:
    """The names that a function mentions, itself and by the private ones of its file. Raises LookupError if it is not there."""
    node: ast.AST = parsed(file)
    for part in function.split("."):
        found = [child for child in ast.walk(node) if getattr(child, "name", None) == part]
        if not found:
            raise LookupError(f"{file} has no {function}")
        node = found[0]
    private = {child.name: child for child in ast.walk(parsed(file)) if isinstance(child, ast.FunctionDef)}
    names: set[str] = set()
    nodes = [node]
    while nodes:
        node = nodes.pop()
        inner = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
        inner |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        nodes += [private[name] for name in inner - names if name.startswith("_") and name in private]
        names |= inner
    return names


def test_there_are_three() -> None:
    assert [title for title, _ in WALKS] == ["Walk: a prompt", "Walk: a byte of memory", "Walk: a recall"]


def test_a_recall_by_hand_takes_at_most_20_functions_to_the_unmapping() -> None:
    functions = [function for function, _, _ in ROW.findall(dict(WALKS)["Walk: a recall"])]
    assert functions[0] == "_recall" and functions.index("HostArena.unmap") < 20


@pytest.mark.parametrize(("title", "table"), WALKS, ids=[title for title, _ in WALKS])
def test_each_function_is_reached_from_one_before_it(title: str, table: str) -> None:
    """By a call, or by what the table names, which both mention."""
    rows = ROW.findall(table)
    assert len(rows) == table.count("\n| `") >= 8, "a row that the test does not read"
    before: set[str] = set()
    for number, (function, file, through) in enumerate(rows):
        names = names_in(file, function)
        if number:
            reached = through or function.rpartition(".")[2]
            assert reached in before, f"nothing before {function} in {title!r} mentions {reached}"
            assert not through or through in names, f"{function} of {file} does not mention {through}"
        before |= names | {function.rpartition(".")[2]}
