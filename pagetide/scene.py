"""A private device under pressure: external processes that take and return memory, recalls, and what must never be.

`pagetide stress` and the project's own stress tests are built on it. A scene knows its engines as processes with names;
what they serve, and what they answer, is its user's to judge. All of it may be used by several threads, each external process
by one at a time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .allocator.errors import LeaseError
from .common.units import MIB, format_bytes
from .monitor.sources.process_facts import resident_bytes

if TYPE_CHECKING:
    from .allocator.wire import LeaseView
    from .pressure import ExternalProcess, PrivateDevice

RECALL_S = 1.1  # the deadline of a recall, and what it takes to see that memory was taken
LATE_S = 1.0  # beyond the broker's deadline, until a recall counts as unanswered
MOST_FAULTS = 1000  # that are kept
TOLERANCE_BYTES = 8 * MIB  # an engine measures itself twice a second: so much may Python's heap have grown meanwhile


@dataclass(frozen=True, slots=True)
class Swing:
    """How external processes take memory: pieces of up to so much, no more than the headroom; seconds between two; and how long
    one may wait for a piece.
    """

    piece_bytes: int
    pause_s: float = RECALL_S
    patience_s: float = 0.0


class Scene:
    """A device with what is on it. `engines` are the names of those that are alive, by process id, for its user to keep.

    Attributes:
        loading: How many engines are starting: they take memory before they have a lease.
        faults: What must not be, in words.
        pieces, most_bytes: How many pieces the external processes took, and what they held together at most.
        worst_wait_s: The longest that a piece waited.
        recall_s: Seconds from each order of a recall until the memory was back.
    """

    def __init__(self, device: PrivateDevice, externals: Sequence[ExternalProcess], seed: int) -> None:
        self.device, self.externals = device, list(externals)
        self.rng = random.Random(seed)
        self.engines: dict[int, str] = {}
        self.loading = 0
        self.faults: list[str] = []
        self.pieces = self.most_bytes = 0
        self.worst_wait_s = 0.0
        self.recall_s: list[float] = []
        self._ended = threading.Event()

    def end(self) -> None:
        """End the swings that are under way."""
        self._ended.set()

    @property
    def external_bytes(self) -> int:
        """What the external processes hold together."""
        return sum(external.held_bytes for external in self.externals)

    def free_bytes(self) -> int:
        """As a driver would know it: by the processes themselves, of a card by its last measurement."""
        if self.device.card is not None:
            return self.device.free_bytes()
        pids = [*(external.pid for external in self.externals), *self.engines]
        return self.device.capacity_bytes - sum(resident_bytes(pid) or 0 for pid in pids)

    # ---- external processes ---------------------------------------------------------------------

    def take(self, external: ExternalProcess, num_bytes: int, patience_s: float = 0.0) -> bool:
        """The external process takes a piece. Where the device has not so much after the patience, that is a fault."""
        began = time.monotonic()
        while (free := self.free_bytes()) < num_bytes:
            if not self._goes_on(began + patience_s):
                self.faults.append(
                    f"{format_bytes(num_bytes)} for an external process beside {format_bytes(self.external_bytes)}: "
                    f"{format_bytes(max(0, free))} were free after {patience_s:g} s"
                )
                return False
            self._ended.wait(0.005)
        self.worst_wait_s = max(self.worst_wait_s, time.monotonic() - began)
        wanted = external.held_bytes + num_bytes
        external.hold(wanted)
        self.pieces += 1
        self.most_bytes = max(self.most_bytes, self.external_bytes)
        if external.held_bytes < wanted:
            self.faults.append(f"the driver refused {format_bytes(num_bytes)} to an external process")
        elif (free := self.free_bytes()) < 0 and not self.loading:
            self.faults.append(f"the device is {-free:,} bytes over after an external process's {format_bytes(num_bytes)}")
        return True

    def swing(self, until: float, least_bytes: int, most_bytes: int, swing: Swing) -> None:
        """Take memory piece by piece up to `most_bytes`, and give it back to `least_bytes`, over and over, until then."""
        piece, here = swing.piece_bytes, most_bytes
        while self._goes_on(until):
            while (held := self.external_bytes) < here and self._goes_on(until):
                wanted = min(self.rng.randint(piece // 2, piece), most_bytes - held)
                self.take(self.rng.choice(self.externals), wanted, swing.patience_s)
                self._ended.wait(swing.pause_s)
            self._ended.wait(self.rng.random())
            while (above := self.external_bytes - least_bytes) >= piece and self._goes_on(until):
                external = self.rng.choice(self.externals)
                external.hold(max(0, external.held_bytes - min(above, self.rng.randint(piece, 4 * piece))))
                self._ended.wait(self.rng.random() / 2)
            self._ended.wait(self.rng.random())
            here = self.rng.randint((least_bytes + most_bytes) // 2, most_bytes)

    def _goes_on(self, until: float) -> bool:
        return time.monotonic() < until and not self._ended.is_set()

    def let_go(self) -> None:
        """The external processes give all back."""
        for external in self.externals:
            external.hold(0)

    # ---- recalls --------------------------------------------------------------------------------

    def recall(self, pid: int, num_bytes: int) -> None:
        """Recall memory of an engine, as `vram-monitor recall` does it, and wait until it is back."""
        client, name, began = self.device.client, self.engines.get(pid), time.monotonic()
        try:
            order = client.recall(str(pid), num_bytes)
            while any(one.pid == pid and one.held_bytes > order.target_bytes for one in client.leases()):
                if time.monotonic() > began + order.deadline_ms / 1000 + LATE_S:
                    if pid in self.engines:
                        self.faults.append(f"{name} did not give {num_bytes:,} bytes back in {order.deadline_ms:,} ms")
                    return
                time.sleep(0.005)
        except LeaseError:  # the engine has ended, or starts, or has nothing to give
            return
        self.recall_s.append(time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Sighting:
    """What an engine held at an instant, and what it was granted as far as the broker had said."""

    at: str
    name: str
    pid: int
    held_bytes: int
    granted_bytes: int


class LeaseWatch:
    """Looks at a scene's leases and processes from outside, all the time; what must not be goes to the scene's faults.

    What is granted the broker says. A broker that is killed may have granted more since it was asked last, so what each engine
    holds without one is asked of the engines, once (`killing`).
    """

    def __init__(self, scene: Scene, interval_s: float = 0.02) -> None:
        self.looks = 0
        self.worst = 0  # bytes held above a grant
        self.recalls: set[tuple[int, int]] = set()  # seen: process and target
        self.overdue: set[tuple[str, int]] = set()
        self.oldest_ms = 0  # recall that was not served
        self._scene, self._interval_s = scene, interval_s
        self._granted: dict[int, int] = {}
        self._promised: set[int] = set()  # pids that were granted their minimum once
        self._unjudged: list[_Sighting] = []
        self._killing = False
        self._lock = threading.Lock()  # held for a look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease watch", daemon=True)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                with self._lock:
                    self._look()
            except Exception as error:
                self._fault(f"the watcher failed: {error!r}")
                raise

    def _look(self) -> None:
        before, views = self._views()
        names = dict(self._scene.engines)
        held = self._held(names, views)
        after, _ = self._views()
        self.looks += 1
        at = f"{time.monotonic() - self._began:.2f} s"
        for pid, name in names.items():
            if allowed := max(before.get(pid, 0), after.get(pid, 0)):
                self._unjudged.append(_Sighting(at, name, pid, held.get(pid, 0), allowed))
        if not self._killing:
            self._judge({})

    def _held(self, names: Mapping[int, str], views: Sequence[LeaseView]) -> dict[int, int]:
        """What the engines hold: of this machine's memory as the kernel says, of a card as their records do."""
        if self._scene.device.card is None:
            return {pid: resident_bytes(pid) or 0 for pid in names}
        return {view.pid: view.held_bytes for view in views if view.state == "ok" and view.recall_target_bytes is None}

    def _judge(self, kept: Mapping[int, int]) -> None:
        """Judge the looks that are not judged yet. `kept`: what engines say they hold, by pid, after a broker's end."""
        for look in self._unjudged:
            allowed = max(look.granted_bytes, kept.get(look.pid, 0))
            self.worst = max(self.worst, look.held_bytes - allowed)
            if look.held_bytes > allowed + TOLERANCE_BYTES:
                held = format_bytes(look.held_bytes)
                self._fault(f"{look.at}: {look.name} held {held}, and its lease granted {format_bytes(allowed)}")
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
                if (total := sum(kept.values())) > self._scene.device.capacity_bytes:
                    self._fault(f"{format_bytes(total)} are held without a broker")
                self._judge(kept)
                self._granted = self._granted | kept
                self._killing = False

    def _views(self) -> tuple[dict[int, int], Sequence[LeaseView]]:
        """What is granted, by pid, and the leases; where no broker answers as it was last, or as the engines said."""
        try:
            views = self._scene.device.leases()
        except LeaseError:
            return self._granted, ()
        if (total := sum(view.granted_bytes for view in views)) > self._scene.device.capacity_bytes:
            self._fault(f"{format_bytes(total)} are granted of a device of {format_bytes(self._scene.device.capacity_bytes)}")
        now = dict(self._granted)
        for view in views:
            self._look_at(view)
            # An engine whose socket was cut may map what it was granted until it looks at it.
            gone = view.state == "reaping"
            now[view.pid] = max(now.get(view.pid, 0), view.granted_bytes) if gone else view.granted_bytes
        self._granted = now
        return now, views

    def _look_at(self, view: LeaseView) -> None:
        if view.granted_bytes >= view.min_bytes:
            self._promised.add(view.pid)
        elif view.pid in self._promised and view.state != "reaping":
            self._fault(f"{view.name} is granted less than its minimum")
        if view.recall_target_bytes is None:
            return
        self.oldest_ms = max(self.oldest_ms, view.recall_age_ms or 0)
        self.recalls.add((view.pid, view.recall_target_bytes))
        if view.state == "overdue":
            self.overdue.add((view.name, view.recall_target_bytes))
        if view.recall_target_bytes < view.min_bytes:
            self._fault(f"{view.name} is recalled below its minimum")

    def _fault(self, text: str) -> None:
        if len(self._scene.faults) < MOST_FAULTS:
            self._scene.faults.append(text)

    def __enter__(self) -> LeaseWatch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
