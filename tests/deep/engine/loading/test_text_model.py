"""Every kind of checkpoint with other parts than text: from its folder, quantized, divided, and as a loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal import MULTIMODAL, greedy_tokens, saved_multimodal
from safetensors.torch import load_file, save_file

from pagetide import LLM, SamplingParams, UnsupportedModel, native
from pagetide.cache.geometry import Geometry
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.division import Division
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.loading.quantized_model import quantized_bytes

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 17, 3, 44], [(31 * i * i + 7 * i) % 140 + 2 for i in range(18)]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "device": "cpu", "kv_memory": "4MiB", "block_size": 4, "max_seqs": 4, "max_step_tokens": 16, "max_model_len": 64,
    "share": False,
}  # fmt: skip
REFUSED = {"paligemma": "lets a token see later ones"}


def generated(model: Any, **options: Any) -> list[list[int]]:
    with LLM(model, **ENGINE, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_text_gives_the_tokens_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole = saved_multimodal(kind, tmp_path)
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    assert checkpoint.unused_modules
    model = load_model(checkpoint, CPU, torch.float32)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}  # tied ones once; some buffers too
    assert checkpoint.weights_bytes(torch.float32) == sum(held.values())
    assert not any(name.startswith(checkpoint.unused_modules) for name, _ in model.named_modules())
    assert {tensor.name for tensor in checkpoint.tensors} | {*checkpoint.unread} == {
        tensor.name for tensor in checkpoint.weights.tensors()
    }
    if kind in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[kind]):
            generated(tmp_path)
        return
    expected = [greedy_tokens(whole, prompt, 8) for prompt in PROMPTS]
    assert generated(tmp_path) == expected
    assert generated(whole) == expected, "a loaded model, which stays whole"
    assert all(whole.get_submodule(part) is not None for part in checkpoint.unused_modules)


def test_the_part_of_a_whole_that_continues_text(tmp_path: Path) -> None:
    """As Qwen-Omni is published: a thinker beside a talker, under names of their own."""
    thinker = saved_multimodal("qwen2_5_omni_thinker", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"talker.model.norm.weight": torch.ones(8)}, file, {"format": "pt"})
    config.write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": json.loads(config.read_text())}))
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    assert "talker.model.norm.weight" in checkpoint.unread
    assert checkpoint.unused_modules == ("model.audio_tower", "model.visual")
    assert generated(tmp_path) == [greedy_tokens(thinker, prompt, 8) for prompt in PROMPTS]


@pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing is quantized")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl", "kimi_k25"])
def test_quantized_text(kind: str, quantization: Any, tmp_path: Path) -> None:
    whole = saved_multimodal(kind, tmp_path, hidden_size=256, intermediate_size=256)
    with LLM(tmp_path, **ENGINE, quantization=quantization) as llm:
        (output,) = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    with LLM(whole, **ENGINE, quantization=quantization) as llm:
        (same,) = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert output.token_ids == same.token_ids
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    sizes = {name: p.nbytes for name, p in whole.named_parameters()}
    text = sum(size for name, size in sizes.items() if not name.startswith(checkpoint.unused_modules))
    assert quantized_bytes(checkpoint, quantization, torch.float32) < text < sum(sizes.values())


@pytest.mark.parametrize("kind", ["mistral3", "internvl"])
def test_shards_hold_text_alone(kind: str, tmp_path: Path) -> None:
    whole = saved_multimodal(kind, tmp_path)
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    geometry = Geometry.from_config(checkpoint.config, block_size=4, dtype="float32")
    division = Division.of(checkpoint, 2, geometry.layers)
    assert not any(name.startswith(checkpoint.unused_modules) for name in division.parameters)
    assert division.weights_bytes(torch.float32) < checkpoint.weights_bytes(torch.float32)
    assert generated(tmp_path, tensor_parallel_size=2) == [greedy_tokens(whole, prompt, 8) for prompt in PROMPTS]
