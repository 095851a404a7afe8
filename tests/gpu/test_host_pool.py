"""The host tier's copies from and to a CUDA device: exact, out of locked pages, and beside what the device computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import tiny

from pagetide.cache.geometry import Geometry
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.host_pool import NONE, HostPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_blocks_go_out_and_come_back_beside_a_computation() -> None:
    geometry = Geometry.from_config(tiny("llama").config, block_size=16, dtype="float16").with_extents(1 << 20)
    arena = TensorArena(geometry.extents_for_blocks(64), geometry.extent_bytes, "cuda")
    storage = Storage(geometry, arena, "cuda")
    patterns = torch.randint(0, 256, (8, geometry.payload_bytes), dtype=torch.uint8)
    for block, pattern in enumerate(patterns, 1):
        storage.block_bytes(block).copy_(pattern)
    pool = HostPool(geometry, geometry.bytes_for_blocks(40))
    blocks, slots, back = ids(*range(1, 9)), ids(3, 4, 5, 9, 8, 7, 1, 2), ids(*range(40, 48))
    busy = torch.randn(2048, 2048, device="cuda")
    copies = pool.begin(storage, blocks, slots, NONE, NONE)
    for _ in range(20):
        busy = busy @ busy / 2048
    swapped = copies.wait()
    assert not len(swapped.lost_slots)
    assert pool._pinned == pool._arena.mapped_extents, "the pages are locked"
    storage.clear(blocks)
    timed = pool.swap(storage, NONE, NONE, slots, back)
    assert timed.num_timed == 8 and timed.seconds > 0
    for block, pattern in zip(back.tolist(), patterns, strict=True):
        assert torch.equal(storage.block_bytes(block).cpu(), pattern)
    assert not storage.block_bytes(1).any() and not storage.block_bytes(48).any(), "nothing else is written"
    assert torch.isfinite(busy).all()
    pool.give_back(pool.mapped_bytes)
    assert not pool._pinned and pool.mapped_bytes == 0
    pool.close()
    arena.close()


def test_a_copy_is_measured_at_the_start_and_leaves_nothing() -> None:
    geometry = Geometry.from_config(tiny("llama").config, block_size=16, dtype="float16").with_extents(1 << 20)
    arena = TensorArena(geometry.extents_for_blocks(64), geometry.extent_bytes, "cuda")
    pool = HostPool(geometry, geometry.bytes_for_blocks(40))
    measured = pool.measure(Storage(geometry, arena, "cuda"), 60)
    assert measured is not None and measured > 1e6
    assert pool.mapped_bytes == 0 and not pool._pinned
    pool.close()
    arena.close()
