"""The layout of the record in shared bytes, and the lock-free protocol for writing and reading a slot.

         0  header    4 KiB    magic 8 | layout version 4 | CRC 4 | file length 8 | JSON length 8 | JSON [pid, start of
                               the pid in clock ticks, started_ns, source]; written before the file gets its name
     4,096  words     12 KiB   8 bytes each: ended | beat at_ns | beat interval_ns | sequence of the table | sequences
                               of the 512 memory slots | of the 512 detail slots
    16,384  table     2 buffers of 128 KiB         which device is in which slot
   278,528  memory    512 slots of 2 x 192 bytes   what engines read
   475,136  detail    512 slots of 2 x 64 KiB      load, processes, history; takes memory only where a device is

    buffer  CRC-32 of all that follows 4 | payload length 4 | sequence 8 | generation 8 | payload (see record_codec)

A slot's sequence tells which of its two buffers is current: number sequence & 1. The writer fills the other one and
then stores the next sequence. A reader copies the words, then the buffer, and accepts it if CRC, sequence and
generation agree, else retries. Only a writer that ends one record and begins the next during the copy can disturb it.
So neither side waits, and a writer killed at any instruction leaves its last record intact.

The CRC covers the sequence, so a torn sequence, or one copied before its bytes, is rejected. The first three words have
no CRC. A torn heartbeat can only look like one of another time, so a reader that finds a monitor dead checks a second
time.

The generation is the table's sequence when the slot was assigned to its device. So a late write for a removed device is
never taken for another device's. There are twice as many slots as devices, so a new table's devices need no slot of the
current table. The new table takes effect at once and whole, when its own sequence is stored.

Byte order is the machine's, since the record never leaves it. Times are of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from . import record_codec as codec
from .errors import RecordError

LAYOUT_VERSION = 4
MAX_DEVICES = 256  # the largest machines have 8 GPUs of 7 MIG instances, or 16 GPUs
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

# Words. Each of the first three is meaningful by itself, so they need neither buffers nor CRC.
ENDED, BEAT_AT_NS, BEAT_INTERVAL_NS, _TABLE_SEQUENCE, _MEMORY_SEQUENCE = range(5)
_DETAIL_SEQUENCE = _MEMORY_SEQUENCE + NUM_SLOTS
NUM_COMMON_WORDS = _MEMORY_SEQUENCE  # words of no slot
HEAD_BYTES = _WORDS_AT + 8 * NUM_COMMON_WORDS  # the header and the words of no slot

_MAGIC = b"pagetide"
_VERSION = struct.Struct("=8sI")  # the start of a record of any layout
VERSION_BYTES = _VERSION.size
_CRC = struct.Struct("=I")
_LENGTHS = struct.Struct("=QQ")  # of the file and of the JSON
_HEAD = struct.Struct("=IIQQ")  # CRC, payload length, sequence, generation
_HEAD_REST = struct.Struct("=IQQ")  # the same without the CRC

T = TypeVar("T")

# (length, offset) -> these bytes, fewer if the file was truncated: `pread` of an open file
ReadBytes: TypeAlias = Callable[[int, int], bytes]
Part: TypeAlias = tuple[int, bytes | memoryview]  # (offset, the bytes there)


class Place(NamedTuple):
    """The position of a slot."""

    sequence: int  # index of the word
    at: int  # offset of the first buffer; the second follows
    buffer_bytes: int

    @property
    def room_bytes(self) -> int:
        """The largest payload."""
        return self.buffer_bytes - _HEAD.size


TABLE = Place(_TABLE_SEQUENCE, _TABLE_AT, _TABLE_BYTES)
MEMORY = tuple(
    Place(_MEMORY_SEQUENCE + slot, _MEMORY_AT + slot * 2 * _MEMORY_BYTES, _MEMORY_BYTES) for slot in range(NUM_SLOTS)
)
DETAIL = tuple(
    Place(_DETAIL_SEQUENCE + slot, _DETAIL_AT + slot * 2 * _DETAIL_BYTES, _DETAIL_BYTES) for slot in range(NUM_SLOTS)
)


class Truncated(Exception):
    """The file ends before the bytes to be read: it was truncated after it was opened."""


def word_at(word: int) -> int:
    """The offset of a word."""
    return _WORDS_AT + 8 * word


def load_words(read: ReadBytes, first: int, count: int) -> memoryview:
    """A copy of some words. Raises Truncated."""
    copy = read(8 * count, _WORDS_AT + 8 * first)
    if len(copy) < 8 * count:
        raise Truncated
    return memoryview(copy).cast("Q")


def read_header(read: ReadBytes) -> tuple[int, int, str]:
    """(pid, started_ns, source). Raises Malformed, also for an incomplete header."""
    header = read(_PAGE_BYTES - _VERSION.size, _VERSION.size)
    if len(header) < _CRC.size + _LENGTHS.size:
        raise codec.Malformed
    (crc,) = _CRC.unpack_from(header)
    file_bytes, payload_bytes = _LENGTHS.unpack_from(header, _CRC.size)
    payload_at = _CRC.size + _LENGTHS.size
    end = payload_at + payload_bytes  # a wrong length is cut by the slice and detected by the CRC
    if file_bytes != FILE_BYTES or zlib.crc32(header[_CRC.size : end]) != crc:
        raise codec.Malformed
    return codec.header_from_bytes(header[payload_at:end])


class SharedBytes:
    """The bytes of a record in its writer's memory. `words` are stored and loaded as whole 8-byte values."""

    __slots__ = ("view", "words")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.words = view[_WORDS_AT:_TABLE_AT].cast("Q")

    def read(self, length: int, at: int) -> bytes:
        """A copy, for a reader in the same process."""
        return self.view[at : at + length].tobytes()

    def publish(self, place: Place, generation: int, payload: bytes) -> tuple[Part, Part]:
        """Write the next record of a slot: at most `place.room_bytes`.

        Returns the changes: the record, then the word that makes it current.
        """
        word, at, buffer_bytes = place
        sequence = self.words[word] + 1
        rest = _HEAD_REST.pack(len(payload), sequence, generation) + payload
        record = _CRC.pack(zlib.crc32(rest)) + rest
        start = at + (sequence & 1) * buffer_bytes
        self.view[start : start + len(record)] = record
        return (start, record), self.store(word, sequence)

    def store(self, word: int, *values: int) -> Part:
        """Store consecutive words. Returns the change."""
        for number, value in enumerate(values, word):
            self.words[number] = value
        at = word_at(word)
        return at, self.view[at : at + 8 * len(values)].tobytes()

    def write_header(self, pid: int, started_ns: int, source: str) -> None:
        """Write the header: the layout version and the writing process."""
        payload = codec.header_to_bytes(pid, started_ns, source)
        rest = _LENGTHS.pack(FILE_BYTES, len(payload)) + payload
        header = _VERSION.pack(_MAGIC, LAYOUT_VERSION) + _CRC.pack(zlib.crc32(rest)) + rest
        self.view[: len(header)] = header

    def used(self) -> list[Part]:
        """All parts in use: header, words, table, memory, and the details of written slots."""
        details = [place for place in DETAIL if self.words[place.sequence]]
        whole = [(at, self.view[at : at + 2 * buffer_bytes]) for _, at, buffer_bytes in details]
        return [(0, self.view[:COMMON_BYTES]), *whole]


@dataclass(slots=True)
class Cell(Generic[T]):
    """A slot as one reader sees it. Mutable: keeps the last value read, as one tuple that is replaced."""

    read_bytes: ReadBytes
    place: Place
    generation: int
    decode: Callable[[bytes], T]
    last: tuple[int, T] | None = None

    def read(self, words: memoryview | None) -> T | None:
        """The value of the slot; None if the copy is torn or of another generation: reload the words and retry.

        `words` are the first words that were loaded; this slot's word is loaded if it is not among them. If `words` is
        None (the file was truncated), returns the last value read. Raises Truncated if there is none, and Malformed for
        an intact record that cannot be decoded.
        """
        last = self.last
        if words is None:
            if last is None:
                raise Truncated
            return last[1]
        word, at, buffer_bytes = self.place
        sequence = words[word] if word < len(words) else load_words(self.read_bytes, word, 1)[0]
        if last is not None and last[0] == sequence:
            return last[1]
        copy = self.read_bytes(buffer_bytes, at + (sequence & 1) * buffer_bytes)
        if len(copy) < buffer_bytes:
            raise Truncated
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
