"""The file of a record: whatever is done to it, the monitor lays it anew and readers go on."""

from __future__ import annotations

import errno
import os
import random
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from monitors import MonitorProcess, wait_until
from record_processes import memory_of, process, read_while_written

from pagetide.monitor import record_layout as layout
from pagetide.monitor.errors import RecordError
from pagetide.monitor.record import RecordReader, RecordWriter
from pagetide.monitor.snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceKind, ProcessUse

MS = 1_000_000
GPU, HOST = DeviceInfo("GPU-1", "0", DeviceKind.GPU, "NVIDIA H200"), DeviceInfo("HOST-1", "host", DeviceKind.HOST)
DETAIL = DeviceDetail(6_000, MS, DetailReading(0.5, processes=(ProcessUse(41, 1 << 30, command="c" * 500),)), (1, 2))
FIRST, SECOND = memory_of(1, GPU.uuid), memory_of(2, GPU.uuid)
LENGTHS = [0, 1, 4096, 4100, layout.TABLE.at, layout.MEMORY[0].at + 100, layout.DETAIL[0].at + 1, layout.FILE_BYTES - 1]


class Clock:
    """Monotonic nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 10_000 * MS

    def __call__(self) -> int:
        return self.now_ns


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def zeroed(path: Path) -> None:
    """As `truncate -s 0` and `truncate -s SIZE` one after the other leave it."""
    os.truncate(path, 0)
    os.truncate(path, layout.FILE_BYTES)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"anything")


def lengthened(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\0")


HARMS = [*map(cut, LENGTHS), zeroed, overwritten, lengthened, Path.unlink]
HARM_IDS = [*(f"cut to {length}" for length in LENGTHS), "zeroed", "overwritten", "lengthened", "removed"]
ANY_HARM = pytest.mark.parametrize("harm", HARMS, ids=HARM_IDS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record"


def written(path: Path, clock: Clock) -> RecordWriter:
    """A record of two devices, one of which has answered."""
    writer = RecordWriter.create(path, source="test", mode=0o640, gid=os.getgid())
    writer.set_devices([HOST, GPU])
    writer.write_memory(1, FIRST)
    writer.write_detail(1, DETAIL)
    writer.beat(clock.now_ns, 20 * MS)
    return writer


# --- one process


@ANY_HARM
def test_a_harmed_file_is_laid_anew_with_all_that_was_written(path: Path, harm: Callable[[Path], None]) -> None:
    clock = Clock()
    with written(path, clock) as writer:
        before = RecordReader.open(path, clock=clock).snapshot(clock.now_ns)
        assert writer.mend() is None
        harm(path)
        assert writer.mend() is not None
        assert writer.mend() is None
        after = RecordReader.open(path, clock=clock).snapshot(clock.now_ns)
        assert replace(after, unix_seconds=before.unix_seconds) == before
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, os.getgid())
        assert path.stat().st_blocks * 512 < 1 << 20
        writer.write_memory(1, SECOND)
        assert RecordReader.open(path).memory(GPU.uuid) == SECOND
    assert os.listdir(path.parent) == []


@ANY_HARM
def test_a_reader_keeps_what_it_has_read_and_goes_over_to_the_new_file(
    path: Path, harm: Callable[[Path], None]
) -> None:
    clock = Clock()
    with written(path, clock) as writer, RecordReader.open(path, clock=clock) as reader:
        before = reader.snapshot(clock.now_ns)
        harm(path)
        during = reader.snapshot(clock.now_ns)
        assert during.devices == before.devices
        assert reader.memory(GPU.uuid) == FIRST
        writer.mend()
        writer.write_memory(1, SECOND)
        clock.now_ns += 20 * MS  # a reader looks for a successor that often
        writer.beat(clock.now_ns, 20 * MS)
        assert reader.memory(GPU.uuid) == SECOND
        assert reader.is_live()
        assert (reader.trouble, reader.monitor_pid) == (None, os.getpid())


@pytest.mark.parametrize("length", LENGTHS)
def test_a_reader_that_has_read_nothing_waits_for_the_new_file(path: Path, length: int) -> None:
    clock = Clock()
    with written(path, clock) as writer, RecordReader.open(path, clock=clock) as reader:
        os.truncate(path, length)
        mender = threading.Timer(0.01, writer.mend)
        mender.start()

        def clock_that_goes_on() -> int:
            clock.now_ns += 5 * MS
            return clock.now_ns

        reader._clock = clock_that_goes_on
        assert reader.detail(GPU.uuid) == DETAIL
        mender.join()


def test_a_file_that_stays_cut_is_an_error_of_who_has_read_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.monitor.record._PAUSE_S", 0.0)
    with written(path, Clock()), RecordReader.open(path) as reader:
        os.truncate(path, 5000)
        assert not reader.is_live()
        for ask in (reader.devices, reader.snapshot, lambda: reader.memory(GPU.uuid)):
            with pytest.raises(RecordError, match="is damaged"):
                ask()


@pytest.mark.parametrize("length", [*LENGTHS, layout.TABLE.at + 10])
def test_a_file_that_is_cut_between_two_looks_of_a_reader_gives_what_it_had(path: Path, length: int) -> None:
    """In the middle of a read: behind any system call of it."""
    clock = Clock()
    with written(path, clock) as writer:
        for calls in range(12):
            reader = RecordReader.open(path, clock=clock)
            reader.snapshot()
            writer.write_memory(1, SECOND)
            writer.write_detail(1, replace(DETAIL, at_ns=7_000))
            cut_after(reader, calls, path, length)
            device = reader.snapshot().devices[1]
            assert device.memory in (FIRST, SECOND)
            assert device.detail in (DETAIL, replace(DETAIL, at_ns=7_000))
            writer.mend()
            writer.write_memory(1, FIRST)
            writer.write_detail(1, DETAIL)


def cut_after(reader: RecordReader, calls: int, path: Path, length: int) -> None:
    """Cut the file once this reader has copied so often from it."""
    record = reader._record
    assert record is not None
    pread, left = record._read, [calls]

    def read(num_bytes: int, at: int) -> bytes:
        if left[0] == 0:
            os.truncate(path, length)
        left[0] -= 1
        return pread(num_bytes, at)

    table = record.table.last
    assert table is not None
    record._read = record.table.read_bytes = read
    for entry in table[1].entries.values():
        entry.memory.read_bytes = entry.detail.read_bytes = read


def test_nothing_is_mapped_from_the_file(path: Path) -> None:
    with written(path, Clock()), RecordReader.open(path) as reader:
        reader.snapshot()
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_another_file_in_its_place_is_told_and_left_alone(path: Path) -> None:
    with written(path, Clock()) as writer:
        path.rename(path.with_name("moved"))
        path.write_text("mine")
        with pytest.raises(RecordError, match=f"another file lies at {path}, so no reader finds what this monitor"):
            writer.mend()
        assert path.read_text() == "mine"
        path.unlink()
        assert writer.mend() == "was removed"
        assert RecordReader.open(path).memory(GPU.uuid) == FIRST


def test_a_file_that_cannot_be_laid_is_told_and_laid_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with written(path, Clock()) as writer:
        descriptors = len(os.listdir("/proc/self/fd"))
        os.truncate(path, 0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            for _ in range(3):
                with pytest.raises(RecordError, match=f"cannot create the record {path}: No space left on device"):
                    writer.mend()
        assert os.listdir(path.parent) == ["record"]
        assert writer.mend() == f"has 0 bytes instead of {layout.FILE_BYTES:,}"
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert RecordReader.open(path).memory(GPU.uuid) == FIRST


@pytest.mark.parametrize("written_bytes", [None, 3], ids=["refused", "short"])
def test_a_write_that_fails_harms_no_writer_and_is_mended(
    path: Path, written_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(fd: int, data: bytes, at: int) -> int:
        if written_bytes is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written_bytes

    with written(path, Clock()) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", pwrite)
            writer.write_memory(1, SECOND)
            assert RecordReader.of(writer).memory(GPU.uuid) == SECOND
        said = "Input/output error" if written_bytes is None else "No space left on device"
        assert writer.mend() == f"could not be written ({said})"
        assert RecordReader.open(path).memory(GPU.uuid) == SECOND


def test_a_file_that_cannot_be_read_is_silence_to_readers_and_harm_to_the_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pread(fd: int, length: int, at: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with written(path, Clock()) as writer, RecordReader.open(path) as reader:
        before = reader.snapshot(0)
        record = reader._record
        assert record is not None
        record._read = lambda length, at: pread(0, length, at)
        assert reader.snapshot(0).devices == before.devices
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", pread)
            assert (writer.mend() or "").startswith("cannot be read (Stale")
        assert writer.mend() is None


def test_a_private_record_and_a_closed_one_need_no_mending(path: Path) -> None:
    assert RecordWriter.private(source="test").mend() is None
    writer = written(path, Clock())
    writer.close()
    with pytest.raises(RecordError, match="closed"):
        writer.mend()
    assert os.listdir(path.parent) == []


def test_threads_that_write_while_the_file_is_mended_lose_nothing(path: Path) -> None:
    infos = [DeviceInfo(f"GPU-{i}", str(i), DeviceKind.GPU) for i in range(4)]
    with RecordWriter.create(path, source="test") as writer:
        writer.set_devices(infos)

        def write(position: int) -> None:
            for count in range(1, 400):
                writer.write_memory(position, memory_of(count, str(position)))
            writer.write_detail(position, replace(DETAIL, at_ns=position))

        threads = [threading.Thread(target=write, args=(position,)) for position in range(4)]
        for thread in threads:
            thread.start()
        rng, mended = random.Random(0), 0
        while any(thread.is_alive() for thread in threads):
            os.truncate(path, rng.choice(LENGTHS))
            mended += writer.mend() is not None
        assert mended
        writer.mend()
        devices = RecordReader.open(path).snapshot().devices
        assert [device.memory for device in devices] == [memory_of(399, str(position)) for position in range(4)]
        assert [device.detail.at_ns for device in devices] == [0, 1, 2, 3]


# --- real processes


def test_readers_and_the_writer_outlive_a_file_that_is_harmed_again_and_again(path: Path) -> None:
    rng = random.Random(0)
    for report in read_while_written(path, seed=2, readers=2, seconds=0.5, harm=lambda path: rng.choice(HARMS)(path)):
        assert report["records"] and report["details"]


def test_the_daemon_lays_its_record_anew_and_says_so_once(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        with process("follow", monitor.record, info.uuid) as engine:
            assert engine.stdout is not None
            engine.stdout.readline()  # it reads
            for harm in (cut(0), cut(5000), cut(300_000), zeroed, Path.unlink):
                polls = reader.memory(info.uuid).polls
                with suppress(FileNotFoundError):
                    harm(monitor.record)
                wait_until(lambda: reader.is_live() and reader.memory(info.uuid).polls > polls + 3, "new numbers")  # noqa: B023
                wait_until(lambda: monitor.record.exists() and monitor.record.stat().st_size == layout.FILE_BYTES)
                assert RecordReader.open(monitor.record).memory(info.uuid).polls >= polls
            assert engine.poll() is None
            out, err = engine.communicate("")
            assert (engine.returncode, err) == (0, "")
            assert int(out.splitlines()[-1]) >= polls
        assert monitor.process is not None and monitor.process.poll() is None
        said = monitor.said()
        assert said.count("another was laid in its place") == 1
        assert re.search(r"the file of the record has [\d,]+ bytes instead of 67,584,000; another was laid", said)
        assert "Traceback" not in said
        assert monitor.end() == 0
