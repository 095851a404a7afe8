"""What can go wrong while devices are watched.

MonitorError
├── SourceUnavailable     nothing can be read at all: no driver, no such file
├── DeviceUnreadable      one device did not give its numbers; the others go on
├── NoSuchDevice          a device was named that is not there (ValueError too)
├── RecordError           the shared record cannot be read or written
│   └── RecordMissing     there is none: no monitor runs
├── AlreadyMonitored      another monitor watches these devices
├── MonitorFailed         the monitor process that was started ended before it answered, or one hangs
└── ConfigInvalid         a setting cannot be used (ValueError too)
"""

from __future__ import annotations


class MonitorError(Exception):
    """The root; the message is a sentence for the user."""


class SourceUnavailable(MonitorError):
    """A source gives no devices at all."""


class DeviceUnreadable(MonitorError):
    """One device did not answer with numbers. `lost`: it will not until something outside changes."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class NoSuchDevice(MonitorError, ValueError):
    """A device was asked for that is not there."""


class RecordError(MonitorError):
    """The shared record is of another layout, damaged, or not writable."""


class RecordMissing(RecordError):
    """No record is there: no monitor runs."""


class AlreadyMonitored(MonitorError):
    """Another monitor watches the devices."""


class MonitorFailed(MonitorError):
    """The monitor process ended before it answered, or does not answer."""


class ConfigInvalid(MonitorError, ValueError):
    """A setting cannot be used."""
