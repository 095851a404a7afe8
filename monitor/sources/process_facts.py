"""Facts about processes from /proc: their cgroup; and since when each of them has not used its device."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path

_MAX_BYTES = 1 << 14  # of /proc/PID/cgroup


def cgroup_of(pid: int, proc: Path) -> str | None:
    """The path of a process's cgroup as this process sees it; of cgroup v1 that of its memory. None if it is hidden or gone."""
    try:
        descriptor = os.open(f"{proc}/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.fsdecode(os.read(descriptor, _MAX_BYTES)).splitlines()
        finally:
            os.close(descriptor)
    except OSError:
        return None
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            found[name] = path
    unified = found.get("", "/")
    # Where both versions are mounted, the one that knows more than the root is in use.
    return next((path for path in (found.get("memory", "/"), found.get("name=systemd", "/"), unified) if path != "/"), unified)


class IdleTimes:
    """Since when processes of one device have not used it. Counts from when each was first seen. Not thread-safe."""

    def __init__(self) -> None:
        self._since_ns: dict[Hashable, int] = {}

    def update(self, used: Mapping[Hashable, bool], now_ns: int) -> dict[Hashable, float]:
        """Seconds without use by process, for the processes that are there; `used`: whether each has since the last call."""
        known = self._since_ns
        self._since_ns = {key: now_ns if was_used else known.get(key, now_ns) for key, was_used in used.items()}
        return {key: (now_ns - since_ns) / 1e9 for key, since_ns in self._since_ns.items()}
