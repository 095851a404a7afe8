"""Replays a recording of devices in real time, from the first scan to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...common.recording import FrameRecording, RecordingError
from ..device_frames import DeviceFrame, frames_in, time_of
from ..errors import ConfigInvalid, DeviceUnreadable
from ..snapshot import DetailReading, DeviceInfo, MemoryReading


class ReplaySource:
    """The devices of a recording. After its end none can be read any more."""

    def __init__(self, path: str | Path, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Checks the whole recording; `clock` gives nanoseconds. Raises ConfigInvalid if it cannot be played."""
        try:
            self._recording = FrameRecording(path, "devices")
            for _ in frames_in(self._recording):
                pass
        except RecordingError as error:
            raise ConfigInvalid(f"{error}; `vram-monitor record FILE` makes a recording") from error
        except OSError as error:
            raise ConfigInvalid(f"the recording {path} cannot be read: {error.strerror}") from error
        self._clock = clock
        self._began_ns: int | None = None
        self._lock = threading.Lock()
        self._frames = frames_in(self._recording)
        self._next = next(self._frames, None)
        self._now = DeviceFrame(self._recording.began, True, ())  # all that the frames so far have told

    @property
    def name(self) -> str:
        """replay:FILE"""
        return f"replay:{self._recording.path}"

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The devices at the present time of the recording, or at its end. The first scan starts the replay."""
        if self._began_ns is None:
            self._began_ns = self._clock()
        self._play()
        return self._now.devices or ()

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """The recorded memory at this time. Raises DeviceUnreadable: its failure then, or the end."""
        self._check(device)
        memory = self._now.memory.get(device.uuid, MemoryReading(None, None))
        if isinstance(memory, str):
            raise DeviceUnreadable(memory)
        return memory

    def detail(self, device: DeviceInfo) -> DetailReading:
        """The recorded detail at this time. Raises DeviceUnreadable: its failure then, or the end."""
        self._check(device)
        detail = self._now.detail.get(device.uuid, DetailReading())
        if isinstance(detail, str):
            raise DeviceUnreadable(detail)
        return detail

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._recording.close()

    def _play(self) -> float:
        """Take in the frames up to the present time. Returns it by the recording's clock: seconds since 1970."""
        elapsed_s = 0.0 if self._began_ns is None else (self._clock() - self._began_ns) / 1e9
        now = time_of(self._recording.began, elapsed_s)
        with self._lock:
            while self._next is not None and self._next.time <= now:
                new, old = self._next, self._now
                devices = old.devices if new.devices is None else new.devices
                self._now = DeviceFrame(new.time, True, devices, old.memory | new.memory, old.detail | new.detail)
                self._next = next(self._frames, None)
        return now

    def _check(self, device: DeviceInfo) -> None:
        """Raise DeviceUnreadable if the device is not there now."""
        now, recording = self._play(), self._recording
        if now > recording.ended:
            ended_s = recording.ended - recording.began
            raise DeviceUnreadable(f"the recording ended, {ended_s:.1f} s after it began", lost=True)
        if all(info.uuid != device.uuid for info in self._now.devices or ()):
            raise DeviceUnreadable(f"it was not there at second {now - recording.began:.1f} of the recording", lost=True)
