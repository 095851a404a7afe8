"""Every arena against one contract (tests/arena_contract.py): host memory, and CUDA's over a driver without a device,
alone and within a lease.

The contract on a real device is in tests/gpu/test_cuda_arena.py.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
from arena_contract import ArenaContract, Rig
from fake_cuda_driver import GRANULE, INVALID_VALUE, FakeCudaDriver, Fault
from monitors import wait_until

from pagetide.allocator.arena import Arena
from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.errors import DriverError
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.leased_arena import LeasedArena

PAGES = 16 * mmap.PAGESIZE


def _read(arena: Arena, extent: int) -> bytes:
    return bytes(memoryview(arena.buffer)[extent * PAGES : (extent + 1) * PAGES])  # type: ignore[arg-type]


def _fill(arena: Arena, extent: int, value: int) -> None:
    memory = memoryview(arena.buffer)  # type: ignore[arg-type]
    memory[extent * PAGES : (extent + 1) * PAGES] = bytes([value]) * PAGES


class TestHostArena(ArenaContract):
    @pytest.fixture(params=[False, True], ids=["plain", "debug"])
    def rig(self, request: pytest.FixtureRequest) -> Rig:
        return Rig(PAGES, lambda n, budget=None: HostArena(n, PAGES, budget=budget, debug=request.param), _read, _fill)


def _rig_of(driver: FakeCudaDriver, make: Any) -> Rig:
    """CUDA's arenas, each alone or within a lease."""

    def address(arena: Any, extent: int) -> int:
        return getattr(arena, "_arena", arena)._range.base + extent * GRANULE

    return Rig(
        GRANULE,
        make,
        lambda arena, extent: driver.read(address(arena, extent), GRANULE),
        lambda arena, extent, value: driver.write(address(arena, extent), bytes([value]) * GRANULE),
    )


class TestCudaArena(ArenaContract):
    @pytest.fixture(params=[0, 3 * GRANULE, 1 << 20], ids=["nothing ready", "three ready", "all ready"])
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Rig]:
        driver = FakeCudaDriver()

        def make(num_extents: int, budget=None) -> CudaArena:
            return CudaArena(num_extents, GRANULE, driver=driver, budget=budget, ready_limit_bytes=request.param)

        yield _rig_of(driver, make)
        gc.collect()
        wait_until(lambda: not driver.leaks(), "the end of what the arenas' threads are at")
        assert driver.violations == []


class Counting:
    """A lease that grants everything, and finds what is not counted: `check` runs before each call of the driver."""

    recall = None

    def __init__(self, driver: FakeCudaDriver) -> None:
        self.driver, self.lower, self.upper, self.wrong = driver, 0, 0, list[str]()

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        self.lower += lower_bytes
        self.upper += upper_bytes
        self.check("shift")

    def check(self, call: str) -> None:
        with self.driver._lock:
            taken = self.driver.taken_bytes
        if not self.lower <= taken <= self.upper:
            self.wrong.append(f"{call}: {taken} bytes exist, {self.lower} to {self.upper} are counted")


class TestLeasedArena(ArenaContract):
    """Of one arena at a time, or of several by one lease."""

    @pytest.fixture(params=[0, 3 * GRANULE], ids=["nothing ready", "three ready"])
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Rig]:
        driver = FakeCudaDriver()
        lease: Any = Counting(driver)
        driver.before = lease.check
        made: list[LeasedArena] = []

        def make(num_extents: int, budget=None) -> LeasedArena:
            options = {"driver": driver, "budget": budget, "ready_limit_bytes": request.param}
            made.append(LeasedArena(CudaArena(num_extents, GRANULE, **options), lease))
            return made[-1]

        yield _rig_of(driver, make)
        while made:
            made.pop().close()
        driver.before = lambda call: None
        gc.collect()
        assert (lease.lower, lease.upper, lease.wrong) == (0, 0, [])
        assert driver.violations == []
        assert driver.leaks() == []


def test_what_fails_within_a_lease_is_counted_as_it_is() -> None:
    driver = FakeCudaDriver()
    lease: Any = Counting(driver)
    driver.before = lease.check
    arena = LeasedArena(CudaArena(8, GRANULE, driver=driver, ready_limit_bytes=4 * GRANULE), lease)
    arena.map([0, 1, 2])
    for nth, call in ((1, "cuMemMap"), (0, "cuStreamSynchronize"), (1, "cuMemCreate")):
        driver._counts.clear()
        driver.faults = [Fault(nth, nth, INVALID_VALUE, call)]
        with pytest.raises(DriverError, match=call):
            arena.map([3, 4])
        assert (lease.lower, lease.upper) == (3 * GRANULE, 3 * GRANULE)
    driver._counts.clear()
    driver.faults = [Fault(0, 0, INVALID_VALUE, "cuMemUnmap")]
    with pytest.raises(DriverError, match="cuMemUnmap"):
        arena.unmap([1, 2])
    arena.trim()
    assert (lease.lower, lease.upper, arena.mapped_extents) == (2 * GRANULE, 2 * GRANULE, {0, 1})
    arena.close()
    assert (lease.lower, lease.upper, lease.wrong) == (0, 0, [])
