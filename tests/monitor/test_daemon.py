"""The monitor as a process, and monitor.watch(), which starts one for all who watch. Readers are in this process.

Where a monitor lives and who may look; locks that die with their holder, and whom they are known to have.
"""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from monitors import MonitorProcess, run, wait_until
from nvml_standin import COMPILER, GIB, Gpu, NvmlStandin, Process
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families

# tests/torch_free.py takes a line that begins with an import of `pagetide` itself for one that needs torch.
import pagetide.monitor as monitor
from pagetide.common.host_memory import host_memory
from pagetide.common.units import format_bytes
from pagetide.monitor import watching
from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.cuda_devices import visible_devices
from pagetide.monitor.daemon import Daemon
from pagetide.monitor.errors import ConfigInvalid, MonitorFailed
from pagetide.monitor.record import RecordReader
from pagetide.monitor.runtime_dir import (
    MACHINE_DIR,
    FileLock,
    Holder,
    RuntimeDir,
    last_holder,
    monitor_pid,
    note_holder,
    own_dir,
    pids_of_users,
    readable_dirs,
)

# Becomes the program behind it, with signals as its parent left them.
INHERITING = """
import os, re, signal, sys
for names, how in re.findall("([A-Z ]+) (ignored and blocked|ignored|blocked)", sys.argv[1]):
    for number in [getattr(signal, f"SIG{name}") for name in names.split()]:
        if "ignored" in how:
            signal.signal(number, signal.SIG_IGN)
        if "blocked" in how:
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
os.execv(sys.argv[2], sys.argv[2:])
"""


def page(port: int) -> dict[str, float]:
    """The metrics without labels, or with those of the host's device, from a real page through the official parser."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_a_second_monitor_gives_way_with_a_sentence_and_a_clean_end_leaves_locks_and_events(tmp_path: Path) -> None:
    """Also one that finds it as the user's own, by XDG_RUNTIME_DIR."""
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    with MonitorProcess(tmp_path / "pagetide", env=env) as monitor, RecordReader.open(monitor.record) as reader:
        elsewhere = run("serve", "--source", "host", env=env | {"PAGETIDE_RUNTIME_DIR": ""})
        assert elsewhere.returncode == 3 and "watches host" in elsewhere.stderr
        second = run("serve", "--runtime-dir", tmp_path / "pagetide", "--source", "host")
        assert second.returncode == 3
        assert f"vram-monitor with pid {monitor.pid} watches host" in second.stderr
        assert second.stderr.count("\n") == 1 and "engines started it" not in second.stderr
        (device,) = reader.snapshot().devices
        assert device.memory.total_bytes and device.memory.free_bytes
        assert reader.is_live() and reader.monitor_pid == monitor.pid
        assert monitor.end() == 0
        wait_until(lambda: not reader.is_live())
        assert sorted(os.listdir(monitor.directory)) == ["events", "monitor.lock"]
        assert os.readlink(monitor.directory / "events") == str(tmp_path / "state" / "pagetide" / "events")
        assert "watches host" in monitor.said() and "stopped" in monitor.said()


@pytest.mark.parametrize("how", ["TERM ignored", "TERM ignored and blocked", "INT HUP QUIT ignored, TERM INT blocked"])
def test_sigterm_ends_it_whatever_its_parent_ignored_or_blocked(tmp_path: Path, how: str) -> None:
    monitor = MonitorProcess(tmp_path / "run")
    monitor.command[:0] = [sys.executable, "-P", "-c", INHERITING, how]
    with monitor:
        if "INT" in how:
            monitor.signal(signal.SIGINT)  # stays ignored, as in a script's background
            with RecordReader.open(monitor.record) as reader:
                polls = reader.snapshot().devices[0].memory.polls
                wait_until(lambda: reader.snapshot().devices[0].memory.polls > polls + 5)
        assert monitor.end() == 0
        assert "stopped" in monitor.said() and sorted(os.listdir(tmp_path / "run")) == ["events", "monitor.lock"]


def test_where_engines_started_one_a_second_monitor_is_told_who_uses_it(tmp_path: Path) -> None:
    with watching.watch(runtime_dir=tmp_path / "run") as watched:
        second = run("serve", "--runtime-dir", tmp_path / "run", "--source", "host")
        assert second.returncode == 3 and second.stderr.count("\n") == 1
        assert f"vram-monitor with pid {watched.monitor_pid} watches " in second.stderr
        assert "engines started it, and it stops with the last of them: stop those " in second.stderr
        users = pids_of_users(watched.directory)
        assert users in ((), (os.getpid(),)) and (not users or f"(process {os.getpid()})" in second.stderr)


def test_a_monitor_begins_while_engines_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looks holds the lock for an instant; a daemon must not give way to that."""
    monkeypatch.setattr("pagetide.monitor.daemon._LOOK_S", 60.0)
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
        with pytest.raises(ConfigInvalid, match=str(config.metrics_port)):
            Daemon(config).start()
    assert last_holder(directory) == Holder(7, True)
    assert os.listdir(directory.path) == ["monitor.lock"]


def test_a_reload_takes_over_what_it_can(tmp_path: Path) -> None:
    config = tmp_path / "monitor.yaml"
    port, other = free_ports(), free_ports()
    config.write_text(f"source: host\ninterval: 20ms\nmetrics_port: {port}\n")
    monitor = MonitorProcess(tmp_path / "run", "--config", str(config), source=None)
    with monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        polls = page(port)["vram_polls_total"]
        config.write_text(f"source: nvml\ninterval: 5ms\nmetrics_port: {other}\n")
        monitor.signal(signal.SIGHUP)
        wait_until(lambda: reader.memory(info.uuid).interval_ns == 5_000_000)
        wait_until(lambda: "configuration reloaded" in monitor.said())
        assert page(other)["vram_polls_total"] > polls
        with pytest.raises(OSError, match="refused"):
            page(port)
        assert "source changed in the configuration; that needs a restart" in monitor.said()
        config.write_text("intervall: 3\n")
        monitor.signal(signal.SIGHUP)
        wait_until(lambda: "did you mean interval?" in monitor.said())
        assert page(other)["vram_polls_total"] > polls
        wait_until(reader.is_live)
        assert reader.monitor_pid == monitor.pid


def test_a_test_device_larger_than_the_machine_is_warned_of(tmp_path: Path) -> None:
    total_bytes = host_memory().total_bytes
    with MonitorProcess(tmp_path / "run", "--capacity", str(2 * total_bytes)) as monitor:
        there, asked = format_bytes(total_bytes), format_bytes(2 * total_bytes)
        assert f"WARNING the test device has {asked}, and the memory of this machine, " in monitor.said()
        assert there in monitor.said()


def test_a_hung_monitor_is_stale_and_comes_back_and_an_interrupt_is_a_clean_end(tmp_path: Path) -> None:
    monitor = MonitorProcess(tmp_path / "run", "--capacity", "1GiB")
    with monitor, RecordReader.open(monitor.record) as reader:
        (info,) = reader.devices()
        monitor.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: reader.memory(info.uuid).is_stale() and not reader.is_live())
        finally:
            monitor.signal(signal.SIGCONT)
        wait_until(lambda: not reader.memory(info.uuid).is_stale() and reader.is_live())
        assert monitor.end(signal.SIGINT) == 0
        assert "Traceback" not in monitor.said() and "WARNING" not in monitor.said()


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlStandin]:
    if COMPILER is None:
        pytest.skip("the stand-in of the driver needs a C compiler")
    with NvmlStandin(tmp_path) as standin:
        standin.devices = [
            Gpu("GPU-a", "00000000:3B:00.0", free_bytes=60 * GIB, compute=[Process(1, 2 * GIB), Process(77)]),
            Gpu("GPU-b", "00000000:1A:00.0", free_bytes=70 * GIB),
        ]
        yield standin


def test_what_the_driver_says_is_what_engines_read(tmp_path: Path, nvml: NvmlStandin) -> None:
    monitor = MonitorProcess(tmp_path / "run", source="nvml", env=nvml.env())
    with monitor, RecordReader.open(monitor.record) as reader:
        a = reader.memory("GPU-a")
        assert (a.total_bytes, a.free_bytes, a.used_bytes) == (80 * GIB, 60 * GIB, 20 * GIB)
        wait_until(lambda: reader.detail("GPU-a").at_ns)
        processes = reader.detail("GPU-a").reading.processes
        assert processes is not None and {p.pid: p.used_bytes for p in processes} == {1: 2 * GIB, 77: None}
        in_pci_order = visible_devices(reader.devices(), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        assert [info.uuid for info in in_pci_order] == ["GPU-b", "GPU-a"]

        nvml.update("1", free_bytes=7 * GIB)
        wait_until(lambda: reader.memory("GPU-b").free_bytes == 7 * GIB)

        nvml.update("0", latency_us=600_000_000)
        wait_until(lambda: reader.memory("GPU-a").is_stale())
        polls = reader.memory("GPU-b").polls
        wait_until(lambda: reader.memory("GPU-b").polls > polls + 20)
        assert reader.memory("GPU-a").is_stale() and reader.memory("GPU-a").free_bytes == 60 * GIB and reader.is_live()
        nvml.update("0", latency_us=0)
        wait_until(lambda: not reader.memory("GPU-a").is_stale())

        nvml.driver_loaded = False
        wait_until(lambda: reader.memory("GPU-a").error and reader.memory("GPU-b").error)
        assert reader.is_live()
        nvml.driver_loaded = True
        wait_until(lambda: reader.memory("GPU-a").free_bytes == 60 * GIB and reader.memory("GPU-b").error is None)


WATCHER = """
import sys; from pagetide import monitor
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
        "events", "monitor.lock", "monitor.log", "start.lock", "users.lock",
    ]  # fmt: skip


def test_many_at_once_end_up_with_one(tmp_path: Path) -> None:
    watchers = [watcher(tmp_path / "run") for _ in range(3)]
    try:
        (pid,) = {int(w.stdout.readline()) for w in watchers if w.stdout}
        for w in watchers[:-1]:
            w.communicate("")
        assert not ended(pid)
        watchers[-1].kill()  # a user that dies lets go as well
        wait_until(lambda: ended(pid))
    finally:
        for w in watchers:
            w.kill()
            w.communicate()
    assert (tmp_path / "run" / "monitor.log").read_text().count("record:") == 1
    for _ in range(2):  # at once after the last one left
        with monitor.watch(runtime_dir=tmp_path / "run") as anew:
            assert anew.devices()
        anew.close()


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
    """With the settings that only its operator knows: no monitor of ours may be in its place."""
    monkeypatch.setattr(watching, "GUARD_S", 0.01)
    monkeypatch.setattr(watching, "OTHERS_FIRST_S", 0.05)
    started, looks, is_held = [], [], watching._is_held
    monkeypatch.setattr(watching, "start_monitor", started.append)
    monkeypatch.setattr(watching, "_is_held", lambda directory: bool(looks.append(1)) or is_held(directory))
    told = "so restart it by hand"
    with MonitorProcess(tmp_path / "run", "--capacity", "2GiB") as daemon:
        with monitor.watch(runtime_dir=tmp_path / "run") as watched:
            (device,) = watched.devices()
            for _ in range(2):
                killed = daemon.pid
                assert watched.monitor_pid == killed
                daemon.kill()
                (tmp_path / "run" / "record.new").write_text("of a monitor that was killed while it made its record")
                wait_until(lambda: told in caplog.text)
                wait_until(lambda: watched.memory(device.uuid).is_stale() and watched.snapshot().silent_ns)
                seen = len(looks)
                wait_until(lambda seen=seen: len(looks) > seen + 20)
                assert caplog.text.count(told) == 1
                caplog.clear()
                daemon.start()
                wait_until(lambda killed=killed: watched.monitor_pid == daemon.pid != killed)
                assert watched.devices() == (device,)
                wait_until(lambda: not watched.memory(device.uuid).is_stale() and not watched.snapshot().silent_ns)
                assert not (tmp_path / "run" / "record.new").exists()
        assert not ended(daemon.pid)
    assert started == [] and "starting another one" not in caplog.text


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


def test_a_monitor_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="is not a directory"):
        monitor.watch(runtime_dir=tmp_path / "file")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MonitorFailed, match="ended with status 1"):
        monitor.watch(runtime_dir=tmp_path / "run")


IMPORTS = """
import sys
from pagetide.common.host_memory import host_memory
host_memory()
assert "psutil" not in sys.modules or sys.platform != "linux"; from pagetide import monitor
monitor.watch
print({"torch", "numpy", "yaml", "prometheus_client"} & set(sys.modules))
"""


def test_an_engine_that_watches_loads_nothing_that_only_some_need() -> None:
    assert subprocess.check_output([sys.executable, "-P", "-c", IMPORTS], text=True).strip() == "set()"


def test_the_variable_goes_first_and_alone_then_the_machines_and_the_users_directory(tmp_path: Path) -> None:
    environ = {"PAGETIDE_RUNTIME_DIR": "/x/y", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert own_dir(environ).path == Path("/x/y")
    assert readable_dirs(environ) == (RuntimeDir(Path("/x/y")),)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert own_dir(environ).path == tmp_path / "pagetide"
    assert [directory.path for directory in readable_dirs(environ)] == [MACHINE_DIR, tmp_path / "pagetide"]
    assert str(os.getuid()) in str(own_dir({}).path) and own_dir({}).path.is_absolute()
    for named in ("here", "./a/b", "~/run"):
        for read in (own_dir, readable_dirs):
            with pytest.raises(ConfigInvalid, match=r"^PAGETIDE_RUNTIME_DIR must be an absolute path, got ") as refused:
                read({"PAGETIDE_RUNTIME_DIR": named})
            assert str(refused.value).endswith(f"; set it to {Path(named).absolute()}, or unset it")


def test_a_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "a" / "b").prepare()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.prepare() == directory  # again


@pytest.mark.skipif(os.getuid() != 0, reason="only root has directories of other users and of any group")
def test_directories_of_others_and_of_groups(tmp_path: Path) -> None:
    group = grp.getgrall()[-1]
    found = RuntimeDir(tmp_path / "shared").prepare(group=group.gr_name).path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o750, group.gr_gid)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "diary").write_text("")
    with pytest.raises(ConfigInvalid, match="is not empty"):
        RuntimeDir(tmp_path / "mine").prepare(group=group.gr_name)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(ConfigInvalid, match="belongs to user 12345, not to 0"):
        RuntimeDir(tmp_path / "theirs").prepare()
    for uid, is_ours in ((12345, False), (0, True)):
        os.chown(tmp_path, uid, -1)
        assert (own_dir({"XDG_RUNTIME_DIR": str(tmp_path)}).path == tmp_path / "pagetide") is is_ours


def test_unsafe_and_unusable_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, group, said in (
        ("file", None, "is not a directory"),
        ("file/below", None, "cannot be used: (File exists|Not a directory)"),
        ("link", None, "is not a directory"),
        ("open", None, "writable by others"),
        ("g", "no such group", "no group 'no such group'"),
    ):
        with pytest.raises(ConfigInvalid, match=said):
            RuntimeDir(tmp_path / name).prepare(group=group)


def test_locks_exclude_and_share(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    a, b, c = FileLock(path), FileLock(path), FileLock(path)
    assert a.try_shared() and b.try_shared() and not c.try_exclusive()
    a.close()
    assert not c.try_exclusive()
    b.close()
    assert c.try_exclusive()
    late = FileLock(path)
    assert not late.try_shared() and not late.wait_shared(0.02)
    c.close()
    c.close()
    assert late.wait_shared(0.02)
    late.close()
    with pytest.raises(ValueError, match="closed"):
        late.try_shared()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_forked_child_lets_go_of_its_parents_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.try_exclusive()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent closes its end
        os._exit(0)
    lock.close()
    other = FileLock(tmp_path / "lock")
    try:
        assert other.wait_exclusive(30)
    finally:
        other.close()
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


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


def test_what_no_monitor_notes_says_nothing(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    assert last_holder(directory) is None and monitor_pid(directory) is None, "no file"
    for text in ("", "4711", "x serve", "4711 by-hand", "4711 serve 3", "\xff"):
        directory.monitor_lock.write_text(text, "latin-1")
        assert last_holder(directory) is None and monitor_pid(directory) is None, text


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
    monkeypatch.setattr("pagetide.monitor.runtime_dir._LOCKS", table)
    assert pids_of_users(directory) == (7, 31)
