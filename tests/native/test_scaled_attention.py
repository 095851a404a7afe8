"""Elements and scales of int8 as the native kernels write and read them: to the bit, of any size, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_checks import BOUNDS, Built, Case, build, quantized, reference

from pagetide.native import instructions

pytestmark = pytest.mark.skipif(instructions() is None, reason="the native kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernel():
    from pagetide.engine.attention.native_kernel import NativeKernel

    return NativeKernel()


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


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 64, 128])
def test_written_bits(dim: int) -> None:
    for dtype in DTYPES:
        check_written_bits(dim, dtype)


def check_written_bits(dim: int, dtype: torch.dtype) -> None:
    key = rows_of_all_kinds(dim, dtype)
    value = key.flip(0).contiguous()
    cache = [torch.zeros(3, 64, 1, dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(3, 64, 1, dtype=torch.float16) for _ in range(2)]
    places = 1 + torch.arange(len(key)) // 64, torch.arange(len(key)) % 64
    torch.ops.pagetide.write_kv(key, value, *cache, *places, *scales)
    for rows, values, of_rows in zip((key, value), cache, scales, strict=True):
        expected, expected_scales = quantized(rows, torch.int8)
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
    case = Case(((1, 300), (1, 300), (30, 280)), dtype, dims=(64, 40), aliased=True, stored=torch.int8)
    built = build(case)
    query, cache, table = built.call.query.clone(), built.call.cache, built.call.step.tables[1]
    query[0] *= 0
    query[1, :, 5] *= 100
    query[2:] *= 1e-3
    sizes, values = torch.tensor([1e-4, 1.0, 30.0] * 6)[:16], []
    for row, old in zip(table, built.values, strict=True):  # by the slot in the block
        slots = torch.arange(len(old))
        elements, scales = quantized(old * sizes[slots % 16, None, None], torch.int8)
        cache.value[row[slots // 16], slots % 16] = elements
        cache.value_scale[row[slots // 16], slots % 16] = scales
        values.append(elements.float() * scales.float()[..., None])
    built = replace(built, call=replace(built.call, query=query), values=values)
    assert_near_relative(kernel().attend(built.call), built)


def assert_near_relative(got: torch.Tensor, built: Built) -> None:
    """Like `assert_near`, for results below 1 too."""
    expected = reference(built)
    error = (got.double() - expected).abs() / expected.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
    assert error.nan_to_num(nan=torch.inf).max() < BOUNDS[built.case.dtype]


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
    call = build(Case(((1, 20),), stored=torch.int8)).call
    cache = replace(call.cache, **{n: getattr(call.cache, n).view(torch.float8_e4m3fn) for n in ("key", "value")})
    for method in (kernel().write, kernel().attend):
        with pytest.raises(RuntimeError, match="not int8"):
            method(replace(call, cache=cache))
