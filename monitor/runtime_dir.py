"""The directory of a monitor's record and locks, its access rights, and the choice of a monitor for a process.

    PAGETIDE_RUNTIME_DIR     goes first, for everything
    $XDG_RUNTIME_DIR/pagetide  one user's monitor, 0700; without that variable /run/user/UID, /dev/shm, or the temporary folder
    /run/pagetide            one for the whole machine, 0750, its record readable by a group

    monitor.lock   held exclusively (flock) by the one monitor of the directory; the kernel drops it at any death.
                   Has a note of the present or last monitor, "4711 on-demand" (its users may restart it) or "4711 serve"
    users.lock     held shared by each user of a monitor that was started on demand, exclusively by one that ends
    start.lock     held exclusively while a monitor is started on demand
    record         the shared-memory record
    broker.sock    where engines ask for memory
    events         the log of events, or a link to it: it outlives the machine's restart, and this directory need not

Lock files are never removed: a process that waited for a removed one would hold another file's lock. The processes that hold
them now are in /proc/locks (proc(5)), without those of other pid namespaces; they are used in messages only.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..common.state_dir import state_dir
from .errors import ConfigInvalid

MACHINE_DIR = Path("/run/pagetide")
MACHINE_STATE_DIR = Path("/var/lib/pagetide")
VARIABLE = "PAGETIDE_RUNTIME_DIR"
_ON_DEMAND, _SERVE = "on-demand", "serve"
_LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """One directory of a monitor."""

    path: Path

    @property
    def record(self) -> Path:
        """The shared-memory record."""
        return self.path / "record"

    @property
    def monitor_lock(self) -> Path:
        """Held by the running monitor."""
        return self.path / "monitor.lock"

    @property
    def start_lock(self) -> Path:
        """Held by the process that starts a monitor on demand."""
        return self.path / "start.lock"

    @property
    def users_lock(self) -> Path:
        """Held by the users of a monitor that was started on demand."""
        return self.path / "users.lock"

    @property
    def socket(self) -> Path:
        """The socket on which the broker listens."""
        return self.path / "broker.sock"

    @property
    def events(self) -> Path:
        """The log of events, or a link to it."""
        return self.path / "events"

    @property
    def log(self) -> Path:
        """The output of a monitor that was started on demand."""
        return self.path / "monitor.log"

    def prepare(self, *, group: str | None = None) -> RuntimeDir:
        """Create the directory, 0700, or 0750 for `group`. Raises ConfigInvalid if that fails or the directory is not safe."""
        gid = None if group is None else group_id(group)
        mode = 0o700 if gid is None else 0o750
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = True
            try:
                self.path.mkdir(mode=mode)
            except FileExistsError:
                self.check()
                made = not any(self.path.iterdir())
            if gid is not None:
                self._open_to(gid, mode, made)
        except OSError as error:
            raise ConfigInvalid(
                f"the runtime directory {self.path} cannot be used: {error.strerror}. "
                f"Name another with --runtime-dir or {VARIABLE}"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigInvalid(
                f"the runtime directory {self.path} is not writable. Name another with --runtime-dir or {VARIABLE}"
            )
        return self

    def _open_to(self, gid: int, mode: int, fresh: bool) -> None:
        """Grant the group access, but not to a directory that may contain unrelated files."""
        found = self.path.stat()
        if (found.st_gid, stat.S_IMODE(found.st_mode)) == (gid, mode):
            return
        if not fresh and not self.monitor_lock.exists():
            raise ConfigInvalid(
                f"the runtime directory {self.path} is not empty and was not made for the group; name an empty one, or "
                f"chgrp {gid} {self.path} && chmod {mode:o} {self.path}"
            )
        os.chown(self.path, -1, gid)
        self.path.chmod(mode)

    def check(self) -> None:
        """Reject a directory that another user could have created, or can write to. Raises ConfigInvalid, OSError."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigInvalid(f"the runtime directory {self.path} is not a directory")
        if found.st_uid != _uid():
            raise ConfigInvalid(f"the runtime directory {self.path} belongs to user {found.st_uid}, not to {_uid()}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigInvalid(
                f"the runtime directory {self.path} is writable by others than its owner ({stat.filemode(found.st_mode)}); "
                f"chmod go-w {self.path}, or name another with --runtime-dir or {VARIABLE}"
            )

    def event_log(self, environ: Mapping[str, str] = os.environ) -> Path:
        """The default directory of the log of events: of what outlives a restart, unless this directory was chosen."""
        if self.path == MACHINE_DIR:
            return MACHINE_STATE_DIR / "events"
        return state_dir(environ) / "events" if self == own_dir({**environ, VARIABLE: ""}) else self.events

    def link_events(self, target: Path) -> None:
        """Let readers find a log of events that is elsewhere. Raises ConfigInvalid, OSError."""
        if target == self.events:
            return
        if self.events.is_symlink():
            self.events.unlink()
        elif self.events.exists():
            raise ConfigInvalid(f"{self.events} has older events, which readers would find first; move it away")
        self.events.symlink_to(target)


def own_dir(environ: Mapping[str, str] = os.environ) -> RuntimeDir:
    """The directory of this user's monitor. Creates nothing. Raises ConfigInvalid for a relative one."""
    if named := environ.get(VARIABLE, "").strip():
        if not os.path.isabs(named):
            raise ConfigInvalid(
                f"{VARIABLE} must be an absolute path, got {named!r:.200}, which is another directory for each working "
                f"directory: processes that are to share memory would not meet; set it to {Path(named).absolute()}, or "
                "unset it"
            )
        return RuntimeDir(Path(named))
    uid = _uid()
    for base in (environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        if base and _is_own(base, uid):  # under sudo the variable may name another user's
            return RuntimeDir(Path(base).absolute() / "pagetide")
    shared_memory = Path("/dev/shm")
    folder = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    return RuntimeDir(folder / f"pagetide-{uid}")


def _uid() -> int:
    """This user's uid; 0 on Windows."""
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_own(folder: str, uid: int) -> bool:
    try:
        return os.stat(folder).st_uid == uid and os.access(folder, os.W_OK)
    except (OSError, ValueError):
        return False


def readable_dirs(environ: Mapping[str, str] = os.environ, machine: Path = MACHINE_DIR) -> tuple[RuntimeDir, ...]:
    """The directories to search for a running monitor, in order. Raises ConfigInvalid as `own_dir` does."""
    own = own_dir(environ)
    return (own,) if environ.get(VARIABLE, "").strip() else (RuntimeDir(machine), own)


def group_id(group: str) -> int:
    """The gid of a group name. Raises ConfigInvalid."""
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigInvalid(f"there is no group {group!r} on this machine") from None


class FileLock:
    """A lock on a file, released by the kernel when its holder dies. Not inherited by executed programs."""

    def __init__(self, path: Path) -> None:
        """Open the file; create it if needed, readable by its owner only. Raises OSError."""
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _locks.add(self)

    def try_exclusive(self) -> bool:
        """Take the lock exclusively; False if another process holds it."""
        import fcntl

        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take the lock shared; False if another process holds it exclusively."""
        import fcntl

        return self._try(fcntl.LOCK_SH)

    def wait_shared(self, timeout_s: float) -> bool:
        """Take the lock shared, waiting at most `timeout_s` for an exclusive holder."""
        return _wait(self.try_shared, timeout_s)

    def wait_exclusive(self, timeout_s: float) -> bool:
        """Take the lock exclusively, waiting at most `timeout_s` for other holders."""
        return _wait(self.try_exclusive, timeout_s)

    def note(self, text: str) -> None:
        """Replace the file's text, for other processes to read; it stays after the lock is released. Raises OSError."""
        if self._fd is None:
            raise ValueError("the lock is closed")
        data = text.encode()
        os.pwrite(self._fd, data, 0)  # before truncation, so that no reader finds the file empty
        os.ftruncate(self._fd, len(data))

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _try(self, operation: int) -> bool:
        import fcntl

        if self._fd is None:
            raise ValueError("the lock is closed")
        try:
            fcntl.flock(self._fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _wait(take: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not take():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the locks in a forked child, which shares them with its parent and would keep them held."""
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


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
