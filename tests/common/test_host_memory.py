"""Host memory by kernel files of every layout, laid out in a folder."""

from __future__ import annotations

from pathlib import Path

import psutil
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_files import fake, v1, v2, write

from pagetide.common.host_memory import (
    LIMITS_S,
    Cgroup,
    HostMemoryReader,
    HostMemoryReading,
    free_host_bytes,
    host_memory,
    limiting_cgroup,
)

MIB = 1 << 20


def test_what_the_kernels_files_do_not_say_is_asked_by_psutil(tmp_path: Path) -> None:
    reading = host_memory(tmp_path / "no proc", tmp_path)
    assert reading.total_bytes == psutil.virtual_memory().total
    assert reading.free_bytes is not None and 64 * MIB < reading.free_bytes <= psutil.virtual_memory().total
    proc, cgroups = fake(tmp_path, "0::/\n")
    write(proc, meminfo="MemTotal: 1000 kB\nMemFree: 17 kB\n")
    assert host_memory(proc, cgroups).total_bytes == psutil.virtual_memory().total
    here = host_memory()
    assert 0 < here.free_bytes <= here.total_bytes <= psutil.virtual_memory().total
    assert limiting_cgroup() is not None or here.total_bytes == psutil.virtual_memory().total


V1_MEMBERSHIP = "3:cpu:/x\n9:name=systemd:/\n4:memory:/docker/0123\n0::/\n"
NO_V1_LIMIT = 9223372036854771712  # what the kernel shows


def test_cgroup_v1_is_read_in_its_own_tree(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, V1_MEMBERSHIP)
    v1(cgroups / "memory", NO_V1_LIMIT, 90_000)
    assert host_memory(proc, cgroups) == HostMemoryReading(1000 * 1024, 600 * 1024)
    v1(cgroups / "memory" / "docker", 8000, 4000, 10)
    v1(cgroups / "memory" / "docker" / "0123", 5000, 3000, 500)
    assert host_memory(proc, cgroups) == HostMemoryReading(5000, 2500)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/docker/0123", cgroups / "memory" / "docker" / "0123")
    v2(cgroups / "x", "10", 10)  # not this process'
    assert host_memory(proc, cgroups) == HostMemoryReading(5000, 2500)


def test_cgroup_v1_with_other_controllers_or_seen_as_the_root(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "4:cpu,memory:/a\n")
    v1(cgroups / "memory" / "a", 5000, 3000)
    assert host_memory(proc, cgroups) == HostMemoryReading(5000, 2000)
    proc, cgroups = fake(tmp_path / "container", V1_MEMBERSHIP)  # without a cgroup namespace
    v1(cgroups / "memory", 8000, 3000, 500)
    assert host_memory(proc, cgroups) == HostMemoryReading(8000, 5500)
    assert limiting_cgroup(proc, cgroups) == Cgroup("/", cgroups / "memory")


def test_repeated_reads_see_use_at_once_and_limits_a_little_later(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n")
    now = [5.0]
    repeated = HostMemoryReader(proc, cgroups, lambda: now[0])
    assert repeated.read() == host_memory(proc, cgroups) == HostMemoryReading(1000 * 1024, 600 * 1024)
    v2(cgroups / "a", "5000", 1000)
    assert repeated.read().total_bytes == 1000 * 1024
    now[0] += LIMITS_S
    assert repeated.read() == HostMemoryReading(5000, 4000)
    v2(cgroups / "a", "3000", 2500)
    assert repeated.read() == HostMemoryReading(5000, 2500), "the limit of before, and the use of now"
    now[0] += LIMITS_S
    assert repeated.read() == host_memory(proc, cgroups) == HostMemoryReading(3000, 500)
    (proc / "meminfo").write_text("MemTotal: 2 kB\nMemAvailable: 1 kB\n")
    assert repeated.read() == HostMemoryReading(2048, 1024), "another machine's total is below the limit"
    repeated.close()
    repeated.close()


def test_a_process_moved_to_another_cgroup_is_right_at_the_next_call(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, "0::/a\n")
    v2(cgroups / "a", "5000", 1000)
    v2(cgroups / "b", "7000", 1000)
    assert host_memory(proc, cgroups) == HostMemoryReading(5000, 4000)
    write(proc / "self", cgroup="0::/b\n")
    assert host_memory(proc, cgroups) == HostMemoryReading(7000, 6000)


sizes = st.integers(0, 1200 * 1024)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    available=st.integers(0, 1000),
    groups=st.lists(st.tuples(st.sampled_from(["max", str(1000 * 1024)]) | sizes.map(str), sizes, sizes), max_size=4),
    high=st.booleans(),
)
@example(600, [("max", 0, 0), ("6000", 5500, 100), ("9000", 5000, 700)], True)
@example(600, [("6000", 7000, 100)], False)
@example(600, [("1024000", 1024000, 0)], False)
def test_any_nest_of_cgroups_agrees_with_the_definition(
    tmp_path: Path, available: int, groups: list[tuple[str, int, int]], high: bool
) -> None:
    proc, cgroups = fake(tmp_path, "0::/1/1/1/1\n", available)
    directories = [cgroups.joinpath(*["1"] * depth) for depth in range(5)]
    for depth, directory in enumerate(directories):
        limit, *figures = groups[depth] if depth < len(groups) else ("max", 0, 0)
        v2(directory, "max" if high else limit, *figures)
        write(directory, memory__high=f"{limit if high else 'max'}\n")
    limited = [(int(limit), use, inactive) for limit, use, inactive in groups if limit != "max"]
    limited = [group for group in limited if group[0] < 1000 * 1024]
    total = min([1000 * 1024, *(limit for limit, _, _ in limited)])
    free = min([available * 1024, total, *(limit - use + inactive for limit, use, inactive in limited)])
    assert host_memory(proc, cgroups) == HostMemoryReading(total, max(0, free))
    assert free_host_bytes(proc, cgroups) == max(0, free)
    depths = [depth for depth, (limit, _, _) in enumerate(groups) if limit == str(total) and total < 1000 * 1024]
    innermost = Cgroup("/" + "/".join("1" * depths[-1]), directories[depths[-1]]) if depths else None
    assert limiting_cgroup(proc, cgroups) == innermost
