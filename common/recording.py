"""Recordings, of an engine, devices or events: frames as JSON lines in a gzip file, written as they come, read from any moment.

    header, {"pagetide_recording": 2, "of": "engine", "began": ..., ...}      one gzip member each; `zcat` shows them all
    segment: a full frame, {"time": ..., "full": true, ...}, then differences
    segment: ...                                a run that goes on in the same file begins with a header of its own

Each member's gzip header has an extra field with its kind and time, by which a reader finds the segments without
unpacking them. The data are flushed about once a second, so the file of a killed process is readable but for its last
moments.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from .checked_file import InvalidFile, open_checked
from .on_error import OnError

Kind = Literal["engine", "devices", "events"]  # what a recording is of

FORMAT = 2
FLUSH_S = 1.0  # between flushes
FULL_S = 10.0  # between full frames, for seeking; longer where they are large:
FULL_BYTES_PER_S = 16_384  # of full frames at most, packed
MOST_LINE_BYTES = 256 << 20  # of a frame
_LEVEL = 6
_PIECE_BYTES = 1 << 14  # packed; a thousand times as much unpacked, at most
# A gzip member with an extra field that has the subfield "P" + kind, of 8 bytes.
_SIGNATURE = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff\x0c\x00P"
_HEADER, _SEGMENT = b"H", b"S"
_SIZE_AND_TIME = struct.Struct("<Hd")
_HEAD_BYTES = len(_SIGNATURE) + 1 + _SIZE_AND_TIME.size
_SCAN_BYTES = 1 << 20
_TIME = re.compile(rb'"time":\s*([0-9.eE+-]+)')
_FULL = re.compile(rb'"full":\s*true')
_MOST_SECONDS = 1e12  # since 1970; further times are damage
_NEAR = 256  # a frame's time is within its first characters
_PLAYERS = {"engine": "`pagetide replay {}`", "devices": "`vram-monitor --source replay:{}`"}


class RecordingError(ValueError):
    """The file is no recording, or one of another kind or version, or cannot be written."""


class RecordingFull(Exception):
    """The recording has reached its size."""


class FrameWriter:
    """Writes frames of a `kind` through `write`, which takes all bytes it is given or raises OSError. Not thread-safe.

    `num_bytes` may be in the file already; there are at most `most_bytes`, and a few for the last flush. What is written is
    flushed every FLUSH_S by `clock`.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        kind: Kind,
        header: dict[str, Any],
        *,
        num_bytes: int = 0,
        most_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_bytes = num_bytes
        self.most_bytes = most_bytes
        self._write = write
        self._clock = clock
        self._packer: Any = None  # zlib's, of the open member
        self._crc = self._length = 0
        self._full_at = self._flushed_at = -math.inf
        self._full_s = FULL_S
        line = {"pagetide_recording": FORMAT, "of": kind, **header, "max_bytes": most_bytes}
        self._begin(_HEADER, float(header["began"]))
        self._put(json.dumps(line).encode() + b"\n")
        self._end()

    @property
    def wants_full(self) -> bool:
        """Whether the next frame should be full: the first one, and then one every FULL_S or FULL_BYTES_PER_S."""
        return self._clock() >= self._full_at + self._full_s

    def put(self, line: bytes, time_s: float, full: bool) -> None:
        """Append a frame; a `full` one begins a segment. Raises RecordingFull, with the file complete, and OSError."""
        if self.most_bytes is not None and self.num_bytes >= self.most_bytes:
            self.close()
            raise RecordingFull
        before = self.num_bytes
        if full:
            self._end()
            self._begin(_SEGMENT, time_s)
        elif self._packer is None:
            raise ValueError("a recording begins with a full frame")
        self._put(line + b"\n")
        if full:
            self.flush()
            self._full_at = self._clock()
            self._full_s = max(FULL_S, (self.num_bytes - before) / FULL_BYTES_PER_S)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Flush, unless it was done within FLUSH_S. Raises OSError."""
        if self._clock() >= self._flushed_at + FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write all frames so far into the file. Raises OSError."""
        self._flushed_at = self._clock()
        if self._packer is not None:
            self._out(self._packer.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        """Complete the file. Idempotent. Raises OSError."""
        self._end()

    def _begin(self, kind: bytes, time_s: float) -> None:
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc = self._length = 0
        self._out(_SIGNATURE + kind + _SIZE_AND_TIME.pack(8, time_s))

    def _put(self, data: bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)
        self._out(self._packer.compress(data))

    def _end(self) -> None:
        if self._packer is not None:
            packer, self._packer = self._packer, None
            self._out(packer.flush() + struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))

    def _out(self, data: bytes) -> None:
        if data:
            self._write(data)
            self.num_bytes += len(data)


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """A frame as it was written: seconds since 1970, whether it is full, and its line of JSON, without a newline."""

    time_s: float
    full: bool
    line: bytes


class FrameRecording:
    """A recording, read from its file as it was when opened. A truncated file gives what is left; a damaged segment nothing.

    Raises RecordingError for a file that is no recording of this `kind`, and OSError. Thread-safe.

    Attributes:
        header: The first line of the newest run in the file.
        began, ended: Seconds since 1970 of the first and the last frame; equal without frames.
        times: When each segment begins, seconds since 1970; not in order if the clock was set back.
    """

    def __init__(self, path: str | Path, kind: Kind = "engine") -> None:
        self.path = Path(path)
        try:
            opened = open_checked(self.path, "recordings")
        except InvalidFile as error:
            raise RecordingError(str(error)) from error
        # Read, not mapped: a file that is cut off meanwhile is an error and not a SIGBUS.
        self._file = opened
        with OnError(self.close):
            self._find_segments(kind)

    def frames(self, since: float | None = None, until: float | None = None) -> Iterator[RecordedFrame]:
        """All frames, or from the last full one at or before `since` (else the first) up to `until`. Reads as it goes."""
        first = 0 if since is None else max(0, bisect_right(self.times, since) - 1)
        for number in range(first, len(self.times)):
            for frame in self.segment(number):
                if until is not None and frame.time_s > until:
                    return
                yield frame

    def segment(self, number: int) -> Iterator[RecordedFrame]:
        """The frames of a segment, up to the first damaged one."""
        for line in self._lines(self._starts[number], self._ends[number]):
            near = line[:_NEAR]
            if (time_s := _time_of(near)) is None:
                return
            yield RecordedFrame(time_s, _FULL.search(near) is not None, line)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> FrameRecording:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _find_segments(self, kind: Kind) -> None:
        members = list(self._members())
        if not members or members[0][0]:
            raise RecordingError(f"{self.path} is not a recording of pagetide")
        headers = [one for one in members if one[1] == _HEADER]
        if not headers:
            raise RecordingError(f"{self.path} is not a recording of pagetide, or its header is damaged")
        self.header = self._read_header(*headers[-1][2:])
        if (found := self.header.get("of")) != kind:
            hint = f": {_PLAYERS[found].format(self.path)} plays it" if found in _PLAYERS else ""
            raise RecordingError(f"{self.path} is a recording of {found!r:.80}, not of {kind!r}{hint}")
        segments = [one for one in members if one[1] == _SEGMENT]
        self._starts = [start for _, _, start, _, _ in segments]
        self._ends = [end for _, _, _, end, _ in segments]
        self.times = [time_s for _, _, _, _, time_s in segments]
        self.began = self.times[0] if self.times else self.header["began"]
        self.ended = self.began
        for number in reversed(range(len(self.times))):  # the last segment may hold nothing
            if (last := max((frame.time_s for frame in self.segment(number)), default=None)) is not None:
                self.ended = last
                break

    def _read(self, start: int, end: int) -> bytes:
        """These bytes of the file; fewer if it ends before."""
        return os.pread(self._file.fileno(), end - start, start)

    def _members(self) -> Iterator[tuple[int, bytes, int, int, float]]:
        """Of each member: its first byte, its kind, where its data begin and at the latest end, and its time."""
        found, size = self._signatures()
        for at, following in pairwise([*found, size]):
            head = self._read(at, at + _HEAD_BYTES)
            if len(head) == _HEAD_BYTES:
                _, time_s = _SIZE_AND_TIME.unpack(head[-_SIZE_AND_TIME.size :])
                if abs(time_s) < _MOST_SECONDS:  # else damaged
                    yield at, head[len(_SIGNATURE) :][:1], at + _HEAD_BYTES, following, time_s

    def _signatures(self) -> tuple[list[int], int]:
        """Where members begin, and the size of the file."""
        found, at = [], 0
        while data := self._read(at, at + _SCAN_BYTES):
            place = data.find(_SIGNATURE)
            while place >= 0:
                found.append(at + place)
                place = data.find(_SIGNATURE, place + _HEAD_BYTES)
            if len(data) < _SCAN_BYTES:
                return found, at + len(data)
            # One that begins in the last bytes is found with the next piece; none is found twice.
            at = max(at + len(data) - len(_SIGNATURE) + 1, found[-1] + _HEAD_BYTES if found else 0)
        return found, at

    def _read_header(self, start: int, end: int, _time_s: float) -> dict[str, Any]:
        for line in self._lines(start, end):
            try:
                header = json.loads(line)
            except (ValueError, RecursionError):
                break
            if isinstance(header, dict) and header.get("pagetide_recording") == FORMAT:
                began = header.get("began")
                if isinstance(began, bool) or not isinstance(began, int | float) or not abs(began) < _MOST_SECONDS:
                    raise RecordingError(
                        f"{self.path}: the header's began must be the seconds since 1970, got {began!r:.80}; it is no whole "
                        "recording of pagetide"
                    )
                return {**header, "began": float(began)}
            found = header.get("pagetide_recording") if isinstance(header, dict) else None
            raise RecordingError(f"{self.path} is a recording of version {found!r}; this reads version {FORMAT}")
        raise RecordingError(f"{self.path} is not a recording of pagetide, or was cut off within its first line")

    def _lines(self, start: int, end: int) -> Iterator[bytes]:
        """The whole lines of the member with data from `start` on: none if its checksum is wrong.

        A member that was cut off has no checksum: of it, lines up to the first that is not JSON.
        """
        crc, length, checksum = 0, 0, b""
        try:
            for piece, found in self._pieces(start, end):
                crc, length, checksum = zlib.crc32(piece, crc), length + len(piece), found
        except zlib.error:
            return
        if checksum and checksum != struct.pack("<II", crc, length & 0xFFFFFFFF)[: len(checksum)]:
            return
        rest = b""
        for piece, _ in self._pieces(start, end):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not checksum and not _is_json(line):
                    return
                yield line
            if len(rest) > MOST_LINE_BYTES:
                return

    def _pieces(self, start: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        """The unpacked data of the member with data from `start` on, in pieces, with what follows them. Raises zlib.error."""
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        while not unpacker.eof and (packed := self._read(start, min(end, start + _PIECE_BYTES))):
            start += len(packed)
            yield unpacker.decompress(packed), b""
        if unpacker.eof:
            yield b"", (unpacker.unused_data + self._read(start, min(end, start + 8)))[:8]


def _time_of(near: bytes) -> float | None:
    """The time at the beginning of a frame; None if there is none."""
    found = _TIME.search(near)
    try:
        time_s = float(found[1]) if found is not None else math.nan
    except ValueError:
        return None
    return time_s if abs(time_s) < _MOST_SECONDS else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def write_whole(file: int, data: bytes) -> None:
    """Write all of `data` to a descriptor. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
