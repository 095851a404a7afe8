"""Swaps between device blocks and pinned host memory, compared with one large pinned copy: the host pool, and each method.

Blocks lie in random order on both sides, as after hours of work. `chosen` is the host pool as the engine uses it: every swap by
the way that was the fastest when it was measured at the start. The others are those ways, each by itself; `staged`, which
the engine does not have, gathers on the device, with one large copy behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure
from pagetide.allocator.cuda_driver import CudaBindings, CudaDevice
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.execution.host_extents import HostExtents
from pagetide.engine.execution.host_pool import NONE, HostPool

from .bandwidth import FROM_HOST, TO_HOST
from .bench import MIB, Bench
from .report import Item, Note, Unmeasured, bounded, unmeasured

BLOCK_KIB = (2048, 1024, 512, 256, 128, 64, 32, 16)  # the first is that of the model: the bounds are for it
TINY_KIB = (256, 64)
CHOSEN = "chosen"
PROGRAMS = (32, 132)  # of the kernel, beside those that it has in the engine

SwapMethod = tuple[
    str, Callable[[], float], Callable[[], float]
]  # name; what swaps all blocks out, and in, and tells the seconds


def measure(bench: Bench) -> Iterator[Item]:
    """Shares of the large copies, out and in, by the size of a block."""
    if TO_HOST not in bench.known or FROM_HOST not in bench.known:
        yield unmeasured("swap_out", "the large copies were not measured")
        yield unmeasured("swap_in", "the large copies were not measured")
        return
    for number, block_kib in enumerate(BLOCK_KIB if bench.clock.cuda else TINY_KIB):
        if bench.left_s < 5:
            yield Unmeasured(f"swap, blocks of {block_kib} KiB", "no time left")
            continue
        yield from _of_size(bench, block_kib, is_models=number == 0)
        bench.clean()
        if number == 0 and bench.clock.cuda:
            yield from _pinning(bench)


def _of_size(bench: Bench, block_kib: int, is_models: bool) -> Iterator[Item]:
    num_blocks = bench.scale.pinned_bytes // 2 // (block_kib << 10)
    geometry = _geometry(block_kib)
    device = bench.clock.device
    arena = TensorArena(geometry.extents_for_blocks(2 * num_blocks + 1), geometry.extent_bytes, device)
    storage = Storage(geometry, arena, device)
    storage.blocks.random_(256)
    rng = np.random.default_rng(bench.seed)
    blocks = (1 + rng.permutation(2 * num_blocks)[:num_blocks]).astype(np.int32)
    num_bytes = num_blocks * geometry.payload_bytes
    pool = HostPool(geometry, (geometry.extents_for_blocks(num_blocks + 1) + 1) * geometry.extent_bytes)
    try:
        pool.measure(storage, num_blocks)
        if bench.clock.cuda:
            yield Note(f"swap, blocks of {block_kib:,} KiB: what was chosen at the start", _told(pool))
        for way, out, back in _ways(bench, pool, storage, blocks):
            for direction, run, large in (("out", out, TO_HOST), ("in", back, FROM_HOST)):
                name = f"swap {direction}, blocks of {block_kib:,} KiB, {way}: share of one large copy"
                try:
                    run()
                    shares = [num_bytes / s / 1e9 / bench.known[large] for s in (run() for _ in range(5))]
                except Exception as problem:
                    bench.clock.synchronize()
                    why = f"{type(problem).__name__}: {problem}"
                    yield Unmeasured(name, why)
                    if is_models and way == CHOSEN:
                        yield unmeasured(f"swap_{direction}", why)
                    continue
                yield Figure(name, statistics.median(shares), "x", better="higher", samples=shares)
                if is_models and way == CHOSEN:
                    yield bounded(f"swap_{direction}", statistics.median(shares), shares)
    finally:
        pool.close()


def _ways(bench: Bench, pool: HostPool, storage: Storage, blocks: np.ndarray) -> Iterator[SwapMethod]:
    slots = (1 + np.random.default_rng(bench.seed + 1).permutation(len(blocks))).astype(np.int32)

    def swapped(*given: np.ndarray) -> float:
        began = time.perf_counter()
        pool.swap(storage, *given)
        return time.perf_counter() - began

    yield CHOSEN, lambda: swapped(blocks, slots), lambda: swapped(NONE, NONE, slots, blocks)
    if not bench.clock.cuda:
        return
    fastest = pool.fastest
    assert fastest is not None

    def by(way: Any, *given: np.ndarray) -> float:
        fastest.out = fastest.back = ((1, way),)
        took = swapped(*given)
        if fastest.out[0][1] is not way:
            raise RuntimeError("it failed, and the first way made its copies: the log says why")
        return took

    for way in fastest.ways:
        yield way.name, partial(by, way, blocks, slots), partial(by, way, NONE, NONE, slots, blocks)
    if any(way.name == "kernel" for way in fastest.ways):  # else the host's memory is not where a kernel looks for it
        yield from _kernel_ways(bench, pool, storage, blocks, slots)


def _kernel_ways(
    bench: Bench, pool: HostPool, storage: Storage, blocks: np.ndarray, slots: np.ndarray
) -> Iterator[SwapMethod]:
    """The kernel with other numbers of programs, and behind a gather on the device."""
    from pagetide.engine.attention.triton_gather import copy_blocks

    clock, payload = bench.clock, storage.geometry.payload_bytes
    rows, host = storage.blocks, pool.storage.blocks
    packed = clock.host_buffer(len(blocks) * payload).view(len(blocks), payload)
    near = torch.empty_like(packed, device=clock.device)
    every = np.arange(len(blocks))
    out, back = _ids(clock.device, blocks, slots), _ids(clock.device, slots, blocks)
    to_near, from_near = _ids(clock.device, blocks, every), _ids(clock.device, every, blocks)

    def once(*calls: Callable[[], Any]) -> Callable[[], float]:
        return lambda: clock.host_seconds(lambda: [call() for call in calls], 1)[0]

    for programs in PROGRAMS:
        yield (
            f"kernel of {programs} programs",
            once(lambda n=programs: copy_blocks(rows, host, out, payload, num_programs=n)),
            once(lambda n=programs: copy_blocks(host, rows, back, payload, num_programs=n)),
        )
    yield (
        "staged",
        once(
            lambda: copy_blocks(rows, near, to_near, payload, num_programs=528),
            lambda: packed.copy_(near, non_blocking=True),
        ),
        once(
            lambda: near.copy_(packed, non_blocking=True),
            lambda: copy_blocks(near, rows, from_near, payload, num_programs=528),
        ),
    )


def _ids(device: torch.device, sources: np.ndarray, targets: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([sources, targets]).astype(np.int64)).to(device)


def _pinning(bench: Bench) -> Iterator[Item]:
    """What it takes to have another extent of host memory, and how long a launch takes at most while a thread does that."""
    extent_bytes, num = 32 * MIB, 8
    small = torch.zeros(256, device=bench.clock.device)

    def longest(busy: Callable[[], bool]) -> float:
        worst = 0.0
        while busy():
            began = time.perf_counter()
            small.add_(1)
            worst = max(worst, time.perf_counter() - began)
        bench.clock.synchronize()
        return 1e3 * worst

    arena = HostArena(num, extent_bytes)
    context = CudaDevice(CudaBindings(), torch.cuda.current_device())
    with ThreadPoolExecutor(1) as thread:
        extents = HostExtents(arena, torch.frombuffer(arena.buffer, dtype=torch.uint8).data_ptr(), thread)
        extents.lock_for(context)
        try:
            turns = iter(range(20_000))
            quiet = longest(lambda: next(turns, None) is not None)
            took, beside = [], []
            for extent in range(num - 1):
                began = time.perf_counter()
                extents.take([extent])  # the first itself; the others are ready. The next is prepared in the thread
                if extent == 0:
                    began = time.perf_counter()
                prepared = thread.submit(lambda: None)  # behind it
                beside.append(longest(lambda job=prepared: not job.done()))
                took.append(1e3 * (time.perf_counter() - began))
        finally:
            extents.close()
            context.close()
    yield Figure("taking and pinning 32 MiB of host memory, in a thread", statistics.median(took), "ms", samples=took)
    yield Figure("... the longest launch of a small kernel meanwhile", max(beside), "ms", samples=beside)
    yield Figure("... and the longest of 20,000 without", quiet, "ms")


def _told(pool: HostPool) -> tuple[str, ...]:
    assert pool.fastest is not None
    return tuple(
        f"{direction}: " + ", ".join(f"from {least:,} pieces on by {way.name}" for least, way in chosen)
        for direction, chosen in (("out", pool.fastest.out), ("in", pool.fastest.back))
    )


def _geometry(block_kib: int) -> Geometry:
    """Blocks of 16 tokens with so many bytes, without padding between them."""
    per_layer = min(64, block_kib)
    shape = LayerShape(per_layer // 8 or 1, 128, 128)
    geometry = Geometry((shape,) * (block_kib // per_layer), 16, "float16").with_extents(32 * MIB)
    assert geometry.block_stride == geometry.payload_bytes == block_kib << 10
    return geometry
