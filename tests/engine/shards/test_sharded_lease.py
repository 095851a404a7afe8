"""The leases of several shards as one: against brokers of several devices, whose time passes when a test says so."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_lease import ScriptedLease
from shard_leases import BASE, EXTENT, Rig, ShardedUser, rig

from pagetide.allocator.errors import LeaseClosed, MinimumsExceedCapacity
from pagetide.allocator.lease_events import Denied, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn
from pagetide.allocator.sharded_lease import FIRST_PAUSE_S, LAST_PAUSE_S, SURPLUS_S, ShardedLease
from pagetide.engine.errors import NotEnoughMemory
from pagetide.engine.memory import lease_holder
from pagetide.engine.memory.lease_holder import acquire_leases
from pagetide.monitor.errors import MonitorError

LEAST = BASE + EXTENT  # the minimum of a shard


class Time:
    """Seconds and chances that a test sets."""

    def __init__(self) -> None:
        self.now, self.random = 100.0, 0.5

    def clock(self) -> float:
        return self.now

    def chance(self) -> float:
        return self.random


def scripted(*granted: int, extra: int = 0) -> tuple[ShardedLease, list[Any], Time]:
    """Leases without a broker that have so many bytes granted, as one; `extra` is the driver's, in the first."""
    time = Time()
    leases: list[Any] = [ScriptedLease(one, LEAST, BASE) for one in granted]
    for i, lease in enumerate(leases):
        lease.name, lease.device_uuid, lease.closed = f"e.{i}", f"gpu{i}", False
    return ShardedLease(leases, EXTENT, lambda: extra, clock=time.clock, chance=time.chance), leases, time


def test_together_they_allow_what_the_scarcest_does() -> None:
    lease, (first, second), _ = scripted(400, 300)
    assert (lease.name, lease.device_uuid, lease.granted_bytes, lease.held_bytes) == ("e.0", "gpu0", 300, BASE)
    assert (lease.min_bytes, lease.max_bytes, lease.recall, lease.connected) == (LEAST, None, None, True)
    first.max_bytes = 900
    assert lease.max_bytes == 900
    second.max_bytes, second.min_bytes, first.held_bytes = 800, LEAST + 5, BASE + 7
    assert (lease.max_bytes, lease.min_bytes, lease.held_bytes) == (800, LEAST + 5, BASE + 7)
    second.connected = False
    assert not lease.connected
    first.recall_to(250)
    assert lease.recall is not None and lease.recall.target_bytes == 250
    second.recall_to(220)
    assert lease.recall.target_bytes == 220


def test_the_drivers_memory_counts_in_the_first_lease() -> None:
    lease, (first, second), _ = scripted(400, 300, extra=150)
    assert lease.granted_bytes == 250
    lease.report({"weights": 60, "other": 40, "kv": 50}, 10)
    assert first.reports == [({"weights": 60, "other": 190, "kv": 50}, 10)]
    assert second.reports == [({"weights": 60, "other": 40, "kv": 50}, 10)]
    assert (first.held_bytes, second.held_bytes, lease.held_bytes) == (300, 150, 150)
    lease.ask(270)
    assert (first.asked, second.asked) == ([420], [270])
    first.recall_to(320)
    assert lease.recall == Recalled(170, 1.0) and lease.poll() == (Recalled(170, 1.0),)
    lease.answer_unmapped(170)
    assert (first.answered, second.answered, lease.recall) == ([320], [170], None)
    first.min_bytes, second.min_bytes = 500, 120
    lease.lower_min(200)
    assert (first.min_bytes, second.min_bytes) == (350, 120), "a minimum never rises"
    first.limit(450)
    assert lease.max_bytes == 300 and lease.poll() == (Limited(300),)


def test_a_recall_is_answered_by_the_shards_that_it_concerns() -> None:
    """What a shard still has to unmap stays granted. Of two on one device, the other one's ask may be what is recalled for."""
    lease, (first, second), _ = scripted(400, 400)
    first.held_bytes = 250
    lease.answer_unmapped(180)
    assert (first.answered, second.answered) == ([250], [180])
    lease, (first, second), _ = scripted(500, 200)
    first.recall_to(350)
    lease.answer_unmapped(350)
    assert (first.answered, second.answered) == ([350], [])
    second.recall_to(350)
    lease.answer_unmapped(350)
    assert (first.answered, second.answered) == ([350], [350])


def test_what_a_refused_mapping_was_granted_for_goes_back_once_all_hold_the_same() -> None:
    lease, leases, _ = scripted(400, 400)
    lease.return_unused()
    lease.report({"other": 100, "kv": 200}, 0, moving_bytes=50)
    assert [one.answered for one in leases] == [[], []]
    lease.report({"other": 100, "kv": 150}, 0)
    lease.report({"other": 100, "kv": 150}, 0)
    assert [one.answered for one in leases] == [[250], [250]] and lease.granted_bytes == 250
    lease.ask(300)
    assert [one.asked for one in leases] == [[], []], "other engines ask first"


def test_the_events_of_all_are_those_of_one_lease() -> None:
    lease, (first, second), _ = scripted(400, 400)
    first.grant(450)
    assert lease.poll() == (Granted(400),), "with what is granted by all"
    second.grant(500)
    first.grant(480)
    assert lease.poll() == (Granted(480),) and lease.poll() == ()
    second.recall_to(300)
    assert lease.poll() == (Recalled(300, 1.0),)
    first.recall_to(350)
    assert lease.poll() == (), "the pool shrinks further already"
    second.withdraw()
    assert lease.poll() == (), "the other one is still there"
    first.withdraw()
    assert lease.poll() == (Withdrawn(),)
    second.deny()
    assert [type(event) for event in lease.poll()] == [Denied]


def test_the_loss_of_several_brokers_is_one_and_so_is_their_return() -> None:
    lease, (first, second), _ = scripted(400, 300)
    second.lose()
    assert lease.poll() == (Lost("it was killed"),) and lease.granted_bytes == BASE
    first.lose()
    assert lease.poll() == ()
    second.rejoin()
    assert lease.poll() == ()
    first.rejoin()
    assert lease.poll() == (Rejoined(BASE),)
    second._events.append(Lost("no room for it", refused=True))
    assert lease.poll() == (Lost("no room for it", refused=True),)


def test_what_one_device_grants_beyond_the_others_goes_back_after_a_moment() -> None:
    lease, (first, second), time = scripted(400, 300)
    lease.ask(400)
    assert first.asked == second.asked == [400]
    lease.poll()
    time.now += 0.99 * SURPLUS_S
    lease.poll()
    assert (first.answered, second.answered) == ([], [])
    time.now += 0.02 * SURPLUS_S
    lease.poll()
    assert (first.answered, second.answered) == ([300], [300]), "which withdraws the ask on all devices"
    assert first.granted_bytes == lease.granted_bytes == 300
    time.now += 0.49 * FIRST_PAUSE_S
    lease.ask(400)
    assert len(first.asked) == 1
    lease.ask(BASE)
    assert first.asked[1:] == [BASE], "an ask for what is held takes nothing from other engines"
    time.now += 0.02 * FIRST_PAUSE_S
    lease.ask(400)
    assert first.asked[2:] == [400] == second.asked[2:]


def test_a_surplus_that_the_others_follow_in_time_stays() -> None:
    lease, (first, second), time = scripted(400, 300)
    for granted in (350, 400, 400):
        lease.poll()
        time.now += 0.9 * SURPLUS_S
        second.grant(granted)
        if granted == 350:
            first.held_bytes = 350  # in use, and so no surplus
    lease.poll()
    assert (first.answered, second.answered) == ([], [])
    lease, (first, second), time = scripted(300 + EXTENT - 1, 300)  # nor are less than an extent and a minimum one
    for minimum in (first.min_bytes, 500):
        first.min_bytes = minimum
        first.granted_bytes = max(first.granted_bytes, minimum)
        for _ in range(9):
            lease.poll()
            time.now += SURPLUS_S
    assert (first.answered, second.answered) == ([], [])


def test_asking_in_vain_becomes_rare_until_all_grant_more() -> None:
    lease, (first, second), time = scripted(300, 300)
    time.random = 1.0

    def pause() -> float:
        """Seconds from a surplus that goes back to the next ask that is passed on."""
        first.grant(400)
        lease.poll()
        time.now += 1.51 * SURPLUS_S
        lease.poll()
        assert first.granted_bytes == 300
        began, asked = time.now, len(first.asked)
        while len(first.asked) == asked:
            time.now += 0.01
            lease.ask(400)
        return time.now - began

    pauses = [pause() for _ in range(6)]
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**i, LAST_PAUSE_S) for i in range(6)], abs=0.02)
    first.grant(350)
    second.grant(350)
    lease.poll()
    first.granted_bytes = second.granted_bytes = 300
    assert pause() == pytest.approx(FIRST_PAUSE_S, abs=0.02)


@pytest.fixture
def two() -> Iterator[Rig]:
    """Two devices with room for ten extents besides what a shard holds."""
    with rig(BASE + 10 * EXTENT, BASE + 10 * EXTENT) as made:
        yield made


def user_of(of: Rig, name: str = "a", devices: tuple[int, ...] = (0, 1)) -> ShardedUser:
    return ShardedUser(of, [of.lease(f"{name}.{rank}", device, LEAST) for rank, device in enumerate(devices)])


def run(of: Rig, *users: ShardedUser, ticks: int = 10) -> None:
    for _ in range(ticks):
        for user in users:
            user.step()
        of.tick()


def test_shards_on_one_device_share_its_room(two: Rig) -> None:
    half = BASE // 2
    user = ShardedUser(two, [two.lease(f"a.{rank}", 1, half + EXTENT, held_bytes=half) for rank in range(2)], base=half)
    user.wanted = 9
    run(two, user)
    assert user.size == 5 and [lease.granted_bytes for lease in user.lease.leases] == [half + 5 * EXTENT] * 2


def test_another_engine_on_one_device_takes_its_share_of_all(two: Rig) -> None:
    user = user_of(two)
    user.wanted = 9
    run(two, user)
    assert (user.size, user.lease.held_bytes, user.lease.granted_bytes) == (9, BASE + 9 * EXTENT, BASE + 9 * EXTENT)
    other = ShardedUser(two, [two.lease("b", 1, EXTENT, held_bytes=0)], base=0)
    other.wanted = 4
    run(two, user, other, ticks=550)  # until it has waited for long
    assert (user.size, other.size) == (6, 4)
    assert user.lease.leases[1].granted_bytes == BASE + 6 * EXTENT
    assert {type(event) for event in user.events if not isinstance(event, Granted)} == {Recalled}


TICKS = 500  # ten seconds: a few turns of every engine

# The order in which the leases of engines 0, 1, ... on the two devices are registered: a broker serves the older one first.
IN_ORDER = [(0, 0), (0, 1), (1, 0), (1, 1)]
CROSSWISE = [(0, 0), (1, 1), (0, 1), (1, 0)]
THREE_IN_ORDER = [*IN_ORDER, (2, 0), (2, 1)]
THREE_CROSSWISE = [(0, 0), (1, 1), (2, 1), (2, 0), (0, 1), (1, 0)]


def engines(of: Rig, order: Sequence[tuple[int, int]], seed: int) -> list[ShardedUser]:
    """Engines that all want one more extent. The first has it on device 0, and the second on device 1."""
    leases = {(i, device): of.lease(f"e{i}.{device}", device, BASE + EXTENT) for i, device in order}
    made = [ShardedUser(of, [leases[i, 0], leases[i, 1]], seed=100 * seed + i) for i in range(1 + max(i for i, _ in order))]
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


def run_until_one_has_it(of: Rig, made: Sequence[ShardedUser], rng: random.Random) -> ShardedUser:
    """That engine. None of several with the memory that the others lack waits for ever."""
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
@pytest.mark.parametrize("seed", range(2))
def test_each_gets_all_it_asks_for_in_its_turn(order: list[tuple[int, int]], seed: int) -> None:
    rng, num = random.Random(seed), len(order) // 2
    with rig(*[num * (BASE + EXTENT) + EXTENT] * 2) as of:
        made = engines(of, order, seed)
        for left in range(num, 0, -1):
            assert sum(engine.wanted for engine in made) == num + left
            run_until_one_has_it(of, made, rng).rest()


def test_a_waiting_thread_gets_events_and_the_end(two: Rig) -> None:
    user, found = user_of(two), list[Any]()

    def wait() -> None:
        try:
            while True:
                found.append(user.lease.wait(60))
        except LeaseClosed as error:
            found.append(str(error))

    assert user.lease.wait(0) == ()
    thread = threading.Thread(target=wait)
    thread.start()
    user.lease.ask(BASE + 3 * EXTENT, expires_s=60)
    two.tick()
    while user.lease.granted_bytes < BASE + 3 * EXTENT:
        two.tick(0)
    user.lease.close()
    thread.join(30)
    assert found[-2:] == [(Granted(BASE + 3 * EXTENT),), "the leases of 'a.0' have ended; make a new engine"]
    user.lease.close()
    for call in (user.lease.poll, lambda: user.lease.wait(1)):
        with pytest.raises(LeaseClosed):
            call()
    two.tick()
    assert two.broker.leases() == ()


def plan_of(**more: int) -> Any:
    """A plan whose shards hold nothing but 40 bytes of weights, 60 to work with, and 1 to 4 extents."""
    numbers = {"reserve_bytes": 50, "loading_bytes": 60, "weights_bytes": 40, "primitives_bytes": 0, "free_bytes": 0}
    pool = {"min_kv_bytes": EXTENT, "kv_bytes": 4 * EXTENT}
    geometry = SimpleNamespace(extent_bytes=EXTENT)
    return SimpleNamespace(model="/models/m", device="some", geometry=geometry, **numbers | pool | more)


@pytest.fixture
def watched(two: Rig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `watch` returns: the monitor of `two`, whose device 0 is also the host's memory."""
    made = SimpleNamespace(directory=SimpleNamespace(socket=two.path), closed=0)
    made.close = lambda: setattr(made, "closed", made.closed + 1)
    monkeypatch.setattr(lease_holder, "watch", lambda: made)
    infos = two.devices.devices()
    monkeypatch.setattr(lease_holder, "device_info", lambda watched, device: infos[device.index or 0])
    monkeypatch.setattr(lease_holder, "HEAP_BYTES", 0)
    monkeypatch.setattr(lease_holder, "LIBRARIES_BYTES", 0)
    return made


def acquired(plan: Any, devices: list[str], held: list[int], driver: int = 0, share: bool = True) -> Any:
    config: Any = SimpleNamespace(share=share, kv_memory=SimpleNamespace(weight=2.0, priority=3))
    return acquire_leases(config, plan, devices, held, lambda: driver)


def test_leases_are_acquired_in_the_order_of_devices_and_returned_in_that_of_shards(two: Rig, watched: Any) -> None:
    sharing = acquired(plan_of(), ["cuda:1", "cuda:0"], [10, 20], driver=1000)
    first, second = sharing.lease.leases
    assert [one.name for one in two.broker.leases()] == [second.name, first.name]
    assert (first.name[-2:], first.device_uuid, second.name[-2:], second.device_uuid) == (".0", "gpu1", ".1", "gpu0")
    assert (first.held_bytes, first.min_bytes, first.granted_bytes, first.max_bytes) == (10, 160, 160, 310)
    assert (second.held_bytes, second.min_bytes, second.granted_bytes, second.max_bytes) == (20, 170, 170, 320)
    assert [(one.weight, one.priority) for one in two.broker.leases()] == [(2.0, 3)] * 2
    sharing.close()
    sharing.close()
    two.tick()
    assert two.broker.leases() == () and watched.closed
    sharing = acquired(plan_of(), ["cpu", "cpu"], [10, 20], driver=100)  # the first lease covers the driver
    assert [(lease.device_uuid, lease.min_bytes) for lease in sharing.lease.leases] == [("gpu0", 260), ("gpu0", 170)]
    assert (sharing.lease.granted_bytes, sharing.lease.held_bytes, sharing.lease.max_bytes) == (160, 20, 310)
    sharing.close()


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"]])
def test_all_are_acquired_or_none(devices: list[str], two: Rig, watched: Any) -> None:
    other = two.lease("other", 1, 300)
    other.report({"kv": 1}, 0)
    with pytest.raises(NotEnoughMemory, match=r"a shard of /models/m .* on some.* the broker says: a min of") as raised:
        acquired(plan_of(min_kv_bytes=301, kv_bytes=301), devices, [0, 0])
    assert isinstance(raised.value.__cause__, MinimumsExceedCapacity) and watched.closed
    two.tick()
    assert [one.name for one in two.broker.leases()] == ["other"]


def test_a_minimum_that_is_not_granted_in_time_ends_all(two: Rig, watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.memory.lease_holder.GRANT_TIMEOUT_S", 0.0)
    two.devices.used = lambda uuid: 550 if uuid == "gpu1" else 0
    with pytest.raises(NotEnoughMemory, match="other processes hold the rest"):
        acquired(plan_of(), ["cuda:0", "cuda:1"], [0, 0])
    two.tick()
    assert [one for one in two.broker.leases() if one.state == "ok"] == [] and watched.closed


def test_without_a_broker_or_the_wish_nothing_is_shared(
    two: Rig, watched: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert acquired(plan_of(), ["cuda:0", "cuda:1"], [0, 0], share=False) is None
    assert (watched.closed, caplog.records) == (0, [])
    watched.directory.socket = Path("/nowhere/at/all")
    with caplog.at_level(logging.WARNING):
        assert acquired(plan_of(), ["cuda:0", "cuda:1"], [0, 0]) is None
        assert watched.closed == 1

        def fail() -> Any:
            raise MonitorError("no monitor")

        monkeypatch.setattr(lease_holder, "watch", fail)
        assert acquired(plan_of(), ["cuda:0", "cuda:1"], [0, 0]) is None
    assert len(caplog.records) == 2 and "memory is not shared with other engines: no monitor" in caplog.text
