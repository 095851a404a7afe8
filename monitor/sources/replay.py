"""Replays a recording in real time, from the first scan to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import DeviceUnreadable
from ..recording import RecordedState, read_recording
from ..snapshot import DetailReading, DeviceInfo, MemoryReading


class ReplaySource:
    """The devices of a recording. After its end none can be read any more."""

    def __init__(self, path: str | Path, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Reads the whole recording; `clock` gives nanoseconds. Raises ConfigInvalid, see `read_recording`."""
        self._recording = read_recording(path)
        self._clock = clock
        self._began_ns: int | None = None

    @property
    def name(self) -> str:
        """replay:FILE"""
        return f"replay:{self._recording.path}"

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The devices at the present time of the recording, or at its end. The first scan starts the replay."""
        if self._began_ns is None:
            self._began_ns = self._clock()
        return self._recording.devices_at(self._elapsed_s())

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """The recorded memory at this time. Raises DeviceUnreadable: its failure then, or the end."""
        state = self._state(device)
        if state.memory_error is not None:
            raise DeviceUnreadable(state.memory_error)
        return state.memory or MemoryReading(None, None)

    def detail(self, device: DeviceInfo) -> DetailReading:
        """The recorded detail at this time. Raises DeviceUnreadable: its failure then, or the end."""
        state = self._state(device)
        if state.detail_error is not None:
            raise DeviceUnreadable(state.detail_error)
        return state.detail or DetailReading()

    def close(self) -> None:
        """Does nothing: no resource is open."""

    def _elapsed_s(self) -> float:
        return 0.0 if self._began_ns is None else (self._clock() - self._began_ns) / 1e9

    def _state(self, device: DeviceInfo) -> RecordedState:
        recording, elapsed_s = self._recording, self._elapsed_s()
        if elapsed_s > recording.duration_s:
            raise DeviceUnreadable(f"the recording ended, {recording.duration_s:.1f} s after it began", lost=True)
        if all(info.uuid != device.uuid for info in recording.devices_at(elapsed_s)):
            raise DeviceUnreadable(f"it was not there at second {elapsed_s:.1f} of the recording", lost=True)
        return recording.state(device.uuid, elapsed_s)
