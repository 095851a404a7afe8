"""Engines of several shards under a broker of several devices, with all clocks in the test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from broker_rig import INTERVAL_NS, Clock, short_folder

from pagetide.allocator.broker import Broker, BrokerThread
from pagetide.allocator.lease import Lease
from pagetide.allocator.lease_events import Event
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.lease_table import LeaseTable
from pagetide.allocator.sharded_lease import ShardedLease
from pagetide.engine.shards.sharded_arena import ResizeOutcome, ShardedArena
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, DeviceMemory
from pagetide.scheduler.plan import Resize

HEADROOM, BAND = 100, 20
BASE, EXTENT = 100, 50  # bytes of a shard besides its extents, and of an extent
ASK_S = 0.25


@dataclass
class Devices:
    """Readings of test devices "gpu0", "gpu1", ..., always fresh. `used` says what is held of each."""

    clock: Clock
    capacity: list[int]
    used: Callable[[str], int] = lambda uuid: 0

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(DeviceInfo(f"gpu{i}", str(i), DeviceKind.GPU) for i in range(len(self.capacity)))

    def memory(self, uuid: str) -> DeviceMemory:
        total = self.capacity[int(uuid.removeprefix("gpu"))]
        return DeviceMemory(self.clock(), INTERVAL_NS, total, total - self.used(uuid), None, 1, 0, None)


@dataclass
class Rig:
    """A broker in a thread that does nothing between two calls of `tick`, but register leases."""

    path: Path
    room: Sequence[int]  # of each device, bytes that can be leased
    clock: Clock = field(default_factory=Clock)
    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices = Devices(self.clock, [one + HEADROOM + BAND for one in self.room], self._used)
        table = LeaseTable(self.devices, lambda info, capacity: Rules(HEADROOM, BAND), clock=self.clock)
        self.broker = Broker(table, self.path, tick_s=None, pause_s=0, grace_s=0)
        self.thread = BrokerThread(self.broker)
        self.thread.start()

    def seconds(self) -> float:
        return self.clock() / 1e9

    def _used(self, uuid: str) -> int:
        return sum(lease.held_bytes for lease in self.leases if lease.device_uuid == uuid and not lease.closed)

    def lease(self, name: str, device: int, min_bytes: int, max_bytes: int | None = None, held_bytes: int = BASE) -> Lease:
        lease = Lease.register(
            self.path, name=name, device_uuid=f"gpu{device}", min_bytes=min_bytes, max_bytes=max_bytes, granule_bytes=EXTENT,
            held_bytes=held_bytes, timeout_s=30, clock=self.seconds,
        )  # fmt: skip
        self.leases.append(lease)
        return lease

    def tick(self, seconds: float = 0.02) -> None:
        """Let time pass, and the broker read all that was sent, decide, and send."""
        self.clock.advance(seconds)
        assert self.thread._loop is not None
        asyncio.run_coroutine_threadsafe(self._tick(), self.thread._loop).result(30)

    async def _tick(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)
        self.broker.tick()
        for _ in range(8):
            await asyncio.sleep(0)


@contextlib.contextmanager
def rig(*room: int) -> Iterator[Rig]:
    """A broker of devices of which so many bytes can be leased."""
    with short_folder() as folder:
        made = Rig(folder / "broker", room)
        try:
            yield made
        finally:
            for lease in made.leases:
                lease.close()
            made.thread.close()


class ShardedUser:
    """An engine with a shard on each of `devices`: it asks for what it wants, maps what it gets, and serves recalls."""

    def __init__(self, of: Rig, leases: Sequence[Lease], seed: int = 0, base: int = BASE) -> None:
        self.rig, self.wanted, self.base = of, 1, base
        of.tick()
        for lease in leases:
            lease.poll()
        self.lease = ShardedLease(leases, EXTENT, clock=of.seconds, chance=random.Random(seed).random)
        self.arena = ShardedArena(64, EXTENT, leases, [0], len(leases))
        self.asked_at = -1.0
        self.events: list[Event] = []
        self.report()

    @property
    def size(self) -> int:
        """Extents with memory on all shards."""
        return len(self.arena.mapped_extents)

    def allows(self, total_bytes: int) -> int:
        return max(1, (total_bytes - self.base) // EXTENT)

    def report(self) -> None:
        held = self.arena.held
        self.lease.report({"other": self.base, "kv": held.upper_bytes}, 0, moving_bytes=held.upper_bytes - held.lower_bytes)

    def resize(self, extents: int) -> None:
        """Map or unmap on all shards."""
        mapped = sorted(self.arena.mapped_extents)
        come = [extent for extent in range(64) if extent not in mapped][: max(0, extents - len(mapped))]
        resize = Resize(np.array(come, np.int64), np.array(mapped[extents:], np.int64))
        assert self.arena.expect(resize) is None
        done = ResizeOutcome(tuple(come), tuple(mapped[extents:]))
        self.arena.settle(resize, [done] * len(self.lease.leases))
        self.report()

    def step(self) -> None:
        """What an engine does between two steps."""
        lease = self.lease
        self.events += lease.poll()
        if (recall := lease.recall) is not None:
            self.resize(min(self.size, self.allows(recall.target_bytes)))
            if lease.held_bytes <= recall.target_bytes:
                lease.answer_unmapped(recall.target_bytes)
            return
        if (more := min(self.wanted, self.allows(lease.granted_bytes))) > self.size:
            self.resize(more)
        if self.wanted <= self.size and lease.granted_bytes > max(lease.held_bytes, lease.min_bytes):
            lease.answer_unmapped(lease.held_bytes)
        if self.wanted > self.size and self.rig.seconds() >= self.asked_at + ASK_S:
            self.asked_at = self.rig.seconds()
            lease.ask(self.base + self.wanted * EXTENT, waiting_s=10.0)

    def rest(self) -> None:
        """Want and hold no more than the minimum."""
        self.wanted = 1
        self.resize(1)
