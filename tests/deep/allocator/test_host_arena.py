"""Host memory that a tensor outlives, and that comes and goes beside other threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pagetide.allocator.host_arena import HostArena

MIB = 1 << 20


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs Linux's madvise")


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
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120).returncode == 0


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
