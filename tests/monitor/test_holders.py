"""What a monitor notes in its lock's file, and whom the kernel knows to hold which lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pagetide.monitor.holders import Holder, last_holder, monitor_pid, note_holder, pids_of_users
from pagetide.monitor.runtime_dir import FileLock, RuntimeDir


def test_what_was_noted_last_is_known_after_the_lock_was_given_back(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    for holder in (Holder(4_194_304, True), Holder(7, False), Holder(12, True)):  # shorter after longer
        lock = FileLock(directory.monitor_lock)
        assert lock.try_exclusive()
        note_holder(lock, holder)
        assert last_holder(directory) == holder
        lock.close()
        assert last_holder(directory) == holder
        with pytest.raises(ValueError, match="closed"):
            note_holder(lock, holder)


@pytest.mark.parametrize("text", ["", "4711", "x serve", "4711 by-hand", "4711 serve 3", "\xff"])
def test_what_no_monitor_notes_says_nothing(tmp_path: Path, text: str) -> None:
    directory = RuntimeDir(tmp_path)
    assert last_holder(directory) is None and monitor_pid(directory) is None, "no file"
    directory.monitor_lock.write_text(text, "latin-1")
    assert last_holder(directory) is None and monitor_pid(directory) is None


def test_the_kernel_knows_who_holds_a_lock(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    assert pids_of_users(directory) == ()
    users, monitor = FileLock(directory.users_lock), FileLock(directory.monitor_lock)
    try:
        assert pids_of_users(directory) == ()
        assert users.try_shared() and monitor.try_exclusive()
        if pids_of_users(directory) == ():
            pytest.skip("this system does not tell whose locks there are")
        assert pids_of_users(directory) == (os.getpid(),)
        note_holder(monitor, Holder(1, False))
        assert monitor_pid(directory) == os.getpid()
        monitor.close()
        assert monitor_pid(directory) == 1, "as noted"
    finally:
        users.close()
        monitor.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_table_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RuntimeDir(tmp_path)
    FileLock(directory.users_lock).close()
    found = os.stat(directory.users_lock)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    table = tmp_path / "locks"
    table.write_text(
        f"1: FLOCK  ADVISORY  READ 31 {file} 0 EOF\n"
        f"2: FLOCK  ADVISORY  READ 7 {file} 0 EOF\n"
        f"2: -> FLOCK  ADVISORY  WRITE 8 {file} 0 EOF\n"  # who waits
        f"3: FLOCK  ADVISORY  READ 0 {file} 0 EOF\n"  # of another pid namespace
        f"4: FLOCK  ADVISORY  WRITE 9 {file} 0 EOF\n"
        f"5: FLOCK  ADVISORY  READ 10 {file}1 0 EOF\n"
    )
    monkeypatch.setattr("pagetide.monitor.holders._LOCKS", table)
    assert pids_of_users(directory) == (7, 31)
