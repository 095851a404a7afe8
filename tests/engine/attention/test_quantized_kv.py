"""K and V in one byte with scales: exact values, the torch kernel over them, and that chunks change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_driver import check_chunks_hardly_matter

from pagetide.engine.attention import trial
from pagetide.engine.attention.backends import AttentionSpec
from pagetide.engine.attention.context import AttentionCall
from pagetide.engine.attention.interface import paged_attention
from pagetide.engine.attention.quantized_kv import dequantize, quantize
from pagetide.engine.attention.torch_kernel import TorchKernel

CPU = torch.device("cpu")
DTYPES = (torch.int8, torch.float8_e4m3fn)


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


@pytest.mark.parametrize(("family", "dtype"), [("llama", "int8"), ("deepseek_v3", "float8_e4m3fn")])
def test_logits_hardly_depend_on_the_chunks(family: str, dtype: str) -> None:
    check_chunks_hardly_matter(family, dtype)


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
