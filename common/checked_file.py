"""Opens files that others may have written: regular files alone, and no more of them than a bound. Waits for nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class InvalidFile(ValueError):
    """The file is none that is read. The message begins with its path."""


def open_checked(file: str | Path, what: str) -> BinaryIO:
    """A regular file, opened for reading; `what` names its content in the plural. Raises InvalidFile for anything else, and
    OSError.
    """
    opened = open(file, "rb", opener=_without_waiting)  # noqa: SIM115  # the caller's
    if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        return opened
    opened.close()
    raise InvalidFile(f"{file}: not a regular file, and {what} are read from nothing else; name another")


def read_checked(file: str | Path, most_bytes: int, what: str) -> bytes:
    """The content of a regular file. Raises InvalidFile for anything else and beyond `most_bytes`, and OSError."""
    with open_checked(file, what) as opened:
        raw = opened.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise InvalidFile(f"{file}: more than {most_bytes >> 20} MiB, which is too much for {what}")
    return raw


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of a FIFO that no process writes to, too, which would block otherwise."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
