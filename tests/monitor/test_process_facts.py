"""Facts read from /proc against psutil's: of real processes with odd names, arguments and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from monitors import wait_until

from pagetide.monitor.sources import process_facts
from pagetide.monitor.sources.process_facts import ProcessTable, resident_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def running(*arguments: str | bytes) -> Iterator[int]:
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


@linux
@pytest.mark.parametrize("name", ["plain", "a) R 1 (b", "with space", "(", "été"])
def test_facts_are_those_of_psutil_whatever_a_program_is_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/bin/sh")
    with running(str(tmp_path / name), "-c", "echo ready; read line", b"\xff odd", "") as pid:
        facts, known = ProcessTable().facts([pid, 2**22 - 1])[pid], psutil.Process(pid)
        assert (facts.user, facts.command) == (known.username(), " ".join(known.cmdline()))
        assert facts.processor_s == pytest.approx(sum(known.cpu_times()[:2]), abs=0.02)
        assert facts.cgroup == process_facts.cgroup_of(pid) is not None
        assert resident_bytes(pid) == pytest.approx(known.memory_info().rss, rel=0.2)
    assert ProcessTable().facts([pid]) == {} and resident_bytes(pid) is None


@linux
def test_a_process_that_executes_another_program_has_the_new_command() -> None:
    table, program = ProcessTable(), "echo ready; read line; exec sleep 60"
    process = subprocess.Popen(["sh", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
        before = table.facts([process.pid])[process.pid]
        assert before.command == f"sh -c {program}"
        process.stdin.write(b"go\n")
        process.stdin.flush()
        wait_until(lambda: table.facts([process.pid])[process.pid].command == "sleep 60")
        assert table.facts([process.pid])[process.pid].start == before.start
    finally:
        process.kill()
        process.communicate()


@linux
def test_users_are_forgotten_with_their_processes() -> None:
    table = ProcessTable()
    for _ in range(5):
        with running("sh", "-c", "echo ready; read line") as pid:
            assert list(table.facts([os.getpid(), pid])) == [os.getpid(), pid]
    table.facts([os.getpid()])
    assert len(table._users) <= 2


def test_psutil_gives_the_same_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ProcessTable().facts([os.getpid()])[os.getpid()]
    monkeypatch.setattr(process_facts, "_IS_LINUX", False)
    other = ProcessTable().facts([os.getpid()])[os.getpid()]
    assert (other.user, other.command) == (here.user, here.command)
    assert resident_bytes(os.getpid()) and resident_bytes(2**22 - 1) is None and ProcessTable().facts([2**22 - 1]) == {}
