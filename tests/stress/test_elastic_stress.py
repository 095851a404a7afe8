"""Engines, a broker and external processes on one device, for minutes: none loses, whatever is killed, stopped or cut.

The scenes are those of `pagetide stress` (pagetide/scene.py); the engines have no model, and tokens that depend on what lies in
the blocks. PAGETIDE_STRESS_SECONDS (default 120) is how long the first scene lasts, the others last shares of that.
PAGETIDE_SEEDS names the seed, and whatever it is it is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
from broker_rig import resident_within
from device_users import DeviceUser, Light, device_users
from monitors import wait_until

from pagetide.monitor.watching import OTHERS_FIRST_S, watch
from pagetide.pressure import ExternalProcess, PrivateDevice
from pagetide.scene import RECALL_S, LeaseWatch, Scene, Swing
from pagetide.stress import under_pressure

pytestmark = pytest.mark.stress
SECONDS = float(os.environ.get("PAGETIDE_STRESS_SECONDS", "120"))
SEED = int(os.environ.get("PAGETIDE_SEEDS", "").split(",")[0] or random.randrange(2**32))
GIB = 1 << 30


@pytest.fixture(autouse=True)
def the_seed_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():  # though the test passes
        print(f"\nseed {SEED}", flush=True)


class LightScene(Scene):
    """A scene of light engines."""

    def __init__(self, device: PrivateDevice, externals: list[ExternalProcess], start: Callable[..., DeviceUser]) -> None:
        super().__init__(device, externals, SEED)
        self.capacity, self.swings = device.capacity_bytes, Swing(device.headroom_bytes)
        self.users: dict[str, tuple[DeviceUser, dict[str, Any]]] = {}
        self.watcher = LeaseWatch(self)
        self._start = start
        with watch(runtime_dir=device.socket.parent) as watched:
            self.uuid = watched.devices()[0].uuid

    def add(self, name: str, **more: Any) -> None:
        options = {"kv_max": self.capacity, "token_bytes": 32768, "idle_s": self.rng.choice([0.5, 3.0, 60.0])} | more
        directory = str(self.device.socket.parent)
        user = Light(directory, self.uuid, name, self.rng.randrange(2**32), **options).start(self._start)
        self.users[name] = user, user.read()
        self.engines[user.pid] = name

    def swing_to(self, until: float, share: float = 0.8) -> None:
        """Up to `share` of the device."""
        self.swing(until, 0, int(self.capacity * share), self.swings)

    def drain(self) -> dict[str, Any]:
        """Let every request end. Returns what became of them by engine."""
        for user, _ in self.users.values():
            user.write("quiet")
        ends = {}
        for name, (user, _) in self.users.items():
            wait_until(lambda t=user: not busy(t.tell("state")), f"the end of {name}'s requests", 600)
            ends[name] = user.tell("state")
        return ends


def busy(state: dict[str, Any]) -> bool:
    """Whether requests are left."""
    return bool(state["running"] or state["waiting"])


@contextmanager
def scene(capacity: int, num_externals: int = 1) -> Iterator[LightScene]:
    if psutil.virtual_memory().available < capacity * 1.25:
        pytest.skip(f"a test device of {capacity >> 30} GiB needs as much real memory")
    with ExitStack() as stack:
        externals = [stack.enter_context(ExternalProcess()) for _ in range(num_externals)]
        device = stack.enter_context(PrivateDevice(capacity, capacity // 16, *externals))
        yield LightScene(device, externals, stack.enter_context(device_users()))


def check(made: LightScene, ends: dict[str, Any]) -> None:
    """None lost."""
    watcher = made.watcher
    for name, end in ends.items():
        grown = end["memory"]["grown_bytes"]
        print(
            f"{name}: {end['finished']} requests, {end['tokens']} tokens, {end['preemptions']} preemptions, "
            f"{end['memory']['recalls']} recalls, {grown >> 20} MiB grown, {end['hit_tokens']} tokens found cached"
        )
        assert end["failed"] == 0, end["first_failure"]
        assert end["finished"] == end["requests"] > 0, end
    print(
        f"{made.pieces} pieces outside, up to {made.most_bytes >> 20} MiB; {watcher.looks} looks, "
        f"{watcher.worst >> 10} KiB above a grant at most, {len(watcher.recalls)} recalls seen, "
        f"{len(watcher.overdue)} overdue, the oldest {watcher.oldest_ms} ms old"
    )
    assert made.faults == [], made.faults[:5]
    assert watcher.recalls, "none was recalled"
    assert any(end["hit_tokens"] for end in ends.values()), "nothing was found in a cache"


def check_nothing_stays(made: LightScene) -> None:
    """Every engine's arena has no byte, and no lease is left."""
    for user, info in made.users.values():
        assert user.tell("end")["mapped"] == 0
        assert resident_within(user.pid, info["start"], info["length"]) == 0
    for user, _ in made.users.values():
        assert user.process.stdin is not None
        user.process.stdin.close()
        assert user.process.wait(60) == 0
    wait_until(lambda: made.device.leases() == (), "the end of the leases")
    assert "Traceback" not in made.device.said, made.device.said


def play(made: LightScene, act: Callable[[float], None], seconds: float) -> None:
    with made.watcher:
        for user, _ in made.users.values():
            user.write("bursts")
        act(time.monotonic() + seconds)
        ends = made.drain()
    check(made, ends)
    check_nothing_stays(made)


def test_nobody_loses() -> None:
    """Two engines; a third and a fourth come while the others work."""
    with scene(5 * GIB // 2) as made:

        def arrive() -> None:
            made.add(f"e{len(made.users)}", weight=made.rng.choice([0.5, 1, 3]))
            minimums = sum(info["min"] for _, info in made.users.values())
            assert minimums <= 0.15 * made.capacity, minimums

        def act(until: float) -> None:
            made.swing_to(until - SECONDS * 2 / 3)
            for more in (1 / 3, 0):
                made.let_go()  # beside external processes at 80 % there is no room for another minimum
                time.sleep(RECALL_S)
                arrive()
                made.users[f"e{len(made.users) - 1}"][0].write("bursts")
                time.sleep(RECALL_S)  # until it has a lease it is an external process too
                made.swing_to(until - SECONDS * more)

        arrive()
        arrive()
        play(made, act, SECONDS)


@pytest.mark.parametrize("kills", [False, True], ids=["", "kills"])
def test_nobody_loses_with_a_real_model(kills: bool) -> None:
    report = asyncio.run(under_pressure(lambda state: None, seconds=max(20.0, SECONDS / 6), seed=SEED, kills=kills))
    print("\n".join(report.lines()))
    assert report.has_passed and report.requests >= 12 and report.pieces and report.recall_s and bool(report.kills) == kills


def test_nobody_loses_whatever_is_killed_stopped_or_cut() -> None:
    """Every engine is refused one map in twenty; a killed engine's own requests are lost with it, and no others."""
    with scene(2 * GIB, num_externals=3) as made:
        for i in range(3):
            made.add(f"e{i}", refused_maps=0.05)

        def act(until: float) -> None:
            began = -time.monotonic()
            faults = [kill_the_daemon, kill_the_daemon_for_long, kill_an_engine, kill_an_external, stop_an_engine, cut_a_socket]
            while True:
                for fault in made.rng.sample(faults, len(faults)):
                    if time.monotonic() > until:
                        return
                    made.swing_to(time.monotonic() + 3 * RECALL_S, share=0.5)
                    print(f"{began + time.monotonic():.1f} s:", fault.__name__)
                    fault(made)

        # as an engine does, whose guard must leave the daemon to its owner
        with watch(runtime_dir=made.device.socket.parent):
            play(made, act, SECONDS / 6)


def lease_of(user: DeviceUser) -> dict[str, Any]:
    """What an engine says of its lease."""
    return user.tell("state")["memory"]["lease"]


def kill_the_daemon(made: LightScene, away_s: float | None = None) -> None:
    """While it is away external processes take nothing: it would not be noticed."""
    away_s = made.rng.random() if away_s is None else away_s
    with made.watcher.killing() as kept:
        made.device.kill_monitor()
        back_at = time.monotonic() + away_s
        for user, info in made.users.values():
            wait_until(lambda t=user: not lease_of(t)["connected"], "an engine to notice")
            kept[info["pid"]] = lease_of(user)["held_bytes"]
    time.sleep(max(0.0, back_at - time.monotonic()))
    made.device.start_monitor()
    for user, _ in made.users.values():
        wait_until(lambda t=user: lease_of(t)["connected"], "an engine to be back")
    time.sleep(2 + RECALL_S)  # the grace in which none is recalled


def kill_the_daemon_for_long(made: LightScene) -> None:
    """For longer than engines wait before they start a monitor in the place of one of their own."""
    kill_the_daemon(made, away_s=OTHERS_FIRST_S + 1 + 2 * made.rng.random())


def kill_an_engine(made: LightScene) -> None:
    name = made.rng.choice(sorted(made.users))
    user, _ = made.users.pop(name)
    del made.engines[user.pid]
    user.kill()
    wait_until(lambda: all(view.pid != user.pid for view in made.device.leases()), "the killed engine's bytes")
    made.add(name, refused_maps=0.05)
    made.users[name][0].write("bursts")


def kill_an_external(made: LightScene) -> None:
    if len(made.externals) > 1:
        external = made.externals.pop()
        external.kill()
        external.wait()


def stop_an_engine(made: LightScene) -> None:
    """Past the deadline of a recall, of which external processes are the reason; what it holds cannot be theirs meanwhile."""
    user, _ = made.users[made.rng.choice(sorted(made.users))]
    user.signal(signal.SIGSTOP)
    try:
        for _ in range(4):
            if made.free_bytes() > made.capacity // 4:
                made.take(made.externals[0], made.swings.piece_bytes)
            time.sleep(RECALL_S)
    finally:
        user.signal(signal.SIGCONT)
    time.sleep(RECALL_S)


def cut_a_socket(made: LightScene) -> None:
    user, _ = made.users[made.rng.choice(sorted(made.users))]
    user.write("cut")
    wait_until(lambda: lease_of(user)["connected"], "the engine to be back")
