"""The file of a record: laid at its path whole, mended when it was harmed, and never mapped.

A mapped file that is cut short ends every process that touches it, by SIGBUS: the monitor and all engines at once. So the
writer keeps the record in memory of its own and copies what changes to the file (`pwrite`); readers copy it out (`pread`).
A cut file is then a short read, which is an error like any other. docs/decisions/0029-the-record-is-not-mapped.md has the
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

from . import record_layout as layout
from .errors import RecordError, RecordMissing
from .runtime_dir import MACHINE_DIR

# A pipe that lies there must not hold us up, nor a link lead us elsewhere.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class RecordFile:
    """The writer's end. Not thread-safe.

    The bytes of `shared` are the truth; the file is a copy of them for other processes.
    """

    def __init__(self, path: Path, fd: int, shared: layout.SharedBytes) -> None:
        """For `create`."""
        self.path = path
        self._fd = fd
        self._shared = shared
        self._identity = identity(os.fstat(fd))
        self._failure: OSError | None = None  # of the last write that failed

    @classmethod
    def create(cls, path: Path, shared: layout.SharedBytes, mode: int, gid: int | None) -> RecordFile:
        """A file with all that `shared` holds, in the place of any other at `path`.

        It gets its name when it is complete, and an old one loses only its name: a reader of either meets neither half a
        record nor a short one. Raises RecordError.
        """
        unfinished = path.with_name(f"{path.name}.new")
        try:
            unfinished.unlink(missing_ok=True)  # of a monitor that was killed while it stood here
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
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
            except BaseException:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RecordError(f"cannot create the record {path}: {error.strerror}") from error
        return file

    def reserve_details(self, slots: Iterable[int]) -> None:
        """Make room for the details of these slots, so that a full file system is met now and not later. Raises RecordError."""
        try:
            for slot in slots:
                _, at, buffer_bytes = layout.DETAIL[slot]
                _reserve(self._fd, at, 2 * buffer_bytes)
        except OSError as error:
            raise RecordError(f"cannot make room in the record {self.path}: {error.strerror}") from error

    def update(self, *parts: layout.Part) -> None:
        """Write what has changed in memory, in this order. A write that fails is for `harm` to tell."""
        try:
            for at, data in parts:
                if os.pwrite(self._fd, data, at) < len(data):
                    self._failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failure = error

    def harm(self) -> str | None:
        """What has become of the file: a part of a sentence, such as "was removed"; None: it is as it was written.

        Raises RecordError where another file lies in its place: that one is not ours to replace.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return "was removed"
        except OSError as error:
            return f"cannot be looked at ({error.strerror})"
        if identity(status) != self._identity:
            raise RecordError(
                f"another file lies at {self.path}, so nobody finds what this monitor (pid {os.getpid()}) measures: "
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
        """Close the file, and send those who read it to the one that lies at the path by now."""
        with contextlib.suppress(OSError):  # they find it silent a little later
            os.pwrite(self._fd, (1).to_bytes(8, sys.byteorder), layout.word_at(layout.ENDED))
        os.close(self._fd)

    def remove(self) -> None:
        """Close the file, and take its name away unless that is another's by now."""
        try:
            if identity(os.stat(self.path)) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:  # somebody tidied up
            pass
        finally:
            os.close(self._fd)


class OpenRecord:
    """The reader's end: a file that is open for as long as anything refers to this.

    Attributes:
        name: what the file is called in a sentence.
        identity: of the file; no other one gets the same while this one is open.
        read: copies bytes out of it, `os.pread` without the descriptor.
    """

    def __init__(self, path: Path) -> None:
        """Open the record at `path`. Raises RecordMissing, RecordError.

        No content can harm the process that reads it, and no change of the file either. Whose file it is, is looked at
        before anything of it is believed.
        """
        self.name = f"the record {path}"
        try:
            fd = os.open(path, _OPEN_FLAGS)
            # No other way to close it is safe: another thread may be reading, and the number be another file's by then.
            weakref.finalize(self, os.close, fd)
            status = os.fstat(fd)
            _check_trusted(path, status, self.name)
            head = os.pread(fd, layout.VERSION_BYTES, 0) if stat.S_ISREG(status.st_mode) else b""
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RecordMissing(
                f"there is no record at {path}: no monitor runs; `vram-monitor serve` starts one"
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
    """The error for a record that holds what no monitor writes."""
    return RecordError(f"{name} is damaged: start the monitor anew")


def identity(status: os.stat_result) -> tuple[int, int]:
    """What tells one file from another."""
    return status.st_dev, status.st_ino


def _check_trusted(path: Path, status: os.stat_result, name: str) -> None:
    """Raises RecordError for a file that somebody else than root and this user could have laid there, or may change.

    What lies in the machine's own directory was let in by root, whoever runs that monitor.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such owners
        return
    user = os.geteuid()
    if path.parent != MACHINE_DIR and status.st_uid not in (0, user):
        raise RecordError(
            f"{name} belongs to user {status.st_uid}, neither to root nor to user {user}, who reads it: it is not believed. "
            f"A monitor for everybody lies in {MACHINE_DIR} (`vram-monitor serve --group GROUP`)"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RecordError(
            f"{name} may be written by others than its owner ({stat.filemode(status.st_mode)}): it is not believed; "
            "start the monitor anew"
        )


def _reserve(fd: int, at: int, num_bytes: int) -> None:
    """Have room for these bytes of a file. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, at, num_bytes)
