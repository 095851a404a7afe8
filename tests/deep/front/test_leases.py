"""`vram-monitor run` and `leases` as processes: signals, hang-ups, and monitors that are lost, hang or differ in version."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from device_users import MIB
from false_broker import FalseBroker
from monitors import MonitorProcess, command, run, wait_until

from pagetide.allocator import wire
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
CAPACITY = 1024 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_goes_on_to_the_program_and_to_what_it_has_started(monitored: MonitorProcess, number: int) -> None:
    """Without a terminal: to all of its group. The program's status is told, once it has ended."""
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
        refused = run("run", "--reserve", "700MiB", "--wait", "0.1s", "--", "true", env=env_of(monitored))
        assert refused.returncode == 2 and "'sh'" in refused.stderr and "reserved 500.00 MiB until it ends" in refused.stderr
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
        refused = run("run", "--reserve", "700MiB", "--wait", "0.1s", "--", "true", env=env_of(monitored))
        assert refused.returncode == 2 and "'sh'" in refused.stderr and "reserved 500.00 MiB until it ends" in refused.stderr
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.wait(60) == 5
        assert started.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_memory_is_kept_for_a_time_until_a_signal_and_over_the_monitors_end(monitored: MonitorProcess, number: int) -> None:
    started = subprocess.Popen(
        command("reserve", "500MiB", "--time", "2h", "--name", "notebook"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env_of(monitored), start_new_session=True,
    )  # fmt: skip
    try:
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.readline().startswith("500.00 MiB of host are reserved, for 2 h; Ctrl-C")
        if number == signal.SIGTERM:
            monitored.kill()
            assert started.stderr.readline().startswith("vram-monitor: 500.00 MiB are reserved no longer (the broker at ")
            monitored.start()
            assert started.stderr.readline() == "vram-monitor: 500.00 MiB are reserved again\n"
        (row,) = json.loads(run("reservations", "--json", env=env_of(monitored)).stdout)
        assert (row["name"], row["pid"], row["held_bytes"]) == ("notebook", started.pid, 500 * MIB)
        assert 6000 < row["left_seconds"] <= 7200
        started.send_signal(number)
        assert started.wait(60) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
        shown = lambda: run("reservations", env=env_of(monitored)).stdout  # noqa: E731
        wait_until(lambda: shown() == " no memory is reserved\n", "its end")
    finally:
        started.kill()
        started.communicate(timeout=60)


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
    other = FalseBroker(socket_path)
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(run, "leases", env=env)
        other.accept()
        other.say(wire.WelcomeMessage(99, 1, 1))
        refuse(asked.result(), "the broker speaks version 99 of the lease protocol")
    other.close()
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
def reserved(monitor: MonitorProcess, size: str, *program: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
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
