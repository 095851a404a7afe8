"""Norms, rotary embeddings and gates by Triton on a CUDA device, and a model with them."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():  # before anything has kernels: there they are interpreted
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")

from engines import TinyEngine, plain, prompts
from families import FAMILIES, VOCAB, tiny
from row_kernel_checks import check_gates, check_norms, check_rotations

from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import triton_kernels
from pagetide.scheduler.request import Sampling

pytestmark = pytest.mark.gpu

TOKENS = torch.tensor([31, 7, 49, 4, 23])


def test_norms() -> None:
    check_norms("cuda", [(2, 3, 130), (300, 4096), (3, 20000)])


def test_rotations() -> None:
    check_rotations("cuda")


def test_gates() -> None:
    check_gates("cuda", [(3, 70), (1, 200, 14336)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_fused_and_give_the_same_tokens(family: str, dtype: torch.dtype) -> None:
    """As many modules as on a CPU; tokens in float32, and logits in bfloat16, where rounding may choose another token."""
    model, inputs = tiny(family).to("cuda", dtype), prompts([1, 15, 17, 100, 300], VOCAB)
    expected = plain(model, inputs, 20) if dtype == torch.float32 else None
    before = model(input_ids=TOKENS.cuda()[None]).logits
    counts = fuse(model, TOKENS.cuda(), triton_kernels(torch.device("cuda", 0))).counts
    assert counts["norms"] or family in ("gpt2", "opt", "gpt_neox"), counts
    if family in ("llama", "qwen3", "gemma3_text"):
        assert min(counts.values()) > 0, counts
    after = model(input_ids=TOKENS.cuda()[None]).logits
    assert float((after - before).norm() / before.norm()) < (1e-4 if dtype == torch.float32 else 5e-2)
    if expected is not None:
        engine = TinyEngine(model, usable=200, block_size=16, max_chunk_tokens=70, device="cuda")
        assert engine.generate(inputs, Sampling(20)) == expected
