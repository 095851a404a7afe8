"""Total and available host memory: that of this machine, or of the cgroups around this process if that is less.

    total   MemTotal, or the smallest limit (memory.max and memory.high) of our memory cgroups and their ancestors
    free    MemAvailable, or what the tightest of these cgroups leaves: limit - use + file pages not used lately

The functions read every file that may change the result, by one open and one read of a few µs each, and keep nothing: after
a move to another cgroup the next call is right. The monitor reads 50 times a second, where each of these files costs several
times as much as in a loop, since others used the caches meanwhile. `HostMemoryReader` therefore keeps /proc/meminfo open, and
looks for limits every `LIMITS_S`.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_MEMINFO = re.compile(rb"^MemTotal:\s+(\d+) kB$.*?^MemAvailable:\s+(\d+) kB$", re.MULTILINE | re.DOTALL)
_ABSENT = (errno.ENOENT, errno.ENODEV)  # a root has no such files; or the cgroup was just removed
_LARGEST_FILE_BYTES = 1 << 16
LIMITS_S = 0.25  # between two looks for limits, of repeated reads


class HostMemoryReading(NamedTuple):
    """The memory of this process' host; 0 ≤ free ≤ total."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup as this process sees it."""

    path: str  # below the root that this process sees: "/user.slice", "/"
    directory: Path


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemoryReading:
    """Total bytes for this process, and those that it may still allocate.

    `proc` and `cgroups` are the mount points of the kernel's files (cgroup v2, or v1 below `memory/`). Without them, on
    macOS and Windows, psutil gives the figures. Raises OSError if a file exists and cannot be read.
    """
    return _measure(proc, cgroups)[0]


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process may still allocate: the free bytes of `host_memory`."""
    return host_memory(proc, cgroups).free_bytes


def free_address_bytes(proc: Path = PROC) -> int | None:
    """Bytes that this process may still map under its limit of address space (`ulimit -v`, RLIMIT_AS); None without one."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most == resource.RLIM_INFINITY:
            return None
        return max(0, most - int(_read(f"{proc}/self/statm").split()[0]) * resource.getpagesize())
    except (ImportError, OSError):  # not Linux
        return None


def limiting_cgroup(proc: Path = PROC, cgroups: Path = CGROUPS) -> Cgroup | None:
    """The cgroup that limits the total of `host_memory`; None if the limit is the machine's memory."""
    return _measure(proc, cgroups)[1]


class HostMemoryReader:
    """Repeated reads of `host_memory`. A limit that appears or changes counts after `LIMITS_S`. Not thread-safe."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._cgroups, self._clock = proc, cgroups, clock
        self._meminfo: int | None = None
        self._limits: Sequence[_CgroupLimit] = ()
        self._of_bytes, self._look_at = -1, 0.0

    def read(self) -> HostMemoryReading:
        """Total bytes for this process, and those that it may still allocate. Raises OSError."""
        if self._meminfo is None:
            with suppress(FileNotFoundError):  # not Linux
                self._meminfo = os.open(f"{self._proc}/meminfo", os.O_RDONLY)
        text = None if self._meminfo is None else os.pread(self._meminfo, _LARGEST_FILE_BYTES, 0)
        machine_bytes, free_bytes = _machine(self._proc, text)
        if machine_bytes != self._of_bytes or self._clock() >= self._look_at:
            self._limits = _limits_below(machine_bytes, self._proc, self._cgroups)
            self._of_bytes, self._look_at = machine_bytes, self._clock() + LIMITS_S
        return _within(machine_bytes, free_bytes, self._limits)[0]

    def close(self) -> None:
        """Close the file that is kept open. Idempotent."""
        if self._meminfo is not None:
            os.close(self._meminfo)
            self._meminfo = None


def _measure(proc: Path, cgroups: Path) -> tuple[HostMemoryReading, Cgroup | None]:
    """The reading, and the cgroup that limits the total."""
    machine_bytes, free_bytes = _machine(proc)
    return _within(machine_bytes, free_bytes, _limits_below(machine_bytes, proc, cgroups))


def _limits_below(machine_bytes: int, proc: Path, cgroups: Path) -> list[_CgroupLimit]:
    """The limits of this process' memory cgroups, innermost first, without those that the machine is below."""
    found = []
    for files in _memory_cgroups(proc, cgroups):
        try:
            limit = min((int(one) for one in map(_limit, files.limits) if one != b"max"), default=machine_bytes)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        else:
            found += [_CgroupLimit(files, limit)] if limit < machine_bytes else []
    return found


def _within(machine_bytes: int, free_bytes: int, limits: Sequence[_CgroupLimit]) -> tuple[HostMemoryReading, Cgroup | None]:
    """What the limits leave of the machine's memory, and the cgroup that limits the total."""
    total_bytes, limiting = machine_bytes, None
    for files, limit in limits:
        try:
            room_bytes = limit - int(_read(files.use))
            if room_bytes < free_bytes:  # reclaimable pages only add to it, and are the most expensive to read
                match = files.reclaimable.search(_read(files.stat))
                room_bytes += int(match[1]) if match else 0
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise
        free_bytes = min(free_bytes, room_bytes)
        if limit < total_bytes:
            total_bytes, limiting = limit, files.cgroup
    return HostMemoryReading(total_bytes, max(0, min(free_bytes, total_bytes))), limiting


def _machine(proc: Path, meminfo: bytes | None = None) -> tuple[int, int]:
    """(MemTotal, MemAvailable) in bytes; `meminfo` is the file's text, if it has been read."""
    try:
        match = _MEMINFO.search(_read(f"{proc}/meminfo") if meminfo is None else meminfo)
    except FileNotFoundError:  # not Linux
        match = None
    if match is None:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    return int(match[1]) * 1024, int(match[2]) * 1024


@dataclass(frozen=True, slots=True)
class _Files:
    """The files with the figures of one cgroup. They may not exist."""

    cgroup: Cgroup
    limits: tuple[str, ...]  # the smallest applies
    use: str
    stat: str
    reclaimable: re.Pattern[bytes]  # in `stat`: file pages not used lately, reclaimed before an OOM kill


class _CgroupLimit(NamedTuple):
    """A cgroup's files, with its limit in bytes."""

    files: _Files
    limit: int


def _memory_cgroups(proc: Path, cgroups: Path) -> tuple[_Files, ...]:
    """This process' memory cgroups and their ancestors, innermost first. The limit of each applies."""
    try:
        membership = _read(f"{proc}/self/cgroup")
    except FileNotFoundError:  # no cgroups here: macOS, Windows
        return ()
    return _files(membership, cgroups)


@lru_cache(maxsize=16)
def _files(membership: bytes, cgroups: Path) -> tuple[_Files, ...]:
    """The files to read for the contents of `/proc/PID/cgroup`.

    A container without a cgroup namespace sees the host's path there, but only its own part of the tree, as the root.
    So a directory may be missing, and the root is always included.
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
    return _Files(cgroup, (limit,), use, stat, re.compile(rb"^total_inactive_file (\d+)", re.MULTILINE))


def _files_v2(cgroup: Cgroup) -> _Files:
    most, high, use, stat = (f"{cgroup.directory}/memory.{name}" for name in ("max", "high", "current", "stat"))
    # Above memory.high a process is not killed, but slowed down until it barely runs.
    return _Files(cgroup, (most, high), use, stat, re.compile(rb"^inactive_file (\d+)", re.MULTILINE))


def _limit(path: str) -> bytes:
    """The bytes in a limit's file, or "max"; a cgroup without the file of memory.high has no such limit."""
    try:
        return _read(path).strip()
    except FileNotFoundError:
        if not path.endswith(".high"):
            raise
        return b"max"


def _read(path: str) -> bytes:
    """A kernel file, read whole in one call. Half the cost of `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _LARGEST_FILE_BYTES)
    finally:
        os.close(descriptor)
