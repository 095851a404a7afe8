"""The host tier's extents, over a driver without a device: locked as they come, one ready ahead, nothing kept at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_cuda_driver import INVALID_VALUE, FakeCudaDriver, Fault

from pagetide.allocator.cuda_driver import CudaDevice
from pagetide.allocator.errors import DriverError, OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.host_extents import HostExtents

EXTENT = 64 << 10


class Rig:
    """Eight extents, and a driver that locks them once it is told to."""

    def __init__(self) -> None:
        self.driver = FakeCudaDriver()
        self.device = CudaDevice(self.driver, 0)
        self.arena = HostArena(8, EXTENT, budget=lambda: self.free_bytes)
        self.free_bytes = 1 << 30
        self.thread = ThreadPoolExecutor(1)
        self.extents = HostExtents(self.arena, self.arena._base, self.thread)

    def locked(self) -> set[int]:
        """Extents, as the driver knows them; what is being prepared too, once it is."""
        self.extents._settle()
        assert set(self.driver.locked.values()) <= {EXTENT}
        return {(address - self.arena._base) // EXTENT for address in self.driver.locked}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.thread.shutdown()
    rig.extents.close()
    rig.extents.close()
    rig.device.close()
    assert rig.arena.mapped_bytes == 0
    assert rig.driver.violations == [] and rig.driver.leaks() == []


def test_without_a_device_nothing_is_locked_or_ahead(rig: Rig) -> None:
    rig.extents.take([0, 3])
    assert rig.extents.mapped == {0, 3} and rig.locked() == set()
    assert rig.extents.mapped_bytes == 2 * EXTENT and not rig.extents.all_locked
    rig.extents.give_back(1)
    assert rig.extents.mapped == {0}


def test_one_extent_is_ready_ahead(rig: Rig) -> None:
    rig.extents.lock_for(rig.device)
    assert rig.extents.mapped == set(), "nothing before it is needed"
    rig.extents.take([0, 1])
    assert rig.locked() == rig.extents.mapped == {0, 1, 2} and rig.extents.all_locked
    rig.extents.take([0, 1])
    assert rig.locked() == {0, 1, 2}, "the ready one is not in use yet"
    calls = rig.driver.calls.count("cuMemHostRegister")
    rig.extents.take([1, 2])
    assert rig.locked() == {0, 1, 2, 3}
    assert rig.driver.calls.count("cuMemHostRegister") == calls + 1, "only the next one is taken"
    rig.extents.take([5])
    assert rig.locked() == {0, 1, 2, 3, 5}, "one is ready still"
    rig.extents.take(range(8))
    assert rig.locked() == rig.extents.mapped == set(range(8)), "there are no more"
    rig.extents.take([7])
    rig.extents.give_back(2 * EXTENT)
    assert rig.locked() == rig.extents.mapped == set(range(6)), "the highest go, unlocked before"
    rig.extents.give_back(1 << 30)
    assert rig.locked() == rig.extents.mapped == set()
    rig.extents.take([0])
    assert rig.locked() == {0, 1}


def test_it_is_prepared_beside_the_caller(rig: Rig) -> None:
    held, caller = threading.Event(), threading.get_ident()
    threads: list[int] = []

    def before(name: str) -> None:
        if name == "cuMemHostRegister":
            threads.append(threading.get_ident())
            if len(threads) == 2:
                assert held.wait(60)

    rig.driver.before = before
    rig.extents.lock_for(rig.device)
    rig.extents.take([0])
    assert rig.extents.all_locked, "what is in use is; nobody waits for the other"
    held.set()
    assert rig.locked() == {0, 1}
    assert threads[0] == caller != threads[1]


def test_a_host_without_memory_ahead_is_asked_again_in_need(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.extents.lock_for(rig.device)
    rig.free_bytes = EXTENT
    rig.driver.before = lambda name: setattr(rig, "free_bytes", 0)
    with caplog.at_level(logging.INFO):
        rig.extents.take([0])
        assert rig.locked() == {0}
    assert "no memory is taken ahead for the host tier" in caplog.text
    with pytest.raises(OutOfDeviceMemory):
        rig.extents.take([0, 1])
    assert rig.extents.mapped == {0}
    rig.driver.before, rig.free_bytes = lambda name: None, 1 << 30
    rig.extents.take([1])
    assert rig.locked() == {0, 1, 2}


def test_memory_goes_even_where_the_driver_fails_at_the_end(rig: Rig) -> None:
    rig.extents.lock_for(rig.device)
    rig.extents.take([0])
    assert rig.locked() == {0, 1}
    rig.driver.faults.append(Fault(0, 0, INVALID_VALUE, "cuMemHostUnregister"))
    with pytest.raises(DriverError, match="cuMemHostUnregister"):
        rig.extents.close()
    assert rig.extents.mapped_bytes == 0
