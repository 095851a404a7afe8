"""Swaps between the device's blocks and pinned host memory, against one large pinned copy: copies, and the gather kernel.

Blocks lie in random order on both sides, as after hours of work. `copies` is the engine's own host pool; `kernel` has the
device write to, or read from, pinned host memory; `staged` has it gather on the device, with one large copy behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.host_pool import NONE, HostPool

from .bandwidth import FROM_HOST, TO_HOST
from .bench import MIB, Bench
from .report import Item, Unmeasured, bounded, unmeasured

BLOCK_KIB = (2048, 1024, 512, 256, 128, 64, 32, 16)  # the first is that of the model: the bounds are for it
TINY_KIB = (256, 64)


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
    found: dict[tuple[str, str], Figure] = {}
    for way, out, back in _ways(bench, storage, blocks):
        for direction, run, large in (("out", out, TO_HOST), ("in", back, FROM_HOST)):
            name = f"swap {direction}, blocks of {block_kib:,} KiB, {way}: share of one large copy"
            try:
                run()
                shares = [num_bytes / s / 1e9 / bench.known[large] for s in (run() for _ in range(5))]
            except Exception as problem:
                bench.clock.synchronize()
                yield Unmeasured(name, f"{type(problem).__name__}: {problem}")
                continue
            figure = Figure(name, statistics.median(shares), "x", better="higher", samples=shares)
            found[direction, way] = figure
            yield figure
    if is_models:
        for direction in ("out", "in"):
            best = max((f for (d, _), f in found.items() if d == direction), key=lambda f: f.value, default=None)
            key = f"swap_{direction}"
            yield (
                unmeasured(key, "no way of swapping worked") if best is None else bounded(key, best.value, best.samples)
            )


def _ways(
    bench: Bench, storage: Storage, blocks: np.ndarray
) -> Iterator[tuple[str, Callable[[], float], Callable[[], float]]]:
    """Name, and what swaps all blocks out and in and tells the seconds."""
    geometry = storage.geometry
    pool = HostPool(geometry, (geometry.extents_for_blocks(len(blocks) + 1) + 1) * geometry.extent_bytes)
    slots = (1 + np.random.default_rng(bench.seed + 1).permutation(len(blocks))).astype(np.int32)

    def copied(*given: np.ndarray) -> float:
        began = time.perf_counter()
        pool.swap(storage, *given)
        return time.perf_counter() - began

    try:
        yield "copies", lambda: copied(blocks, slots), lambda: copied(NONE, NONE, slots, blocks)
    finally:
        pool.close()
    if not bench.clock.cuda:
        return
    yield from _kernel_ways(bench, storage, blocks)


def _kernel_ways(
    bench: Bench, storage: Storage, blocks: np.ndarray
) -> Iterator[tuple[str, Callable[[], float], Callable[[], float]]]:
    try:
        from pagetide.engine.attention.triton_gather import gather_blocks, scatter_blocks
    except ImportError:
        return  # attention says why
    clock, payload = bench.clock, storage.geometry.payload_bytes
    rows = storage.blocks.view(torch.int64)
    ids = torch.from_numpy(blocks.astype(np.int64)).to(clock.device)
    host = clock.host_buffer(len(blocks) * payload).view(len(blocks), payload).view(torch.int64)
    near = torch.empty_like(host, device=clock.device)

    def once(*calls: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            return clock.host_seconds(lambda: [call() for call in calls], 1)[0]

        return run

    for programs in (32, 64, 132):
        yield (
            f"kernel, {programs} programs",
            once(lambda n=programs: gather_blocks(rows, ids, host, num_programs=n)),
            once(lambda n=programs: scatter_blocks(host, ids, rows, num_programs=n)),
        )
    yield (
        "staged",
        once(lambda: gather_blocks(rows, ids, near, num_programs=528), lambda: host.copy_(near, non_blocking=True)),
        once(lambda: near.copy_(host, non_blocking=True), lambda: scatter_blocks(near, ids, rows, num_programs=528)),
    )


def _geometry(block_kib: int) -> Geometry:
    """Blocks of 16 tokens with so many bytes, without padding between them."""
    per_layer = min(64, block_kib)
    shape = LayerShape(per_layer // 8 or 1, 128, 128)
    geometry = Geometry((shape,) * (block_kib // per_layer), 16, "float16").with_extents(32 * MIB)
    assert geometry.block_stride == geometry.payload_bytes == block_kib << 10
    return geometry
