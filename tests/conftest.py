"""Every test session has a world of its own: no test meets a monitor, or an engine, of whoever runs the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("pagetide", deadline=None)
settings.load_profile("pagetide")

VARIABLE = "PAGETIDE_RUNTIME_DIR"


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("runtime")
    directory.chmod(0o700)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(directory)
    yield directory
    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Many tests collect garbage, and so does every engine's close: spare it what torch and transformers brought along."""
    gc.collect()
    gc.freeze()
