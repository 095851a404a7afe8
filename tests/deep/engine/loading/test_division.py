"""A planted fault: a tool that replaces a divided layer whole, instead of what is within it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shard_threads import run_in_threads
from sharded_engines import divided, saved
from torch import nn

from pagetide import native
from pagetide.engine.collectives.sharded_modules import Reduced
from pagetide.engine.layers.linears import NativeLinear

TOKENS = torch.tensor([[5, 1, 77, 34, 120, 5, 9, 64, 3, 118, 40, 41, 2]])


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits[0]


@pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing is replaced")
def test_a_layer_that_is_replaced_whole_loses_the_sum_and_one_within_keeps_it(tmp_path: Path) -> None:
    model, checkpoint = saved("llama", tmp_path)
    right = logits_of(model)

    def difference(replace: Callable[[nn.Module], None]) -> float:
        _, groups, shards = divided(checkpoint, 2)
        for shard in shards:
            replace(shard.model.layers[1].mlp)
        found = run_in_threads([lambda shard=shard: logits_of(shard) for shard in shards], groups)
        return float((found[0] - right).abs().max())

    def whole(mlp: nn.Module) -> None:
        assert isinstance(mlp.down_proj, Reduced)
        mlp.down_proj = NativeLinear.of(mlp.down_proj.layer)

    def within(mlp: nn.Module) -> None:
        mlp.down_proj.layer = NativeLinear.of(mlp.down_proj.layer)

    assert difference(whole) > 0.1
    assert difference(within) < 1e-4
