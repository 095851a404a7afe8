"""Where a monitor's record and locks lie, who may read them, and which monitor a process should listen to.

    PAGETIDE_RUNTIME_DIR     goes first, for everything
    $XDG_RUNTIME_DIR/pagetide  one user's monitor, 0700; without that variable /run/user/UID, /dev/shm, or the temporary folder
    /run/pagetide            one for the whole machine, 0750, its record readable by a group

    monitor.lock   held exclusively (flock) by the one monitor of the directory; the kernel drops it at any death
    users.lock     held shared by each user of a monitor that was started on demand, exclusively by one that ends
    record         the shared-memory record
    broker.sock    where engines ask for memory

Lock files are never removed: whoever waited for one that is would hold another file's lock.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Mapping
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
            try:
                self.path.mkdir(mode=mode)
            except FileExistsError:
                self._check()
            if gid is not None:
                os.chown(self.path, -1, gid)
                self.path.chmod(mode)
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

    def _check(self) -> None:
        """Refuse what somebody else could have laid there, or may write to."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigInvalid(f"the runtime directory {self.path} is no directory")
        if found.st_uid != os.getuid():
            raise ConfigInvalid(
                f"the runtime directory {self.path} belongs to user {found.st_uid}, not to {os.getuid()}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigInvalid(
                f"the runtime directory {self.path} is writable by others than its owner ({stat.filemode(found.st_mode)}); "
                f"chmod go-w {self.path}, or name another with --runtime-dir or {VARIABLE}"
            )


def own_dir(environ: Mapping[str, str] = os.environ) -> RuntimeDir:
    """The directory of this user's monitor. Makes nothing."""
    if named := environ.get(VARIABLE):
        return RuntimeDir(Path(named).absolute())
    if base := environ.get("XDG_RUNTIME_DIR"):
        return RuntimeDir(Path(base).absolute() / "pagetide")
    uid = os.getuid()
    if os.path.isdir(session := f"/run/user/{uid}") and os.access(session, os.W_OK):
        return RuntimeDir(Path(session) / "pagetide")
    shared_memory = Path("/dev/shm")
    folder = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    return RuntimeDir(folder / f"pagetide-{uid}")


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
        deadline = time.monotonic() + timeout_s
        while not self.try_shared():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

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
