"""Engines, a broker and external processes on one device, for minutes: none loses, whatever is killed, stopped or cut.

PAGETIDE_STRESS_SECONDS (default 120) is how long the first scene lasts, the others last shares of that.
PAGETIDE_SEEDS names the seed, and whatever it is it is printed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from broker_rig import resident_bytes, resident_within
from device_users import MIB, DeviceUser, Light, device_users
from monitors import MonitorProcess, wait_until

from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.errors import LeaseError
from pagetide.monitor.record import RecordReader
from pagetide.monitor.runtime_dir import RuntimeDir
from pagetide.monitor.watching import OTHERS_FIRST_S, watch

pytestmark = pytest.mark.stress
SECONDS = float(os.environ.get("PAGETIDE_STRESS_SECONDS", "120"))
SEED = int(os.environ.get("PAGETIDE_SEEDS", "").split(",")[0] or random.randrange(2**32))
GIB = 1 << 30
RECALL_S = 1.1  # the deadline of a recall, and what it takes to see that memory was taken
TOLERANCE_BYTES = 8 * MIB  # an engine measures itself twice a second: so much may Python's heap have grown meanwhile


@pytest.fixture(autouse=True)
def the_seed_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():  # though the test passes
        print(f"\nseed {SEED}", flush=True)


@dataclass
class Scene:
    """A test device with what is on it. `engines` and `external processes` are those that are alive."""

    directory: Path
    capacity: int
    start: Callable[..., DeviceUser]
    rng: random.Random
    externals: list[DeviceUser] = field(default_factory=list)
    held_mib: dict[int, int] = field(default_factory=dict)  # by external processes
    engines: dict[str, tuple[DeviceUser, dict[str, Any]]] = field(default_factory=dict)
    monitor: MonitorProcess | None = None
    watcher: Watcher | None = None
    allocations: int = 0
    failures: list[str] = field(default_factory=list)  # of external processes
    overdrafts: list[str] = field(default_factory=list)  # where a driver would have refused an engine
    peak: int = 0

    @property
    def headroom_mib(self) -> int:
        """What the broker keeps free for external processes."""
        return self.capacity // 16 >> 20

    @property
    def client(self) -> BrokerClient:
        return BrokerClient(RuntimeDir(self.directory).socket)

    def open(self) -> str:
        """Start the monitor. Returns the device's uuid."""
        members = ",".join(str(external.pid) for external in self.externals)
        self.monitor = MonitorProcess(self.directory, "--capacity", str(self.capacity), "--members", members)
        self.monitor.start()
        with RecordReader.open(self.monitor.record) as reader:
            return reader.devices()[0].uuid

    def add(self, name: str, user: DeviceUser) -> None:
        self.engines[name] = user, user.read()

    def free_bytes(self) -> int:
        """As a driver would know it."""
        pids = [external.pid for external in self.externals] + [user.pid for user, _ in self.engines.values()]
        return self.capacity - sum(resident_bytes(pid) for pid in pids)

    def take(self, external: DeviceUser, mib: int) -> bool:
        """The external process takes a piece, or, where the device has not so much, fails."""
        self.allocations += 1
        if (free := self.free_bytes()) < mib * MIB:
            self.failures.append(f"an external process's {mib} MiB beside {self.held_mib}: {free >> 20} MiB were free")
            return False
        self.hold(external, self.held_mib[external.pid] + mib)
        if (free := self.free_bytes()) < 0:
            self.overdrafts.append(f"the device is {-free >> 20} MiB over after an external process's {mib} MiB")
        self.peak = max(self.peak, sum(self.held_mib.values()))
        return True

    def hold(self, external: DeviceUser, mib: int) -> None:
        external.tell(str(mib))
        self.held_mib[external.pid] = mib

    def swing(self, until: float, share: float = 0.8) -> None:
        """Take memory in pieces of no more than the headroom up to `share` of the device, and give it back, until then."""
        piece = self.headroom_mib
        here = top = int(self.capacity * share) >> 20
        while time.monotonic() < until:
            while (held := sum(self.held_mib.values())) < here and time.monotonic() < until:
                self.take(self.rng.choice(self.externals), min(self.rng.randint(piece // 2, piece), top - held))
                time.sleep(RECALL_S)
            time.sleep(self.rng.random())
            while sum(self.held_mib.values()) > 0 and time.monotonic() < until:
                external = self.rng.choice(self.externals)
                self.hold(external, max(0, self.held_mib[external.pid] - self.rng.randint(piece, 4 * piece)))
                time.sleep(self.rng.random() / 2)
            time.sleep(self.rng.random())
            here = self.rng.randint(top // 2, top)

    def let_go(self) -> None:
        """The external processes give all back."""
        for external in self.externals:
            self.hold(external, 0)

    def drain(self) -> dict[str, Any]:
        """Let every request end. Returns what became of them by engine."""
        for user, _ in self.engines.values():
            user.write("quiet")
        ends = {}
        for name, (user, _) in self.engines.items():
            wait_until(lambda t=user: not busy(t.tell("state")), f"the end of {name}'s requests", 120)
            ends[name] = user.tell("state")
        return ends


def busy(state: dict[str, Any]) -> bool:
    """Whether requests are left; a real engine answers when it has none."""
    return bool(state.get("running") or state.get("waiting"))


@dataclass(frozen=True)
class Look:
    """What an engine held at an instant, and what it was granted as far as the broker had said."""

    at: str
    name: str
    pid: int
    held_bytes: int
    granted_bytes: int


class Watcher:
    """Looks from outside, all the time. `violations` tells what must not be.

    What is granted the broker says. A broker that is killed may have granted more since it was asked last, so what each
    engine holds without one is asked of the engines, once (`killing`).
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.violations: list[str] = []
        self.looks = 0
        self.worst = 0  # bytes held above a grant
        self.recalls: set[tuple[int, int]] = set()
        self.overdue: set[tuple[str, int]] = set()
        self.oldest_ms = 0  # recall that was not served
        self._granted: dict[int, int] = {}
        self._promised: set[int] = set()  # pids that were granted their minimum once
        self._unjudged: list[Look] = []
        self._killing = False
        self._lock = threading.Lock()  # held for a look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._closed.wait(0.02):
            try:
                with self._lock:
                    self._look()
            except Exception as error:
                self.violations.append(f"the watcher failed: {error!r}")
                raise

    def _look(self) -> None:
        before = self._views()
        names = {info["pid"]: name for name, (_, info) in list(self.scene.engines.items())}
        held = {pid: resident_bytes(pid) for pid in names}
        after = self._views()
        self.looks += 1
        at = self.at()
        for pid, name in names.items():
            if allowed := max(before.get(pid, 0), after.get(pid, 0)):
                self._unjudged.append(Look(at, name, pid, held[pid], allowed))
        if not self._killing:
            self._judge({})

    def _judge(self, kept: dict[int, int]) -> None:
        """Judge the looks that are not judged yet. `kept`: what engines say they hold, by pid, after a broker's end."""
        for look in self._unjudged:
            allowed = max(look.granted_bytes, kept.get(look.pid, 0))
            self.worst = max(self.worst, look.held_bytes - allowed)
            if look.held_bytes > allowed + TOLERANCE_BYTES:
                self.violations.append(
                    f"{look.at}: {look.name} holds {look.held_bytes >> 20} MiB of {allowed >> 20} MiB granted"
                )
        self._unjudged.clear()

    @contextmanager
    def killing(self) -> Iterator[dict[int, int]]:
        """Inside the broker is killed, and its caller asks each engine, by pid, what it holds once it has noticed.

        Looks are judged afterwards. From then on, until it is back at a broker, an engine may hold that and no more.
        """
        self._killing = True
        kept: dict[int, int] = {}
        try:
            yield kept
        finally:
            with self._lock:
                if (total := sum(kept.values())) > self.scene.capacity:
                    self.violations.append(f"{total >> 20} MiB are held without a broker")
                self._judge(kept)
                self._granted = self._granted | kept
                self._killing = False

    def _views(self) -> dict[int, int]:
        """What is granted, by pid; where no broker answers as it was last, or as the engines said."""
        try:
            views = self.scene.client.leases()
        except LeaseError:
            return self._granted
        if (total := sum(view.granted_bytes for view in views)) > self.scene.capacity:
            self.violations.append(f"{total >> 20} MiB are granted")
        now = dict(self._granted)
        for view in views:
            if view.granted_bytes >= view.min_bytes:
                self._promised.add(view.pid)
            elif view.pid in self._promised and view.state != "reaping":
                self.violations.append(f"{view.name} is granted less than its minimum")
            if view.recall_target_bytes is not None:
                self.oldest_ms = max(self.oldest_ms, view.recall_age_ms or 0)
                self.recalls.add((view.pid, view.recall_target_bytes))
                if view.state == "overdue":
                    self.overdue.add((view.name, view.recall_target_bytes))
                if view.recall_target_bytes < view.min_bytes:
                    self.violations.append(f"{view.name} is recalled below its minimum")
            # An engine whose socket was cut may map what it was granted until it looks at it.
            if view.state == "reaping":
                now[view.pid] = max(now.get(view.pid, 0), view.granted_bytes)
            else:
                now[view.pid] = view.granted_bytes
        self._granted = now
        return now

    def at(self) -> str:
        """Seconds since it began to look."""
        return f"{time.monotonic() - self._began:.2f} s"

    def __enter__(self) -> Watcher:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()


@contextmanager
def scene(path: Path, capacity: int, num_externals: int = 1) -> Iterator[Scene]:
    if psutil.virtual_memory().available < capacity * 1.25:
        pytest.skip(f"a test device of {capacity >> 30} GiB needs as much real memory")
    with device_users() as start:
        made = Scene(path / "run", capacity, start, random.Random(SEED))
        for _ in range(num_externals):
            external = start("external")
            external.read()
            made.externals.append(external)
            made.held_mib[external.pid] = 0
        try:
            yield made
        finally:
            if made.monitor is not None:
                made.monitor.__exit__(None, None, None)


def light(made: Scene, uuid: str, name: str, **more: Any) -> DeviceUser:
    options = {"kv_max": made.capacity, "token_bytes": 32768, "idle_s": made.rng.choice([0.5, 3.0, 60.0])} | more
    return Light(str(made.directory), uuid, name, made.rng.randrange(2**32), **options).start(made.start)


def check(made: Scene, watcher: Watcher, ends: dict[str, Any]) -> None:
    """Nobody lost."""
    for name, end in ends.items():
        grown = end["memory"]["grown_bytes"]
        print(
            f"{name}: {end['finished']} requests, {end['tokens']} tokens, {end['preemptions']} preemptions, "
            f"{end['memory']['recalls']} recalls, {grown >> 20} MiB grown, {end.get('hit_tokens', 0)} tokens found cached"
        )
        assert end["failed"] == 0, end["first_failure"]
        assert end["finished"] == end["requests"] > 0, end
    print(
        f"{made.allocations} allocations outside, {len(made.failures)} failures, {len(made.overdrafts)} overdrafts, "
        f"up to {made.peak} MiB; {watcher.looks} looks, {watcher.worst >> 10} KiB above a grant at most, "
        f"{len(watcher.recalls)} recalls seen, {len(watcher.overdue)} overdue, the oldest {watcher.oldest_ms} ms old"
    )
    assert watcher.violations == [], watcher.violations[:5]
    assert watcher.recalls, "nobody was recalled"
    assert any(end.get("hit_tokens") for end in ends.values()), "nothing was found in a cache"


def check_nothing_stays(made: Scene) -> None:
    """Every light engine's arena has no byte, and no lease is left."""
    for user, info in made.engines.values():
        assert user.tell("end").get("mapped", 0) == 0
        if "start" in info:
            assert resident_within(user.pid, info["start"], info["length"]) == 0
    for user, _ in made.engines.values():
        assert user.process.stdin is not None
        user.process.stdin.close()
        assert user.process.wait(60) == 0
    wait_until(lambda: made.client.leases() == (), "the end of the leases")
    assert made.monitor is not None
    assert "Traceback" not in made.monitor.said(), made.monitor.said()


def play(made: Scene, act: Callable[[float], None], seconds: float) -> None:
    with Watcher(made) as watcher:
        made.watcher = watcher
        for user, _ in made.engines.values():
            user.write("bursts")
        act(time.monotonic() + seconds)
        ends = made.drain()
    check(made, watcher, ends)
    check_nothing_stays(made)


def test_nobody_loses(tmp_path: Path) -> None:
    """Two engines; a third and a fourth come while the others work."""
    with scene(tmp_path, 5 * GIB // 2) as made:
        uuid = made.open()

        def arrive() -> None:
            name = f"e{len(made.engines)}"
            made.add(name, light(made, uuid, name, weight=made.rng.choice([0.5, 1, 3])))
            minimums = sum(info["min"] for _, info in made.engines.values())
            assert minimums <= 0.15 * made.capacity, minimums

        def act(until: float) -> None:
            made.swing(until - SECONDS * 2 / 3)
            for more in (1 / 3, 0):
                made.let_go()  # beside external processes at 80 % there is no room for another minimum
                time.sleep(RECALL_S)
                arrive()
                made.engines[f"e{len(made.engines) - 1}"][0].write("bursts")
                time.sleep(RECALL_S)  # until it has a lease it is an external process too
                made.swing(until - SECONDS * more)

        arrive()
        arrive()
        play(made, act, SECONDS)
        assert made.failures == made.overdrafts == []


def test_nobody_loses_with_a_real_model(tmp_path: Path) -> None:
    with scene(tmp_path, 5 * GIB) as made:
        uuid = made.open()
        env = {"PAGETIDE_RUNTIME_DIR": str(made.directory)}
        given = {"seed": made.rng.randrange(2**32), "burst": 48, "libraries": 16 * MIB, "options": {"idle_s": 60}}
        made.add("demo", made.start("llm", given, env=env))
        made.add("light", light(made, uuid, "light", token_bytes=131072, idle_s=60.0))
        minimums = sum(info["min"] for _, info in made.engines.values())
        assert minimums <= 0.15 * made.capacity, minimums
        play(made, made.swing, SECONDS / 10)
        assert made.failures == made.overdrafts == []


def test_nobody_loses_whatever_is_killed_stopped_or_cut(tmp_path: Path) -> None:
    """Every engine is refused one map in twenty; a killed engine's own requests are lost with it, and no others."""
    with scene(tmp_path, 2 * GIB, num_externals=3) as made:
        uuid = made.open()
        for i in range(3):
            made.add(f"e{i}", light(made, uuid, f"e{i}", refused_maps=0.05))

        def act(until: float) -> None:
            began = -time.monotonic()
            faults = [kill_the_daemon, kill_the_daemon_for_long, kill_an_engine, kill_an_external, stop_an_engine, cut_a_socket]
            while True:
                for fault in made.rng.sample(faults, len(faults)):
                    if time.monotonic() > until:
                        return
                    made.swing(time.monotonic() + 3 * RECALL_S, share=0.5)
                    print(f"{began + time.monotonic():.1f} s:", fault.__name__)
                    fault(made, uuid)

        with watch(runtime_dir=made.directory):  # as an engine does, whose guard must leave the daemon to its owner
            play(made, act, SECONDS / 6)
        assert made.failures == made.overdrafts == []


def lease_of(user: DeviceUser) -> dict[str, Any]:
    """What an engine says of its lease."""
    return user.tell("state")["memory"]["lease"]


def kill_the_daemon(made: Scene, uuid: str, away_s: float | None = None) -> None:
    """While it is away external processes take nothing: nobody would notice."""
    assert made.monitor is not None and made.watcher is not None
    away_s = made.rng.random() if away_s is None else away_s
    with made.watcher.killing() as kept:
        made.monitor.kill()
        back_at = time.monotonic() + away_s
        for user, info in made.engines.values():
            wait_until(lambda t=user: not lease_of(t)["connected"], "an engine to notice")
            kept[info["pid"]] = lease_of(user)["held_bytes"]
    time.sleep(max(0.0, back_at - time.monotonic()))
    assert made.open() == uuid
    for user, _ in made.engines.values():
        wait_until(lambda t=user: lease_of(t)["connected"], "an engine to be back")
    time.sleep(2 + RECALL_S)  # the grace in which nobody is recalled


def kill_the_daemon_for_long(made: Scene, uuid: str) -> None:
    """For longer than engines wait before they start a monitor in the place of one of their own."""
    kill_the_daemon(made, uuid, away_s=OTHERS_FIRST_S + 1 + 2 * made.rng.random())


def kill_an_engine(made: Scene, uuid: str) -> None:
    name = made.rng.choice(sorted(made.engines))
    user, _ = made.engines[name]
    user.kill()
    wait_until(lambda: all(view.pid != user.pid for view in made.client.leases()), "the killed engine's bytes")
    del made.engines[name]
    made.add(name, light(made, uuid, name, refused_maps=0.05))
    made.engines[name][0].write("bursts")


def kill_an_external(made: Scene, uuid: str) -> None:
    if len(made.externals) > 1:
        external = made.externals.pop()
        external.kill()
        del made.held_mib[external.pid]


def stop_an_engine(made: Scene, uuid: str) -> None:
    """Past the deadline of a recall, of which external processes are the reason; what it holds cannot be theirs meanwhile."""
    user, _ = made.engines[made.rng.choice(sorted(made.engines))]
    user.signal(signal.SIGSTOP)
    try:
        for _ in range(4):
            if made.free_bytes() > made.capacity // 4:
                made.take(made.externals[0], made.headroom_mib)
            time.sleep(RECALL_S)
    finally:
        user.signal(signal.SIGCONT)
    time.sleep(RECALL_S)


def cut_a_socket(made: Scene, uuid: str) -> None:
    user, _ = made.engines[made.rng.choice(sorted(made.engines))]
    user.write("cut")
    wait_until(lambda: lease_of(user)["connected"], "the engine to be back")
