"""Every test session has a world of its own: no test meets a monitor, or an engine, of whoever runs the tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The benchmarks are programs of the checkout, not part of what is installed. Last: what is installed goes first.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("pagetide", deadline=None)
settings.load_profile("pagetide")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A runtime directory of the tests' own, and empty folders of settings and caches, for this process and its children."""
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_RUNTIME_DIR", str(runtime))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Many tests collect garbage, and so does every engine's close: spare it what torch and transformers brought along."""
    gc.collect()
    gc.freeze()
