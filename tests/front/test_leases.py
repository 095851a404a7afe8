"""The commands of `vram-monitor` about leases and reservations, on a test device with a real daemon and engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from device_users import MIB, DeviceUser, Light, device_users
from monitors import MonitorProcess, run, run_here, wait_until

from pagetide.allocator.reservation import Reservation
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
CAPACITY = 1024 * MIB


@dataclass
class Device:
    """A test device with one engine on it, whose pool has grown and is idle."""

    directory: Path
    engine: DeviceUser
    min_bytes: int

    @property
    def env(self) -> dict[str, str]:
        return {"PAGETIDE_RUNTIME_DIR": str(self.directory)}

    def run(self, *arguments: str) -> Any:
        return run_here(*arguments, env=self.env)

    def done(self, *arguments: str) -> str:
        shown = self.run(*arguments)
        assert shown.returncode == 0, shown.stderr
        told: str = shown.stdout
        return told

    def lease(self) -> dict[str, Any]:
        (lease,) = json.loads(self.done("leases", "--json"))
        found: dict[str, Any] = lease
        return found

    def refused(self, *arguments: str, status: int = 2) -> str:
        """What is said where nothing is done: one sentence."""
        shown = self.run(*arguments)
        assert shown.returncode == status and shown.stdout == "", (arguments, shown)
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
    shown = run("leases", env=device.env)
    assert shown.returncode == 0 and "tide" in shown.stdout and "\x1b" not in shown.stdout


def test_a_recall_takes_what_it_says(device: Device) -> None:
    before = device.lease()
    told = device.done("recall", "tide", "64MiB")
    assert told.startswith("tide must shrink to ") and "within 1 s" in told
    wait_until(lambda: device.lease()["recall_target_bytes"] is None, "the recall to be served")
    assert device.lease()["held_bytes"] <= before["held_bytes"] - 64 * MIB
    device.done("recall", str(device.engine.pid), "1 TiB")
    wait_until(lambda: device.lease()["granted_bytes"] == device.min_bytes, "all but the minimum to be back")
    assert "there is nothing to recall" in device.refused("recall", "tide", "1MiB")


def test_a_limit_is_applied_and_raised(device: Device) -> None:
    most = device.min_bytes + 64 * MIB
    assert "above the limit are freed as requests finish" in device.done("limit", "tide", "--max", str(most))
    wait_until(lambda: device.lease()["granted_bytes"] <= most, "the limit to be applied")
    assert device.lease()["max_bytes"] == most
    assert "above" not in device.done("limit", "tide", "--max", str(most))
    for size, num_bytes, said in (  # decimal and binary units are told apart
        ("2GB", 2 * 10**9, "1.86 GiB"),
        ("2GiB", 2 << 30, "2.00 GiB"),
        ("2G", 2 << 30, "2.00"),
        ("900MiB", 900 * MIB, "900.00 MiB"),
    ):
        assert said in device.done("limit", "tide", "--max", size)
        assert device.lease()["max_bytes"] == num_bytes
    device.engine.write("burst")
    wait_until(lambda: not device.engine.tell("state")["left"], "the burst to end")


def test_a_reservation_is_free_before_the_program_starts_and_its_status_is_told(device: Device) -> None:
    """The program asks the monitor how much is free, and the engine has no more than what is left."""
    code = (
        "import json, subprocess, sys; "
        "shown = subprocess.run([sys.executable, '-P', '-m', 'pagetide.vram_monitor', '--json'], capture_output=True); "
        "print(json.loads(shown.stdout)['devices'][0]['memory']['free_bytes']); sys.exit(7)"
    )
    free = CAPACITY - device.lease()["held_bytes"]
    reserve = (free + 100 * MIB) >> 20
    shown = run("run", "--reserve", f"{reserve}MiB", "--", sys.executable, "-P", "-c", code, env=device.env)
    assert shown.returncode == 7, shown.stderr
    assert int(shown.stdout) >= reserve * MIB
    for _ in range(3):
        device.engine.write("burst")
    wait_until(lambda: not device.engine.tell("state")["left"], "requests to end, which have the room again")


def test_a_reservation_for_a_time_is_listed_and_ends_by_itself(device: Device) -> None:
    assert device.done("reservations") == " no memory is reserved\n"
    done = run("reserve", "100MiB", "--time", "100ms", "--name", "notebook", env=device.env)
    assert done.returncode == 0
    assert done.stdout == "100.00 MiB of host are reserved, for 0 s; Ctrl-C or the end of this process gives them back\n"
    assert done.stderr == "vram-monitor: 100.00 MiB are reserved no longer: its time is over\n"
    uuid = device.lease()["device_uuid"]
    with Reservation.granted(device.directory / "broker.sock", uuid, 50 * MIB, name="train.py") as lease:
        (row,) = json.loads(device.done("reservations", "--json"))
        assert (row["name"], row["held_bytes"], row["state"], row["left_seconds"]) == ("train.py", 50 * MIB, "held", None)
        for command in ("reservations", "leases", "--once"):
            (shown,) = (line for line in device.done(command).splitlines() if "train.py" in line)
            assert shown.split()[:4] == ["host", f"#{lease.reservation_id}", str(row["pid"]), "train.py"], shown
            assert "50 / 50 MiB" in shown and shown.endswith("until it ends"), shown
        said = device.refused("reserve", "900MiB", "--wait", "10ms")
        assert "'train.py'" in said and "guaranteed to 'tide'" in said
        assert device.done("release", f"#{lease.reservation_id}") == f"reservation #{lease.reservation_id} has ended\n"
        wait_until(lambda: lease.poll() or lease.ended, "its end")
        assert lease.trouble is not None and lease.trouble.endswith("has ended it")


def test_a_program_that_is_killed_or_cannot_start_has_the_shells_status(device: Device, tmp_path: Path) -> None:
    assert device.run("run", "--reserve", "1MiB", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15
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
        assert said in device.refused("run", "--reserve", "1MiB", "--", program, status=status)


def test_bad_input_is_a_sentence_and_status_2_and_changes_nothing(device: Device) -> None:
    before = device.lease()
    for arguments, said in [
        (("limit", "ebb", "--max", "1GiB"), "no engine 'ebb' holds a lease; those that do: 'tide' (pid "),
        (("recall", "ebb", "1MiB"), "no engine 'ebb' holds a lease"),
        (("limit", "tide", "--max", "1MiB"), "its max cannot be 1.00 MiB"),
        (("limit", "tide", "--max", "two"), "--max: cannot read 'two' as an amount of memory"),
        (("limit", "", "--max", "1GiB"), "a printable text"),
        (("recall", "tide", "2 GBit"), "SIZE: cannot read"),
        (("recall", "tide", "9999999999TiB"), "more memory than there is"),
        (("run", "--reserve", "2GiB", "--", "true"), "2.00 GiB cannot be reserved: the device has 1.00 GiB"),
        (("run", "--reserve", "much", "--", "true"), "--reserve: cannot read 'much'"),
        (("run", "--reserve", "1MiB", "--device", "7", "--", "true"), "no device 7; those that exist: host"),
        *(
            (("run", "--reserve", "1MiB", f"--wait={given}", "--", "true"), f"--wait: cannot read '{given}' as a time")
            for given in ("nan", "inf", "-1", "1 week")
        ),
        (("release", "999"), "there is no reservation #999; it may have ended. Those that there are: none"),
        (("release", "comfy"), "ID: 'comfy' is no number of a reservation; vram-monitor reservations lists them"),
        (("reserve", "much"), "SIZE: cannot read 'much'"),
        (("reserve", "1MiB", "--time", "soon"), "--time: cannot read 'soon' as a time"),
        (("reserve", "1MiB", "--time", "40d"), "at most 30 days, got 3,456,000 s"),
        (("reserve", "1MiB", "--priority", "5000"), "reserve.priority must be a whole number between -1000 and 1000"),
    ]:
        assert said in device.refused(*arguments), arguments
    after = device.lease()
    assert (after["max_bytes"], after["state"]) == (before["max_bytes"], "ok")


def test_without_a_monitor_each_says_so(tmp_path: Path) -> None:
    limit, reserve = ("limit", "tide", "--max", "1GiB"), ("run", "--reserve", "1MiB", "true")
    for arguments in (("leases",), limit, ("recall", "tide", "1MiB"), reserve):
        shown = run_here(*arguments, env={"PAGETIDE_RUNTIME_DIR": str(tmp_path / "run")})
        assert shown.returncode == 2 and shown.stderr.count("\n") == 1, arguments
        assert f"no monitor is running in {tmp_path / 'run'}" in shown.stderr, arguments
    assert not (tmp_path / "run").exists(), "asking makes nothing"
