"""The errors of the monitor, how a missing library is installed, and what is said of a file.

MonitorError
├── SourceUnavailable
├── DeviceUnreadable
├── NoSuchDevice
├── RecordError
│   └── RecordMissing
├── AlreadyMonitored
├── MonitorFailed
└── ConfigInvalid
"""

from __future__ import annotations

import errno
from pathlib import Path


def install_command(extra: str = "") -> str:
    """The command that installs pagetide, with one of its extras: from a checkout, as no package index has it."""
    root, extras = Path(__file__).resolve().parents[1], f"[{extra}]" if extra else ""
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}{extras}'"
    return f"pip install '.{extras}' in a checkout of pagetide"


def said_of(error: Exception) -> str:
    """The text of an error. A file that the system refuses is named first, with what to do about it."""
    if not isinstance(error, OSError) or error.filename is None or error.filename2 is not None:
        return str(error)
    advice = {
        errno.ENOENT: "; check the path", errno.EISDIR: "; name a file in it",
        errno.EACCES: "; allow access to it, or name another",
    }  # fmt: skip
    return f"{error.filename}: {error.strerror}{advice.get(error.errno or 0, '')}"


class MonitorError(Exception):
    """The base class; the message is a sentence for the user."""


class SourceUnavailable(MonitorError):
    """A source provides no devices at all."""


class DeviceUnreadable(MonitorError):
    """One device could not be read. `lost`: it stays unreadable until something external changes."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class NoSuchDevice(MonitorError, ValueError):
    """A requested device does not exist."""


class RecordError(MonitorError):
    """The shared record is of another layout, damaged, or not writable."""


class RecordMissing(RecordError):
    """There is no record: no monitor runs."""


class AlreadyMonitored(MonitorError):
    """Another monitor watches the devices."""


class MonitorFailed(MonitorError):
    """The monitor process ended before it answered, or does not answer."""


class ConfigInvalid(MonitorError, ValueError):
    """A setting cannot be used."""
