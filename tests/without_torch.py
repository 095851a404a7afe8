"""A pytest plugin for interpreters without torch: what imports torch or transformers is skipped, and counted so.

PYTHONPATH=tests python -P -m pytest -p without_torch tests/cache
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest

MISSING = ("torch", "transformers", "llguidance", "matplotlib", "triton")


class Skips:
    """An import finder: the import of a library that is missing skips the test, or the whole module of tests."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name in MISSING:
            pytest.skip(f"needs {name}", allow_module_level=True)
        return None


def pytest_configure() -> None:
    """Install the finder behind all others, so that a library that is there is found."""
    sys.meta_path.append(Skips())
