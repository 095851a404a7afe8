"""One record as a reader sees it: its words, its table of devices, and their slots, as far as they were read."""

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

LOOK_EVERY_NS = 20_000_000  # how often a reader looks at least for news, and for the successor of a silent monitor


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """One device of the table, with where it is read."""

    info: DeviceInfo
    memory: layout.Cell[DeviceMemory]
    detail: layout.Cell[DeviceDetail]


@dataclass(frozen=True, slots=True)
class Table:
    """The devices of a record."""

    infos: tuple[DeviceInfo, ...]
    entries: dict[str, DeviceEntry]
    num_words: int  # the first words, down to those of the memory of these devices

    def entry(self, uuid: str) -> DeviceEntry:
        """Raises NoSuchDevice, which names those that there are."""
        entry = self.entries.get(uuid)
        if entry is None:
            there = ", ".join(f"{info.uuid} ({info.index})" for info in self.infos) or "none"
            raise NoSuchDevice(f"no device {uuid!r} is watched; there are: {there}")
        return entry


def _read_table(read: layout.ReadBytes, payload: bytes) -> Table:
    """Raises Malformed."""
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
    """None if one of them could not be read: try again."""
    devices = []
    for entry in table.entries.values():
        memory, detail = entry.memory.read(words), entry.detail.read(words)
        if memory is None or detail is None:
            return None
        devices.append(Device(entry.info, memory, detail))
    return tuple(devices)


class RecordView:
    """A record as it is read."""

    def __init__(self, origin: layout.SharedBytes | OpenRecord, name: str) -> None:
        """Raises RecordError where the header is damaged."""
        self.name = name
        self._origin = origin  # keeps the file open
        self._read: layout.ReadBytes = origin.read
        try:
            self.pid, self.start_ticks, self.started_ns, self.source = layout.read_header(self._read)
        except (codec.Malformed, OSError) as error:
            raise damaged(name) from error
        self.table = layout.Cell(self._read, layout.TABLE, 0, partial(_read_table, self._read))
        self._beat_at_ns = 0  # the last heartbeat that was seen

    def is_at(self, path: Path) -> bool:
        """Whether its file is the one that lies there. Raises OSError."""
        return isinstance(self._origin, OpenRecord) and self._origin.identity == identity(os.stat(path))

    def words(self) -> memoryview | None:
        """A copy of the first words: of the heartbeat, the table and the memory; None where the file does not give them."""
        table = self.table.last
        try:
            words = layout.load_words(self._read, 0, layout.NUM_COMMON_WORDS if table is None else table[1].num_words)
        except (layout.Truncated, OSError):
            return None
        self._beat_at_ns = words[layout.BEAT_AT_NS]
        return words

    def current_memory(self, uuid: str, now_ns: int) -> DeviceMemory | None:
        """What was read last of a device, while the monitor's next answer is not due; else None.

        Most calls of `RecordReader.memory` come to this, which is therefore short: after a step of an engine its code has
        left the caches, and each function costs about a microsecond, a system call several.
        """
        table = self.table.last
        entry = None if table is None else table[1].entries.get(uuid)
        last = None if entry is None else entry.memory.last
        if last is None:
            return None
        memory = last[1]
        # An eighth sooner than an interval, since this answer may have been late; and a long interval may be shortened.
        return memory if 0 <= now_ns - memory.at_ns < min(memory.interval_ns, LOOK_EVERY_NS) * 7 // 8 else None

    def has_beaten(self) -> bool:
        """Whether its monitor was ready once."""
        words = self.words()
        return words is not None and words[layout.BEAT_INTERVAL_NS] > 0

    def is_live(self, words: memoryview | None, clock: Callable[[], int], now_ns: int | None) -> bool:
        """Not ended, and beaten lately, by words that were loaded before the clock: a later beat would be of the future."""
        if words is None or words[layout.ENDED]:
            return False
        age_ns = (clock() if now_ns is None else now_ns) - words[layout.BEAT_AT_NS]
        return 0 <= age_ns <= STALE_AFTER_INTERVALS * words[layout.BEAT_INTERVAL_NS]

    def silent_ns(self, clock: Callable[[], int], now_ns: int | None) -> int | None:
        """For how long nothing was heard of the monitor; None while it is live."""
        if self.is_live(self.words(), clock, now_ns):
            return None
        now_ns = clock() if now_ns is None else now_ns
        return max(0, now_ns - max(self._beat_at_ns, self.started_ns))


def open_view(path: Path) -> RecordView:
    """The record at `path`. Raises RecordMissing, RecordError."""
    origin = OpenRecord(path)
    return RecordView(origin, origin.name)
