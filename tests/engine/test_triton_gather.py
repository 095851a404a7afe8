"""Block copies by a kernel, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_checks import check_gather

from pagetide.engine.attention.triton_gather import gather_blocks, scatter_blocks


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.uint8, torch.int32, torch.int64]),
    ids=st.lists(st.integers(0, 11), unique=True, max_size=6),
    items=st.one_of(st.integers(1, 40), st.sampled_from([2048, 4100])),
    beyond=st.sampled_from([0, 1, 3, 8, 64]),
    offset=st.sampled_from([0, 0, 1, 8]),
    num_programs=st.integers(1, 9),
)
def test_blocks_go_out_and_come_back(dtype, ids, items, beyond, offset, num_programs) -> None:
    check_gather(dtype, ids, items, beyond, offset, num_programs)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "said"),
    [
        (((4, 8), (2, 1), (2, 8)), (torch.uint8, torch.int64, torch.uint8), r"blocks are rows \[num_blocks, items\]"),
        (((4, 8), (2,), (2, 8)), (torch.uint8, torch.int64, torch.int32), "both be of one of"),
        (((4, 8), (2,), (2, 8)), (torch.float32, torch.int64, torch.float32), "both be of one of"),
        (((4, 8), (2,), (2, 8)), (torch.uint8, torch.int32, torch.uint8), "ids must be int64, got torch.int32"),
        (
            ((4, 8), (2,), (3, 8)),
            (torch.uint8, torch.int64, torch.uint8),
            "2 blocks of 8 items do not fill a buffer of 3 x 8",
        ),
        (((4, 8), (2,), (2, 9)), (torch.uint8, torch.int64, torch.uint8), "of 2 x 9"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, dtypes, said: str) -> None:
    rows, ids, packed = (torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(ValueError, match=said):
        gather_blocks(rows, ids, packed)
    with pytest.raises(ValueError, match=said):
        scatter_blocks(packed, ids, rows)


def test_items_that_are_no_neighbours_are_refused() -> None:
    rows, ids = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="neighbours"):
        gather_blocks(rows, ids, torch.zeros(4, 2, dtype=torch.uint8).T)
