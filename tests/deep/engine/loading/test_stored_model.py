"""Engines over checkpoints in published quantized formats give the tokens of transformers over what these stand for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from stored_checkpoints import AWQ, FORMATS, FP8, check_tokens, of_gptq, opened, small

from benchmarks.stored_weights import awq, checkpoint, float_quantized, gptq
from pagetide.engine.errors import EngineError
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.stored_formats import StoredWeight


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_each_format(name: str, tmp_path: Path) -> None:
    _, config, packer = FORMATS[name]
    plain_folder = checkpoint(small(name), tmp_path / "packed", config, packer)
    check_tokens(tmp_path / "packed", plain_folder)


SHARDED = {
    "GPTQ": ("qwen3", of_gptq(), gptq(4, 16, False)),
    "AWQ": ("llama", AWQ, awq(16)),
    "fp8 in blocks": ("llama", FP8, float_quantized(32, 16, "weight_scale_inv")),
    "experts": ("mixtral", of_gptq(), gptq(4, 16, False)),
}


@pytest.mark.parametrize("name", SHARDED)
def test_tokens_of_two_shards(name: str, tmp_path: Path) -> None:
    family, config, packer = SHARDED[name]
    model = tiny(family, num_attention_heads=8, num_key_value_heads=4, hidden_size=64, intermediate_size=112)
    plain_folder = checkpoint(model, tmp_path / "packed", config, packer)
    check_tokens(tmp_path / "packed", plain_folder, devices="cpu,cpu")


def shape_of(one: StoredWeight) -> tuple[Any, ...]:
    return one.name, one.form, one.n, one.k, one.group, one.decode, {role: part.tensor for role, part in one.parts.items()}


MUTATIONS = 400  # of each kind


def mutated(rng: random.Random, value: Any) -> Any:
    """`value` with something else in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    return rng.choice(
        [None, -1, 0, 1, 2, 3, 7, 8, 16, 1 << 40, 1.5, "", "int", "group", "re:(", "F32", "I32", [], {}, True, [3, 5]]
    )


@pytest.mark.parametrize("what", ["header", "config", "bytes"])
@pytest.mark.parametrize("name", ["int4 in groups with zero points", "GPTQ out of order", "AWQ", "fp8 in blocks"])
def test_mutations_are_refused_or_change_nothing(what: str, name: str, tmp_path: Path) -> None:
    """A folder with something else in its header or configuration, or with other or fewer bytes, is refused by an error of the
    engine's, or is what it was.
    """
    family, config, packer = FORMATS[name]
    folder, rng = tmp_path / "packed", random.Random(what + name)
    checkpoint(tiny(family, num_hidden_layers=1), folder, config, packer)
    file = folder / "model.safetensors"
    content, right = file.read_bytes(), json.loads((folder / "config.json").read_text())
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    before, loads = opened(folder), 0
    for _ in range(MUTATIONS):
        if what == "bytes":
            changed_bytes = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                changed_bytes[rng.randrange(8 + size)] = rng.choice((rng.randrange(256), *b'0123456789",:[]{}'))
            file.write_bytes(changed_bytes[: -100 if rng.random() < 0.1 else None])
        elif what == "header":
            text = json.dumps(mutated(rng, header)).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + data)
        else:
            changed = {**right, "quantization_config": mutated(rng, right["quantization_config"])}
            (folder / "config.json").write_text(json.dumps(changed))
        try:
            found = opened(folder)
            if [shape_of(one) for one in found.stored.values()] == [shape_of(one) for one in before.stored.values()]:
                continue  # the same weights of the same shapes
            loads += 1
            if loads % 40 == 1:
                load_model(found, torch.device("cpu"), torch.float32, pack=True)
        except EngineError:
            continue
