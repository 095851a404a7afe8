"""The order of the packages inside engine/, and one meaning for each class name: rules with planted breaches."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "monitor",
    "allocator",
    "cache",
    "scheduler",
    "engine",
    "server",
    "fleet",
    "pagetide",
    "benchmarks",
    "examples",
)

# Files and folders of engine/. Each layer imports only layers above it, and nothing of its own but what is in the same folder.
LAYERS = (
    ("errors", "demo_model"),
    ("collectives",),
    ("attention", "process", "sampling"),
    ("text",),
    ("execution", "loading"),
    ("config", "self_check"),
    ("memory",),
    ("executor",),
    ("shards",),
    ("core",),
    ("build",),
    ("frames",),
    ("requests",),
    ("async_llm", "llm"),
    ("streamers",),
)
PLACE = {name: place for place, layer in enumerate(LAYERS) for name in layer}


def engine_imports(path: Path, engine: Path) -> Iterator[tuple[int, str]]:
    """(line, part of engine/) of every import from another part of engine/, also inside functions and for type checkers."""
    package = path.relative_to(engine).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not 1 <= node.level <= len(package) + 1:
            continue
        base = package[: len(package) - (node.level - 1)]
        for alias in node.names:
            target = (*base, *(node.module or alias.name).split("."))
            yield node.lineno, target[0]


def upward_imports(engine: Path) -> list[str]:
    """Every import under `engine` from a layer that is not above the importing one."""
    found = []
    for path in sorted(engine.rglob("*.py")):
        own = path.relative_to(engine).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for line, other in engine_imports(path, engine):
            if other != own and PLACE.get(other, len(LAYERS)) >= PLACE.get(own, -1):
                found.append(f"{path.relative_to(engine)}:{line}: {own} imports {other}")
    return found


def repeated_class_names(root: Path) -> dict[str, list[str]]:
    """Names of classes at the top of a module that occur in several modules, with their files."""
    files = defaultdict(list)
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(root)))
    return {name: where for name, where in files.items() if len(where) > 1}


def test_engine_has_an_order() -> None:
    assert upward_imports(ROOT / "engine") == []


def test_every_part_of_the_engine_has_a_place() -> None:
    parts = {
        path.stem for path in (ROOT / "engine").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} == PLACE.keys()


def test_each_class_name_has_one_meaning() -> None:
    assert repeated_class_names(ROOT) == {}


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("sampling/a.py", "from ..execution.runner import ModelRunner", "sampling/a.py:1: sampling imports execution"),
        ("sampling/a.py", "from .. import core", "sampling/a.py:1: sampling imports core"),
        ("core.py", "def f():\n    from .requests import manager", "core.py:2: core imports requests"),
        ("memory/a.py", "if TYPE_CHECKING:\n    from ..core import x", "memory/a.py:2: memory imports core"),
        ("memory/a.py", "from ..novelty import x", "memory/a.py:1: memory imports novelty"),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, path: str, text: str, breach: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert upward_imports(tmp_path) == [breach]


def test_downward_imports_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "a.py").write_text(
        "from ..core import x\nfrom .b import y\nfrom ...cache import z\nfrom . import c"
    )
    assert upward_imports(tmp_path) == []


def test_a_planted_second_class_is_found(tmp_path: Path) -> None:
    for folder in ("cache", "engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("class Block:\n    pass\n")
    assert repeated_class_names(tmp_path) == {"Block": ["cache/a.py", "engine/a.py"]}
