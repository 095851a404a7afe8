"""Checks docs/capabilities.yaml: each row names tests that are collected and not skipped, or figures of the summary.

    python .ci/capabilities.py [FOLDER]    of a checkout, by default this one

`make check` runs it. Status 1 where a row names something else. tests/structure/test_capabilities.py compares the documents.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["capability", "state", "evidence", "said"]
STATES = {"works", "measured", "not run", "absent"}
_ELSEWHERE = re.compile(r"\bGPU\b|\bon several machines\b")  # what nothing was run on
_SKIPS = re.compile(r"pytest\.skip\(|importorskip\(")


def read(root: Path = ROOT) -> list[dict[str, Any]]:
    """The rows."""
    rows: list[dict[str, Any]] = yaml.safe_load((root / "docs" / "capabilities.yaml").read_text("utf-8"))
    return rows


def figures(root: Path = ROOT) -> set[str]:
    """The names of the figures that were measured."""
    return {figure["name"] for figure in json.loads((root / "benchmarks" / "summary.json").read_text("utf-8"))}


def tests_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ids of the tests that are named."""
    return sorted({name for row in rows for name in row["evidence"] if name.startswith("tests/")})


def faults(rows: Sequence[Mapping[str, Any]], measured: Collection[str], collected: Mapping[str, str | None]) -> list[str]:
    """What is wrong with the rows.

    Args:
        measured: Names of figures.
        collected: Why each test that pytest finds is skipped, or None; by ids without parameters.
    """
    found = []
    for row in rows:
        what = row.get("capability", row)
        if list(row) != KEYS or row["state"] not in STATES or not row["evidence"]:
            found.append(f"{what}: a row has {', '.join(KEYS)}, a state of {sorted(STATES)}, and evidence")
            continue
        if (row["state"] == "not run") != (re.search(_ELSEWHERE, what) is not None):
            found.append(f"{what}: rows about a GPU or several machines, and no others, are 'not run'")
        for name in row["evidence"]:
            if name.startswith("tests/"):
                why = collected.get(name, "pytest does not collect it")
            else:
                why = None if name in measured else "benchmarks/summary.json has no such figure"
            if why is not None:
                found.append(f"{what}: {name}: {why}")
    return found


class Collector:
    """A plugin of pytest that notes the tests that it collects, and why each is skipped."""

    def __init__(self) -> None:
        self.tests: dict[str, str | None] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest. Of a test's parameters one that is not skipped is enough."""
        for item in items:
            name, why = item.nodeid.partition("[")[0], skipped(item)
            self.tests[name] = self.tests.get(name, why) and why


def skipped(item: pytest.Item) -> str | None:
    """Why a test is skipped here, as far as its marks and its own body say it."""
    for mark in item.iter_markers():
        holds = [condition for condition in mark.args if condition is not False] or "condition" in mark.kwargs
        if mark.name in ("gpu", "skip") or (mark.name == "skipif" and holds):
            return f"it has the mark {mark.name}"
    body = inspect.getsource(getattr(item, "obj", lambda: None))
    return "it may skip itself" if _SKIPS.search(body) else None


def main(root: Path) -> int:
    """Print what is wrong."""
    rows, collector = read(root), Collector()
    os.chdir(root)
    if names := tests_of(rows):
        files = sorted({name.partition("::")[0] for name in names if Path(name.partition("::")[0]).exists()})
        # Nothing is printed: a file with an error has no tests, which is told below.
        options = ["--collect-only", "-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
        pytest.main([*options, *files], plugins=[collector])
    found = faults(rows, figures(root), collector.tests)
    for fault in found:
        print(f"docs/capabilities.yaml: {fault}", file=sys.stderr)
    if not found:
        print(f"docs/capabilities.yaml: {len(rows)} rows, {len(names)} tests that pytest collects")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
