"""Extents made ahead of need and given back behind it: the engine's memory over a CUDA arena whose driver has no device.

Whatever the arena's thread is doing: at each call of the driver what exists lies between the bounds in the lease, and when
a lease is told that bytes are unmapped, the driver has them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from extent_core import SteppedEngine, core_in_extents
from fake_cuda_driver import GRANULE, INVALID_VALUE, OUT_OF_MEMORY, FakeCudaDriver, Fault
from monitors import wait_until
from scripted_lease import ScriptedLease

from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse

EXTENTS, MINIMUM = 16, 2  # of the pool
LIMIT = 4  # extents held ready at most
BASE = 10 * GRANULE
SLICE = 2  # extents that are mapped in a step


def total(extents: int) -> int:
    """What the process holds with so many extents."""
    return BASE + extents * GRANULE


class Engine(SteppedEngine):
    """An engine's memory over the arena. The broker is the test (`ScriptedLease`).

    `in_background`: wait after each step until the arena's thread is done, as while a step runs it would be.
    """

    def __init__(
        self, driver: FakeCudaDriver, granted: int = EXTENTS, mapped: int = MINIMUM, *, in_background: bool = True
    ) -> None:
        super().__init__()
        self.driver, self.in_background, self.wrong = driver, in_background, list[str]()
        self.called = Counter[tuple[str, str]]()  # (call, thread)
        self.lease: Any = Checked(self, total(granted), total(MINIMUM), BASE)
        self.cuda = CudaArena(EXTENTS, GRANULE, driver=driver, ready_limit_bytes=LIMIT * GRANULE)
        self.arena = LeasedArena(self.cuda, self.lease)
        driver.before = self.check
        self.arena.map(range(mapped))
        self.core = core_in_extents(self.arena)
        pool = SchedulerPoolUse(lambda: self.core.scheduler, PoolBounds(EXTENTS, MINIMUM, GRANULE, idle_s=5.0))
        base = BaseMemory(lambda: BASE, weights_bytes=GRANULE, reserve_bytes=0, trim=lambda: None)
        self.core.memory = self.memory = EngineMemory(pool, self.arena, base, lease=self.lease, clock=lambda: self.now)
        self.memory._timer.mapping.num_bytes = SLICE * GRANULE
        self.memory._timer.mapping.record = lambda *_: None  # type: ignore[method-assign]

    def check(self, call: str) -> None:
        """Before each call of the driver, on whatever thread."""
        self.called[call, threading.current_thread().name] += 1
        lease = self.lease
        lower = lease.lower_bytes
        with self.driver._lock:
            taken = self.driver.taken_bytes
        if not lower - BASE <= taken <= lease.held_bytes - BASE:
            self.wrong.append(f"{call}: {taken} exist, {lower - BASE} to {lease.held_bytes - BASE} are counted")

    @property
    def size(self) -> int:
        return self.arena.mapped_bytes // GRANULE

    @property
    def num_ready(self) -> int:
        return self.driver.taken_bytes // GRANULE - self.size

    def wait_for_thread(self) -> None:
        """Until the arena's thread has nothing to do."""
        wait_until(lambda: not self.cuda._range.pool._working, "the arena's thread")

    def settle(self) -> None:
        if self.in_background:
            self.wait_for_thread()
        assert self.wrong == []

    def step(self, seconds: float = 0.025) -> None:
        super().step(seconds)

    def rest(self, seconds: float = 0.0) -> None:
        """As the thread that keeps memory does, without a request."""
        self.now += seconds
        while self.memory.due:
            self.step()
        self.wait_for_thread()
        assert not self.memory.due

    def end(self) -> None:
        self.run()
        self.close()

    def close(self) -> None:
        self.arena.close()
        assert self.lease.held_bytes == BASE
        assert self.wrong == []


class Checked(ScriptedLease):
    """Nobody says "unmapped" of what the driver does not have."""

    def __init__(self, engine: Engine, *amounts: int) -> None:
        super().__init__(*amounts)
        self._engine = engine

    def answer_unmapped(self, keep_bytes: int) -> None:
        assert self._engine.driver.taken_bytes <= keep_bytes - BASE
        super().answer_unmapped(keep_bytes)


@pytest.fixture
def driver() -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver()
    yield driver
    driver.before = lambda call: None  # which refers to the engine
    driver.faults.clear()
    gc.collect()
    assert (driver.violations, driver.leaks()) == ([], [])


def busy(engine: Engine) -> None:
    """A request runs, so that memory comes and goes in slices."""
    engine.add("runs", 20, new=90)
    engine.steps(3)
    assert engine.core.scheduler.num_running == 1


def test_nothing_goes_on_in_the_background_before_there_is_demand(driver: FakeCudaDriver) -> None:
    """CUDA graphs are captured meanwhile."""
    engine = Engine(driver)
    assert engine.cuda._range.pool._thread is None
    engine.rest(100)
    assert engine.cuda._range.pool._thread is None
    engine.close()


def test_the_next_slices_are_made_beside_the_steps_and_the_fence_only_maps(driver: FakeCudaDriver) -> None:
    engine = Engine(driver)
    busy(engine)
    engine.called.clear()
    engine.add("long", 600)  # 38 blocks: 10 extents
    sizes = [engine.size]
    while engine.size < 11:
        engine.step()
        sizes.append(engine.size)
        assert engine.lease.held_bytes >= total(engine.size + engine.num_ready)
    assert max(after - before for before, after in itertools.pairwise(sizes)) == SLICE
    assert engine.called["cuMemCreate", "MainThread"] <= SLICE, "of the first slice, which nobody foresaw"
    assert engine.called["cuMemCreate", "pagetide-extents"] >= sizes[-1] - sizes[0] - SLICE >= 6
    engine.steps(3)
    assert (engine.num_ready, engine.lease.held_bytes) == (0, total(engine.size)), "then no more is wanted"
    engine.end()


def test_what_is_ready_goes_with_the_demand_for_it(driver: FakeCudaDriver) -> None:
    engine = Engine(driver)
    busy(engine)
    engine.add("long", 600)
    engine.steps(20, lambda: engine.num_ready)
    held, _ = engine.lease.reports[-1]
    assert engine.memory.to_dict()["ready_bytes"] > 0
    assert held["kv"] == engine.lease.held_bytes - BASE >= (engine.size + 1) * GRANULE, "reported within the class"
    engine.abort("long")
    engine.step()
    assert engine.num_ready == 0
    engine.step()
    assert engine.lease.held_bytes == total(engine.size)
    engine.end()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemGetInfo"])
def test_what_the_driver_refuses_in_the_background_is_said_and_stops_nothing(
    driver: FakeCudaDriver, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    engine = Engine(driver)
    busy(engine)
    engine.add("long", 600)
    engine.steps(20, lambda: engine.num_ready)
    driver._counts.clear()
    driver.faults = [Fault(0, 2, OUT_OF_MEMORY, call)]
    with caplog.at_level(logging.INFO, "pagetide.engine.memory.engine_memory"):
        engine.run()
    said = [record.getMessage() for record in caplog.records if call in record.getMessage()]
    assert said and all(line.startswith("KV pool: ") for line in said)
    caplog.clear()  # what was logged keeps the frames that it was raised in
    engine.rest(10)
    assert engine.lease.held_bytes == total(MINIMUM)
    engine.close()


def test_what_is_unmapped_beside_requests_is_released_beside_the_steps(driver: FakeCudaDriver) -> None:
    engine = Engine(driver, mapped=EXTENTS)
    busy(engine)
    engine.called.clear()
    engine.memory._state = replace(engine.memory._state, needed_at=-100.0)  # nobody has needed them for long
    engine.steps(20, lambda: engine.size < EXTENTS)
    released = engine.called["cuMemRelease", "pagetide-extents"]
    assert released == min(LIMIT, EXTENTS - engine.size), "beyond the limit they go at the fence"
    engine.end()


def test_a_recall_takes_what_is_ready_first(driver: FakeCudaDriver) -> None:
    engine = Engine(driver)
    busy(engine)
    engine.add("long", 600)
    engine.steps(20, lambda: engine.num_ready)
    size = engine.size
    engine.called.clear()
    engine.lease.recall_to(total(size))
    engine.step()
    assert engine.lease.recall is None and engine.lease.granted_bytes == total(size)
    assert (engine.size, engine.core.scheduler.stats.preemptions) == (size, 0)
    assert engine.called["cuMemUnmap", "MainThread"] == 0
    engine.lease.grant(total(EXTENTS))
    engine.end()


def test_a_recall_is_not_answered_while_the_driver_keeps_the_bytes(
    driver: FakeCudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(driver, mapped=EXTENTS)
    driver.faults = [Fault(0, 1 << 30, INVALID_VALUE, "cuMemRelease")]
    engine.lease.recall_to(total(12))
    for _ in range(3):
        engine.step()
    assert engine.lease.answered == [] and engine.lease.held_bytes == total(EXTENTS)
    assert "KV pool: some unmapped memory was not released: " in caplog.text
    driver.faults.clear()
    engine.rest()
    assert engine.lease.answered == [total(12)] and driver.taken_bytes == 12 * GRANULE
    engine.close()


def test_idle_extents_go_in_the_background_and_the_lease_hears_when_they_have(driver: FakeCudaDriver) -> None:
    engine = Engine(driver, mapped=EXTENTS, in_background=False)
    may_go = threading.Event()

    def slowly(call: str) -> None:
        engine.check(call)
        assert call != "cuMemRelease" or threading.current_thread().name == "MainThread" or may_go.wait(60)

    driver.before = slowly
    engine.now += 10
    assert engine.memory.due
    engine.step()
    assert engine.size == MINIMUM and engine.num_ready == LIMIT
    assert engine.lease.held_bytes == engine.lease.granted_bytes == total(MINIMUM + LIMIT)
    assert engine.lease.lower_bytes == total(MINIMUM), "at any time they may be gone"
    assert not engine.memory.due
    may_go.set()
    engine.wait_for_thread()
    assert not engine.memory.due, "no step is needed for it"
    assert driver.taken_bytes == MINIMUM * GRANULE
    assert engine.lease.held_bytes == engine.lease.lower_bytes == engine.lease.granted_bytes == total(MINIMUM)
    assert engine.lease.reports[-1] == ({"weights": GRANULE, "other": BASE - GRANULE, "kv": 2 * GRANULE}, 0)
    engine.close()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(3, 200))])
def test_any_life_keeps_the_books(driver: FakeCudaDriver, seed: int) -> None:
    """Demand, grants, recalls, limits, external processes and driver faults, at random, the thread at work all the while."""
    choose = random.Random(seed)
    engine = Engine(driver, granted=choose.randint(MINIMUM, EXTENTS), in_background=False)
    room = 12 * GRANULE  # beside the pool

    def happens() -> None:
        lease, scheduler = engine.lease, engine.core.scheduler
        match choose.randrange(9):
            case 0 | 1 if scheduler.num_waiting < 4:
                length = choose.randint(1, 500)
                engine.add(f"r{len(engine.requests)}", length, new=choose.randint(1, 60))
            case 2 if engine.requests:
                engine.abort(choose.choice(list(engine.requests)))
            case 3 if lease.recall is None:
                lease.grant(max(lease.granted_bytes, total(choose.randint(MINIMUM, EXTENTS))))
            case 4:
                low = total(MINIMUM) if lease.recall is None else lease.recall.target_bytes
                lease.recall_to(min(low, total(choose.randint(MINIMUM, EXTENTS))) if choose.random() < 0.3 else low)
            case 5:
                lease.limit(total(choose.randint(8, EXTENTS)))
            case 6:
                driver.total_bytes = EXTENTS * GRANULE + room
                driver.foreign_bytes = choose.randint(0, room + 8 * GRANULE)
            case 7:
                call = choose.choice(["cuMemCreate", "cuMemRelease", "cuMemGetInfo", "cuMemMap"])
                driver._counts.clear()
                first = choose.randint(0, 3)
                driver.faults = [Fault(first, first + choose.randint(0, 2), OUT_OF_MEMORY, call)]
            case _:
                pass

    for _ in range(250):
        if choose.random() < 0.3:
            happens()
        if engine.core.has_work or engine.memory.due:
            engine.step(choose.choice([0.001, 0.025, 0.6]))
        else:
            engine.now += choose.choice([0.025, 2.0])
        lease = engine.lease
        assert lease.held_bytes <= max(lease.granted_bytes, total(MINIMUM)), "nothing is made beyond the grant"
    driver.faults.clear()
    driver.foreign_bytes = 0
    engine.lease.max_bytes = None
    engine.steps(3)
    engine.lease.grant(total(EXTENTS))
    engine.run()
    engine.rest(10)
    assert engine.lease.held_bytes == engine.lease.lower_bytes == total(MINIMUM)
    assert driver.taken_bytes == MINIMUM * GRANULE
    engine.close()
