"""A device of our own and an external process on it: real processes, a real broker."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import pytest
from monitors import wait_until

from pagetide import pressure
from pagetide.allocator.lease import Lease
from pagetide.common.units import MIB
from pagetide.monitor.errors import MonitorFailed
from pagetide.monitor.runtime_dir import VARIABLE, own_dir
from pagetide.monitor.watching import watch
from pagetide.pressure import ExternalProcess, PrivateDevice


def test_the_external_holds_what_it_is_told() -> None:
    with ExternalProcess() as external:
        process = psutil.Process(external.pid)
        before = process.memory_info().rss
        for wanted, held in ((8, 8), (24, 24), (12, 24), (8, 8), (0, 0)):  # whole pieces: of 8 and 16 MiB
            external.hold(wanted * MIB)
            assert external.held_bytes == held * MIB
            assert abs(process.memory_info().rss - before - held * MIB) < MIB
    assert not process.is_running()


def test_an_external_that_was_killed_is_told() -> None:
    with ExternalProcess() as external:
        psutil.Process(external.pid).kill()
        with pytest.raises(ChildProcessError, match="was killed by SIGKILL"):
            external.hold(MIB)


def test_folders_of_devices_that_were_killed_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that are in use, of which the monitor's end is a part, nor what is none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, users = pressure._locked_folder()
    _, left_users = pressure._locked_folder()
    left_users.close()  # by the kernel, where its processes are killed
    others = [tmp_path / name for name in (pressure.FOLDERS + "file", pressure.FOLDERS + "empty", "other")]
    others[0].touch()
    others[1].mkdir()
    others[2].mkdir()
    pressure._remove_left()
    assert sorted(tmp_path.iterdir()) == sorted([folder, *others])
    users.close()
    pressure._remove_left()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_private_device_is_leased_out_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere/else")
    capacity, headroom = 4096 * MIB, 64 * MIB
    with ExternalProcess() as external, PrivateDevice(capacity, headroom, external) as device:
        folder = Path(device.environ[VARIABLE])
        assert own_dir(os.environ | device.environ).path == folder
        with device.here(), watch() as watched:
            assert watched.directory.path == folder
            (info,) = watched.devices()
            pid = watched.monitor_pid
            mine = psutil.Process().memory_info().rss
            lease = Lease.register(
                device.socket, name="mine", device_uuid=info.uuid, min_bytes=mine + 64 * MIB, max_bytes=None, weight=1.0,
                priority=0, granule_bytes=MIB, held_bytes=mine,
            )  # fmt: skip
            try:
                assert lease.wait_granted(mine + 64 * MIB, 30)
                assert [(view.name, view.pid) for view in device.leases()] == [("mine", os.getpid())]
                external.hold(32 * MIB)
                wait_until(lambda: device.free_bytes() < capacity - mine - 16 * MIB, "the external process is measured")
            finally:
                lease.close()
        assert os.environ[VARIABLE] == "/somewhere/else"
        assert psutil.pid_exists(pid)
    assert not folder.parent.exists()
    assert not psutil.pid_exists(pid)


def test_a_device_that_cannot_be_says_why() -> None:
    with ExternalProcess() as external, pytest.raises(MonitorFailed, match="at least 1 byte"):
        PrivateDevice(0, 0, external)
