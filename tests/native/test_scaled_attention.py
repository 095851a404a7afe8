"""Attention over a cache of int8 with scales, and over values that are a part of the keys, by the native kernels."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from scaled_checks import Scaled, block_bytes, check_scaled_write, quantize, scaled
from triton_checks import LEAD, Built, Case, assert_near, build, cases

from pagetide.native import instructions

pytestmark = pytest.mark.skipif(
    instructions() is None, reason="the native kernels are not built: python native/build.py"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernel():
    from pagetide.engine.attention.native_kernel import NativeKernel

    return NativeKernel()


def check(scaled: Scaled) -> None:
    """Write, then attend; nothing is written but the result."""
    built = scaled.built
    if not built.case.aliased:
        check_scaled_write(kernel(), scaled)
    before = scaled.memory.clone()
    call = replace(built.call, key=built.call.key * torch.nan, value=built.call.value * torch.nan)
    got = kernel().attend(call)
    assert_near(got, built)
    assert not got[call.step.q_lens.sum() :].any()
    assert torch.equal(scaled.memory, before)


@settings(max_examples=100)
@given(cases(48))
def test_random_steps(case: Case) -> None:
    check(scaled(build(case)))


@settings(max_examples=25)
@given(cases(700))
def test_random_steps_of_several_parts(case: Case) -> None:
    check(scaled(build(case)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(1, 1), (3, 70), (80, 96), (33, 31), (128, 64), (192, 128), (576, 512)])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for over in ({}, {"window": 37, "softcap": 5.0}):
        built = build(Case(((1, 300), (1, 7), (40, 290)), dtype, dims=dims, group=3, sinks=True, padding=2, **over))
        check(scaled(replace(built, call=replace(built.call, query=built.call.query / dims[0] ** 0.5))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(24, 16), (64, 64), (70, 33), (576, 512)])
def test_values_within_keys(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The batch's own values are not even looked at."""
    case = Case(((1, 300), (1, 20), (40, 290)), dtype, kv_heads=1, dims=dims, group=16, padding=2)
    built = build(case)
    built = replace(
        built, call=replace(built.call, query=built.call.query / dims[0] ** 0.5, value=built.call.value * torch.nan)
    )
    check(scaled(built, v_in_k=True))
    own = values_within_keys(built)
    before = own.arena.clone()
    kernel().write(own.call)
    written = own.arena.view(torch.uint8) != before.view(torch.uint8)
    assert not written.view(len(before), -1)[:, (LEAD + 16 * dims[0]) * dtype.itemsize :].any(), "K alone is written"
    assert_near(kernel().attend(own.call), own)


def values_within_keys(built: Built) -> Built:
    """The case with its own elements, whose values are a part of its keys."""
    cache, dim = built.call.cache, built.case.dims[1]
    cache = replace(cache, value=cache.key[..., :dim], v_in_k=True)
    return replace(built, call=replace(built.call, cache=cache), values=[k[..., :dim] for k in built.keys])


# --- the elements and scales


def rows_of_all_kinds(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 1, dim]: of any size, zeros, halves, and what a float16 scale can hardly hold, or not at all."""
    rng = torch.Generator().manual_seed(dim)
    normal = torch.randn(40, dim, generator=rng)
    sizes = [0.0, 1e-30, 1e-9, 3.7e-6, 3.8e-6, 7.6e-6, 1e-5, 1e-3, 1.0, 100.0, 6e4, 8.3e6, 1e7, 1e30, 3e38]
    rows = [normal[: len(sizes)] * torch.tensor(sizes)[:, None], normal, torch.zeros(2, dim)]
    halves = torch.randint(-127, 127, (8, dim), generator=rng) + 0.5
    for scale in (1.0, 0.25, 2.0**-24):
        whole = halves.clone()
        whole[:, 0] = 127.0
        rows.append(whole * scale)
    rows = torch.cat(rows)
    rows[-1, ::2] = -0.0
    return rows.to(dtype)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 16, 33, 64, 128])
def test_written_bits(dim: int, dtype: torch.dtype) -> None:
    key = rows_of_all_kinds(dim, dtype)
    value = key.flip(0).contiguous()
    cache = [torch.zeros(3, 64, 1, dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(3, 64, 1, dtype=torch.float16) for _ in range(2)]
    places = 1 + torch.arange(len(key)) // 64, torch.arange(len(key)) % 64
    torch.ops.pagetide.write_kv(key, value, *cache, *places, *scales)
    for rows, values, of_rows in zip((key, value), cache, scales, strict=True):
        expected, expected_scales = quantize(rows)
        assert torch.equal(values[places], expected)
        assert torch.equal(of_rows[places].view(torch.int16), expected_scales.view(torch.int16))
    if dtype == torch.float32:
        assert (scales[0] == 65504).any() and (scales[0] == 2.0**-24).any(), "the clamp and subnormal scales"


def test_what_is_not_finite_is_not_hidden() -> None:
    """NaN has a scale that is NaN, so that results are, and an infinity is the largest that there is."""
    key = torch.ones(2, 1, 20)
    key[0, 0, 17], key[1, 0, 3] = torch.nan, -torch.inf
    cache = [torch.full((2, 16, 1, 20), 5, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 16, 1, dtype=torch.float16) for _ in range(2)]
    places = torch.ones(2, dtype=torch.int64), torch.arange(2)
    torch.ops.pagetide.write_kv(key, key, *cache, *places, *scales)
    assert scales[0][1, 0].isnan() and not cache[0][1, 0].any()
    assert scales[0][1, 1] == 65504 and cache[0][1, 1, 0].tolist() == [0] * 3 + [-127] + [0] * 16
    for dtype in DTYPES:
        step = torch.ones(1, 1, dtype=torch.int64), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
        query = torch.ones(1, 1, 20, dtype=dtype)
        assert torch.ops.pagetide.attend(query, *cache, *step, 1.0, 0, 0.0, None, *scales).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_values_of_any_size(dtype: torch.dtype) -> None:
    """Queries in which one dimension exceeds all others, zeros, and values of very different scales."""
    built = build(Case(((1, 300), (1, 300), (30, 280)), dtype, dims=(64, 40), aliased=True))
    query = built.call.query.clone()
    query[0] *= 0
    query[1, :, 5] *= 100
    query[2:] *= 1e-3
    sizes = torch.tensor([1e-4, 1.0, 30.0] * 6)[:16]
    built.call.cache.value.mul_(sizes.to(dtype)[:, None, None])  # by the slot in the block
    values = [v * sizes.to(dtype)[torch.arange(len(v)) % 16, None, None] for v in built.values]
    built = scaled(replace(built, call=replace(built.call, query=query), values=values)).built
    assert_near_relative(kernel().attend(built.call), built)


def assert_near_relative(got: torch.Tensor, built: Built) -> None:
    """Like `assert_near`, for results below 1 too."""
    from triton_checks import BOUNDS, reference

    expected = reference(built)
    error = (got.double() - expected).abs() / expected.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
    assert error.nan_to_num(nan=torch.inf).max() < BOUNDS[built.case.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    built = build(Case(((1, 100), (1, 5), (17, 120)), dtype))
    num_blocks, stride = len(built.arena), (1 << 28) + 64
    memory = mmap.mmap(-1, num_blocks * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    far = scaled(built, memory=torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, stride))
    near = scaled(built)
    for one in (far, near):
        kernel().write(one.built.call)
    used = block_bytes(built.call.cache)
    assert num_blocks > 17 and torch.equal(far.memory[:, :used], near.memory[:, :used])
    assert_near(kernel().attend(far.built.call), far.built)
    assert torch.equal(kernel().attend(far.built.call), kernel().attend(near.built.call))


def test_caches_and_scales_of_any_stride() -> None:
    """Heads before slots, as another layout would have them."""
    built = scaled(build(Case(((1, 20), (9, 30)), torch.bfloat16, aliased=True))).built
    cache = built.call.cache
    turned = {
        name: getattr(cache, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("key", "value", "key_scale", "value_scale")
    }
    other = replace(built.call, cache=replace(cache, **turned))
    assert torch.equal(kernel().attend(other), kernel().attend(built.call))


# --- what is refused


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"key_scale": None}, "needs scales"),
        ({"value_scale": None}, "needs scales"),
        ({"key_scale": torch.zeros(4, 16, 2)}, "must be float16"),
        ({"value_scale": torch.zeros(4, 16, 2, 1).half()}, "three dimensions"),
        ({"key_scale": torch.zeros(3, 16, 2).half()}, "dimension 0"),
        ({"value_scale": torch.zeros(4, 15, 2).half()}, "dimension 1"),
        ({"value_scale": torch.zeros(4, 16, 1).half()}, "dimension 2"),
        ({"key": torch.zeros(4, 16, 2, 8)}, "has no scales"),
        ({"key": torch.zeros(4, 16, 2, 8).to(torch.uint8), "key_scale": None}, "must be float32"),
        ({"key": torch.zeros(4, 16, 2, 8).bfloat16(), "key_scale": None}, "differ in type"),
    ],
)
def test_caches_and_scales_that_do_not_fit_are_refused(over: dict, said: str) -> None:
    ops = torch.ops.pagetide
    cache = {"key": torch.zeros(4, 16, 2, 8).char(), "key_scale": torch.zeros(4, 16, 2).half()}
    cache |= {"value": cache["key"].clone(), "value_scale": cache["key_scale"].clone()} | over
    elements, scales = (cache["key"], cache["value"]), (cache["key_scale"], cache["value_scale"])
    rows, places = torch.ones(1, 2, 8), (torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=said):
        ops.write_kv(rows, rows, *elements, *places, *scales)
    assert not any(x.any() for x in (*elements, *scales) if x is not None)
    step = torch.ones(1, 1, dtype=torch.int64), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    with pytest.raises(RuntimeError, match=said):
        ops.attend(rows, *elements, *step, 1.0, 0, 0.0, None, *scales)


def test_a_query_of_integers_is_refused() -> None:
    cache, scales = torch.zeros(4, 16, 2, 8).char(), torch.zeros(4, 16, 2).half()
    step = torch.ones(1, 1, dtype=torch.int64), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    with pytest.raises(RuntimeError, match="query must be"):
        torch.ops.pagetide.attend(torch.ones(1, 2, 8).char(), cache, cache, *step, 1.0, 0, 0.0, None, scales, scales)


def test_float8_is_refused() -> None:
    call = scaled(build(Case(((1, 20),), torch.bfloat16))).built.call
    cache = replace(call.cache, **{n: getattr(call.cache, n).view(torch.float8_e4m3fn) for n in ("key", "value")})
    for method in (kernel().write, kernel().attend):
        with pytest.raises(RuntimeError, match="not int8"):
            method(replace(call, cache=cache))


def test_writing_beyond_the_cache_is_refused_and_writes_nothing() -> None:
    one = scaled(build(Case(((4, 30),), torch.float32)))
    before, step = one.memory.clone(), one.built.call.step
    for over in (
        {"write_blocks": tuple(b + 100 for b in step.write_blocks)},
        {"write_offsets": step.write_offsets + 16},
    ):
        with pytest.raises(RuntimeError, match="goes to"):
            kernel().write(replace(one.built.call, step=replace(step, **over)))
    assert torch.equal(one.memory, before)


def test_tables_beyond_the_cache_are_refused() -> None:
    call = scaled(build(Case(((4, 30),), torch.float32, aliased=True))).built.call
    tables = tuple(table + 100 for table in call.step.tables)
    with pytest.raises(RuntimeError, match="names a block"):
        kernel().attend(replace(call, step=replace(call.step, tables=tables)))
