"""What only an arena of host memory can get wrong. The contract of every arena: test_arena_contract.py."""

from __future__ import annotations

import errno
import mmap
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagetide.allocator import host_arena
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena, preferred_granule
from pagetide.monitor.host_memory import free_host_bytes

EXTENT = 16 * mmap.PAGESIZE
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs Linux's madvise")


@pytest.mark.parametrize(("num_extents", "extent_bytes"), [(0, EXTENT), (4, 0), (4, 1000), (4, mmap.PAGESIZE + 1)])
def test_sizes_that_are_no_pages_are_refused(num_extents: int, extent_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        HostArena(num_extents, extent_bytes)


def _resident(arena: HostArena) -> int:
    """RSS of the arena's own range, in bytes."""
    return _in_smaps(arena, "Rss")


def _in_smaps(arena: HostArena, figure: str) -> int:
    start, total, inside = arena._base, 0, False
    end = start + arena.num_extents * arena.extent_bytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) < end and int(head[2], 16) > start
        elif inside and line.startswith(f"{figure}:"):
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


@contextmanager
def _child(extent_bytes: int, num_extents: int) -> Iterator[subprocess.Popen[str]]:
    """A process with an arena that does what it is told, a line at a time (`_tell`)."""
    program = f"""
import sys
from pagetide.allocator.host_arena import HostArena
arena = HostArena({num_extents}, {extent_bytes})
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
    command = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None and child.stdout is not None
    print(line, file=child.stdin, flush=True)
    assert child.stdout.readline() == "done\n"


@linux
@pytest.mark.parametrize("extent_bytes", [4 * MIB, MIB], ids=["huge", "small"])
def test_memory_comes_and_goes_as_seen_from_outside(extent_bytes: int) -> None:
    num_extents = 256 * MIB // extent_bytes

    def resident() -> int:
        return int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    with _child(extent_bytes, num_extents) as child:
        before = resident()
        _tell(child, f"arena.map(range({num_extents}))")
        assert 256 * MIB <= resident() - before < 264 * MIB
        _tell(child, f"arena.unmap(range(0, {num_extents}, 2))")
        assert 128 * MIB <= resident() - before < 136 * MIB
        _tell(child, "arena.close()")
        assert resident() - before < 8 * MIB


def _charge() -> int | None:
    """Bytes that this process' memory cgroup is charged with; None where that cannot be read."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = ("memory", "usage_in_bytes") if controllers else ("", "current")
            for directory in (Path("/sys/fs/cgroup", root, path.lstrip("/")), Path("/sys/fs/cgroup", root)):
                if (file := directory / f"memory.{name}").exists():
                    return int(file.read_text())
    return None


@linux
@pytest.mark.parametrize("extent_bytes", [4 * MIB, MIB], ids=["huge", "small"])
def test_the_charge_of_the_cgroup_goes_up_with_map_and_down_with_unmap(extent_bytes: int) -> None:
    if _charge() is None:
        pytest.skip("no memory cgroup whose charge can be read")
    num_extents = 256 * MIB // extent_bytes
    seen = []
    with _child(extent_bytes, num_extents) as child:
        for _ in range(50):  # others in the cgroup take and give memory too
            charges = [_charge()]
            for act in ("map", "unmap"):
                _tell(child, f"arena.{act}(range({num_extents}))")
                charges.append(_charge())
            seen.append((charges[1] - charges[0], charges[2] - charges[1]))
            if all(abs(moved) // MIB in range(240, 272) for moved in seen[-1]) and seen[-1][1] < 0 < seen[-1][0]:
                return
    pytest.fail(f"the charge never moved by the 256 MiB mapped and unmapped: {seen}")


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
    pytest.importorskip("torch")
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
def test_a_slice_outlives_the_arena() -> None:
    program = """
import gc
from pagetide.allocator.host_arena import HostArena
arena = HostArena(64, 1 << 20)
arena.map(range(64))
view = arena.buffer[1 << 20 : 33 << 20].cast("q")
view[-1] = 7
arena.close()
del arena
gc.collect()
filler = [bytearray(1 << 20) for _ in range(64)]
assert view[-1] == view[0] == 0
view[0] = 5
assert view[0] == 5
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
    """Notes how far another thread counted while memory came and went."""

    counter = 0
    moved_by_map = 0
    moved_by_unmap = 0

    def _populate(self, start: int, length: int) -> None:
        before = self.counter
        super()._populate(start, length)
        self.moved_by_map += self.counter - before

    def _give_back(self, start: int, length: int) -> None:
        before = self.counter
        super()._give_back(start, length)
        self.moved_by_unmap += self.counter - before


@pytest.fixture
def polite_threads() -> Iterator[None]:
    """A thread runs only when the one before it lets go of the interpreter by itself, as a foreign call may."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@linux
@pytest.mark.usefixtures("polite_threads")
def test_other_threads_run_while_memory_comes_and_goes() -> None:
    # 4 KiB pages, since 512 MiB of huge ones may come and go faster than a busy machine wakes a thread
    arena = Watched(1024, MIB // 2)
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            arena.counter += 1
            time.sleep(0)  # lets go

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(20):
            arena.map(range(1024))
            arena.unmap(range(1024))
            if arena.moved_by_map and arena.moved_by_unmap:
                break
    finally:
        stop.set()
        thread.join()
    assert arena.moved_by_map
    assert arena.moved_by_unmap


# --- huge pages

huge_pages = pytest.mark.skipif(
    not host_arena._HUGE_PAGE or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this kernel has no transparent huge pages",
)


def _huge(arena: HostArena) -> int:
    """Bytes of the arena's own range that are huge pages."""
    return _in_smaps(arena, "AnonHugePages")


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
