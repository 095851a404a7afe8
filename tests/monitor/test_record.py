"""The record: what goes in comes out, whoever writes, dies, takes over, or tampers with it or its file meanwhile."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from record_processes import Clock, memory_of

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


def private(*infos: DeviceInfo, clock: Callable[[], int] = time.monotonic_ns) -> tuple[RecordWriter, RecordReader]:
    writer = RecordWriter.private(source="test")
    writer.set_devices(infos)
    return writer, RecordReader.of(writer, clock=clock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record"


def test_the_layout_is_as_drawn() -> None:
    places = [layout.TABLE, *layout.MEMORY, *layout.DETAIL]
    assert [place.at for place in places] == [
        16_384,
        *range(278_528, 475_136, 2 * 192),
        *range(475_136, layout.FILE_BYTES, 2 * 65_536),
    ]
    assert layout.FILE_BYTES == 475_136 + 512 * 2 * 65_536
    assert [place.buffer_bytes for place in places] == [1 << 17, *[192] * 512, *[1 << 16] * 512]
    assert [place.sequence for place in places] == list(range(3, 3 + 1025))
    assert 8 * (places[-1].sequence + 1) <= layout.TABLE.at - 4096 and layout.MEMORY[0].room_bytes >= MAX_MEMORY_BYTES


texts = st.none() | st.text(max_size=40)
numbers = st.none() | st.floats(allow_nan=False) | st.integers(0, 10**6)
whens, counts = st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1)
uses = st.none() | st.integers(0, 2**64)
errors = st.none() | st.text(max_size=24).filter(lambda text: len(text.encode(errors="surrogatepass")) <= 96)
memories = st.builds(
    DeviceMemory, whens, whens, st.none() | counts, st.none() | counts, st.none() | st.floats(allow_nan=False),
    polls=counts, failures=counts, error=errors,
)  # fmt: skip
commands = texts | st.text(min_size=512, max_size=512)
processes = st.builds(
    ProcessUse, st.integers(0, 2**31), uses, kind=st.text(max_size=20), user=texts, command=commands, engine=texts
)
lists = st.none() | st.lists(processes, max_size=4).map(tuple)
histories = st.lists(uses, max_size=MAX_HISTORY).map(tuple)
readings = st.builds(DetailReading, numbers, numbers, numbers, numbers, lists)
details = st.builds(DeviceDetail, whens, whens, readings, histories, texts)


@given(st.lists(memories | details, min_size=1, max_size=7))
@example([MEMORY, DETAIL, NOTHING])
def test_every_field_comes_back(told: list[DeviceMemory | DeviceDetail]) -> None:
    writer, reader = private(HOST, GPU)
    for each in told:
        if isinstance(each, DeviceMemory):
            writer.write_memory(1, each)
            assert reader.memory(GPU.uuid) == each
        else:
            writer.write_detail(1, each)
            assert reader.detail(GPU.uuid) == each
    assert (reader.memory(HOST.uuid), reader.detail(HOST.uuid)) == (NOTHING, DeviceDetail(0, 0, DetailReading()))


@given(st.text(min_size=20, max_size=200), st.sampled_from(["x", "ä", "中", "𝄞"]))
def test_an_error_is_kept_up_to_96_bytes_and_cut_between_characters(text: str, filler: str) -> None:
    writer, reader = private(GPU)

    def kept(error: str) -> str:
        writer.write_memory(0, replace(MEMORY, error=error))
        return str(reader.memory(GPU.uuid).error)

    for error in ("", "x" * 96, "ä" * 48, "no file \udcff"):
        assert kept(error) == error.replace("\udcff", r"\udcff")
    error = (filler * 90 + text).encode(errors="replace").decode()
    found = kept(error)
    assert found.endswith("…") and error.startswith(found[:-1])
    assert 96 - 4 <= len(found.encode()) <= 96


def test_what_no_record_holds_is_refused() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    for field in ("total_bytes", "free_bytes", "polls", "failures", "at_ns", "interval_ns"):
        for number in (2**64, -(2**63) - 1):
            with pytest.raises(RecordError, match=f"no negative numbers, nor any of more than 64 bits: {field}$"):
                writer.write_memory(0, replace(MEMORY, **{field: number}))
    with pytest.raises(RecordError, match="256 samples of history, got 257"):
        writer.write_detail(0, DeviceDetail(0, 0, DetailReading(), tuple(range(257))))
    with pytest.raises(ValueError, match="at least 1 ns, got 0"):
        writer.beat(1, 0)
    for position in (-1, 1, 256):
        for write in (lambda at: writer.write_memory(at, MEMORY), lambda at: writer.write_detail(at, DETAIL)):
            with pytest.raises(NoSuchDevice, match=f"has 1 devices, none at position {position}"):
                write(position)
    assert reader.memory(GPU.uuid) == MEMORY


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
        read = record._read
        record._read = lambda length, at: asked.append(length) or read(length, at)  # type: ignore[func-returns-value]
        clock.now_ns += 35 * MS // 2 - 1
        assert reader.memory(GPU.uuid) == first and asked == []
        second = replace(first, at_ns=clock.now_ns, polls=8)
        writer.write_memory(0, second)  # too early, which no monitor is by more than its own delay
        assert reader.memory(GPU.uuid) == first and asked == []
        clock.now_ns += 1
        assert reader.memory(GPU.uuid) == second and asked
        for interval_ns, looks_again_ns in ((8, 7), (8 * MS, 7 * MS), (3600_000 * MS, 17_500_000)):
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
    by_use = sorted(offered, key=lambda process: process.used_bytes or 0, reverse=True)
    assert kept == tuple(process for process in offered if process in by_use[: len(kept)])
    assert 150 < len(kept) < 200
    note = f"the record has no room for {900 - len(kept)} of 900 processes, those with the least memory"
    assert found.error == (note if error is None else f"hidden; {note}")
    assert replace(found, reading=replace(found.reading, processes=offered), error=error) == given


def test_room_is_used_to_the_last_process() -> None:
    writer, reader = private(GPU)
    row_bytes = len(json.dumps([100, 100 << 20, "compute", None, "c" * 300, None, None, None], separators=(",", ":"))) + 1
    for count in range(170, 195):
        writer.write_detail(0, DeviceDetail(0, 0, DetailReading(processes=many(count))))
        kept = reader.detail(GPU.uuid).reading.processes
        assert len(kept) == count or (len(kept) + 1) * row_bytes > (1 << 16) - 24 - 200, count


def test_a_command_line_is_cut_to_512_characters() -> None:
    writer, reader = private(GPU)
    long = (ProcessUse(1, 1, command="c" * 100_000), ProcessUse(2, 1, command="\udcff" * 512))
    writer.write_detail(0, DeviceDetail(0, 0, DetailReading(processes=long), error="e" * 1000))
    found = reader.detail(GPU.uuid)
    assert found.reading.processes == (replace(long[0], command="c" * 511 + "…"), long[1])
    assert found.error == "e" * 511 + "…"


def test_devices_come_and_go() -> None:
    writer, reader = private(GPU)
    writer.write_memory(0, MEMORY)
    writer.beat(1, 20 * MS)
    writer.set_devices([replace(HOST, name="host memory"), GPU, MIG])
    assert reader.devices() == (replace(HOST, name="host memory"), GPU, MIG)
    assert (reader.memory(GPU.uuid), reader.memory(MIG.uuid)) == (MEMORY, replace(NOTHING, interval_ns=20 * MS))
    writer.set_devices([MIG, HOST])
    with pytest.raises(NoSuchDevice, match=r"no device 'GPU-8a6e' .* there are: MIG-11 \(0:1\), HOST-1 \(host\)$"):
        reader.memory(GPU.uuid)
    writer.set_devices([])
    for ask in (reader.memory, reader.detail):
        with pytest.raises(NoSuchDevice, match="there are: none"):
            ask(GPU.uuid)
    assert reader.snapshot().devices == ()


def device(number: int) -> DeviceInfo:
    return DeviceInfo(f"GPU-{number}", str(number), DeviceKind.GPU)


def test_devices_that_cannot_be_set_change_nothing() -> None:
    for infos, sentence in (
        ([device(number) for number in range(257)], "room for 256 devices, got 257"),
        ([GPU, HOST, GPU], "a device is listed twice"),
        ([GPU, replace(HOST, name="n" * 140_000)], "room for 131,048 bytes here, got 140,"),
    ):
        writer, reader = private(GPU, HOST)
        writer.write_memory(0, MEMORY)
        with pytest.raises(RecordError, match=sentence):
            writer.set_devices(infos)
        assert reader.devices() == (GPU, HOST)
        writer.write_memory(1, replace(MEMORY, polls=8))
        assert [one.memory.polls for one in reader.snapshot().devices] == [7, 8]


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
    table = record.table.read(record.words())
    writer.set_devices([])
    writer.set_devices([HOST])  # while somebody reads by the table of before
    writer.write_memory(0, MEMORY)
    assert table.entry(GPU.uuid).memory.read(record.words()) is None
    assert table.entry(GPU.uuid).detail.read(record.words()) is None


@pytest.mark.parametrize("writes", [0, 1, MAX_DEVICES, 2 * MAX_DEVICES])
def test_a_writer_killed_while_it_sets_devices_leaves_the_old(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_monitor_is_live_for_three_intervals_after_a_beat_and_silent_since() -> None:
    clock = Clock()
    writer, reader = private(GPU, clock=clock)
    clock.now_ns = reader.started_ns + 5 * MS
    assert not reader.is_live() and reader.snapshot().silent_ns == 5 * MS  # it never said anything
    writer.beat(clock.now_ns, 20 * MS)
    assert reader.is_live()
    clock.now_ns += 60 * MS
    assert reader.is_live() and reader.snapshot().silent_ns is None  # though its device never answered
    assert not reader.is_live(clock.now_ns + 1) and reader.snapshot(clock.now_ns + MS).silent_ns == 61 * MS
    clock.now_ns += 1
    assert not reader.is_live()
    writer.beat(clock.now_ns, 100 * MS)
    assert reader.is_live(clock.now_ns + 300 * MS)
    assert not reader.is_live(clock.now_ns - 1)  # of the future: written before the machine started anew
    clock.now_ns += 10 * MS
    writer.close()
    assert not reader.is_live() and reader.snapshot().silent_ns == 10 * MS


def test_what_is_written_just_after_the_time_was_asked_is_not_of_the_future() -> None:
    clock = Clock()
    writer, _ = private(GPU)

    def clock_before_a_write() -> int:
        now_ns = clock.now_ns
        clock.now_ns += 1
        writer.beat(clock.now_ns, 20 * MS)
        writer.write_memory(0, replace(MEMORY, at_ns=clock.now_ns))
        return now_ns

    writer.beat(clock.now_ns, 20 * MS)
    reader = RecordReader.of(writer, clock=clock_before_a_write)
    for _ in range(3):
        assert reader.is_live()
        snapshot = reader.snapshot()
        assert snapshot.devices[0].memory.age_ns(snapshot.at_ns) >= 0


def test_what_is_no_record_is_refused(path: Path) -> None:
    foreign, head = "is not what a monitor of pagetide writes", b"pagetide" + struct.pack("=I", LAYOUT_VERSION)
    newer = f"layout version 9, and this pagetide reads version {LAYOUT_VERSION}"
    with RecordWriter.create(path, source="test"):
        whole = path.read_bytes()[: layout.TABLE.at]
    sizes = (0, 1, 11, 12, 4096, layout.DETAIL[0].at, layout.FILE_BYTES - 1, layout.FILE_BYTES + 1)
    for make, sentence in (
        (Path.mkdir, foreign),
        (os.mkfifo, foreign),
        (lambda path: path.write_bytes(b"{}" * 5000), foreign),
        (lambda path: path.write_bytes(head), "is damaged"),
        (lambda path: path.write_bytes(b"pagetide" + struct.pack("=I", 9)), newer),
        *((lambda path, size=size: resized(path, whole, size), "is damaged" if size >= 12 else foreign) for size in sizes),
    ):
        make(path)
        path.chmod(0o700)  # whatever the umask
        with pytest.raises(RecordError, match=sentence) as refusal:
            RecordReader.open(path)
        assert str(path) in str(refusal.value) and not isinstance(refusal.value, RecordMissing)
        path.rmdir() if path.is_dir() else path.unlink()


def resized(path: Path, content: bytes, num_bytes: int) -> None:
    path.write_bytes(content)
    os.truncate(path, num_bytes)


def test_a_header_with_any_wrong_bit_is_refused(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        header = path.read_bytes()[:80]
        length = 32 + header[24]
        for position in range(length):
            with path.open("r+b") as file:
                file.write(header[:position] + bytes([header[position] ^ 1 << position % 8]) + header[position + 1 :])
            with pytest.raises(RecordError):
                RecordReader.open(path)


def said_as_user(uid: int | None, path: Path) -> str:
    """What a process of another user is told that opens the record: its source, or the refusal."""
    here, there = os.pipe()
    if not (child := os.fork()):
        try:
            if uid is not None:
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


def test_who_may_not_read_it_is_told(path: Path) -> None:
    with RecordWriter.create(path, source="test"):
        os.chmod(path, 0)
        said = said_as_user(65534 if os.getuid() == 0 else None, path)
        assert said.startswith(f"RecordError: the record {path} may not be read by this user: join the group")


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
            refusal = f"RecordError: the record {path} belongs to user 1234, neither to root nor to user 4321"
            assert said_as_user(4321, path).startswith(refusal)
            with pytest.raises(RecordError, match="belongs to user 1234"):
                RecordReader.open(path)
            monkeypatch.setattr("pagetide.monitor.record_file.MACHINE_DIR", Path(folder))
            assert said_as_user(4321, path) == "test"


def test_a_record_that_others_may_write_or_that_is_a_link_is_not_believed(path: Path) -> None:
    with RecordWriter.create(path, source="𝄞" * 5000):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o440)  # a reader needs no more
        assert RecordReader.open(path).source == "𝄞" * 255 + "…"
        path.with_name("link").symlink_to(path)
        with pytest.raises(RecordError, match=f"the record {path.with_name('link')} is a symbolic link"):
            RecordReader.open(path.with_name("link"))
        for mode in (0o620, 0o602, 0o666):
            path.chmod(mode)
            with pytest.raises(RecordError, match=r"may be written by others than its owner \(-rw"):
                RecordReader.open(path)


def test_a_record_that_is_not_there_or_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "record", tmp_path / "no" / "record", tmp_path / "file" / "record"):
        with pytest.raises(RecordMissing, match=f"no record at {path}: no monitor is running"):
            RecordReader.open(path)
    (tmp_path / "record").mkdir()
    for path, said in ((tmp_path / "no" / "record", "No such file or directory"), (tmp_path / "record", "Is a direct")):
        with pytest.raises(RecordError, match=f"cannot create the record {path}: {said}"):
            RecordWriter.create(path, source="test")
    assert sorted(os.listdir(tmp_path)) == ["file", "record"]


def test_closing_takes_the_own_file_away_and_no_other_and_is_told(path: Path) -> None:
    first = RecordWriter.create(path, source="first")
    first.set_devices([GPU])
    second = RecordWriter.create(path, source="second")
    first.close()
    first.close()
    reader = RecordReader.open(path)
    assert reader.source == "second"
    path.unlink()
    second.close()  # somebody was first
    reader.close()
    for ask in (reader.devices, reader.snapshot, reader.is_live, lambda: reader.memory(GPU.uuid)):
        with pytest.raises(RecordError, match="reader of the record is closed"):
            ask()
    for act in (lambda: first.write_memory(0, MEMORY), lambda: first.set_devices([]), lambda: first.beat(1, 1)):
        with pytest.raises(RecordError, match="closed"):
            act()
    assert os.listdir(path.parent) == []


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


def written() -> tuple[RecordWriter, layout.SharedBytes]:
    writer, _ = private(GPU)
    writer.write_memory(0, MEMORY)
    writer.write_detail(0, DETAIL)
    return writer, writer._shared


def current(shared: layout.SharedBytes, place: layout.Place) -> memoryview:
    """The bytes in force of a slot: head and payload."""
    start = place.at + (shared.words[place.sequence] & 1) * place.buffer_bytes
    (payload_bytes,) = struct.unpack_from("=I", shared.view, start + 4)
    return shared.view[start : start + 24 + payload_bytes]


PLACES = pytest.mark.parametrize("place", [layout.TABLE, layout.MEMORY[0], layout.DETAIL[0]], ids=["table", "memory", "detail"])


@PLACES
def test_torn_bytes_are_not_taken(place: layout.Place) -> None:
    writer, shared = written()
    devices = (Device(GPU, MEMORY, DETAIL),)
    other = place.at + (1 - (shared.words[place.sequence] & 1)) * place.buffer_bytes
    for killed_at in range(200):  # a writer that is killed at any byte leaves the last record
        shared.view[other + killed_at] = 0xA5
        reader = RecordReader.of(writer)
        assert reader.snapshot().devices == devices
        assert reader.retries == 0
    raw = current(shared, place)
    for position in range(len(raw)):  # any wrong bit is seen
        raw[position] ^= 1 << position % 8
        with pytest.raises(RecordError, match="the monitor's record is damaged"):
            RecordReader.of(writer).snapshot()
        raw[position] ^= 1 << position % 8
    shared.words[place.sequence] += 1  # what a processor with weakly ordered stores may show for an instant
    reader = RecordReader.of(writer)
    with pytest.raises(RecordError, match="is damaged"):
        reader.snapshot()
    assert reader.retries == 100
    shared.words[place.sequence] -= 1
    assert reader.snapshot().devices == devices


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
        reader.devices, reader.snapshot, lambda: reader.memory(GPU.uuid), lambda: reader.detail(GPU.uuid),
        lambda: [reader.memory(info.uuid).is_stale() for info in reader.devices()], reader.is_live,
    ):  # fmt: skip
        with suppress(RecordError, NoSuchDevice):
            ask()  # type: ignore[operator]
    assert isinstance(reader.source, str) and isinstance(reader.monitor_pid, int)


PARTS = [0, 4096, 16_384, 16_384 + 131_072, 278_528, 278_528 + 192, 475_136, 475_136 + 65_536]
WOUNDS = st.tuples(st.sampled_from(PARTS), st.integers(0, 200), st.binary(min_size=1, max_size=40))


@given(st.lists(WOUNDS, min_size=1, max_size=6))
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


def published(place: layout.Place, payload: bytes) -> RecordReader:
    writer, shared = written()
    sequence = 0 if place is layout.TABLE else shared.words[layout.TABLE.sequence]
    shared.publish(place, sequence, payload[: place.room_bytes])
    return RecordReader.of(writer)


@PLACES
@given(st.binary(max_size=168) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_payload_with_a_good_crc_breaks_a_reader(place: layout.Place, payload: bytes) -> None:
    use(published(place, payload))


def test_odd_texts_are_damage_and_odd_bytes_of_memory_may_be_numbers() -> None:
    for payload in [
        b"", b"[", b"[" * 65_000, b"9" * 65_000, b"[[" + b"9" * 4000 + b',1,"GPU-8a6e","0","gpu",null,null,null]]',
        b'[[-1,1,"GPU-8a6e","0","gpu",null,null,null]]', b'[[0,1,"GPU-8a6e","0","cpu",null,null,null]]',
        b'[[0,1,"a","0","gpu",null,null,null],[0,1,"a","0","gpu",null,null,null]]', b"\xff\xfe", b"1e999", b"\0" * 57,
        b"\xff" * 168, b'[0,0,NaN,Infinity,null,null,[[1,2,"",null,null,null,null]],[],null]', b"[0,0,1,1,1,1,{},[],null]",
    ]:  # fmt: skip
        for place in (layout.TABLE, layout.DETAIL[0]):
            reader = published(place, payload)
            use(reader)
            with pytest.raises(RecordError, match="is damaged"):
                reader.snapshot()
        reader = published(layout.MEMORY[0], payload)
        use(reader)
        with suppress(RecordError):
            memory = reader.memory(GPU.uuid)
            assert {type(told) for told in (memory.at_ns, memory.total_bytes or 0, memory.free_bytes or 0)} == {int}


FIRST, SECOND = memory_of(1, GPU.uuid), memory_of(2, GPU.uuid)
LENGTHS = [0, 1, 4096, 4100, layout.TABLE.at, layout.MEMORY[0].at + 100, layout.DETAIL[0].at + 1, layout.FILE_BYTES - 1]


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


def in_file(path: Path, clock: Clock) -> RecordWriter:
    writer = RecordWriter.create(path, source="test", mode=0o640, gid=os.getgid())
    writer.set_devices([HOST, GPU])
    writer.write_memory(1, FIRST)
    writer.write_detail(1, DETAIL)
    writer.beat(clock.now_ns, 20 * MS)
    return writer


@pytest.mark.parametrize("harm", HARMS, ids=HARM_IDS)
def test_a_harmed_file_is_laid_anew_and_readers_go_over_to_it(path: Path, harm: Callable[[Path], None]) -> None:
    clock = Clock()
    with in_file(path, clock) as writer, RecordReader.open(path, clock=clock) as reader:
        before = reader.snapshot(clock.now_ns)
        assert writer.mend() is None
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, os.getgid())
        harm(path)
        assert reader.snapshot(clock.now_ns).devices == before.devices
        assert reader.memory(GPU.uuid) == FIRST
        assert writer.mend() is not None
        assert writer.mend() is None
        assert RecordReader.open(path, clock=clock).snapshot(clock.now_ns) == before
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, os.getgid())
        assert path.stat().st_blocks * 512 < 1 << 20
        writer.write_memory(1, SECOND)
        clock.now_ns += 20 * MS  # a reader looks for a successor that often
        writer.beat(clock.now_ns, 20 * MS)
        assert RecordReader.open(path).memory(GPU.uuid) == reader.memory(GPU.uuid) == SECOND
        assert reader.is_live()
        assert (reader.trouble, reader.monitor_pid) == (None, os.getpid())
    assert os.listdir(path.parent) == []


def test_a_reader_that_has_read_nothing_waits_for_the_new_file(path: Path) -> None:
    clock = Clock()
    with in_file(path, clock) as writer:
        for length in LENGTHS:
            reader = RecordReader.open(path, clock=clock)
            os.truncate(path, length)
            looks = iter(range(1000))

            def clock_that_goes_on(looks: Iterator[int] = looks) -> int:
                clock.now_ns += 5 * MS
                if next(looks) == 5:
                    writer.mend()
                return clock.now_ns

            reader._clock = clock_that_goes_on
            assert reader.detail(GPU.uuid) == DETAIL
            reader.close()
            writer.mend()


def test_a_file_that_stays_cut_is_an_error_of_who_has_read_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.monitor.record._PAUSE_S", 0.0)
    with in_file(path, Clock()), RecordReader.open(path) as reader:
        os.truncate(path, 5000)
        assert not reader.is_live()
        for ask in (reader.devices, reader.snapshot, lambda: reader.memory(GPU.uuid)):
            with pytest.raises(RecordError, match="is damaged"):
                ask()


def test_another_file_in_its_place_is_told_and_left_alone(path: Path) -> None:
    with in_file(path, Clock()) as writer:
        path.rename(path.with_name("moved"))
        path.write_text("mine")
        with pytest.raises(RecordError, match=f"another file lies at {path}, so no reader finds what this monitor"):
            writer.mend()
        assert path.read_text() == "mine"
        path.unlink()
        assert writer.mend() == "was removed"
        assert RecordReader.open(path).memory(GPU.uuid) == FIRST


def test_a_full_file_system_is_told_and_the_file_is_laid_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with in_file(path, Clock()) as writer:
        descriptors = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(RecordError, match=f"cannot make room in the record {path}: No space left"):
                writer.set_devices([HOST, GPU, replace(GPU, uuid="GPU-2")])
            assert RecordReader.open(path).devices() == (HOST, GPU)
            with pytest.raises(RecordError, match=r"cannot create the record .*: No space left"):
                RecordWriter.create(path.with_name("other"), source="test")
            os.truncate(path, 0)
            for _ in range(3):
                with pytest.raises(RecordError, match=f"cannot create the record {path}: No space left on device"):
                    writer.mend()
        assert os.listdir(path.parent) == ["record"]
        assert writer.mend() == f"has 0 bytes instead of {layout.FILE_BYTES:,}"
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert RecordReader.open(path).memory(GPU.uuid) == FIRST
    assert RecordWriter.private(source="test").mend() is None
    with pytest.raises(RecordError, match="closed"):
        writer.mend()


@pytest.mark.parametrize("written_bytes", [None, 3], ids=["refused", "short"])
def test_a_write_that_fails_is_mended(path: Path, written_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: bytes, at: int) -> int:
        if written_bytes is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written_bytes

    with in_file(path, Clock()) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", pwrite)
            writer.write_memory(1, SECOND)
            assert RecordReader.of(writer).memory(GPU.uuid) == SECOND
        said = "Input/output error" if written_bytes is None else "No space left on device"
        assert writer.mend() == f"could not be written ({said})"
        assert RecordReader.open(path).memory(GPU.uuid) == SECOND


def test_a_file_that_cannot_be_read_is_harm_to_the_writer_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pread(fd: int, length: int, at: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with in_file(path, Clock()) as writer, RecordReader.open(path) as reader:
        before = reader.snapshot(0)
        reader._record._read = lambda length, at: pread(0, length, at)
        assert reader.snapshot(0).devices == before.devices
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", pread)
            assert (writer.mend() or "").startswith("cannot be read (Stale")
        assert writer.mend() is None


def test_while_the_file_is_harmed_and_mended_threads_lose_nothing_and_read_nothing_torn(path: Path) -> None:
    infos = [device(i) for i in range(4)]
    with RecordWriter.create(path, source="test") as writer, ThreadPoolExecutor(6) as pool, ExitStack() as opened:
        writer.set_devices(infos)

        def write(position: int) -> int:
            count = 0
            while count < 400 or not all(each.done() for each in reading):
                count += 1
                writer.write_memory(position, memory_of(count, str(position)))
            writer.write_detail(position, replace(DETAIL, at_ns=position))
            return count

        def read(reader: RecordReader) -> None:
            for _ in range(100):
                for position, info in enumerate(infos):
                    memory = reader.memory(info.uuid)
                    assert not memory.polls or memory == memory_of(memory.polls, str(position))

        readers = [opened.enter_context(RecordReader.open(path)) for _ in range(2)]
        reading = [pool.submit(read, reader) for reader in readers]
        writing = [pool.submit(write, position) for position in range(4)]
        rng, mended = random.Random(0), 0
        while not all(each.done() for each in writing):
            path.unlink() if rng.random() < 0.2 else os.truncate(path, rng.choice(LENGTHS))
            mended += writer.mend() is not None
        assert mended and [each.result() for each in reading] == [None, None]
        writer.mend()
        devices = RecordReader.open(path).snapshot().devices
        last = [memory_of(each.result(), str(position)) for position, each in enumerate(writing)]
        assert [device.memory for device in devices] == last
        assert [device.detail.at_ns for device in devices] == [0, 1, 2, 3]
