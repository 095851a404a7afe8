"""The monitor as a process: started, stopped, killed, reloaded, doubled; its readers are in this process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from monitors import MonitorProcess, run, wait_until
from prometheus_client.parser import text_string_to_metric_families

from pagetide.monitor import watching
from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.daemon import Daemon
from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.holders import Holder, last_holder, pids_of_users
from pagetide.monitor.host_memory import host_memory
from pagetide.monitor.record import RecordReader
from pagetide.monitor.runtime_dir import FileLock, RuntimeDir
from pagetide.monitor.units import format_bytes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(port: int) -> dict[str, float]:
    """The metrics without labels, or with those of the host's device, from a real page through the official parser."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_a_clean_end_leaves_nothing_but_locks(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor:
        with RecordReader.open(monitor.record) as reader:
            (device,) = reader.snapshot().devices
            assert device.memory.total_bytes and device.memory.free_bytes and reader.is_live()
            assert monitor.end() == 0
            wait_until(lambda: not reader.is_live())
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["monitor.lock"]
        assert "watches host" in monitor.said() and "ended" in monitor.said()


def test_an_interrupt_is_a_clean_end_too(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor:
        monitor.signal(signal.SIGINT)
        assert monitor.process is not None and monitor.process.wait(30) == 0
        assert "Traceback" not in monitor.said()


def test_a_second_monitor_gives_way_with_a_sentence(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor:
        second = run("serve", "--runtime-dir", tmp_path / "run", "--source", "host")
        assert second.returncode == 3
        assert f"vram-monitor with pid {monitor.pid} watches host" in second.stderr
        assert second.stderr.count("\n") == 1
        with RecordReader.open(monitor.record) as reader:
            assert reader.is_live() and reader.monitor_pid == monitor.pid


def test_a_second_monitor_of_the_same_devices_elsewhere_gives_way(tmp_path: Path) -> None:
    """One user's own directory and the machine's: here both are named by XDG_RUNTIME_DIR and by PAGETIDE_RUNTIME_DIR."""
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with MonitorProcess(tmp_path / "pagetide", env=env):
        second = run("serve", "--source", "host", env=env | {"PAGETIDE_RUNTIME_DIR": ""})
        assert second.returncode == 3 and "watches host" in second.stderr


def test_where_engines_started_one_a_second_monitor_is_told_who_uses_it(tmp_path: Path) -> None:
    with watching.watch(runtime_dir=tmp_path / "run") as watched:
        second = run("serve", "--runtime-dir", tmp_path / "run", "--source", "host")
        assert second.returncode == 3 and second.stderr.count("\n") == 1
        assert f"vram-monitor with pid {watched.monitor_pid} watches " in second.stderr
        assert "engines started it, and it ends with the last of them: end those " in second.stderr
        users = pids_of_users(watched.directory)
        assert users in ((), (os.getpid(),)) and (not users or f"(process {os.getpid()})" in second.stderr)
    with MonitorProcess(tmp_path / "other"):
        second = run("serve", "--runtime-dir", tmp_path / "other", "--source", "host")
        assert second.returncode == 3 and "engines started it" not in second.stderr


def test_a_monitor_begins_while_engines_look_whether_there_is_one(tmp_path: Path) -> None:
    """Who looks holds the lock for an instant; a daemon must not give way to that."""
    directory = RuntimeDir(tmp_path / "run").prepare()
    lock = FileLock(directory.monitor_lock)
    assert lock.try_shared()
    daemon = Daemon(MonitorConfig(source="host", runtime_dir=directory.path))
    looking = threading.Timer(0.05, lock.close)
    looking.start()
    try:
        daemon.start()
        assert last_holder(directory) == Holder(os.getpid(), False)
    finally:
        daemon.stop()
        looking.join()


def test_one_that_could_not_begin_held_nothing(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "run").prepare()
    directory.monitor_lock.write_text("7 on-demand\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = MonitorConfig(source="host", runtime_dir=directory.path, metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigInvalid):
            Daemon(config).start()
    assert last_holder(directory) == Holder(7, True)


def test_a_test_device_larger_than_the_machine_is_warned_of(tmp_path: Path) -> None:
    total_bytes = host_memory().total_bytes
    assert total_bytes is not None
    with MonitorProcess(tmp_path / "run", "--capacity", str(2 * total_bytes)) as monitor:
        there, asked = format_bytes(total_bytes), format_bytes(2 * total_bytes)
        assert f"WARNING the test device has {asked}, and the memory of this machine, " in monitor.said()
        assert there in monitor.said()
    with MonitorProcess(tmp_path / "other", "--capacity", "1GiB") as monitor:
        assert "WARNING" not in monitor.said()


def test_killed_and_started_again_no_reader_is_restarted(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        first, polls = monitor.pid, reader.memory(info.uuid).polls
        wait_until(lambda: reader.memory(info.uuid).polls > polls)
        monitor.kill()
        wait_until(lambda: reader.memory(info.uuid).is_stale() and not reader.is_live())
        (tmp_path / "run" / "record.new").write_text("of a monitor that was killed while it made its record")
        monitor.start()
        wait_until(lambda: reader.memory(info.uuid).polls and not reader.memory(info.uuid).is_stale())
        assert reader.is_live() and reader.monitor_pid == monitor.pid != first
        assert not (tmp_path / "run" / "record.new").exists()


def test_a_reload_takes_over_what_it_can(tmp_path: Path) -> None:
    config = tmp_path / "monitor.yaml"
    port, other = free_port(), free_port()
    config.write_text(f"source: host\ninterval: 20ms\nmetrics_port: {port}\n")
    monitor = MonitorProcess(tmp_path / "run", "--config", str(config), source=None)
    with monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        polls = page(port)["vram_polls_total"]
        config.write_text(f"source: nvml\ninterval: 5ms\nmetrics_port: {other}\n")
        monitor.signal(signal.SIGHUP)
        wait_until(lambda: reader.memory(info.uuid).interval_ns == 5_000_000)
        wait_until(lambda: "configuration read again" in monitor.said())
        assert page(other)["vram_polls_total"] > polls
        with pytest.raises(OSError, match="refused"):
            page(port)
        assert "source changed in the configuration; that needs a restart" in monitor.said()
        config.write_text("intervall: 3\n")
        monitor.signal(signal.SIGHUP)
        wait_until(lambda: "did you mean interval?" in monitor.said())
        assert page(other)["vram_polls_total"] > polls
        assert reader.is_live() and reader.monitor_pid == monitor.pid


def test_a_port_in_use_is_a_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("serve", "--runtime-dir", tmp_path / "run", "--source", "host", "--metrics-port", str(port))
    assert ended.returncode == 2 and str(port) in ended.stderr and ended.stderr.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["monitor.lock"]


def test_counters_of_the_metrics_page_only_rise(tmp_path: Path) -> None:
    port = free_port()
    with MonitorProcess(tmp_path / "run", "--metrics-port", str(port)):
        last = 0.0
        for _ in range(20):
            now = page(port)["vram_polls_total"]
            assert now >= last
            last = now
        assert last > 0


def test_a_hung_monitor_is_stale_and_comes_back(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        monitor.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: reader.memory(info.uuid).is_stale() and not reader.is_live())
        finally:
            monitor.signal(signal.SIGCONT)
        wait_until(lambda: not reader.memory(info.uuid).is_stale() and reader.is_live())
