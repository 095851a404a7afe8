"""The commands `leases`, `limit`, `recall` and `run` of `vram-monitor`, on a test device with a real daemon and engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from device_users import MIB, DeviceUser, Light, device_users
from monitors import MonitorProcess, command, run, wait_until

from pagetide.allocator import wire
from pagetide.allocator.broker_socket import listen
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
CAPACITY = 1024 * MIB


@dataclass
class Device:
    """A test device with one engine on it, whose pool has grown and is idle."""

    directory: Path
    engine: DeviceUser
    min_bytes: int

    def run(self, *arguments: str) -> Any:
        return run(*arguments, env={"PAGETIDE_RUNTIME_DIR": str(self.directory)})

    def lease(self) -> dict[str, Any]:
        shown = self.run("leases", "--json")
        assert shown.returncode == 0, shown.stderr
        (lease,) = json.loads(shown.stdout)
        found: dict[str, Any] = lease
        return found

    def refused(self, *arguments: str) -> str:
        """What is said where nothing is done: one sentence."""
        shown = self.run(*arguments)
        assert shown.returncode == 2 and shown.stdout == "", (arguments, shown)
        assert shown.stderr.startswith("vram-monitor: ") and shown.stderr.count("\n") == 1, (arguments, shown.stderr)
        said: str = shown.stderr
        return said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    directory = tmp_path_factory.mktemp("device") / "run"
    with device_users() as start, MonitorProcess(directory, "--capacity", str(CAPACITY)) as monitor:
        with RecordReader.open(monitor.record) as reader:
            uuid = reader.devices()[0].uuid
        light = Light(str(directory), uuid, "tide", 7, kv_max=512 * MIB, token_bytes=131072, idle_s=600.0, most_new=20)
        engine = light.start(start)
        yield Device(directory, engine, engine.read()["min"])


@pytest.fixture
def device(shared: Device) -> Iterator[Device]:
    """The device that these tests share, its engine as the docstring of `Device` says."""
    engine = shared.engine
    while engine.tell("state")["mapped"] < 200 * MIB:
        engine.write("burst")
        wait_until(lambda: not engine.tell("state")["left"], "the burst to end")
    yield shared
    assert engine.tell("state")["failed"] == 0


def test_leases_tells_what_engines_may_hold_and_hold(device: Device) -> None:
    lease = device.lease()
    assert (lease["engine"], lease["pid"], lease["state"]) == ("tide", device.engine.pid, "ok")
    assert lease["min_bytes"] == device.min_bytes <= lease["held_bytes"] <= lease["granted_bytes"] <= CAPACITY
    assert lease["held_by_class"]["kv"] == device.engine.tell("state")["mapped"]
    shown = device.run("leases")
    assert shown.returncode == 0 and "tide" in shown.stdout and "\x1b" not in shown.stdout


def test_a_recall_takes_what_it_says(device: Device) -> None:
    before = device.lease()
    shown = device.run("recall", "tide", "64MiB")
    assert shown.returncode == 0 and shown.stdout.startswith("tide is to be at ") and "within 1 s" in shown.stdout
    wait_until(lambda: device.lease()["recall_target_bytes"] is None, "the recall to be served")
    assert device.lease()["held_bytes"] <= before["held_bytes"] - 64 * MIB
    by_pid = device.run("recall", str(device.engine.pid), "1 TiB")
    assert by_pid.returncode == 0, by_pid.stderr
    wait_until(lambda: device.lease()["granted_bytes"] == device.min_bytes, "all but the minimum to be back")
    assert "there is nothing to recall" in device.refused("recall", "tide", "1MiB")


def test_a_limit_is_applied_and_raised(device: Device) -> None:
    most = device.min_bytes + 64 * MIB
    shown = device.run("limit", "tide", "--max", str(most))
    assert shown.returncode == 0 and "come back as requests end" in shown.stdout
    wait_until(lambda: device.lease()["granted_bytes"] <= most, "the limit to be applied")
    assert device.lease()["max_bytes"] == most
    applied = device.run("limit", "tide", "--max", str(most))
    assert applied.returncode == 0 and "come back" not in applied.stdout
    assert device.run("limit", "tide", "--max", "900MiB").returncode == 0
    device.engine.write("burst")
    wait_until(lambda: not device.engine.tell("state")["left"], "the burst to end")


def test_decimal_and_binary_units_are_told_apart(device: Device) -> None:
    for size, num_bytes, said in (
        ("2GB", 2 * 10**9, "1.86 GiB"),
        ("2GiB", 2 << 30, "2.00 GiB"),
        ("2G", 2 << 30, "2.00"),
    ):
        shown = device.run("limit", "tide", "--max", size)
        assert shown.returncode == 0 and said in shown.stdout, shown
        assert device.lease()["max_bytes"] == num_bytes


def test_a_reservation_is_free_before_the_program_starts_and_its_status_is_told(device: Device) -> None:
    """The program asks the monitor how much is free, and the engine has no more than what is left."""
    code = (
        "import json, subprocess, sys; "
        "shown = subprocess.run([sys.executable, '-P', '-m', 'pagetide.vram_monitor', '--json'], capture_output=True); "
        "print(json.loads(shown.stdout)['devices'][0]['memory']['free_bytes']); sys.exit(7)"
    )
    free = CAPACITY - device.lease()["held_bytes"]
    reserve = (free + 100 * MIB) >> 20
    shown = device.run("run", "--reserve", f"{reserve}MiB", "--", sys.executable, "-P", "-c", code)
    assert shown.returncode == 7, shown.stderr
    assert int(shown.stdout) >= reserve * MIB
    for _ in range(3):
        device.engine.write("burst")
    wait_until(lambda: not device.engine.tell("state")["left"], "requests to end, which have the room again")


def test_a_program_that_a_signal_ended_has_the_shells_status(device: Device) -> None:
    ended = device.run("run", "--reserve", "1MiB", "--", "sh", "-c", "kill -TERM $$")
    assert ended.returncode == 128 + 15


def test_a_program_that_cannot_be_started_is_a_sentence_and_the_shells_status(device: Device, tmp_path: Path) -> None:
    for name, mode, text in (
        ("noexec", 0o644, "#!/bin/sh\n"),
        ("script", 0o755, "#!/no/such/shell\n"),
        ("binary", 0o755, "\0"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    for program, status, said in (
        ("no such program", 127, "there is no program 'no such program'"),
        (str(tmp_path / "nothing"), 127, "there is no program"),
        (str(tmp_path / "noexec"), 126, "/noexec' cannot be started: it is not executable"),
        (str(tmp_path / "script"), 126, "/script' cannot be started: the interpreter"),
        (str(tmp_path / "binary"), 126, "/binary' cannot be started: Exec format error"),
        (str(tmp_path), 126, "cannot be started: it is a directory"),
    ):
        shown = device.run("run", "--reserve", "1MiB", "--", program)
        assert shown.returncode == status and said in shown.stderr, shown
        assert shown.stderr.startswith("vram-monitor: ") and shown.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_goes_on_to_the_program_and_to_what_it_has_started(monitored: MonitorProcess, number: int) -> None:
    """Without a terminal: to all of its group. The program's status is told, once it has ended."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("these tests were started so that they ignore it, and so would the program")
    script = "trap 'exit 9' HUP INT TERM; sleep 600 & echo $!; while :; do sleep 0.01; done"
    with reserved(monitored, "1MiB", "sh", "-c", script) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        wait_until(lambda: psutil.Process(child).name() == "sleep", "the child to be what it is")
        started.send_signal(number)
        assert started.wait(60) == 9
        if number != signal.SIGINT:  # which shells let their background processes ignore
            wait_until(lambda: not psutil.pid_exists(child), "the end of what the program has started")
        else:
            os.kill(child, signal.SIGKILL)


def test_a_program_that_takes_its_time_to_end_keeps_its_reservation(monitored: MonitorProcess, tmp_path: Path) -> None:
    script = f"trap 'until [ -e {tmp_path}/go ]; do sleep 0.01; done; exit 3' TERM; echo; while :; do sleep 0.01; done"
    with reserved(monitored, "500MiB", "sh", "-c", script) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.send_signal(signal.SIGTERM)
        refused = run("run", "--reserve", "700MiB", "--", "true", env=env_of(monitored))
        assert refused.returncode == 2 and "cannot be reserved" in refused.stderr
        assert started.poll() is None
        (tmp_path / "go").touch()
        assert started.wait(60) == 3
    wait_until(lambda: run("run", "--reserve", "700MiB", "true", env=env_of(monitored)).returncode == 0, "room again")


def test_under_nohup_the_program_does_not_hear_of_a_hangup(monitored: MonitorProcess) -> None:
    with reserved(monitored, "1MiB", "sh", "-c", "echo; read line; exit 5", before=("nohup",)) as started:
        assert started.stdout is not None and started.stdin is not None
        started.stdout.readline()
        started.send_signal(signal.SIGHUP)
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.wait(60) == 5


def test_a_reservation_outlives_the_monitor(monitored: MonitorProcess) -> None:
    with reserved(monitored, "500MiB", "sh", "-c", "echo; read line; exit 5") as started:
        assert started.stdin is not None and started.stdout is not None and started.stderr is not None
        started.stdout.readline()
        monitored.kill()
        lost = started.stderr.readline()
        assert lost.startswith("vram-monitor: 500.00 MiB are reserved no longer (the broker at "), lost
        assert "the program goes on" in lost
        monitored.start()
        assert started.stderr.readline() == "vram-monitor: 500.00 MiB are reserved again\n"
        refused = run("run", "--reserve", "700MiB", "--", "true", env=env_of(monitored))
        assert refused.returncode == 2 and "cannot be reserved" in refused.stderr
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.wait(60) == 5
        assert started.stderr.read() == ""


def test_leases_that_nobody_tells_are_not_none(monitored: MonitorProcess) -> None:
    """A broker that is not there, one that is no broker, and one that hangs."""
    env, socket_path = env_of(monitored), monitored.directory / "broker.sock"
    told = run("leases", env=env)
    assert told.returncode == 0 and "no engine holds a lease" in told.stdout
    socket_path.rename(socket_path.with_name("away"))
    refuse(run("leases", env=env), "no broker listens at ")
    refuse(run("leases", "--json", env=env), "no broker listens at ")
    shown = json.loads(run("--json", env=env).stdout)
    assert shown["leases"] is None and "no broker listens at " in shown["leases_error"]
    assert "leases are not known: no broker listens at " in run("--once", env=env).stdout
    with broker_of_another_version(socket_path):
        refuse(run("leases", env=env), "the broker speaks version 99 of the lease protocol")
    socket_path.with_name("away").rename(socket_path)
    assert json.loads(run("--json", env=env).stdout)["leases"] == []
    monitored.signal(signal.SIGSTOP)
    asked = (("leases",), ("limit", "tide", "--max", "1GiB"), ("run", "--reserve", "1MiB", "true"), ("--json",))
    with ThreadPoolExecutor(1 + len(asked)) as side_by_side:  # each waits for the monitor a while
        first = side_by_side.submit(run, "leases", env=env)
        with RecordReader.open(monitored.record) as reader:
            wait_until(lambda: not reader.is_live())
        *told, as_json = side_by_side.map(lambda arguments: run(*arguments, env=env), asked)
    refuse(first.result(), "not answer")  # in time, or as the monitor: its record is live for a while
    for shown in told:
        refuse(shown, f"process {monitored.pid} holds {monitored.directory} as its monitor and")
    shown = json.loads(as_json.stdout)
    assert shown["leases"] is None and f"process {monitored.pid} holds " in shown["leases_error"]


@pytest.fixture
def monitored(tmp_path: Path) -> Iterator[MonitorProcess]:
    """A test device without engines."""
    with MonitorProcess(tmp_path / "run", "--capacity", str(CAPACITY)) as monitor:
        yield monitor


def env_of(monitor: MonitorProcess) -> dict[str, str]:
    return {"PAGETIDE_RUNTIME_DIR": str(monitor.directory)}


def refuse(shown: Any, said: str) -> None:
    assert shown.returncode == 2 and shown.stdout == "" and said in shown.stderr, shown
    assert shown.stderr.startswith("vram-monitor: ") and shown.stderr.count("\n") == 1


@contextlib.contextmanager
def reserved(
    monitor: MonitorProcess, size: str, *program: str, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`vram-monitor run`, without a terminal."""
    started = subprocess.Popen(
        [*before, *command("run", "--reserve", size, "--", *program)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | env_of(monitor), start_new_session=True,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)  # not SIGKILL, which would leave the program behind
        started.communicate(timeout=60)


@contextlib.contextmanager
def broker_of_another_version(path: Path) -> Iterator[None]:
    """Whoever connects is told of version 99."""
    listener = listen(path)
    listener.setblocking(True)

    def serve() -> None:
        with contextlib.suppress(OSError):  # until it is shut down
            while True:
                with listener.accept()[0] as client:
                    client.sendall(wire.to_frame(wire.WelcomeMessage(99, 1, 1)))
                    client.recv(4096)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        path.unlink()


BAD = [
    (("limit", "ebb", "--max", "1GiB"), "no engine 'ebb' holds a lease; those that do: 'tide' (pid "),
    (("recall", "ebb", "1MiB"), "no engine 'ebb' holds a lease"),
    (("limit", "tide", "--max", "1MiB"), "its max cannot be 1.00 MiB"),
    (("limit", "tide", "--max", "two"), "--max: cannot read 'two' as an amount of memory"),
    (("limit", "tide", "--max", "0"), "--max: an amount of memory must be at least 1 byte"),
    (("limit", "", "--max", "1GiB"), "a printable text"),
    (("recall", "tide", "2 GBit"), "SIZE: cannot read"),
    (("recall", "tide", "9999999999TiB"), "more memory than there is"),
    (("run", "--reserve", "2GiB", "--", "true"), "2.00 GiB cannot be reserved: of 1.00 GiB"),
    (("run", "--reserve", "much", "--", "true"), "--reserve: cannot read 'much'"),
    (("run", "--reserve", "1MiB", "--device", "7", "--", "true"), "no device 7; those that exist: host"),
    (("run", "--reserve", "1MiB", "--timeout", "nan", "--", "true"), "--timeout must be a number of seconds above 0"),
    (("run", "--reserve", "1MiB", "--timeout", "inf", "--", "true"), "--timeout must be a number of seconds above 0"),
    (("run", "--reserve", "1MiB", "--timeout", "-1", "--", "true"), "--timeout must be a number of seconds above 0"),
]


def test_bad_input_is_a_sentence_and_status_2_and_changes_nothing(device: Device) -> None:
    before = device.lease()
    for arguments, said in BAD:
        assert said in device.refused(*arguments), arguments
    after = device.lease()
    assert (after["max_bytes"], after["state"]) == (before["max_bytes"], "ok")


@pytest.mark.parametrize(
    "arguments",
    [("leases",), ("limit", "tide", "--max", "1GiB"), ("recall", "tide", "1MiB"), ("run", "--reserve", "1MiB", "true")],
    ids=lambda arguments: arguments[0],
)
def test_without_a_monitor_each_says_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    shown = run(*arguments, env={"PAGETIDE_RUNTIME_DIR": str(tmp_path / "run")})
    assert shown.returncode == 2 and shown.stderr.count("\n") == 1
    assert f"no monitor runs in {tmp_path / 'run'}" in shown.stderr
    assert not os.path.exists(tmp_path / "run"), "asking makes nothing"
