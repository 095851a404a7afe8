"""Brokers under test: one on a made-up clock, one in a thread; engines in processes that hold real memory.

Run as a program it is a process: `engine SOCKET NAME MIN MAX GRANULE DEVICE` holds a lease and obeys the broker and its
standard input; `user SOCKET DEVICE UID GID` is another user's, and takes a lease of each minimum that it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagetide.allocator import wire
from pagetide.allocator.broker import Broker, BrokerThread
from pagetide.allocator.broker_client import Channel
from pagetide.allocator.errors import LeaseClosed, LeaseError
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.lease import Lease
from pagetide.allocator.lease_events import Granted, Recalled
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.lease_table import LeaseTable
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.allocator.quota import Quota
from pagetide.monitor.errors import NoSuchDevice
from pagetide.monitor.events import MemoryEvent
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, DeviceMemory
from pagetide.monitor.sources.host import HostSource

DEVICE = "GPU-under-test"
INTERVAL_NS = 20_000_000
RULES = Rules(headroom_bytes=100, band_bytes=20)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        yield Path(folder)


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

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.channel = Channel(bench.path)
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

    async def refused(self, message: wire.FromClient, said: str) -> None:
        """Say something that is answered by a refusal which has `said` in it."""
        (answer,) = await self.say(message)
        assert isinstance(answer, wire.RefusedMessage) and said in answer.message, answer

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
        self.events: list[MemoryEvent] = []
        set_engines = lambda uuid, pids: self.engines.append(pids)  # noqa: E731
        table = LeaseTable(
            self.numbers, lambda info, capacity: self.rules, self.quota, set_engines, self.clock, self.events.append
        )
        self.broker = Broker(table, self.path, tick_s=None, pause_s=0, grace_s=self.grace_s)

    def client(self) -> Client:
        self.clients.append(Client(self))
        return self.clients[-1]

    async def engine(self, name: str, low: int = 0, high: int | None = None, **more: Any) -> Client:
        client = self.client()
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


def on_a_bench(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test in a loop: its first argument is a `Bench` made with `options`, the others are pytest's."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            async def within() -> None:
                with short_folder() as folder:
                    async with Bench(folder / "broker", **options) as bench:
                        await test(bench, **given)

            asyncio.run(within())

        run.__signature__ = inspect.Signature([*inspect.signature(test).parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


@contextlib.contextmanager
def broker_thread(
    path: Path, numbers: Any, quota: Quota | None = None, tell: Callable[[Any], None] = lambda event: None, **options: Any
) -> Iterator[Broker]:
    """A broker with a real clock."""
    broker = Broker(LeaseTable(numbers, lambda info, capacity: RULES, quota, tell=tell), path, **options)
    thread = BrokerThread(broker)
    thread.start()
    try:
        yield broker
    finally:
        thread.close()


def test_device(capacity: int) -> DeviceInfo:
    """As the broker's process sees it: its uuid follows from the machine and the capacity."""
    return HostSource(capacity).scan()[0]


test_device.__test__ = False  # type: ignore[attr-defined]


class Process:
    """A program of tests, this file for one. Lines in, JSON lines out."""

    file = __file__

    def __init__(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, self.file, *map(str, arguments)], env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.pid = self.process.pid

    def start(self) -> Process:
        """Wait for its first line."""
        self.read()
        return self

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def read(self) -> Any:
        """The next thing it says. Fails when it ends instead, or says nothing."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 120.0)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"process {self.pid} said nothing; its status is {self.process.poll()}"
        return json.loads(line)

    def tell(self, line: str) -> Any:
        self.write(line)
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, however it stands."""
        self.signal(signal.SIGCONT)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def processes(kind: type[Process] = Process) -> Iterator[Callable[..., Any]]:
    """Starts processes, and ends them."""
    started: list[Process] = []

    def start(*arguments: Any, **more: Any) -> Process:
        started.append(kind(*arguments, **more))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.close()


def resident_bytes(pid: int) -> int:
    """What a process holds, to the page; 0 once it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Rss:")), 0)


def resident_within(pid: int, start: int, length: int, figure: str = "Rss") -> int:
    """What of a range of a process' addresses has memory behind it, or another figure of /proc."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in (head := line.split(maxsplit=1)[0]) and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin < start + length and start < end
        elif inside and head == f"{figure}:":
            total += int(line.split()[1]) * 1024
    return total


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def lines(work: Callable[[], None]) -> Iterator[str | None]:
    """Lines of standard input as they come, None after each piece of `work` in between, until it ends."""
    pending = b""
    while True:
        if select.select([0], [], [], 0)[0]:
            data = os.read(0, 4096)
            if not data:
                return
            *complete, pending = (pending + data).split(b"\n")
            yield from (line.decode() for line in complete)
        with contextlib.suppress(LeaseClosed):
            work()
        yield None


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
        mapped = len(self.arena.mapped_extents)
        self.arena.map(range(mapped, wanted))
        self.arena.unmap(range(wanted, mapped))
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
        if line.startswith("ask "):
            self.lease.ask(self.base + int(line.removeprefix("ask ")), expires_s=600)
        return {"held": self.arena.mapped_bytes, "connected": self.lease.connected}


def _run(engine: _Engine) -> None:
    """Do what the broker and the test want, until the test has no more to say."""
    say("holds a lease")

    def work() -> None:
        select.select([0, engine.lease], [], [], 0.02)
        engine.serve()

    for line in lines(work):
        if line is not None:
            engine.serve()
            say(engine.obey(line))


def _be_user(path: str, device: str, uid: str, gid: str) -> None:
    """Another user's process: takes leases, and says what it is refused."""
    import fcntl  # noqa: F401  # now: what is imported may lie where that user may not read

    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
    say("is another user's")
    held = []
    for line in sys.stdin:
        try:
            held.append(
                Lease.register(Path(path), name="x", device_uuid=device, min_bytes=int(line), granule_bytes=10, timeout_s=30)
            )
            say("granted")
        except LeaseError as error:
            say(str(error))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", *rest]:
            _run(_Engine(*rest))
        case ["user", *rest]:
            _be_user(*rest)
