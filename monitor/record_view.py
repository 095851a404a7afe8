"""A reader's view of one record: its words, its device table and the slots read so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import record_codec as codec
from . import record_layout as layout
from .errors import NoSuchDevice
from .record_file import OpenRecord, damaged, identity
from .snapshot import STALE_AFTER_INTERVALS, Device, DeviceDetail, DeviceInfo, DeviceMemory

# The longest time between two checks for news, and for the successor of a silent monitor
LOOK_EVERY_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """One device of the table, with its slots."""

    info: DeviceInfo
    memory: layout.Cell[DeviceMemory]
    detail: layout.Cell[DeviceDetail]


@dataclass(frozen=True, slots=True)
class Table:
    """The devices of a record."""

    infos: tuple[DeviceInfo, ...]
    entries: dict[str, DeviceEntry]
    num_words: int  # the words up to those of these devices' memory slots

    def entry(self, uuid: str) -> DeviceEntry:
        """The entry of a device. Raises NoSuchDevice, which lists the devices."""
        entry = self.entries.get(uuid)
        if entry is None:
            there = ", ".join(f"{info.uuid} ({info.index})" for info in self.infos) or "none"
            raise NoSuchDevice(f"no device {uuid!r} is watched; there are: {there}")
        return entry


def _read_table(read: layout.ReadBytes, payload: bytes) -> Table:
    """Decode the table. Raises Malformed."""
    entries = {}
    for slot, generation, info in codec.table_from_bytes(payload):
        if not 0 <= slot < layout.NUM_SLOTS:
            raise codec.Malformed
        memory = layout.Cell(read, layout.MEMORY[slot], generation, codec.memory_from_bytes)
        detail = layout.Cell(read, layout.DETAIL[slot], generation, codec.detail_from_bytes)
        entries[info.uuid] = DeviceEntry(info, memory, detail)
    words = [entry.memory.place.sequence for entry in entries.values()]
    num_words = max(words, default=layout.NUM_COMMON_WORDS - 1) + 1
    return Table(tuple(entry.info for entry in entries.values()), entries, num_words)


def all_devices(table: Table, words: memoryview | None) -> tuple[Device, ...] | None:
    """All devices with their slots; None if a slot could not be read: retry."""
    devices = []
    for entry in table.entries.values():
        memory, detail = entry.memory.read(words), entry.detail.read(words)
        if memory is None or detail is None:
            return None
        devices.append(Device(entry.info, memory, detail))
    return tuple(devices)


class RecordView:
    """One record that is being read."""

    def __init__(self, origin: layout.SharedBytes | OpenRecord, name: str) -> None:
        """Raises RecordError if the header is damaged."""
        self.name = name
        self._origin = origin  # keeps the file open
        self._read: layout.ReadBytes = origin.read
        try:
            self.pid, self.started_ns, self.source = layout.read_header(self._read)
        except (codec.Malformed, OSError) as error:
            raise damaged(name) from error
        self.table = layout.Cell(self._read, layout.TABLE, 0, partial(_read_table, self._read))
        self._beat_at_ns = 0  # the last heartbeat seen

    def is_at(self, path: Path) -> bool:
        """Whether its file is the one at `path`. Raises OSError."""
        return isinstance(self._origin, OpenRecord) and self._origin.identity == identity(os.stat(path))

    def words(self) -> memoryview | None:
        """A copy of the first words: heartbeat, table and memory; None if the file cannot be read."""
        table = self.table.last
        try:
            words = layout.load_words(self._read, 0, layout.NUM_COMMON_WORDS if table is None else table[1].num_words)
        except (layout.Truncated, OSError):
            return None
        self._beat_at_ns = words[layout.BEAT_AT_NS]
        return words

    def current_memory(self, uuid: str, now_ns: int) -> DeviceMemory | None:
        """The last numbers read of a device, until the monitor's next reading is due; else None.

        Most calls of `RecordReader.memory` end here, so this is short: after an engine step its code has left the
        caches.
        """
        table = self.table.last
        entry = None if table is None else table[1].entries.get(uuid)
        last = None if entry is None else entry.memory.last
        if last is None:
            return None
        memory = last[1]
        # An eighth early, since this answer may have been late; bounded, since a long interval may be shortened.
        return memory if 0 <= now_ns - memory.at_ns < min(memory.interval_ns, LOOK_EVERY_NS) * 7 // 8 else None

    def has_beaten(self) -> bool:
        """Whether its monitor has ever written a heartbeat."""
        words = self.words()
        return words is not None and words[layout.BEAT_INTERVAL_NS] > 0

    def is_live(self, words: memoryview | None, clock: Callable[[], int], now_ns: int | None) -> bool:
        """Whether the monitor has not ended and its heartbeat is recent.

        `words` must be loaded before the clock is read, else a newer heartbeat would appear to be in the future.
        """
        if words is None or words[layout.ENDED]:
            return False
        age_ns = (clock() if now_ns is None else now_ns) - words[layout.BEAT_AT_NS]
        return 0 <= age_ns <= STALE_AFTER_INTERVALS * words[layout.BEAT_INTERVAL_NS]

    def silent_ns(self, clock: Callable[[], int], now_ns: int | None) -> int | None:
        """The time since the last sign of the monitor; None while it is live."""
        if self.is_live(self.words(), clock, now_ns):
            return None
        now_ns = clock() if now_ns is None else now_ns
        return max(0, now_ns - max(self._beat_at_ns, self.started_ns))


def open_view(path: Path) -> RecordView:
    """The record at `path`. Raises RecordMissing, RecordError."""
    origin = OpenRecord(path)
    return RecordView(origin, origin.name)
