"""Attention by the native kernels: random steps against float64, over NaN; results depend on nothing but the sequence.

Each check is of caches of the model's type and of int8 with scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_checks import (
    FAR_BLOCKS,
    FAR_STRIDE,
    Built,
    Case,
    assert_near,
    bits,
    build,
    cases,
    check_far_blocks,
    check_write,
    sparse,
)

from pagetide.engine.attention.context import AttentionCall
from pagetide.native import instructions

pytestmark = pytest.mark.skipif(instructions() is None, reason="the native kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = (None, torch.int8)
VIEWS = ("key", "value", "key_scale", "value_scale")


def kernel():
    from pagetide.engine.attention.native_kernel import NativeKernel

    return NativeKernel()


def check(built: Built) -> None:
    """Write, then attend; nothing is written but the result."""
    if not built.case.aliased:
        check_write(kernel(), built)
    before = built.arena.clone()
    call = replace(built.call, key=built.call.key * torch.nan, value=built.call.value * torch.nan)
    got = kernel().attend(call)
    assert_near(got, replace(built, case=replace(built.case, stored=None)))  # scales cost no precision
    num_tokens = call.step.q_lens.sum()
    assert not got[num_tokens:].any() and len(got) == num_tokens + built.case.padding
    assert torch.equal(bits(built.arena), bits(before))


def damped(built: Built) -> Built:
    """The same with shorter queries, so that the scores of wide heads are of the usual size."""
    return replace(built, call=replace(built.call, query=built.call.query / built.case.dims[0] ** 0.5))


@given(st.one_of(cases(48), cases(48), cases(48), cases(700)), st.sampled_from(STORED))
def test_random_steps(case: Case, stored: torch.dtype | None) -> None:
    check(build(replace(case, stored=stored)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype: torch.dtype) -> None:
    others: list[dict[str, Any]] = [{}, {"window": 37, "softcap": 5.0}]
    dims = [(1, 1), (3, 70), (80, 96), (33, 31), (128, 64), (192, 128), (352, 64), (480, 64), (512, 512)]
    for i, some in enumerate(dims):
        for j, stored in enumerate(STORED):
            chunks, over = ((1, 300), (1, 7), (40, 290)), others[(i + j) % 2]
            check(damped(build(Case(chunks, dtype, dims=some, group=3, sinks=True, padding=2, stored=stored, **over))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_within_keys(dtype: torch.dtype) -> None:
    for i, dims in enumerate([(24, 16), (64, 64), (70, 33), (576, 512)]):
        stored, chunks = STORED[(i + DTYPES.index(dtype)) % 2], ((1, 300), (1, 20), (40, 290))
        case = Case(chunks, dtype, kv_heads=1, dims=dims, group=16, padding=2, stored=stored, v_in_k=True)
        check(damped(build(case)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_arenas_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Bytes: of int8 with scales."""
    check_far_blocks(kernel(), sparse((FAR_BLOCKS, FAR_STRIDE), dtype))


def rows_of(case: Case, chunk: int, in_int8: bool) -> tuple[torch.Tensor, AttentionCall]:
    """The results of one chunk of a step, and the step's call."""
    built = build(replace(case, aliased=True, stored=torch.int8 if in_int8 else None))
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
    places = {"q_starts": np.zeros(1), "q_lens": np.array([last - first])}
    alone = replace(step, lens=ends, bounds=bounds, tables=tables, **places)
    return replace(call, query=call.query[at], key=call.key[at], value=call.value[at], step=alone)


@pytest.mark.parametrize(
    ("dtype", "window", "in_int8"),
    [(torch.float32, None, False), (torch.bfloat16, 100, False), (torch.float16, 100, True), (torch.bfloat16, None, True)],
)
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
                    kernel().attend(part_of(call, chunk, slice(low, low + size))) for low in range(0, len(together), size)
                ]
                assert torch.equal(torch.cat(pieces), together), (chunk, size)
    finally:
        torch.set_num_threads(threads)


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
        torch.full((*t.shape[:2], 2 * t.shape[2]), torch.nan)[..., ::2].copy_(t) for t in (call.query, call.key, call.value)
    ]
    built = replace(built, call=replace(call, query=spread[0], key=spread[1], value=spread[2]))
    check_write(kernel(), built)
    assert torch.equal(kernel().attend(built.call), kernel().attend(replace(call, query=call.query.contiguous())))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equal_scores_and_great_scores(dtype: torch.dtype, atol: float) -> None:
    """Weights of equal scores are equal, and scores far beyond the exponential's range give the largest alone."""
    built = build(Case(((1, 300),), dtype, aliased=True))
    call = built.call
    same = kernel().attend(replace(call, query=torch.zeros_like(call.query)))
    torch.testing.assert_close(same[0, ::2].float(), built.values[0].float().mean(0), atol=atol, rtol=0)
    scores = torch.einsum("hd,khd->hk", call.query[0, ::2].float(), built.keys[0].float())
    for scaling in (1e6, 1e12):
        great = kernel().attend(replace(call, scaling=scaling))
        torch.testing.assert_close(great[0, ::2], built.values[0][scores.argmax(1), torch.arange(2)], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"lens": torch.tensor([200], dtype=torch.int32)}, "200 tokens in"),
        ({"bounds": torch.tensor([0, 9], dtype=torch.int32)}, "of 4"),
        ({"lens": torch.tensor([3], dtype=torch.int32)}, "4 of 3"),
        ({}, "names a block"),
    ],
)
def test_what_would_read_beyond_the_cache_is_refused(over: dict, said: str) -> None:
    for stored in STORED:
        call = build(Case(((4, 30),), torch.float32, aliased=True, stored=stored)).call
        beyond = {"tables": tuple(table + 100 for table in call.step.tables)}
        with pytest.raises(RuntimeError, match=said):
            kernel().attend(replace(call, step=replace(call.step, **(over or beyond))))


def test_writing_beyond_the_cache_is_refused_and_writes_nothing() -> None:
    for stored in STORED:
        built = build(Case(((4, 30),), torch.float32, stored=stored))
        before, step = built.arena.clone(), built.call.step
        for over in ({"write_blocks": tuple(b + 100 for b in step.write_blocks)}, {"write_offsets": step.write_offsets + 16}):
            with pytest.raises(RuntimeError, match="goes to"):
                kernel().write(replace(built.call, step=replace(step, **over)))
        assert torch.equal(bits(built.arena), bits(before))


def test_caches_and_scales_of_any_stride() -> None:
    """Heads before slots, as another layout would have them."""
    for stored in STORED:
        built = build(Case(((1, 20), (9, 30)), aliased=True, stored=stored))
        cache = built.call.cache
        turned = {
            name: getattr(cache, name).transpose(1, 2).contiguous().transpose(1, 2) for name in (VIEWS if stored else VIEWS[:2])
        }
        other = replace(built.call, cache=replace(cache, **turned))
        assert torch.equal(kernel().attend(other), kernel().attend(built.call))


def test_bounds_out_of_order_are_refused_before_anything_is_written() -> None:
    for middle in [6, 100_000, -3]:
        cache = torch.randn(2, 16, 2, 8)
        bounds, lens = torch.tensor([0, middle, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
        tables = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"chunk \d is -?\d+ of \d tokens"):
            torch.ops.pagetide.attend(torch.randn(4, 2, 8), cache, cache, tables, bounds, lens, 1.0, 0, 0.0, None)


def test_keys_are_not_written_if_their_values_cannot_be() -> None:
    key, cache = torch.randn(3, 2, 8), torch.zeros(2, 16, 2, 8)
    places = torch.ones(3, dtype=torch.int64), torch.arange(3)
    for value in (torch.randn(3, 2, 7), torch.randn(3, 16), torch.randn(2, 2, 8)):
        with pytest.raises(RuntimeError, match="value"):
            torch.ops.pagetide.write_kv(key, value, cache, torch.zeros(2, 16, 2, 8), *places)
        assert not cache.any()
