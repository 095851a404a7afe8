"""Which modules load torch, and so which test files need it; the others run in processes that never load it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

TESTS = Path(__file__).parent
TORCH_LIBRARIES = ("torch", "transformers", "triton", "flash_attn")
# Modules of pagetide that may import torch; the rest may neither import torch nor these.
TORCH_MODULES = (
    "pagetide.native", "pagetide.engine", "pagetide.cache.storage", "pagetide.server.engine_process",
    "pagetide.server.defaults", "pagetide.server.engine_outputs", "pagetide.fleet.worker", "pagetide.fleet.preparation",
    "pagetide.fleet.client", "pagetide.fleet.outputs", "pagetide.fleet.api", "pagetide.fleet.front", "pagetide.fleet.cluster",
    "pagetide.fleet.actors", "pagetide.fleet.call", "pagetide.fleet.sync", "pagetide.fleet.errors",
)  # fmt: skip
# But these import none, and anything may import them.
PURE_MODULES = ("pagetide.engine.config",)
# Public names that load the engine when they are used, and programs that do so at once.
_LOAD_ENGINES = ("pagetide", "pagetide.pipelines", "pagetide.batch", "pagetide.demo", "benchmarks", "examples")
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import \(?([\w, ]*)|import ([\w., ]+))", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """What the lines of a file that begin with `import` or `from` name: modules, and what may be one in a package."""
    for origin, names, modules in _IMPORT.findall(path.read_text("utf-8")):
        if origin:
            yield origin
        for name in re.split(r"[ ,]+", names or modules):
            if name:
                yield f"{origin}.{name}" if origin else name


@cache
def needs_torch(path: Path) -> bool:
    """Whether a file of tests imports what loads torch, in itself or by a helper in tests/."""
    for name in imported(path):
        top = name.partition(".")[0]
        if top in TORCH_LIBRARIES or name in _LOAD_ENGINES or name.startswith(_LOAD_ENGINES[1:]):
            return True
        if any(name == module or name.startswith(f"{module}.") for module in TORCH_MODULES):
            return True
        helper = TESTS / f"{top}.py"
        if helper.is_file() and helper != path and needs_torch(helper):
            return True
    return False


def runs_with_torch(path: Path) -> bool:
    """Whether a file of tests runs where torch is: it needs torch, or the conftest beside it does."""
    beside = path.with_name("conftest.py")
    return needs_torch(path) or (beside.is_file() and needs_torch(beside))


class NoTorch:
    """An import finder that refuses torch and transformers: for processes that never load them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name in ("torch", "transformers"):
            raise ImportError(
                f"{name} is imported in a process for tests that need none: import it at the head of the test's file, so that "
                f"the file runs with those that do (tests/torch_free.py)",
                name=name,
            )
        return None


def refuse_torch() -> None:
    """From now on torch cannot be imported in this process."""
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, NoTorch())  # type: ignore[arg-type]
