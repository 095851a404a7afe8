"""One monitor for all engines of these tests; else each `LLM` would start one, and end it again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagetide.monitor import Watch, watch


@pytest.fixture(scope="session", autouse=True)
def _one_monitor(_own_folders: None) -> Iterator[Watch]:
    with watch(timeout_s=60) as watched:
        yield watched
