"""The file of a recording: what is written is read again, from any moment, also from a file that was cut off or damaged."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.common.recording import (
    _HEADER,
    _SIGNATURE,
    _SIZE_AND_TIME,
    FrameRecording,
    FrameWriter,
    RecordingError,
    RecordingFull,
)

HEADER = {"model": "demo", "version": "0.1.0", "began": 100.0, "text": False, "interval_s": 0.1}


def line(number: int, full: bool, more: str = "") -> bytes:
    frame: dict[str, Any] = {"v": 1, "seq": number, "time": 100.0 + number, "step": 0, "full": full, "more": more}
    return json.dumps(frame, separators=(",", ":")).encode()


def write(path: Path, fulls: list[bool], *, close: bool = True, most_bytes: int = 1 << 20, more: str = "") -> list[bytes]:
    """A recording of frames at the seconds 100, 101, ..., full or not; returns their lines."""
    lines = [line(i, full, more) for i, full in enumerate(fulls)]
    with path.open("ab") as file:
        writer = FrameWriter(file.write, "engine", HEADER, num_bytes=path.stat().st_size, most_bytes=most_bytes)
        for i, (one, full) in enumerate(zip(lines, fulls, strict=True)):
            writer.put(one, 100.0 + i, full)
        writer.close() if close else writer.flush()
        assert file.tell() == writer.num_bytes
    return lines


@given(fulls=st.lists(st.booleans(), max_size=30), since=st.floats(95, 135), length=st.floats(0, 30))
def test_frames_are_read_from_any_moment(
    fulls: list[bool], since: float, length: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fulls = [True, *fulls]
    path = tmp_path_factory.mktemp("r") / "a"
    lines = write(path, fulls)
    with FrameRecording(path) as recording:
        assert recording.header == {"pagetide_recording": 2, "of": "engine", **HEADER, "max_bytes": 1 << 20}
        assert (recording.began, recording.ended) == (100.0, 99.0 + len(fulls))
        assert [(f.time_s, f.full, f.line) for f in recording.frames()] == [
            (100.0 + i, full, one) for i, (one, full) in enumerate(zip(lines, fulls, strict=True))
        ]
        first = max((i for i, full in enumerate(fulls) if full and 100 + i <= since), default=0)
        read = [frame.line for frame in recording.frames(since, since + length)]
        assert read == [one for i, one in enumerate(lines) if i >= first and 100 + i <= since + length]


def test_the_file_is_gzip(tmp_path: Path) -> None:
    lines = write(tmp_path / "a", [True, False, False, True, False])
    unpacked = gzip.decompress((tmp_path / "a").read_bytes()).splitlines()
    assert unpacked[1:] == lines and json.loads(unpacked[0])["pagetide_recording"] == 2
    with (tmp_path / "a").open("rb") as file:
        assert subprocess.run(["gzip", "-t"], stdin=file, check=False).returncode == 0


def test_a_file_cut_off_anywhere_gives_what_is_left(tmp_path: Path) -> None:
    lines = write(tmp_path / "a", [True, False, False, True, False], close=False)
    whole = (tmp_path / "a").read_bytes()
    seen = set()
    for length in range(len(whole) + 1):
        (tmp_path / "b").write_bytes(whole[:length])
        try:
            with FrameRecording(tmp_path / "b") as recording:
                read = [frame.line for frame in recording.frames()]
        except RecordingError:
            assert length < 250, "the header is there"
            continue
        assert read == lines[: len(read)]
        seen.add(len(read))
    assert {0, 3, 5} <= seen


def test_one_wrong_bit_anywhere_loses_a_segment_at_most(tmp_path: Path) -> None:
    lines = write(tmp_path / "a", [True, False, True, False, True, False])
    data = (tmp_path / "a").read_bytes()
    with FrameRecording(tmp_path / "a") as recording:
        begin = recording._starts[0]
    for bit in range(8 * begin, 8 * len(data), 3):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b").write_bytes(wrong)
        with FrameRecording(tmp_path / "b") as recording:
            read = [frame.line for frame in recording.frames()]
        assert read in (lines, lines[:2], lines[:4], lines[2:], lines[4:], [*lines[:2], *lines[4:]])


def test_the_end_is_that_of_the_last_segment_with_a_frame(tmp_path: Path) -> None:
    write(tmp_path / "a", [True, False, True, False])
    with FrameRecording(tmp_path / "a") as recording:
        start, times = recording._starts[1], [frame.time_s for frame in recording.frames()]
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[: start + 4])
    with FrameRecording(tmp_path / "b") as recording:
        assert (recording.began, recording.ended) == (times[0], times[1])


def test_a_second_run_is_appended_also_behind_a_killed_one(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [True, False], close=False)
    second = write(tmp_path / "a", [True, False, True])
    with FrameRecording(tmp_path / "a") as recording:
        assert [frame.line for frame in recording.frames()] == first + second


def test_the_size_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        writer = FrameWriter(file.write, "engine", HEADER, most_bytes=2000)
        kept = [line(0, True)]
        while writer.num_bytes < 2000:
            writer.put(kept[-1], 99.0 + len(kept), True)
            kept.append(line(len(kept), True))
        with pytest.raises(RecordingFull):
            writer.put(kept.pop(), 99.0 + len(kept), True)
    assert 2000 <= (tmp_path / "a").stat().st_size < 2200
    with FrameRecording(tmp_path / "a") as recording:
        assert [frame.line for frame in recording.frames()] == kept
    gzip.decompress((tmp_path / "a").read_bytes())


def test_a_long_frame_is_read(tmp_path: Path) -> None:
    more = "".join(chr(33 + (i * i + i // 7) % 90) for i in range(3_000_000)).replace('"', "a").replace("\\", "b")
    lines = write(tmp_path / "a", [True, False], more=more, most_bytes=1 << 30)
    with FrameRecording(tmp_path / "a") as recording:
        assert [frame.line for frame in recording.frames()] == lines


@pytest.mark.parametrize(
    "content", [b"", b"hello\n" * 100, gzip.compress(b"hello\n" * 100, mtime=0), _SIGNATURE + b"F" + bytes(10)]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(RecordingError, match="not a recording"):
        FrameRecording(tmp_path / "a")


def test_another_version_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        FrameWriter(file.write, "engine", {**HEADER, "pagetide_recording": 1}).close()
    with pytest.raises(RecordingError, match="version 1; this reads version 2"):
        FrameRecording(tmp_path / "a")


@pytest.mark.parametrize("began", [..., "1", True, None, float("inf"), 1e300], ids=repr)
def test_a_header_without_its_time_is_refused(tmp_path: Path, began: object) -> None:
    header = {name: value for name, value in {**HEADER, "began": began}.items() if value is not ...}
    data, packer = json.dumps({"pagetide_recording": 2, **header}).encode() + b"\n", zlib.compressobj(wbits=-15)
    packed = packer.compress(data) + packer.flush() + struct.pack("<II", zlib.crc32(data), len(data))
    (tmp_path / "a").write_bytes(_SIGNATURE + _HEADER + _SIZE_AND_TIME.pack(8, 1.0) + packed)
    with pytest.raises(RecordingError, match=r"/a: the header's began must be the seconds since 1970, got "):
        FrameRecording(tmp_path / "a")


def test_damaged_times_and_files_of_other_kinds(tmp_path: Path) -> None:
    lines = write(tmp_path / "a", [True, False])
    with (tmp_path / "a").open("ab") as file:
        writer = FrameWriter(file.write, "engine", HEADER)
        for time in (b"1e", b"1e999", b"--"):
            writer.put(b'{"time":' + time + b',"full":true}', 101.0, True)
        writer.put(lines[0], float("nan"), True)
        writer.close()
    with FrameRecording(tmp_path / "a") as recording:
        assert [frame.line for frame in recording.frames()] == lines and recording.ended == 101.0
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match=r"/pipe: not a regular file"):
        FrameRecording(tmp_path / "pipe")


def test_a_difference_first_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file, pytest.raises(ValueError, match="full frame"):
        FrameWriter(file.write, "engine", HEADER).put(line(0, False), 100.0, False)


def test_a_file_that_is_cut_off_while_it_plays_gives_what_is_left(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    write(tmp_path / "a", [True] * 40, more="x" * 9_000, most_bytes=1 << 26)
    with FrameRecording(tmp_path / "a") as recording:
        os.truncate(tmp_path / "a", 1)
        assert list(recording.frames(since=139)) == []
    lines = write(tmp_path / "b", [True, True], more=os.urandom(3 << 20).hex(), most_bytes=1 << 26)  # read in pieces
    with FrameRecording(tmp_path / "b") as recording:
        assert [frame.line for frame in recording.frames()] == lines
