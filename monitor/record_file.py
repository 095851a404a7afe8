"""The file of a record: created atomically, repaired when damaged, and never mapped.

Truncating a mapped file kills every process that touches it, by SIGBUS: the monitor and all engines at once. So the
writer keeps the record in its own memory and copies changes to the file (`pwrite`); readers copy it out (`pread`). A
truncated file then is a short read, an error like any other. docs/decisions/0029-the-record-is-not-mapped.md has the
alternatives and the cost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ..common.on_error import OnError
from . import record_layout as layout
from .errors import RecordError, RecordMissing
from .runtime_dir import MACHINE_DIR

# A pipe at the path must not block, and a link must not be followed.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class RecordFile:
    """The writer's end. Not thread-safe.

    The bytes of `shared` are authoritative; the file is a copy of them for other processes.
    """

    def __init__(self, path: Path, fd: int, shared: layout.SharedBytes) -> None:
        """For `create`."""
        self.path = path
        self._fd = fd
        self._shared = shared
        self._identity = identity(os.fstat(fd))
        self._failure: OSError | None = None  # of the last failed write

    @classmethod
    def create(cls, path: Path, shared: layout.SharedBytes, mode: int, gid: int | None) -> RecordFile:
        """Create a file with the contents of `shared`, replacing any other at `path`.

        The file is complete before it is renamed to `path`, and an old file loses only its name. Raises RecordError.
        """
        unfinished = path.with_name(f"{path.name}.new")
        try:
            unfinished.unlink(missing_ok=True)  # left by a monitor that was killed here
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with OnError(lambda: os.close(fd), lambda: unfinished.unlink(missing_ok=True)):
                os.ftruncate(fd, layout.FILE_BYTES)
                file = cls(path, fd, shared)
                for at, data in shared.used():
                    _reserve(fd, at, len(data))
                    file.update((at, data))
                if file._failure is not None:
                    raise file._failure
                if gid is not None:
                    os.fchown(fd, -1, gid)
                os.fchmod(fd, mode)
                os.replace(unfinished, path)
        except OSError as error:
            raise RecordError(f"cannot create the record {path}: {error.strerror}") from error
        return file

    def reserve_details(self, slots: Iterable[int]) -> None:
        """Allocate space for the details of these slots, so that a full file system fails early. Raises RecordError."""
        try:
            for slot in slots:
                _, at, buffer_bytes = layout.DETAIL[slot]
                _reserve(self._fd, at, 2 * buffer_bytes)
        except OSError as error:
            raise RecordError(f"cannot make room in the record {self.path}: {error.strerror}") from error

    def update(self, *parts: layout.Part) -> None:
        """Write the parts that changed in memory, in this order. `harm` reports a failed write."""
        try:
            for at, data in parts:
                if os.pwrite(self._fd, data, at) < len(data):
                    self._failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failure = error

    def harm(self) -> str | None:
        """The damage of the file as part of a sentence, such as "was removed"; None if it is intact.

        Raises RecordError if another file is in its place, which this monitor must not replace.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return "was removed"
        except OSError as error:
            return f"cannot be examined ({error.strerror})"
        if identity(status) != self._identity:
            raise RecordError(
                f"another file lies at {self.path}, so no reader finds what this monitor (pid {os.getpid()}) measures: "
                "remove that file, or end the monitor that wrote it"
            )
        if status.st_size != layout.FILE_BYTES:
            return f"has {status.st_size:,} bytes instead of {layout.FILE_BYTES:,}"
        if self._failure is not None:
            return f"could not be written ({self._failure.strerror})"
        try:
            is_ours = os.pread(self._fd, layout.HEAD_BYTES, 0) == self._shared.read(layout.HEAD_BYTES, 0)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None if is_ours else "was written by another process"

    def abandon(self) -> None:
        """Close the file and mark it as ended, so that its readers switch to the file at the path now."""
        with contextlib.suppress(OSError):  # else readers find it silent a little later
            os.pwrite(self._fd, (1).to_bytes(8, sys.byteorder), layout.word_at(layout.ENDED))
        os.close(self._fd)

    def remove(self) -> None:
        """Close the file, and unlink it unless the path names another file now."""
        try:
            if identity(os.stat(self.path)) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:  # removed already
            pass
        finally:
            os.close(self._fd)


class OpenRecord:
    """The reader's end: an open file, for as long as anything references this.

    Attributes:
        identity: of the file; unique while this one is open.
        read: copies bytes out of it, `os.pread` without the descriptor.
    """

    def __init__(self, path: Path) -> None:
        """Open the record at `path`. Raises RecordMissing, RecordError.

        Neither the content nor a change of the file can harm the reading process. The owner is checked before any
        content is used.
        """
        self.name = f"the record {path}"
        try:
            fd = os.open(path, _OPEN_FLAGS)
            # Only a finalizer closes it safely: another thread may be reading, and the number may be reused.
            weakref.finalize(self, os.close, fd)
            status = os.fstat(fd)
            _check_trusted(path, status, self.name)
            head = os.pread(fd, layout.VERSION_BYTES, 0) if stat.S_ISREG(status.st_mode) else b""
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RecordMissing(
                f"there is no record at {path}: no monitor is running; `vram-monitor serve` starts one"
            ) from error
        except PermissionError as error:
            raise RecordError(
                f"{self.name} may not be read by this user: join the group that the monitor was given, or start another monitor"
            ) from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RecordError(f"{self.name} is a symbolic link, which no monitor makes: remove it") from error
            raise RecordError(f"cannot read {self.name}: {error}") from error
        layout.check_version(head, self.name)
        if status.st_size != layout.FILE_BYTES:
            raise damaged(self.name)
        self.identity = identity(status)
        self.read: layout.ReadBytes = partial(os.pread, fd)


def damaged(name: str) -> RecordError:
    """The error for a record with contents that no monitor writes."""
    return RecordError(f"{name} is damaged: restart the monitor")


def identity(status: os.stat_result) -> tuple[int, int]:
    """The device and inode of a file, which identify it."""
    return status.st_dev, status.st_ino


def _check_trusted(path: Path, status: os.stat_result, name: str) -> None:
    """Raises RecordError for a file that another user than root and this one could have created, or can change.

    A file in the machine's own directory is trusted: root grants access to that directory.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such owners
        return
    user = os.geteuid()
    if path.parent != MACHINE_DIR and status.st_uid not in (0, user):
        raise RecordError(
            f"{name} belongs to user {status.st_uid}, neither to root nor to user {user}, who reads it: it is not trusted. "
            f"A monitor for all users lies in {MACHINE_DIR} (`vram-monitor serve --group GROUP`)"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RecordError(
            f"{name} may be written by others than its owner ({stat.filemode(status.st_mode)}): it is not believed; "
            "start the monitor anew"
        )


def _reserve(fd: int, at: int, num_bytes: int) -> None:
    """Allocate space for these bytes of a file. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, at, num_bytes)
