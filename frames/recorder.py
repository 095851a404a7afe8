"""Records an engine into a file: frames as they come, taken and written by a thread of its own."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..common.on_error import OnError
from ..common.recording import FrameRecording, FrameWriter, RecordingError, RecordingFull, write_whole
from ..common.units import format_bytes
from .source import Frame, FrameSource, encode

try:
    import fcntl
except ImportError:  # Windows: two engines that record into one file are not noticed
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

INTERVAL_S = 0.1  # between frames
IDLE_S = 2.0  # between frames while nothing happens
MOST_BYTES = 256 << 20  # of a recording


class EngineRecorder:
    """Appends the frames of `source` to the file at `path`. An error of the file ends the recording with a log line.

    The file is made, readable by this user only, or another run is appended to it.

    Raises RecordingError if the file cannot be written, is something else, or another engine records into it.
    """

    def __init__(
        self,
        path: str,
        source: FrameSource,
        header: dict[str, Any],
        *,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file: int | None = None
        self.path = path
        self.stopped = threading.Event()
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()  # of taking and writing, so that frames are written in their order
        self._file = open_recording(path)
        self._taken_at = -math.inf
        size = os.fstat(self._file).st_size
        write = partial(write_whole, self._file)
        try:
            self._writer = FrameWriter(write, "engine", header, num_bytes=size, most_bytes=most_bytes, clock=clock)
        except OSError as error:
            self._close_file()
            raise RecordingError(f"{path} cannot be written: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether it still records."""
        return self._file is not None

    def turn(self, take: Callable[[Callable[[], Frame]], Frame | None]) -> bool:
        """Record a frame if one is due. Returns whether to go on.

        `take` calls its argument between two steps of the engine and returns the result; None if the engine is closed.
        """
        with self._lock:
            now = self._clock()
            if self._file is None:
                return False
            full = self._writer.wants_full
            if not full and now < self._taken_at + IDLE_S and self._source.is_current:
                self._guarded(self._writer.flush_if_due)
                return self.is_open
            frame: Frame | None = None
            try:
                frame = take(lambda: self._source.take(full))
            except Exception as error:
                self._fail(error)
            if frame is not None:
                self._taken_at = now
                self._guarded(self._put, frame)
            return frame is not None and self.is_open

    def last(self) -> Frame | None:
        """The last frame, to be given to `close`: taken between two steps, before the engine is closed."""
        try:
            return self._source.take() if self.is_open and not self._source.is_current else None
        except Exception as error:
            self._fail(error)
            return None

    def close(self, last: Frame | None = None) -> None:
        """Write the `last` frame and complete the file. Idempotent. Not to be called under the engine's lock."""
        self.stopped.set()
        with self._lock:
            if self._file is None:
                return
            if last is not None:
                self._guarded(self._put, last)
            if self._file is not None:
                self._guarded(self._writer.close)
            self._close_file()

    def _put(self, frame: Frame) -> None:
        self._writer.put(encode(frame), frame["time"], frame["full"])

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function`; an error ends the recording."""
        try:
            function(*arguments)
            return
        except RecordingFull:
            size = format_bytes(self._writer.num_bytes)
            log.warning("the recording %s has reached its limit with %s and ends here", self.path, size)
            self._close_file()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the recording, with one line in the log."""
        log.warning("the recording %s ends: %s: %s", self.path, type(error).__name__, error)
        log.debug("the recording's error", exc_info=error)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self._close_file()


def open_recording(path: str) -> int:
    """Open the recording at `path` for appending, or make it, and lock it. Returns its descriptor. Raises RecordingError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with OnError(lambda: os.close(file)):
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the descriptor is closed
            if os.fstat(file).st_size:
                FrameRecording(path).close()
        return file
    except BlockingIOError as error:
        raise RecordingError(f"another engine records into {path}: name another file") from error
    except RecordingError as error:
        raise RecordingError(f"{error}, and nothing is appended to it: name another file, or remove it") from error
    except OSError as error:
        raise RecordingError(f"{path} cannot be written: {error}") from error
