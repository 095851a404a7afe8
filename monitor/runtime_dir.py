"""Where a monitor's record and locks lie, who may read them, and which monitor a process should listen to.

    PAGETIDE_RUNTIME_DIR     goes first, for everything
    $XDG_RUNTIME_DIR/pagetide  one user's monitor, 0700; without that variable /run/user/UID, /dev/shm, or the temporary folder
    /run/pagetide            one for the whole machine, 0750, its record readable by a group

    monitor.lock   held exclusively (flock) by the one monitor of the directory; the kernel drops it at any death.
                   Says who that is, or was (see holders)
    users.lock     held shared by each user of a monitor that was started on demand, exclusively by one that ends
    start.lock     held exclusively while a monitor is started on demand
    record         the shared-memory record
    broker.sock    where engines ask for memory

Lock files are never removed: whoever waited for one that is would hold another file's lock.
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

from .errors import ConfigInvalid

MACHINE_DIR = Path("/run/pagetide")
VARIABLE = "PAGETIDE_RUNTIME_DIR"


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
        """Held by the monitor that runs."""
        return self.path / "monitor.lock"

    @property
    def start_lock(self) -> Path:
        """Held by the one who starts a monitor on demand."""
        return self.path / "start.lock"

    @property
    def users_lock(self) -> Path:
        """Held by the users of a monitor that was started on demand."""
        return self.path / "users.lock"

    @property
    def socket(self) -> Path:
        """Where the broker listens."""
        return self.path / "broker.sock"

    @property
    def log(self) -> Path:
        """What a monitor says that was started on demand."""
        return self.path / "monitor.log"

    def prepare(self, *, group: str | None = None) -> RuntimeDir:
        """Make the directory, 0700, or 0750 for `group`. Raises ConfigInvalid where it cannot be, or is not safe to use."""
        gid = None if group is None else group_id(group)
        mode = 0o700 if gid is None else 0o750
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = True
            try:
                self.path.mkdir(mode=mode)
            except FileExistsError:
                self._check()
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
        """Let the group in; but where others' files may lie, nobody is let in who was not before."""
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

    def _check(self) -> None:
        """Refuse what somebody else could have laid there, or may write to."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigInvalid(f"the runtime directory {self.path} is no directory")
        if found.st_uid != _uid():
            raise ConfigInvalid(f"the runtime directory {self.path} belongs to user {found.st_uid}, not to {_uid()}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigInvalid(
                f"the runtime directory {self.path} is writable by others than its owner ({stat.filemode(found.st_mode)}); "
                f"chmod go-w {self.path}, or name another with --runtime-dir or {VARIABLE}"
            )


def own_dir(environ: Mapping[str, str] = os.environ) -> RuntimeDir:
    """The directory of this user's monitor. Makes nothing."""
    if named := environ.get(VARIABLE):
        return RuntimeDir(Path(named).absolute())
    uid = _uid()
    for base in (environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        if base and _is_own(base, uid):  # under sudo the variable may name another user's
            return RuntimeDir(Path(base).absolute() / "pagetide")
    shared_memory = Path("/dev/shm")
    folder = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    return RuntimeDir(folder / f"pagetide-{uid}")


def _uid() -> int:
    """This user's number; 0 where users have none (Windows)."""
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_own(folder: str, uid: int) -> bool:
    try:
        return os.stat(folder).st_uid == uid and os.access(folder, os.W_OK)
    except (OSError, ValueError):
        return False


def readable_dirs(environ: Mapping[str, str] = os.environ, machine: Path = MACHINE_DIR) -> tuple[RuntimeDir, ...]:
    """The directories in which a monitor for this process may be, the first that runs is the one to read."""
    own = own_dir(environ)
    return (own,) if environ.get(VARIABLE) else (RuntimeDir(machine), own)


def group_id(group: str) -> int:
    """The number of a group's name. Raises ConfigInvalid."""
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigInvalid(f"there is no group {group!r} on this machine") from None


class FileLock:
    """A lock on a file that the kernel drops when its holder dies. Not inherited by programs that are executed."""

    def __init__(self, path: Path) -> None:
        """Opens the file, making it if need be, readable by its owner alone. Raises OSError."""
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _locks.add(self)

    def try_exclusive(self) -> bool:
        """Take it alone; False where somebody holds it."""
        import fcntl

        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take it with others; False where somebody holds it alone."""
        import fcntl

        return self._try(fcntl.LOCK_SH)

    def wait_shared(self, timeout_s: float) -> bool:
        """Take it with others, waiting at most so long for one who holds it alone."""
        return _wait(self.try_shared, timeout_s)

    def wait_exclusive(self, timeout_s: float) -> bool:
        """Take it alone, waiting at most so long for whoever holds it."""
        return _wait(self.try_exclusive, timeout_s)

    def note(self, text: str) -> None:
        """Make this the file's text, for who looks into it; it stays when the lock is given back. Raises OSError."""
        if self._fd is None:
            raise ValueError("the lock is closed")
        data = text.encode()
        os.pwrite(self._fd, data, 0)  # before it is cut, so that nobody finds the file empty
        os.ftruncate(self._fd, len(data))

    def close(self) -> None:
        """Give it back. Idempotent."""
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
    """A forked child shares its parent's locks and would hold them on: it lets go of its part."""
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
