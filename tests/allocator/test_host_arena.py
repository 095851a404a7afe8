"""What only an arena of host memory can get wrong. The contract of every arena: test_arena_contract.py."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from broker_rig import resident_bytes, resident_within

from pagetide.allocator import host_arena
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena, preferred_granule
from pagetide.common.host_memory import free_host_bytes

EXTENT = 16 * mmap.PAGESIZE
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs Linux's madvise")


@pytest.mark.parametrize(("num_extents", "extent_bytes"), [(0, EXTENT), (4, 0), (4, 1000), (4, mmap.PAGESIZE + 1)])
def test_sizes_that_are_no_pages_are_refused(num_extents: int, extent_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        HostArena(num_extents, extent_bytes)


def _resident(arena: HostArena) -> int:
    """RSS of the arena's own range, in bytes."""
    return resident_within(os.getpid(), arena._base, arena.num_extents * arena.extent_bytes)


# whole huge pages; huge pages with a rest, at every alignment; pages
@linux
@pytest.mark.parametrize("extent_bytes", [4 * MIB, 5 * MIB + 4096, MIB], ids=["huge", "mixed", "small"])
@pytest.mark.parametrize("debug", [False, True])
def test_memory_comes_with_map_and_goes_with_unmap_to_the_byte(extent_bytes: int, debug: bool) -> None:
    arena = HostArena(12, extent_bytes, debug=debug)
    before = resident_bytes(os.getpid())
    assert _resident(arena) == 0
    arena.map([1, 2, 3, 7])
    assert _resident(arena) == arena.mapped_bytes == 4 * extent_bytes
    assert resident_bytes(os.getpid()) - before > 3 * extent_bytes
    arena.map([0, 4])
    arena.unmap([2, 7])
    assert _resident(arena) == arena.mapped_bytes == 4 * extent_bytes
    arena.close()
    assert _resident(arena) == 0
    assert resident_bytes(os.getpid()) - before < extent_bytes


@linux
def test_a_reserved_range_may_be_far_larger_than_the_memory() -> None:
    arena = HostArena(1 << 20, MIB)  # 1 TiB
    arena.map([(1 << 20) - 1])
    arena.buffer[-1] = 1
    assert _resident(arena) == MIB


class Refusing(HostArena):
    """The system has no memory left for the second run of extents."""

    code = errno.ENOMEM
    calls = 0

    def _populate(self, start: int, length: int) -> None:
        self.calls += 1
        super()._populate(start, length // 2 if self.calls == 2 else length)
        if self.calls == 2:
            raise OSError(self.code, "as told")


@linux
@pytest.mark.parametrize("debug", [False, True])
def test_a_half_done_map_is_rolled_back(debug: bool) -> None:
    arena = Refusing(9, 4 * MIB, budget=lambda: 64 * MIB, debug=debug)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.map([0, 4, 5, 8])
    assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (16 * MIB, 64 * MIB)
    assert arena.mapped_extents == frozenset()
    assert _resident(arena) == 0
    arena.map([0, 4, 5, 8])
    assert _resident(arena) == 16 * MIB


@linux
def test_another_failure_is_not_called_a_lack_of_memory() -> None:
    arena = Refusing(4, 4 * MIB)
    arena.code = errno.EIO
    with pytest.raises(OSError, match="as told"):
        arena.map([0, 2])
    assert _resident(arena) == 0


class Stubborn(HostArena):
    """The system refuses to take the memory at one address back."""

    refused: int | None = None

    def _give_back(self, start: int, length: int) -> None:
        if start == self.refused:
            raise OSError(errno.EIO, "as told")
        super()._give_back(start, length)


@linux
def test_what_could_not_be_unmapped_is_still_mapped_and_can_be_unmapped_later() -> None:
    arena = Stubborn(8, MIB)
    arena.map(range(8))
    arena.refused = arena._base + 4 * MIB
    with pytest.raises(OSError, match="as told"):
        arena.unmap([0, 1, 4, 6])
    assert arena.mapped_extents == {2, 3, 4, 5, 6, 7}
    assert _resident(arena) == arena.mapped_bytes == 6 * MIB
    arena.refused = None
    arena.unmap([4, 6])
    arena.close()
    assert _resident(arena) == 0


class OldKernel(HostArena):
    """The kernel does not know how to populate."""

    _populate_advice = 0x7FFF


@linux
def test_a_kernel_without_populate_is_touched() -> None:
    arena = OldKernel(4, MIB)
    arena.map([1, 2])
    assert _resident(arena) == 2 * MIB
    assert bytes(arena.buffer[MIB : 3 * MIB]) == bytes(2 * MIB)


@linux
@pytest.mark.parametrize(
    ("act", "faults"),
    [
        ("a.buffer[0]", True),
        ("a.buffer[PAGESIZE] = 1", False),
        ("a.unmap([1]); a.buffer[PAGESIZE] = 1", True),
        ("a.unmap([1]); a.map([1]); a.buffer[PAGESIZE] = 1", False),
        ("b = a.buffer; a.close(); b[PAGESIZE]", True),
    ],
)
def test_debug_makes_unmapped_extents_fault(act: str, faults: bool) -> None:
    setup = """
from mmap import PAGESIZE
from pagetide.allocator.host_arena import HostArena
a = HostArena(4, PAGESIZE, debug=True)
a.map([1])
"""
    run = subprocess.run([sys.executable, "-c", setup + act], capture_output=True, timeout=120)
    assert run.returncode == (-signal.SIGSEGV if faults else 0)


@linux
def test_dropping_the_last_view_gives_the_addresses_back() -> None:
    arena = HostArena(4, MIB)
    base, view = arena._base, arena.buffer[:MIB]
    arena.close()
    mapped = lambda: f"{base:x}-" in Path("/proc/self/maps").read_text()  # noqa: E731
    assert mapped()
    del arena, view
    assert not mapped()


huge_pages = pytest.mark.skipif(
    not host_arena._HUGE_PAGE or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this kernel has no transparent huge pages",
)


def _huge(arena: HostArena) -> int:
    """Bytes of the arena's own range that are huge pages."""
    return resident_within(os.getpid(), arena._base, arena.num_extents * arena.extent_bytes, "AnonHugePages")


@huge_pages
@pytest.mark.parametrize(
    ("pages", "rest", "expected"),
    [(2, 0, 6), (3, mmap.PAGESIZE, 6), (1, -mmap.PAGESIZE, 0)],  # of three extents: a huge page never straddles two
    ids=["whole", "with a rest", "smaller"],
)
def test_huge_pages_lie_where_whole_ones_fit_into_an_extent(pages: int, rest: int, expected: int) -> None:
    huge = host_arena._HUGE_PAGE
    arena = HostArena(8, pages * huge + rest)
    for _ in range(20):  # the kernel gives them as long as it has some in one piece
        arena.map([1, 2, 5])
        if _huge(arena) >= expected * huge:
            break
        arena.unmap([1, 2, 5])
    assert expected * huge <= _huge(arena) <= _resident(arena) == 3 * arena.extent_bytes
    if not expected:
        assert _huge(arena) == 0


@huge_pages
def test_large_pools_are_made_of_huge_pages_and_small_ones_of_pages() -> None:
    huge = host_arena._HUGE_PAGE
    assert preferred_granule(512 * huge) == preferred_granule(10000 * huge) == huge
    assert preferred_granule(512 * huge - 1) == preferred_granule(0) == mmap.PAGESIZE


def test_without_huge_pages_every_pool_is_made_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "_HUGE_PAGE", 0)
    assert preferred_granule(1 << 50) == mmap.PAGESIZE


@linux
def test_the_default_budget_refuses_more_than_there_is() -> None:
    free = free_host_bytes()
    extents = 2 * free // (64 * MIB)
    arena = HostArena(extents, 64 * MIB)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.map(range(extents))
    assert 0 < refusal.value.free_bytes < refusal.value.asked_bytes == extents * 64 * MIB
    assert _resident(arena) == 0
