"""How the record lies in shared bytes, and how a slot of it is written and read without a lock.

         0  header    4 KiB    magic 8 | layout version 4 | CRC 4 | file length 8 | JSON length 8 | JSON [pid, start of
                               the pid in clock ticks, started_ns, source]; written before the file gets its name
     4,096  words     12 KiB   8 bytes each: ended | beat at_ns | beat interval_ns | sequence of the table | sequences
                               of the 512 memory slots | of the 512 detail slots
    16,384  table     2 buffers of 128 KiB         which device is in which slot
   278,528  memory    512 slots of 2 x 192 bytes   what engines read
   475,136  detail    512 slots of 2 x 64 KiB      load, processes, history; takes memory only where a device is

    buffer  CRC-32 of all that follows 4 | payload length 4 | sequence 8 | generation 8 | payload (see record_codec)

A slot's sequence says which of its two buffers is current: number sequence & 1. The writer fills the other one and then
stores the next sequence. A reader loads the sequence, copies the buffer and takes it if CRC, sequence and generation
agree, else tries again: only a writer that ends one record and begins the next while the reader copies can disturb it.
So nobody ever waits, and a writer killed at any instruction leaves its last record whole. x86 shows stores in the order
in which they were made. Other processors may show a sequence before the bytes it stands for; there the CRC tells.

The generation is the table's sequence when the slot was given to its device: what a slow thread writes for a device that
is gone is never taken for another's. Slots are twice as many as devices, so that no slot of the table in force is needed
for a device of the next: that takes effect at once and whole, when its own sequence is stored.

Byte order is the machine's, since the record never leaves it. Times are of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from . import record_codec as codec
from .errors import RecordError

LAYOUT_VERSION = 2
MAX_DEVICES = 256  # the largest machines have 8 GPUs of 7 MIG instances, or 16 GPUs: room to spare
NUM_SLOTS = 2 * MAX_DEVICES

_PAGE_BYTES = 4096
_MEMORY_BYTES = 192  # a buffer of a memory slot: three cache lines
_TABLE_BYTES = 1 << 17  # a buffer of the table: 512 bytes for each device
_DETAIL_BYTES = 1 << 16  # a buffer of a detail slot
_WORDS_AT = _PAGE_BYTES
_TABLE_AT = _WORDS_AT + 3 * _PAGE_BYTES
_MEMORY_AT = _TABLE_AT + 2 * _TABLE_BYTES
_DETAIL_AT = _MEMORY_AT + NUM_SLOTS * 2 * _MEMORY_BYTES
FILE_BYTES = _DETAIL_AT + NUM_SLOTS * 2 * _DETAIL_BYTES
COMMON_BYTES = _DETAIL_AT  # what every record needs, with or without devices

# Words. The first three say something each by itself, so they need neither buffers nor CRC.
ENDED, BEAT_AT_NS, BEAT_INTERVAL_NS, _TABLE_SEQUENCE, _MEMORY_SEQUENCE = range(5)
_DETAIL_SEQUENCE = _MEMORY_SEQUENCE + NUM_SLOTS

_MAGIC = b"pagetide"
_VERSION = struct.Struct("=8sI")  # what a record of any layout begins with
VERSION_BYTES = _VERSION.size
_CRC = struct.Struct("=I")
_LENGTHS = struct.Struct("=QQ")  # of the file and of the JSON
_HEAD = struct.Struct("=IIQQ")  # CRC, payload length, sequence, generation
_HEAD_REST = struct.Struct("=IQQ")  # the same without the CRC

T = TypeVar("T")


class Place(NamedTuple):
    """Where a slot lies."""

    sequence: int  # which word
    at: int  # of the first buffer; the second follows
    buffer_bytes: int

    @property
    def room_bytes(self) -> int:
        """What a payload may have."""
        return self.buffer_bytes - _HEAD.size


TABLE = Place(_TABLE_SEQUENCE, _TABLE_AT, _TABLE_BYTES)
MEMORY = tuple(
    Place(_MEMORY_SEQUENCE + slot, _MEMORY_AT + slot * 2 * _MEMORY_BYTES, _MEMORY_BYTES) for slot in range(NUM_SLOTS)
)
DETAIL = tuple(
    Place(_DETAIL_SEQUENCE + slot, _DETAIL_AT + slot * 2 * _DETAIL_BYTES, _DETAIL_BYTES) for slot in range(NUM_SLOTS)
)


class SharedBytes:
    """The bytes of a record, of which `words` are those that are stored and loaded as a whole.

    Another process may look at any instant. Through a view of aligned 8-byte items a word is one move of the processor,
    where struct with "<" or "=" goes byte by byte and would show a half-stored number.
    """

    __slots__ = ("view", "words")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.words = view[_WORDS_AT:_TABLE_AT].cast("Q")

    def read_only(self) -> SharedBytes:
        """The same bytes for who only reads."""
        return SharedBytes(self.view.toreadonly())

    def publish(self, place: Place, generation: int, payload: bytes) -> None:
        """Write the next record of a slot: at most `place.room_bytes`."""
        word, at, buffer_bytes = place
        sequence = self.words[word] + 1
        rest = _HEAD_REST.pack(len(payload), sequence, generation) + payload
        start = at + (sequence & 1) * buffer_bytes
        self.view[start : start + _CRC.size + len(rest)] = _CRC.pack(zlib.crc32(rest)) + rest
        self.words[word] = sequence

    def cell(self, place: Place, generation: int, decode: Callable[[bytes], T]) -> Cell[T]:
        """A slot for reading."""
        buffers = [self.view[at : at + place.buffer_bytes] for at in (place.at, place.at + place.buffer_bytes)]
        return Cell(self.words, place.sequence, (buffers[0], buffers[1]), generation, decode)

    def write_header(self, pid: int, start_ticks: int | None, started_ns: int, source: str) -> None:
        """Say what this is and who writes it."""
        payload = codec.header_to_bytes(pid, start_ticks, started_ns, source)
        rest = _LENGTHS.pack(FILE_BYTES, len(payload)) + payload
        header = _VERSION.pack(_MAGIC, LAYOUT_VERSION) + _CRC.pack(zlib.crc32(rest)) + rest
        self.view[: len(header)] = header

    def read_header(self) -> tuple[int, int | None, int, str]:
        """(pid, its start in clock ticks, started_ns, source). Raises Malformed."""
        header = self.view[_VERSION.size : _PAGE_BYTES].tobytes()
        (crc,) = _CRC.unpack_from(header)
        file_bytes, payload_bytes = _LENGTHS.unpack_from(header, _CRC.size)
        payload_at = _CRC.size + _LENGTHS.size
        end = payload_at + payload_bytes  # a length that lies is cut by the slice and told by the CRC
        if file_bytes != FILE_BYTES or zlib.crc32(header[_CRC.size : end]) != crc:
            raise codec.Malformed
        return codec.header_from_bytes(header[payload_at:end])


@dataclass(slots=True)
class Cell(Generic[T]):
    """A slot as one reader sees it. Mutable: remembers what it read last, as one tuple that is replaced."""

    words: memoryview
    sequence: int  # which word
    buffers: tuple[memoryview, memoryview]
    generation: int
    decode: Callable[[bytes], T]
    last: tuple[int, T] | None = None

    def read(self) -> T | None:
        """What the slot holds; None if it was not copied whole, or is not of this generation: try again.

        Raises Malformed for a whole record that means nothing.
        """
        sequence = self.words[self.sequence]
        last = self.last
        if last is not None and last[0] == sequence:
            return last[1]
        copy = self.buffers[sequence & 1].tobytes()
        crc, payload_bytes, written, generation = _HEAD.unpack_from(copy)
        end = _HEAD.size + payload_bytes
        if written != sequence or generation != self.generation or zlib.crc32(copy[_CRC.size : end]) != crc:
            return None
        value = self.decode(copy[_HEAD.size : end])
        self.last = (sequence, value)
        return value


def check_version(head: bytes, name: str) -> None:
    """Raises RecordError, with the record called `name`, unless its first VERSION_BYTES announce this layout."""
    if len(head) < _VERSION.size or not head.startswith(_MAGIC):
        raise RecordError(f"{name} is not what a monitor of pagetide writes: remove it, or name another file")
    _, version = _VERSION.unpack(head)
    if version != LAYOUT_VERSION:
        raise RecordError(
            f"{name} has layout version {version}, and this pagetide reads version {LAYOUT_VERSION}: "
            "run the monitor and its readers from the same version of pagetide"
        )
