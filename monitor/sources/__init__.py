"""The sources of the numbers: the NVML driver library, host memory, a recording."""

from __future__ import annotations

from typing import Protocol

from ..snapshot import DetailReading, DeviceInfo, MemoryReading


class Source(Protocol):
    """A provider of devices and their readings.

    Calls about different devices may come from several threads at the same time; calls about one device come one at a
    time for each method. Every call may block for as long as a driver does.
    """

    @property
    def name(self) -> str:
        """The name for display: "nvml", "host", "replay:FILE"."""
        ...

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The present devices, including dead ones, in a fixed order. Raises SourceUnavailable.

        Called every few seconds and after failures; reopens what was lost.
        """
        ...

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """Total and free bytes now: the hot call, 50 times a second. Raises DeviceUnreadable."""
        ...

    def detail(self, device: DeviceInfo) -> DetailReading:
        """Load and processes, once a second. Missing values are None. Raises DeviceUnreadable."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...
