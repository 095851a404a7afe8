"""The encoding of the record's slots: a small struct for memory, JSON rows for the rest.

    memory   at_ns 8 | interval_ns 8 | total 8 | free 8 | bytes/s 8 | polls 8 | failures 8 | what is known 1 | error, UTF-8
    detail   [at_ns, interval_ns, utilization, temperature, power, power limit, [process, ...] or null, history, error]
    process  [pid, used, kind, user, command, engine, cgroup, idle seconds]
    table    [[slot, generation, uuid, index, kind, name, pci_id, parent_uuid], ...]

Decoding trusts no byte: another process, perhaps of another user, wrote them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from types import NoneType
from typing import Any

from .errors import RecordError
from .snapshot import DetailReading, DeviceDetail, DeviceInfo, DeviceKind, DeviceMemory, ProcessUse

MAX_HISTORY = 256  # samples in one DeviceDetail
MAX_ERROR_BYTES = 96  # limit of an error in UTF-8, in a memory slot
MAX_TEXT_CHARS = 512  # limit of an error in a detail slot, of a command line and a cgroup
MAX_SOURCE_CHARS = 256

_MEMORY = struct.Struct("=qqQQdQQB")
MAX_MEMORY_BYTES = _MEMORY.size + MAX_ERROR_BYTES
_TOTAL, _FREE, _TREND, _ERROR = 1, 2, 4, 8  # flags of the known values

_INT, _MAYBE_INT, _MAYBE_NUMBER = (int,), (int, NoneType), (int, float, NoneType)
_TEXT, _MAYBE_TEXT = (str,), (str, NoneType)
_LIST, _MAYBE_LIST = (list,), (list, NoneType)


class Malformed(Exception):
    """These bytes are not a valid encoding."""


def memory_to_bytes(memory: DeviceMemory) -> bytes:
    """At most MAX_MEMORY_BYTES; a longer error text is cut. Raises RecordError for negative numbers or more than 64 bits."""
    total, free, trend, error = memory.total_bytes, memory.free_bytes, memory.bytes_per_second, memory.error
    known = (
        (total is not None and _TOTAL)
        | (free is not None and _FREE)
        | (trend is not None and _TREND)
        | (error is not None and _ERROR)
    )
    try:
        numbers = _MEMORY.pack(
            memory.at_ns, memory.interval_ns, total or 0, free or 0, trend or 0.0, memory.polls, memory.failures, known
        )
    except struct.error as problem:
        # Names without numbers: a monitor logs the same message once, and numbers would change it each time.
        signed, unsigned = ("at_ns", "interval_ns"), ("total_bytes", "free_bytes", "polls", "failures")
        wrong = [name for name in signed if not -(1 << 63) <= getattr(memory, name) < 1 << 63]
        wrong += [name for name in unsigned if not 0 <= (getattr(memory, name) or 0) < 1 << 64]
        raise RecordError(
            f"the record holds no negative numbers, nor any of more than 64 bits: {', '.join(wrong)}"
        ) from problem
    return numbers if error is None else numbers + _shortened_utf8(error)


def memory_from_bytes(payload: bytes) -> DeviceMemory:
    """The inverse of `memory_to_bytes`. Raises Malformed."""
    try:
        at_ns, interval_ns, total, free, trend, polls, failures, known = _MEMORY.unpack_from(payload)
        return DeviceMemory(
            at_ns,
            interval_ns,
            total if known & _TOTAL else None,
            free if known & _FREE else None,
            trend if known & _TREND else None,
            polls,
            failures,
            payload[_MEMORY.size :].decode() if known & _ERROR else None,
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed from error


def detail_to_bytes(detail: DeviceDetail, room_bytes: int) -> bytes:
    """At most `room_bytes`. Raises RecordError for a longer history than MAX_HISTORY."""
    if len(detail.history) > MAX_HISTORY:
        raise RecordError(
            f"the record has room for {MAX_HISTORY} samples of history, got {len(detail.history)}: keep the newest"
        )
    error = None if detail.error is None else _shortened(detail.error)
    if detail.reading.processes is None:
        return _fitting(_detail_row(detail, None, error), room_bytes)
    processes = [_process_row(process) for process in detail.reading.processes]
    payload = _to_json(_detail_row(detail, processes, error))
    if len(payload) <= room_bytes:
        return payload
    # The longest possible note, so that the note with the actual number fits too.
    rest_bytes = len(_to_json(_detail_row(detail, [], _with_note(error, len(processes), len(processes)))))
    kept = _largest(processes, room_bytes - rest_bytes)
    return _fitting(_detail_row(detail, kept, _with_note(error, len(processes) - len(kept), len(processes))), room_bytes)


def detail_from_bytes(payload: bytes) -> DeviceDetail:
    """The inverse of `detail_to_bytes`. Raises Malformed."""
    at_ns, interval_ns, utilization, temperature, power, power_limit, processes, history, error = _row(
        _from_json(payload),
        (_INT, _INT, _MAYBE_NUMBER, _MAYBE_NUMBER, _MAYBE_NUMBER, _MAYBE_NUMBER, _MAYBE_LIST, _LIST, _MAYBE_TEXT),
    )
    kinds = (_INT, _MAYBE_INT, _TEXT, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_NUMBER)
    return DeviceDetail(
        at_ns,
        interval_ns,
        DetailReading(
            utilization,
            temperature,
            power,
            power_limit,
            None if processes is None else tuple(ProcessUse(*_row(process, kinds)) for process in processes),
        ),
        tuple(_row(history, (_MAYBE_INT,) * len(history))),
        error,
    )


def table_to_bytes(rows: Iterable[tuple[int, int, DeviceInfo]], room_bytes: int) -> bytes:
    """Encodes (slot, generation, device) of each device. Raises RecordError if they do not fit into `room_bytes`."""
    return _fitting(
        [
            [slot, generation, info.uuid, info.index, info.kind.value, info.name, info.pci_id, info.parent_uuid]
            for slot, generation, info in rows
        ],
        room_bytes,
    )


def table_from_bytes(payload: bytes) -> tuple[tuple[int, int, DeviceInfo], ...]:
    """The inverse of `table_to_bytes`. Raises Malformed."""
    kinds = (_INT, _INT, _TEXT, _TEXT, _TEXT, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_TEXT)
    rows = _from_json(payload)
    if type(rows) is not list:
        raise Malformed
    table = []
    for row in rows:
        slot, generation, uuid, index, kind, name, pci_id, parent_uuid = _row(row, kinds)
        try:
            table.append((slot, generation, DeviceInfo(uuid, index, DeviceKind(kind), name, pci_id, parent_uuid)))
        except ValueError as error:  # unknown kind
            raise Malformed from error
    return tuple(table)


def header_to_bytes(pid: int, started_ns: int, source: str) -> bytes:
    """The identity of the writing process, in a few hundred bytes; a long source name is cut."""
    return _to_json([pid, started_ns, _shortened(source, MAX_SOURCE_CHARS)])


def header_from_bytes(payload: bytes) -> tuple[int, int, str]:
    """The inverse of `header_to_bytes`. Raises Malformed."""
    pid, started_ns, source = _row(_from_json(payload), (_INT, _INT, _TEXT))
    return pid, started_ns, source


def _detail_row(detail: DeviceDetail, processes: list[Any] | None, error: str | None) -> list[Any]:
    reading = detail.reading
    return [
        detail.at_ns,
        detail.interval_ns,
        reading.utilization,
        reading.temperature_celsius,
        reading.power_watts,
        reading.power_limit_watts,
        processes,
        detail.history,
        error,
    ]


def _process_row(process: ProcessUse) -> list[Any]:
    command = None if process.command is None else _shortened(process.command)
    cgroup = None if process.cgroup is None else _shortened(process.cgroup)
    idle = None if process.idle_seconds is None else round(process.idle_seconds, 1)
    return [process.pid, process.used_bytes, process.kind, process.user, command, process.engine, cgroup, idle]


def _largest(processes: list[list[Any]], room_bytes: int) -> list[list[Any]]:
    """The processes with the most memory (an unknown amount counts as least) that fit, in their original order."""
    kept = set()
    by_use = sorted(range(len(processes)), key=lambda i: -1 if processes[i][1] is None else processes[i][1], reverse=True)
    for index in by_use:
        room_bytes -= len(_to_json(processes[index])) + 1  # and a comma
        if room_bytes < 0:
            break
        kept.add(index)
    return [process for index, process in enumerate(processes) if index in kept]


def _with_note(error: str | None, left_out: int, of: int) -> str:
    note = f"the record has no room for {left_out} of {of} processes, those with the least memory"
    return note if error is None else f"{error}; {note}"


def _shortened(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _shortened_utf8(text: str) -> bytes:
    encoded = text.encode(errors="backslashreplace")  # it may contain a file name that is not UTF-8
    if len(encoded) <= MAX_ERROR_BYTES:
        return encoded
    ellipsis = "…".encode()
    return encoded[: MAX_ERROR_BYTES - len(ellipsis)].decode(errors="ignore").encode() + ellipsis  # no half characters


def _fitting(value: list[Any], room_bytes: int) -> bytes:
    payload = _to_json(value)
    if len(payload) > room_bytes:
        raise RecordError(f"the record has room for {room_bytes:,} bytes here, got {len(payload):,}: {payload[:200]!r}...")
    return payload


def _to_json(value: list[Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()  # ASCII: lone surrogates of odd command lines survive


def _from_json(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def _row(value: Any, kinds: tuple[tuple[type, ...], ...]) -> list[Any]:
    """`value` as a list with members of these types. Raises Malformed."""
    if type(value) is not list or len(value) != len(kinds):
        raise Malformed
    if any(type(member) not in kind for member, kind in zip(value, kinds, strict=True)):
        raise Malformed
    return value
