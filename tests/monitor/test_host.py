"""Host memory as a device: real processes that take and return memory, are killed, and change what they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable
from pagetide.monitor.host_memory import CGROUPS, PROC
from pagetide.monitor.snapshot import DeviceKind, MemoryReading, ProcessUse
from pagetide.monitor.sources.host import MAX_PROCESSES, SMALLEST_SHOWN_BYTES, HostSource

MIB = 1 << 20
CAPACITY = 2 << 30
SLACK = 4 * MIB  # what an interpreter may take or give back beside what it was told to
linux = pytest.mark.skipif(sys.platform != "linux", reason="lays out /proc and cgroups")

CHILD = """
import mmap, os, sys
print("ready", flush=True)
held = None
for line in sys.stdin:
    word, _, amount = line.partition(" ")
    if word == "hold":
        if held is not None:
            held.close()
        held = mmap.mmap(-1, int(amount) << 20) if int(amount) else None
        if held is not None:
            for page in range(0, len(held), mmap.PAGESIZE):
                held[page] = 1
    elif word == "become":
        os.execv(sys.executable, [sys.executable, *sys.argv[:1], amount.strip()])
    print("done", flush=True)
"""


class Child:
    """A process that holds as many MiB as it is told to."""

    def __init__(self, script: Path) -> None:
        command = [sys.executable, str(script), "first"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self._answer("ready")

    def _answer(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{expected}\n"

    def tell(self, order: str, answer: str = "done") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        self._answer(answer)

    def hold(self, mib: int) -> None:
        self.tell(f"hold {mib}")

    def kill(self, *, reap: bool = True) -> None:
        self._process.kill()
        if reap:
            self.end()
        else:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return script


@pytest.fixture
def start(script: Path) -> Iterator[Callable[[], Child]]:
    """Starts children that are gone after the test."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(script))
        return children[-1]

    yield start
    for child in children:
        child.end()


@pytest.fixture
def opened() -> Iterator[Callable[..., HostSource]]:
    """Makes sources that are closed after the test."""
    sources: list[HostSource] = []

    def opened(
        capacity_bytes: int | None = None,
        *members: int,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
        machine_id: str = "m",
    ) -> HostSource:
        sources.append(HostSource(capacity_bytes, members, proc=proc, cgroups=cgroups, machine_id=machine_id))
        return sources[-1]

    yield opened
    for source in sources:
        source.close()


Opened = Callable[..., HostSource]
Start = Callable[[], Child]


def memory(source: HostSource) -> MemoryReading:
    (device,) = source.scan()
    return source.memory(device)


def used(source: HostSource) -> int:
    reading = memory(source)
    assert reading.total_bytes is not None and reading.free_bytes is not None
    return reading.total_bytes - reading.free_bytes


def processes(source: HostSource) -> tuple[ProcessUse, ...]:
    (device,) = source.scan()
    detail = source.detail(device)
    assert detail.utilization is None
    assert detail.processes is not None
    return detail.processes


def machine(tmp_path: Path, limit: str = "max") -> tuple[Path, Path]:
    """(proc, cgroups) of a machine of 1,000 KiB, this process in /slice/job, where the limit lies on the slice."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/slice/job\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (cgroups / "slice" / "job" / "deep").mkdir(parents=True)
    for name, text in {"max": limit, "current": "5000", "stat": "inactive_file 100"}.items():
        (cgroups / "slice" / f"memory.{name}").write_text(f"{text}\n")
    return proc, cgroups


# ---- the machine's memory -----------------------------------------------------------------------


@linux
def test_the_device_is_the_machine(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path)
    source = opened(proc=proc, cgroups=cgroups)
    (device,) = source.scan()
    assert (source.name, device.index, device.kind, device.name) == ("host", "host", DeviceKind.HOST, "host memory")
    assert re.fullmatch(r"HOST-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.uuid)
    assert memory(source) == MemoryReading(1000 * 1024, 600 * 1024)


@linux
def test_the_device_is_the_cgroup_where_that_has_a_limit(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path, limit="9000")
    source = opened(proc=proc, cgroups=cgroups)
    assert source.scan()[0].name == "host memory of cgroup /slice"
    assert memory(source) == MemoryReading(9000, 4100)
    (cgroups / "slice" / "memory.max").write_text("8000\n")  # a limit that changes is the same device's
    assert memory(source) == MemoryReading(8000, 3100)


@linux
def test_the_uuid_is_the_machines_and_the_limits_and_tells_neither(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path, limit="9000")
    secret = "3d1219c7c4c5404aaa1f6d2a48adfda4"
    uuids = [
        source.scan()[0].uuid
        for source in (
            opened(machine_id=secret, proc=tmp_path / "none", cgroups=cgroups),
            opened(machine_id=secret, proc=proc, cgroups=cgroups),
            opened(machine_id="another", proc=proc, cgroups=cgroups),
            opened(CAPACITY, machine_id=secret),
            opened(CAPACITY + 1, machine_id=secret),
        )
    ]
    assert len(set(uuids)) == len(uuids)
    assert not any(secret[:8] in uuid.replace("-", "") for uuid in uuids)
    assert uuids[1] == opened(machine_id=secret, proc=proc, cgroups=cgroups).scan()[0].uuid
    assert uuids[3] == opened(CAPACITY, os.getpid(), machine_id=secret).scan()[0].uuid


def test_this_machine_has_one_uuid() -> None:
    first, second = HostSource(), HostSource()
    assert first.scan() == second.scan()
    (device,) = first.scan()
    for file in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        if Path(file).is_file() and (secret := Path(file).read_text().strip()):
            assert secret not in device.uuid.replace("-", "")


@linux
def test_kernel_files_that_cannot_be_read_make_the_device_unreadable(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path)
    source = opened(proc=proc, cgroups=cgroups)
    (proc / "meminfo").unlink()
    (proc / "meminfo").mkdir()
    with pytest.raises(DeviceUnreadable, match=r"host memory cannot be read: .*directory"):
        memory(source)


def test_processes_of_the_machine_are_the_largest_with_their_memory() -> None:
    uses = processes(HostSource())
    assert 0 < len(uses) <= MAX_PROCESSES
    sizes = [use.used_bytes or 0 for use in uses]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= SMALLEST_SHOWN_BYTES
    assert len({use.pid for use in uses}) == len(uses)
    assert {use.kind for use in uses} == {"host"}


@linux
def test_processes_of_a_cgroup_are_those_in_it_and_below(
    tmp_path: Path, opened: Opened, script: Path, start: Start
) -> None:
    proc, cgroups = machine(tmp_path, limit="9000")
    larger, smaller, outside = start(), start(), start()
    larger.hold(32)
    outside.hold(64)
    (cgroups / "slice" / "cgroup.procs").write_text("")
    (cgroups / "slice" / "job" / "cgroup.procs").write_text(f"0\n{smaller.pid}\n")  # 0: in a namespace not ours
    (cgroups / "slice" / "job" / "deep" / "cgroup.procs").write_text(f"{larger.pid}\n")
    source = opened(proc=proc, cgroups=cgroups)
    uses = processes(source)
    assert [use.pid for use in uses] == [larger.pid, smaller.pid]
    user = psutil.Process().username()
    assert {(use.user, use.command) for use in uses} == {(user, f"{sys.executable} {script} first")}
    sizes = [use.used_bytes or 0 for use in uses]
    assert sizes[0] - sizes[1] == pytest.approx(32 * MIB, abs=SLACK)

    smaller.tell("become second", answer="ready")
    larger.kill()
    (use,) = processes(source)
    assert (use.pid, use.user, use.command) == (smaller.pid, user, f"{sys.executable} {script} second")


# ---- a test device ------------------------------------------------------------------------------


def test_a_test_device_holds_what_its_members_hold(opened: Opened, start: Start) -> None:
    first, second, other = start(), start(), start()
    source = opened(CAPACITY, first.pid, second.pid)
    assert source.scan()[0].name == "test device of 2.00 GiB"
    assert memory(source).total_bytes == CAPACITY
    before = used(source)
    assert 0 < before < 200 * MIB
    first.hold(64)
    assert used(source) - before == pytest.approx(64 * MIB, abs=SLACK)
    second.hold(100)
    other.hold(200)
    assert used(source) - before == pytest.approx(164 * MIB, abs=SLACK)
    assert [use.pid for use in processes(source)] == [second.pid, first.pid]
    assert sum(use.used_bytes or 0 for use in processes(source)) == pytest.approx(used(source), abs=SLACK)
    first.hold(0)
    assert used(source) - before == pytest.approx(100 * MIB, abs=SLACK)
    second.hold(10)
    assert used(source) - before == pytest.approx(10 * MIB, abs=SLACK)


def test_a_test_device_is_never_more_than_full(opened: Opened, start: Start) -> None:
    child = start()
    child.hold(32)
    assert memory(opened(16 * MIB, child.pid)) == MemoryReading(16 * MIB, 0)


def test_a_dead_member_holds_nothing(opened: Opened, start: Start) -> None:
    alive, killed = start(), start()
    source = opened(CAPACITY, alive.pid, killed.pid)
    alone = used(opened(CAPACITY, alive.pid))
    killed.hold(64)
    assert used(source) > alone + 64 * MIB
    killed.kill(reap=False)  # a zombie first
    deadline = time.monotonic() + 30
    while used(source) > alone + SLACK and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel takes the memory back in its own time
    for _ in range(2):
        assert used(source) == pytest.approx(alone, abs=SLACK)
        assert [use.pid for use in processes(source)] == [alive.pid]
        killed.end()


def test_members_come_and_go(opened: Opened, start: Start) -> None:
    first, second = start(), start()
    first.hold(64)
    source = opened(CAPACITY)
    assert memory(source) == MemoryReading(CAPACITY, CAPACITY)
    assert processes(source) == ()
    source.set_members([first.pid, second.pid, first.pid])
    assert [use.pid for use in processes(source)] == [first.pid, second.pid]
    source.set_members([second.pid])
    assert [use.pid for use in processes(source)] == [second.pid]
    second.kill()
    source.set_members([first.pid, second.pid])  # one that was a member may have ended meanwhile
    assert [use.pid for use in processes(source)] == [first.pid]
    source.set_members([])
    assert memory(source) == MemoryReading(CAPACITY, CAPACITY)


def gone(start: Start) -> int:
    """The id of a process that is no more."""
    child = start()
    child.kill()
    return child.pid


def test_a_process_that_is_not_there_is_refused_and_nothing_changes(opened: Opened, start: Start) -> None:
    pid = gone(start)
    with pytest.raises(ConfigInvalid, match=f"there is no process {pid}; members must run already"):
        HostSource(CAPACITY, [os.getpid(), pid])
    child = start()
    source = opened(CAPACITY, child.pid)
    with pytest.raises(ConfigInvalid, match=f"no process {pid}"):
        source.set_members([os.getpid(), pid])
    assert [use.pid for use in processes(source)] == [child.pid]
    for never in (0, -1, 1 << 40):
        with pytest.raises(ConfigInvalid, match=f"no process {never}"):
            source.set_members([never])


@pytest.mark.parametrize(
    ("capacity", "members", "said"),
    [
        (None, [1], "members are the processes of a test device; name its size too"),
        (0, [], "at least 1 byte, got 0"),
        (-5, [], "at least 1 byte, got -5"),
    ],
)
def test_a_test_device_needs_a_size(capacity: int | None, members: list[int], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        HostSource(capacity, members)


def test_the_machine_has_no_members() -> None:
    with pytest.raises(ConfigInvalid, match="only a test device has members"):
        HostSource().set_members([os.getpid()])


def reused(pid: int, script: Path) -> Child | None:
    """A new process with the id of one that ended; None where this system does not let us have it."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        child = Child(script)
        if child.pid == pid:
            return child
        child.end()
    return None


@linux
def test_another_process_of_the_same_id_is_no_member(
    tmp_path: Path, opened: Opened, start: Start, script: Path
) -> None:
    first, second = start(), start()
    first.hold(64)
    proc, cgroups = machine(tmp_path, limit="9000")
    (cgroups / "slice" / "cgroup.procs").write_text(f"{first.pid}\n")
    source, limited = opened(CAPACITY, first.pid, second.pid), opened(proc=proc, cgroups=cgroups)
    (old,) = processes(limited)
    first.kill()
    if (impostor := reused(first.pid, script)) is None:
        pytest.skip("needs the right to choose a process id")
    try:
        impostor.hold(128)
        assert [use.pid for use in processes(source)] == [second.pid]
        assert used(source) < 64 * MIB
        processes(limited)  # notices that it is another one
        (new,) = processes(limited)
        assert (new.used_bytes or 0) - (old.used_bytes or 0) == pytest.approx(64 * MIB, abs=SLACK)
        source.set_members([impostor.pid, second.pid])  # named again, it is meant
        assert [use.pid for use in processes(source)] == [impostor.pid, second.pid]
        assert used(source) > 128 * MIB
    finally:
        impostor.end()


@linux
def test_closing_gives_the_files_of_the_members_back(start: Start) -> None:
    pids = [start().pid for _ in range(3)]
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    source = HostSource(CAPACITY, pids)
    assert len(list(descriptors.iterdir())) == before + 3
    source.set_members(pids[:1])
    with pytest.raises(ConfigInvalid):
        source.set_members([*pids, -1])
    assert len(list(descriptors.iterdir())) == before + 1
    source.close()
    source.close()
    assert len(list(descriptors.iterdir())) == before
