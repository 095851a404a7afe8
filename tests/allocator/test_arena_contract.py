"""Every arena against one contract (tests/arena_contract.py): host memory, and CUDA's over a driver without a device.

The contract on a real device is in tests/gpu/test_cuda_arena.py.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest
from arena_contract import ArenaContract, Rig
from fake_cuda_driver import GRANULE, FakeCudaDriver

from pagetide.allocator.arena import Arena, runs
from pagetide.allocator.cuda_arena import CudaArena
from pagetide.allocator.host_arena import HostArena

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


class TestCudaArena(ArenaContract):
    @pytest.fixture(params=[0, 3 * GRANULE, 1 << 20], ids=["nothing ready", "three ready", "all ready"])
    def rig(self, request: pytest.FixtureRequest) -> Iterator[Rig]:
        driver = FakeCudaDriver()

        def make(num_extents: int, budget=None) -> CudaArena:
            return CudaArena(num_extents, GRANULE, driver=driver, budget=budget, ready_limit_bytes=request.param)

        def address(arena: CudaArena, extent: int) -> int:
            return arena._range.base + extent * GRANULE

        yield Rig(
            GRANULE,
            make,
            lambda arena, extent: driver.read(address(arena, extent), GRANULE),
            lambda arena, extent, value: driver.write(address(arena, extent), bytes([value]) * GRANULE),
        )
        gc.collect()
        assert driver.violations == []
        assert driver.leaks() == []


@pytest.mark.parametrize(
    ("extents", "merged"),
    [([], []), ([3], [(3, 4)]), ([1, 2, 5], [(1, 3), (5, 6)]), ([0, 1, 2], [(0, 3)]), ([0, 2], [(0, 1), (2, 3)])],
)
def test_neighbours_are_one_run(extents: list[int], merged: list[tuple[int, int]]) -> None:
    assert list(runs(extents)) == merged
