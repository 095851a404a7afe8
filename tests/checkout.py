"""The files of the checkout, as git sees them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
def files() -> tuple[Path, ...]:
    """What git holds or would take: tracked files, and new ones that it does not ignore. No links to folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in run.stdout.decode().split("\0") if name)
    return tuple(path for path in paths if path.is_file())


def loaded(path: Path) -> ModuleType:
    """A program of the checkout as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module
