"""The broker for long: the last extents raced for 10,000 times, and minutes of killing, stopping and harassing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_rig import Numbers, Process, broker_thread, processes, resident_bytes, short_folder, test_device, wait_until

from pagetide.allocator import wire
from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.broker_socket import connect
from pagetide.allocator.errors import BrokerUnavailable

pytestmark = [pytest.mark.stress, pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")]
MIB = 1 << 20
ROUNDS = int(os.environ.get("PAGETIDE_BROKER_ROUNDS", "10000"))
CHAOS_S = float(os.environ.get("PAGETIDE_CHAOS_S", "30"))
SEED = int(os.environ.get("PAGETIDE_SEEDS", "").split(",")[0] or random.randrange(2**32))


def test_eight_processes_race_for_the_last_extents_and_the_sum_is_exact_every_time() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    extents = (1000 - 100 - 20) // 10
    with short_folder() as folder, processes() as start, broker_thread(folder / "broker", Numbers()) as broker:
        racers: list[Process] = [start("racer", folder / "broker", f"racer {i}") for i in range(8)]
        for racer in racers:
            racer.start()

        def granted(exactly: int) -> bool:
            total = sum(row.granted_bytes for row in broker.leases())
            assert total <= 10 * extents
            return total == exactly

        for round_ in range(ROUNDS):
            wanted = [chance.randrange(1, 2 * extents // 3) for _ in racers]
            for racer, amount in zip(racers, wanted, strict=True):
                racer.write(str(10 * amount))
            for racer in racers:
                racer.read()
            total = 10 * min(extents, sum(wanted))
            wait_until(lambda total=total: granted(total), f"round {round_}: {total} bytes for {wanted}")  # type: ignore[misc]

            def given_back() -> bool:
                for racer in racers:  # one that was granted something just now has to say so again
                    racer.write("0")
                for racer in racers:
                    racer.read()
                return granted(0)

            wait_until(given_back, f"round {round_}: everything back")


# ---- everything at once -------------------------------------------------------------------------

CAPACITY, HEADROOM = 768 * MIB, 128 * MIB


class Harassment:
    """Clients that mean harm, one after the other."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._random = path, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Harassment:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        hello = wire.to_frame(wire.HelloMessage(wire.PROTOCOL))
        silent: list[socket.socket] = []
        while not self._stop.wait(0.01):
            try:
                sock = connect(self._path)
            except OSError:  # the broker is dead just now, or its queue is full
                continue
            with contextlib.suppress(OSError):
                match self._random.randrange(5):
                    case 0:
                        sock.send(self._random.randbytes(self._random.randrange(2000)))
                    case 1:
                        sock.send(struct.pack(">I", 1 << 30))
                    case 2:
                        sock.send(hello + hello[:9])
                    case 3:
                        sock.send(hello + 3000 * wire.to_frame(wire.ListLeasesMessage()))
            silent.append(sock)
            if len(silent) > 200:
                silent.pop(self._random.randrange(200)).close()
        for sock in silent:
            sock.close()


def test_nobody_holds_more_than_the_device_has_whatever_dies() -> None:
    """Three engines, an external process in pieces of up to the headroom, and every fault there is."""
    print("seed", SEED)
    chance = random.Random(SEED)
    uuid = test_device(CAPACITY).uuid
    with short_folder() as folder, processes() as start:
        path = folder / "broker"
        external: Process = start("external").start()

        def new_broker() -> Process:
            process: Process = start("broker", path, CAPACITY, HEADROOM, external.pid)
            return process.start()

        def new_engine(name: str) -> Process:
            process: Process = start("engine", path, name, 8 * MIB, CAPACITY, MIB, uuid)
            return process.start()

        def used() -> int:
            return sum(resident_bytes(process.pid) for process in (*engines.values(), external))

        def settled() -> bool:
            """Room for the next piece: what the external process's promise rests on."""
            return used() <= CAPACITY - HEADROOM

        broker = new_broker()
        engines = {name: new_engine(name) for name in ("a", "b", "c")}
        taken, until, acts = 0, time.monotonic() + CHAOS_S, dict.fromkeys(("ask", "take", "kill", "stop", "broker"), 0)
        with Harassment(path, SEED):
            while time.monotonic() < until:
                (act,) = chance.choices(list(acts), [10, 8, 1, 1, 1])
                acts[act] += 1
                name = chance.choice(list(engines))
                match act:
                    case "ask":
                        engines[name].tell(f"ask {chance.choice([0, 100, 400, 700]) * MIB}")
                    case "take":
                        wait_until(settled, "room for the external process's next piece")
                        change = chance.choice([-1, 1]) * chance.randrange(HEADROOM // MIB // 2)
                        taken = max(0, min(taken + change, CAPACITY // MIB * 6 // 10))
                        assert external.tell(str(taken * MIB)) == taken * MIB
                    case "kill":
                        engines[name].kill()
                        engines[name] = new_engine(name)
                    case "stop":
                        engines[name].signal(signal.SIGSTOP)
                        time.sleep(chance.random())
                        engines[name].signal(signal.SIGCONT)
                    case "broker":
                        broker.kill()
                        broker = new_broker()
                assert used() <= CAPACITY
                for engine in engines.values():
                    state = engine.tell("state")
                    assert state["held"] <= max(0, state["granted"])
        print(acts)
        for engine in engines.values():
            engine.kill()
        wait_until(lambda: not leases(path), "the last lease to be forgotten")


def leases(path: Path) -> tuple[wire.LeaseView, ...]:
    with contextlib.suppress(BrokerUnavailable):
        return BrokerClient(path).leases()
    return ()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before + 1
