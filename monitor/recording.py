"""Recordings of a monitor's snapshots as lines of JSON, for replay.

    {"format": "pagetide-recording", "version": 1, "source": "nvml+host", "interval_s": 0.02, "devices": [{"uuid": ...}, ...]}
    {"at_s": 0.0, "uuid": "GPU-8a6e...", "total_bytes": 85899345920, "free_bytes": 85120000000}
    {"at_s": 0.0, "uuid": "GPU-8a6e...", "detail": {"utilization": 0.5, "processes": [{"pid": 17, ...}], ...}}
    {"at_s": 4.02, "uuid": "GPU-8a6e...", "error": "GPU is lost"}            instead of total and free
    {"at_s": 5.0, "uuid": "GPU-8a6e...", "detail_error": "GPU is lost"}      instead of detail
    {"at_s": 6.0, "devices": [...]}                                          from now on these
    {"at_s": 7.0}                                                            nothing changed until now

Only changes are written: values missing in a line stay the same, for `detail` each field by itself. `at_s` is the time
in seconds from the first snapshot to the one with the change, and never decreases. Derived values (trend, counters,
history) are not written. Every snapshot's lines are flushed at once, so a killed recorder leaves at most one torn line,
the last.
"""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, get_type_hints

from ..common.checked_file import InvalidFile, open_checked
from .errors import ConfigInvalid, MonitorError
from .snapshot import (
    DetailReading,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    MemoryReading,
    ProcessUse,
    Snapshot,
)

T = TypeVar("T")

FORMAT = "pagetide-recording"
VERSION = 1
STALE = "the monitor gave no new figures"  # recorded as the error of a device with a stale answer
IMPOSSIBLE = "more bytes were free than there are"  # likewise
HEARTBEAT_S = 1.0  # the longest silence of a recording

_LONGEST_HEADER_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 64 << 20
_LONGEST_S = 1e9  # 31 years


# ---- writing ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Written:
    """The last values that the file contains for a device; mutated by its writer."""

    memory: dict[str, Any] | None = None
    detail: DetailReading | str | None = None  # str: the error
    detail_at_s: float = -math.inf


class RecordingWriter:
    """Writes a new recording that begins with the snapshot `first`. Not thread-safe; a context manager."""

    def __init__(self, path: str | Path, first: Snapshot, *, detail_interval_s: float = 1.0) -> None:
        """Write details at most once per `detail_interval_s`. Raises ConfigInvalid if `path` exists or cannot be created."""
        self._path = path
        self._detail_interval_s = detail_interval_s
        self._began_ns = first.at_ns
        self._now_s = self._told_s = 0.0
        self._devices = tuple(device.info for device in first.devices)
        self._written: dict[str, _Written] = {}
        try:
            self._file = open(path, "x", encoding="ascii", newline="\n")  # noqa: SIM115 - closed by `close`
        except FileExistsError:
            raise ConfigInvalid(f"{path} already exists and is not overwritten; name a new file") from None
        except OSError as error:
            raise ConfigInvalid(f"cannot record to {path}: {error.strerror}; name a file that you may write") from error
        try:
            interval_s = first.devices[0].memory.interval_ns / 1e9 if first.devices else None
            header = {"format": FORMAT, "version": VERSION, "source": first.source, "interval_s": interval_s}
            self._put([header | _devices(self._devices)])
            self.write(first)
        except BaseException:
            self._file.close()
            raise

    def write(self, snapshot: Snapshot) -> None:
        """Append what changed since the last snapshot.

        Raises ValueError for a snapshot older than the last one, MonitorError if the file cannot be written.
        """
        now_s = (snapshot.at_ns - self._began_ns) / 1e9
        if now_s < self._now_s:
            raise ValueError(f"a snapshot of second {now_s} cannot follow one of second {self._now_s}")
        self._now_s = now_s
        changes: list[dict[str, Any]] = []
        if (devices := tuple(device.info for device in snapshot.devices)) != self._devices:
            self._devices = devices
            changes.append(_devices(devices))
        for device in snapshot.devices:
            written = self._written.setdefault(device.info.uuid, _Written())
            state = (self._memory(device.memory, snapshot.at_ns, written), self._detail(device.detail, written))
            changes += [{"uuid": device.info.uuid} | change for change in state if change is not None]
        if not changes and now_s - self._told_s >= HEARTBEAT_S:
            changes.append({})
        self._put([{"at_s": now_s} | change for change in changes])

    def close(self) -> None:
        """Write the final time, and close the file. Idempotent."""
        if self._file.closed:
            return
        try:
            if self._told_s < self._now_s:
                self._put([{"at_s": self._now_s}])
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _memory(self, memory: DeviceMemory, now_ns: int, written: _Written) -> dict[str, Any] | None:
        if not memory.at_ns:
            return None
        error, used = memory.error, memory.used_bytes
        if error is None and memory.is_stale(now_ns):
            error = STALE
        elif error is None and used is not None and used < 0:
            error = IMPOSSIBLE
        state: dict[str, Any] = {"error": error}
        if error is None:
            state = {"total_bytes": memory.total_bytes, "free_bytes": memory.free_bytes}
        if state == written.memory:
            return None
        written.memory = state
        return state

    def _detail(self, detail: DeviceDetail, written: _Written) -> dict[str, Any] | None:
        now, last = detail.reading if detail.error is None else detail.error, written.detail
        too_soon = self._now_s - written.detail_at_s < self._detail_interval_s
        if not detail.at_ns or too_soon or now == last:
            return None
        written.detail, written.detail_at_s = now, self._now_s
        if isinstance(now, str):
            return {"detail_error": now}
        return {"detail": _changed(now, last if isinstance(last, DetailReading) else None)}

    def _put(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        try:
            for line in lines:
                self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # it retries the same bytes
                self._file.close()
            raise MonitorError(
                f"the recording {self._path} ends at second {self._told_s:.0f}: {error.strerror}"
            ) from error
        self._told_s = self._now_s


def _devices(devices: tuple[DeviceInfo, ...]) -> dict[str, Any]:
    return {"devices": [asdict(info) for info in devices]}


def _changed(reading: DetailReading, last: DetailReading | None) -> dict[str, Any]:
    """The fields that differ from `last`, ready for JSON."""
    changed = {}
    for each in fields(reading):
        value = getattr(reading, each.name)
        if last is None or value != getattr(last, each.name):
            changed[each.name] = [asdict(use) for use in value] if isinstance(value, tuple) else value
    return changed


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedState:
    """The state of one device at one time in a recording. All None: nothing yet."""

    memory: MemoryReading | None = None
    memory_error: str | None = None  # why there is no memory
    detail: DetailReading | None = None
    detail_error: str | None = None


@dataclass(slots=True)
class _Steps(Generic[T]):
    """Values, each valid from its time on."""

    at_s: list[float] = field(default_factory=list)  # ascending
    values: list[T] = field(default_factory=list)

    def add(self, at_s: float, value: T) -> None:
        self.at_s.append(at_s)
        self.values.append(value)

    def at(self, seconds: float, before: T) -> T:
        """The value at that time; `before` if that is before the first."""
        index = bisect_right(self.at_s, seconds)
        return self.values[index - 1] if index else before


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording, read completely. Read-only."""

    path: str
    source: str  # the name of the source that was recorded
    interval_s: float | None  # polling interval of memory; None without devices
    duration_s: float
    devices: tuple[DeviceInfo, ...]  # all that occur, in the order of their first appearance
    _presence: _Steps[tuple[DeviceInfo, ...]]
    _states: dict[str, _Steps[RecordedState]]  # by uuid

    def devices_at(self, seconds: float) -> tuple[DeviceInfo, ...]:
        """The devices present at that time."""
        return self._presence.at(seconds, ())

    def state(self, uuid: str, seconds: float) -> RecordedState:
        """The state of a device at that time, present or not; after the end, its last state. KeyError for an unknown uuid."""
        return self._states[uuid].at(seconds, RecordedState())

    def at(self, seconds: float) -> dict[str, RecordedState]:
        """The state at that time of each present device, by uuid."""
        return {info.uuid: self.state(info.uuid, seconds) for info in self.devices_at(seconds)}


class _Malformed(Exception):
    """An invalid line; the message follows its number."""


def read_recording(path: str | Path) -> Recording:
    """Read and check a whole recording.

    Raises ConfigInvalid if it cannot be read, is not a recording, has another version, is torn at the end, or has an
    invalid line.
    """
    try:
        with open_checked(path, "recordings") as file:
            first = file.readline(_LONGEST_HEADER_BYTES)
            content = _Content(path, first)
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), 2):
                content.read_line(number, line)
    except InvalidFile as error:
        raise ConfigInvalid(str(error)) from error
    except OSError as error:
        raise ConfigInvalid(f"the recording {path} cannot be read: {error.strerror}") from error
    return content.recording()


class _Content:
    """The content of a recording read so far."""

    def __init__(self, path: str | Path, header: bytes) -> None:
        """Raises ConfigInvalid unless `header` is a recording's first line."""
        self.path = path
        self.at_s = 0.0
        self.devices: dict[str, DeviceInfo] = {}
        self.presence: _Steps[tuple[DeviceInfo, ...]] = _Steps()
        self.states: dict[str, _Steps[RecordedState]] = {}
        self.source, self.interval_s = self._header(header)

    def recording(self) -> Recording:
        return Recording(
            path=str(self.path), source=self.source, interval_s=self.interval_s, duration_s=self.at_s,
            devices=tuple(self.devices.values()), _presence=self.presence, _states=self.states,
        )  # fmt: skip

    def read_line(self, number: int, line: bytes) -> None:
        """Process one line. Raises ConfigInvalid."""
        try:
            content = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8
            if line.endswith(b"\n"):
                self._refuse(number, f"is not JSON: {error}")
            self._refuse(number, "is cut short: the recorder was killed or the disk was full")
        try:
            self._take(content)
        except _Malformed as error:
            self._refuse(number, str(error))

    def _take(self, line: object) -> None:
        if not isinstance(line, dict):
            raise _Malformed("is not JSON object")
        fields = line.keys() - {"at_s", "uuid"}
        at_s = _seconds("at_s", line.get("at_s"))
        if at_s < self.at_s:
            raise _Malformed(f"goes back in time: second {at_s} after second {self.at_s}")
        self.at_s = at_s
        if "uuid" in line:
            self._take_state(line["uuid"], {name: line[name] for name in fields})
        elif fields == {"devices"}:
            self._take_devices(line["devices"])
        elif fields:
            raise _Malformed(f"has {', '.join(sorted(fields))} but no uuid")

    def _take_devices(self, devices: object) -> None:
        if not isinstance(devices, list):
            raise _Malformed("has devices that are not a list")
        infos = tuple(_device(each) for each in devices)
        if len({info.uuid for info in infos}) != len(infos):
            raise _Malformed("names a device twice")
        for info in infos:
            self.devices.setdefault(info.uuid, info)
            self.states.setdefault(info.uuid, _Steps())
        self.presence.add(self.at_s, infos)

    def _take_state(self, uuid: object, fields: dict[str, Any]) -> None:
        steps = self.states.get(uuid) if isinstance(uuid, str) else None
        if steps is None:
            raise _Malformed(f"names a device that no line introduced: {uuid!r}")
        old = steps.at(self.at_s, RecordedState())
        if fields.keys() == {"total_bytes", "free_bytes"}:
            new = replace(old, memory=_memory(fields), memory_error=None)
        elif fields.keys() == {"error"}:
            new = replace(old, memory=None, memory_error=_text(fields["error"]))
        elif fields.keys() == {"detail"}:
            new = replace(old, detail=_detail(fields["detail"], old.detail), detail_error=None)
        elif fields.keys() == {"detail_error"}:
            new = replace(old, detail=None, detail_error=_text(fields["detail_error"]))
        else:
            raise _Malformed(
                "must have total_bytes and free_bytes, or error, or detail, or detail_error, "
                f"but has {', '.join(sorted(fields)) or 'nothing'}"
            )
        steps.add(self.at_s, new)

    def _header(self, line: bytes) -> tuple[str, float | None]:
        """(source, interval_s) of the first line; also records its devices."""
        foreign = f"{self.path} is not a recording of vram-monitor; `vram-monitor record FILE` makes one"
        if not line:
            raise ConfigInvalid(f"{self.path} is empty, not a recording; `vram-monitor record FILE` makes one")
        try:
            header = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            if f'"{FORMAT}"'.encode() in line and not line.endswith(b"\n"):
                raise ConfigInvalid(
                    f"the recording {self.path}, line 1, is cut short: nothing was recorded yet, and nothing can be saved"
                ) from error
            raise ConfigInvalid(foreign) from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ConfigInvalid(foreign)
        if (version := header.get("version")) != VERSION:
            raise ConfigInvalid(
                f"the recording {self.path} is of version {version!r}, but this pagetide reads version {VERSION}; "
                "play it with the pagetide that made it, or a newer one"
            )
        try:
            source, interval_s = _text(header.get("source")), header.get("interval_s")
            interval_s = None if interval_s is None else _seconds("interval_s", interval_s)
            self._take_devices(header.get("devices"))
        except _Malformed as error:
            self._refuse(1, str(error))
        return source, interval_s

    def _refuse(self, number: int, why: str) -> NoReturn:
        name = shlex.quote(str(self.path))
        rescue = f"; what stands before it is whole: head -n {number - 1} {name} > rescued.jsonl" if number > 1 else ""
        raise ConfigInvalid(f"the recording {self.path}, line {number}, {why}{rescue}")


# ---- checked values: each raises _Malformed -----------------------------------------------------


def _device(value: object) -> DeviceInfo:
    return _build(DeviceInfo, value, kind=_kind)


def _kind(value: object) -> DeviceKind:
    try:
        return DeviceKind(value)  # type: ignore[arg-type]  # what is no kind is refused
    except ValueError:
        raise _Malformed(f"has a device of unknown kind {value!r}; known are {', '.join(DeviceKind)}") from None


def _memory(value: object) -> MemoryReading:
    memory = _build(MemoryReading, value)
    total, free = memory.total_bytes, memory.free_bytes
    if total is not None and free is not None and free > total:
        raise _Malformed(f"has more free bytes than there are: {free} of {total}")
    return memory


def _detail(value: object, old: DetailReading | None) -> DetailReading:
    """The fields in `value`, with those of `old` for the others."""
    changed = _build(DetailReading, value, processes=_processes)
    if old is None:
        return changed
    assert isinstance(value, dict)  # since it was built
    return replace(old, **{name: getattr(changed, name) for name in value})


def _processes(value: object) -> tuple[ProcessUse, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _Malformed(f"has processes that are not a list: {value!r:.80}")
    return tuple(_build(ProcessUse, each) for each in value)


def _build(cls: type[T], value: object, **converted: Callable[[object], Any]) -> T:
    """`value` as an object of the dataclass `cls`, with fields of the declared types or converted by `converted`."""
    if not isinstance(value, dict):
        raise _Malformed(f"has {value!r:.80} where {cls.__name__} should stand")
    required, types = _DECLARED[cls]
    if wrong := (required - value.keys()) | (value.keys() - types.keys()):
        raise _Malformed(f"has a {cls.__name__} that lacks, or should not have: {', '.join(sorted(wrong))}")
    built = {}
    for name, given in value.items():
        if name in converted:
            given = converted[name](given)
        elif isinstance(given, bool) or not isinstance(given, types[name]):
            raise _Malformed(f"has a wrong kind of {name}: {given!r:.80}")
        elif name.endswith("_bytes") and given is not None and not 0 <= given < 1 << 63:
            raise _Malformed(f"has {name} that no memory has: {given}")
        built[name] = given
    return cls(**built)


def _declared(cls: type) -> tuple[frozenset[str], dict[str, Any]]:
    """The required fields, and the types of all fields; a whole number is a float too."""
    required = frozenset(each.name for each in fields(cls) if each.default is MISSING)
    types = {name: kind | int if kind == float | None else kind for name, kind in get_type_hints(cls).items()}
    return required, types


_DECLARED: dict[type[Any], tuple[frozenset[str], dict[str, Any]]] = {
    cls: _declared(cls) for cls in (DeviceInfo, MemoryReading, DetailReading, ProcessUse)
}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"has {value!r:.80} where a text should stand")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
        raise _Malformed(f"needs {name}, a number of seconds, but has {value!r:.80}")
    return float(value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
