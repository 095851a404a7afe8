"""Where numbers come from: the NVML driver library, host memory, a recording."""

from __future__ import annotations

from typing import Protocol

from ..snapshot import DetailReading, DeviceInfo, MemoryReading


class Source(Protocol):
    """Something that knows devices. Calls about different devices may come from several threads at the same time;
    calls about one device come one at a time for each method. Every call may block for as long as a driver does.
    """

    @property
    def name(self) -> str:
        """For people: "nvml", "host", "replay:FILE"."""
        ...

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The devices there are now, dead ones included, in a fixed order. Comes again every few seconds and after
        failures, and opens anew what was lost. Raises SourceUnavailable.
        """
        ...

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """Total and free bytes now: the hot call, 50 times a second. Raises DeviceUnreadable."""
        ...

    def detail(self, device: DeviceInfo) -> DetailReading:
        """Load and processes, once a second. What is not given is None. Raises DeviceUnreadable."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
