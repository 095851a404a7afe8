"""Models with windows as large as real ones give the tokens of plain transformers."""

from __future__ import annotations

import pytest
from engines import TinyEngine, plain, prompts
from families import VOCAB
from windows import GREEDY, NEW, of

from pagetide.cache.geometry import Geometry

pytestmark = pytest.mark.stress


@pytest.mark.parametrize(
    ("name", "window"), [("gemma3_text", 320), ("gemma3_text", 1024), ("gpt_oss", 320), ("llama4_text", 320)]
)
def test_same_tokens_with_large_windows(name: str, window: int) -> None:
    """Up to three windows, in 16 or more blocks each."""
    model = of(name, window)
    model.config.max_position_embeddings = 4 * window
    inputs = prompts([window - 1, window + 5, 3 * window - NEW], VOCAB)
    expected = plain(model, inputs, NEW)
    size = 16
    geometry = Geometry.from_config(model.config, block_size=size, dtype="float32")
    usable = 3 * geometry.columns_for_tokens(3 * window)
    engine = TinyEngine(model, usable=usable, block_size=size, max_model_len=3 * window + 8, max_step_tokens=512, caching=True)
    for _ in range(2):
        assert engine.generate(inputs, GREEDY) == expected
