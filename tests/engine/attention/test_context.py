"""An attention call: its derived values, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import AttentionSpec
from pagetide.engine.attention.context import AttentionCall

CPU = torch.device("cpu")


def call_of(spec: AttentionSpec) -> AttentionCall:
    return trial.build(spec, [(1, 3), (4, 9)], 16, torch.float32, CPU).call


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(4, 2, 16, 8), AttentionSpec(2, 2, 8, 8, 5, 30.0, True), AttentionSpec(6, 1, 8, 16, None, 2.0)],
)
def test_the_spec_of_a_call_is_the_one_it_was_built_for(spec: AttentionSpec) -> None:
    call = call_of(spec)
    assert call.spec == spec
    assert call.scaling == spec.head_dim**-0.5


def test_the_keys_left_of_a_query_exclude_its_own() -> None:
    call = call_of(AttentionSpec(2, 1, 8, 8))
    assert call.left is None
    assert [replace(call, window=window).left for window in (1, 2, 900)] == [0, 1, 899]


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_token_is_refused(window: int) -> None:
    call = call_of(AttentionSpec(2, 1, 8, 8))
    with pytest.raises(ValueError, match=f"a sliding window must be at least 1 token, got {window}"):
        replace(call, window=window)


def test_a_dense_query_is_copied_only_if_the_dims_of_a_head_are_apart() -> None:
    call = call_of(AttentionSpec(2, 1, 8, 8))
    assert not call.query.is_contiguous(), "tokens and heads as models stride them"
    assert call.dense_query is call.query
    apart = replace(call, query=call.query.transpose(1, 2).contiguous().transpose(1, 2))
    assert apart.query.stride(-1) != 1
    assert apart.dense_query.stride(-1) == 1
    assert torch.equal(apart.dense_query, call.query)
