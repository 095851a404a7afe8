"""K and V in one byte with scales: exact values, the torch kernel over them, and that chunks change nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, tiny
from paged_driver import PagedDriver, eager_logits

from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import AttentionSpec
from pagetide.engine.attention.context import AttentionCall, LayerCache, lengths_on
from pagetide.engine.attention.interface import paged_attention
from pagetide.engine.attention.quantized_kv import dequantize, gather, quantize, store
from pagetide.engine.attention.torch_kernel import TorchKernel

CPU = torch.device("cpu")
DTYPES = (torch.int8, torch.float8_e4m3fn)
NAMES = ("int8", "float8_e4m3fn")

model_of = cache(tiny)


def rows(count: int, dim: int, seed: int) -> torch.Tensor:
    """Normal numbers, row by row of a magnitude from 1e-4 to 1e4."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, dim)) * 10.0 ** rng.uniform(-4, 4, (count, 1))).float()


def nearest_float8(x: float) -> float:
    """The float8_e4m3fn nearest to `x`; of two as near the one with an even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    known = [(abs(v - x), c % 2, v) for v, c in zip(values.tolist(), codes.tolist(), strict=True) if v == v]
    return min(known)[2]


# --- numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_nearest_to_the_number_over_the_stored_scale(dtype: torch.dtype) -> None:
    x = rows(40, 24, 0)
    values, scales = quantize(x, dtype)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (dtype, x.shape, torch.float16, (40,))
    largest = np.float32(127 if dtype == torch.int8 else 448)
    for row, value, scale in zip(x.numpy(), values.float().numpy(), scales.numpy(), strict=True):
        assert scale == np.float16(np.abs(row).max() / largest)
        ratios = (row / np.float32(scale)).clip(-largest, largest)
        exact = np.rint(ratios) if dtype == torch.int8 else [nearest_float8(float(one)) for one in ratios]
        assert value.tolist() == list(exact)


def test_halves_go_to_the_even_number() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    values, scales = quantize(x, torch.int8)
    assert scales.tolist() == [1.0] and values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    values, scales = quantize(torch.tensor([[448.0, 17.0, 19.0, -17.0]]), torch.float8_e4m3fn)  # steps of 2 from 16 on
    assert scales.tolist() == [1.0] and values.float().tolist() == [[448, 16, 20, -16]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_numbers_without_a_scale_become_zeros(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    x[1], x[2, 0] = 1e-8, -1e-6
    values, scales = quantize(x, dtype)
    assert scales.tolist() == [0, 0, 0] and not values.float().any()
    assert not dequantize(values, scales).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beyond_the_largest_scale_are_cut(dtype: torch.dtype) -> None:
    values, scales = quantize(torch.tensor([[1e30, -1e30, 1.0]]), dtype)
    largest = 127 if dtype == torch.int8 else 448
    assert scales.tolist() == [65504] and values.float().tolist() == [[largest, -largest, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x = rows(30, 16, 1).view(10, 3, 16)
    values, scales = quantize(x, dtype)
    for token in range(10):
        one, of_one = quantize(x[token : token + 1], dtype)
        assert torch.equal(one[0].view(torch.uint8), values[token].view(torch.uint8))
        assert torch.equal(of_one[0], scales[token])


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)])
def test_what_comes_back_is_near(dtype: torch.dtype, most: float) -> None:
    x = rows(200, 64, 2)
    x = x[x.abs().amax(-1) > 1]  # scales of full precision
    error = (dequantize(*quantize(x, dtype)) - x).abs().amax(-1) / x.abs().amax(-1)
    assert error.max() < most * 1.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_and_gathered(dtype: torch.dtype) -> None:
    x = rows(6, 8, 3).view(3, 2, 8)
    stored, scales = torch.zeros(5, 4, 2, 8).to(dtype), torch.zeros(5, 4, 2, dtype=torch.float16)
    places = (torch.tensor([1, 1, 4]), torch.tensor([2, 3, 0]))
    store(x, stored, scales, places)
    assert int(scales.any(-1).sum()) == 3, "and nowhere else"
    out = torch.empty(2, 4, 2, 8, dtype=torch.bfloat16)
    gather(stored, scales, torch.tensor([4, 1]), out)
    right = dequantize(*quantize(x, dtype)).bfloat16()
    assert torch.equal(out[0, 0], right[2]) and torch.equal(out[1, 2:], right[:2])
    assert not out[0, 1:].any() and not out[1, :2].any()


# --- the kernel


def dequantized(call: AttentionCall) -> AttentionCall:
    """The same call over a cache of the values that are stored, in the query's type; with them as the batch's own too."""
    old, step, dtype = call.cache, call.step, call.query.dtype
    assert old.key_scale is not None and old.value_scale is not None
    key, value = dequantize(old.key, old.key_scale).to(dtype), dequantize(old.value, old.value_scale).to(dtype)
    places = (step.write_blocks[0], step.write_offsets)
    return replace(call, key=key[places], value=value[places], cache=LayerCache(key, value))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("seed", range(24))
def test_attention_is_that_over_the_stored_values(seed: int, kv_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    chunks = [(1, int(n)) for n in rng.integers(1, 90, rng.integers(0, 5))]
    for n in rng.integers(2, 40, rng.integers(not chunks, 4)):
        chunks.append((int(n), int(n + rng.integers(0, 60) * rng.integers(2))))
    heads, group = (int(n) for n in rng.integers(1, 4, 2))
    dims = (int(n) for n in rng.choice([5, 8, 16], 2))
    window, softcap = [None, 1, 7, 50][rng.integers(4)], [None, 3.0][rng.integers(2)]
    spec = AttentionSpec(heads * group, heads, *dims, window, softcap, bool(rng.integers(2)))
    dtype = [torch.float32, torch.bfloat16][rng.integers(2)]
    call = trial.build(spec, chunks, int(rng.choice([1, 4, 16, 100])), dtype, CPU, kv_dtype).call
    kernel = TorchKernel()
    kernel.write(call)
    got, expected = kernel.attend(call), TorchKernel().attend(dequantized(call))
    torch.testing.assert_close(got, expected, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_layer_that_shares_reads_the_stored_values(kv_dtype: torch.dtype) -> None:
    call = trial.build(AttentionSpec(4, 2, 16, 16), [(1, 9), (7, 7), (5, 30)], 4, torch.float32, CPU, kv_dtype).call
    kernel = TorchKernel()
    kernel.write(call)
    reader = replace(
        call, key=call.key * torch.nan, value=call.value * torch.nan, cache=replace(call.cache, aliased=True)
    )
    assert torch.equal(kernel.attend(reader), kernel.attend(call))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_the_trial_takes_the_torch_kernel_and_sees_faults(kv_dtype: torch.dtype) -> None:
    class Rounds(TorchKernel):
        """Its scales are a little too large."""

        def write(self, call: AttentionCall) -> None:
            super().write(replace(call, key=call.key * 1.01))

    class Forgets(TorchKernel):
        """Attends over values without their scales."""

        def attend(self, call: AttentionCall) -> torch.Tensor:
            ones = torch.ones_like(call.cache.key_scale)
            return super().attend(replace(call, cache=replace(call.cache, key_scale=ones, value_scale=ones)))

    specs = [AttentionSpec(4, 2, 16, 16), AttentionSpec(6, 2, 24, 16, 900, 50.0, True)]
    for dtype in trial.TOLERANCES:
        assert trial.fault(TorchKernel(), specs, 16, dtype, CPU, kv_dtype) is None
    assert trial.fault(Rounds(), specs, 16, torch.float32, CPU, kv_dtype) == "it writes other bytes than it should"
    assert "its results differ" in str(trial.fault(Forgets(), specs, 16, torch.float32, CPU, kv_dtype))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_attention_does_not_depend_on_the_chunks(window: int | None, kv_dtype: torch.dtype) -> None:
    """40 tokens in one call, in chunks of seven, and one by one: each reads what is stored, of its own tokens too."""
    whole = trial.build(AttentionSpec(4, 2, 16, 16, window), [(40, 40)], 4, torch.float32, CPU, kv_dtype).call
    kernel = TorchKernel()
    kernel.write(whole)
    stored = whole.cache.key.clone().view(torch.uint8), whole.cache.key_scale.clone()
    expected = kernel.attend(whole)
    for most in (7, 1):
        whole.cache.key.view(torch.uint8).fill_(0xFF)
        whole.cache.key_scale.fill_(torch.nan)
        for start in range(0, 40, most):
            part = chunk_of(whole, start, min(start + most, 40))
            kernel.write(part)
            got = kernel.attend(part)
            torch.testing.assert_close(got, expected[start : start + len(got)], atol=1e-6, rtol=0)
        places = whole.step.write_blocks[0], whole.step.write_offsets
        assert torch.equal(whole.cache.key.view(torch.uint8)[places], stored[0][places])
        assert torch.equal(whole.cache.key_scale[places], stored[1][places])


def chunk_of(call: AttentionCall, start: int, end: int) -> AttentionCall:
    """Tokens `start` .. `end` of a call of one sequence from its beginning, as a call of their own."""
    q_lens, kv_lens = np.array([end - start], np.int32), np.array([end], np.int32)
    step = replace(
        call.step, q_starts=np.zeros(1, np.int32), q_lens=q_lens, kv_lens=kv_lens, num_decodes=int(end - start == 1),
        write_blocks=(call.step.write_blocks[0][start:end],), write_offsets=call.step.write_offsets[start:end],
        **lengths_on(CPU, q_lens, kv_lens),
    )  # fmt: skip
    batch = {name: getattr(call, name)[start:end] for name in ("query", "key", "value")}
    return replace(call, step=step, **batch)


# --- models


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_hardly_depend_on_the_chunks(family: str, dtype: str) -> None:
    """K and V whose last bits differ, as sums in another order do, may be rounded to neighbours: so not to the last bit."""
    sequences = [np.random.default_rng(seed).integers(1, VOCAB, n).tolist() for seed, n in enumerate((37, 23, 9))]
    model = model_of(family)
    whole = torch.cat(PagedDriver(model, 16, None, dtype=dtype).logits(sequences))
    plain = torch.cat([eager_logits(model, sequence) for sequence in sequences])
    for block_size, chunk in ((16, 1), (4, 7)):
        chunked = torch.cat(PagedDriver(model, block_size, chunk, dtype=dtype).logits(sequences))
        assert (chunked - whole).abs().mean() < 0.25 * (whole - plain).abs().mean()


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_attention_is_in_the_models_type_where_it_rotates_in_a_wider_one(kv_dtype: torch.dtype) -> None:
    call = trial.build(AttentionSpec(4, 2, 16, 16), [(5, 9)], 4, torch.bfloat16, CPU, kv_dtype).call
    step = replace(call.step, layers=(call.cache,))
    query, key, value = (t.transpose(0, 1)[None] for t in (call.query.float(), call.key.float(), call.value))
    got, _ = paged_attention(Layer(), query, key, value, None, step=step)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[0], TorchKernel().attend(call))
