"""No function is longer than a screen, and no class has too many methods or attributes, each with a planted breach."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    ".ci",
)
MOST_LINES = 60
MOST_METHODS, MOST_ATTRIBUTES = 30, 20


def nodes(root: Path) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every module, with the module's path from `root`."""
    for folder in SOURCES:
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield path.relative_to(root), node


def long_functions(root: Path) -> set[str]:
    """`file: name` of every function with more than MOST_LINES lines, its signature and docstring included."""
    return {
        f"{path}: {node.name}"
        for path, node in nodes(root)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    }


def wide_classes(root: Path) -> set[str]:
    """`file: name` of every class with too many methods or attributes; frozen ones (settings, messages) excepted."""
    return {
        f"{path}: {node.name}"
        for path, node in nodes(root)
        if isinstance(node, ast.ClassDef) and not is_frozen(node)
        if len(methods(node)) > MOST_METHODS or len(attributes(node)) > MOST_ATTRIBUTES
    }


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether instances cannot be changed."""
    bases = {ast.unparse(base) for base in node.bases}
    return bases & {"NamedTuple", "Protocol"} != set() or any(
        "frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods and properties that a class defines; a property and its setter count once."""
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that a class declares for its instances, or assigns to them in its methods."""
    declared = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
    assigned = {
        target.attr
        for method in methods(node).values()
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        if isinstance(target.value, ast.Name) and method.args.args and target.value.id == method.args.args[0].arg
    }
    return ({ast.unparse(item.target) for item in declared} | assigned) - methods(node).keys()


def test_functions_fit_a_screen() -> None:
    assert long_functions(ROOT) == set()


def test_a_planted_long_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name, lines in (("fits", MOST_LINES), ("long", MOST_LINES + 1)):
        (tmp_path / "cache" / f"{name}.py").write_text(f"def {name}():\n" + "    pass\n" * (lines - 1))
    assert long_functions(tmp_path) == {"cache/long.py: long"}


def test_classes_have_one_task() -> None:
    assert wide_classes(ROOT) == set()


def test_planted_wide_classes_are_found(tmp_path: Path) -> None:
    def class_of(num_methods: int, num_attributes: int, decorator: str = "") -> str:
        methods = "".join(f"    def f{i}(self): pass\n" for i in range(num_methods - 1))
        attributes = "".join(f"        self.a{i} = 0\n" for i in range(num_attributes))
        return f"{decorator}class A:\n    def __init__(self):\n        pass\n{attributes}{methods}"

    (tmp_path / "engine").mkdir()
    for name, text in (
        ("fits", class_of(MOST_METHODS, MOST_ATTRIBUTES)),
        ("methods", class_of(MOST_METHODS + 1, 0)),
        ("attributes", class_of(1, MOST_ATTRIBUTES + 1)),
        ("declared", "class A:\n" + "".join(f"    a{i}: int\n" for i in range(MOST_ATTRIBUTES + 1))),
        ("frozen", class_of(1, MOST_ATTRIBUTES + 1, "@dataclass(frozen=True)\n")),
    ):
        (tmp_path / "engine" / f"{name}.py").write_text(text)
    wide = {"engine/methods.py: A", "engine/attributes.py: A", "engine/declared.py: A"}
    assert wide_classes(tmp_path) == wide
