"""oneDNN in programs of their own: the primitives that it makes, and an engine on a processor with AVX2 alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagetide.engine.layers.onednn import SIZES, available

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no packed linear layers")


def run(program: str, **environ: str) -> str:
    """What the program prints, without native kernels. oneDNN and torch read their settings as they are loaded."""
    environ = os.environ | {"PAGETIDE_NATIVE": "0", "OMP_NUM_THREADS": "1"} | environ
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_no_more_primitives_than_the_sizes_of_each_shape():
    program = """
import torch
from torch import nn
from pagetide.engine.layers.packing import pack_linears
model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512), nn.Linear(512, 256)).requires_grad_(False)
assert pack_linears(model) == 3
with torch.inference_mode():
    for rows in range(1, 700):
        model(torch.zeros(rows, 512))
"""
    lines = run(program, ONEDNN_VERBOSE="profile_create").splitlines()
    made = [line for line in lines if "create:cache_miss" in line and ",inner_product," in line]
    assert len(made) == 2 * len(SIZES) and any("create:cache_hit" in line for line in lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_serves_half_precision_with_avx2_alone(dtype):
    """Packing such weights raises there, so that layers stay plain: transformers' own tokens."""
    program = f"""
import torch
from transformers import AutoModelForCausalLM
from pagetide import LLM, SamplingParams
from pagetide.engine.demo_model import __file__ as demo
model = AutoModelForCausalLM.from_pretrained(demo.rpartition("/")[0], dtype=torch.{dtype}).eval()
ids = [5, 17, 99, 4, 63]
right = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, 5:].tolist()
with LLM("demo", dtype="{dtype}", device="cpu", kv_memory="1MiB", share=False) as llm:
    found = llm.generate([ids], SamplingParams(temperature=0, max_new_tokens=6))[0].token_ids
assert list(found) == right[:len(found)] and found, (found, right)
print("the same")
"""
    assert "the same" in run(program, ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="AVX2")
