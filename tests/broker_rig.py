"""Brokers under test: one on a made-up clock, one in a thread, one in a process; engines that hold real memory.

Run as a program it is such a process: `broker SOCKET CAPACITY HEADROOM [PID,...]` serves a test device of host memory whose
external processes are named; `engine SOCKET NAME MIN MAX GRANULE DEVICE` holds a lease and obeys the broker and its
standard input; `racer SOCKET NAME` does so with numbers alone; `user SOCKET DEVICE UID GID` is another user's, and takes a
lease of each minimum that it is told; `external` holds memory and knows no broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagetide.allocator import wire
from pagetide.allocator.broker import Broker, BrokerThread
from pagetide.allocator.broker_client import Channel
from pagetide.allocator.errors import LeaseError
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.lease import Lease
from pagetide.allocator.lease_events import Granted, Recalled
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.allocator.quota import Quota
from pagetide.monitor.errors import NoSuchDevice
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, DeviceMemory
from pagetide.monitor.sources.host import HostSource

DEVICE = "GPU-under-test"
INTERVAL_NS = 20_000_000
RULES = Rules(headroom_bytes=100, band_bytes=20)


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll something in a real process."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        yield Path(folder)


# ---- on a made-up clock -------------------------------------------------------------------------


@dataclass
class Clock:
    """Monotonic ns that pass when told."""

    ns: int = 10**9

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@dataclass
class Numbers:
    """Readings of one device, always fresh."""

    clock: Callable[[], int] = time.monotonic_ns
    capacity: int | None = 1000
    used: int = 0
    age_ns: int = 0
    error: str | None = None

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(DEVICE, "0", DeviceKind.GPU),)

    def memory(self, uuid: str) -> DeviceMemory:
        if uuid != DEVICE:
            raise NoSuchDevice(f"no device {uuid!r} is watched; there are: {DEVICE} (0)")
        free = None if self.capacity is None or self.error else self.capacity - self.used
        return DeviceMemory(self.clock() - self.age_ns, INTERVAL_NS, self.capacity, free, None, 1, 0, self.error)


class Client:
    """A client of a broker in the same loop: everything it sends is read, everything sent to it is here, after `pump`."""

    def __init__(self, bench: Bench, protocol: int = 1) -> None:
        self._bench = bench
        self.channel = Channel(bench.path, protocol=protocol)
        self.lease_id = -1
        self.fd = -1
        self.generation = wire.OrderGeneration(0, 0)

    async def say(self, *messages: wire.FromClient) -> list[wire.Message]:
        for message in messages:
            self.channel.send(message)
        return await self.hear()

    async def hear(self) -> list[wire.Message]:
        await self._bench.pump()
        return self.channel.receive()

    async def register(self, name: str, low: int = 0, high: int | None = None, **more: Any) -> wire.RegisteredMessage:
        terms = {"weight": 1.0, "priority": 0, "granule_bytes": 10, "held_bytes": 0, "device_uuid": DEVICE} | more
        answers = await self.say(wire.RegisterMessage(name=name, min_bytes=low, max_bytes=high, **terms))
        assert isinstance(answers[0], wire.RegisteredMessage), answers
        self.lease_id, self.generation = answers[0].lease_id, answers[0].generation
        self.fd = self.channel.take_fd()
        return answers[0]

    async def ends(self) -> bool:
        """Whether the broker has ended the connection."""
        await self._bench.pump()
        try:
            while self.channel.receive():
                pass
        except LeaseError:
            return True
        return False

    def close(self) -> None:
        self.channel.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class Bench:
    """A broker whose ticks and clock are in the test's hands, with its clients, in one event loop."""

    path: Path
    clock: Clock = field(default_factory=Clock)
    rules: Rules = RULES
    grace_s: float = 2.0
    quota: Quota | None = None

    def __post_init__(self) -> None:
        self.numbers = Numbers(self.clock)
        self.engines: list[frozenset[int]] = []  # what the source of numbers was told
        self.clients: list[Client] = []
        self.broker = Broker(
            self.numbers, self.path, rules=lambda info, capacity: self.rules, quota=self.quota,
            set_engines=lambda uuid, pids: self.engines.append(pids),
            tick_s=None, pause_s=0, grace_s=self.grace_s, clock=self.clock,
        )  # fmt: skip

    def client(self, protocol: int = 1) -> Client:
        self.clients.append(Client(self, protocol))
        return self.clients[-1]

    async def engine(self, name: str, low: int = 0, high: int | None = None, protocol: int = 1, **more: Any) -> Client:
        client = self.client(protocol)
        await client.register(name, low, high, **more)
        return client

    async def pump(self) -> None:
        """Let the loop come to rest."""
        for _ in range(8):
            await asyncio.sleep(0)

    async def tick(self, seconds: float = 0.02) -> None:
        self.clock.advance(seconds)
        self.broker.tick()
        await self.pump()

    async def __aenter__(self) -> Bench:
        await self.broker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        await self.pump()
        await self.broker.close()


# ---- in a thread --------------------------------------------------------------------------------


@contextlib.contextmanager
def broker_thread(path: Path, numbers: Any, **options: Any) -> Iterator[Broker]:
    """A broker with a real clock."""
    broker = Broker(numbers, path, **({"rules": lambda info, capacity: RULES} | options))
    thread = BrokerThread(broker)
    thread.start()
    try:
        yield broker
    finally:
        thread.close()


# ---- in processes -------------------------------------------------------------------------------


def test_device(capacity: int) -> DeviceInfo:
    """As the broker's process sees it: its uuid follows from the machine and the capacity."""
    return HostSource(capacity).scan()[0]


test_device.__test__ = False  # type: ignore[attr-defined]


class HostNumbers:
    """A test device of host memory, measured every 5 ms by a thread; its external processes are named, engines come and go."""

    def __init__(self, capacity: int, externals: Sequence[int]) -> None:
        self._source = HostSource(capacity, externals)
        self._externals = tuple(externals)
        (self._info,) = self._source.scan()
        self._memory = self._ask()
        threading.Thread(target=self._poll, daemon=True).start()

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (self._info,)

    def memory(self, uuid: str) -> DeviceMemory:
        return self._memory

    def set_engines(self, uuid: str, pids: frozenset[int]) -> None:
        self._source.set_members([*self._externals, *sorted(pids)])

    def _poll(self) -> None:
        while True:
            self._memory = self._ask()
            time.sleep(0.005)

    def _ask(self) -> DeviceMemory:
        at_ns = time.monotonic_ns()
        reading = self._source.memory(self._info)
        # An interval that a busy machine keeps: what is old is not leased out.
        return DeviceMemory(at_ns, INTERVAL_NS * 50, reading.total_bytes, reading.free_bytes, None, 1, 0)


class Process:
    """This file as a program. Lines in, lines out."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.pid = self._process.pid

    def start(self) -> Process:
        """Wait for its first line."""
        self.read()
        return self

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def tell(self, line: str) -> Any:
        self.write(line)
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes, and ends them."""
    started: list[Process] = []

    def start(*arguments: object) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.signal(signal.SIGCONT)
            process.close()


def resident_bytes(pid: int) -> int:
    """As the kernel counts it, to the page."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Rss:"))


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


def _serve(path: str, capacity: str, headroom: str, externals: str = "") -> None:
    numbers = HostNumbers(int(capacity), [int(pid) for pid in externals.split(",") if pid])
    rules = Rules(int(headroom), int(headroom) // 4, cooldown_s=0.3, recall_deadline_s=0.5)
    broker = Broker(
        numbers, Path(path), rules=lambda info, capacity: rules, set_engines=numbers.set_engines,
        tick_s=0.005, grace_s=1.0,
    )  # fmt: skip
    BrokerThread(broker).start()
    _say("listens")
    sys.stdin.read()


class _Engine:
    """Holds extents of host memory by its lease: maps what it is granted, unmaps what is recalled."""

    def __init__(self, path: str, name: str, low: str, high: str, granule: str, device: str) -> None:
        self.granule = int(granule)
        arena = HostArena(max(1, int(high) // self.granule), self.granule)
        # What Python holds besides; what it takes later must lie within it.
        self.base = resident_bytes(os.getpid()) + 4 * self.granule
        self.lease = Lease.register(
            Path(path), name=name, device_uuid=device, min_bytes=self.base + int(low), max_bytes=self.base + int(high),
            granule_bytes=self.granule, held_bytes=self.base, timeout_s=30,
        )  # fmt: skip
        self.arena = LeasedArena(arena, self.lease)

    def resize(self, total: int) -> None:
        """To hold at most `total` bytes in all."""
        wanted = max(0, (total - self.base) // self.granule)
        mapped = sorted(self.arena.mapped_extents)
        if wanted > len(mapped):
            there = set(mapped)
            free = [extent for extent in range(self.arena.num_extents) if extent not in there]
            self.arena.map(free[: wanted - len(mapped)])
        elif wanted < len(mapped):
            self.arena.unmap(mapped[wanted:])
        self.lease.report({"base": self.base, "kv": self.arena.mapped_bytes}, free_bytes=0)

    def serve(self) -> None:
        """What the broker wants."""
        for event in self.lease.poll():
            if isinstance(event, Granted):
                self.resize(event.granted_bytes)
            elif isinstance(event, Recalled):
                self.resize(event.target_bytes)
                self.lease.answer_unmapped(self.lease.held_bytes)

    def obey(self, line: str) -> object:
        """What the test wants."""
        match line.split():
            case ["ask", amount]:
                self.lease.ask(self.base + int(amount), expires_s=600)
            case ["keep", amount]:
                self.resize(self.base + int(amount))
                self.lease.answer_unmapped(self.lease.held_bytes)
            case ["state"]:
                pass
        lease = self.lease
        return {
            "granted": lease.granted_bytes - self.base, "held": self.arena.mapped_bytes, "base": self.base,
            "connected": lease.connected, "recalled": lease.recall is not None,
        }  # fmt: skip


class _Racer:
    """Holds nothing but a grant."""

    def __init__(self, path: str, name: str) -> None:
        self.lease = Lease.register(
            Path(path), name=name, device_uuid=DEVICE, min_bytes=0, granule_bytes=10, timeout_s=30
        )

    def serve(self) -> None:
        for event in self.lease.poll():
            if isinstance(event, Recalled) and event == self.lease.recall:
                self.lease.answer_unmapped(event.target_bytes)

    def obey(self, line: str) -> object:
        amount = int(line)
        self.lease.ask(amount, expires_s=600)
        if not amount:
            self.lease.answer_unmapped(0)
        return self.lease.granted_bytes


def _run(engine: _Engine | _Racer) -> None:
    """Do what the broker and the test want, until the test has no more to say."""
    _say("holds a lease")
    pending = b""
    while True:
        select.select([0, engine.lease], [], [], 0.02)
        engine.serve()
        if select.select([0], [], [], 0)[0]:
            data = os.read(0, 4096)
            if not data:
                return
            *complete, pending = (pending + data).split(b"\n")
            for line in complete:
                engine.serve()
                _say(engine.obey(line.decode()))


def _be_user(path: str, device: str, uid: str, gid: str) -> None:
    """Another user's process: takes leases, and says what it is refused."""
    import fcntl  # noqa: F401  # now: what is imported may lie where that user may not read

    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
    _say("is another user's")
    held = []
    for line in sys.stdin:
        try:
            held.append(
                Lease.register(
                    Path(path), name="x", device_uuid=device, min_bytes=int(line), granule_bytes=10, timeout_s=30
                )
            )
            _say("granted")
        except LeaseError as error:
            _say(str(error))


def _take() -> None:
    """An external process: knows nothing of a broker, holds what it is told."""
    arena = HostArena(4096, 1 << 20)
    _say("is strange")
    for line in sys.stdin:
        wanted, mapped = int(line) >> 20, sorted(arena.mapped_extents)
        if wanted > len(mapped):
            arena.map(range(len(mapped), wanted))
        else:
            arena.unmap(mapped[wanted:])
        _say(arena.mapped_bytes)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["broker", *rest]:
            _serve(*rest)
        case ["engine", *rest]:
            _run(_Engine(*rest))
        case ["racer", *rest]:
            _run(_Racer(*rest))
        case ["user", *rest]:
            _be_user(*rest)
        case ["external"]:
            _take()
