"""Facts about processes: memory, user, command, cgroup, processor time; and for how long each has not used its device.

On Linux they come from /proc directly, with few reads, as there may be a hundred processes each second. Elsewhere psutil
gives what the system has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from mmap import PAGESIZE
from pathlib import Path
from typing import TypeVar

from ...common.host_memory import PROC

T = TypeVar("T")

_IS_LINUX = sys.platform == "linux"
_MAX_BYTES = 1 << 14  # of a file; a longer command line is cut
_TICKS = os.sysconf("SC_CLK_TCK") if _IS_LINUX else 1
_USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 11, 12, 19  # fields of /proc/PID/stat behind the name: proc(5)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process. None: hidden, or not known on this system."""

    pid: int
    start: float | None = None  # tells it from others that have the pid later
    user: str | None = None
    command: str | None = None  # with arguments; the name of a process without a command line
    cgroup: str | None = None
    processor_s: float | None = None


class ProcessTable:
    """Reads facts of processes. Users are remembered; commands are not, since exec changes them. Not thread-safe."""

    def __init__(self) -> None:
        self._users: dict[tuple[int, float | None, int], str | None] = {}

    def facts(self, pids: Iterable[int]) -> dict[int, ProcessFacts]:
        """The facts of those processes that this one can see, by pid."""
        read = self._of_linux if _IS_LINUX else _of_psutil
        found = {pid: facts for pid in pids if (facts := read(pid)) is not None}
        if len(self._users) > 2 * len(found):
            self._users = {key: user for key, user in self._users.items() if key[0] in found}
        return found

    def _of_linux(self, pid: int) -> ProcessFacts | None:
        try:
            stat = _read(f"/proc/{pid}/stat")
            name, _, rest = stat.partition(b" (")[2].rpartition(b") ")
            fields = rest.split()
            start = int(fields[_START_TICKS]) / _TICKS
            processor_s = (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS
            uid = os.stat(f"/proc/{pid}").st_uid
            command = _read(f"/proc/{pid}/cmdline")
        except (OSError, IndexError, ValueError):  # it ended, or is hidden
            return None
        key = pid, start, uid  # another uid of its folder: it may be another user's now
        if key not in self._users:
            self._users[key] = _user_of(pid)
        text = os.fsdecode(command.removesuffix(b"\0").replace(b"\0", b" ")) or os.fsdecode(name)
        return ProcessFacts(pid, start, self._users[key], text, cgroup_of(pid), processor_s)


class IdleTimes:
    """For how long processes have not used a device. Counts from when each was first seen. Not thread-safe."""

    def __init__(self) -> None:
        self._since_ns: dict[Hashable, int] = {}

    def update(self, used: Mapping[Hashable, bool], now_ns: int) -> dict[Hashable, float]:
        """Seconds without use by process, for the processes that are there; `used`: whether each has since the last call."""
        known = self._since_ns
        self._since_ns = {key: now_ns if was_used else known.get(key, now_ns) for key, was_used in used.items()}
        return {key: (now_ns - since_ns) / 1e9 for key, since_ns in self._since_ns.items()}


def all_pids() -> list[int]:
    """The processes that this one can see."""
    if _IS_LINUX:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    import psutil

    return psutil.pids()


def resident_bytes(pid: int) -> int | None:
    """The resident set of a process; None if it ended or is hidden."""
    if _IS_LINUX:
        try:
            return int(_read(f"/proc/{pid}/statm").split()[1]) * PAGESIZE  # proc(5): size resident shared ...
        except (OSError, IndexError):
            return None
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def cgroup_of(pid: int, proc: Path = PROC) -> str | None:
    """The path of a process's cgroup as this process sees it; of cgroup v1 that of its memory. None if it is hidden or gone."""
    try:
        return _path_in(_read(f"{proc}/{pid}/cgroup"))
    except OSError:
        return None


@lru_cache(maxsize=1024)  # many processes are in few cgroups
def _path_in(membership: bytes) -> str:
    found: dict[str, str] = {}
    for line in os.fsdecode(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            found[name] = path
    unified = found.get("", "/")
    # Where both versions are mounted, the one that knows more than the root is in use.
    return next((path for path in (found.get("memory", "/"), found.get("name=systemd", "/"), unified) if path != "/"), unified)


def _user_of(pid: int) -> str | None:
    try:
        status = _read(f"/proc/{pid}/status")
        return user_name(int(status.partition(b"\nUid:")[2].split()[0]))
    except (OSError, IndexError, ValueError):
        return None


@lru_cache(maxsize=64)
def user_name(uid: int) -> str:
    """The user's name, or the uid if the system has no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _of_psutil(pid: int) -> ProcessFacts | None:
    import psutil

    def or_none(ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except psutil.Error:  # it ended, or is hidden
            return None

    process = or_none(lambda: psutil.Process(pid))
    if process is None:
        return None
    with process.oneshot():
        times, command = or_none(process.cpu_times), " ".join(or_none(process.cmdline) or ()) or or_none(process.name)
        processor_s = None if times is None else times.user + times.system
        return ProcessFacts(pid, or_none(process.create_time), or_none(process.username), command, None, processor_s)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
