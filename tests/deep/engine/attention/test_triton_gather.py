"""Block copies by a kernel, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from hypothesis import given
from hypothesis import strategies as st
from triton_checks import check_copies

from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage
from pagetide.engine.attention.triton_gather import copy_blocks
from pagetide.engine.execution.swap_methods import CopyKernel

U8, I64 = torch.uint8, torch.int64
BEYOND = st.sampled_from([0, 1, 3, 8, 64])


@given(
    ids=st.lists(st.integers(0, 11), unique=True, max_size=6),
    num_bytes=st.one_of(st.integers(1, 40), st.sampled_from([2048, 4100, 8 * 4100])),
    beyond=st.tuples(BEYOND, BEYOND),
    offset=st.sampled_from([0, 0, 1, 8]),
    num_programs=st.integers(1, 9),
)
def test_blocks_go_to_another_pool_and_come_back(ids, num_bytes, beyond, offset, num_programs) -> None:
    check_copies(ids, num_bytes, beyond, offset, num_programs)


def test_nothing_is_copied_of_blocks_without_bytes() -> None:
    rows = torch.ones(2, 4, dtype=U8)
    copy_blocks(rows, rows * 2, torch.tensor([[0], [1]]), 0)
    assert (rows == 1).all()


@pytest.mark.parametrize(
    ("shapes", "dtypes", "num_bytes", "said"),
    [
        (((4,), (4, 8), (2, 1)), (U8, U8, I64), 8, r"blocks are bytes, uint8 \[num_blocks, bytes\], got torch.uint8 \(4,\)"),
        (((4, 8), (4, 8), (2, 1)), (U8, torch.int8, I64), 8, r"got torch.int8 \(4, 8\)"),
        (((4, 8), (4, 9), (2, 1)), (U8, U8, I64), 9, "9 bytes of a block cannot be copied: it has 8"),
        (((4, 8), (4, 8), (2, 1)), (U8, U8, torch.int32), 8, r"ids must be int64 \[2, n\] in one piece, got torch.int32"),
        (((4, 8), (4, 8), (3, 1)), (U8, U8, I64), 8, r"got torch.int64 \(3, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, dtypes, num_bytes: int, said: str) -> None:
    source, target, ids = (torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(ValueError, match=said):
        copy_blocks(source, target, ids, num_bytes)


def test_bytes_and_ids_in_pieces_are_refused() -> None:
    rows, ids = torch.zeros(4, 8, dtype=U8), torch.zeros(2, 3, dtype=I64)
    with pytest.raises(ValueError, match="neighbours"):
        copy_blocks(rows, rows.T, ids, 4)
    with pytest.raises(ValueError, match="in one piece"):
        copy_blocks(rows, rows, ids.T.contiguous().T, 4)


def test_a_swap_by_the_kernel_copies_these_blocks_and_no_others() -> None:
    geometry = Geometry((LayerShape(3, 5, 7),), 16, "float16").with_extents(8 << 10)
    arenas = [HostArena(geometry.extents_for_blocks(20), geometry.extent_bytes) for _ in range(2)]
    for arena in arenas:
        arena.map(range(arena.num_extents))
    device, host = (Storage(geometry, arena) for arena in arenas)
    device.blocks.random_(256)
    for blocks, slots in ([3, 4, 9], [19, 1, 2]), ([1, 2, 3], [5, 6, 7]):
        host.blocks.fill_(0xAB)
        CopyKernel(device.device).copy(host, device, host.pieces_from(device, np.array(blocks), np.array(slots)))
        expected = torch.full_like(host.blocks, 0xAB)
        expected[slots, : geometry.payload_bytes] = device.blocks[blocks, : geometry.payload_bytes]
        assert torch.equal(host.blocks, expected)
