"""Engines in processes that hold real memory, and are stopped and killed; so is their broker."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from broker_rig import Process, processes, resident_bytes, test_device
from monitors import MonitorProcess, wait_until

from pagetide.allocator import wire
from pagetide.allocator.broker_client import BrokerClient
from pagetide.pressure import ExternalProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
MIB = 1 << 20
CAPACITY, HEADROOM = 512 * MIB, 32 * MIB
UUID = test_device(CAPACITY).uuid if sys.platform == "linux" else ""


def monitor(folder: Path, members: str = "") -> MonitorProcess:
    return MonitorProcess(folder / "run", "--capacity", str(CAPACITY), "--members", members)


def engine_process(start: Any, path: Path, name: str, low: int = 0, high: int = 480 * MIB, granule: int = MIB) -> Process:
    process: Process = start("engine", path, name, low, high, granule, UUID)
    return process


def rows(path: Path) -> dict[str, wire.LeaseView]:
    return {row.name: row for row in BrokerClient(path, timeout_s=60).leases()}


def held_by(*engines: Process) -> int:
    return sum(engine.tell("state")["held"] for engine in engines)


def test_an_external_is_made_room_for_and_a_killed_engines_memory_goes_to_the_others(folder: Path) -> None:
    path = folder / "run" / "broker.sock"
    with processes() as start, ExternalProcess() as external, monitor(folder, str(external.pid)):
        a, b = (engine_process(start, path, name) for name in "ab")
        for engine in (a, b):
            engine.start().tell(f"ask {480 * MIB}")
        wait_until(lambda: held_by(a, b) > CAPACITY - HEADROOM - 120 * MIB, "both to fill the device")
        for taken in (40, 80, 120, 160):
            external.hold(taken * MIB)
            wait_until(
                lambda taken=taken: sum(resident_bytes(e.pid) for e in (a, b, external)) <= CAPACITY - HEADROOM,
                f"room after {taken} MiB",
            )
        assert held_by(a, b) <= CAPACITY - HEADROOM - taken * MIB
        held = b.tell("state")["held"]
        a.kill()
        wait_until(lambda: b.tell("state")["held"] > held + 50 * MIB, "the dead one's memory to be granted")
        wait_until(lambda: list(rows(path)) == ["b"], "the dead one to be forgotten")


def test_a_stopped_engine_is_overdue_and_the_others_are_served(folder: Path) -> None:
    path = folder / "run" / "broker.sock"
    with processes() as start, monitor(folder):
        a, b = (engine_process(start, path, name) for name in "ab")
        for engine in (a, b):
            engine.start().tell(f"ask {480 * MIB}")
        wait_until(lambda: min(e.tell("state")["held"] for e in (a, b)) > 100 * MIB, "both to fill the device")
        wait_until(lambda: {row.state for row in rows(path).values()} == {"ok"}, "rest")
        a.signal(signal.SIGSTOP)
        c = engine_process(start, path, "c", low=64 * MIB, high=64 * MIB)
        c.start()
        wait_until(lambda: rows(path)["a"].state == "overdue", "the recall to be overdue")
        granted = rows(path)["a"].granted_bytes
        wait_until(lambda: c.tell("state")["held"] == 64 * MIB, "the third one to be served by the second")
        assert (rows(path)["a"].granted_bytes, rows(path)["a"].state) == (granted, "overdue")
        a.signal(signal.SIGCONT)
        wait_until(lambda: rows(path)["a"].state == "ok", "the recall to be served at last")
        wait_until(lambda: abs(a.tell("state")["held"] - b.tell("state")["held"]) <= MIB, "equal shares again")


def test_a_killed_broker_costs_nothing_but_growth(folder: Path) -> None:
    path = folder / "run" / "broker.sock"
    with processes() as start, monitor(folder) as broker:
        a, b = (engine_process(start, path, name) for name in "ab")
        a.start().tell(f"ask {150 * MIB}")
        b.start().tell(f"ask {200 * MIB}")
        held = [150 * MIB, 200 * MIB]
        wait_until(lambda: [engine.tell("state")["held"] for engine in (a, b)] == held, "both to have what they ask for")
        broker.kill()
        wait_until(lambda: not any(e.tell("state")["connected"] for e in (a, b)), "both to notice")
        assert [engine.tell("state")["held"] for engine in (a, b)] == held
        broker.start()
        wait_until(lambda: all(e.tell("state")["connected"] for e in (a, b)), "both to come back")
        assert [engine.tell("state")["held"] for engine in (a, b)] == held
        wait_until(lambda: sorted(row.state for row in rows(path).values()) == ["ok", "ok"], "both to be known")
        a.kill()
        b.tell(f"ask {480 * MIB}")
        wait_until(lambda: b.tell("state")["held"] > held[1] + 100 * MIB, "b to grow again")
