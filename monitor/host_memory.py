"""How much memory this machine has and leaves, or the cgroups around this process where that is less.

    total   MemTotal, or the smallest limit of our memory cgroups and their ancestors
    free    MemAvailable, or what the tightest of these cgroups leaves: limit - use + file pages not used lately

It is asked 50 times a second, so every file costs one open and one read of a few µs, and what cannot change the answer is
not read. No file is kept open and no directory remembered: a process that is moved to another cgroup is right at the next
call.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .snapshot import MemoryReading

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_MEMINFO = re.compile(rb"^MemTotal:\s+(\d+) kB$.*?^MemAvailable:\s+(\d+) kB$", re.MULTILINE | re.DOTALL)
_LARGEST_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup as it is seen from here."""

    path: str  # below the root that this process sees: "/user.slice", "/"
    directory: Path


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryReading:
    """Bytes that this process could have at all, and those it may still take; 0 ≤ free ≤ total.

    `proc` and `cgroups` are where the kernel shows its files (cgroup v2, or v1 below `memory/`). Without them, on macOS
    and Windows, the figures are psutil's. Raises OSError where a file is there and cannot be read.
    """
    total_bytes, free_bytes, _ = _measure(proc, cgroups)
    return MemoryReading(total_bytes, free_bytes)


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process may still take: the free bytes of `host_memory`."""
    return _measure(proc, cgroups)[1]


def limiting_cgroup(proc: Path = PROC, cgroups: Path = CGROUPS) -> Cgroup | None:
    """The cgroup whose limit is the total of `host_memory`; None where it is the machine's memory."""
    return _measure(proc, cgroups)[2]


def _measure(proc: Path, cgroups: Path) -> tuple[int, int, Cgroup | None]:
    """(total, free, whose limit the total is)."""
    machine_bytes, free_bytes = _machine(proc)
    total_bytes, limiting = machine_bytes, None
    for files in _memory_cgroups(proc, cgroups):
        try:
            limit = _read(files.limit).strip()
            if limit == b"max" or int(limit) >= machine_bytes:
                continue
            room_bytes = int(limit) - int(_read(files.use))
            if room_bytes < free_bytes:  # what can be reclaimed only adds to it, and is the dearest to read
                match = files.reclaimable.search(_read(files.stat))
                room_bytes += int(match[1]) if match else 0
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):  # a root has no such files; or it was removed just now
                continue
            raise
        free_bytes = min(free_bytes, room_bytes)
        if int(limit) < total_bytes:
            total_bytes, limiting = int(limit), files.cgroup
    return total_bytes, max(0, min(free_bytes, total_bytes)), limiting


def _machine(proc: Path) -> tuple[int, int]:
    """(MemTotal, MemAvailable) in bytes."""
    try:
        match = _MEMINFO.search(_read(f"{proc}/meminfo"))
    except FileNotFoundError:  # no Linux
        match = None
    if match is None:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    return int(match[1]) * 1024, int(match[2]) * 1024


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the figures of one cgroup stand. A directory that is not there is found out by reading."""

    cgroup: Cgroup
    limit: str
    use: str
    stat: str
    reclaimable: re.Pattern[bytes]  # in `stat`: file pages not used lately, which go before anyone is killed


def _memory_cgroups(proc: Path, cgroups: Path) -> tuple[_Files, ...]:
    """This process' memory cgroups and their ancestors, the innermost first, since the limit of each holds."""
    try:
        membership = _read(f"{proc}/self/cgroup")
    except FileNotFoundError:  # no cgroups here: macOS, Windows
        return ()
    return _files(membership, cgroups)


@lru_cache(maxsize=16)
def _files(membership: bytes, cgroups: Path) -> tuple[_Files, ...]:
    """What `/proc/PID/cgroup` says, as files to read.

    A container without a cgroup namespace sees the host's path there but only its own part of the tree, as the root:
    so a directory may not be there, and the root is looked at always.
    """
    found = []
    for line in os.fsdecode(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            cgroup = Cgroup("/" + "/".join(parts[:depth]), root.joinpath(*parts[:depth]))
            found.append(_files_v1(cgroup) if controllers else _files_v2(cgroup))
    return tuple(found)


def _files_v1(cgroup: Cgroup) -> _Files:
    limit, use, stat = (f"{cgroup.directory}/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat"))
    return _Files(cgroup, limit, use, stat, re.compile(rb"^total_inactive_file (\d+)", re.MULTILINE))


def _files_v2(cgroup: Cgroup) -> _Files:
    limit, use, stat = (f"{cgroup.directory}/memory.{name}" for name in ("max", "current", "stat"))
    return _Files(cgroup, limit, use, stat, re.compile(rb"^inactive_file (\d+)", re.MULTILINE))


def _read(path: str) -> bytes:
    """A file of the kernel's, which gives it whole in one read. Half the price of `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _LARGEST_FILE_BYTES)
    finally:
        os.close(descriptor)
