"""Checkpoints with other parts than text: the tokens of the whole model, and what is read, held and counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from multimodal import greedy_tokens, saved_multimodal
from safetensors.torch import load_file, save_file
from transformers import core_model_loading
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pagetide import LLM, SamplingParams
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.loading.text_model import auto_class

pytestmark = pytest.mark.usefixtures("no_network")
PROMPTS = [[5, 9, 17, 3, 44], [(31 * i * i + 7 * i) % 140 + 2 for i in range(18)]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "device": "cpu", "kv_memory": "4MiB", "block_size": 4, "max_seqs": 4, "max_step_tokens": 16, "max_model_len": 64,
    "share": False,
}  # fmt: skip


# The second has modules beside the decoder that text passes through, and a tower whose library is not installed.
@pytest.mark.parametrize(
    ("kind", "other_parts"),
    [
        ("mistral3", ["model.multi_modal_projector", "model.vision_tower"]),
        ("gemma3n", ["model.audio_tower", "model.vision_tower"]),
    ],
)
def test_text_alone_is_read_and_gives_the_tokens_of_the_whole_model(
    kind: str, other_parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_multimodal(kind, tmp_path)
    read: list[int] = []
    materialize = core_model_loading._materialize_copy

    def count(tensor: Any, *args: Any, **options: Any) -> torch.Tensor:
        read.append(math.prod(tensor.get_shape()))
        return materialize(tensor, *args, **options)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", count)
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    assert list(checkpoint.unused_modules) == other_parts
    assert all(model.get_submodule(part.rpartition(".")[0])._modules[part.rpartition(".")[2]] is None for part in other_parts)
    parts = {name: p.numel() for name, p in whole.named_parameters()}
    text = {name: size for name, size in parts.items() if not name.startswith(tuple(other_parts))}
    assert {name: p.numel() for name, p in model.named_parameters()} == text
    assert sum(read) == sum(text.values()) < sum(tensor.num_elements for tensor in checkpoint.weights.tensors())
    assert checkpoint.weights_bytes(torch.float32) == 4 * sum(text.values())
    with LLM(tmp_path, **ENGINE) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [output.token_ids for output in outputs] == [greedy_tokens(whole, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama4", "Llama4ForCausalLM"),
        ("qwen3_5", "Qwen3_5ForCausalLM"),
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("emu3", "Emu3ForConditionalGeneration"),  # Emu3ForCausalLM finds no tensor in files of the whole
    ],
)
def test_a_class_of_the_text_alone_has_to_know_the_names_in_files(kind: str, name: str) -> None:
    config = CONFIG_MAPPING[kind]()
    assert auto_class(config)._model_mapping[type(config)].__name__ == name


def test_heads_that_predict_further_tokens_are_neither_read_nor_counted(tmp_path: Path, caplog: Any) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    layer = {name.replace("layers.0.", "layers.3."): t.clone() for name, t in stored.items() if "layers.0." in name}
    more = {**layer, "model.layers.3.eh_proj.weight": torch.ones(48, 96), "mtp.norm.weight": torch.ones(48)}
    save_file({**stored, **more}, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    assert {tensor.name for tensor in checkpoint.tensors} == stored.keys()
    assert dict(checkpoint.unread) == {name: name for name in more}
    assert checkpoint.weights_bytes(torch.float32) == sum(tensor.nbytes for tensor in stored.values())
    load_model(checkpoint, torch.device("cpu"), torch.float32)
    assert "no place for" not in caplog.text
