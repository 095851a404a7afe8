"""The record: what goes in comes out, whoever writes, dies, takes over, or tampers meanwhile."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from monitors import wait_until
from record_processes import STEADY, check_memory, kill_one_while_it_writes, process, read_while_written

from pagetide.monitor import record_layout as layout
from pagetide.monitor.errors import NoSuchDevice, RecordError, RecordMissing
from pagetide.monitor.record import LAYOUT_VERSION, MAX_DEVICES, MAX_HISTORY, RecordReader, RecordWriter
from pagetide.monitor.record_codec import MAX_MEMORY_BYTES, memory_from_bytes
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    ProcessUse,
    Snapshot,
)

MS = 1_000_000
GPU = DeviceInfo("GPU-8a6e", "0", DeviceKind.GPU, "NVIDIA H200", "00000000:3B:00.0")
MIG = DeviceInfo("MIG-11", "0:1", DeviceKind.MIG, "1g.18gb", parent_uuid="GPU-8a6e")
HOST = DeviceInfo("HOST-1", "host", DeviceKind.HOST)
MEMORY = DeviceMemory(5_000, 20 * MS, 80 << 30, 3 << 30, -1.5, 7, 2, "GPU is lost")
NOTHING = DeviceMemory(0, 0, None, None, None, 0, 0)
DETAIL = DeviceDetail(
    6_000,
    1000 * MS,
    DetailReading(0.5, 61, 300.5, 700.0, (ProcessUse(41, 1 << 30, "compute", "ada", "python x.py", "llama"),)),
    (None, 1, 2),
    "hidden",
)


class Clock:
    """Monotonic nanoseconds that pass when a test says so."""

    def __init__(self, now_ns: int = 10_000 * MS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def private(*infos: DeviceInfo, clock: Callable[[], int] = time.monotonic_ns) -> tuple[RecordWriter, RecordReader]:
    writer = RecordWriter.private(source="test")
    writer.set_devices(infos)
    return writer, RecordReader.of(writer, clock=clock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record"


# --- what goes in comes out


def test_the_layout_is_as_drawn() -> None:
    assert (layout.TABLE.at, layout.MEMORY[0].at, layout.DETAIL[0].at) == (16_384, 278_528, 475_136)
    assert len(layout.MEMORY) == len(layout.DETAIL) == 512
    places = [layout.TABLE, *layout.MEMORY, *layout.DETAIL]
    assert [place.sequence for place in places] == list(range(3, 3 + 1025))
    assert 8 * (places[-1].sequence + 1) <= layout.TABLE.at - 4096
    assert [place.at for place in places[1:]] == [place.at + 2 * place.buffer_bytes for place in places[:-1]]
    assert layout.FILE_BYTES == places[-1].at + 2 * places[-1].buffer_bytes
    assert layout.MEMORY[0].room_bytes >= MAX_MEMORY_BYTES


texts = st.none() | st.text(max_size=40)
numbers = st.none() | st.floats(allow_nan=False) | st.integers(0, 10**6)
memories = st.builds(
    DeviceMemory,
    at_ns=st.integers(0, 2**63 - 1),
    interval_ns=st.integers(0, 2**63 - 1),
    total_bytes=st.none() | st.integers(0, 2**64 - 1),
    free_bytes=st.none() | st.integers(0, 2**64 - 1),
    bytes_per_second=st.none() | st.floats(allow_nan=False),
    polls=st.integers(0, 2**64 - 1),
    failures=st.integers(0, 2**64 - 1),
    error=st.none() | st.text(max_size=24).filter(lambda text: len(text.encode(errors="surrogatepass")) <= 96),
)
processes = st.builds(
    ProcessUse,
    pid=st.integers(0, 2**31),
    used_bytes=st.none() | st.integers(0, 2**64),
    kind=st.text(max_size=20),
    user=texts,
    command=texts | st.text(min_size=512, max_size=512),
    engine=texts,
)
details = st.builds(
    DeviceDetail,
    at_ns=st.integers(0, 2**63),
    interval_ns=st.integers(0, 2**63),
    reading=st.builds(
        DetailReading, numbers, numbers, numbers, numbers, st.none() | st.lists(processes, max_size=4).map(tuple)
    ),
    history=st.lists(st.none() | st.integers(0, 2**64), max_size=MAX_HISTORY).map(tuple),
    error=texts,
)


@given(st.lists(memories, min_size=1, max_size=5))
@example([MEMORY, NOTHING])
def test_every_field_of_memory_comes_back(memories: list[DeviceMemory]) -> None:
    writer, reader = private(HOST, GPU)
    for memory in memories:
        writer.write_memory(1, memory)
        assert reader.memory(GPU.uuid) == memory
    assert reader.memory(HOST.uuid) == NOTHING


@given(st.lists(details, min_size=1, max_size=3))
@example([DETAIL])
def test_every_field_of_detail_comes_back(details: list[DeviceDetail]) -> None:
    writer, reader = private(HOST, GPU)
    for detail in details:
        writer.write_detail(1, detail)
        assert reader.detail(GPU.uuid) == detail
    assert reader.detail(HOST.uuid) == DeviceDetail(0, 0, DetailReading())


@pytest.mark.parametrize("error", ["", "x" * 96, "ä" * 48])
def test_an_error_of_96_bytes_is_kept(error: str) -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, replace(MEMORY, error=error))
    assert reader.memory(GPU.uuid).error == error


@given(st.text(min_size=20, max_size=200), st.sampled_from(["x", "ä", "中", "𝄞"]))
def test_a_longer_error_is_cut_between_characters(text: str, filler: str) -> None:
    writer, reader = private(GPU)
    error = (filler * 90 + text).encode(errors="replace").decode()
    writer.write_memory(0, replace(MEMORY, error=error))
    found = reader.memory(GPU.uuid).error
    assert found is not None
    assert found.endswith("…") and error.startswith(found[:-1])
    assert 96 - 4 <= len(found.encode()) <= 96


def test_an_error_that_is_no_unicode_is_shown_escaped() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, replace(MEMORY, error="no file \udcff"))
    assert reader.memory(GPU.uuid).error == r"no file \udcff"


@pytest.mark.parametrize("field", ["total_bytes", "free_bytes", "polls", "failures", "at_ns", "interval_ns"])
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_of_more_than_64_bits_is_refused(field: str, number: int) -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    with pytest.raises(RecordError, match=f"holds no negative numbers, nor any of more than 64 bits: {field}$"):
        writer.write_memory(0, replace(MEMORY, **{field: number}))
    assert reader.memory(GPU.uuid) == MEMORY


def test_what_has_not_changed_is_the_same_object() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    memory, detail = reader.memory(GPU.uuid), reader.detail(GPU.uuid)
    assert reader.memory(GPU.uuid) is memory
    assert reader.detail(GPU.uuid) is detail
    writer.write_memory(0, MEMORY)
    assert reader.memory(GPU.uuid) is not memory
    assert reader.detail(GPU.uuid) is detail


def test_until_the_next_answer_is_due_what_was_read_is_the_newest_without_a_look(path: Path) -> None:
    clock = Clock()
    with RecordWriter.create(path, source="test") as writer, RecordReader.open(path, clock=clock) as reader:
        writer.set_devices([GPU])
        writer.beat(clock.now_ns, 10**12)
        asked: list[int] = []  # how many bytes, each time that the file is read
        first = replace(MEMORY, at_ns=clock.now_ns, interval_ns=20 * MS)
        writer.write_memory(0, first)
        assert reader.memory(GPU.uuid) == first
        record = reader._record
        assert record is not None
        read = record._read
        record._read = lambda length, at: asked.append(length) or read(length, at)  # type: ignore[func-returns-value]
        clock.now_ns += 35 * MS // 2 - 1
        assert reader.memory(GPU.uuid) == first and asked == []
        second = replace(first, at_ns=clock.now_ns, polls=8)
        writer.write_memory(0, second)  # too early, which no monitor is by more than its own delay
        assert reader.memory(GPU.uuid) == first and asked == []
        clock.now_ns += 1
        assert reader.memory(GPU.uuid) == second and asked
        for interval_ns, looks_again_ns in (
            (8, 7),
            (8 * MS, 7 * MS),
            (20 * MS, 17_500_000),
            (3600_000 * MS, 17_500_000),
        ):
            clock.now_ns += 20 * MS
            writer.write_memory(0, replace(first, at_ns=clock.now_ns, interval_ns=interval_ns))
            assert reader.memory(GPU.uuid).interval_ns == interval_ns
            asked.clear()
            clock.now_ns += looks_again_ns - 1
            reader.memory(GPU.uuid)
            assert asked == []
            clock.now_ns += 1
            reader.memory(GPU.uuid)
            assert asked, "the interval may be shorter by now"
        clock.now_ns -= 60 * MS
        asked.clear()
        reader.memory(GPU.uuid)
        assert asked, "numbers of the future are of before a restart of the machine"


def test_a_snapshot_has_it_all(path: Path) -> None:
    clock = Clock()
    with RecordWriter.create(path, source="nvml+host") as writer, RecordReader.open(path, clock=clock) as reader:
        writer.set_devices([GPU, HOST])
        writer.write_memory(0, MEMORY)
        writer.write_detail(0, DETAIL)
        devices = (Device(GPU, MEMORY, DETAIL), Device(HOST, NOTHING, DeviceDetail(0, 0, DetailReading())))
        writer.beat(clock.now_ns, 20 * MS)
        before = time.time()
        snapshot = reader.snapshot()
        assert snapshot == Snapshot(clock.now_ns, "nvml+host", os.getpid(), reader.started_ns, devices)
        assert snapshot.unix_seconds is not None and before <= snapshot.unix_seconds <= time.time()
        assert snapshot.silent_ns is None
        assert reader.snapshot(77) == replace(snapshot, at_ns=77, silent_ns=0)  # its heartbeat is of the future
        assert 0 < reader.started_ns <= time.monotonic_ns()
        start = Path(f"/proc/{os.getpid()}/stat")
        if start.exists():
            assert reader.monitor_start_ticks == int(start.read_text().split(") ")[-1].split()[19])


def test_a_snapshot_is_younger_than_its_numbers() -> None:
    clock = Clock()
    writer, _ = private(GPU)

    def clock_before_an_answer() -> int:
        now_ns = clock.now_ns
        clock.now_ns += 1
        writer.write_memory(0, replace(MEMORY, at_ns=clock.now_ns))
        return now_ns

    reader = RecordReader.of(writer, clock=clock_before_an_answer)
    for _ in range(3):
        snapshot = reader.snapshot()
        assert snapshot.devices[0].memory.age_ns(snapshot.at_ns) >= 0


# --- processes that do not fit


def many(count: int, command: str = "c" * 300) -> tuple[ProcessUse, ...]:
    """Processes in no order of their memory, some of which is not known."""
    uses: list[int | None] = [None if number % 10 == 0 else number << 20 for number in range(count)]
    random.Random(0).shuffle(uses)
    return tuple(ProcessUse(pid, use, command=command) for pid, use in enumerate(uses))


@pytest.mark.parametrize("error", [None, "hidden"])
def test_too_many_processes_lose_those_with_the_least_memory(error: str | None) -> None:
    writer, reader = private(GPU)
    given = replace(DETAIL, reading=replace(DETAIL.reading, processes=many(900)), error=error)
    writer.write_detail(0, given)
    found = reader.detail(GPU.uuid)
    kept, offered = found.reading.processes, given.reading.processes
    assert kept is not None and offered is not None
    by_use = sorted(offered, key=lambda process: process.used_bytes or 0, reverse=True)
    assert kept == tuple(process for process in offered if process in by_use[: len(kept)])
    assert 150 < len(kept) < 200
    note = f"the record has no room for {900 - len(kept)} of 900 processes, those with the least memory"
    assert found.error == (note if error is None else f"hidden; {note}")
    assert replace(found, reading=replace(found.reading, processes=offered), error=error) == given


@pytest.mark.parametrize("count", range(170, 195))
def test_room_is_used_to_the_last_process(count: int) -> None:
    writer, reader = private(GPU)
    writer.write_detail(0, DeviceDetail(0, 0, DetailReading(processes=many(count))))
    kept = reader.detail(GPU.uuid).reading.processes
    assert kept is not None
    row_bytes = len(json.dumps([100, 100 << 20, "compute", None, "c" * 300, None], separators=(",", ":"))) + 1
    assert len(kept) == count or (len(kept) + 1) * row_bytes > (1 << 16) - 24 - 200


def test_a_command_line_is_cut_to_512_characters() -> None:
    writer, reader = private(GPU)
    long = (ProcessUse(1, 1, command="c" * 100_000), ProcessUse(2, 1, command="\udcff" * 512))
    writer.write_detail(0, DeviceDetail(0, 0, DetailReading(processes=long), error="e" * 1000))
    found = reader.detail(GPU.uuid)
    assert found.reading.processes == (replace(long[0], command="c" * 511 + "…"), long[1])
    assert found.error == "e" * 511 + "…"


def test_too_long_a_history_is_refused() -> None:
    writer, _ = private(GPU)
    with pytest.raises(RecordError, match="256 samples of history, got 257"):
        writer.write_detail(0, DeviceDetail(0, 0, DetailReading(), tuple(range(257))))


# --- devices come and go


def test_devices_keep_their_numbers_while_others_come_and_go() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    writer.beat(1, 20 * MS)
    writer.set_devices([HOST, GPU, MIG])
    assert reader.devices() == (HOST, GPU, MIG)
    assert reader.memory(GPU.uuid) == MEMORY
    assert reader.memory(MIG.uuid) == replace(NOTHING, interval_ns=20 * MS)
    writer.write_memory(1, replace(MEMORY, polls=8))
    writer.write_memory(2, replace(MEMORY, polls=9))
    assert [reader.memory(info.uuid).polls for info in (HOST, GPU, MIG)] == [0, 8, 9]
    writer.set_devices([MIG, replace(HOST, name="host memory")])
    assert reader.devices() == (MIG, replace(HOST, name="host memory"))
    assert [reader.memory(info.uuid).polls for info in (HOST, MIG)] == [0, 9]
    with pytest.raises(NoSuchDevice, match=r"no device 'GPU-8a6e' .* there are: MIG-11 \(0:1\), HOST-1 \(host\)$"):
        reader.memory(GPU.uuid)
    writer.set_devices([GPU])
    assert reader.memory(GPU.uuid).polls == 0  # back, but nothing is known of it yet
    writer.set_devices([])
    for ask in (reader.memory, reader.detail):
        with pytest.raises(NoSuchDevice, match="there are: none"):
            ask(GPU.uuid)
    assert reader.snapshot().devices == ()


def device(number: int) -> DeviceInfo:
    return DeviceInfo(f"GPU-{number}", str(number), DeviceKind.GPU)


def test_256_devices_fit_and_can_all_be_exchanged_at_once() -> None:
    writer, reader = private()
    for turn in range(5):
        infos = [device(number) for number in range(turn * 1000, turn * 1000 + MAX_DEVICES)]
        writer.set_devices(infos)
        for position, info in enumerate(infos):
            writer.write_memory(position, replace(MEMORY, polls=int(info.index)))
        assert [one.memory.polls for one in reader.snapshot().devices] == [int(info.index) for info in infos]
    assert reader.retries == 0


@pytest.mark.parametrize(
    ("infos", "sentence"),
    [
        ([device(number) for number in range(257)], "room for 256 devices, got 257"),
        ([GPU, HOST, GPU], "a device comes twice"),
        ([GPU, replace(HOST, name="n" * 140_000)], "room for 131,048 bytes here, got 140,"),
    ],
    ids=["too many", "twice", "too long"],
)
def test_devices_that_cannot_be_set_change_nothing(infos: list[DeviceInfo], sentence: str) -> None:
    writer, reader = private(GPU, HOST)
    writer.write_memory(0, MEMORY)
    with pytest.raises(RecordError, match=sentence):
        writer.set_devices(infos)
    assert reader.devices() == (GPU, HOST)
    writer.write_memory(1, replace(MEMORY, polls=8))
    assert [one.memory.polls for one in reader.snapshot().devices] == [7, 8]


@pytest.mark.parametrize("position", [-1, 1, 256])
def test_a_position_without_a_device_is_refused(position: int) -> None:
    writer, _ = private(GPU)
    for write in (lambda: writer.write_memory(position, MEMORY), lambda: writer.write_detail(position, DETAIL)):
        with pytest.raises(NoSuchDevice, match=f"has 1 devices, none at position {position}"):
            write()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), unique=True, max_size=MAX_DEVICES), max_size=12), st.randoms())
def test_any_changes_agree_with_a_dictionary(tables: list[list[int]], rng: random.Random) -> None:
    writer, reader = private()
    known: dict[str, int] = {}
    polls = 0
    for numbers in tables:
        infos = [device(number) for number in numbers]
        writer.set_devices(infos)
        known = {info.uuid: known.get(info.uuid, 0) for info in infos}
        for _ in range(3 if infos else 0):
            polls += 1
            position = rng.randrange(len(infos))
            known[infos[position].uuid] = polls
            writer.write_memory(position, replace(MEMORY, polls=polls))
            writer.write_detail(position, replace(DETAIL, at_ns=polls))
        if rng.random() < 0.7:
            assert {uuid: reader.memory(uuid).polls for uuid in known} == known
            assert {one.info.uuid: one.detail.at_ns for one in reader.snapshot().devices} == known
    assert reader.retries == 0


def test_a_slot_that_was_given_to_another_device_is_not_read_for_the_first() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    record = reader._record
    assert record is not None
    table = record.table.read(record.words())
    assert table is not None
    writer.set_devices([])
    writer.set_devices([HOST])  # while somebody reads by the table of before
    writer.write_memory(0, MEMORY)
    assert table.entry(GPU.uuid).memory.read(record.words()) is None
    assert table.entry(GPU.uuid).detail.read(record.words()) is None


@pytest.mark.parametrize("writes", range(0, 2 * MAX_DEVICES + 1, 64))
def test_a_writer_killed_while_it_sets_devices_leaves_those_of_before(
    writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [device(number) for number in range(MAX_DEVICES)]
    writer, reader = private(*infos)
    for position in range(MAX_DEVICES):
        writer.write_memory(position, replace(MEMORY, polls=position))
    before = reader.snapshot(0)
    publish, left = layout.SharedBytes.publish, [writes]

    def publish_until_killed(*arguments: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return publish(*arguments)

    others = [device(number + 1000) for number in range(MAX_DEVICES)]
    monkeypatch.setattr(layout.SharedBytes, "publish", publish_until_killed)
    with pytest.raises(KeyboardInterrupt):
        writer.set_devices(others)
    assert reader.snapshot(0) == RecordReader.of(writer).snapshot(0) == before
    assert reader.retries == 0


def test_threads_write_different_devices_at_the_same_time() -> None:
    writer, reader = private(*(device(number) for number in range(8)))

    def write(position: int) -> None:
        for polls in range(1, 500):
            writer.write_memory(position, replace(MEMORY, polls=polls, total_bytes=position))
            if polls % 50 == 0:
                writer.write_detail(position, replace(DETAIL, at_ns=polls, interval_ns=position))

    threads = [threading.Thread(target=write, args=(position,)) for position in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for position, one in enumerate(reader.snapshot().devices):
            assert one.memory.total_bytes in (None, position)
            assert one.detail.interval_ns in (0, position)
    for thread in threads:
        thread.join()
    assert [one.memory.polls for one in reader.snapshot().devices] == [499] * 8


# --- is anybody there


def test_a_monitor_is_live_for_three_intervals_after_a_beat() -> None:
    clock = Clock()
    writer, reader = private(clock=clock)
    assert not reader.is_live()
    writer.beat(clock.now_ns, 20 * MS)
    assert reader.is_live()  # without a device that answers
    clock.now_ns += 60 * MS
    assert reader.is_live()
    assert not reader.is_live(clock.now_ns + 1)
    clock.now_ns += 1
    assert not reader.is_live()
    writer.beat(clock.now_ns, 100 * MS)
    assert reader.is_live(clock.now_ns + 300 * MS)
    assert not reader.is_live(clock.now_ns - 1)  # of the future: written before the machine started anew
    writer.close()
    assert not reader.is_live()


def test_a_snapshot_says_for_how_long_nothing_was_heard_of_the_monitor() -> None:
    clock = Clock()
    writer, reader = private(GPU, clock=clock)
    clock.now_ns = reader.started_ns + 5 * MS
    assert reader.snapshot().silent_ns == 5 * MS  # it never said anything
    writer.beat(clock.now_ns, 20 * MS)
    clock.now_ns += 60 * MS
    assert reader.snapshot().silent_ns is None  # though its device never answered
    assert reader.snapshot(clock.now_ns + MS).silent_ns == 61 * MS
    clock.now_ns -= 50 * MS
    writer.close()
    assert reader.snapshot().silent_ns == 10 * MS


def test_an_interval_below_one_is_refused() -> None:
    writer, _ = private()
    with pytest.raises(ValueError, match="at least 1 ns, got 0"):
        writer.beat(1, 0)


def test_a_beat_just_after_the_time_was_asked_is_not_of_the_future() -> None:
    clock = Clock()
    writer, _ = private()

    def clock_before_a_beat() -> int:
        now_ns = clock.now_ns
        clock.now_ns += 1
        writer.beat(clock.now_ns, 20 * MS)
        return now_ns

    writer.beat(clock.now_ns, 20 * MS)
    reader = RecordReader.of(writer, clock=clock_before_a_beat)
    assert [reader.is_live() for _ in range(3)] == [True] * 3


# --- the file


def test_there_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "record", tmp_path / "no folder" / "record", tmp_path / "file" / "record"):
        with pytest.raises(RecordMissing, match=f"no record at {path}: no monitor runs"):
            RecordReader.open(path)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Path.mkdir, "is not what a monitor of pagetide writes"),
        (_pipe, "is not what a monitor of pagetide writes"),
        (Path.touch, "is not what a monitor of pagetide writes"),
        (lambda path: path.write_bytes(b"{}" * 5000), "is not what a monitor of pagetide writes"),
        (lambda path: path.write_bytes(b"pagetide" + struct.pack("=I", LAYOUT_VERSION)), "is damaged"),
        (
            lambda path: path.write_bytes(b"pagetide" + struct.pack("=I", 9)),
            f"has layout version 9, and this pagetide reads version {LAYOUT_VERSION}",
        ),
    ],
    ids=["folder", "pipe", "empty", "another", "short", "newer"],
)
def test_what_is_no_record_is_refused(path: Path, make: Callable[[Path], Any], sentence: str) -> None:
    make(path)
    path.chmod(0o700)  # whatever the umask
    with pytest.raises(RecordError, match=sentence) as refusal:
        RecordReader.open(path)
    assert str(path) in str(refusal.value) and not isinstance(refusal.value, RecordMissing)


def test_a_header_with_any_wrong_bit_is_refused(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        header = path.read_bytes()[:80]
        length = 32 + header[24]
        for position in range(length):
            with path.open("r+b") as file:
                file.write(header[:position] + bytes([header[position] ^ 1 << position % 8]) + header[position + 1 :])
            with pytest.raises(RecordError):
                RecordReader.open(path)


def test_who_may_not_read_it_is_told(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        os.chmod(path, 0)
        here, there = os.pipe()
        if not (child := os.fork()):
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                RecordReader.open(path)
            except BaseException as error:
                os.write(there, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(there)
        os.waitpid(child, 0)
        with open(here, encoding="utf-8") as said:
            assert said.read().startswith(
                f"RecordError: the record {path} may not be read by this user: join the group"
            )


def said_as_user(uid: int, path: Path) -> str:
    """What a process of another user is told that opens the record."""
    here, there = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(uid)
            os.write(there, RecordReader.open(path).source.encode())
        except BaseException as error:
            os.write(there, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    with open(here, encoding="utf-8") as said:
        return said.read()


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root has files of several users")
def test_a_record_of_another_user_is_believed_only_in_the_machines_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which others may not enter
        os.chmod(folder, 0o755)
        path = Path(folder) / "record"
        with RecordWriter.create(path, source="test", mode=0o644):
            assert said_as_user(4321, path) == "test"  # root's
            os.chown(path, 4321, -1)
            assert said_as_user(4321, path) == "test"  # the reader's own
            os.chown(path, 1234, -1)
            assert said_as_user(4321, path).startswith(
                f"RecordError: the record {path} belongs to user 1234, neither to root nor to user 4321"
            )
            with pytest.raises(RecordError, match="belongs to user 1234"):
                RecordReader.open(path)
            monkeypatch.setattr("pagetide.monitor.record_file.MACHINE_DIR", Path(folder))
            assert said_as_user(4321, path) == "test"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_record_that_others_may_write_is_not_believed(path: Path, mode: int) -> None:
    with RecordWriter.create(path, source="test"):
        path.chmod(mode)
        with pytest.raises(RecordError, match=r"may be written by others than its owner \(-rw"):
            RecordReader.open(path)


def test_a_link_to_a_record_is_not_followed(path: Path) -> None:
    with RecordWriter.create(path.with_name("elsewhere"), source="test"):
        path.symlink_to("elsewhere")
        with pytest.raises(RecordError, match=f"the record {path} is a symbolic link"):
            RecordReader.open(path)


def test_a_successor_that_another_may_write_is_told_and_not_read(path: Path) -> None:
    clock = Clock()
    with (
        RecordWriter.create(path, source="first"),
        RecordReader.open(path, clock=clock) as reader,
        RecordWriter.create(path, source="second") as second,
    ):
        second.beat(clock.now_ns, 20 * MS)
        path.chmod(0o666)
        clock.now_ns += 20 * MS
        assert reader.source == "first"
        assert reader.trouble is not None and "may be written by others" in reader.trouble


def test_mode_and_group_are_as_asked(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with RecordWriter.create(path, source="test", mode=0o640, gid=os.getgid()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert path.stat().st_gid == os.getgid()
        path.chmod(0o440)  # a reader needs no more
        assert RecordReader.open(path).source == "test"


def test_a_record_that_cannot_be_made_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot create the record .*/no/record: No such file or directory"):
        RecordWriter.create(tmp_path / "no" / "record", source="test")
    (tmp_path / "record").mkdir()
    with pytest.raises(RecordError, match=r"cannot create the record .*: Is a directory"):
        RecordWriter.create(tmp_path / "record", source="test")
    assert os.listdir(tmp_path) == ["record"]


def test_a_full_file_system_is_a_sentence_and_no_signal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RecordWriter.create(path, source="test") as writer, RecordReader.open(path) as reader:
        writer.set_devices([GPU])
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(RecordError, match=f"cannot make room in the record {path}: No space left"):
                writer.set_devices([GPU, HOST])
            with pytest.raises(RecordError, match=r"cannot create the record .*: No space left"):
                RecordWriter.create(path.with_name("other"), source="test")
        assert reader.devices() == (GPU,)
        assert os.listdir(path.parent) == ["record"]
        writer.set_devices([GPU, HOST])
        assert reader.devices() == (GPU, HOST)


def test_only_devices_take_room(path: Path) -> None:
    with RecordWriter.create(path, source="test") as writer:
        writer.set_devices([GPU, HOST])
        assert path.stat().st_size == layout.FILE_BYTES > 64 << 20
        assert path.stat().st_blocks * 512 < 1 << 20


def test_closing_takes_the_own_file_away_and_no_other(path: Path) -> None:
    first = RecordWriter.create(path, source="first")
    first.set_devices([GPU])
    second = RecordWriter.create(path, source="second")
    first.close()
    first.close()
    assert RecordReader.open(path).source == "second"
    path.unlink()
    second.close()  # somebody was first
    for act in (lambda: first.write_memory(0, MEMORY), lambda: first.set_devices([]), lambda: first.beat(1, 1)):
        with pytest.raises(RecordError, match="closed"):
            act()
    assert os.listdir(path.parent) == []


def test_what_a_killed_monitor_left_is_taken_over(path: Path) -> None:
    path.write_bytes(b"half")
    path.with_name("record.new").write_bytes(b"a quarter")
    with RecordWriter.create(path, source="test"):
        assert RecordReader.open(path).source == "test"
        assert os.listdir(path.parent) == ["record"]


def test_a_long_name_of_a_source_is_cut(path: Path) -> None:
    with RecordWriter.create(path, source="𝄞" * 5000):
        assert RecordReader.open(path).source == "𝄞" * 255 + "…"


def test_a_closed_reader_says_so(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        with RecordReader.open(path) as reader:
            pass
        reader.close()
        for ask in (reader.devices, reader.snapshot, reader.is_live, lambda: reader.memory(GPU.uuid)):
            with pytest.raises(RecordError, match="reader of the record is closed"):
                ask()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_nothing_is_left_open(path: Path) -> None:
    gc.collect()  # of the tests before
    before = len(os.listdir("/proc/self/fd"))
    with RecordWriter.create(path, source="test") as writer:
        writer.set_devices([GPU])
        for _ in range(1000):
            with RecordReader.open(path) as reader:
                reader.memory(GPU.uuid)
    for _ in range(20):
        RecordWriter.create(path, source="test").close()
        with pytest.raises(RecordError):
            RecordReader.open(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) not in Path("/proc/self/maps").read_text()


# --- from one monitor to the next


def test_a_successor_is_picked_up_once_it_beats(path: Path) -> None:
    clock = Clock()
    first = RecordWriter.create(path, source="first")
    first.set_devices([GPU])
    first.write_memory(0, MEMORY)
    first.beat(clock.now_ns, 20 * MS)
    reader = RecordReader.open(path, clock=clock)
    second = RecordWriter.create(path, source="second")  # the first was killed
    clock.now_ns += 60 * MS
    assert reader.source == "first"  # for all one knows it lives
    clock.now_ns += 1
    assert reader.source == "first"  # the second is not ready
    assert reader.memory(GPU.uuid) is reader.memory(GPU.uuid)
    second.set_devices([HOST])
    second.beat(clock.now_ns, 20 * MS)
    clock.now_ns += 20 * MS - 1
    assert reader.source == "first"  # one look in 20 ms
    clock.now_ns += 1
    assert reader.devices() == (HOST,)
    assert (reader.source, reader.is_live()) == ("second", True)
    with pytest.raises(NoSuchDevice):
        reader.memory(GPU.uuid)
    if (descriptors := Path("/proc/self/fd")).exists():
        opened = [os.readlink(entry) for entry in descriptors.iterdir() if entry.is_symlink()]
        assert opened.count(str(path)) == 2  # the second's own, and the reader's
        assert opened.count(f"{path} (deleted)") == 1  # the first's own
    first.close()
    second.close()


def test_without_a_successor_the_last_numbers_stay(path: Path) -> None:
    clock = Clock()
    with RecordWriter.create(path, source="first") as first, RecordReader.open(path, clock=clock) as reader:
        first.set_devices([GPU])
        first.write_memory(0, replace(MEMORY, at_ns=clock.now_ns))
        first.beat(clock.now_ns, 20 * MS)
        first.close()
        for _ in range(5):
            assert not reader.is_live()
            memory = reader.memory(GPU.uuid)
            assert memory.polls == 7 and memory.free_bytes == 3 << 30
            clock.now_ns += 20 * MS
        assert memory.is_stale(clock.now_ns)
        with RecordWriter.create(path, source="second") as second:  # a day later
            second.set_devices([GPU])
            second.beat(clock.now_ns, 20 * MS)
            assert reader.memory(GPU.uuid) == NOTHING
        assert reader.trouble is None


def test_a_silent_monitor_that_comes_back_is_read_on(path: Path) -> None:
    clock = Clock()
    with RecordWriter.create(path, source="test") as writer, RecordReader.open(path, clock=clock) as reader:
        for _ in range(3):
            writer.beat(clock.now_ns, 20 * MS)
            clock.now_ns += 1000 * MS
            assert not reader.is_live()
            writer.beat(clock.now_ns, 20 * MS)
            assert reader.is_live()


def test_a_successor_that_cannot_be_read_is_told(path: Path) -> None:
    clock = Clock()
    first = RecordWriter.create(path, source="first")
    first.set_devices([GPU])
    first.write_memory(0, MEMORY)
    reader = RecordReader.open(path, clock=clock)
    path.unlink()
    path.write_bytes(b"pagetide" + struct.pack("=I", 9))
    path.chmod(0o600)  # whatever the umask
    clock.now_ns += 20 * MS
    assert reader.memory(GPU.uuid) == MEMORY
    assert reader.trouble is not None and "layout version 9" in reader.trouble
    path.unlink()
    clock.now_ns += 20 * MS
    assert reader.memory(GPU.uuid) == MEMORY
    assert reader.trouble is None
    first.close()


# --- half-written and damaged records


def written() -> tuple[RecordWriter, layout.SharedBytes]:
    """A record of one device, and its bytes."""
    writer, _ = private(GPU)
    writer.write_memory(0, MEMORY)
    writer.write_detail(0, DETAIL)
    shared = writer._shared
    assert shared is not None
    return writer, shared


def current(shared: layout.SharedBytes, place: layout.Place) -> memoryview:
    """The bytes in force of a slot: head and payload."""
    start = place.at + (shared.words[place.sequence] & 1) * place.buffer_bytes
    (payload_bytes,) = struct.unpack_from("=I", shared.view, start + 4)
    return shared.view[start : start + 24 + payload_bytes]


PLACES = pytest.mark.parametrize(
    "place", [layout.TABLE, layout.MEMORY[0], layout.DETAIL[0]], ids=["table", "memory", "detail"]
)


@PLACES
def test_a_writer_killed_at_any_byte_leaves_the_last_record(place: layout.Place) -> None:
    writer, shared = written()
    other = place.at + (1 - (shared.words[place.sequence] & 1)) * place.buffer_bytes
    for killed_at in range(200):
        shared.view[other + killed_at] = 0xA5
        reader = RecordReader.of(writer)
        assert reader.snapshot().devices == (Device(GPU, MEMORY, DETAIL),)
        assert reader.retries == 0


@PLACES
def test_any_wrong_bit_is_seen(place: layout.Place) -> None:
    writer, shared = written()
    raw = current(shared, place)
    for position in range(len(raw)):
        raw[position] ^= 1 << position % 8
        with pytest.raises(RecordError, match="the monitor's record is damaged"):
            RecordReader.of(writer).snapshot()
        raw[position] ^= 1 << position % 8
    assert RecordReader.of(writer).snapshot().devices == (Device(GPU, MEMORY, DETAIL),)


@PLACES
def test_a_sequence_seen_before_its_bytes_is_not_taken(place: layout.Place) -> None:
    writer, shared = written()
    reader = RecordReader.of(writer)
    shared.words[place.sequence] += 1  # what a processor with weakly ordered stores may show for an instant
    with pytest.raises(RecordError, match="is damaged"):
        reader.snapshot()
    assert reader.retries == 100
    shared.words[place.sequence] -= 1
    assert reader.snapshot().devices == (Device(GPU, MEMORY, DETAIL),)


def test_a_reader_that_is_overtaken_tries_again() -> None:
    writer, shared = written()
    place, times = layout.MEMORY[0], [0, 0]

    def read(length: int, at: int) -> bytes:
        """A copy during which the writer gets through with the next two records."""
        half = shared.read(60, at)
        if times[0] < 3:
            times[0] += 1
            for _ in range(2):
                times[1] += 1
                writer.write_memory(0, replace(MEMORY, polls=times[1], error=f"{times[1]:96}"))
        return half + shared.read(length - 60, at + 60)

    generation = shared.words[layout.TABLE.sequence]
    cell = layout.Cell(read, place, generation, memory_from_bytes)
    assert [cell.read(layout.load_words(shared.read, 0, 99)) for _ in range(3)] == [None] * 3
    assert cell.read(layout.load_words(shared.read, 0, 99)) == replace(MEMORY, polls=6, error=f"{6:96}")


def use(reader: RecordReader) -> None:
    """Ask everything; only what is said to be raised may be."""
    for ask in (
        reader.devices,
        reader.snapshot,
        lambda: reader.memory(GPU.uuid),
        lambda: reader.detail(GPU.uuid),
        lambda: [reader.memory(info.uuid).is_stale() for info in reader.devices()],
        reader.is_live,
    ):
        with suppress(RecordError, NoSuchDevice):
            ask()  # type: ignore[operator]
    assert isinstance(reader.source, str) and isinstance(reader.monitor_pid, int)


@settings(deadline=None, max_examples=120)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 4096, 16_384, 16_384 + 131_072, 278_528, 278_528 + 192, 475_136, 475_136 + 65_536]),
            st.integers(0, 200),
            st.binary(min_size=1, max_size=40),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_bytes_break_a_reader(wounds: list[tuple[int, int, bytes]]) -> None:
    _, shared = written()
    for start, offset, wound in wounds:
        shared.view[start + offset : start + offset + len(wound)] = wound
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        with path.open("wb") as file:
            file.write(shared.view[: 475_136 + 2 * 65536])
            file.truncate(layout.FILE_BYTES)
        path.chmod(0o600)  # whatever the umask
        try:
            reader = RecordReader.open(path)
        except RecordError:
            return
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("pagetide.monitor.record._PAUSES", 1)  # no monitor is there to mend it
            use(reader)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)
ODD_PAYLOADS = [
    b"", b"[", b"[" * 65_000, b"9" * 65_000, b"[[" + b"9" * 4000 + b',1,"GPU-8a6e","0","gpu",null,null,null]]',
    b'[[-1,1,"GPU-8a6e","0","gpu",null,null,null]]', b'[[0,1,"GPU-8a6e","0","cpu",null,null,null]]',
    b'[[0,1,"a","0","gpu",null,null,null],[0,1,"a","0","gpu",null,null,null]]', b"\xff\xfe", b"1e999", b"\0" * 57,
    b"\xff" * 168, b'[0,0,NaN,Infinity,null,null,[[1,2,"",null,null,null,null]],[],null]', b"[0,0,1,1,1,1,{},[],null]",
]  # fmt: skip


def published(place: layout.Place, payload: bytes) -> RecordReader:
    """A reader of a record that holds `payload` with a good CRC."""
    writer, shared = written()
    sequence = 0 if place is layout.TABLE else shared.words[layout.TABLE.sequence]
    shared.publish(place, sequence, payload[: place.room_bytes])
    return RecordReader.of(writer)


@PLACES
@given(st.binary(max_size=168) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_payload_with_a_good_crc_breaks_a_reader(place: layout.Place, payload: bytes) -> None:
    use(published(place, payload))


@pytest.mark.parametrize("place", [layout.TABLE, layout.DETAIL[0]], ids=["table", "detail"])
@pytest.mark.parametrize("payload", ODD_PAYLOADS, ids=range(len(ODD_PAYLOADS)))
def test_odd_texts_are_damage(place: layout.Place, payload: bytes) -> None:
    reader = published(place, payload)
    use(reader)
    with pytest.raises(RecordError, match="is damaged"):
        reader.snapshot()


@pytest.mark.parametrize("payload", ODD_PAYLOADS, ids=range(len(ODD_PAYLOADS)))
def test_odd_bytes_of_memory_are_numbers_or_damage(payload: bytes) -> None:
    reader = published(layout.MEMORY[0], payload)
    use(reader)
    try:
        memory = reader.memory(GPU.uuid)
    except RecordError:
        return
    assert all(type(number) is int for number in (memory.at_ns, memory.total_bytes or 0, memory.free_bytes or 0))


@pytest.mark.parametrize("length", [0, 1, 11, 12, 4096, 475_136, layout.FILE_BYTES - 1, layout.FILE_BYTES + 1])
def test_a_file_of_another_length_is_refused(path: Path, length: int) -> None:
    with RecordWriter.create(path, source="test"):
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)  # whatever the umask
        os.truncate(copy, length)
        with pytest.raises(RecordError, match="is damaged" if length >= 12 else "is not what"):
            RecordReader.open(copy)


# --- real processes


def test_another_process_reads_what_was_written_and_what_was_left(path: Path) -> None:
    program = """
import sys
from pagetide.monitor.record import RecordReader
with RecordReader.open(sys.argv[1]) as reader:
    for line in sys.stdin:
        print(reader.snapshot(0).devices, flush=True)
"""
    command = [sys.executable, "-P", "-c", program, str(path)]
    with (
        RecordWriter.create(path, source="test") as writer,
        RecordReader.open(path) as reader,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):

        def both_see_the_same() -> None:
            assert other.stdin is not None and other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == f"{reader.snapshot(0).devices}\n"

        for infos in ([GPU], [HOST, GPU], [], [GPU]):
            writer.set_devices(infos)
            for position in range(len(infos)):
                writer.write_memory(position, MEMORY)
                writer.write_detail(position, DETAIL)
            both_see_the_same()
        writer.close()
        both_see_the_same()
        other.communicate()


def test_no_reader_sees_a_torn_record(path: Path) -> None:
    for report in read_while_written(path, seed=1, readers=4, seconds=1.0):
        assert report["records"] and report["details"]


def test_killed_writers_leave_whole_records_and_successors_are_picked_up(path: Path) -> None:
    with RecordWriter.create(path, source="the first"):
        reader = RecordReader.open(path)
    for seed in range(3):
        kill_one_while_it_writes(path, reader, random.Random(seed))
    reader.close()


def test_nobody_waits_for_a_writer_that_is_stopped(path: Path) -> None:
    with process("write", path, 1) as writer:
        wait_until(path.exists)
        reader = RecordReader.open(path)
        wait_until(lambda: reader.devices() and reader.memory(STEADY.uuid).polls)
        for _ in range(10):
            writer.send_signal(signal.SIGSTOP)
            for device in RecordReader.open(path).snapshot().devices:
                check_memory(device.memory, device.info.uuid)
            polls = reader.memory(STEADY.uuid).polls
            writer.send_signal(signal.SIGCONT)
            wait_until(lambda: reader.memory(STEADY.uuid).polls > polls)  # noqa: B023
