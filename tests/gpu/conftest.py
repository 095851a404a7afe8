"""Engines of these tests start without a self-check: test_cuda.py makes it, and others need not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagetide.engine.self_check.cache import Cache
from pagetide.engine.self_check.identity import identity_of
from pagetide.engine.self_check.report import PARTS, PASSED, PartOutcome


@pytest.fixture(scope="session", autouse=True)
def _checked_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            Cache().write(identity_of(index), [PartOutcome(part, PASSED) for part in PARTS])
        yield
