"""Reservations under attack, with real processes, memory, monitors and disks: nothing is leaked, and bounds are kept."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from broker_rig import Process, processes, resident_bytes, test_device
from monitors import MonitorProcess, run, wait_until
from reserver import Reserver

from pagetide.allocator.broker_client import BrokerClient
from pagetide.monitor.token_file import read_token

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
MIB = 1 << 20
CAPACITY, HEADROOM = 512 * MIB, 32 * MIB
NOISE = 4 * MIB  # what Python's heap moves


def device_uuid(capacity: int = CAPACITY) -> str:
    return test_device(capacity).uuid


@contextmanager
def reservers(directory: Path, number: int) -> Iterator[list[Reserver]]:
    """Started before the monitor, as its members."""
    started = [Reserver(directory) for _ in range(number)]
    try:
        for one in started:
            one.start()
        yield started
    finally:
        for one in started:
            one.close()


def monitor(folder: Path, members: list[Any], *more: str) -> MonitorProcess:
    pids = ",".join(str(member.pid) for member in members)
    return MonitorProcess(folder / "run", "--capacity", str(CAPACITY), "--members", pids, *more)


def hungry_engine(start: Any, folder: Path) -> Process:
    """It takes what it gets, and gives back what is recalled."""
    engine: Process = start("engine", folder / "run" / "broker.sock", "a", 0, CAPACITY, MIB, device_uuid())
    engine.start().tell(f"ask {CAPACITY}")
    return engine


def client(folder: Path) -> BrokerClient:
    return BrokerClient(folder / "run" / "broker.sock", timeout_s=60)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_what_is_reserved_is_free_whenever_it_is_taken(folder: Path) -> None:
    """Reservations come, grow, shrink, are used at once and end beside an engine that wants all: no byte too much."""
    rng = random.Random(4)
    with reservers(folder / "run", 3) as programs, monitor(folder, programs) as daemon, processes() as start:
        engine = hungry_engine(start, folder)
        everyone = [*programs, engine]

        def check() -> None:
            assert sum(resident_bytes(one.pid) for one in everyone) <= CAPACITY - HEADROOM + NOISE

        granted = refused = 0
        for step in range(60):
            one = programs[rng.randrange(len(programs))]
            state = one.tell("state")
            if not state["kept"]:
                kept = one.reserve(rng.randrange(1, 150) * MIB, wait_s=rng.choice([0.2, 3]))
                granted, refused = granted + kept, refused + (not kept)
            elif step % 4 == 3:
                one.tell("take 0")
                one.tell("close")
            elif rng.random() < 0.5:
                size = rng.randrange(1, 150) * MIB
                if size < state["taken"]:
                    one.tell(f"take {size // MIB * MIB}")
                one.resize(size, wait_s=rng.choice([0.2, 3]))
            one.tell(f"take {one.tell('state')['size'] * one.tell('state')['kept']}")
            check()
        assert granted > 5
        for one in programs:
            one.kill()
        everyone = [engine]
        wait_until(lambda: client(folder).reservations() == (), "nothing to be reserved")
        wait_until(lambda: engine.tell("state")["held"] > CAPACITY - 3 * HEADROOM - 64 * MIB, "the engine to have the rest")
        assert daemon.said().count("Traceback") == 0


def test_processes_killed_between_grant_and_use_leave_nothing(folder: Path) -> None:
    rng = random.Random(7)
    with monitor(folder, []) as daemon, processes() as start:
        engine = hungry_engine(start, folder)
        wait_until(lambda: engine.tell("state")["held"] > CAPACITY // 2, "the engine to grow")
        before = descriptors(daemon.pid)
        for _ in range(8):
            with reservers(folder / "run", 2) as (first, second):
                for one in (first, second):
                    one.write(f"reserve {200 * MIB} 60")
                if rng.random() < 0.7:
                    first.read()
                first.kill()
                second.kill()
        wait_until(lambda: client(folder).reservations() == (), "nothing to be reserved")
        wait_until(lambda: descriptors(daemon.pid) <= before, "its descriptors to be closed")
        wait_until(lambda: engine.tell("state")["held"] > CAPACITY // 2 + 64 * MIB, "the engine to have all again")
        assert daemon.said().count("Traceback") == 0


def test_a_flood_is_bounded_and_costs_the_others_nothing(folder: Path) -> None:
    with reservers(folder / "run", 2) as (flood, other), monitor(folder, []) as daemon, processes() as start:
        engine = hungry_engine(start, folder)
        assert flood.reserve(MIB)
        before, memory = descriptors(daemon.pid), psutil.Process(daemon.pid).memory_info().rss
        told = flood.tell("flood 700")
        assert "which is the limit; end some" in told["said"], told
        assert 400 < told["floods"] < 512
        assert descriptors(daemon.pid) - before < 2 * 512 and psutil.Process(daemon.pid).memory_info().rss - memory < 32 * MIB
        assert len(client(folder).reservations()) == told["floods"]
        assert not other.reserve(MIB) and "which is the limit" in other.tell(f"reserve {MIB} 1")["said"]
        assert run("recall", "a", "32MiB", env={"PAGETIDE_RUNTIME_DIR": str(folder / "run")}).returncode == 0
        wait_until(lambda: engine.tell("state")["connected"], "the engine to be served")
        flood.kill()
        wait_until(lambda: client(folder).reservations() == (), "nothing to be reserved")
        assert other.reserve(MIB)
        wait_until(lambda: descriptors(daemon.pid) <= before + 4, "its descriptors to be closed")
        assert daemon.said().count("Traceback") == 0


def test_reservations_outlive_a_killed_monitor_before_others_are_served(folder: Path) -> None:
    with reservers(folder / "run", 2) as programs, monitor(folder, programs) as daemon, processes() as start:
        first, late = programs
        engine = hungry_engine(start, folder)
        assert first.reserve(150 * MIB)
        first.tell(f"take {150 * MIB}")
        daemon.kill()
        wait_until(lambda: not first.tell("state")["kept"], "the loss to be noticed")
        daemon.start()
        late.write(f"reserve {330 * MIB} 5")  # first in line, and too much beside the other
        wait_until(lambda: first.tell("state")["kept"], "the reservation to be renewed")
        assert not late.read()["kept"]
        assert engine.tell("state")["connected"]
        (row,) = client(folder).reservations()
        assert (row.pid, row.held_bytes) == (first.pid, 150 * MIB)


def test_a_reservation_starts_a_monitor_where_none_runs_and_ends_it(folder: Path) -> None:
    with reservers(folder / "run", 1) as (one,):
        assert one.reserve(MIB)
        (row,) = client(folder).reservations()
        assert (row.name, row.pid) == ("reserver.py", one.pid)
        one.tell("close")
        wait_until(lambda: not (folder / "run" / "record").exists(), "the monitor's end")


def request(port: int, method: str, path: str, body: object = None, token: str = "") -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text.decode()


def port_of(daemon: MonitorProcess) -> int:
    wait_until(lambda: "/metrics" in daemon.said(), "the port")
    return int(daemon.said().rsplit("/metrics", 1)[0].rsplit(":", 1)[1])


def test_over_http_with_a_token_the_engine_gives_way_and_a_dead_process_keeps_nothing(folder: Path) -> None:
    file = folder / "token"
    with monitor(folder, [], "--metrics-port", "0", "--token-file", str(file)) as daemon, processes() as start:
        engine, port = hungry_engine(start, folder), port_of(daemon)
        wait_until(lambda: engine.tell("state")["held"] > CAPACITY // 2, "the engine to grow")
        token = read_token(file)
        wanted = {"size": "300MiB", "time": "2h", "name": "comfy"}
        for wrong in ("", "x" * len(token), token[:-1]):
            assert request(port, "POST", "/reservations", wanted, wrong)[0] == 401
        assert request(port, "GET", "/reservations") == (200, [])
        status, made = request(port, "POST", "/reservations", wanted, token)
        assert status == 201 and made["held_bytes"] == 300 * MIB, made
        assert engine.tell("state")["held"] < CAPACITY - HEADROOM - 300 * MIB
        status, refused = request(port, "POST", "/reservations", wanted | {"wait": 0.1}, token)
        assert status == 409 and "'comfy'" in refused["error"] and "for 1 h more" in refused["error"], refused
        sleeper = subprocess.Popen(["sleep", "600"])
        try:
            status, waits = request(port, "POST", "/reservations", wanted | {"wait": "1min", "pid": sleeper.pid}, token)
            assert status == 202 and waits["state"] == "waiting", waits
            assert request(port, "DELETE", f"/reservations/{made['id']}", None, token)[0] == 200
            row = f"/reservations/{waits['id']}"
            wait_until(lambda: request(port, "GET", row)[1].get("state") == "held", "its turn")
            assert request(port, "PATCH", row, {"size": "100MiB"}, token)[1]["held_bytes"] == 100 * MIB
        finally:
            sleeper.kill()
            sleeper.wait()
        wait_until(lambda: client(folder).reservations() == (), "the end of its process to be noticed")
        assert request(port, "GET", row)[0] == 404
        for number in range(70):
            assert request(port, "POST", "/reservations", {"size": 1, "time": 60}, token)[0] == (201 if number < 64 else 429)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0 and daemon.said().count("Traceback") == 0


def test_a_full_disk_takes_no_reservation_away(folder: Path) -> None:
    """The monitor's directory and its token file are on a disk that is full from then on."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a disk")
    try:
        file = disk / "token"
        daemon = MonitorProcess(disk / "run", "--capacity", str(CAPACITY), "--metrics-port", "0", "--token-file", str(file))
        daemon._log = folder / "log"
        with daemon:
            port, token = port_of(daemon), read_token(file)
            (disk / "filler").write_bytes(b"")
            with pytest.raises(OSError, match="No space left"):
                (disk / "filler").write_bytes(bytes(16 * MIB))
            status, made = request(port, "POST", "/reservations", {"size": "300MiB", "time": "1h"}, token)
            assert status == 201, made
            environ = {"PAGETIDE_RUNTIME_DIR": str(disk / "run")}
            done = run("run", "--reserve", "100MiB", "--", "true", env=environ)
            assert done.returncode == 0, done.stderr
            assert run("reserve", "300MiB", "--wait", "0.1s", env=environ).returncode == 2
            assert request(port, "DELETE", f"/reservations/{made['id']}", None, token)[0] == 200
            assert daemon.said().count("Traceback") == 0
        new = disk / "new"
        where = ("--runtime-dir", folder / "other", "--source", "host", "--metrics-port", "0", "--token-file", new)
        again = run("serve", *where)
        assert again.returncode == 2 and f"the token file {new} cannot be made: No space left on device" in again.stderr, again
        assert not new.exists()
    finally:
        subprocess.run(["umount", disk], check=True)
