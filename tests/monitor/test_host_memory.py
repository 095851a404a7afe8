"""How much memory the machine and its cgroups have and leave: kernel files of every layout, laid out in a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagetide.monitor.host_memory import Cgroup, free_host_bytes, host_memory, limiting_cgroup
from pagetide.monitor.snapshot import MemoryReading

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write(directory: Path, **files: str) -> None:
    """Files by their names, with "__" for "."."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def fake(tmp_path: Path, membership: str, *, total_kib: int = 1000, available_kib: int = 600) -> tuple[Path, Path]:
    """(proc, cgroups): a machine with that much memory, in which this process is a member of those cgroups."""
    write(tmp_path / "proc" / "self", cgroup=membership)
    meminfo = f"MemTotal: {total_kib:>15} kB\nMemFree:  17 kB\nMemAvailable: {available_kib:>8} kB\nBuffers:  3 kB\n"
    write(tmp_path / "proc", meminfo=meminfo)
    return tmp_path / "proc", tmp_path / "cgroup"


def v2(directory: Path, limit: str, use: int, inactive: int = 0) -> None:
    stat = f"anon 4\nfile 99\nactive_file 5\ninactive_file {inactive}\nworkingset_refault_file 7\n"
    write(directory, memory__max=f"{limit}\n", memory__current=f"{use}\n", memory__stat=stat)


def v1(directory: Path, limit: int, use: int, inactive: int = 0) -> None:
    stat = f"inactive_file 1\nhierarchical_memory_limit 77\ntotal_inactive_file {inactive}\n"
    write(directory, memory__limit_in_bytes=f"{limit}\n", memory__usage_in_bytes=f"{use}\n", memory__stat=stat)


def test_without_a_limit_the_machine_is_the_limit(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n")
    assert host_memory(proc, cgroups) == MemoryReading(1000 * 1024, 600 * 1024)
    assert free_host_bytes(proc, cgroups) == 600 * 1024
    assert limiting_cgroup(proc, cgroups) is None


def test_without_the_kernels_files_it_is_asked_by_psutil(tmp_path: Path) -> None:
    reading = host_memory(tmp_path / "no proc", tmp_path)
    assert reading.total_bytes == psutil.virtual_memory().total
    assert reading.free_bytes is not None and 64 * MIB < reading.free_bytes <= psutil.virtual_memory().total


def test_a_kernel_that_does_not_say_what_is_available_is_asked_by_psutil(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/\n")
    write(proc, meminfo="MemTotal: 1000 kB\nMemFree: 17 kB\n")
    assert host_memory(proc, cgroups).total_bytes == psutil.virtual_memory().total


@linux
def test_this_machine_agrees_with_psutil() -> None:
    reading, memory = host_memory(), psutil.virtual_memory()
    assert reading.total_bytes is not None and reading.free_bytes is not None
    assert 0 < reading.free_bytes <= reading.total_bytes <= memory.total
    if limiting_cgroup() is None:
        assert reading.total_bytes == memory.total


def test_cgroup_v2_leaves_limit_minus_use_plus_what_is_reclaimable(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a/b\n")
    v2(cgroups / "a" / "b", "9000", 5000, 700)
    assert host_memory(proc, cgroups) == MemoryReading(9000, 4700)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/a/b", cgroups / "a" / "b")
    v2(cgroups / "a", "6000", 5500, 100)  # the parent's limit holds too
    assert host_memory(proc, cgroups) == MemoryReading(6000, 600)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/a", cgroups / "a")
    v2(cgroups / "a" / "b", "max", 5000, 700)
    assert host_memory(proc, cgroups) == MemoryReading(6000, 600)
    v2(cgroups / "a", "6000", 7000, 100)
    assert host_memory(proc, cgroups) == MemoryReading(6000, 0)


def test_the_total_may_be_one_cgroups_limit_and_the_free_bytes_anothers(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a/b\n")
    v2(cgroups / "a" / "b", "6000", 1000)
    v2(cgroups / "a", "9000", 8500, 20)
    assert host_memory(proc, cgroups) == MemoryReading(6000, 520)


def test_a_machine_with_less_left_than_the_cgroup_says_so(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n", total_kib=1000, available_kib=2)
    v2(cgroups / "a", "9000", 1000)
    assert host_memory(proc, cgroups) == MemoryReading(9000, 2048)


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n", total_kib=10, available_kib=8)
    v2(cgroups / "a", str(10 * 1024), 10 * 1024)
    assert host_memory(proc, cgroups) == MemoryReading(10 * 1024, 8 * 1024)
    assert limiting_cgroup(proc, cgroups) is None


def test_what_is_free_is_never_more_than_the_total(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n")
    v2(cgroups / "a", "5000", 0, 300)  # the figures are read one after the other, and need not fit together
    assert host_memory(proc, cgroups) == MemoryReading(5000, 5000)


V1_MEMBERSHIP = "3:cpu:/x\n9:name=systemd:/\n4:memory:/docker/0123\n0::/\n"
NO_V1_LIMIT = 9223372036854771712  # what the kernel shows


def test_cgroup_v1_is_read_in_its_own_tree(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, V1_MEMBERSHIP)
    v1(cgroups / "memory", NO_V1_LIMIT, 90_000)
    assert host_memory(proc, cgroups) == MemoryReading(1000 * 1024, 600 * 1024)
    v1(cgroups / "memory" / "docker", 8000, 4000, 10)
    v1(cgroups / "memory" / "docker" / "0123", 5000, 3000, 500)
    assert host_memory(proc, cgroups) == MemoryReading(5000, 2500)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/docker/0123", cgroups / "memory" / "docker" / "0123")
    v2(cgroups / "x", "10", 10)  # not this process'
    assert host_memory(proc, cgroups) == MemoryReading(5000, 2500)


def test_a_controller_mounted_together_with_others(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "4:cpu,memory:/a\n")
    v1(cgroups / "memory" / "a", 5000, 3000)
    assert host_memory(proc, cgroups) == MemoryReading(5000, 2000)


def test_a_container_without_a_cgroup_namespace_sees_its_group_as_the_root(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, V1_MEMBERSHIP)
    v1(cgroups / "memory", 8000, 3000, 500)
    assert host_memory(proc, cgroups) == MemoryReading(8000, 5500)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/", cgroups / "memory")


def test_a_process_moved_to_another_cgroup_is_right_at_the_next_call(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n")
    v2(cgroups / "a", "5000", 1000)
    v2(cgroups / "b", "7000", 1000)
    assert host_memory(proc, cgroups) == MemoryReading(5000, 4000)
    write(proc / "self", cgroup="0::/b\n")
    assert host_memory(proc, cgroups) == MemoryReading(7000, 6000)


sizes = st.integers(0, 1200 * 1024)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    available=st.integers(0, 1000),
    groups=st.lists(st.tuples(st.one_of(st.just("max"), sizes.map(str)), sizes, sizes), max_size=4),
)
def test_any_nest_of_cgroups_agrees_with_the_definition(
    tmp_path: Path, available: int, groups: list[tuple[str, int, int]]
) -> None:
    proc, cgroups = fake(tmp_path, "0::/1/1/1/1\n", available_kib=available)
    for depth in range(5):
        v2(cgroups.joinpath(*["1"] * depth), *(groups[depth] if depth < len(groups) else ("max", 0, 0)))
    limited = [(int(limit), use, inactive) for limit, use, inactive in groups if limit != "max"]
    limited = [group for group in limited if group[0] < 1000 * 1024]
    total = min([1000 * 1024, *(limit for limit, _, _ in limited)])
    free = min([available * 1024, total, *(limit - use + inactive for limit, use, inactive in limited)])
    assert host_memory(proc, cgroups) == MemoryReading(total, max(0, free))
    assert free_host_bytes(proc, cgroups) == max(0, free)


@linux
def test_the_module_needs_nothing_but_the_standard_library_on_linux() -> None:
    program = "import sys; from pagetide.monitor.host_memory import host_memory; host_memory(); print('psutil' in sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
