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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_rig import DEVICE, Numbers, broker_thread, short_folder, wait_until
from extent_core import core_in_extents
from fake_cuda_driver import GRANULE, INVALID_VALUE, OUT_OF_MEMORY, FakeCudaDriver, Fault
from fakes import VOCAB, continuation
from scripted_lease import ScriptedLease

from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.lease import Lease
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.monitor.snapshot import DeviceMemory
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.request import Request, Sampling

EXTENTS, MINIMUM = 16, 2  # of the pool
LIMIT = 4  # extents held ready at most
BASE = 10 * GRANULE
SLICE = 2  # extents that are mapped in a step


def total(extents: int) -> int:
    """What the process holds with so many extents."""
    return BASE + extents * GRANULE


class Engine:
    """An engine's memory over the arena. Without a `lease` of its own the broker is the test (`ScriptedLease`).

    Args:
        granted: Extents, at first.
        mapped: Extents, at first.
        in_background: Wait after each step until the arena's thread is done, as while a step runs it would be.
    """

    def __init__(
        self, driver: FakeCudaDriver, granted: int = EXTENTS, mapped: int = MINIMUM, *, in_background: bool = True,
        lease: Lease | None = None, clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self.driver, self.in_background = driver, in_background
        self.now, self.wrong = 100.0, list[str]()
        self.called = Counter[tuple[str, str]]()  # (call, thread)
        self.lease: Any = lease or Checked(self, total(granted), total(MINIMUM), BASE)
        self.cuda = CudaArena(EXTENTS, GRANULE, driver=driver, ready_limit_bytes=LIMIT * GRANULE, pause=lambda _: None)
        self.arena = LeasedArena(self.cuda, self.lease)
        driver.before = self.check
        self.arena.map(range(mapped))
        self.core = core_in_extents(self.arena)
        self.core.memory = self.memory = EngineMemory(
            lambda: self.core.scheduler, self.arena, min_extents=MINIMUM, base_bytes=lambda: BASE, reserve_bytes=0,
            weights_bytes=GRANULE, trim=lambda: None, lease=self.lease, idle_s=5.0, clock=clock or (lambda: self.now),
        )  # fmt: skip
        self.memory._timer.mapping.num_bytes = SLICE * GRANULE
        self.memory._timer.mapping.record = lambda *_: None  # type: ignore[method-assign]
        self.requests, self.finished = dict[str, Request](), dict[str, Finished]()

    def check(self, call: str) -> None:
        """Before each call of the driver, on whatever thread."""
        self.called[call, threading.current_thread().name] += 1
        lease = self.lease
        lower = lease.lower_bytes if isinstance(lease, ScriptedLease) else lease._balance.lower_bytes
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

    def settle(self) -> None:
        """Until the arena's thread has nothing to do."""
        wait_until(lambda: not self.cuda._range.pool._working, "the arena's thread")

    def add(self, name: str, length: int, new: int = 8) -> None:
        prompt = np.random.default_rng(len(self.requests)).integers(0, VOCAB, length).astype(np.int32)
        self.requests[name] = Request(name, prompt, Sampling(new), 0, float(len(self.requests)))
        self.core.add(self.requests[name])

    def step(self, seconds: float = 0.025) -> None:
        self.now += seconds
        emissions = self.core.step()
        if self.in_background:
            self.settle()
        self.core.scheduler.check_invariants()
        assert set(self.core.scheduler.cache.pool.mapped_extents.tolist()) == self.arena.mapped_extents
        assert self.wrong == []
        self.finished |= {end.request_id: end for end in emissions.finished}

    def steps(self, most: int, until: Callable[[], object] = lambda: False) -> None:
        for _ in range(most):
            if until():
                return
            self.step()

    def rest(self, seconds: float = 0.0) -> None:
        """As the thread that keeps memory does, without a request."""
        self.now += seconds
        while self.memory.due:
            self.step()
        self.settle()
        assert not self.memory.due

    def run(self) -> None:
        self.steps(2000, lambda: not self.core.has_work)
        for name, request in self.requests.items():
            assert self.finished[name].reason in ("length", "aborted"), self.finished[name]
            expected = continuation(request.prompt_token_ids, request.sampling)
            assert self.finished[name].token_ids.tolist() == expected[: len(self.finished[name].token_ids)]

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


# ---- ahead of need ------------------------------------------------------------------------------


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
    engine.run()
    engine.close()


def test_no_more_is_made_than_is_granted(driver: FakeCudaDriver) -> None:
    engine = Engine(driver, granted=7)
    busy(engine)
    engine.add("long", 600)
    for _ in range(20):
        engine.step()
        assert engine.lease.held_bytes <= total(7)
        assert engine.size + engine.num_ready <= 7
    assert (engine.size, engine.num_ready) == (7, 0)
    engine.lease.grant(engine.lease.asked[-1])
    engine.run()
    engine.close()


def test_nothing_is_made_that_a_limit_has_no_room_for(driver: FakeCudaDriver) -> None:
    engine = Engine(driver)
    engine.lease.limit(total(7))
    busy(engine)
    engine.add("a", 330)
    engine.add("b", 330)
    for _ in range(15):
        engine.step()
        assert engine.size + engine.num_ready <= 7
    assert engine.size == 7
    engine.run()
    engine.close()


def test_what_is_ready_goes_with_the_demand_for_it(driver: FakeCudaDriver) -> None:
    engine = Engine(driver)
    busy(engine)
    engine.add("long", 600)
    engine.steps(20, lambda: engine.num_ready)
    held, free = engine.lease.reports[-1]
    assert engine.memory.to_dict()["ready_bytes"] > 0 == free
    assert held["kv"] == engine.lease.held_bytes - BASE >= (engine.size + 1) * GRANULE, "reported within the class"
    engine.core.abort("long")
    engine.step()
    assert engine.num_ready == 0
    engine.step()
    assert engine.lease.held_bytes == total(engine.size)
    engine.run()
    engine.close()


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


# ---- behind it ----------------------------------------------------------------------------------


def test_what_is_unmapped_beside_requests_is_released_beside_the_steps(driver: FakeCudaDriver) -> None:
    engine = Engine(driver, mapped=EXTENTS)
    busy(engine)
    engine.called.clear()
    engine.memory._state = replace(engine.memory._state, needed_at=-100.0)  # nobody has needed them for long
    engine.steps(20, lambda: engine.size < EXTENTS)
    released = engine.called["cuMemRelease", "pagetide-extents"]
    assert released == min(LIMIT, EXTENTS - engine.size), "beyond the limit they go at the fence"
    engine.run()
    engine.close()


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
    engine.run()
    engine.close()


def test_a_recall_without_requests_is_answered_by_one_step_with_what_the_device_has(driver: FakeCudaDriver) -> None:
    engine = Engine(driver, mapped=EXTENTS, in_background=False)
    engine.lease.recall_to(total(3))
    assert engine.memory.due
    engine.step()
    assert engine.lease.recall is None and engine.lease.answered == [total(3)]
    assert driver.taken_bytes == 3 * GRANULE
    engine.close()


def test_a_recall_is_not_answered_while_the_driver_keeps_the_bytes(
    driver: FakeCudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(driver, mapped=EXTENTS)
    driver.faults = [Fault(0, 1 << 30, INVALID_VALUE, "cuMemRelease")]
    engine.lease.recall_to(total(12))
    for _ in range(3):
        engine.step()
    assert engine.lease.answered == [] and engine.lease.held_bytes == total(EXTENTS)
    assert "KV pool: not all of what was unmapped went back: " in caplog.text
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
    engine.settle()
    assert not engine.memory.due, "no step is needed for it"
    assert driver.taken_bytes == MINIMUM * GRANULE
    assert engine.lease.held_bytes == engine.lease.lower_bytes == engine.lease.granted_bytes == total(MINIMUM)
    assert engine.lease.reports[-1] == ({"weights": GRANULE, "other": BASE - GRANULE, "kv": 2 * GRANULE}, 0)
    engine.close()


# ---- any life -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(6, 200))])
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
                engine.core.abort(choose.choice(list(engine.requests)))
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


# ---- with a broker ------------------------------------------------------------------------------


class DriverNumbers(Numbers):
    """What the broker measures: the driver's books, and what the process holds besides."""

    driver: FakeCudaDriver

    def memory(self, uuid: str) -> DeviceMemory:
        with self.driver._lock:
            self.used = BASE + self.driver.taken_bytes + self.driver.foreign_bytes
        return super().memory(uuid)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def test_lease_broker_and_driver_agree_after_growth_and_recall(driver: FakeCudaDriver, folder: Path) -> None:
    numbers = DriverNumbers(capacity=total(EXTENTS + 4))
    numbers.driver = driver
    with (
        broker_thread(folder / "broker", numbers) as broker,
        Lease.register(
            folder / "broker", name="a", device_uuid=DEVICE, min_bytes=total(MINIMUM), granule_bytes=GRANULE,
            held_bytes=BASE, timeout_s=30,
        ) as lease,
    ):  # fmt: skip
        engine = Engine(driver, lease=lease, clock=time.monotonic)
        engine.add("runs", 20, new=1000)
        engine.add("long", 600, new=400)

        def steps(until: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not until():
                assert time.monotonic() < deadline
                engine.step()

        steps(lambda: engine.size >= 11)
        BrokerClient(folder / "broker").recall("a", 6 * GRANULE)
        steps(lambda: engine.memory.stats.recalls > 0 and lease.recall is None)
        assert engine.size <= EXTENTS - 5
        engine.core.abort("long")
        engine.core.abort("runs")
        steps(lambda: not engine.core.has_work)
        engine.settle()
        assert not engine.memory.due
        assert lease.held_bytes == BASE + driver.taken_bytes == total(engine.size)
        wait_until(lambda: broker.leases()[0].held_bytes == lease.held_bytes, "the broker's view")
        engine.close()
