"""Owners of real processes in real cgroups and user namespaces: sums against what the kernel charges and says."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from monitors import run, wait_until

from pagetide.monitor.owners import charged_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
MIB = 1 << 20
HEX = ["4f5a" * 16, "b0c1" * 16]
CGROUPS = Path("/sys/fs/cgroup")
# The kernel counts the charge of a cgroup in batches for each core.
TOLERANCE_BYTES = 4 * MIB
# Holds so many MiB, and shares them with so many forked children.
HOLDS = """
import mmap, os, signal, sys
held = mmap.mmap(-1, int(sys.argv[1]) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(held), 4096):
    held[page] = 1
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        signal.pause()
print("ready", flush=True)
signal.pause()
"""


def hierarchy() -> Path:
    """Where cgroups with a memory controller can be made: version 2, or 1. Skips where this user may make none."""
    for root in (CGROUPS, CGROUPS / "memory"):
        controllers = root / "cgroup.controllers"
        has_memory = "memory" in controllers.read_text().split() if controllers.exists() else (root / "memory.stat").exists()
        probe = root / f"pagetide-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = has_memory and (probe / "cgroup.procs").exists() and (probe / "memory.stat").exists()
        probe.rmdir()
        if usable:
            return root
    pytest.skip("this user may make no cgroups with a memory controller")


@pytest.fixture
def in_container() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program in a cgroup named as Docker names a container's."""
    root = hierarchy()
    parent = root / f"docker-tests-{os.getpid()}"
    made, started = [parent], []
    parent.mkdir()

    def start(container: str, *program: str, prefix: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
        folder = parent / container
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
        enter = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *prefix]
        process = subprocess.Popen([*enter, *program], stdout=subprocess.PIPE, text=True, **more)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    try:
        yield start
    finally:
        for process in started:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
        for folder in reversed(made):
            for _ in range(1000):  # the kernel lets go of a dead process a little later
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.01)


def owners(kind: str) -> dict[str, dict[str, Any]]:
    shown = run("owners", "--json", "--source", "host")
    assert shown.returncode == 0, shown.stderr
    return {one["name"]: one for one in json.loads(shown.stdout) if one["kind"] == kind}


def figure(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_a_containers_sum_is_that_of_its_processes_as_the_kernel_charges_it(
    in_container: Callable[..., subprocess.Popen[str]],
) -> None:
    """Two containers; in one of them processes share memory, which the kernel charges once and each of them holds."""
    program = (sys.executable, "-S", "-c", HOLDS)
    apart = [in_container(HEX[0], *program, str(mib), "0").pid for mib in (60, 110)]
    parent = in_container(HEX[1], *program, "80", "2").pid
    sharing = [parent, *(child.pid for child in psutil.Process(parent).children())]
    assert len(sharing) == 3
    found = owners("container")
    for container, pids in ((HEX[0], apart), (HEX[1], sharing)):
        one = found[container[:12]]
        assert one["num_processes"] == len(pids)
        assert one["used_bytes"] == sum(figure(pid, "status", "VmRSS") for pid in pids)
        # Each page for the processes that have it, divided among them: what the kernel has charged for them.
        charged = sum(figure(pid, "smaps_rollup", "Pss_Anon") + figure(pid, "smaps_rollup", "Pss_Shmem") for pid in pids)
        assert abs(one["charged_bytes"] - charged) <= TOLERANCE_BYTES
    unshared = found[HEX[0][:12]]
    anonymous = sum(figure(pid, "status", "RssAnon") for pid in apart)
    assert abs(unshared["charged_bytes"] - anonymous) <= TOLERANCE_BYTES and anonymous >= 170 * MIB
    shared = found[HEX[1][:12]]
    assert shared["used_bytes"] >= 240 * MIB > 100 * MIB >= shared["charged_bytes"] >= 80 * MIB
    assert charged_bytes("/no/such/cgroup") is None


def test_a_process_in_a_user_namespace_is_its_user_outside(in_container: Callable[..., subprocess.Popen[str]]) -> None:
    """Where it calls itself root."""
    nobody = pwd.getpwnam("nobody")
    prefix = ("setpriv", "--reuid", str(nobody.pw_uid), "--regid", str(nobody.pw_gid), "--clear-groups", "unshare", "-Ur")
    probe = subprocess.run([*prefix, "id", "-u"], capture_output=True, text=True, check=False)
    if probe.returncode or probe.stdout != "0\n":
        pytest.skip(f"no user namespaces for {nobody.pw_name} here: {probe.stderr}")
    program = ("sh", "-c", "head -c 60m /dev/zero | tail -c 60m > /dev/null & echo ready; exec sleep 600")
    process = in_container(HEX[0], *program, prefix=prefix, cwd="/")
    assert Path(f"/proc/{process.pid}/uid_map").read_text().split() == ["0", str(nobody.pw_uid), "1"]
    wait_until(lambda: HEX[0][:12] in owners("container"))
    shown = json.loads(run("--json", "--source", "host").stdout)["devices"][0]["processes"]
    (one,) = [use for use in shown if use["pid"] == process.pid]
    assert (one["user"], one["container"]) == (nobody.pw_name, HEX[0][:12])
