"""Hostile tokenizers, tried in real processes: each ends in one error, and this process goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pagetide
from pagetide.engine.errors import CheckpointError
from pagetide.engine.loading.loader import load_tokenizer
from pagetide.engine.loading.models import ModelSpec

DEMO = Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model"
TEN = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [TEN] * 12}}, "may make 2,000,000,000,000 characters of one"),
        ({"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(x+x+)+y"}}}, "retry-limit-in-match"),  # a panic
        ({"padding": PADDING | {"strategy": {"Fixed": 1 << 40}}}, "was killed by SIGABRT: memory allocation of 4398046511104"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "Token `b` out of vocabulary"),
    ],
)
def test_a_tokenizer_is_tried_before_it_is_loaded(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    content = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    spec = ModelSpec("tiny", tmp_path, "a test")
    if said is None:
        assert load_tokenizer(spec) is not None
        return
    with pytest.raises(CheckpointError, match=f"the tokenizer in {tmp_path} .* cannot be loaded: .*{said}.*; fetch it again"):
        load_tokenizer(spec)
