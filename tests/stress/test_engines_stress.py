"""Two plain engines that nobody prepared anything for, again and again.

PAGETIDE_STRESS_ROUNDS (default 40) is how often, in parts; PAGETIDE_SEEDS names the seed, and whatever it is it is printed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import psutil
import pytest
from device_users import DeviceUser, device_users
from monitors import wait_until

from pagetide.allocator.broker_client import BrokerClient
from pagetide.monitor.record import RecordReader

pytestmark = pytest.mark.stress
ROUNDS = int(os.environ.get("PAGETIDE_STRESS_ROUNDS", "40"))
PARTS = 4  # one test for all rounds may take longer than a test may
SEED = int(os.environ.get("PAGETIDE_SEEDS", "").split(",")[0] or random.randrange(2**32))


@pytest.mark.parametrize("part", range(PARTS))
def test_two_plain_engines_without_a_daemon(part: int, tmp_path: Path) -> None:
    """They start at once, in two processes: one broker, and all requests finish."""
    seed = SEED + part
    print("seed", seed)
    with device_users() as start:
        both = [start("llm", {"seed": seed, "prompts": 2, "new": 16, "waits": True}) for _ in range(2)]
        for user in both:
            user.read()
        for i in range(-(-ROUNDS // PARTS)):
            play_a_round(both, tmp_path / f"run{i}")
        for user in both:
            assert user.process.stdin is not None
            user.process.stdin.close()
            assert user.process.wait(60) == 0


def play_a_round(both: list[DeviceUser], directory: Path) -> None:
    """Two processes with an engine each come, do some work, and go."""
    for user in both:
        user.write(f"start {directory}")
    infos = [user.read() for user in both]
    pids = {info["pid"] for info in infos}
    assert {view.pid for view in BrokerClient(directory / "broker.sock").leases()} == pids
    assert len(pids) == 2 and not pids & {user.pid for user in both}, "not processes of their own"
    assert all(info["lease"]["connected"] for info in infos), infos
    for user in both:
        user.write("burst")
    for user in both:
        tally = user.read()
        assert tally["finished"] == tally["requests"] > 0 and tally["failed"] == 0, tally
    with RecordReader.open(directory / "record") as reader:
        monitor = psutil.Process(reader.monitor_pid)
    for user in both:
        user.write("end")
    for user in both:
        user.read()
    wait_until(lambda: not monitor.is_running(), "the end of the monitor")
    assert not (directory / "broker.sock").exists()
