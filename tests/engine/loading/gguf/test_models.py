"""Configurations of GGUF files: what transformers has in `config.json`, recomputed from the metadata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES as TINY
from families import VOCAB, tiny
from gguf_files import quantize, write, write_model
from transformers import AutoConfig

from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import CheckpointError, ModelNotFound, UnsupportedModel
from pagetide.engine.loading.checkpoint import Checkpoint, read_config
from pagetide.engine.loading.gguf.file import read_gguf
from pagetide.engine.loading.gguf.models import FAMILIES, config_of
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import resolve_model
from pagetide.engine.memory.estimate import estimate

UNSAID = {"transformers_version", "architectures", "dtype", "_name_or_path", "rope_parameters", "pad_token_id", "eos_token_id",
          "bos_token_id", "use_cache", "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"}  # fmt: skip


def written(tmp_path: Path, family: str, more: dict[str, Any] | None = None, **over: Any) -> tuple[Any, Path]:
    model = tiny(family, **over)
    write_model(model, tmp_path / "m.gguf", lambda name, shape: "F32", more)
    return model.config, tmp_path / "m.gguf"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss"])
def test_configurations_are_those_of_the_models(family: str, tmp_path: Path) -> None:
    over = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 8} if family in ("llama", "qwen2") else {}
    if family.startswith("gemma"):
        over = {"query_pre_attn_scalar": TINY[family]["head_dim"]}
    right, path = written(tmp_path, family, **over)
    config = read_config(resolve_model(path))
    assert type(config) is type(right)
    for name, value in right.to_dict().items():
        if name not in UNSAID:
            assert (
                getattr(config, name) == pytest.approx(value) if isinstance(value, float) else getattr(config, name) == value
            ), name
    full, there = (one.rope_parameters.get("full_attention", one.rope_parameters) for one in (right, config))
    assert there["rope_theta"] == pytest.approx(full["rope_theta"]) and there["rope_type"] == full["rope_type"]


def with_factors(tmp_path: Path, tensors: dict[str, list[float]], more: dict[str, Any], family: str = "llama") -> Path:
    """A file of a model whose rotary embeddings are scaled by tensors."""
    _, path = written(tmp_path, family, more, head_dim=8, num_attention_heads=6)
    file, content = read_gguf(path), path.read_bytes()
    kept = {
        name: (one.type, np.frombuffer(content, np.uint8, one.num_bytes, one.offset).reshape(*one.shape[:-1], -1))
        for name, one in file.tensors.items()
    }
    for name, numbers in tensors.items():
        kept[name] = "F32", quantize(np.array(numbers, np.float32), "F32")
    return write(tmp_path / "scaled.gguf", file.metadata, kept)


def llama3(factor: float, original: int = 8192) -> list[float]:
    """What frequencies are divided by, as transformers computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original}  # fmt: skip
    config = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=6, head_dim=8, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return [(5e5 ** (-2 * i / 8)) / float(one) for i, one in enumerate(scaled)]


def test_scaling_of_llama3_is_found_in_its_factors(tmp_path: Path) -> None:
    for factor in (8.0, 32.0):
        path = with_factors(tmp_path, {"rope_freqs.weight": llama3(factor)}, {"llama.rope.freq_base": 5e5})
        rope = config_of(read_gguf(path))["rope_parameters"]
        assert rope["rope_type"] == "llama3" and rope["factor"] == pytest.approx(factor)
        assert rope["original_max_position_embeddings"] == 8192
    path = with_factors(tmp_path, {"rope_freqs.weight": llama3(8.0, 4096)}, {"llama.rope.freq_base": 5e5})
    with pytest.raises(UnsupportedModel, match="by factors that are not those of Llama 3"):
        Checkpoint.open(resolve_model(path))


def test_longrope_of_phi3(tmp_path: Path) -> None:
    long, short = [1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.5, 2.0]
    more = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.dimension_count": 8}
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    config = read_config(resolve_model(with_factors(tmp_path, factors, more, "phi3")))
    rope = config.rope_parameters
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == long and rope["short_factor"] == short
    assert rope["original_max_position_embeddings"] == 64


def test_scaling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    _, path = written(tmp_path, "qwen3", {"qwen3.rope.scaling.type": "su"})
    with pytest.raises(UnsupportedModel, match="scales rotary embeddings by 'su'"):
        Checkpoint.open(resolve_model(path))
    _, path = written(tmp_path, "qwen3", {"qwen3.rope.dimension_count": 4})
    with pytest.raises(UnsupportedModel, match="turns 4 of 16 dimensions"):
        Checkpoint.open(resolve_model(path))


@pytest.mark.parametrize("architecture", ["mamba", "clip", "deepseek2", "bert"])
def test_architectures_that_are_not_known_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": architecture}, {})
    with pytest.raises(
        UnsupportedModel, match=f"architecture '{architecture}', and GGUF files of {', '.join(FAMILIES)} are read"
    ):
        resolve_model(path)
    mixture = write(tmp_path / "x.gguf", {"general.architecture": "llama", "llama.expert_count": 8}, {})
    with pytest.raises(UnsupportedModel, match="'llama' with experts"):
        resolve_model(mixture)


def test_metadata_of_another_type_is_refused(tmp_path: Path) -> None:
    for key, value in (("llama.block_count", "three"), ("llama.attention.head_count", [4, 4]), ("llama.context_length", True)):
        _, path = written(tmp_path, "llama", {key: value})
        with pytest.raises(CheckpointError, match=f"{key} is .*, which is of another type"):
            Checkpoint.open(resolve_model(path))
    _, path = written(tmp_path, "llama", {"llama.attention.head_count": 0})
    with pytest.raises(CheckpointError, match="there are no attention heads"):
        Checkpoint.open(resolve_model(path))
    _, path = written(tmp_path, "llama", {"llama.feed_forward_length": 1 << 30})
    with pytest.raises(CheckpointError, match="at most"):
        Checkpoint.open(resolve_model(path))


def test_models_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    """By the metadata, or by tensors for which the model has no place."""
    _, path = written(tmp_path, "llama", {"llama.attention.scale": 0.25})
    with pytest.raises(UnsupportedModel, match=r"has llama\.attention\.scale, by which llama models do not compute here"):
        Checkpoint.open(resolve_model(path))
    ones = {"rope_freqs.weight": [1.0] * 4}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight, which is read of llama models alone"):
        Checkpoint.open(resolve_model(with_factors(tmp_path, ones, {}, "qwen2")))
    checkpoint = Checkpoint.open(resolve_model(with_factors(tmp_path, {"blk.0.attn_q_norm.weight": [1.0] * 8}, {})))
    with pytest.raises(UnsupportedModel, match=r"for which a llama has no place: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_model(checkpoint, torch.device("cpu"), torch.float32, pack=True)


def test_a_folder_of_files_asks_for_one(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    (tmp_path / "m-plain").rename(tmp_path.with_name(f"{tmp_path.name}-elsewhere"))
    with pytest.raises(ModelNotFound, match=r"has GGUF files: name one of them, as in .*m\.gguf"):
        resolve_model(tmp_path)


def test_estimates_count_the_model_of_the_file(tmp_path: Path) -> None:
    """For a device that is not here: quantized weights count as bfloat16, into which they are decoded there."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    model = tiny("qwen3", **sizes)
    write_model(model, tmp_path / "m.gguf", lambda name, shape: "Q8_0")
    spec = resolve_model(tmp_path / "m.gguf")
    made = estimate(EngineConfig.resolve(spec), spec.config_file, device="24 GB", memory_bytes=24 << 30)
    assert made.weights_bytes == 2 * sum(one.numel() for one in model.parameters())
    assert "the weights are stored in gguf, in files of" in made.describe()
    assert math.isclose(made.model.context_length, 512) and made.model.text_config.vocab_size == VOCAB
