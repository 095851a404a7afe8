"""Real memory cgroups, of either version, where this process may make one; the test is skipped where it may not."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """One memory cgroup."""

    def __init__(self, folder: Path, parent: Path) -> None:
        self.folder, self._parent = folder, parent
        self._files = ("memory.max", "memory.current") if (folder / "memory.max").exists() else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip

    def limit(self, num_bytes: int) -> None:
        """Raises OSError (cgroup v1) if more is used and cannot be reclaimed."""
        (self.folder / self._files[0]).write_text(str(num_bytes))

    @property
    def used_bytes(self) -> int:
        return int((self.folder / self._files[1]).read_text())

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This process is in the cgroup, as are those that it starts meanwhile."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Its processes have ended, or are about to."""
        for _ in range(500):
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.02)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup below this process' own, with this limit."""
    group = _made()
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        group.remove()


def _made() -> MemoryCgroup:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        parent = (CGROUPS / "memory" if controllers else CGROUPS) / path.lstrip("/")
        folder = parent / f"pagetide-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
                return MemoryCgroup(folder, parent)
            folder.rmdir()
    pytest.skip("this process may not make a memory cgroup")
