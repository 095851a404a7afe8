"""Rules of the source, as functions that list the breaches under a folder: imports, layers, names, private names."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch_free import PURE_MODULES, TORCH_LIBRARIES, TORCH_MODULES

# Each may import what stands left of it. `configs` holds data.
ORDER = (
    "configs", "common", "monitor", "allocator", "cache", "scheduler", "api", "frames", "native", "engine", "server", "fleet",
)  # fmt: skip
SOURCES = (*ORDER, "pagetide", "benchmarks", "examples", ".ci")
TOOLS = ("benchmarks", "examples")
# Composition roots: import everything, are imported by nothing.
ROOTS = ("pagetide.cli", "pagetide.vram_monitor")
# The command line run as a module is the one exception to that.
MAY_IMPORT_ROOTS = ("pagetide.__main__",)
# What the packages may import of pagetide itself.
ROOT_NAMES = {"version"}
# What pagetide/__init__.py may import at once: a name whose module has no imports.
LEAVES = {"pagetide.version.__version__"}
# Files and folders of engine/. Each layer imports only layers above it, and nothing of its own but what is in the same folder.
LAYERS = (
    ("errors", "demo_model"),
    ("collectives",),
    ("process",),
    ("layers",),
    ("attention", "sampling"),
    ("text",),
    ("execution", "loading"),
    ("config", "self_check"),
    ("memory",),
    ("executor",),
    ("shards",),
    ("core",),
    ("build",),
    ("watch",),
    ("requests",),
    ("async_calls",),
    ("async_llm", "llm"),
    ("streamers",),
)
PLACE = {name: place for place, layer in enumerate(LAYERS) for name in layer}
# Private names of other libraries, which offer nothing else.
USED_OF_OTHERS = {
    "os._exit", "torch.cuda._sleep",
    "modeling_qwen3_5.Qwen3_5TextModel._update_linear_attn_mask", "model_configs.Qwen3_5TextOpenVINOConfig._MODEL_PATCHER",
}  # fmt: skip
# The one way to start a child process, and what runs programs of others: a compiler, Ray's command, that of `vram-monitor run`,
# those of alerts.
STARTS_PROCESSES = {
    "common/child_process.py", "monitor/alert_delivery.py", "native/build.py", "fleet/cluster.py", "pagetide/reserved_run.py",
}  # fmt: skip
STARTS = re.compile(r"(subprocess|multiprocessing|pty|asyncio\.subprocess)\b|os\.(fork|exec|spawn|posix_spawn|popen|system)")
MOST_PARAMETERS = 6  # of a constructor
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller", "object"}  # `patch.object`


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed once."""
    return ast.parse(path.read_bytes())


def modules(root: Path, folders: tuple[str, ...] = SOURCES) -> Iterator[tuple[Path, ast.Module]]:
    """Every file of these folders, with its tree."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, tree_of(path)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported thing: `target` is absolute, `relative` tells whether it was written with dots."""

    line: int
    target: str
    relative: bool
    eager: bool  # runs when the module is imported: in no function, and not for type checkers only


def imports(node: ast.AST, package: str, eager: bool = True) -> Iterator[Import]:
    """Every import in a module of `package`, also by `import_module` with a literal; `from a import b` is `a.b`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        eager = False
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from imports(child, package, eager=False)
        for child in node.orelse:
            yield from imports(child, package, eager)
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(node.lineno, alias.name, relative=False, eager=eager)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield Import(node.lineno, f"{base}.{alias.name}", relative=node.level > 0, eager=eager)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        name = node.args[0] if node.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            target = _absolute(name.value, package)
            yield Import(node.lineno, target, relative=name.value.startswith("."), eager=eager)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, eager)


def _absolute(name: str, package: str) -> str:
    """`name` as seen from `package`, without leading dots; a name that leaves the package begins with "?"."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = package.split(".")
    if level > len(parts):
        return f"?{name}"
    return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name[level:]])])


def within(name: str, module: str) -> bool:
    """Whether `name` is `module` or something in it."""
    return name == module or name.startswith(module + ".")


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the repository: its name as installed, and its file. Read-only."""
    for folder in (*ORDER, "pagetide"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts if folder == "pagetide" else ("pagetide", *parts)), path


def violations(root: Path) -> list[str]:
    """Every breach of the import rules under `root`, as `file:line: sentence`."""
    found = []
    for name, path in sources(root):
        module = name.removesuffix(".__init__")
        for imported in imports(tree_of(path), _package(module, path)):
            for sentence in _breaches(module, imported):
                found.append(f"{path.relative_to(root)}:{imported.line}: {sentence}")
    return found


def process_starts(root: Path) -> list[str]:
    """Every other way to start a process, as `file:line: name`: imports of modules that do, and functions of `os`."""
    return [
        f"{path.relative_to(root)}:{line}: {name}"
        for module, path in sources(root)
        if str(path.relative_to(root)) not in STARTS_PROCESSES
        for line, name in [
            *((one.line, one.target) for one in imports(tree_of(path), _package(module.removesuffix(".__init__"), path))),
            *((n.lineno, ast.unparse(n)) for n in ast.walk(tree_of(path)) if isinstance(n, ast.Attribute)),
        ]
        if STARTS.match(name)
    ]


def cycles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, also in functions and for type checkers."""
    files = {name.removesuffix(".__init__"): path for name, path in sources(root)}
    graph = {
        module: {
            found
            for imported in imports(tree_of(path), _package(module, path))
            if (found := _module_of(imported.target, files)) not in (None, module)
        }
        for module, path in files.items()
    }
    reached = {module: _reach(module, graph) for module in graph}
    rings = {frozenset(m for m in reached[module] if module in reached[m]) for module in graph}
    return sorted(sorted(ring) for ring in rings if ring)


def _package(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _module_of(target: str, files: Mapping[str, Path]) -> str | None:
    """The module of the repository that holds `target`, which is a module or a name in one; None for other libraries."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in files), None)


def _reach(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that `start` imports, directly or through others."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - reached:
            reached.add(module)
            waiting.append(module)
    return reached


def _breaches(module: str, imported: Import) -> Iterator[str]:
    target = imported.target
    top = target.split(".")[0]
    if top == "?":
        yield f"{target[1:]} leaves the package"
        return
    if not imported.relative and top in (*ORDER, "pagetide"):
        yield f"imports {target} by an absolute name; write it with dots"
    if _loads_torch(target) and not any(within(module, allowed) for allowed in (*TORCH_MODULES, *ROOTS)):
        yield f"imports {target}; torch and transformers belong in engine/ and cache/storage.py"
    if module == "pagetide" and imported.eager and top not in sys.stdlib_module_names and target not in LEAVES:
        yield f"imports {target} at once; pagetide/__init__.py imports lazily"
    if within(target, "pagetide"):
        yield from _internal_breaches(module, target)


def _loads_torch(target: str) -> bool:
    """Whether importing `target` loads torch: torch itself, what stands on it, or the torch part of another library."""
    top, *below = target.split(".")
    return top in TORCH_LIBRARIES or (top != "pagetide" and "torch" in below)


def _internal_breaches(module: str, target: str) -> Iterator[str]:
    if any(within(target, root) for root in ROOTS) and module not in MAY_IMPORT_ROOTS:
        yield f"imports {target}; nothing imports a composition root"
        return
    own = module.split(".")[1] if "." in module else ""
    if own not in ORDER:
        return  # pagetide/__init__.py and the composition roots may import every package
    their = target.split(".")[1] if "." in target else ""
    if their not in ORDER:
        if their not in ROOT_NAMES:
            yield f"imports {target}; of pagetide itself a package may import only {', '.join(ROOT_NAMES)}"
    elif ORDER.index(their) > ORDER.index(own):
        yield f"imports {target}; imports run {' -> '.join(ORDER)} and never back"
    elif own != "engine" and module not in TORCH_MODULES and _may_load_torch(target):
        yield f"imports {target}, which loads torch"


def _may_load_torch(target: str) -> bool:
    return any(within(target, holds) for holds in TORCH_MODULES) and not any(within(target, one) for one in PURE_MODULES)


def upward_imports(engine: Path) -> list[str]:
    """Every import under `engine` from a layer that is not above the importing one, also in functions and for type checkers."""
    found = []
    for path in sorted(engine.rglob("*.py")):
        own, *_ = parts = path.relative_to(engine).with_suffix("").parts
        for imported in imports(tree_of(path), ".".join(("pagetide", "engine", *parts[:-1]))):
            other = imported.target.removeprefix("pagetide.engine.").split(".")[0]
            if own == "__init__" or other == own or not within(imported.target, "pagetide.engine"):
                continue
            if PLACE.get(other, len(LAYERS)) >= PLACE.get(own, -1):
                found.append(f"{path.relative_to(engine)}:{imported.line}: {own} imports {other}")
    return found


def repeated_class_names(root: Path) -> dict[str, list[str]]:
    """Names of classes at the top of a module that occur in several modules, with their files."""
    files = defaultdict(list)
    for path, tree in modules(root, SOURCES[:-1]):
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(root)))
    return {name: where for name, where in files.items() if len(where) > 1}


def wide_constructors(root: Path) -> list[str]:
    """Every constructor with more than MOST_PARAMETERS, as `file:line: class`.

    Those that dataclasses generate do not count: their parameters are the fields.
    """
    return [
        f"{path.relative_to(root)}:{function.lineno}: {node.name}"
        for _, path in sources(root)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, ast.FunctionDef)
        and function.name in ("__init__", "__new__")
        and len(function.args.posonlyargs + function.args.args + function.args.kwonlyargs) - 1 > MOST_PARAMETERS
    ]


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def private_uses(root: Path) -> list[str]:
    """Every use of a private name under `root` that is not the user's own, as `file:line: name`."""
    return [
        f"{path.relative_to(root)}:{line}: {name}"
        for path, tree in modules(root, TOOLS)
        for line, name in private_names(tree)
        if name not in USED_OF_OTHERS
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
