"""The record: a file in shared memory that one monitor writes and any number of processes read, without a lock.

`record_layout` tells how its bytes lie and why no reader ever sees half a record; here is the life of it: made, taken
over, ended, followed from one monitor to the next.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from . import record_codec as codec
from . import record_layout as layout
from .errors import NoSuchDevice, RecordError, RecordMissing
from .runtime_dir import MACHINE_DIR
from .snapshot import (
    STALE_AFTER_INTERVALS,
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceMemory,
    Snapshot,
)

LAYOUT_VERSION = layout.LAYOUT_VERSION
MAX_DEVICES = layout.MAX_DEVICES
MAX_HISTORY = codec.MAX_HISTORY

_TRIES = 100  # few copies in a thousand are disturbed; a hundred in a row are damage
_LOOK_EVERY_NS = 20_000_000  # how often a reader of a silent monitor looks for its successor

# A pipe that lies there must not hold us up, nor a link lead us elsewhere.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)

T = TypeVar("T")


class _Seat(NamedTuple):
    """Where a device is written, for as long as it stays in the record."""

    slot: int
    generation: int


class RecordWriter:
    """The writing end; a record has one.

    A device is named by its position in what `set_devices` was given last. Different devices may be written by different
    threads at the same time, since they share nothing; each by one thread at a time, and none while `set_devices` runs.
    Everything but `close` raises RecordError once the record is closed.
    """

    def __init__(self, memory: mmap.mmap, source: str, file: _File | None) -> None:
        """For `create` and `private`."""
        self._shared: layout.SharedBytes | None = layout.SharedBytes(memoryview(memory))
        self._shared.write_header(os.getpid(), _start_ticks(), time.monotonic_ns(), source)
        self._file = file
        self._seats: dict[str, _Seat] = {}  # by uuid
        self._by_position: tuple[_Seat, ...] = ()
        self.set_devices(())

    @classmethod
    def create(cls, path: str | Path, *, source: str, mode: int = 0o600, gid: int | None = None) -> Self:
        """A new record at `path`, in the place of one that an earlier monitor left there.

        The file gets its name when it is complete, and an old one loses only its name: who reads either meets neither
        half a record nor one cut short. That no two monitors do this at once is the caller's affair. Raises RecordError.
        """
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.new")
        try:
            unfinished.unlink(missing_ok=True)  # of a monitor that was killed while it stood here
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(fd, layout.FILE_BYTES)
                _reserve(fd, 0, layout.COMMON_BYTES)
                file = _File(path, fd, _identity(os.fstat(fd)))
                writer = cls(mmap.mmap(fd, layout.FILE_BYTES), source, file)
                if gid is not None:
                    os.fchown(fd, -1, gid)
                os.fchmod(fd, mode)
                os.replace(unfinished, path)
            except BaseException:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RecordError(f"cannot create the record {path}: {error.strerror}") from error
        return writer

    @classmethod
    def private(cls, *, source: str) -> Self:
        """A record without a file, for `RecordReader.of` in the same process."""
        return cls(mmap.mmap(-1, layout.FILE_BYTES), source, None)

    def set_devices(self, infos: Sequence[DeviceInfo]) -> None:
        """Make these the devices of the record; a new one has no answers yet.

        Raises RecordError for more than MAX_DEVICES, for a uuid that comes twice, and where the file system is full;
        then nothing has changed.
        """
        shared = self._open()
        if len(infos) > MAX_DEVICES:
            raise RecordError(f"the record has room for {MAX_DEVICES} devices, got {len(infos)}: watch fewer")
        if len({info.uuid for info in infos}) < len(infos):
            raise RecordError(f"a device comes twice in {[info.uuid for info in infos]}")
        generation = shared.words[layout.TABLE.sequence] + 1
        new = [info.uuid for info in infos if info.uuid not in self._seats]
        unused = set(range(layout.NUM_SLOTS)) - {seat.slot for seat in self._seats.values()}
        given = {uuid: _Seat(slot, generation) for uuid, slot in zip(new, sorted(unused), strict=False)}
        known = self._seats | given
        table = codec.table_to_bytes([(*known[info.uuid], info) for info in infos], layout.TABLE.room_bytes)
        if self._file is not None:
            self._file.reserve_details(seat.slot for seat in given.values())
        interval_ns = shared.words[layout.BEAT_INTERVAL_NS]
        for seat in given.values():
            self._publish_memory(shared, seat, DeviceMemory(0, interval_ns, None, None, None, 0, 0))
            self._publish_detail(shared, seat, DeviceDetail(0, interval_ns, DetailReading()))
        shared.publish(layout.TABLE, 0, table)
        seats = {info.uuid: known[info.uuid] for info in infos}
        self._seats, self._by_position = seats, tuple(seats.values())

    def write_memory(self, position: int, memory: DeviceMemory) -> None:
        """Publish the numbers of one device; an error's text is cut to 96 bytes.

        Raises NoSuchDevice for a position without a device, RecordError for numbers of more than 64 bits.
        """
        self._publish_memory(self._open(), self._seat(position), memory)

    def write_detail(self, position: int, detail: DeviceDetail) -> None:
        """Publish load, processes and history (MAX_HISTORY samples) of one device.

        Command lines are cut to 512 characters. Where the processes do not fit into 64 KiB, those with the least memory
        are left out, and the error says how many. Raises NoSuchDevice for a position without a device.
        """
        self._publish_detail(self._open(), self._seat(position), detail)

    def beat(self, at_ns: int, interval_ns: int) -> None:
        """Say that the monitor lives, and will say so again in `interval_ns`. Raises ValueError for one below 1."""
        if interval_ns < 1:
            raise ValueError(f"the interval of a monitor must be at least 1 ns, got {interval_ns}")
        words = self._open().words
        words[layout.BEAT_INTERVAL_NS] = interval_ns
        words[layout.BEAT_AT_NS] = at_ns

    def close(self) -> None:
        """Tell readers that the monitor has ended, and remove the file unless it is another's by now. Idempotent."""
        if self._shared is None:
            return
        self._shared.words[layout.ENDED] = 1
        self._shared = None  # a thread that writes just now, and readers of a private record, hold it still
        if self._file is not None:
            self._file.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> layout.SharedBytes:
        if self._shared is None:
            raise RecordError("the record is closed: its monitor has ended")
        return self._shared

    def _seat(self, position: int) -> _Seat:
        if not 0 <= position < len(self._by_position):
            raise NoSuchDevice(f"the record has {len(self._by_position)} devices, none at position {position}")
        return self._by_position[position]

    @staticmethod
    def _publish_memory(shared: layout.SharedBytes, seat: _Seat, memory: DeviceMemory) -> None:
        shared.publish(layout.MEMORY[seat.slot], seat.generation, codec.memory_to_bytes(memory))

    @staticmethod
    def _publish_detail(shared: layout.SharedBytes, seat: _Seat, detail: DeviceDetail) -> None:
        place = layout.DETAIL[seat.slot]
        shared.publish(place, seat.generation, codec.detail_to_bytes(detail, place.room_bytes))


class RecordReader:
    """The reading end: any number of them, in any process, unnoticed by the writer.

    When the monitor falls silent, the reader looks for a successor's record at its path, and goes on with that. Until
    there is one it gives the last numbers, whose times tell that they are old. Take the time after reading, not before:
    numbers from the future count as stale. Several threads may share a reader. Reading raises RecordError where the
    record is damaged, and once the reader is closed.

    Attributes:
        retries: how often a copy was disturbed by the writer, and made again.
        trouble: why the record that lies at the path now is not read; None where nothing is wrong.
    """

    def __init__(self, record: _Record, path: Path | None, clock: Callable[[], int]) -> None:
        """For `open` and `of`."""
        self._record: _Record | None = record
        self._path = path
        self._clock = clock
        self._looked_ns = clock()
        self.retries = 0
        self.trouble: str | None = None

    @classmethod
    def open(cls, path: str | Path, *, clock: Callable[[], int] = time.monotonic_ns) -> Self:
        """Read the record at `path`.

        Raises RecordMissing where there is none, RecordError where it cannot be read, or could be another user's bait:
        not root's nor this user's (except in the machine's own directory), a link, or writable by others.
        """
        return cls(_map_record(Path(path)), Path(path), clock)

    @classmethod
    def of(cls, writer: RecordWriter, *, clock: Callable[[], int] = time.monotonic_ns) -> Self:
        """Read what a writer in this process writes, also after it was closed."""
        return cls(_Record(writer._open().read_only(), "the monitor's record", None), None, clock)

    @property
    def monitor_pid(self) -> int:
        """The process that writes, as it sees itself."""
        return self._current().pid

    @property
    def monitor_start_ticks(self) -> int | None:
        """When that process began, in clock ticks as in /proc/PID/stat: if they differ, the pid is another's now."""
        return self._current().start_ticks

    @property
    def started_ns(self) -> int:
        """When the record was made, monotonic."""
        return self._current().started_ns

    @property
    def source(self) -> str:
        """Where the numbers come from: "nvml+host"."""
        return self._current().source

    def is_live(self, now_ns: int | None = None) -> bool:
        """Whether a monitor is at work: not ended, and heard of within three of its intervals.

        True also where no device answers: of that, the times of their numbers tell. False before its first beat.
        """
        return self._current(now_ns).is_live(self._clock, now_ns)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are watched."""
        return self._settled(self._current(), lambda table: table).infos

    def memory(self, uuid: str) -> DeviceMemory:
        """The newest numbers of one device; no system call while the monitor lives. Raises NoSuchDevice."""
        return self._settled(self._current(), lambda table: table.entry(uuid).memory.read())

    def detail(self, uuid: str) -> DeviceDetail:
        """Load, processes and history of one device. Raises NoSuchDevice."""
        return self._settled(self._current(), lambda table: table.entry(uuid).detail.read())

    def snapshot(self, now_ns: int | None = None) -> Snapshot:
        """Everything; `now_ns` is its time, by default the time after reading. Each slot is consistent by itself."""
        record = self._current(now_ns)
        devices = self._settled(record, _all_devices)
        at_ns = self._clock() if now_ns is None else now_ns
        return Snapshot(
            at_ns, record.source, record.pid, record.started_ns, devices,
            silent_ns=record.silent_ns(self._clock, now_ns), unix_seconds=time.time(),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the record. Idempotent."""
        self._record = None  # unmapped when the last thread that reads lets go, since before would be a SIGSEGV

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self, now_ns: int | None = None) -> _Record:
        """The record to read: its successor, if its monitor is silent and there is one."""
        record = self._record
        if record is None:
            raise RecordError("the reader of the record is closed")
        if self._path is None or record.is_live(self._clock, now_ns):
            return record
        now_ns = self._clock() if now_ns is None else now_ns
        if now_ns - self._looked_ns < _LOOK_EVERY_NS:
            return record
        self._looked_ns = now_ns
        successor = self._successor(self._path, record)
        if self._record is record:  # no other thread closed it, or was first
            self._record = successor
        return successor

    def _successor(self, path: Path, record: _Record) -> _Record:
        """What lies at the path now; `record` where that is the same, or nothing, or cannot be read."""
        self.trouble = None
        try:
            if _identity(os.stat(path)) == record.identity:
                return record
            successor = _map_record(path)
        except (FileNotFoundError, RecordMissing):
            return record
        except (OSError, RecordError) as error:
            self.trouble = str(error)
            return record
        return successor if successor.has_beaten() else record  # one that has not may not know its devices yet

    def _settled(self, record: _Record, read: Callable[[_Table], T | None]) -> T:
        """What `read` finds by the table in force, as soon as the writer lets it."""
        for _ in range(_TRIES):
            try:
                table = record.table.read()
                found = None if table is None else read(table)
            except codec.Malformed:
                break
            if found is not None:
                return found
            self.retries += 1
        raise _damaged(record.name)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One device of the table, with where it is read."""

    info: DeviceInfo
    memory: layout.Cell[DeviceMemory]
    detail: layout.Cell[DeviceDetail]


@dataclass(frozen=True, slots=True)
class _Table:
    """The devices of a record."""

    infos: tuple[DeviceInfo, ...]
    entries: dict[str, _Entry]

    def entry(self, uuid: str) -> _Entry:
        """Raises NoSuchDevice, which names those that there are."""
        entry = self.entries.get(uuid)
        if entry is None:
            there = ", ".join(f"{info.uuid} ({info.index})" for info in self.infos) or "none"
            raise NoSuchDevice(f"no device {uuid!r} is watched; there are: {there}")
        return entry


def _read_table(shared: layout.SharedBytes, payload: bytes) -> _Table:
    """Raises Malformed."""
    entries = {}
    for slot, generation, info in codec.table_from_bytes(payload):
        if not 0 <= slot < layout.NUM_SLOTS:
            raise codec.Malformed
        memory = shared.cell(layout.MEMORY[slot], generation, codec.memory_from_bytes)
        detail = shared.cell(layout.DETAIL[slot], generation, codec.detail_from_bytes)
        entries[info.uuid] = _Entry(info, memory, detail)
    return _Table(tuple(entry.info for entry in entries.values()), entries)


def _all_devices(table: _Table) -> tuple[Device, ...] | None:
    """None if one of them could not be read: try again."""
    devices = []
    for entry in table.entries.values():
        memory, detail = entry.memory.read(), entry.detail.read()
        if memory is None or detail is None:
            return None
        devices.append(Device(entry.info, memory, detail))
    return tuple(devices)


class _Record:
    """A record as it is read. `identity`: of its file; no other file gets the same while this one is mapped."""

    def __init__(self, shared: layout.SharedBytes, name: str, identity: tuple[int, int] | None) -> None:
        """Raises RecordError where the header is damaged."""
        self.name = name
        self.identity = identity
        try:
            self.pid, self.start_ticks, self.started_ns, self.source = shared.read_header()
        except codec.Malformed as error:
            raise _damaged(name) from error
        self.table = shared.cell(layout.TABLE, 0, partial(_read_table, shared))
        self._words = shared.words

    def has_beaten(self) -> bool:
        return self._words[layout.BEAT_INTERVAL_NS] > 0

    def is_live(self, clock: Callable[[], int], now_ns: int | None) -> bool:
        """Not ended, and beaten lately."""
        beat_at_ns = self._words[layout.BEAT_AT_NS]  # before the clock: a beat in between would be of the future
        age_ns = (clock() if now_ns is None else now_ns) - beat_at_ns
        if not 0 <= age_ns <= STALE_AFTER_INTERVALS * self._words[layout.BEAT_INTERVAL_NS]:
            return False
        return not self._words[layout.ENDED]

    def silent_ns(self, clock: Callable[[], int], now_ns: int | None) -> int | None:
        """For how long nothing was heard of the monitor; None while it is live."""
        if self.is_live(clock, now_ns):
            return None
        now_ns = clock() if now_ns is None else now_ns
        return max(0, now_ns - max(self._words[layout.BEAT_AT_NS], self.started_ns))


@dataclass(frozen=True, slots=True)
class _File:
    """The file behind a record that is written."""

    path: Path
    fd: int  # kept, because room in the file is reserved as devices come
    identity: tuple[int, int]

    def reserve_details(self, slots: Iterable[int]) -> None:
        """Have room for the details of these slots. Raises RecordError."""
        try:
            for slot in slots:
                _reserve(self.fd, layout.DETAIL[slot].at, 2 * layout.DETAIL[slot].buffer_bytes)
        except OSError as error:
            raise RecordError(f"cannot make room in the record {self.path}: {error.strerror}") from error

    def remove(self) -> None:
        """Close the file, and take its name away unless that is another's by now."""
        try:
            if _identity(os.stat(self.path)) == self.identity:
                os.unlink(self.path)
        except FileNotFoundError:  # somebody tidied up
            pass
        finally:
            os.close(self.fd)


def _map_record(path: Path) -> _Record:
    """Raises RecordMissing, RecordError.

    No content can harm who reads it. A file cut short later would (SIGBUS), but monitors replace theirs and never do
    that, and nobody else may write it: whose file it is, is looked at before anything of it is believed.
    """
    name = f"the record {path}"
    try:
        fd = os.open(path, _OPEN_FLAGS)
        try:
            status = os.fstat(fd)
            _check_trusted(path, status, name)
            layout.check_version(os.read(fd, layout.VERSION_BYTES) if stat.S_ISREG(status.st_mode) else b"", name)
            if status.st_size != layout.FILE_BYTES:
                raise _damaged(name)
            # has a descriptor of its own until unmapped
            memory = mmap.mmap(fd, layout.FILE_BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecordMissing(
            f"there is no record at {path}: no monitor runs; `vram-monitor serve` starts one"
        ) from error
    except PermissionError as error:
        raise RecordError(
            f"{name} may not be read by this user: join the group that the monitor was given, or start another monitor"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: it shrank meanwhile
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise RecordError(f"{name} is a symbolic link, which no monitor makes: remove it") from error
        raise RecordError(f"cannot read {name}: {error}") from error
    return _Record(layout.SharedBytes(memoryview(memory)), name, _identity(status))


def _check_trusted(path: Path, status: os.stat_result, name: str) -> None:
    """Raises RecordError for a file that somebody else than root and this user could have laid there, or may change.

    What lies in the machine's own directory was let in by root, whoever runs that monitor.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such owners
        return
    user = os.geteuid()
    if path.parent != MACHINE_DIR and status.st_uid not in (0, user):
        raise RecordError(
            f"{name} belongs to user {status.st_uid}, neither to root nor to user {user}, who reads it: it is not believed. "
            f"A monitor for everybody lies in {MACHINE_DIR} (`vram-monitor serve --group GROUP`)"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RecordError(
            f"{name} may be written by others than its owner ({stat.filemode(status.st_mode)}): it is not believed; "
            "start the monitor anew"
        )


def _damaged(name: str) -> RecordError:
    return RecordError(f"{name} is damaged: start the monitor anew")


def _start_ticks() -> int | None:
    """When this process began, in clock ticks since the machine did; None where there is no /proc."""
    try:
        return int(
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        )  # field 22; the second ends with ")"
    except FileNotFoundError:
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _reserve(fd: int, start: int, length: int) -> None:
    """Have room for these bytes of a file, since a store that finds none is a SIGBUS. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, length)
