"""Benchmarks and examples use what pagetide offers: no name with a leading underscore, so that no change inside breaks them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples")
# Of other libraries, which offer nothing else.
ALLOWED = {"os._exit", "torch.cuda._sleep", "bench.model.config._attn_implementation"}
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller", "object"}  # `patch.object`


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def violations(root: Path) -> list[str]:
    """Every use of a private name under `root` that is not the user's own, as `file:line: name`."""
    return [
        f"{path.relative_to(root)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        for line, name in private_names(ast.parse(path.read_text("utf-8")))
        if name not in ALLOWED
    ]


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes of anything but `self` and `cls`, imported names, and names given to `getattr` and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, n.name) for n in node.names if any(map(is_private, n.name.split("."))))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            given = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from ((node.lineno, str(name)) for name in given if is_private(name))


def test_benchmarks_and_examples_keep_to_public_names() -> None:
    assert violations(ROOT) == []


def test_what_is_allowed_is_used() -> None:
    used = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for _, name in private_names(ast.parse(path.read_text("utf-8")))
    }
    assert used == ALLOWED


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llm._desk.lock", "llm._desk"),
        ("self.llm._desk", "self.llm._desk"),
        ("core.runner._compute = None", "core.runner._compute"),
        ("from pagetide.engine.execution.runner import Runner, _Computed", "_Computed"),
        ("from pagetide._inner import a", "_inner"),
        ("import pagetide._inner", "pagetide._inner"),
        ("getattr(llm, '_manager')", "_manager"),
        ("mock.patch.object(runner, '_compute')", "_compute"),
        ("def f():\n    class A:\n        x = lambda y: y()._z", "y()._z"),
    ],
)
def test_a_planted_one_is_reported_with_its_line(tmp_path: Path, text: str, name: str) -> None:
    file = tmp_path / "benchmarks" / "deep" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("import math\n" + text)
    assert violations(tmp_path) == [f"benchmarks/deep/a.py:{1 + len(text.splitlines())}: {name}"]


@pytest.mark.parametrize(
    "text",
    ["self._own = cls._shared", "a.__class__", "from __future__ import annotations", "getattr(a, 'b')", "_local = 1"],
)
def test_what_is_ones_own_is_not_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.py").write_text(text)
    assert violations(tmp_path) == []
