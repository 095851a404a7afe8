"""The CUDA arena over a driver without a device: every call may fail, and nothing is lost, leaked or done twice."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from fake_cuda_driver import GRANULE, INVALID_VALUE, NOT_READY, OUT_OF_MEMORY, FakeCudaDriver, Fault
from monitors import wait_until

from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.cuda_driver import CudaDevice, device_number, recommended_granule
from pagetide.allocator.errors import AllocatorError, BlockMisuse, DriverError, DriverUnavailable, OutOfDeviceMemory

ALWAYS = 1 << 30


@pytest.fixture
def driver() -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver()
    yield driver
    assert driver.violations == []
    if driver.leaks():
        gc.collect()
    assert driver.leaks() == []


def make(driver: FakeCudaDriver, num_extents: int = 8, ready: int = 0, **options) -> CudaArena:
    """An arena of extents of one granule, of which `ready` may be held ready. By default nothing is done by a thread."""
    return CudaArena(num_extents, GRANULE, driver=driver, ready_limit_bytes=ready * GRANULE, **options)


def fill(arena: CudaArena, driver: FakeCudaDriver, extent: int, value: int) -> None:
    driver.write(arena._range._address(extent), bytes([value]) * GRANULE)


def holds(arena: CudaArena, driver: FakeCudaDriver, extent: int, value: int) -> bool:
    return driver.read(arena._range._address(extent), GRANULE) == bytes([value]) * GRANULE


def ready(arena: CudaArena) -> int:
    """Bytes that it holds though not mapped, at most."""
    return arena.held.upper_bytes - arena.mapped_bytes


def settle(arena: CudaArena) -> None:
    """Wait until nothing is going on in the background."""
    wait_until(lambda: not arena._range.pool._working)


def prepare(arena: CudaArena, num_extents: int) -> None:
    arena.prepare(num_extents)
    settle(arena)


@pytest.mark.parametrize(
    ("num_extents", "extent_bytes", "device", "said"),
    [
        (0, GRANULE, 0, "num_extents must be at least 1"),
        (1, 0, 0, f"multiple of the device's granule {GRANULE}"),
        (1, GRANULE + 512, 0, f"multiple of the device's granule {GRANULE}"),
        (1, GRANULE, 2, "there is no CUDA device 2: this process sees 2"),
        (1, GRANULE, -1, "there is no CUDA device -1"),
    ],
)
def test_bad_sizes_and_devices_are_refused(
    driver: FakeCudaDriver, num_extents: int, extent_bytes: int, device: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        CudaArena(num_extents, extent_bytes, device, driver=driver)


def test_a_negative_limit_is_refused(driver: FakeCudaDriver) -> None:
    with pytest.raises(ValueError, match="ready_limit_bytes at least 0"):
        make(driver, ready=-1)


def test_a_device_without_virtual_memory_is_refused(driver: FakeCudaDriver) -> None:
    driver.supported = False
    with pytest.raises(DriverUnavailable, match="cuda:1 cannot map memory by extents"):
        CudaArena(1, GRANULE, 1, driver=driver)


def test_the_granule_is_known_before_there_is_an_arena(driver: FakeCudaDriver) -> None:
    assert CudaArena.granule_bytes(1, driver) == GRANULE == recommended_granule(driver, device_number(driver, 1))


def test_without_the_bindings_the_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["cuda"] = None  # as if it were not installed
from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.errors import DriverUnavailable
try:
    CudaArena(1, 2 << 20)
except DriverUnavailable as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert "[cuda]'\n" in run.stdout, run.stderr


def test_every_call_runs_in_the_devices_context_and_leaves_the_callers(driver: FakeCudaDriver) -> None:
    other = CudaDevice(driver, 0)
    arena = CudaArena(4, GRANULE, 1, driver=driver)
    with other.current():
        arena.map([0, 1])
        arena.unmap([1])
        arena.trim()
        assert driver._stack() == [other._context]
        arena.close()
    other.close()


def test_a_run_gets_access_at_once(driver: FakeCudaDriver) -> None:
    arena = make(driver)
    driver.calls.clear()
    arena.map([5, 1, 2, 3])
    assert [name for name in driver.calls if name in ("cuMemMap", "cuMemSetAccess")] == [
        *["cuMemMap"] * 4,
        *["cuMemSetAccess"] * 2,  # 1..3, 5
    ]


def test_a_map_that_the_device_has_not_the_bytes_for_takes_none(driver: FakeCudaDriver) -> None:
    driver.total_bytes = 5 * GRANULE
    arena = make(driver)
    arena.map([0, 1])
    created = driver.calls.count("cuMemCreate")
    with pytest.raises(OutOfDeviceMemory, match="memory on cuda:0") as refusal:
        arena.map([2, 3, 4, 5])
    assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (4 * GRANULE, 3 * GRANULE)
    assert driver.calls.count("cuMemCreate") == created  # nobody else was short of memory for a moment
    arena.map([2, 3, 4])


def test_an_external_who_comes_between_budget_and_creation(driver: FakeCudaDriver) -> None:
    driver.total_bytes = 5 * GRANULE
    arena = make(driver, budget=lambda: driver.free_bytes)
    arena.map([0])

    def external(name: str) -> None:
        if name == "cuMemCreate":
            driver.foreign_bytes = 2 * GRANULE

    driver.before = external
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.map([1, 2, 3])
    assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (3 * GRANULE, 2 * GRANULE)
    assert (arena.mapped_extents, arena.held.upper_bytes, driver.taken_bytes) == ({0}, GRANULE, GRANULE)
    arena.map([1, 2])


def test_addresses_may_run_out(driver: FakeCudaDriver) -> None:
    driver.faults = [Fault(0, 0, OUT_OF_MEMORY, "cuMemAddressReserve")]
    with pytest.raises(OutOfDeviceMemory, match="addresses on cuda:0") as refusal:
        make(driver, 8)
    assert refusal.value.asked_bytes == 8 * GRANULE


def test_access_that_is_not_ready_is_asked_for_again_with_growing_pauses(driver: FakeCudaDriver) -> None:
    pauses: list[float] = []
    driver.pause = pauses.append
    arena = make(driver)
    driver.faults = [Fault(0, 3, NOT_READY, "cuMemSetAccess")]
    arena.map([0, 1])
    assert pauses == [0.0005, 0.001, 0.002, 0.004]
    driver.faults = [Fault(0, ALWAYS, NOT_READY, "cuMemSetAccess")]
    pauses.clear()
    with pytest.raises(DriverError, match="cuMemSetAccess with CUDA_ERROR_NOT_READY"):
        arena.map([2])
    assert len(pauses) == 8 and sum(pauses) < 0.2
    assert (arena.mapped_extents, driver.taken_bytes) == ({0, 1}, 2 * GRANULE)


class Life:
    """An arena's life, step by step. Each step can be done again after it failed."""

    steps = (
        ("make", []),
        ("map", [0, 1, 2, 5]),
        ("unmap", [1, 5]),
        ("map", [4, 5, 6]),
        ("unmap", [0, 2, 6]),
        ("trim", []),
        ("map", [1, 7]),
        ("close", []),
    )

    def __init__(self, driver: FakeCudaDriver) -> None:
        self.driver = driver
        self.arena: CudaArena | None = None
        self.view: object = None  # so that closing is not the end yet

    def do(self, act: str, extents: list[int]) -> None:
        if self.arena is None:
            self.arena = make(self.driver, 8)
            self.view = self.arena._buffer
        elif act == "unmap":
            self.arena.unmap(sorted(self.arena.mapped_extents.intersection(extents)))
        elif act == "map":
            self.arena.map(extents)
        else:
            getattr(self.arena, act)()

    @property
    def mapped(self) -> frozenset[int]:
        return self.arena.mapped_extents if self.arena else frozenset()

    def check(self, *, exact: bool) -> None:
        """What the arena says it has it has, and it counts every byte. `exact`: and it has nothing beside that."""
        if self.arena is None:
            assert not exact or self.driver.leaks() == []
            return
        settle(self.arena)
        mapped = {self.arena._range._address(extent) for extent in self.mapped}
        assert mapped == self.driver.mapped_addresses if exact else mapped <= self.driver.mapped_addresses
        assert self.arena.held.upper_bytes == self.driver.taken_bytes
        assert not exact or ready(self.arena) == 0


def calls_of_a_life() -> list[int]:
    """How many calls of the driver there were after each step."""
    life = Life(FakeCudaDriver())
    after = []
    for act, extents in Life.steps:
        life.do(act, extents)
        after.append(len(life.driver.calls))
    return after


# (k, how many in a row): while the arena is made one alone, since what cannot be undone then stays the driver's
FAULTS = [(k, 1) for k in range(calls_of_a_life()[-1])]
FAULTS += [(k, calls) for k in range(calls_of_a_life()[0], len(FAULTS)) for calls in (2, 3, ALWAYS)]


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, NOT_READY])
def test_the_kth_call_fails(code: int) -> None:
    for k, calls in FAULTS:
        driver = FakeCudaDriver()
        live_with_a_fault(driver, k, calls, code)
        gc.collect(0)
        assert (driver.violations, driver.leaks()) == ([], []), f"{calls} calls failed from {k} on"


def live_with_a_fault(driver: FakeCudaDriver, k: int, calls: int, code: int) -> None:
    driver.faults = [Fault(k, k + calls - 1, code)]
    life = Life(driver)
    for act, extents in Life.steps:
        before = life.mapped
        for extent in before:
            fill(life.arena, driver, extent, extent + 1)
        try:
            life.do(act, extents)
        except AllocatorError:
            assert before - set(extents if act == "unmap" else before if act == "close" else []) <= life.mapped <= before
            life.check(exact=calls == 1 and act in ("make", "map", "unmap"))
            assert all(holds(life.arena, driver, extent, extent + 1) for extent in life.mapped)
            driver.faults.clear()
            life.do(act, extents)
            if calls > 1 and act != "close":
                life.arena.trim()  # the thread met faults too, and gave up
        life.check(exact=not driver.faults or calls == 1)
        kept = before & life.mapped
        assert all(holds(life.arena, driver, extent, extent + 1) for extent in kept)
        assert all(holds(life.arena, driver, extent, 0) for extent in life.mapped - before)
        expected = {"map": before | set(extents), "unmap": before - set(extents), "close": frozenset()}
        assert life.mapped == expected.get(act, before)
    driver.faults.clear()  # what comes after the last step is tested below


def test_what_a_failed_roll_back_left_is_counted_and_taken_away_later(driver: FakeCudaDriver) -> None:
    arena = make(driver)
    arena.map([0])
    driver.faults = [Fault(0, 0, INVALID_VALUE, "cuStreamSynchronize"), Fault(0, 0, INVALID_VALUE, "cuMemUnmap")]
    driver._counts.clear()
    with pytest.raises(DriverError, match="cuStreamSynchronize"):
        arena.map([1, 2])
    assert [failure.call for failure in arena.drain_failures()] == ["cuMemUnmap"]
    assert arena.drain_failures() == []
    assert arena.mapped_extents == {0}
    assert len(driver.mapped_addresses) == 2  # extent 1 could not be taken away
    assert (arena.held.upper_bytes, ready(arena), driver.taken_bytes) == (2 * GRANULE, GRANULE, 2 * GRANULE)
    arena.map([1])
    assert holds(arena, driver, 1, 0)
    assert (arena.mapped_extents, ready(arena)) == ({0, 1}, 0)


def test_what_is_prepared_is_mapped_without_creating(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map([0])
    prepare(arena, 3)
    assert (arena.mapped_bytes, ready(arena), arena.held.upper_bytes) == (GRANULE, 3 * GRANULE, 4 * GRANULE)
    assert driver.taken_bytes == 4 * GRANULE
    created = driver.calls.count("cuMemCreate")
    arena.map([1, 2])
    assert driver.calls.count("cuMemCreate") == created
    settle(arena)
    assert ready(arena) == GRANULE  # of three prepared, two are used
    arena.map([3, 4])
    settle(arena)
    assert (ready(arena), driver.taken_bytes) == (0, 5 * GRANULE)


def test_no_more_is_prepared_than_the_limit_or_the_arena_have_room_for(driver: FakeCudaDriver) -> None:
    arena = make(driver, 4, ready=3)
    prepare(arena, 100)
    assert ready(arena) == 3 * GRANULE
    arena.map([0, 1, 2])
    prepare(arena, 100)
    assert ready(arena) == GRANULE
    prepare(arena, 0)
    assert ready(arena) == 0


def test_unmapped_extents_are_released_by_a_thread_down_to_what_is_wanted(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map(range(6))
    caller = threading.get_ident()
    released_by: list[int] = []
    driver.before = lambda name: released_by.append(threading.get_ident()) if name == "cuMemRelease" else None
    arena.unmap(range(4))
    settle(arena)
    assert (arena.held.upper_bytes, driver.taken_bytes) == (2 * GRANULE, 2 * GRANULE)
    assert len(released_by) == 4 and caller not in released_by


def test_what_is_unmapped_beyond_the_limit_is_released_at_once(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=1)
    arena.map(range(4))
    arena._range.pool.start = lambda owner: None  # type: ignore[method-assign]  # the thread never comes
    arena.unmap(range(4))
    assert (ready(arena), driver.taken_bytes) == (GRANULE, GRANULE)
    arena.trim()
    assert driver.taken_bytes == 0


def test_memory_that_cannot_be_prepared_is_a_failure_to_be_read_and_no_more(driver: FakeCudaDriver) -> None:
    driver.total_bytes = 3 * GRANULE
    arena = make(driver, ready=8, budget=lambda: 1 << 30)  # an external process comes behind it
    prepare(arena, 5)
    assert (arena.held.upper_bytes, driver.taken_bytes) == (3 * GRANULE, 3 * GRANULE)
    assert [str(failure) for failure in arena.drain_failures()] == [
        "the device's driver answered cuMemCreate with CUDA_ERROR_OUT_OF_MEMORY (2)"
    ]
    driver.total_bytes = 1 << 20
    arena.map([0])
    settle(arena)
    assert arena.held.upper_bytes == 3 * GRANULE  # the wish ended with its failure
    arena.map([1, 2, 3])
    assert arena.drain_failures() == []


def test_no_more_is_prepared_than_the_device_has(driver: FakeCudaDriver) -> None:
    driver.total_bytes = 5 * GRANULE
    arena = make(driver, ready=8)
    arena.map([0])
    prepare(arena, 2)
    driver.foreign_bytes = GRANULE
    prepare(arena, 7)
    assert (ready(arena), arena.drain_failures()) == (3 * GRANULE, [])
    driver.faults = [Fault(0, ALWAYS, INVALID_VALUE, "cuMemGetInfo")]
    with pytest.raises(DriverError, match="cuMemGetInfo"):
        arena.prepare(7)
    prepare(arena, 1)  # which are there
    assert driver.taken_bytes == 2 * GRANULE


def test_a_handle_the_driver_keeps_is_counted_until_it_goes(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map(range(3))
    driver.faults = [Fault(0, ALWAYS, INVALID_VALUE, "cuMemRelease")]
    arena.unmap([1, 2])
    settle(arena)
    assert ready(arena) == 2 * GRANULE
    with pytest.raises(DriverError, match="cuMemRelease"):
        arena.trim()
    assert (ready(arena), driver.taken_bytes) == (2 * GRANULE, 3 * GRANULE)
    assert {failure.call for failure in arena.drain_failures()} == {"cuMemRelease"}
    driver.faults.clear()
    arena.trim()
    assert (ready(arena), driver.taken_bytes) == (0, GRANULE)


def test_a_context_that_the_thread_cannot_have_is_a_failure(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8, budget=lambda: 1 << 30)
    driver._counts.clear()
    driver.faults = [Fault(0, 0, INVALID_VALUE, "cuCtxPushCurrent")]
    prepare(arena, 2)
    assert [failure.call for failure in arena.drain_failures()] == ["cuCtxPushCurrent"]
    assert ready(arena) == 0
    prepare(arena, 2)
    assert ready(arena) == 2 * GRANULE


def test_where_no_thread_is_to_be_had_the_caller_does_the_work(driver: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make(driver, ready=8)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    arena.prepare(3)
    assert driver.taken_bytes == 3 * GRANULE
    arena.map([0, 1, 2])
    arena.unmap([0])
    assert driver.taken_bytes == 2 * GRANULE


class Gate:
    """Lets calls of one name through one at a time, as told."""

    def __init__(self, driver: FakeCudaDriver, name: str) -> None:
        self.waiting = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.name = name
        driver.before = self

    def __call__(self, name: str) -> None:
        if name == self.name:
            self.waiting.release()
            assert self.allowed.acquire(timeout=60)


def test_a_map_waits_for_one_creation_and_not_for_all_that_is_prepared(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    gate = Gate(driver, "cuMemCreate")
    arena.prepare(8)
    assert gate.waiting.acquire(timeout=60)  # the first of eight is being created
    mapping = threading.Thread(target=arena.map, args=([0],))
    mapping.start()
    wait_until(arena._range.pool._turn.locked)  # the map waits its turn
    gate.allowed.release()
    mapping.join(60)
    assert arena.mapped_extents == {0}
    assert driver.calls.count("cuMemCreate") <= 2  # not one after the other until all are there
    gate.allowed.release(8)
    settle(arena)
    assert arena.held.upper_bytes == driver.taken_bytes == 8 * GRANULE


def test_trim_ends_what_is_going_on(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map([0])
    gate = Gate(driver, "cuMemCreate")
    arena.prepare(4)
    assert gate.waiting.acquire(timeout=60)
    assert arena.held == (GRANULE, 5 * GRANULE)  # counted before it is there
    trimming = threading.Thread(target=arena.trim)
    trimming.start()
    wait_until(arena._range.pool._turn.locked)
    gate.allowed.release(4)
    trimming.join(60)
    assert (ready(arena), driver.taken_bytes) == (0, GRANULE)
    assert not any(thread.name == "pagetide-extents" for thread in threading.enumerate())


def test_closing_leaves_no_thread_and_no_byte(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map([0, 1])
    arena.prepare(6)
    arena.close()
    assert not any(thread.name == "pagetide-extents" for thread in threading.enumerate())
    assert (arena.held.upper_bytes, driver.taken_bytes) == (0, 0)
    for call in (arena.trim, lambda: arena.prepare(1)):
        with pytest.raises(BlockMisuse, match="closed"):
            call()


def test_the_buffer_describes_the_whole_range(driver: FakeCudaDriver) -> None:
    arena = make(driver, 8)
    with pytest.raises(BlockMisuse, match="map extent 0 before the arena is viewed"):
        arena.buffer  # noqa: B018
    arena.map([0])
    assert arena.buffer.__cuda_array_interface__ == {
        "version": 3,
        "typestr": "|u1",
        "shape": (8 * GRANULE,),
        "strides": None,
        "data": (arena._range.base, False),
    }


def test_the_addresses_go_with_the_last_view(driver: FakeCudaDriver) -> None:
    arena = make(driver)
    arena.map([0, 1])
    view = arena.buffer
    arena.close()
    assert driver.taken_bytes == 0
    del arena
    gc.collect()
    assert "cuMemAddressFree" not in driver.calls
    del view
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease"


def test_closing_after_the_last_view_has_gone_is_no_work(driver: FakeCudaDriver) -> None:
    arena = make(driver)
    arena.map([0])
    arena.close()
    assert driver.leaks() == []  # nobody had a view
    driver.calls.clear()
    arena.close()
    assert driver.calls == []


@pytest.mark.parametrize("ready", [0, 8])
def test_an_arena_that_nobody_closed_ends_with_its_last_view(driver: FakeCudaDriver, ready: int) -> None:
    arena = make(driver, ready=ready)
    arena.map([0, 1, 2])
    prepare(arena, 2)
    view = arena.buffer
    address = arena._range.base
    del arena
    assert len(driver.read(address, GRANULE)) == GRANULE
    driver.calls.clear()
    del view
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuMemUnmap")  # kernels may still be running
    assert driver.leaks() == []


def test_an_arena_dropped_while_its_thread_is_at_work(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    gate = Gate(driver, "cuMemCreate")
    arena.prepare(4)
    assert gate.waiting.acquire(timeout=60)
    del arena
    gate.allowed.release(8)
    wait_until(lambda: driver.leaks() == [])


def test_a_collection_in_the_thread_ends_the_arena_only_after_its_work(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    dropped = threading.Event()

    def collect(name: str) -> None:
        if name == "cuMemCreate" and threading.current_thread().name == "pagetide-extents":
            assert dropped.wait(60)
            gc.collect()  # as it may happen at any line of the thread, with the pool locked

    driver.before = collect
    arena.prepare(3)
    cycle = [arena]
    cycle.append(cycle)
    thread = arena._range.pool._thread
    del arena, cycle
    dropped.set()
    thread.join(60)
    assert driver.calls.count("cuMemCreate") == 3
    gc.collect()
    assert driver.leaks() == []


def test_failures_that_nobody_read_keep_nothing_alive(driver: FakeCudaDriver) -> None:
    arena = make(driver, ready=8)
    arena.map([0, 1])
    driver.faults = [Fault(0, ALWAYS, INVALID_VALUE, "cuMemCreate"), Fault(0, ALWAYS, INVALID_VALUE, "cuMemUnmap")]
    prepare(arena, 2)
    driver.faults.append(Fault(0, ALWAYS, INVALID_VALUE, "cuMemMap"))
    with suppress(DriverError):
        arena.map([2])
    driver.faults.clear()
    gc.collect()
    gc.disable()  # by counting references alone
    try:
        del arena
        assert driver.leaks() == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ("cuCtxSynchronize", []),
        ("cuMemUnmap", ["address ranges", "handles", "mappings"]),
        ("cuMemRelease", ["handles"]),
        ("cuStreamDestroy", ["streams"]),
        ("cuMemAddressFree", ["address ranges"]),
        ("cuDevicePrimaryCtxRelease", ["contexts"]),
    ],
)
def test_a_range_that_cannot_end_says_so_and_lets_go_of_all_it_can(
    monkeypatch: pytest.MonkeyPatch, failing: str, left: list[str]
) -> None:
    driver, said = FakeCudaDriver(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: said.append(failure.exc_value))
    arena = make(driver)
    arena.map([0, 1])
    driver.faults = [Fault(0, ALWAYS, INVALID_VALUE, failing)]
    del arena
    (error,) = said
    chain = []
    while error is not None:
        chain.append(error.call)
        error = error.__context__
    assert chain[-1] == failing
    assert [leak.split(":")[0] for leak in driver.leaks()] == left
