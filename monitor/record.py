"""The record: what one monitor writes and any number of processes read, without a lock, from a file in shared memory.

`record_layout` tells how its bytes lie and why no reader ever sees half a record, `record_file` how they get from process to
process, `record_view` what a reader knows of one. Here is the life of a record: made, taken over, ended, followed from one
monitor to the next.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from . import record_codec as codec
from . import record_layout as layout
from .errors import NoSuchDevice, RecordError, RecordMissing
from .record_file import RecordFile, damaged
from .record_view import LOOK_EVERY_NS, RecordView, Table, all_devices, open_view
from .snapshot import (
    DetailReading,
    DeviceDetail,
    DeviceInfo,
    DeviceMemory,
    Snapshot,
)

LAYOUT_VERSION = layout.LAYOUT_VERSION
MAX_DEVICES = layout.MAX_DEVICES
MAX_HISTORY = codec.MAX_HISTORY

_TRIES = 100  # few copies in a thousand are disturbed; a hundred in a row are damage
_PAUSES, _PAUSE_S = 300, 0.005  # a harmed file is waited for so long: its monitor lays another within a second

T = TypeVar("T")


class _Seat(NamedTuple):
    """Where a device is written, for as long as it stays in the record."""

    slot: int
    generation: int


class RecordWriter:
    """The writing end; a record has one.

    A device is named by its position in what `set_devices` was given last. Different devices may be written by different
    threads at the same time; each by one thread at a time, and none while `set_devices` runs. Everything but `close` raises
    RecordError once the record is closed.
    """

    def __init__(self, source: str) -> None:
        """For `create` and `private`."""
        self._shared: layout.SharedBytes | None = layout.SharedBytes(memoryview(mmap.mmap(-1, layout.FILE_BYTES)))
        self._shared.write_header(os.getpid(), _start_ticks(), time.monotonic_ns(), source)
        self._file: RecordFile | None = None
        self._lay: Callable[[], RecordFile] | None = None
        self._lock = threading.Lock()  # so that the file has what the memory has, also while another is laid
        self._seats: dict[str, _Seat] = {}  # by uuid
        self._by_position: tuple[_Seat, ...] = ()
        self.set_devices(())

    @classmethod
    def create(cls, path: str | Path, *, source: str, mode: int = 0o600, gid: int | None = None) -> Self:
        """A new record at `path`, in the place of one that an earlier monitor left there.

        That no two monitors do this at once is the caller's affair. Raises RecordError.
        """
        writer = cls(source)
        writer._lay = partial(RecordFile.create, Path(path), writer._open(), mode, gid)
        writer._file = writer._lay()
        return writer

    @classmethod
    def private(cls, *, source: str) -> Self:
        """A record without a file, for `RecordReader.of` in the same process."""
        return cls(source)

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
        with self._lock:
            if self._file is not None:
                self._file.reserve_details(seat.slot for seat in given.values())
        interval_ns = shared.words[layout.BEAT_INTERVAL_NS]
        for seat in given.values():
            self._publish_memory(shared, seat, DeviceMemory(0, interval_ns, None, None, None, 0, 0))
            self._publish_detail(shared, seat, DeviceDetail(0, interval_ns, DetailReading()))
        self._publish(shared, layout.TABLE, 0, table)
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
        shared = self._open()
        with self._lock:
            self._update(shared.store(layout.BEAT_AT_NS, at_ns, interval_ns))

    def mend(self) -> str | None:
        """Lay a new file at the path if the old one was cut short, removed or written by another process.

        Its readers go over to the new one, and lose nothing. Returns what had become of the old file, as the end of a
        sentence; None where it is as it was written. Call it now and then. Raises RecordError where no new file can be laid.
        """
        self._open()
        with self._lock:
            if self._file is None or self._lay is None or (harm := self._file.harm()) is None:
                return None
            harmed, self._file = self._file, self._lay()
            harmed.abandon()
            return harm

    def close(self) -> None:
        """Tell readers that the monitor has ended, and remove the file unless it is another's by now. Idempotent."""
        if self._shared is None:
            return
        with self._lock:
            self._update(self._shared.store(layout.ENDED, 1))
            self._shared = None  # a thread that writes just now, and readers of a private record, hold it still
            if self._file is not None:
                self._file.remove()
                self._file = None

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

    def _publish_memory(self, shared: layout.SharedBytes, seat: _Seat, memory: DeviceMemory) -> None:
        self._publish(shared, layout.MEMORY[seat.slot], seat.generation, codec.memory_to_bytes(memory))

    def _publish_detail(self, shared: layout.SharedBytes, seat: _Seat, detail: DeviceDetail) -> None:
        place = layout.DETAIL[seat.slot]
        self._publish(shared, place, seat.generation, codec.detail_to_bytes(detail, place.room_bytes))

    def _publish(self, shared: layout.SharedBytes, place: layout.Place, generation: int, payload: bytes) -> None:
        with self._lock:
            self._update(*shared.publish(place, generation, payload))

    def _update(self, *parts: layout.Part) -> None:
        """With the lock held."""
        if self._file is not None:
            self._file.update(*parts)


class RecordReader:
    """The reading end: any number of them, in any process, unnoticed by the writer.

    When the monitor falls silent, or its file is cut short or damaged, the reader looks for a successor's record at its path,
    and goes on with that. Until there is one it gives the last numbers, whose times tell that they are old. Take the time
    after reading, not before: numbers from the future count as stale. Several threads may share a reader. Reading raises
    RecordError for what cannot be read and was not read before, and once the reader is closed.

    Attributes:
        retries: how often a copy was disturbed by the writer, and made again.
        trouble: why the record that lies at the path now is not read; None where nothing is wrong.
    """

    def __init__(self, record: RecordView, path: Path | None, clock: Callable[[], int]) -> None:
        """For `open` and `of`."""
        self._record: RecordView | None = record
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
        return cls(open_view(Path(path)), Path(path), clock)

    @classmethod
    def of(cls, writer: RecordWriter, *, clock: Callable[[], int] = time.monotonic_ns) -> Self:
        """Read what a writer in this process has in its memory, also after it was closed."""
        return cls(RecordView(writer._open(), "the monitor's record"), None, clock)

    @property
    def monitor_pid(self) -> int:
        """The process that writes, as it sees itself."""
        return self._current()[0].pid

    @property
    def monitor_start_ticks(self) -> int | None:
        """When that process began, in clock ticks as in /proc/PID/stat: if they differ, the pid is another's now."""
        return self._current()[0].start_ticks

    @property
    def started_ns(self) -> int:
        """When the record was made, monotonic."""
        return self._current()[0].started_ns

    @property
    def source(self) -> str:
        """Where the numbers come from: "nvml+host"."""
        return self._current()[0].source

    def is_live(self, now_ns: int | None = None) -> bool:
        """Whether a monitor is at work: not ended, and heard of within three of its intervals.

        True also where no device answers: of that, the times of their numbers tell. False before its first beat.
        """
        record, words = self._current(now_ns)
        return record.is_live(words, self._clock, now_ns)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are watched."""
        return self._settled(lambda table, _: table.infos)[1]

    def memory(self, uuid: str) -> DeviceMemory:
        """The newest numbers of one device. Raises NoSuchDevice.

        Without a system call until the monitor's next answer is due: what was read last is the newest until then.
        """
        record = self._record
        if record is not None and self._path is not None:
            memory = record.current_memory(uuid, self._clock())
            if memory is not None:
                return memory
        return self._settled(lambda table, words: table.entry(uuid).memory.read(words))[1]

    def detail(self, uuid: str) -> DeviceDetail:
        """Load, processes and history of one device. Raises NoSuchDevice."""
        return self._settled(lambda table, words: table.entry(uuid).detail.read(words))[1]

    def snapshot(self, now_ns: int | None = None) -> Snapshot:
        """Everything; `now_ns` is its time, by default the time after reading. Each slot is consistent by itself."""
        record, devices = self._settled(all_devices, now_ns)
        at_ns = self._clock() if now_ns is None else now_ns
        return Snapshot(
            at_ns, record.source, record.pid, record.started_ns, devices,
            silent_ns=record.silent_ns(self._clock, now_ns), unix_seconds=time.time(),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the record. Idempotent."""
        self._record = None  # closed when the last thread that reads lets go

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self, now_ns: int | None = None) -> tuple[RecordView, memoryview | None]:
        """The record to read, with its words: its successor, if its monitor is silent and there is one."""
        record = self._record
        if record is None:
            raise RecordError("the reader of the record is closed")
        words = record.words()
        if record.is_live(words, self._clock, now_ns):
            return record, words
        words = record.words()  # a heartbeat that was just being stored may have looked like one of another time
        if record.is_live(words, self._clock, now_ns):
            return record, words
        now_ns = self._clock() if now_ns is None else now_ns
        if self._path is None or now_ns - self._looked_ns < LOOK_EVERY_NS:
            return record, words
        self._looked_ns = now_ns
        successor = self._successor(self._path, record)
        if self._record is record:  # no other thread closed it, or was first
            self._record = successor
        return successor, successor.words()

    def _successor(self, path: Path, record: RecordView) -> RecordView:
        """What lies at the path now; `record` where that is the same, or nothing, or cannot be read."""
        self.trouble = None
        try:
            if record.is_at(path):
                return record
            successor = open_view(path)
        except (FileNotFoundError, RecordMissing):
            return record
        except (OSError, RecordError) as error:
            self.trouble = str(error)
            return record
        return successor if successor.has_beaten() else record  # one that has not may not know its devices yet

    def _settled(
        self, read: Callable[[Table, memoryview | None], T | None], now_ns: int | None = None
    ) -> tuple[RecordView, T]:
        """What `read` finds by the table in force, as soon as the writer lets it, and in which record."""
        for _ in range(1 if self._path is None else _PAUSES):
            record, words = self._current(now_ns)
            found = self._found(record, words, read)
            if found is not None:
                return record, found
            time.sleep(_PAUSE_S)
        raise damaged(record.name)

    def _found(
        self, record: RecordView, words: memoryview | None, read: Callable[[Table, memoryview | None], T | None]
    ) -> T | None:
        """What `read` finds in a record, or found there last; None where that is nothing."""
        for _ in range(_TRIES):
            try:
                table = record.table.read(words)
                found = None if table is None else read(table, words)
            except (codec.Malformed, layout.Truncated, OSError):
                break
            if found is not None:
                return found
            self.retries += 1
            words = record.words()
        try:
            table = record.table.read(None)
            return None if table is None else read(table, None)
        except layout.Truncated:
            return None


def _start_ticks() -> int | None:
    """When this process began, in clock ticks since the machine did; None where there is no /proc."""
    try:
        return int(
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        )  # field 22; the second ends with ")"
    except FileNotFoundError:
        return None
