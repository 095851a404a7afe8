"""A small step by each Triton kernel, in Triton's interpreter; tests/deep has random ones."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from triton_checks import Case, check_attention, check_copies

from pagetide.engine.attention.triton_base import Tiling
from pagetide.engine.attention.triton_kernel import TritonKernel


@pytest.mark.parametrize(("stored", "v_in_k"), [(None, False), (torch.int8, False), (torch.float8_e4m3fn, True)])
def test_decodes_in_splits_and_chunks(stored: torch.dtype | None, v_in_k: bool) -> None:
    """Written, attended to in several splits that are merged, beside a padding row, and a chunk in tiles."""
    kernel = TritonKernel(decode=Tiling(16, 16, 4, 3), prefill=Tiling(16, 32, 4, 3), num_sms=132)
    chunks = ((1, 200), (1, 0), (9, 40))
    check_attention(kernel, Case(chunks, group=3, window=50, softcap=5.0, sinks=True, stored=stored, v_in_k=v_in_k))
    check_attention(kernel, Case(chunks[:2], torch.float32, stored=stored, v_in_k=v_in_k))
    assert max(kernel._plan.splits.values())[0] > 1


def test_blocks_are_copied() -> None:
    check_copies([3, 0, 7], 41, (1, 8), 1, 2)
