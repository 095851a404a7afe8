"""Imports run one way and never in a circle, and torch lives in two places: the rules of the architecture, as a test.

The rules are checked on the source (`violations`, which sees imports inside functions too) and once more on what a
fresh interpreter really loads.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each may import what stands left of it. `configs` holds data.
ORDER = ("configs", "monitor", "allocator", "cache", "scheduler", "native", "engine", "server", "fleet")
TORCH_LIBRARIES = ("torch", "transformers", "triton", "flash_attn")
# Modules that may import torch; the rest may neither import torch nor these.
TORCH_MODULES = (
    "pagetide.native", "pagetide.engine", "pagetide.cache.storage", "pagetide.server.engine_process",
    "pagetide.server.defaults", "pagetide.server.engine_outputs", "pagetide.fleet.worker", "pagetide.fleet.preparation",
    "pagetide.fleet.client", "pagetide.fleet.outputs", "pagetide.fleet.api", "pagetide.fleet.front", "pagetide.fleet.cluster",
    "pagetide.fleet.actors", "pagetide.fleet.call", "pagetide.fleet.sync", "pagetide.fleet.errors",
)  # fmt: skip
# Composition roots: import everything, are imported by nothing.
ROOTS = ("pagetide.cli", "pagetide.vram_monitor")
# The command line run as a module is the one exception to that.
MAY_IMPORT_ROOTS = ("pagetide.__main__",)
# What the packages may import of pagetide itself.
ROOT_NAMES = {"version"}
# What pagetide/__init__.py may import at once: a name whose module has no imports.
LEAVES = {"pagetide.version.__version__"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported thing: `target` is absolute, `relative` tells whether it was written with dots."""

    line: int
    target: str
    relative: bool
    eager: bool  # runs when the module is imported: in no function, and not for type checkers only


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in a module of `package`, also by `import_module` with a literal; `from a import b` is `a.b`."""
    yield from _imports(tree, package, eager=True)


def _imports(node: ast.AST, package: str, eager: bool) -> Iterator[Import]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        eager = False
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, package, eager=False)
        for child in node.orelse:
            yield from _imports(child, package, eager)
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
        yield from _imports(child, package, eager)


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
        for imported in imports(ast.parse(path.read_text(encoding="utf-8")), _package(module, path)):
            for sentence in _breaches(module, imported):
                found.append(f"{path.relative_to(root)}:{imported.line}: {sentence}")
    return found


def cycles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, also in functions and for type checkers."""
    files = {name.removesuffix(".__init__"): path for name, path in sources(root)}
    graph = {
        module: {
            found
            for imported in imports(ast.parse(path.read_text(encoding="utf-8")), _package(module, path))
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
    elif own != "engine" and module not in TORCH_MODULES and any(within(target, holds) for holds in TORCH_MODULES):
        yield f"imports {target}, which loads torch"


# ---- the repository ----------------------------------------------------------------------------------


def test_the_repository_keeps_its_rules() -> None:
    assert violations(ROOT) == []


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(ROOT) == []


def test_every_package_is_looked_at() -> None:
    looked_at = {name.split(".")[1] for name, _ in sources(ROOT) if name.count(".") > 1}
    assert looked_at == {*ORDER, "batch", "demo", "pipelines"}


# ---- the test tested ----------------------------------------------------------------------------

PLANTED = [
    ("monitor/a.py", "from ..allocator import blocks", "never back"),
    ("allocator/a.py", "from ..cache.manager import CacheManager", "never back"),
    ("cache/a.py", "def f():\n    from ..scheduler import plan", "never back"),
    ("scheduler/a.py", "from .. import engine", "never back"),
    ("scheduler/deep/a.py", "from ...engine import llm", "never back"),
    ("configs/a.py", "from ..monitor import x", "never back"),
    ("scheduler/a.py", "import torch", "belong in engine/"),
    ("scheduler/a.py", "import torch.nn.functional as F", "belong in engine/"),
    ("cache/manager.py", "def f():\n    from torch import Tensor", "belong in engine/"),
    ("allocator/a.py", "if TYPE_CHECKING:\n    import torch", "belong in engine/"),
    ("monitor/a.py", "import importlib\nimportlib.import_module('torch.cuda')", "belong in engine/"),
    ("monitor/a.py", "__import__('transformers')", "belong in engine/"),
    ("cache/a.py", "from safetensors.torch import load_file", "belong in engine/"),
    ("pagetide/a.py", "import torch", "belong in engine/"),
    ("cache/__init__.py", "from .storage import Storage", "which loads torch"),
    ("cache/manager.py", "from . import storage", "which loads torch"),
    ("cache/manager.py", "from importlib import import_module\nimport_module('.storage', __package__)", "loads torch"),
    ("scheduler/a.py", "from ..cache import storage", "which loads torch"),
    ("native/a.py", "from ..engine import errors", "never back"),
    ("scheduler/a.py", "from ..native import instructions", "never back"),
    ("engine/a.py", "from ..server import app", "never back"),
    ("server/a.py", "from ..engine.llm import LLM", "which loads torch"),
    ("server/a.py", "from .engine_process import load", "which loads torch"),
    ("engine/a.py", "from pagetide.cache import manager", "write it with dots"),
    ("engine/a.py", "import pagetide.cache.manager", "write it with dots"),
    ("cache/a.py", "from allocator.blocks import BlockAllocator", "write it with dots"),
    ("pagetide/cli.py", "from pagetide.engine.llm import LLM", "write it with dots"),
    ("engine/a.py", "from .. import cli", "composition root"),
    ("engine/a.py", "from ..vram_monitor import main", "composition root"),
    ("pagetide/__init__.py", "def f():\n    from .cli import main", "composition root"),
    ("pagetide/cli.py", "from . import vram_monitor", "composition root"),
    ("engine/a.py", "from .. import LLM", "of pagetide itself"),
    ("engine/a.py", "from .. import __version__", "of pagetide itself"),
    ("pagetide/__init__.py", "from .engine.llm import LLM", "imports lazily"),
    ("pagetide/__init__.py", "import numpy", "imports lazily"),
    ("engine/a.py", "from .... import x", "leaves the package"),
]

ALLOWED = [
    ("engine/a.py", "import torch, transformers, triton\nfrom ..cache.storage import Storage\nfrom . import b"),
    (
        "engine/attention/a.py",
        "import torch\nfrom ... import native\nfrom ...cache import storage\nfrom ..runner import Runner",
    ),
    ("engine/torch_kernel.py", "from .torch_sampler import sample"),
    ("cache/storage.py", "import torch\nfrom ..allocator.arena import Arena\nfrom .geometry import Geometry"),
    ("scheduler/a.py", "import numpy as np\nfrom ..cache.manager import CacheManager\nfrom ..monitor import snapshot"),
    ("engine/__init__.py", "from ..version import __version__"),
    (
        "pagetide/cli.py",
        "import torch\nfrom .engine.llm import LLM\nfrom .version import __version__\nfrom .cache import storage",
    ),
    ("pagetide/__main__.py", "from .cli import main"),
    (
        "pagetide/__init__.py",
        "if TYPE_CHECKING:\n    from .engine.llm import LLM\ndef f():\n    from .engine import llm",
    ),
]


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.mark.parametrize(("path", "text", "said"), PLANTED)
def test_a_planted_violation_is_reported_once_with_its_line(tmp_path: Path, path: str, text: str, said: str) -> None:
    plant(tmp_path, path, text)
    (report,) = violations(tmp_path)
    assert report.startswith(f"{path}:{len(text.splitlines())}: ")
    assert said in report


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, text: str) -> None:
    plant(tmp_path, path, text)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "files",
    [
        {"cache/a.py": "from .b import B", "cache/b.py": "def f():\n    from .a import A"},
        {"cache/a.py": "from . import b", "cache/b.py": "if TYPE_CHECKING:\n    from .a import A"},
        {
            "cache/a.py": "from . import b",
            "cache/b.py": "from .deep.c import C",
            "cache/deep/c.py": "from ..a import A",
        },
    ],
)
def test_a_planted_cycle_is_reported(tmp_path: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        plant(tmp_path, path, text)
    plant(tmp_path, "cache/outside.py", "from . import a")
    names = sorted("pagetide." + path.removesuffix(".py").replace("/", ".") for path in files)
    assert cycles(tmp_path) == [names]


# ---- what is really loaded ----------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "pagetide",
        "pagetide.scheduler.scheduler",
        "pagetide.cache.manager",
        "pagetide.allocator.blocks",
        "pagetide.fleet.actors",
    ],
)
def test_pure_modules_do_not_load_torch(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint({"torch", "transformers"})


def test_pagetide_itself_loads_nothing_but_the_standard_library() -> None:
    # What the interpreter loads for itself, such as the finder of an editable install, is not pagetide's doing.
    assert loaded_by("import pagetide") - loaded_by("") - sys.stdlib_module_names == {"pagetide"}


def test_a_public_name_loads_its_own_module_only() -> None:
    # `LLM` is asked for in test_public_names.py: once is enough for a name that loads transformers.
    loaded = loaded_by("import pagetide; assert pagetide.SamplingParams.__name__ == 'SamplingParams'")
    assert loaded.isdisjoint({"torch", "transformers"})
