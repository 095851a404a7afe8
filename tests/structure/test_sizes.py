"""No function is longer than a screen, with a planted breach."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("monitor", "allocator", "cache", "scheduler", "engine", "pagetide", "benchmarks", "examples", ".ci")
MOST_LINES = 60
# Triton kernels, which are one function each for the compiler; to be divided where the result can be measured, on a GPU.
LONGER = {"engine/attention/triton_decode.py: _decode", "engine/attention/triton_prefill.py: _prefill"}


def long_functions(root: Path) -> set[str]:
    """`file: name` of every function with more than MOST_LINES lines, its signature and docstring included."""
    return {
        f"{path.relative_to(root)}: {node.name}"
        for folder in SOURCES
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    }


def test_functions_fit_a_screen() -> None:
    assert long_functions(ROOT) == LONGER


def test_a_planted_long_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name, lines in (("fits", MOST_LINES), ("long", MOST_LINES + 1)):
        (tmp_path / "cache" / f"{name}.py").write_text(f"def {name}():\n" + "    pass\n" * (lines - 1))
    assert long_functions(tmp_path) == {"cache/long.py: long"}
