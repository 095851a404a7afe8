"""The holders of a runtime directory: the monitor, as noted in its lock file, and lock holders known to the kernel.

    monitor.lock   "4711 on-demand" or "4711 serve", written by the monitor at its start; it stays after its death
    /proc/locks    the holders of each lock now (proc(5)), without processes of other pid namespaces

The note decides which processes may restart a monitor. /proc/locks is used in messages only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .runtime_dir import FileLock, RuntimeDir

_ON_DEMAND, _SERVE = "on-demand", "serve"
_LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class Holder:
    """The monitor that holds a directory, or held it last."""

    pid: int  # in its own pid namespace
    on_demand: bool  # started for its users, with default settings: any user can restart it


def note_holder(lock: FileLock, holder: Holder) -> None:
    """Write the holder into `lock`, a directory's monitor.lock. Raises OSError."""
    lock.note(f"{holder.pid} {_ON_DEMAND if holder.on_demand else _SERVE}\n")


def last_holder(directory: RuntimeDir) -> Holder | None:
    """The monitor that holds the directory or held it last; None if that is not noted or not readable."""
    try:
        pid, kind = directory.monitor_lock.read_text("ascii").split("\n", 1)[0].split()
        return Holder(int(pid), {_ON_DEMAND: True, _SERVE: False}[kind])
    except (OSError, ValueError, KeyError):
        return None


def monitor_pid(directory: RuntimeDir) -> int | None:
    """The pid of the monitor that holds the directory: from the kernel, else from its note."""
    pids = _pids(directory.monitor_lock, "WRITE")
    if pids:
        return pids[0]
    holder = last_holder(directory)
    return None if holder is None else holder.pid


def pids_of_users(directory: RuntimeDir) -> tuple[int, ...]:
    """The processes that use a monitor started on demand, as far as the kernel shows them."""
    return _pids(directory.users_lock, "READ")


def _pids(path: Path, mode: str) -> tuple[int, ...]:
    """The pids that hold the lock on this file: READ for shared, WRITE for exclusive."""
    try:
        found = os.stat(path)
        locks = _LOCKS.read_text("ascii")
    except OSError:
        return ()
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    rows = [line.split() for line in locks.splitlines()]  # 1: FLOCK ADVISORY WRITE 4711 fe:00:2149305 0 EOF
    pids = {int(row[4]) for row in rows if len(row) == 8 and row[3] == mode and row[5] == file}
    return tuple(sorted(pid for pid in pids if pid > 0))
