"""Host memory: kernel files of every layout, laid out in a folder; and real processes that take and return memory."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from broker_rig import Process, processes
from kernel_files import fake, v2

from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable
from pagetide.monitor.snapshot import MAX_HOST_PROCESSES, DeviceKind, MemoryReading, ProcessUse
from pagetide.monitor.sources.host import SMALLEST_SHOWN_BYTES, HostSource
from pagetide.monitor.sources.process_facts import cgroup_of

MIB = 1 << 20
CAPACITY = 2 << 30
SLACK = 4 * MIB  # what an interpreter may take or give back beside what it was told to
linux = pytest.mark.skipif(sys.platform != "linux", reason="lays out /proc and cgroups")

CHILD = """
import mmap, os, sys
print('"ready"', flush=True)
held = None
for line in sys.stdin:
    word, amount = line.split()
    if word == "become":
        os.execv(sys.executable, [sys.executable, sys.argv[0], amount])
    if held is not None:
        held.close()
    held = mmap.mmap(-1, int(amount) << 20) if int(amount) else None
    for page in range(0, int(amount) << 20, mmap.PAGESIZE):
        held[page] = 1
    print('"done"', flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Starts processes that hold as many MiB as they are told to, and are gone after the test."""

    class Child(Process):
        file = str(tmp_path / "child.py")

        def hold(self, mib: int) -> None:
            assert self.tell(f"hold {mib}") == "done"

    Path(Child.file).write_text(CHILD)
    with processes(Child) as start_one:
        yield lambda: start_one("first").start()


@pytest.fixture
def opened() -> Iterator[Callable[..., HostSource]]:
    with ExitStack() as sources:

        def opened(capacity_bytes: int | None = None, *members: int, **seams: Any) -> HostSource:
            source = HostSource(capacity_bytes, members, **{"machine_id": "m"} | seams)
            return sources.enter_context(closing(source))

        yield opened


Opened = Callable[..., HostSource]
Start = Callable[[], Any]


def memory(source: HostSource) -> MemoryReading:
    return source.memory(*source.scan())


def used(source: HostSource) -> int:
    reading = memory(source)
    return reading.total_bytes - reading.free_bytes


def uses_of(source: HostSource) -> tuple[ProcessUse, ...]:
    detail = source.detail(*source.scan())
    assert detail.utilization is None
    return detail.processes or ()


def machine(tmp_path: Path, limit: str = "max") -> tuple[Path, Path]:
    """(proc, cgroups) of a machine of 1,000 KiB, this process in /slice/job, where the limit lies on the slice."""
    proc, cgroups = fake(tmp_path, "0::/slice/job\n")
    v2(cgroups / "slice", limit, 5000, inactive=100)
    (cgroups / "slice" / "job" / "deep").mkdir(parents=True)
    return proc, cgroups


@linux
def test_the_device_is_the_machine_or_the_cgroup_where_that_has_a_limit(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path)
    source = opened(proc=proc, cgroups=cgroups)
    (device,) = source.scan()
    assert (source.name, device.index, device.kind, device.name) == ("host", "host", DeviceKind.HOST, "host memory")
    assert re.fullmatch(r"HOST-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.uuid)
    assert memory(source) == MemoryReading(1000 * 1024, 600 * 1024)
    proc, cgroups = machine(tmp_path / "limited", limit="9000")
    source = opened(proc=proc, cgroups=cgroups, clock=itertools.count(0, 10**9).__next__)
    assert source.scan()[0].name == "host memory of cgroup /slice"
    assert memory(source) == MemoryReading(9000, 4100)
    (cgroups / "slice" / "memory.max").write_text("8000\n")  # a limit that changes is the same device's
    assert memory(source) == MemoryReading(8000, 3100)


@linux
def test_the_uuid_is_the_machines_and_the_limits_and_tells_neither(tmp_path: Path, opened: Opened) -> None:
    proc, cgroups = machine(tmp_path, limit="9000")
    secret = "3d1219c7c4c5404aaa1f6d2a48adfda4"

    def uuid(*arguments: int, **seams: Any) -> str:
        return opened(*arguments, **{"machine_id": secret} | seams).scan()[0].uuid

    limited = uuid(proc=proc, cgroups=cgroups)
    others = [uuid(proc=tmp_path / "none", cgroups=cgroups), uuid(machine_id="another", proc=proc, cgroups=cgroups)]
    uuids = [limited, *others, uuid(CAPACITY), uuid(CAPACITY + 1)]
    assert len(set(uuids)) == len(uuids)
    assert not any(secret[:8] in uuid.replace("-", "") for uuid in uuids)
    assert uuid(proc=proc, cgroups=cgroups) == limited and uuid(CAPACITY, os.getpid()) == uuid(CAPACITY)
    assert HostSource().scan() == HostSource().scan()
    (device,) = HostSource().scan()
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
    uses = uses_of(HostSource())
    assert 0 < len(uses) <= MAX_HOST_PROCESSES
    sizes = [use.used_bytes or 0 for use in uses]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= SMALLEST_SHOWN_BYTES
    assert len({use.pid for use in uses}) == len(uses)
    assert {use.kind for use in uses} == {"host"}


@linux
def test_processes_of_a_cgroup_are_those_in_it_and_below(tmp_path: Path, opened: Opened, start: Start) -> None:
    proc, cgroups = machine(tmp_path, limit="9000")
    larger, smaller, outside = start(), start(), start()
    larger.hold(32)
    outside.hold(64)
    (cgroups / "slice" / "cgroup.procs").write_text("")
    (cgroups / "slice" / "job" / "cgroup.procs").write_text(f"0\n{smaller.pid}\n")  # 0: in a namespace not ours
    (cgroups / "slice" / "job" / "deep" / "cgroup.procs").write_text(f"{larger.pid}\n")
    source = opened(proc=proc, cgroups=cgroups)
    uses = uses_of(source)
    assert [use.pid for use in uses] == [larger.pid, smaller.pid]
    user = psutil.Process().username()
    assert {(use.user, use.command) for use in uses} == {(user, f"{sys.executable} {larger.file} first")}
    sizes = [use.used_bytes or 0 for use in uses]
    assert sizes[0] - sizes[1] == pytest.approx(32 * MIB, abs=SLACK)

    assert smaller.tell("become second") == "ready"
    larger.kill()
    (use,) = uses_of(source)
    assert (use.pid, use.user, use.command) == (smaller.pid, user, f"{sys.executable} {larger.file} second")


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
    assert [use.pid for use in uses_of(source)] == [second.pid, first.pid]
    assert sum(use.used_bytes or 0 for use in uses_of(source)) == pytest.approx(used(source), abs=SLACK)
    assert memory(opened(16 * MIB, second.pid)) == MemoryReading(16 * MIB, 0), "never more than full"
    first.hold(0)
    assert used(source) - before == pytest.approx(100 * MIB, abs=SLACK)
    second.hold(10)
    assert used(source) - before == pytest.approx(10 * MIB, abs=SLACK)


def test_a_dead_member_holds_nothing(opened: Opened, start: Start) -> None:
    alive, killed = start(), start()
    source = opened(CAPACITY, alive.pid, killed.pid)
    alone = used(opened(CAPACITY, alive.pid))
    killed.hold(64)
    assert used(source) > alone + 64 * MIB
    killed.process.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # a zombie first
    deadline = time.monotonic() + 30
    while used(source) > alone + SLACK and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel takes the memory back in its own time
    for _ in range(2):
        assert used(source) == pytest.approx(alone, abs=SLACK)
        assert [use.pid for use in uses_of(source)] == [alive.pid]
        killed.kill()


def test_members_come_and_go(opened: Opened, start: Start) -> None:
    first, second = start(), start()
    first.hold(64)
    source = opened(CAPACITY)
    assert memory(source) == MemoryReading(CAPACITY, CAPACITY)
    assert uses_of(source) == ()
    source.set_members([first.pid, second.pid, first.pid])
    assert [use.pid for use in uses_of(source)] == [first.pid, second.pid]
    source.set_members([second.pid])
    assert [use.pid for use in uses_of(source)] == [second.pid]
    second.kill()
    source.set_members([first.pid, second.pid])  # one that was a member may have ended meanwhile
    assert [use.pid for use in uses_of(source)] == [first.pid]
    source.set_members([])
    assert memory(source) == MemoryReading(CAPACITY, CAPACITY)


def test_what_is_no_member_or_no_size_is_refused_and_nothing_changes(opened: Opened, start: Start) -> None:
    gone = start()
    gone.kill()
    pid = gone.pid
    with pytest.raises(ConfigInvalid, match=f"there is no process {pid}; members must run already"):
        HostSource(CAPACITY, [os.getpid(), pid])
    child = start()
    source = opened(CAPACITY, child.pid)
    with pytest.raises(ConfigInvalid, match=f"no process {pid}"):
        source.set_members([os.getpid(), pid])
    assert [use.pid for use in uses_of(source)] == [child.pid]
    for never in (0, -1, 1 << 40):
        with pytest.raises(ConfigInvalid, match=f"no process {never}"):
            source.set_members([never])
    for capacity, members, said in (
        (None, [1], "members are the processes of a test device; name its size too"),
        (0, [], "at least 1 byte, got 0"),
        (-5, [], "at least 1 byte, got -5"),
    ):
        with pytest.raises(ConfigInvalid, match=said):
            HostSource(capacity, members)
    with pytest.raises(ConfigInvalid, match="only a test device has members"):
        HostSource().set_members([os.getpid()])


def reused(pid: int, start: Start) -> Any:
    """A new process with the id of one that ended; None where this system does not let us have it."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        child = start()
        if child.pid == pid:
            return child
        child.kill()
    return None


@linux
def test_another_process_of_the_same_id_is_no_member(tmp_path: Path, opened: Opened, start: Start) -> None:
    first, second = start(), start()
    first.hold(64)
    proc, cgroups = machine(tmp_path, limit="9000")
    (cgroups / "slice" / "cgroup.procs").write_text(f"{first.pid}\n")
    source, limited = opened(CAPACITY, first.pid, second.pid), opened(proc=proc, cgroups=cgroups)
    (old,) = uses_of(limited)
    first.kill()
    if (impostor := reused(first.pid, start)) is None:
        pytest.skip("needs the right to choose a process id")
    impostor.hold(128)
    assert [use.pid for use in uses_of(source)] == [second.pid]
    assert used(source) < 64 * MIB
    uses_of(limited)  # notices that it is another one
    (new,) = uses_of(limited)
    assert (new.used_bytes or 0) - (old.used_bytes or 0) == pytest.approx(64 * MIB, abs=SLACK)
    source.set_members([impostor.pid, second.pid])  # named again, it is meant
    assert [use.pid for use in uses_of(source)] == [impostor.pid, second.pid]
    assert used(source) > 128 * MIB


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


@linux
def test_a_process_is_idle_from_when_it_used_less_than_a_hundredth_of_a_core(opened: Opened, start: Start) -> None:
    """Of real processes, with a clock of the test's: one sleeps, and one computes between two looks."""
    now_ns = [10**9]
    process = start().process.pid
    source = opened(2 << 30, process, os.getpid(), clock=lambda: now_ns[0])
    device = source.scan()[0]

    def idle() -> dict[int, float | None]:
        return {use.pid: use.idle_seconds for use in source.detail(device).processes or ()}

    assert idle() == {process: 0.0, os.getpid(): 0.0}
    for count in (1, 2):
        used_s = time.process_time() + 0.05
        while time.process_time() < used_s:  # ticks of the kernel are 10 ms
            pass
        now_ns[0] += 2 * 10**9
        assert idle() == {process: 2.0 * count, os.getpid(): 0.0}


def test_the_cgroup_of_a_process_is_that_of_its_memory(tmp_path: Path) -> None:
    def of(text: str) -> str | None:
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "cgroup").write_text(text)
        return cgroup_of(7, tmp_path)

    assert of("0::/system.slice/a.service\n") == "/system.slice/a.service"
    assert of("9:name=systemd:/\n4:memory:/docker/ab\n1:cpu,cpuacct:/else\n0::/\n") == "/docker/ab"
    assert of("9:name=systemd:/user.slice/a.scope\n4:memory:/\n0::/\n") == "/user.slice/a.scope"
    assert of("0::/\n") == of("4:memory:/\n0::/\n") == "/" and of("") == "/"
    assert of("0::/with:colon\n") == "/with:colon" and cgroup_of(8, tmp_path) is None
