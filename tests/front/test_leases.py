"""The commands `leases`, `limit`, `recall` and `run` of `vram-monitor`, on a test device with a real daemon and engines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from monitors import MonitorProcess, run, wait_until
from tenants import MIB, Light, Tenant, tenants

from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
CAPACITY = 1024 * MIB


@dataclass
class Device:
    """A test device with one engine on it, whose pool has grown and is idle."""

    directory: Path
    engine: Tenant
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


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    directory = tmp_path / "run"
    with tenants() as start, MonitorProcess(directory, "--capacity", str(CAPACITY)) as monitor:
        with RecordReader.open(monitor.record) as reader:
            uuid = reader.devices()[0].uuid
        light = Light(str(directory), uuid, "tide", 7, kv_max=512 * MIB, token_bytes=131072, idle_s=600.0, most_new=20)
        engine = light.start(start)
        made = Device(directory, engine, engine.read()["min"])
        while engine.tell("state")["mapped"] < 200 * MIB:
            engine.write("burst")
            wait_until(lambda: not engine.tell("state")["left"], "the burst to end")
        yield made
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
    (("run", "--reserve", "1MiB", "--", "no such program"), "there is no program 'no such program'"),
    (("run", "--reserve", "1MiB", "--", "/etc/hosts"), "/etc/hosts"),
]


def test_bad_input_is_a_sentence_and_status_2_and_changes_nothing(device: Device) -> None:
    for arguments, said in BAD:
        assert said in device.refused(*arguments), arguments
    lease = device.lease()
    assert (lease["max_bytes"], lease["state"]) == (None, "ok")


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
