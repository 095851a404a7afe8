"""Torch's kernels for quantized weights on a CUDA device: products, and a model that is loaded with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engines import prompts
from families import VOCAB, tiny
from stored_checkpoints import AWQ, of_compressed, opened, oracle

from benchmarks import stored_weights as made
from pagetide import LLM, SamplingParams
from pagetide.engine.layers.torch_linears import TorchLinear, obstacle
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.stored_model import stored_sizes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SQUARE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
FORMATS = {
    "int4": (AWQ | {"group_size": 32}, made.awq(32), 0.06),
    "fp8": (of_compressed("float", 8), made.float_quantized(1, 0, dtype=torch.bfloat16), 0.15),
}


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_products_agree_on_this_device(form: str) -> None:
    """Int4 from Ampere on, fp8 from Ada or Hopper on."""
    least = (8, 0) if form == "int4" else (9, 0)
    for group in (32, 64, 128, 256) if form == "int4" else (0,):
        why = obstacle(form, 256, 1024, group, torch.bfloat16, CUDA)
        assert why is None or torch.cuda.get_device_capability(CUDA) < least, why


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_keeps_its_weights_packed(form: str, tmp_path: Path) -> None:
    config, packer, bound = FORMATS[form]
    if why := obstacle(form, 256, 256, 32 if form == "int4" else 0, torch.bfloat16, CUDA):
        pytest.skip(why)
    plain_folder = made.checkpoint(tiny("llama", **SQUARE), tmp_path / "packed", config, packer)
    checkpoint = opened(tmp_path / "packed")
    model = load_model(checkpoint, CUDA, torch.bfloat16, pack=True)
    layers = [one for one in model.modules() if isinstance(one, TorchLinear)]
    assert len(layers) == len(checkpoint.stored)
    held = sum(one.packed.num_bytes for one in layers)
    held += sum(one.nbytes for one in {id(one): one for one in model.parameters()}.values() if not one.is_meta)
    assert held <= stored_sizes(checkpoint, CUDA, torch.bfloat16).weights_bytes
    ids = torch.tensor(prompts([40], VOCAB))
    with torch.inference_mode():
        right, out = oracle(plain_folder)(ids).logits, model(ids.to(CUDA)).logits.cpu()
    assert (out - right).norm() <= bound * right.norm()


def test_an_engine_with_graphs(tmp_path: Path) -> None:
    made.checkpoint(tiny("llama", **SQUARE), tmp_path / "packed", AWQ | {"group_size": 32}, made.awq(32))
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    said = []
    for graphs in (True, False):
        with LLM(tmp_path / "packed", device="cuda:0", dtype="bfloat16", kv_memory=1 << 26, cuda_graphs=graphs) as llm:
            said.append([one.outputs[0].token_ids for one in llm.generate([[5, 9, 3]], greedy)])
    assert said[0] == said[1]
