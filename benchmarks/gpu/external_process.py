"""A process without pagetide that allocates and frees memory at random, in pieces: CUDA memory, or host memory."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

GRAIN = 2 << 20


@dataclass
class ProcessCounts:
    """What an external process did."""

    taken: int = 0
    returned: int = 0
    failures: int = 0
    most_bytes: int = 0


class AllocatingProcess:
    """The process. It rests until `begin`; `held_bytes` is what it has now."""

    def __init__(self, cuda: bool, most_bytes: int, seed: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._held: Any = spawn.Value("q", 0)
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, self._held, cuda, most_bytes, seed), daemon=True)
        self.process.start()
        ready = self._pipe.recv()
        if isinstance(ready, str):
            raise RuntimeError(f"the external process cannot take memory: {ready}")

    @property
    def held_bytes(self) -> int:
        return int(self._held.value)

    def begin(self, piece_bytes: int, pause_s: float) -> None:
        """From now on move to random amounts, a piece of up to so many bytes at a time, pauses of up to twice `pause_s`."""
        self._pipe.send((piece_bytes, pause_s))

    def end(self) -> ProcessCounts:
        """Return everything; what was done."""
        self._pipe.send(None)
        counts: ProcessCounts = self._pipe.recv()
        return counts

    def close(self) -> None:
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, held: Synchronized[int], cuda: bool, most_bytes: int, seed: int) -> None:
    try:
        take, give = _cuda() if cuda else (_take_host, _give_host)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    try:
        settings = pipe.recv()
        pipe.send(_breathe(pipe, held, take, give, most_bytes, random.Random(seed), *settings))
        pipe.recv()
    except EOFError:
        return


def _breathe(
    pipe: Connection, held: Synchronized[int], take: Callable[[int], Any], give: Callable[[Any], None], most_bytes: int,
    rng: random.Random, piece_bytes: int, pause_s: float,
) -> ProcessCounts:  # fmt: skip
    counts = ProcessCounts()
    pieces: list[tuple[Any, int]] = []
    target = 0
    while not pipe.poll(rng.random() * 2 * pause_s):
        if abs(target - held.value) < GRAIN:
            target = rng.randrange(0, most_bytes)
        if target > held.value:
            size = max(GRAIN, min(rng.randint(piece_bytes // 8, piece_bytes), target - held.value) // GRAIN * GRAIN)
            try:
                pieces.append((take(size), size))
            except Exception:
                counts.failures += 1
                target = held.value
                continue
            held.value += size
            counts.taken += 1
            counts.most_bytes = max(counts.most_bytes, held.value)
        elif pieces:
            piece, size = pieces.pop(rng.randrange(len(pieces)))
            give(piece)
            held.value -= size
            counts.returned += 1
            if held.value < target:
                target = held.value
        else:
            target = 0
    pipe.recv()
    while pieces:
        give(pieces.pop()[0])
    held.value = 0
    return counts


def _cuda() -> tuple[Callable[[int], Any], Callable[[Any], None]]:
    """By the driver alone: a context, and plain allocations."""
    from pagetide.allocator.cuda_driver import CudaBindings, CudaDevice

    driver = CudaBindings()
    device = CudaDevice(driver, 0)

    def take(num_bytes: int) -> int:
        with device.current():
            return int(driver.call("cuMemAlloc", num_bytes)[0])

    def give(address: int) -> None:
        with device.current():
            driver.call("cuMemFree", address)

    return take, give


def _take_host(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def _give_host(memory: mmap.mmap) -> None:
    memory.close()
    time.sleep(0)
