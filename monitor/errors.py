"""The errors of the monitor.

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
