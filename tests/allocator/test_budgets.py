"""Limits of a device's memory that change while engines hold it: a directory stands for /sys/fs/cgroup."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from broker_rig import Bench, on_a_bench
from kernel_files import fake, v2, write

from pagetide.allocator import wire
from pagetide.allocator.lease_policy import Rules
from pagetide.monitor.snapshot import DeviceInfo, DeviceMemory
from pagetide.monitor.sources.host import HostSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
KIB = 1024


@dataclass
class CgroupNumbers:
    """Readings of the host's memory, as it is at each look."""

    source: HostSource
    bench: Bench

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.source.scan()

    def memory(self, uuid: str) -> DeviceMemory:
        read = self.source.memory(self.devices()[0])
        return DeviceMemory(self.bench.clock(), 20_000_000, read.total_bytes, read.free_bytes, None, 1, 0, None)


class Machine:
    """1000 KiB of memory, of which nothing is used; engines in the cgroup /pod/engine."""

    def __init__(self, folder: Path, bench: Bench) -> None:
        self.proc, self.cgroups = fake(folder, "0::/pod/engine\n", 1000)
        for path in (".", "pod", "pod/engine"):
            self.limit(path, "max")
        self.source = HostSource(proc=self.proc, cgroups=self.cgroups, machine_id="m", clock=itertools.count(0, 10**9).__next__)
        self.uuid = self.source.scan()[0].uuid
        table = bench.broker._table
        table._readings, table._rules = CgroupNumbers(self.source, bench), lambda info, capacity: Rules.of(capacity)

    def limit(self, path: str, limit: str, high: str = "max") -> None:
        v2(self.cgroups / path, limit, 0)
        write(self.cgroups / path, memory__high=f"{high}\n")


@on_a_bench()
async def test_a_limit_that_changes_is_followed_at_every_ancestor(bench: Bench, tmp_path: Path) -> None:
    machine = Machine(tmp_path, bench)
    engine = await bench.engine("a", 100 * KIB, device_uuid=machine.uuid, granule_bytes=KIB)
    (grant,) = await engine.say(wire.AskMessage(2000 * KIB, 10**7))
    assert isinstance(grant, wire.GrantMessage)
    granted = grant.granted_bytes
    for path, limits, total in (
        ("pod/engine", ("524288", "max"), 512),
        ("pod", ("max", "409600"), 400),  # memory.high alone, of an ancestor
        (".", ("307200", "max"), 300),
        ("pod/engine", ("262144", "102400"), 100),
    ):
        machine.limit(path, *limits)
        orders: list[wire.Message] = []
        while not orders:
            await bench.tick()
            orders = await engine.hear()
        (recall,) = orders
        rules = Rules.of(total * KIB)
        least = max(100 * KIB, total * KIB - rules.headroom_bytes - rules.band_bytes)
        assert isinstance(recall, wire.RecallMessage) and least - KIB < recall.target_bytes <= max(least, 100 * KIB), path
        await engine.say(wire.UnmappedMessage(recall.target_bytes, recall.generation))
        granted = recall.target_bytes
    (device,) = bench.broker.devices()
    assert (device.capacity_bytes, device.headroom_bytes, granted) == (100 * KIB, 100 * KIB // 16, 100 * KIB), (
        "the minimum stays"
    )
    for path in (".", "pod", "pod/engine"):
        machine.limit(path, "max")
    await bench.tick(3)
    await engine.say(wire.AskMessage(2000 * KIB, 10**7))
    assert bench.broker.leases()[0].granted_bytes == grant.granted_bytes


@on_a_bench()
async def test_a_reservation_waits_until_a_limit_leaves_room_for_it(bench: Bench, tmp_path: Path) -> None:
    machine = Machine(tmp_path, bench)
    person = bench.client()
    machine.limit("pod", "524288")
    await person.refused(wire.ReserveMessage(machine.uuid, 900 * KIB), "Ask for 480.00 KiB or less")
    (held,) = await person.say(wire.ReserveMessage(machine.uuid, 300 * KIB))
    assert isinstance(held, wire.ReservedMessage)
    other = bench.client()
    assert await other.say(wire.ReserveMessage(machine.uuid, 300 * KIB)) == []
    machine.limit("pod", "max")
    await bench.tick()
    (held,) = await other.hear()
    assert isinstance(held, wire.ReservedMessage)
