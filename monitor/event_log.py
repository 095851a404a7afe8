"""The log of events: recordings (common/recording.py) in one directory, which never take more than a set size.

    events-000007.jsonl.gz    a segment begins with what is held (kind "holds"), then a frame per write

The times of a segment ascend, up to the time at which the next one begins. Where the clock was set back, an empty segment
with the last time stands between them. So the times at which segments begin tell where to look, whatever the clock did. The
header of a run has the span of each earlier file. docs/decisions/0069-events.md has the reasons.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..common.on_error import OnError
from ..common.recording import FrameRecording, FrameWriter, RecordingError, write_whole
from .errors import MonitorError
from .events import EventKind, MemoryEvent, from_line, to_line
from .runtime_dir import FileLock

SEGMENT_S = 3600.0
SEGMENT_EVENTS = 1000
CLOCK_STEP_S = 5.0  # a larger step of the system's clock against the monotonic one means that it was set, not slewed
_FILES = 8  # of about equal size; the oldest goes when there is no room
_NAME = re.compile(r"events-(\d{6,})\.jsonl\.gz")
_SLACK_S = 2 * CLOCK_STEP_S

Span = tuple[float, float]  # the first and last second that a file may have events of


class EventLogBusy(MonitorError):
    """Another process writes the log."""


@dataclass(slots=True)
class _Segment:
    """The open segment of a log."""

    began_s: float  # monotonic
    offset_s: float  # of the system's clock to the monotonic one
    events: int = 0


class EventLog:
    """Writes the log. One process at a time; not thread-safe."""

    def __init__(
        self,
        directory: Path,
        most_bytes: int,
        *,
        mode: int = 0o600,
        gid: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the directory if it is missing, and go on after what is there. Raises OSError, EventLogBusy.

        Args:
            most_bytes: Of all files together.
            mode, gid: Of the files; the directory can be entered with the same rights.
        """
        self._directory, self._most_bytes, self._mode, self._gid = directory, most_bytes, mode, gid
        self._clock, self._monotonic = clock, monotonic
        directory.mkdir(parents=True, exist_ok=True, mode=mode | (mode & 0o444) >> 2)
        if gid is not None:
            os.chown(directory, -1, gid)
        self._lock = FileLock(directory / "lock")
        if not self._lock.try_exclusive():
            self._lock.close()
            raise EventLogBusy(f"another monitor keeps its events in {directory}; set events_dir to a directory of its own")
        with OnError(self._lock.close):
            reader = EventReader(directory)
            self._spans = reader.spans()
            self.last = next(iter(reader.newest(1)), None)  # of the previous monitor
        self._next_id = 1 if self.last is None else self.last.id + 1
        self._last_s = 0.0 if self.last is None else self.last.time  # of the newest frame
        self._fd: int | None = None
        self._good_bytes = 0  # of the open file, after the last whole write
        self._writer: FrameWriter | None = None
        self._segment: _Segment | None = None

    def write(self, events: Sequence[MemoryEvent], holders: Callable[[], Sequence[MemoryEvent]]) -> None:
        """Append events; `holders` returns what is held, for the beginning of a segment. Raises OSError; then none is kept."""
        try:
            self._write(events, holders)
        except OSError:
            self._cut()
            self._close_file()
            raise

    def close(self) -> None:
        """Complete the file and let another process write. Idempotent."""
        self._close_file()
        self._lock.close()

    def _write(self, events: Sequence[MemoryEvent], holders: Callable[[], Sequence[MemoryEvent]]) -> None:
        now_s = self._clock()
        number, writer = self._file(now_s)
        segment, told = self._segment, list(events)
        step_s = 0.0 if segment is None else now_s - self._monotonic() - segment.offset_s
        was_set = abs(step_s) > CLOCK_STEP_S
        if was_set:
            went = "forward" if step_s > 0 else "back"
            what = f"the clock went {went} by {abs(step_s):,.0f} s: it was set, or the machine slept"
            told.insert(0, MemoryEvent(kind=EventKind.CLOCK, time=now_s, reason=what))
        earliest_s = self._last_s
        if now_s < self._last_s - CLOCK_STEP_S:
            writer.put(to_line(self._last_s, (), full=True), self._last_s, True)
            earliest_s, segment = now_s, None
        elif segment is None or was_set:
            first_s = min([now_s, *(one.time for one in told)]) if segment is None else now_s
            earliest_s = max(self._last_s, first_s, now_s - _SLACK_S)
        now_s = max(now_s, earliest_s)
        told = [replace(one, time=round(min(max(one.time, earliest_s), now_s), 3)) for one in told]
        if segment is None or was_set or segment.events >= SEGMENT_EVENTS or self._too_long(segment):
            segment = _Segment(self._monotonic(), self._clock() - self._monotonic())
            held = [replace(one, time=round(earliest_s, 3)) for one in holders()]
            writer.put(to_line(earliest_s, held, full=True), earliest_s, True)
        numbered = [replace(one, id=self._next_id + place) for place, one in enumerate(told)]
        writer.put(to_line(now_s, numbered, full=False), now_s, False)
        writer.flush()
        self._good_bytes = writer.num_bytes
        first, last = self._spans[number]
        self._spans[number] = min(first, earliest_s), max(last, now_s)
        segment.events += len(numbered)
        segment.offset_s = now_s - self._monotonic()
        self._next_id += len(numbered)
        self._last_s, self._segment = now_s, segment

    def _too_long(self, segment: _Segment) -> bool:
        return self._monotonic() - segment.began_s > SEGMENT_S - _SLACK_S

    def _file(self, now_s: float) -> tuple[int, FrameWriter]:
        """The number and writer of the file to append to: the last one, or a new one once that is full."""
        most = self._most_bytes // _FILES
        number = max(self._spans, default=1)
        if self._writer is not None and self._writer.num_bytes < most:
            return number, self._writer
        full = self._writer is not None
        self._close_file()
        path = _path(self._directory, number)
        if full or _is_full(path, most):
            number += 1
        self._make_room(2 * most, keep=number)
        self._fd = os.open(
            _path(self._directory, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, self._mode
        )
        header = {"began": now_s, "spans": {str(one): span for one, span in self._spans.items() if one != number}}
        if self._gid is not None:
            os.fchown(self._fd, -1, self._gid)
        self._good_bytes = os.fstat(self._fd).st_size
        self._writer = FrameWriter(partial(write_whole, self._fd), "events", header, num_bytes=self._good_bytes)
        self._spans.setdefault(number, (now_s, now_s))
        return number, self._writer

    def _make_room(self, num_bytes: int, keep: int) -> None:
        """Remove the oldest files until there is room for so many bytes below the bound."""
        sizes = {number: path.stat().st_size for number, path in files_of(self._directory).items()}
        for number in sorted(sizes.keys() - {keep}):
            if sum(sizes.values()) + num_bytes <= self._most_bytes:
                break
            _path(self._directory, number).unlink(missing_ok=True)
            del sizes[number]
            self._spans.pop(number, None)

    def _cut(self) -> None:
        """Take a write that failed, as on a full disk, out of the file again."""
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, self._good_bytes)

    def _close_file(self) -> None:
        """Close the file as it is: what was flushed is readable, and a run that goes on begins a segment."""
        fd, self._fd = self._fd, None
        self._writer = self._segment = None
        if fd is not None:
            os.close(fd)


class EventReader:
    """Reads a log, also while it is written, and after its writer was killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._newest: tuple[tuple[Path, int, int] | None, tuple[MemoryEvent, ...]] = (None, ())

    def spans(self) -> dict[int, Span]:
        """What time each file may have events of, by number, oldest first."""
        there = files_of(self.directory)
        if not there:
            return {}
        newest = max(there)
        told: dict[int, Span] = {}
        span = (-math.inf, math.inf)
        with _opened(there[newest]) as recording:
            if recording is not None:
                told = _told_spans(recording.header.get("spans"))
                times = [*recording.times, recording.ended]
                span = min(times), max(times)
        return {number: told.get(number, (-math.inf, math.inf)) for number in sorted(there)} | {newest: span}

    def events(self, since_s: float, until_s: float) -> Iterator[MemoryEvent]:
        """The events of a time, and before them what leads to the state at its beginning: kind "holds", and earlier events."""
        there, spans = files_of(self.directory), self.spans()
        before = [number for number, (first, _) in spans.items() if first <= since_s]
        for number, (first, last) in spans.items():
            if (first <= until_s and last >= since_s) or number in before[-1:]:
                with _opened(there[number]) as recording:
                    if recording is not None:
                        yield from _events_in(recording, since_s, until_s, base=number in before[-1:])

    def since_id(self, last_id: int) -> list[MemoryEvent]:
        """The events with a higher id, in order."""
        found: list[MemoryEvent] = []
        for events in self._segments_backwards():
            new = [event for event in events if event.id > last_id]
            found = new + found
            if len(new) < len(events):
                break
        return found

    def newest(self, count: int) -> tuple[MemoryEvent, ...]:
        """The last events, at most `count`, oldest first. Reads nothing if nothing was written since the last call."""
        there = files_of(self.directory)
        if not there:
            return ()
        path = there[max(there)]
        try:
            key = path, path.stat().st_size, count
        except FileNotFoundError:  # just removed
            return ()
        if key != self._newest[0]:
            found: list[MemoryEvent] = []
            for events in self._segments_backwards():
                found = events + found
                if len(found) >= count:
                    break
            self._newest = key, tuple(found[-count:])
        return self._newest[1]

    def _segments_backwards(self) -> Iterator[list[MemoryEvent]]:
        """The listed events of each segment, the newest segment first; none for a segment without any."""
        for _, path in sorted(files_of(self.directory).items(), reverse=True):
            with _opened(path) as recording:
                if recording is None:
                    continue
                for number in reversed(range(len(recording.times))):
                    events = [one for frame in recording.segment(number) for one in from_line(frame.line)]
                    if listed := [one for one in events if one.kind is not EventKind.HOLDS]:
                        yield listed


def _events_in(recording: FrameRecording, since_s: float, until_s: float, *, base: bool) -> Iterator[MemoryEvent]:
    """The events of a file in the segments of this time; with `base` also of the last segment that begins before it."""
    times = recording.times
    before = [number for number, at_s in enumerate(times) if at_s <= since_s]
    for number, (at_s, next_s) in enumerate(zip(times, [*times[1:], math.inf], strict=True)):
        end_s = next_s if next_s >= at_s else at_s
        if (at_s <= until_s and end_s >= since_s) or (base and number in before[-1:]):
            for frame in recording.segment(number):
                for event in from_line(frame.line):
                    if event.time <= until_s:
                        yield event


def files_of(directory: Path) -> dict[int, Path]:
    """The files of a log by number; none if there is no such directory. Raises OSError for one that may not be read."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {int(match[1]): directory / name for name in names if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def _is_full(path: Path, most_bytes: int) -> bool:
    """Whether nothing is to be appended to a file: it is large enough, or another program has damaged or replaced it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for a reader
        return True
    with _opened(path) as recording:
        return found.st_size >= most_bytes or (found.st_size > 0 and recording is None)


def _path(directory: Path, number: int) -> Path:
    return directory / f"events-{number:06}.jsonl.gz"


@contextmanager
def _opened(path: Path) -> Iterator[FrameRecording | None]:
    """A file of a log; None if it is gone or damaged as a whole."""
    try:
        recording = FrameRecording(path, "events")
    except (FileNotFoundError, IsADirectoryError, RecordingError):
        yield None
        return
    with recording:
        yield recording


def _told_spans(told: object) -> dict[int, Span]:
    """The spans that a header has; what is damaged is left out."""
    if not isinstance(told, dict):
        return {}
    return {
        int(number): (float(span[0]), float(span[1]))
        for number, span in told.items()
        if number.isdecimal() and isinstance(span, list) and [type(one) for one in span] == [float, float]
    }
