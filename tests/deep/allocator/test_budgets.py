"""The limit of a real cgroup changes while an engine in it serves: the engine follows, and no token changes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from cgroups import MemoryCgroup, memory_cgroup
from device_users import MIB, Light, device_users
from monitors import MonitorProcess, wait_until

from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.wire import LeaseView
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux'")


def test_an_engine_follows_the_limit_of_its_cgroup_down_and_up(folder: Path) -> None:
    daemon = MonitorProcess(folder / "run")
    with memory_cgroup(1200 * MIB) as cgroup, device_users() as start:
        with cgroup.inside():
            daemon.start()
        try:
            with RecordReader.open(daemon.record) as reader:
                uuid = reader.devices()[0].uuid
                assert reader.memory(uuid).total_bytes == 1200 * MIB
            light = Light(str(folder / "run"), uuid, "tide", 7, kv_max=800 * MIB, token_bytes=131072, idle_s=600.0, most_new=60)
            with cgroup.inside():
                engine = light.start(start)
            least = engine.read()["min"]
            client = BrokerClient(folder / "run" / "broker.sock", timeout_s=60)

            def lease() -> LeaseView:
                (found,) = client.leases()
                return found

            engine.write("bursts")
            wait_until(lambda: lease().held_bytes > 500 * MIB, "the engine to grow")
            limit = 1200 * MIB
            for target in (800 * MIB, 600 * MIB, 450 * MIB):
                while limit > target:
                    limit = max(target, limit - 20 * MIB)  # less than the headroom: version 1 refuses a limit below the use
                    most = max(least, limit - limit // 16)
                    wait_until(partial(_lower, cgroup, limit), f"a limit of {limit >> 20} MiB to be possible")
                    wait_until(partial(_holds, client, most), f"the engine to follow {limit >> 20} MiB")
                assert cgroup.used_bytes <= limit
            wait_until(lambda: "device host has 450.00 MiB of memory, and had " in daemon.said(), "the last limit to be seen")
            small = lease().held_bytes
            cgroup.limit(1200 * MIB)
            wait_until(lambda: lease().held_bytes > small + 100 * MIB, "the engine to grow again")
            engine.write("quiet")
            wait_until(lambda: not engine.tell("state")["left"], "the requests to end")
            state = engine.tell("state")
            assert state["failed"] == 0 and state["finished"] > 10, state
            assert daemon.said().count("Traceback") == 0
            daemon.end()
        finally:
            daemon.__exit__()


def _lower(cgroup: MemoryCgroup, limit: int) -> bool:
    try:
        cgroup.limit(limit)
    except OSError:
        return False
    return True


def _holds(client: BrokerClient, most: int) -> bool:
    (lease,) = client.leases()
    return lease.held_bytes <= most
