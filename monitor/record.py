"""The record: a file in shared memory that one monitor writes and any number of processes read, without a lock.

`record_layout` defines the bytes and why no reader sees a torn record, `record_file` shares them between processes, and
`record_view` is a reader's view of one record.
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
from .snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceMemory, Snapshot

LAYOUT_VERSION = layout.LAYOUT_VERSION
MAX_DEVICES = layout.MAX_DEVICES
MAX_HISTORY = codec.MAX_HISTORY

_TRIES = 100  # few copies in a thousand are disturbed; a hundred in a row mean damage
# How long to wait for a damaged file's replacement, which its monitor makes within a second.
_PAUSES, _PAUSE_S = 300, 0.005

T = TypeVar("T")


class _DeviceSlot(NamedTuple):
    """The slot of a device, for as long as the device stays in the record."""

    number: int
    generation: int


class RecordWriter:
    """The writer of a record; a record has one.

    A device is named by its position in the last `set_devices`. Different threads may write different devices at the
    same time. Each device is written by one thread at a time, and none while `set_devices` runs. All methods but
    `close` raise RecordError once the record is closed.
    """

    def __init__(self, source: str) -> None:
        """For `create` and `private`."""
        self._shared: layout.SharedBytes | None = layout.SharedBytes(memoryview(mmap.mmap(-1, layout.FILE_BYTES)))
        self._shared.write_header(os.getpid(), time.monotonic_ns(), source)
        self._file: RecordFile | None = None
        self._lay: Callable[[], RecordFile] | None = None
        self._lock = threading.Lock()  # keeps file and memory equal, also while the file is replaced
        self._slots: dict[str, _DeviceSlot] = {}  # by uuid
        self._by_position: tuple[_DeviceSlot, ...] = ()
        self.set_devices(())

    @classmethod
    def create(cls, path: str | Path, *, source: str, mode: int = 0o600, gid: int | None = None) -> Self:
        """Create a record at `path`, replacing one that an earlier monitor left there.

        The caller must ensure that no two monitors do this at once. Raises RecordError.
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
        """Set the devices of the record; a new device has no readings yet.

        Raises RecordError for more than MAX_DEVICES, for a repeated uuid, and if the file system is full; then nothing
        has changed.
        """
        shared = self._open()
        if len(infos) > MAX_DEVICES:
            raise RecordError(f"the record has room for {MAX_DEVICES} devices, got {len(infos)}: watch fewer")
        if len({info.uuid for info in infos}) < len(infos):
            raise RecordError(f"a device is listed twice in {[info.uuid for info in infos]}")
        generation = shared.words[layout.TABLE.sequence] + 1
        new = [info.uuid for info in infos if info.uuid not in self._slots]
        unused = set(range(layout.NUM_SLOTS)) - {slot.number for slot in self._slots.values()}
        given = {uuid: _DeviceSlot(number, generation) for uuid, number in zip(new, sorted(unused), strict=False)}
        known = self._slots | given
        table = codec.table_to_bytes([(*known[info.uuid], info) for info in infos], layout.TABLE.room_bytes)
        with self._lock:
            if self._file is not None:
                self._file.reserve_details(slot.number for slot in given.values())
        interval_ns = shared.words[layout.BEAT_INTERVAL_NS]
        for slot in given.values():
            self._publish_memory(shared, slot, DeviceMemory(0, interval_ns, None, None, None, 0, 0))
            self._publish_detail(shared, slot, DeviceDetail(0, interval_ns, DetailReading()))
        self._publish(shared, layout.TABLE, 0, table)
        slots = {info.uuid: known[info.uuid] for info in infos}
        self._slots, self._by_position = slots, tuple(slots.values())

    def write_memory(self, position: int, memory: DeviceMemory) -> None:
        """Publish the memory numbers of one device; an error's text is cut to 96 bytes.

        Raises NoSuchDevice for a position without a device, RecordError for numbers of more than 64 bits.
        """
        self._publish_memory(self._open(), self._slot_at(position), memory)

    def write_detail(self, position: int, detail: DeviceDetail) -> None:
        """Publish load, processes and history (MAX_HISTORY samples) of one device.

        Command lines are cut to 512 characters. If the processes do not fit into 64 KiB, those with the least memory
        are left out, and the error says how many. Raises NoSuchDevice for a position without a device.
        """
        self._publish_detail(self._open(), self._slot_at(position), detail)

    def beat(self, at_ns: int, interval_ns: int) -> None:
        """Write a heartbeat; the next one follows within `interval_ns`. Raises ValueError for an interval below 1."""
        if interval_ns < 1:
            raise ValueError(f"the interval of a monitor must be at least 1 ns, got {interval_ns}")
        shared = self._open()
        with self._lock:
            self._update(shared.store(layout.BEAT_AT_NS, at_ns, interval_ns))

    def mend(self) -> str | None:
        """Replace the file if it was truncated, removed or written by another process. Call it regularly.

        Returns what happened to the old file, as the end of a sentence, or None if it is intact. Raises RecordError if
        no new file can be made.
        """
        self._open()
        with self._lock:
            if self._file is None or self._lay is None or (harm := self._file.harm()) is None:
                return None
            harmed, self._file = self._file, self._lay()
            harmed.abandon()
            return harm

    def close(self) -> None:
        """Mark the monitor as ended, and remove the file unless another monitor has replaced it. Idempotent."""
        if self._shared is None:
            return
        with self._lock:
            self._update(self._shared.store(layout.ENDED, 1))
            self._shared = None  # a concurrent write, and readers of a private record, still reference it
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

    def _slot_at(self, position: int) -> _DeviceSlot:
        if not 0 <= position < len(self._by_position):
            raise NoSuchDevice(f"the record has {len(self._by_position)} devices, none at position {position}")
        return self._by_position[position]

    def _publish_memory(self, shared: layout.SharedBytes, slot: _DeviceSlot, memory: DeviceMemory) -> None:
        self._publish(shared, layout.MEMORY[slot.number], slot.generation, codec.memory_to_bytes(memory))

    def _publish_detail(self, shared: layout.SharedBytes, slot: _DeviceSlot, detail: DeviceDetail) -> None:
        target = layout.DETAIL[slot.number]
        self._publish(shared, target, slot.generation, codec.detail_to_bytes(detail, target.room_bytes))

    def _publish(self, shared: layout.SharedBytes, place: layout.Place, generation: int, payload: bytes) -> None:
        with self._lock:
            self._update(*shared.publish(place, generation, payload))

    def _update(self, *parts: layout.Part) -> None:
        """The lock must be held."""
        if self._file is not None:
            self._file.update(*parts)


class RecordReader:
    """A reader of a record.

    When the monitor is silent, or its file is truncated or damaged, the reader looks for a new record at its path and
    switches to it. Until there is one it returns the last numbers, which their times show to be old. Take the current
    time after reading, not before: numbers from the future count as stale. Several threads may share a reader. Reading
    raises RecordError for what cannot be read and was not read before, and once the reader is closed.

    Attributes:
        retries: how often a copy was disturbed by the writer and repeated.
        trouble: why the record at the path now is not read; None if nothing is wrong.
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

        Raises RecordMissing if there is none, RecordError if it cannot be read, or could be planted by another user:
        owned by neither root nor this user (except in the machine's own directory), a link, or writable by others.
        """
        return cls(open_view(Path(path)), Path(path), clock)

    @classmethod
    def of(cls, writer: RecordWriter, *, clock: Callable[[], int] = time.monotonic_ns) -> Self:
        """Read the memory of a writer in this process, also after it was closed."""
        return cls(RecordView(writer._open(), "the monitor's record"), None, clock)

    @property
    def monitor_pid(self) -> int:
        """The pid of the writing process, in its own pid namespace."""
        return self._current()[0].pid

    @property
    def started_ns(self) -> int:
        """When the record was made, monotonic."""
        return self._current()[0].started_ns

    @property
    def source(self) -> str:
        """The source of the numbers, such as "nvml+host"."""
        return self._current()[0].source

    def is_live(self, now_ns: int | None = None) -> bool:
        """Whether the monitor runs: it has not ended, and its last heartbeat is at most three intervals old.

        True even if no device answers. False before the first heartbeat.
        """
        record, words = self._current(now_ns)
        return record.is_live(words, self._clock, now_ns)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The watched devices."""
        return self._settled(lambda table, _: table.infos)[1]

    def memory(self, uuid: str) -> DeviceMemory:
        """The newest memory numbers of one device. Raises NoSuchDevice.

        Makes no system call until the monitor's next reading is due.
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
        """All devices; `now_ns` is the time of the snapshot, by default that after reading. Each slot is consistent by
        itself.
        """
        record, devices = self._settled(all_devices, now_ns)
        at_ns = self._clock() if now_ns is None else now_ns
        return Snapshot(
            at_ns,
            record.source,
            record.pid,
            record.started_ns,
            devices,
            silent_ns=record.silent_ns(self._clock, now_ns),
            unix_seconds=time.time(),
        )

    def close(self) -> None:
        """Release the record. Idempotent."""
        self._record = None  # freed when the last reading thread is done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self, now_ns: int | None = None) -> tuple[RecordView, memoryview | None]:
        """The record to read and its words. If its monitor is silent and there is a successor: the successor."""
        record = self._record
        if record is None:
            raise RecordError("the reader of the record is closed")
        words = record.words()
        if record.is_live(words, self._clock, now_ns):
            return record, words
        words = record.words()  # a torn heartbeat may have looked like one of another time
        if record.is_live(words, self._clock, now_ns):
            return record, words
        now_ns = self._clock() if now_ns is None else now_ns
        if self._path is None or now_ns - self._looked_ns < LOOK_EVERY_NS:
            return record, words
        self._looked_ns = now_ns
        successor = self._successor(self._path, record)
        if self._record is record:  # no other thread closed or replaced it
            self._record = successor
        return successor, successor.words()

    def _successor(self, path: Path, record: RecordView) -> RecordView:
        """The record at the path now; `record` if that is the same, missing or unreadable."""
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
        return successor if successor.has_beaten() else record  # before its first heartbeat it may not know its devices

    def _settled(self, read: Callable[[Table, memoryview | None], T | None], now_ns: int | None = None) -> tuple[RecordView, T]:
        """The result of `read` on the current table, and the record it came from. Waits while the writer disturbs the copy."""
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
        """The result of `read` on a record, or on its last intact copy; None without one."""
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
