"""A process without pagetide that allocates and frees memory at random, in pieces: CUDA memory, or host memory."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.processes import Worker

GRAIN = 2 << 20


class AllocatingProcess(Worker):
    """The process. It rests until `begin`."""

    def __init__(self, cuda: bool, most_bytes: int, seed: int) -> None:
        super().__init__(_serve, cuda, most_bytes, seed)
        ready = self.receive()
        if isinstance(ready, str):
            raise RuntimeError(f"the external process cannot take memory: {ready}")

    def begin(self, piece_bytes: int, pause_s: float) -> None:
        """From now on move to random amounts, a piece of up to so many bytes at a time, pauses of up to twice `pause_s`."""
        self.send((piece_bytes, pause_s))

    def end(self) -> int:
        """Return everything. The allocations that failed."""
        self.send(None)
        return int(self.receive())


def _serve(pipe: Connection, cuda: bool, most_bytes: int, seed: int) -> None:
    try:
        take, give = _cuda() if cuda else (_take_host, mmap.mmap.close)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    with suppress(EOFError):
        settings = pipe.recv()
        pipe.send(_vary(pipe, take, give, most_bytes, random.Random(seed), *settings))
        pipe.recv()


def _vary(
    pipe: Connection, take: Callable[[int], Any], give: Callable[[Any], None], most_bytes: int, rng: random.Random,
    piece_bytes: int, pause_s: float,
) -> int:  # fmt: skip
    failures = 0
    pieces: list[tuple[Any, int]] = []
    held = target = 0
    while not pipe.poll(rng.random() * 2 * pause_s):
        if abs(target - held) < GRAIN:
            target = rng.randrange(0, most_bytes)
        if target > held:
            size = max(GRAIN, min(rng.randint(piece_bytes // 8, piece_bytes), target - held) // GRAIN * GRAIN)
            try:
                pieces.append((take(size), size))
            except Exception:
                failures += 1
                target = held
                continue
            held += size
        elif pieces:
            piece, size = pieces.pop(rng.randrange(len(pieces)))
            give(piece)
            held -= size
            if held < target:
                target = held
        else:
            target = 0
    pipe.recv()
    while pieces:
        give(pieces.pop()[0])
    return failures


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
