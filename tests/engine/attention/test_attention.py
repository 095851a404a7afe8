"""Paged attention against plain attention: the kernel by itself, and whole models of many families."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from paged_driver import PagedDriver, model_of, paged_error, worst_error
from triton_checks import Case, build, cases, check_attention, with_fresh_chunks

from pagetide.engine.attention import torch_kernel
from pagetide.engine.attention.context import AttentionCall
from pagetide.engine.attention.interface import NAME, paged_attention, register
from pagetide.engine.attention.torch_kernel import TorchKernel

TOLERANCE = 1e-4  # of logits with a standard deviation of about 3
MECHANISMS = ["llama", "gemma2", "gpt_oss", "deepseek_v3"]  # plain; windows and a softcap; sinks; latents


@pytest.mark.parametrize("family", MECHANISMS)
def test_paged_logits_are_eager_logits(family: str) -> None:
    """At every position of sequences that run together, whatever the chunks; decodes in one tile, or row by row."""
    for block_size, chunk in ((4, 7), (16, None), (100, 1), (256, 7)):
        assert paged_error(family, block_size, chunk) < TOLERANCE, (block_size, chunk)
    for tile_bytes in (1, 1 << 30):
        driver = PagedDriver(model_of(family), 16, 1, kernel=TorchKernel(tile_bytes))
        assert worst_error(family, driver, (20, 19, 18, 3)) < TOLERANCE, tile_bytes


@example(case=Case(((1, 0),), dims=(24, 8), padding=3), tile_bytes=None, small_tiles=False)  # NaN of other bits
@with_fresh_chunks(tile_bytes=None, small_tiles=False)
@given(
    case=st.one_of(cases(150), cases(60, scaled=True)),
    tile_bytes=st.sampled_from([None, 1, 1 << 14, 1 << 22]),
    small_tiles=st.booleans(),
)
def test_kernel_is_exact_on_random_steps(case: Case, tile_bytes: int | None, small_tiles: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small_tiles:  # many query tiles, many decode tiles
            patch.setattr(torch_kernel, "QUERY_TILE", 5)
            patch.setattr(torch_kernel, "SCORE_BYTES", 4096)
        check_attention(TorchKernel(tile_bytes), case, reads_own=True)


def call_of(chunks: tuple[tuple[int, int], ...], **case: Any) -> AttentionCall:
    """A call over chunks (query tokens, all tokens) whose K and V are all in the cache."""
    return build(Case(chunks, **{"dtype": torch.float32, "dims": (8, 8), "aliased": True} | case)).call


def test_a_window_gathers_only_its_blocks() -> None:
    call, kernel = call_of(((1, 2000),) * 4 + ((3, 2000),)), TorchKernel()
    kernel.attend(replace(call, window=20))
    assert kernel.buffer_bytes <= 4 * (3 * 16) * 2 * (8 + 8) * 4 * 1.25  # 20 tokens touch 2 or 3 blocks
    kernel.attend(call)
    assert kernel.buffer_bytes >= 2000 * 2 * (8 + 8) * 4


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    kernel = TorchKernel(1 << 30)
    kernel.attend(call_of(((1, 4000),) + ((1, 20),) * 63))
    assert kernel.buffer_bytes <= 4000 * 2 * (8 + 8) * 4 * 1.3


def test_buffers_are_reused_until_they_are_released() -> None:
    kernel = TorchKernel()
    for length in (100, 60, 100):
        kernel.attend(call_of(((1, length),) * 3))
        buffers = {name: b.data_ptr() for name, b in kernel._buffers.items()}
        size = kernel.buffer_bytes
        if length == 100:
            first = buffers
        assert buffers == first
    kernel.release_buffers()
    assert size > 0 and kernel.buffer_bytes == 0
    kernel.attend(call_of(((1, 9),)))


def test_what_a_step_has_in_common_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], TorchKernel._plan_decodes
    monkeypatch.setattr(TorchKernel, "_plan_decodes", lambda self, *a: made.append(a[1]) or real(self, *a))
    call, kernel = call_of(((1, 9), (1, 5), (4, 8)), block_size=4), TorchKernel()
    for window in (None, 3, None, 3, None):
        kernel.attend(replace(call, window=window))
    assert [shape.window for shape in made] == [None, 3]


@pytest.mark.parametrize(("window", "sinks"), [(None, True), (100, False)])
def test_half_precision_on_a_cpu_has_few_shapes(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of which torch keeps a compiled kernel."""
    rng, inner = np.random.default_rng(1), torch.nn.functional.scaled_dot_product_attention
    seen: dict[torch.dtype, set[tuple[int, int]]] = {torch.bfloat16: set(), torch.float32: set()}

    def recorded(query, key, *args, **kwargs):
        seen[query.dtype].add((query.shape[-2], key.shape[-2]))
        return inner(query, key, *args, **kwargs)

    monkeypatch.setattr(torch_kernel.F, "scaled_dot_product_attention", recorded)
    for number in range(40):
        q_lens = [1] * number + rng.integers(2, 400, 3).tolist()
        chunks = tuple((q, q + int(more)) for q, more in zip(q_lens, rng.integers(0, 300, len(q_lens)), strict=True))
        for dtype in seen:
            TorchKernel().attend(call_of(chunks, dtype=dtype, window=window, sinks=sinks))
    assert all((n % 32 == 0 or n <= 2) and span % 64 == 0 for n, span in seen[torch.bfloat16])
    assert len(seen[torch.bfloat16]) < 100 < len(seen[torch.float32])


def test_scores_keep_within_their_bytes() -> None:
    shape = torch_kernel._Shape(0, 32, 8, 128, 128, torch.bfloat16, None, softcap=True, sinks=False)
    tiles = torch_kernel._query_tiles(8192, 100_000, shape)
    assert tiles[0][0] == 0 and tiles[-1][1] == 8192 and all(one[1] == next_[0] for one, next_ in pairwise(tiles))
    assert max(high - low for low, high in tiles) * 32 * 100_000 * 4 <= torch_kernel.SCORE_BYTES


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def call(module=None, tokens: int = 2, **over):
    q = torch.zeros(1, 4, tokens, 8)
    arguments = {"attention_mask": None, "scaling": 1.0, **over}
    return paged_attention((module or Layer()).eval(), q, q[:, :2], q[:, :2], **arguments)


def test_a_dense_query_is_copied_only_if_the_dims_of_a_head_are_apart() -> None:
    one = call_of(((1, 3), (4, 9)))
    assert not one.query.is_contiguous(), "tokens and heads as models stride them"
    assert one.dense_query is one.query
    apart = replace(one, query=one.query.transpose(1, 2).contiguous().transpose(1, 2))
    assert apart.query.stride(-1) != 1 == apart.dense_query.stride(-1)
    assert torch.equal(apart.dense_query, one.query)


def test_registering_adds_no_mask_function() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert register() == NAME == register()
    assert AttentionInterface()[NAME] is paged_attention and NAME not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention mask"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_wishes_beyond_causal_attention_are_refused(over: dict, said: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"layer 0 \(Layer\).*{said}"):
        call(**over)


def test_dropout_is_refused_in_training_mode_only_and_so_is_a_module_that_is_not_causal() -> None:
    module = Layer().train()
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"dropout 0\.1: call model\.eval\(\)"):
        paged_attention(module, q, q, q, None, dropout=0.1)
    with pytest.raises(RuntimeError, match="outside of a pagetide step"):
        paged_attention(module.eval(), q, q, q, None, dropout=0.1)
    module.is_causal = False
    with pytest.raises(NotImplementedError, match="not causal"):
        call(module)


def test_calls_over_other_tokens_than_the_steps_are_refused() -> None:
    one = call_of(((2, 2),), block_size=4)
    step, cache = one.step, replace(one.cache, aliased=False, table=0)
    with pytest.raises(NotImplementedError, match="caches for 0 layers"):
        call(step=step)
    object.__setattr__(step, "layers", (cache,))
    assert call(step=step)[0].shape == (1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="in a step of 2 tokens"):
        call(step=step, tokens=3)
    with pytest.raises(ValueError, match="at least 1 token"):
        call(step=step, sliding_window=0)
