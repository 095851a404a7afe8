"""Engines over the same two devices that each have the memory the others lack: none of them waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from shard_leases import BASE, EXTENT, Rig, ShardedUser, rig

TICKS = 500  # ten seconds: a few turns of every engine

# The order in which the leases of engines 0, 1, ... on the two devices are registered: a broker serves the older one first.
IN_ORDER = [(0, 0), (0, 1), (1, 0), (1, 1)]
CROSSWISE = [(0, 0), (1, 1), (0, 1), (1, 0)]
THREE_IN_ORDER = [*IN_ORDER, (2, 0), (2, 1)]
THREE_CROSSWISE = [(0, 0), (1, 1), (2, 1), (2, 0), (0, 1), (1, 0)]


def engines(of: Rig, order: Sequence[tuple[int, int]], seed: int) -> list[ShardedUser]:
    """Engines that all want one more extent. The first has it on device 0, and the second on device 1."""
    leases = {(i, device): of.lease(f"e{i}.{device}", device, BASE + EXTENT) for i, device in order}
    made = [
        ShardedUser(of, [leases[i, 0], leases[i, 1]], seed=100 * seed + i) for i in range(1 + max(i for i, _ in order))
    ]
    for rank in (0, 1):
        leases[rank, rank].ask(BASE + 2 * EXTENT, expires_s=60)
    for _ in range(150):  # the cool-down: the broker has just heard what they hold
        of.tick()
    for (i, device), lease in leases.items():
        lease.poll()
        assert lease.granted_bytes == BASE + (2 if i == device else 1) * EXTENT
        lease.ask(BASE + EXTENT)
    for engine in made:
        engine.wanted = 2
    return made


def run(of: Rig, made: Sequence[ShardedUser], rng: random.Random) -> ShardedUser:
    """Run all until one of the engines has what it wants: that engine."""
    for _ in range(TICKS):
        for engine in rng.sample(made, len(made)):
            engine.step()
        for device in (0, 1):
            assert of._used(f"gpu{device}") <= of.room[device]
        if winners := [engine for engine in made if engine.size == 2]:
            assert len(winners) == 1
            return winners[0]
        of.tick()
    raise AssertionError(f"{[[lease.granted_bytes for lease in engine.lease.leases] for engine in made]} are granted")


@pytest.mark.parametrize("order", [IN_ORDER, CROSSWISE, THREE_IN_ORDER, THREE_CROSSWISE])
@pytest.mark.parametrize("seed", range(6))
def test_each_gets_all_it_asks_for_in_its_turn(order: list[tuple[int, int]], seed: int) -> None:
    rng, num = random.Random(seed), len(order) // 2
    with rig(*[num * (BASE + EXTENT) + EXTENT] * 2) as of:
        made = engines(of, order, seed)
        for left in range(num, 0, -1):
            assert sum(engine.wanted for engine in made) == num + left
            run(of, made, rng).rest()


def test_they_would_wait_for_ever_if_none_gave_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.shards.sharded_lease.ShardedLease._return_surplus", lambda self: None)
    with rig(*[2 * (BASE + EXTENT) + EXTENT] * 2) as of, pytest.raises(AssertionError, match="are granted"):
        run(of, engines(of, CROSSWISE, 0), random.Random(0))
