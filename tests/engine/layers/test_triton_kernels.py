"""Norms, rotary embeddings and gates by Triton, in its interpreter, against the native kernels' forms in plain torch."""

from __future__ import annotations

import torch
import triton_interpreter  # noqa: F401  before all that has kernels
from families import tiny
from row_kernel_checks import check_gates, check_norms, check_rotations

from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import triton_kernels

CPU = torch.device("cpu")


def test_norms() -> None:
    check_norms("cpu", [(5, 48), (2, 3, 130)])


def test_rotations() -> None:
    check_rotations("cpu")


def test_gates() -> None:
    check_gates("cpu", [(3, 70), (1, 2, 1100)])


def test_a_model_is_fused_without_packed_layers() -> None:
    model, tokens = tiny("qwen3"), torch.tensor([31, 7, 49, 4, 23])
    before = model(input_ids=tokens[None]).logits
    size = sum(one.nbytes for one in model.parameters())
    fused = fuse(model, tokens, triton_kernels(CPU))
    assert fused.counts == {"products": 6, "norms": 13, "mlps": 3, "rotations": 3}
    torch.testing.assert_close(model(input_ids=tokens[None]).logits, before, rtol=1e-4, atol=1e-4)
    assert sum(one.nbytes for one in model.parameters()) == size
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(storages.values()) == size, "no weight is held twice"
    fused.undo()
    torch.testing.assert_close(model(input_ids=tokens[None]).logits, before, rtol=1e-5, atol=1e-5)
