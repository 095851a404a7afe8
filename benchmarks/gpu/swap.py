"""Swaps between device blocks and pinned host memory by the host pool, compared with one large pinned copy.

Blocks lie in random order on both sides, as after hours of work. Every swap goes by the way that was the fastest when the host
pool measured them at its start, as in an engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.figures import Figure
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.execution.host_pool import NONE, HostPool

from .bandwidth import FROM_HOST, TO_HOST
from .bench import MIB, Bench, timed
from .parts import Item, Note, Unmeasured, bounded, unmeasured

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
    pool = HostPool(geometry, (geometry.extents_for_blocks(num_blocks + 1) + 1) * geometry.extent_bytes)
    try:
        pool.measure(storage, num_blocks)
        if bench.clock.cuda:
            yield Note(f"swap, blocks of {block_kib:,} KiB: what was chosen at the start", _told(pool))
        slots = (1 + np.random.default_rng(bench.seed + 1).permutation(num_blocks)).astype(np.int32)
        for direction, given, large in (("out", (blocks, slots), TO_HOST), ("in", (NONE, NONE, slots, blocks), FROM_HOST)):
            pool.swap(storage, *given)
            seconds = [timed(partial(pool.swap, storage, *given)) for _ in range(5)]
            shares = [num_bytes / s / 1e9 / bench.known[large] for s in seconds]
            name = f"swap {direction}, blocks of {block_kib:,} KiB: share of one large copy"
            yield Figure(name, statistics.median(shares), "x", better="higher", samples=shares)
            if is_models:
                yield bounded(f"swap_{direction}", statistics.median(shares), shares)
    finally:
        pool.close()


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
