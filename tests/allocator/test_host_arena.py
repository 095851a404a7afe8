"""The contract of an arena, for every arena in ARENAS, and what only host memory can get wrong."""

from __future__ import annotations

import errno
import mmap
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetide.allocator.arena import Arena
from pagetide.allocator.errors import BlockMisuse, OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.monitor.host_memory import free_host_bytes

EXTENT = 16 * mmap.PAGESIZE
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs Linux's madvise")


@dataclass(frozen=True)
class Rig:
    """How the contract's tests make an arena, and read and write its memory. Another arena adds its own to ARENAS."""

    make: Callable[..., Arena]  # make(num_extents, budget=None): extents of EXTENT bytes
    read: Callable[[Arena, int], bytes]  # all bytes of one mapped extent
    fill: Callable[[Arena, int, int], None]  # every byte of one mapped extent


def _read(arena: Arena, extent: int) -> bytes:
    return bytes(memoryview(arena.buffer)[extent * EXTENT : (extent + 1) * EXTENT])  # type: ignore[arg-type]


def _fill(arena: Arena, extent: int, value: int) -> None:
    memory = memoryview(arena.buffer)  # type: ignore[arg-type]
    memory[extent * EXTENT : (extent + 1) * EXTENT] = bytes([value]) * EXTENT


def _host(**options: Any) -> Rig:
    return Rig(lambda n, budget=None: HostArena(n, EXTENT, budget=budget, **options), _read, _fill)


ARENAS = {"host": _host(), "host, debug": _host(debug=True)}


@pytest.fixture(params=ARENAS.values(), ids=ARENAS.keys())
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.param


# --- the contract


def test_a_new_arena_is_a_range_without_memory(rig: Rig) -> None:
    arena = rig.make(8)
    assert (arena.num_extents, arena.extent_bytes) == (8, EXTENT)
    assert (arena.mapped_extents, arena.mapped_bytes) == (frozenset(), 0)


def test_mapped_extents_hold_what_is_written(rig: Rig) -> None:
    arena = rig.make(8)
    arena.map([6, 2, 3])
    assert arena.mapped_extents == {2, 3, 6}
    assert arena.mapped_bytes == 3 * EXTENT
    for extent in (2, 3, 6):
        assert rig.read(arena, extent) == bytes(EXTENT)
        rig.fill(arena, extent, extent)
    assert [set(rig.read(arena, extent)) for extent in (2, 3, 6)] == [{2}, {3}, {6}]


def test_unmapping_leaves_the_neighbours_and_comes_back_as_zeros(rig: Rig) -> None:
    arena = rig.make(4)
    arena.map(range(4))
    for extent in range(4):
        rig.fill(arena, extent, 0xA5)
    arena.unmap([1, 2])
    assert arena.mapped_extents == {0, 3}
    assert set(rig.read(arena, 0)) == set(rig.read(arena, 3)) == {0xA5}
    arena.map([2, 1])
    assert rig.read(arena, 1) == rig.read(arena, 2) == bytes(EXTENT)
    assert set(rig.read(arena, 0)) == set(rig.read(arena, 3)) == {0xA5}


def test_addresses_do_not_move(rig: Rig) -> None:
    arena = rig.make(4)
    buffer = arena.buffer
    arena.map([0, 1])
    rig.fill(arena, 1, 7)
    arena.unmap([0])
    arena.map([2, 0])
    assert arena.buffer is buffer
    assert set(rig.read(arena, 1)) == {7}


def test_a_map_beyond_the_budget_maps_nothing_and_says_both_numbers(rig: Rig) -> None:
    arena = rig.make(8, budget=lambda: 3 * EXTENT - 1)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.map([0, 4, 5])
    assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (3 * EXTENT, 3 * EXTENT - 1)
    assert arena.mapped_extents == frozenset()
    arena.map([4, 5])
    assert arena.mapped_extents == {4, 5}


@pytest.mark.parametrize("extents", [[8], [-1], [1, 1], [0, 3]], ids=["beyond", "negative", "twice", "mapped"])
def test_mapping_wrongly_is_refused_and_changes_nothing(rig: Rig, extents: list[int]) -> None:
    arena = rig.make(8)
    arena.map([3])
    with pytest.raises(BlockMisuse):
        arena.map(extents)
    assert arena.mapped_extents == {3}


@pytest.mark.parametrize("extents", [[8], [-1], [3, 3], [3, 4]], ids=["beyond", "negative", "twice", "unmapped"])
def test_unmapping_wrongly_is_refused_and_changes_nothing(rig: Rig, extents: list[int]) -> None:
    arena = rig.make(8)
    arena.map([3])
    rig.fill(arena, 3, 9)
    with pytest.raises(BlockMisuse):
        arena.unmap(extents)
    assert arena.mapped_extents == {3}
    assert set(rig.read(arena, 3)) == {9}


def test_no_extents_are_no_work(rig: Rig) -> None:
    arena = rig.make(2, budget=lambda: 0)
    arena.map([])
    arena.unmap([])
    assert arena.mapped_extents == frozenset()


def test_a_closed_arena_holds_nothing_and_refuses(rig: Rig) -> None:
    arena = rig.make(4)
    arena.map([0, 1])
    arena.close()
    arena.close()
    assert (arena.mapped_extents, arena.mapped_bytes) == (frozenset(), 0)
    for call in (lambda: arena.map([2]), lambda: arena.unmap([0]), lambda: arena.buffer):
        with pytest.raises(BlockMisuse, match="closed"):
            call()


@settings(deadline=None, max_examples=30)
@given(st.data())
@pytest.mark.parametrize("name", ARENAS)
def test_any_sequence_agrees_with_a_dictionary(name: str, data: st.DataObject) -> None:
    rig, arena, model = ARENAS[name], ARENAS[name].make(12), dict[int, int]()
    for value in range(1, 10):
        extents = data.draw(st.lists(st.integers(0, 11), unique=True))
        if data.draw(st.booleans()):
            extents = [extent for extent in extents if extent not in model]
            arena.map(extents)
            assert all(rig.read(arena, extent) == bytes(EXTENT) for extent in extents)
            for extent in extents:
                rig.fill(arena, extent, value)
            model |= dict.fromkeys(extents, value)
        else:
            extents = [extent for extent in extents if extent in model]
            arena.unmap(extents)
            for extent in extents:
                del model[extent]
        assert arena.mapped_extents == model.keys()
        assert {extent: set(rig.read(arena, extent)) for extent in model} == {k: {v} for k, v in model.items()}
    arena.close()


# --- host memory


@pytest.mark.parametrize(("num_extents", "extent_bytes"), [(0, EXTENT), (4, 0), (4, 1000), (4, mmap.PAGESIZE + 1)])
def test_sizes_that_are_no_pages_are_refused(num_extents: int, extent_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        HostArena(num_extents, extent_bytes)


def _resident(arena: HostArena) -> int:
    """RSS of the arena's own range, in bytes."""
    start, total, inside = arena._base, 0, False
    end = start + arena.num_extents * arena.extent_bytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) < end and int(head[2], 16) > start
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def _process_resident() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Rss:\s+(\d+)", rollup, re.M)[1]) * 1024  # type: ignore[index]


# whole huge pages; huge pages with a rest, at every alignment; pages
@linux
@pytest.mark.parametrize("extent_bytes", [4 * MIB, 5 * MIB + 4096, MIB], ids=["huge", "mixed", "small"])
@pytest.mark.parametrize("debug", [False, True])
def test_memory_comes_with_map_and_goes_with_unmap_to_the_byte(extent_bytes: int, debug: bool) -> None:
    arena = HostArena(12, extent_bytes, debug=debug)
    before = _process_resident()
    assert _resident(arena) == 0
    arena.map([1, 2, 3, 7])
    assert _resident(arena) == arena.mapped_bytes == 4 * extent_bytes
    assert _process_resident() - before > 3 * extent_bytes
    arena.map([0, 4])
    arena.unmap([2, 7])
    assert _resident(arena) == arena.mapped_bytes == 4 * extent_bytes
    arena.close()
    assert _resident(arena) == 0
    assert _process_resident() - before < extent_bytes


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


class OldKernel(HostArena):
    """The kernel does not know how to populate."""

    _populate_advice = 0x7FFF


@linux
def test_a_kernel_without_populate_is_touched() -> None:
    arena = OldKernel(4, MIB)
    arena.map([1, 2])
    assert _resident(arena) == 2 * MIB
    assert bytes(arena.buffer[MIB : 3 * MIB]) == bytes(2 * MIB)


def _exit_code(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120).returncode


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
    assert _exit_code(setup + act) == (-signal.SIGSEGV if faults else 0)


@linux
def test_a_tensor_outlives_the_arena() -> None:
    program = """
import gc, torch
from pagetide.allocator.host_arena import HostArena
arena = HostArena(64, 1 << 20)
arena.map(range(64))
whole = torch.frombuffer(arena.buffer, dtype=torch.uint8)
view = whole[1 << 20 :].view(torch.float32).view(63, -1)
view.fill_(3.0)
arena.close()
del arena, whole
gc.collect()
filler = [bytearray(1 << 20) for _ in range(64)]  # something else would land where a closed mapping was
assert view.sum() == 0
view.fill_(5.0)
assert view.min() == 5.0
"""
    assert _exit_code(program) == 0


@linux
def test_dropping_the_last_view_gives_the_addresses_back() -> None:
    arena = HostArena(4, MIB)
    base, view = arena._base, arena.buffer[:MIB]
    arena.close()
    mapped = lambda: f"{base:x}-" in Path("/proc/self/maps").read_text()  # noqa: E731
    assert mapped()
    del arena, view
    assert not mapped()


class Watched(HostArena):
    """Notes how far another thread counted while memory was populated."""

    counter = 0
    moved = 0

    def _populate(self, start: int, length: int) -> None:
        before = self.counter
        super()._populate(start, length)
        self.moved = self.counter - before


@pytest.fixture
def polite_threads() -> Iterator[None]:
    """A thread runs only when the one before it lets go of the interpreter by itself, as a foreign call may."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@linux
@pytest.mark.usefixtures("polite_threads")
def test_other_threads_run_while_memory_comes() -> None:
    # 4 KiB pages, since 512 MiB of huge ones may come faster than a busy machine wakes a thread
    arena = Watched(1024, MIB // 2)
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            arena.counter += 1
            time.sleep(0)  # lets go

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(5):
            arena.map(range(1024))
            arena.unmap(range(1024))
            if arena.moved:
                break
    finally:
        stop.set()
        thread.join()
    assert arena.moved


# --- the budget


@linux
def test_the_default_budget_refuses_more_than_there_is() -> None:
    free = free_host_bytes()
    extents = 2 * free // (64 * MIB)
    arena = HostArena(extents, 64 * MIB)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.map(range(extents))
    assert 0 < refusal.value.free_bytes < refusal.value.asked_bytes == extents * 64 * MIB
    assert _resident(arena) == 0
