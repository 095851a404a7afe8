"""Weights in 8 and 4 bits are as near as their scales allow, and methods are chosen by the error that they make."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pagetide.engine.layers import GROUP
from pagetide.engine.layers import quantization as q
from pagetide.engine.layers.quantization import Method, choose, quantize, quantized_rows

SHAPES = [(1, 1), (3, 5), (7, GROUP), (5, GROUP + 1), (40, 3 * GROUP - 2), (33, 300)]


def method(form):
    return Method(form, None, False, math.nan)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_int8_is_the_nearest_multiple_of_the_scale_of_its_output():
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        weight = random(*shape, dtype=dtype)
        made = quantize(weight, method("int8"))
        assert made.values.dtype == torch.int8 and made.values.shape == shape and made.scales.shape == shape[:1]
        torch.testing.assert_close(made.scales, weight.float().abs().amax(1) / 127)
        assert made.values.abs().amax(1).eq(127).all()
        assert ((made.dequantized() - weight.float()).abs() <= made.scales[:, None] * 0.5001).all(), (shape, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_has_a_scale_for_each_group_and_at_most_the_error_of_plain_rounding(shape):
    weight = random(*shape)
    made = quantize(weight, method("int4"))
    groups = -(-shape[1] // GROUP)
    assert made.scales.shape == (groups, shape[0]) and made.values.shape == shape and made.scales.dtype == torch.bfloat16
    assert made.values.min() >= -8 and made.values.max() <= 7
    for group in range(groups):
        part = weight[:, group * GROUP : (group + 1) * GROUP]
        values = made.values[:, group * GROUP : (group + 1) * GROUP]
        back = values * made.scales[group, :, None].float()
        torch.testing.assert_close(made.dequantized()[:, group * GROUP : (group + 1) * GROUP], back)
        scale = part.abs().amax(1, keepdim=True) / 7
        plain = ((part / scale).round() * scale - part).square().sum(1)
        ours = (back - part).square().sum(1)
        of_the_scale = (part * 2**-9).square().sum(1)  # which is rounded to bfloat16
        assert (ours <= plain * 1.0001 + of_the_scale).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_parts_of_a_weight_are_quantized_like_the_whole(form, monkeypatch):
    """Temporary memory is bounded by quantizing some rows at a time."""
    weight = random(37, 100)
    whole = quantize(weight, method(form))
    monkeypatch.setattr(q, "_CHUNK_WEIGHTS", 350)
    parts = quantize(weight, method(form))
    assert torch.equal(parts.values, whole.values) and torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_row(form):
    weight = random(4, 2 * GROUP)
    weight[0] = 0.0
    weight[1, 3], weight[2, 5] = math.nan, math.inf
    made = quantize(weight, method(form))
    back = made.dequantized()
    assert torch.equal(back[0], torch.zeros(2 * GROUP))
    assert back[1, :GROUP].isnan().all() and back[2, :GROUP].isnan().all()
    assert torch.equal(back[3], quantize(weight[3:], method(form)).dequantized()[0])


def test_rows_of_inputs_are_rounded_each_by_its_largest():
    x = random(5, 40) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None]
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = quantized_rows(x)
    assert ((rounded - x).abs() <= step * 0.5001).all()
    torch.testing.assert_close((rounded[:3] / step[:3]).round() * step[:3], rounded[:3])


def test_even_inputs_need_no_factors_and_are_quantized_too():
    chosen = choose([random(64, 256), random(32, 256)], random(100, 256), "int8")
    assert chosen.in_scales is None and chosen.rows_in_int8 and 0.002 < chosen.error < 0.02


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_outlier_channels_are_divided_out(form):
    """Inputs of which some channels are 64 times as large, before columns that are 64 times as small."""
    gain = torch.ones(256)
    large = [3, 90, 100, 255]
    gain[large] = 64.0
    weight, x = random(64, 256), random(100, 256)
    plain, outliers = choose([weight], x, form), choose([weight / gain], x * gain, form)
    assert outliers.in_scales is not None
    assert outliers.in_scales[large].max() < 0.1 * outliers.in_scales.median()
    assert outliers.error < 1.3 * plain.error
    assert outliers.rows_in_int8 and plain.rows_in_int8


@pytest.mark.parametrize(("form", "most"), [("int8", 0.02), ("int4", 0.12)])
def test_inputs_that_cannot_be_quantized_are_not(form, most):
    """Each row has two large values that cancel out, in channels of its own: no factors help."""
    weight = random(64, 64).repeat_interleave(2, dim=1)
    x = random(128, 128) + 2000 * (torch.eye(128) - torch.eye(128).view(64, 2, 128).flip(1).view(128, 128))
    chosen = choose([weight], x, form)
    assert not chosen.rows_in_int8 and chosen.error < most


def test_measuring_survives_inputs_that_are_not_finite():
    x = random(10, 64)
    x[3, 5] = math.inf
    chosen = choose([random(16, 64)], x, "int8")
    assert chosen.in_scales is None and not chosen.rows_in_int8


def test_one_choice_for_layers_with_the_same_input_depends_on_all():
    gain = torch.ones(128)
    gain[7] = 64.0
    even, uneven, x = random(64, 128), random(64, 128) / gain, random(50, 128) * gain
    assert choose([uneven], x, "int8").in_scales is not None
    assert choose([even, uneven], x, "int8").error > choose([uneven], x, "int8").error
