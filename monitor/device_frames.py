"""Recordings of a monitor's snapshots, for replay: frames of devices in the file of common/recording.py.

    {"time": 1795465254.1, "full": true, "devices": [{"uuid": "GPU-8a6e...", ...}, ...], "memory": {...}, "detail": {...}}
    {"time": 1795465254.12, "full": false, "memory": {"GPU-8a6e...": {"total_bytes": ..., "free_bytes": ...}}, ...}
    {"time": 1795465258.1, "full": false, "memory": {"GPU-8a6e...": "GPU is lost"}, ...}

Each line has what changed since the one before: the devices that are there ("devices" is null if they are the same), and of
each the memory and the detail, or why they are unknown. A full frame has all of it. Derived values (trend, counters, history,
idle times) are not written.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ..common.recording import FrameRecording, FrameWriter, RecordingError, write_whole
from .errors import ConfigInvalid, MonitorError
from .snapshot import DetailReading, DeviceInfo, DeviceMemory, MemoryReading, Snapshot

STALE = "the monitor gave no new figures"  # recorded as the error of a device with a stale answer
IMPOSSIBLE = "more bytes were free than there are"  # likewise
HEARTBEAT_S = 1.0  # the longest silence of a recording
_MOST_MEMORY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A line: what changed since the one before, or in a full frame all."""

    time: float  # seconds since 1970
    full: bool
    devices: tuple[DeviceInfo, ...] | None = None  # all that are there; None: as before
    memory: dict[str, MemoryReading | str] = field(default_factory=dict)  # by uuid; a text says why it is unknown
    detail: dict[str, DetailReading | str] = field(default_factory=dict)


class DeviceRecorder:
    """Writes a new recording that begins with the snapshot `first`. Not thread-safe; a context manager."""

    def __init__(self, path: str | Path, first: Snapshot, *, detail_interval_s: float = 1.0) -> None:
        """Write details at most once per `detail_interval_s`. Raises ConfigInvalid if `path` exists or cannot be created."""
        self._path = path
        self._detail_interval_s = detail_interval_s
        self._began = round(first.unix_seconds or time.time(), 3)
        self._began_ns = first.at_ns
        self._now_s = self._told_s = 0.0
        self._devices: tuple[DeviceInfo, ...] | None = None  # as the file has them, like the next three
        self._memory: dict[str, MemoryReading | str] = {}
        self._detail: dict[str, DetailReading | str] = {}
        self._detail_at_s: dict[str, float] = {}
        self._file: int | None = None
        interval_s = first.devices[0].memory.interval_ns / 1e9 if first.devices else None
        header = {"began": self._began, "source": first.source, "interval_s": interval_s}
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            write = partial(write_whole, self._file)
            self._writer = FrameWriter(write, "devices", header, clock=lambda: self._now_s)
            self.write(first)
        except FileExistsError:
            raise ConfigInvalid(f"{path} already exists and is not overwritten; name a new file") from None
        except OSError as error:
            self._close_file()
            raise ConfigInvalid(f"cannot record to {path}: {error.strerror}; name a file that you may write") from error

    def write(self, snapshot: Snapshot) -> None:
        """Record what changed since the last snapshot.

        Raises ValueError for a snapshot older than the last one, MonitorError if the file cannot be written.
        """
        now_s = (snapshot.at_ns - self._began_ns) / 1e9
        if now_s < self._now_s:
            raise ValueError(f"a snapshot of second {now_s} cannot follow one of second {self._now_s}")
        self._now_s = now_s
        infos = tuple(device.info for device in snapshot.devices)
        devices = None if infos == self._devices else infos
        memory = self._changed_memory(snapshot)
        detail = self._changed_detail(snapshot)
        self._devices = infos
        self._memory |= memory
        self._detail |= detail
        if self._writer.wants_full:
            self._put(DeviceFrame(self._time, True, infos, self._memory, self._detail))
        elif devices is not None or memory or detail or now_s - self._told_s >= HEARTBEAT_S:
            self._put(DeviceFrame(self._time, False, devices, memory, detail))

    def close(self) -> None:
        """Write the final time, and complete the file. Idempotent. Raises MonitorError if it cannot be written."""
        if self._file is None:
            return
        if self._told_s < self._now_s:
            self._put(DeviceFrame(self._time, False))
        self._guarded(self._writer.close)
        self._close_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _time(self) -> float:
        return time_of(self._began, self._now_s)

    def _changed_memory(self, snapshot: Snapshot) -> dict[str, MemoryReading | str]:
        answers = {each.info.uuid: _memory_in(each.memory, snapshot.at_ns) for each in snapshot.devices if each.memory.at_ns}
        return {uuid: now for uuid, now in answers.items() if now != self._memory.get(uuid)}

    def _changed_detail(self, snapshot: Snapshot) -> dict[str, DetailReading | str]:
        changed: dict[str, DetailReading | str] = {}
        for each in snapshot.devices:
            uuid, detail = each.info.uuid, each.detail
            now = _without_idleness(detail.reading) if detail.error is None else detail.error
            too_soon = self._now_s - self._detail_at_s.get(uuid, -math.inf) < self._detail_interval_s
            if detail.at_ns and not too_soon and now != self._detail.get(uuid):
                changed[uuid] = now
                self._detail_at_s[uuid] = self._now_s
        return changed

    def _put(self, frame: DeviceFrame) -> None:
        line = json.dumps(asdict(frame), separators=(",", ":"))  # ASCII: lone surrogates of odd command lines survive
        self._guarded(lambda: self._writer.put(line.encode("ascii"), frame.time, frame.full))
        self._told_s = self._now_s

    def _guarded(self, write: Callable[[], None]) -> None:
        """Call `write`; an error of the file ends the recording."""
        try:
            write()
        except OSError as error:
            self._close_file()
            raise MonitorError(f"the recording {self._path} ends at second {self._told_s:.0f}: {error.strerror}") from error

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def time_of(began: float, seconds: float) -> float:
    """The time of a frame in seconds since 1970, so many seconds after the recording began."""
    return round(began + seconds, 6)


def _without_idleness(reading: DetailReading) -> DetailReading:
    """A reading as it is recorded: idle times would make each one differ from the last."""
    if reading.processes is None:
        return reading
    return replace(reading, processes=tuple(replace(use, idle_seconds=None) for use in reading.processes))


def _memory_in(memory: DeviceMemory, now_ns: int) -> MemoryReading | str:
    """The memory of a snapshot as it is recorded: a reading, or why there is none."""
    if memory.error is not None:
        return memory.error
    if memory.is_stale(now_ns):
        return STALE
    used = memory.used_bytes
    return IMPOSSIBLE if used is not None and used < 0 else MemoryReading(memory.total_bytes, memory.free_bytes)


def frames_in(recording: FrameRecording) -> Iterator[DeviceFrame]:
    """The frames of a recording of devices. Raises RecordingError for an invalid one."""
    for each in recording.frames():
        try:
            frame = msgspec.convert(json.loads(each.line), DeviceFrame)
            _check(frame)
        except (ValueError, RecursionError) as error:
            second = each.time_s - recording.began
            raise RecordingError(f"{recording.path} has an invalid frame at second {second:.3f}: {error}") from error
        yield frame


def _check(frame: DeviceFrame) -> None:
    """Raise ValueError for bytes that no memory has, and for a device that is named twice."""
    if frame.devices is not None and len({info.uuid for info in frame.devices}) < len(frame.devices):
        raise ValueError("a device is named twice")
    for memory in frame.memory.values():
        if isinstance(memory, MemoryReading):
            total = _MOST_MEMORY if memory.total_bytes is None else memory.total_bytes
            if not 0 <= (memory.free_bytes or 0) <= total <= _MOST_MEMORY:
                raise ValueError(f"{memory.free_bytes} bytes free of {memory.total_bytes}")
    for detail in frame.detail.values():
        for use in (isinstance(detail, DetailReading) and detail.processes) or ():
            if not 0 <= (use.used_bytes or 0) <= _MOST_MEMORY:
                raise ValueError(f"a process uses {use.used_bytes} bytes")
