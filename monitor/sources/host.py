"""This machine's memory as a device, with its processes; or a test device of a given size, filled by given processes.

The host's used bytes are total - free: processes, the kernel, and written files that are not yet on disk. A process's
use is its resident set (RSS). Pages shared by several processes count for each of them, so the sum over processes may
differ from the used bytes.

A test device is used by the resident sets of its members, without their children: used = sum of RSS, at most the
capacity. A forked member counts its parent's pages again.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from mmap import PAGESIZE
from pathlib import Path

from ...common.host_memory import CGROUPS, PROC, Cgroup, HostMemoryReader, limiting_cgroup
from ...common.on_error import OnError
from ...common.units import MIB, format_bytes
from ..errors import ConfigInvalid, DeviceUnreadable
from ..snapshot import MAX_HOST_PROCESSES, DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse
from .process_facts import IdleTimes, ProcessFacts, ProcessTable, all_pids, resident_bytes

SMALLEST_SHOWN_BYTES = MIB
_LEAST_LOAD = 0.01  # share of a core below which a process counts as idle

_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


class HostSource:
    """One device of kind HOST. The module's docstring defines its figures."""

    name = "host"

    def __init__(
        self,
        capacity_bytes: int | None = None,
        members: Sequence[int] = (),
        *,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
        machine_id: str | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """With `capacity_bytes`: a test device, used by the processes `members`.

        The cgroup that limits this process is determined once, here, so that the device keeps its uuid; the limit is
        read every time. `machine_id` replaces this machine's. Raises ConfigInvalid: members without a capacity, a
        capacity below 1 byte, a missing process.
        """
        if capacity_bytes is None and members:
            raise ConfigInvalid("members are the processes of a test device; name its size too, such as --capacity 2GiB")
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigInvalid(f"the capacity of a test device must be at least 1 byte, got {capacity_bytes}")
        self._capacity_bytes = capacity_bytes
        self._host = HostMemoryReader(proc, cgroups, lambda: clock() / 1e9)
        self._cgroup = limiting_cgroup(proc, cgroups) if capacity_bytes is None else None
        self._info = _info(capacity_bytes, self._cgroup, _machine_id() if machine_id is None else machine_id)
        self._table = ProcessTable()
        self._clock = clock
        self._idle = IdleTimes()
        self._processor_s: dict[Hashable, float] = {}  # at the last listing, by pid and start
        self._listed_ns = 0
        self._lock = threading.Lock()  # guards the members: a file must not be closed while it is read
        self._members: tuple[_Member, ...] = ()
        if members:
            self.set_members(members)

    def set_members(self, pids: Iterable[int]) -> None:
        """Set the processes that use the test device. Thread-safe.

        A running member is kept. An ended member counts as 0 bytes, and may still be listed. Raises ConfigInvalid, and
        changes nothing: a missing process that was no member; no test device.
        """
        if self._capacity_bytes is None:
            raise ConfigInvalid("host memory is used by every process; only a test device has members")
        with self._lock:
            old = {member.pid: member for member in self._members}
            new: dict[int, _Member] = {}
            with OnError(lambda: _close(new.values(), keep=self._members)):
                for pid in dict.fromkeys(pids):
                    new[pid] = _continued(old.get(pid), pid)
            _close(self._members, keep=new.values())
            self._members = tuple(new.values())

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The one device."""
        return (self._info,)

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """Total and free bytes now. Raises DeviceUnreadable."""
        try:
            if self._capacity_bytes is None:
                with self._lock:
                    return MemoryReading(*self._host.read())
            with self._lock:
                used_bytes = sum(member.resident_bytes() for member in self._members)
            return MemoryReading(self._capacity_bytes, max(0, self._capacity_bytes - used_bytes))
        except OSError as error:
            raise DeviceUnreadable(f"host memory cannot be read: {error}") from error

    def detail(self, device: DeviceInfo) -> DetailReading:
        """The 64 largest processes, largest first: members, or those of the machine or cgroup with at least 1 MiB.

        Processes hidden by the system are missing. Raises DeviceUnreadable.
        """
        try:
            found = self._sizes() if self._capacity_bytes is None else self._member_sizes()
        except OSError as error:
            raise DeviceUnreadable(f"the processes cannot be listed: {error}") from error
        largest = dict(sorted(found, key=lambda item: (-item[1], item[0]))[:MAX_HOST_PROCESSES])
        facts = self._table.facts(largest)  # without those that have just ended
        idle = self._idle_seconds(facts.values())
        uses = (
            ProcessUse(
                pid, largest[pid], kind="host", user=of.user, command=of.command, cgroup=of.cgroup,
                idle_seconds=idle.get((pid, of.start)),
            )
            for pid, of in facts.items()
        )  # fmt: skip
        return DetailReading(processes=tuple(uses))

    def close(self) -> None:
        """Close the files that are kept open. Idempotent."""
        with self._lock:
            self._host.close()
            _close(self._members)
            self._members = ()

    def _sizes(self) -> list[tuple[int, int]]:
        """(pid, resident bytes) of the processes that are not small. Takes about 6 µs per process on the machine."""
        pids = all_pids() if self._cgroup is None else _pids_within(self._cgroup.directory)
        sizes = ((pid, resident_bytes(pid)) for pid in pids)
        return [(pid, size) for pid, size in sizes if size is not None and size >= SMALLEST_SHOWN_BYTES]

    def _member_sizes(self) -> list[tuple[int, int]]:
        """(pid, resident bytes) of the running members."""
        with self._lock:
            return [(member.pid, size) for member in self._members if (size := member.resident_bytes())]

    def _idle_seconds(self, processes: Iterable[ProcessFacts]) -> Mapping[Hashable, float]:
        """How long each process has used less than 1 % of a core, from one listing to the next."""
        before, now_ns = self._processor_s, self._clock()
        least_s = _LEAST_LOAD * (now_ns - self._listed_ns) / 1e9
        self._processor_s = {(of.pid, of.start): of.processor_s for of in processes if of.processor_s is not None}
        self._listed_ns = now_ns
        used = {key: spent_s - before.get(key, spent_s) > least_s for key, spent_s in self._processor_s.items()}
        return self._idle.update(used, now_ns)


class _Member:
    """A process of a test device, distinct from later processes with the same pid."""

    def __init__(self, pid: int) -> None:
        """Raises ConfigInvalid if there is no such process, or it is hidden."""
        import psutil

        self.pid = pid
        self._statm: int | None = None
        try:
            self.process = psutil.Process(pid)
            if sys.platform == "linux":
                # An open file stays with the process for which it was opened, and is read in half a microsecond.
                self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY)
            if self.process.is_running():
                return
        except (psutil.AccessDenied, PermissionError):
            raise ConfigInvalid(f"process {pid} is another user's, whose memory this system hides from us") from None
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, ValueError, OverflowError):
            pass
        self.close()
        raise ConfigInvalid(f"there is no process {pid}; members must run already")

    def resident_bytes(self) -> int:
        """Bytes of its resident set, 0 once it ended. Raises OSError."""
        if self._statm is None:
            return self._resident_by_psutil()
        try:
            pages = os.pread(self._statm, 256, 0).split()[1]  # proc(5): size resident shared ...
        except ProcessLookupError:
            return 0
        return int(pages) * PAGESIZE

    def _resident_by_psutil(self) -> int:
        import psutil

        try:
            return int(self.process.memory_info().rss) if self.process.is_running() else 0
        except psutil.NoSuchProcess:
            return 0
        except psutil.AccessDenied as error:
            raise PermissionError(f"process {self.pid} is not ours to see") from error

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


def _continued(member: _Member | None, pid: int) -> _Member:
    """The member if it runs, else the process that has its pid now, else the dead member. Raises ConfigInvalid."""
    if member is not None and member.resident_bytes():
        return member
    try:
        return _Member(pid)
    except ConfigInvalid:
        if member is None:
            raise
        return member


def _close(members: Iterable[_Member], keep: Iterable[_Member] = ()) -> None:
    kept = set(keep)
    for member in members:
        if member not in kept:
            member.close()


def _pids_within(directory: Path) -> set[int]:
    """The processes in a cgroup and its descendants."""
    pids: set[int] = set()
    for folder, _, files in os.walk(directory):
        if "cgroup.procs" in files:
            try:
                pids.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
            except FileNotFoundError:  # just removed
                continue
    return pids


def _info(capacity_bytes: int | None, cgroup: Cgroup | None, machine_id: str) -> DeviceInfo:
    """The device. Its uuid hashes the machine's id, which must stay secret, and the scope of the memory limit."""
    if capacity_bytes is not None:
        name, scope = f"test device of {format_bytes(capacity_bytes)}", f"capacity {capacity_bytes}"
    elif cgroup is None:
        name, scope = "host memory", "machine"
    else:
        # The root that a container sees has the same path in all of them, but their host names differ.
        place = socket.gethostname() if cgroup.path == "/" else cgroup.path
        name, scope = f"host memory of cgroup {cgroup.path}", f"cgroup {place}"
    digest = hashlib.sha256(f"pagetide host memory\0{machine_id}\0{scope}".encode()).digest()
    hexes = digest[:16].hex()
    uuid = "-".join((hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]))
    return DeviceInfo(uuid=f"HOST-{uuid}", index="host", kind=DeviceKind.HOST, name=name)


def _machine_id(files: Sequence[Path] = _MACHINE_ID_FILES) -> str:
    """The machine's permanent id (machine-id(5)), or its host name."""
    for file in files:
        try:
            if found := file.read_text().strip():
                return found
        except OSError:  # not every system has one
            continue
    return socket.gethostname()
