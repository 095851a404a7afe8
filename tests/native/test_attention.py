"""Attention by the native kernels: random steps against float64, over NaN; results depend on nothing but the sequence."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scaled_checks import scaled
from triton_checks import (
    FAR_BLOCKS,
    FAR_STRIDE,
    Case,
    assert_near,
    build,
    cases,
    check_attention,
    check_far_blocks,
    check_write,
)

from pagetide.engine.attention.context import AttentionCall, LayerCache
from pagetide.native import instructions

pytestmark = pytest.mark.skipif(
    instructions() is None, reason="the native kernels are not built: python native/build.py"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernel():
    from pagetide.engine.attention.native_kernel import NativeKernel

    return NativeKernel()


@settings(max_examples=150)
@given(cases(48))
def test_random_steps(case: Case) -> None:
    check_attention(kernel(), case)


@settings(max_examples=25)
@given(cases(700))
def test_random_steps_of_several_parts(case: Case) -> None:
    check_attention(kernel(), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(1, 1), (3, 70), (80, 96), (33, 31), (128, 64), (192, 128), (512, 512)])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for over in ({}, {"window": 37, "softcap": 5.0}):
        built = build(Case(((1, 300), (1, 7), (40, 290)), dtype, dims=dims, group=3, sinks=True, padding=2, **over))
        check_write(kernel(), built)
        built = replace(built, call=replace(built.call, query=built.call.query / dims[0] ** 0.5))
        assert_near(kernel().attend(built.call), built)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arenas_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    memory = mmap.mmap(
        -1, FAR_BLOCKS * FAR_STRIDE * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )
    check_far_blocks(kernel(), torch.frombuffer(memory, dtype=dtype).view(FAR_BLOCKS, FAR_STRIDE))


# --- the same bits, however the work is divided


def rows_of(case: Case, chunk: int, in_int8: bool) -> tuple[torch.Tensor, AttentionCall]:
    """The results of one chunk of a step, and the step's call."""
    built = build(replace(case, aliased=True))
    built = scaled(built).built if in_int8 else built
    start, n = built.call.step.q_starts[chunk], built.call.step.q_lens[chunk]
    return kernel().attend(built.call)[start : start + n], built.call


def part_of(call: AttentionCall, chunk: int, tokens: slice) -> AttentionCall:
    """A call for some consecutive tokens of one chunk of another call."""
    step = call.step
    n = int(step.q_lens[chunk])
    first, last, _ = tokens.indices(n)
    ends = torch.tensor([int(step.kv_lens[chunk]) - n + last], dtype=torch.int32)
    bounds = torch.tensor([0, last - first], dtype=torch.int32)
    tables = tuple(table[chunk : chunk + 1].contiguous() for table in step.tables)
    at = slice(int(step.q_starts[chunk]) + first, int(step.q_starts[chunk]) + last)
    alone = replace(
        step, lens=ends, bounds=bounds, tables=tables, q_starts=np.zeros(1), q_lens=np.array([last - first])
    )
    return replace(call, query=call.query[at], key=call.key[at], value=call.value[at], step=alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("in_int8", [False, True])
def test_bits_depend_neither_on_other_sequences_nor_on_chunks_nor_on_threads(
    dtype: torch.dtype, window: int | None, in_int8: bool
) -> None:
    """A chunk of a batch, alone, cut into chunks of any length, and query by query, with one thread and several."""
    case = Case(((1, 600), (1, 900), (31, 31), (330, 1100)), dtype, dims=(24, 40), group=4, window=window, sinks=True)
    threads = torch.get_num_threads()
    try:
        for chunk in range(4):
            torch.set_num_threads(3)
            together, call = rows_of(case, chunk, in_int8)
            torch.set_num_threads(1)
            for size in (400, 60, 23, 1):
                pieces = [
                    kernel().attend(part_of(call, chunk, slice(low, low + size)))
                    for low in range(0, len(together), size)
                ]
                assert torch.equal(torch.cat(pieces), together), (chunk, size)
    finally:
        torch.set_num_threads(threads)


# --- inputs at the borders


def test_an_empty_step() -> None:
    call = build(Case(((2, 5),), torch.float32, aliased=True)).call
    step = replace(
        call.step, lens=call.step.lens[:0], bounds=call.step.bounds[:1], tables=tuple(t[:0] for t in call.step.tables)
    )
    assert torch.equal(kernel().attend(replace(call, step=step)), torch.zeros(2, 4, 16))
    none = replace(call, query=call.query[:0], step=step)
    assert kernel().attend(none).shape == (0, 4, 16)


def test_queries_and_rows_of_any_stride() -> None:
    built = build(Case(((1, 20), (9, 30)), torch.float32))
    call = built.call
    spread = [
        torch.full((*t.shape[:2], 2 * t.shape[2]), torch.nan)[..., ::2].copy_(t)
        for t in (call.query, call.key, call.value)
    ]
    built = replace(built, call=replace(call, query=spread[0], key=spread[1], value=spread[2]))
    check_write(kernel(), built)
    assert torch.equal(kernel().attend(built.call), kernel().attend(replace(call, query=call.query.contiguous())))


def test_equal_scores_and_great_scores() -> None:
    """Weights of equal scores are equal, and scores far beyond the exponential's range give the largest alone."""
    built = build(Case(((1, 300),), torch.float32, aliased=True))
    call = built.call
    same = kernel().attend(replace(call, query=torch.zeros_like(call.query)))
    torch.testing.assert_close(same[0, ::2], built.values[0].mean(0), atol=1e-6, rtol=0)
    great = kernel().attend(replace(call, scaling=1e6))
    scores = torch.einsum("hd,khd->hk", call.query[0, ::2], built.keys[0])
    torch.testing.assert_close(great[0, ::2], built.values[0][scores.argmax(1), torch.arange(2)], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"lens": torch.tensor([200], dtype=torch.int32)}, "200 tokens in"),
        ({"bounds": torch.tensor([0, 9], dtype=torch.int32)}, "of 4"),
        ({"lens": torch.tensor([3], dtype=torch.int32)}, "4 of 3"),
        ({"tables": "beyond"}, "names a block"),
    ],
)
def test_what_would_read_beyond_the_cache_is_refused(over: dict, said: str) -> None:
    call = build(Case(((4, 30),), torch.float32, aliased=True)).call
    if over.get("tables") == "beyond":
        over = {"tables": tuple(table + 100 for table in call.step.tables)}
    with pytest.raises(RuntimeError, match=said):
        kernel().attend(replace(call, step=replace(call.step, **over)))


def test_writing_beyond_the_cache_is_refused_and_writes_nothing() -> None:
    built = build(Case(((4, 30),), torch.float32))
    before, step = built.arena.clone(), built.call.step
    for over in (
        {"write_blocks": tuple(b + 100 for b in step.write_blocks)},
        {"write_offsets": step.write_offsets + 16},
    ):
        with pytest.raises(RuntimeError, match="goes to"):
            kernel().write(replace(built.call, step=replace(step, **over)))
    assert torch.equal(built.arena.view(torch.int32), before.view(torch.int32))


def test_caches_of_any_stride() -> None:
    """Heads before slots, as another layout would have them."""
    built = build(Case(((1, 20), (9, 30)), torch.float32, aliased=True))
    cache = built.call.cache
    turned = [view.transpose(1, 2).contiguous().transpose(1, 2) for view in (cache.key, cache.value)]
    other = replace(built.call, cache=LayerCache(*turned, table=1))
    assert torch.equal(kernel().attend(other), kernel().attend(built.call))


@pytest.mark.parametrize("middle", [6, 100_000, -3])
def test_bounds_out_of_order_are_refused_before_anything_is_written(middle: int) -> None:
    cache = torch.randn(2, 16, 2, 8)
    bounds, lens = torch.tensor([0, middle, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    tables = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"chunk \d is -?\d+ of \d tokens"):
        torch.ops.pagetide.attend(torch.randn(4, 2, 8), cache, cache.clone(), tables, bounds, lens, 1.0, 0, 0.0, None)


def test_keys_are_not_written_if_their_values_cannot_be() -> None:
    key, cache = torch.randn(3, 2, 8), torch.zeros(2, 16, 2, 8)
    places = torch.ones(3, dtype=torch.int64), torch.arange(3)
    for value in (torch.randn(3, 2, 7), torch.randn(3, 16), torch.randn(2, 2, 8)):
        with pytest.raises(RuntimeError, match="value"):
            torch.ops.pagetide.write_kv(key, value, cache, torch.zeros(2, 16, 2, 8), *places)
        assert not cache.any()
