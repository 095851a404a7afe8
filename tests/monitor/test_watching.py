"""monitor.watch(): one monitor for all who watch, started by the first and gone with the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from monitors import MonitorProcess, wait_until

from pagetide import monitor
from pagetide.monitor import watching
from pagetide.monitor.errors import ConfigInvalid, MonitorFailed
from pagetide.monitor.holders import Holder, last_holder
from pagetide.monitor.record import RecordReader
from pagetide.monitor.runtime_dir import FileLock, RuntimeDir

WATCHER = """
import sys
from pagetide import monitor
with monitor.watch(runtime_dir=sys.argv[1], timeout_s=60) as watched:
    device, *_ = watched.devices()
    assert watched.memory(device.uuid).total_bytes
    print(watched.monitor_pid, flush=True)
    sys.stdin.read()
"""


def watcher(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WATCHER, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_starts_a_monitor_that_ends_with_its_last_user(tmp_path: Path) -> None:
    with monitor.watch(runtime_dir=tmp_path / "run") as first:
        pid = first.monitor_pid
        assert pid != os.getpid() and psutil.Process(pid).ppid() == os.getpid()
        host = first.devices()[-1]
        wait_until(lambda: first.memory(host.uuid).used_bytes)
        assert first.snapshot().monitor_pid == pid
        with monitor.watch(runtime_dir=tmp_path / "run") as second:
            assert second.monitor_pid == pid
        polls = first.memory(host.uuid).polls
        wait_until(lambda: first.memory(host.uuid).polls > polls + 20)
    wait_until(lambda: ended(pid))
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the zombie")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "monitor.lock", "monitor.log", "start.lock", "users.lock",
    ]  # fmt: skip


def test_two_at_once_end_up_with_one(tmp_path: Path) -> None:
    watchers = [watcher(tmp_path / "run") for _ in range(4)]
    try:
        pids = {int(w.stdout.readline()) for w in watchers if w.stdout}
        assert len(pids) == 1
        for w in watchers[:-1]:
            w.communicate("")
        (pid,) = pids
        assert not ended(pid)
        watchers[-1].kill()  # a user that dies lets go as well
        wait_until(lambda: ended(pid))
    finally:
        for w in watchers:
            w.kill()
            w.communicate()


def test_one_that_runs_is_used_and_not_ended(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as running:
        with monitor.watch(runtime_dir=tmp_path / "run") as watched:
            assert watched.monitor_pid == running.pid
        assert not ended(running.pid)


def test_one_that_is_killed_is_replaced_for_those_who_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "OTHERS_FIRST_S", 0.3)
    with monitor.watch(runtime_dir=tmp_path / "run") as first, monitor.watch(runtime_dir=tmp_path / "run") as second:
        pid, host = first.monitor_pid, first.devices()[-1]
        os.kill(pid, 9)
        wait_until(lambda: first.monitor_pid != pid and second.monitor_pid == first.monitor_pid)
        wait_until(lambda: first.memory(host.uuid).at_ns and not first.memory(host.uuid).is_stale())
        successor = first.monitor_pid
    wait_until(lambda: ended(successor))


def test_a_daemon_that_is_killed_is_waited_for_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the settings that only who runs it knows: no monitor of ours may be in its place."""
    monkeypatch.setattr(watching, "GUARD_S", 0.02)
    monkeypatch.setattr(watching, "OTHERS_FIRST_S", 0.1)
    started = []
    monkeypatch.setattr(watching, "_spawn", started.append)
    daemon = MonitorProcess(tmp_path / "run", "--capacity", "2GiB")
    with daemon, monitor.watch(runtime_dir=tmp_path / "run") as watched:
        (device,) = watched.devices()
        for _ in range(2):
            killed = daemon.pid
            daemon.kill()
            wait_until(lambda: "its operator must start it again" in caplog.text)
            caplog.clear()
            daemon.start()
            wait_until(lambda killed=killed: watched.monitor_pid == daemon.pid != killed)
            assert watched.devices() == (device,)
    assert started == [] and "another one is started" not in caplog.text


def test_the_guard_says_once_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "GUARD_S", 0.01)
    monkeypatch.setattr(watching, "OTHERS_FIRST_S", 0.02)
    looks = []
    real = watching._is_held
    monkeypatch.setattr(watching, "_is_held", lambda directory: bool(looks.append(1)) or real(directory))
    with MonitorProcess(tmp_path / "run") as daemon, monitor.watch(runtime_dir=tmp_path / "run"):
        daemon.kill()
        wait_until(lambda: "its operator must start it again" in caplog.text)
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 20)
        assert caplog.text.count("its operator must start it again") == 1


def test_only_a_monitor_with_the_usual_settings_may_be_started_again(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "run").prepare()
    users = FileLock(directory.users_lock)
    assert users.try_shared()
    try:
        for source, on_demand in ((None, True), ("host", False)):
            with MonitorProcess(directory.path, "--until-unused", source=source) as started:
                assert last_holder(directory) == Holder(started.pid, on_demand)
        with MonitorProcess(directory.path, source=None) as started:
            assert last_holder(directory) == Holder(started.pid, False)
    finally:
        users.close()


def test_a_monitor_that_hangs_is_named(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as running, RecordReader.open(running.record) as reader:
        directories = (RuntimeDir(tmp_path / "none"), RuntimeDir(tmp_path / "run"))
        found = watching.find_running(directories)
        assert found is not None and found[0] == directories[1]
        found[1].close()
        running.signal(signal.SIGSTOP)
        wait_until(lambda: not reader.is_live())
        said = f"process {running.pid} holds {tmp_path / 'run'} as its monitor and does not answer"
        with pytest.raises(MonitorFailed, match=said):
            monitor.watch(runtime_dir=tmp_path / "run", timeout_s=0.05)
        with pytest.raises(MonitorFailed, match=said):
            watching.find_running(directories, timeout_s=0.05)
        running.kill()
        assert watching.find_running(directories) is None
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_many_at_once_start_one(tmp_path: Path) -> None:
    watched: list[monitor.Watch] = []
    threads = [
        threading.Thread(target=lambda: watched.append(monitor.watch(runtime_dir=tmp_path / "run", timeout_s=60)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(watched) == 16 and len({one.monitor_pid for one in watched}) == 1
    for one in watched:
        one.close()
        one.close()
    assert (tmp_path / "run" / "monitor.log").read_text().count("record:") == 1


def test_watching_anew_right_after_the_last_one_left_works_always(tmp_path: Path) -> None:
    for _ in range(5):
        with monitor.watch(runtime_dir=tmp_path / "run") as watched:
            assert watched.devices()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="is no directory"):
        monitor.watch(runtime_dir=tmp_path / "file")


def test_a_monitor_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MonitorFailed, match="ended with status 1"):
        monitor.watch(runtime_dir=tmp_path / "run")


def test_it_brings_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from pagetide import monitor; monitor.watch; print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "set()"
