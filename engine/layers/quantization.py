"""Weights in 8 or 4 bits: rounding, and the choice of how a linear layer is quantized, by the error of its outputs.

    int8   weight[n, k] ~ values[n, k] * scales[n]               values from -127 to 127
    int4   weight[n, k] ~ values[n, k] * scales[k / GROUP, n]    values from -8 to 7, scales of either sign

Published checkpoints have more: groups of other sizes, of int8 too, zero points that are subtracted from values, small
floating-point numbers as values, and scales that are integers times a factor for SUPER_GROUP weights (GGUF's K-quants).

A few input channels that are much larger than the others ("outliers", from the gain of a norm) spoil both: the weights
of their columns are small and round to few values, and rows of inputs that are quantized round their other channels to
zero. Factors per input channel (`in_scales`) divide them out: the product multiplies inputs by them, and the columns of the
weight are divided by them before rounding. Rows of inputs are quantized too (`rows_in_int8`: integer products, the fastest)
only in layers where that costs little.

Weights are kept on disk: what makes other numbers of the same weights needs another VERSION (engine/loading/weight_cache.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import GROUP, Quantization, WeightForm

SUPER_GROUP = 256  # weights of a factor
SIX_BIT_BYTES = 12  # of the scales and minimums of a super group
# Types of the scales made here: docs/decisions/0087-two-layouts-of-weights.md
SCALES: dict[Quantization, torch.dtype] = {"int8": torch.float32, "int4": torch.bfloat16}
MOST_ROW_ERROR = 0.03  # relative error of a layer's outputs, beside that of its weights, up to which its inputs are quantized
# in_scales are used if they reduce the error to this share: less is by chance of the tokens
_GAIN = 0.7
_SAMPLED_ROWS = 128  # of each weight, by which errors are measured
_CHUNK_WEIGHTS = 1 << 20  # quantized at a time, to bound temporary memory
_ALPHAS = (0.0, 0.25, 0.5, 0.75)
_DIVISORS = (8.0, 7.0, 7.5, 8.5, 9.0, 9.5, 10.0)  # the largest weight of a group over its scale, tried for int4


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """How one or more linear layers with the same input are quantized. `error` is that of their outputs, relative."""

    quantization: Quantization
    in_scales: torch.Tensor | None  # float32 [k]
    rows_in_int8: bool
    error: float


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])  # e2m1


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Values and scales of a weight [n, k]."""

    form: WeightForm
    values: torch.Tensor  # int8 [n, k]: integers; for fp8 the bits, for fp4 the bits less 8
    # [ceil(k / group), n], or [n] if group is 0; float32, bfloat16, float16, or uint8 e for 2^(e - 127). With factors int8, or
    # uint8 [SIX_BIT_BYTES * k / SUPER_GROUP, n]: scales and minimums of groups of 32, as Q4_K has them. With minimums values
    # are from 0 on, which int4 has less 8.
    scales: torch.Tensor
    in_scales: torch.Tensor | None = None  # float32 [k]
    group: int = 0
    zeros: torch.Tensor | None = None  # int8, as scales: subtracted from the values
    order: torch.Tensor | None = None  # int32 [k]: the input that each column of the values multiplies; None: in order
    # float16 [ceil(k / SUPER_GROUP), n]; of scales of six bits two rows each, of scales and of minimums; beside scales in
    # float16 the minimums, as scales
    factors: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """float32 [n, k]: the weight that products with these values stand for."""
        match self.form:
            case "fp8":
                weight = self.values.view(torch.float8_e4m3fn).float()
            case "fp4":
                weight = _FP4[self.values.int() + 8]
            case _:
                weight = self.values.float()
        if self.zeros is not None:
            weight -= self._spread(self.zeros.float())
        scales, minimums = self._scales()
        if minimums is not None and self.form == "int4":
            weight += 8
        weight *= self._spread(scales)
        if minimums is not None:
            weight -= self._spread(minimums)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight if self.in_scales is None else weight * self.in_scales

    def outputs(self, begin: int, end: int) -> QuantizedWeight:
        """These outputs alone."""
        zeros, factors = (None if one is None else one[..., begin:end] for one in (self.zeros, self.factors))
        return replace(self, values=self.values[begin:end], scales=self.scales[..., begin:end], zeros=zeros, factors=factors)

    def inputs(self, begin: int, end: int) -> QuantizedWeight:
        """These inputs alone, whole groups of scales and factors. Raises ValueError if groups have inputs from everywhere."""
        if self.order is not None:
            raise ValueError("its inputs are grouped out of order (act-order)")
        if not self.group:
            return replace(self, values=self.values[:, begin:end].contiguous())

        def part(numbers: torch.Tensor | None, inputs: int = self.group, rows: int = 1) -> torch.Tensor | None:
            """Of numbers of which `rows` are of `inputs`."""
            return None if numbers is None else numbers[begin // inputs * rows : -(-end // inputs) * rows]

        scales, factors = part(self.scales), part(self.factors)
        if self.factors is not None and not self.scales.is_floating_point():
            factors = part(self.factors, SUPER_GROUP, 2 if self.has_minimums else 1)
            scales = part(self.scales, SUPER_GROUP, SIX_BIT_BYTES) if self.has_minimums else scales
        assert scales is not None
        values, zeros = self.values[:, begin:end].contiguous(), part(self.zeros)
        return replace(self, values=values, scales=scales, zeros=zeros, factors=factors)

    @property
    def has_minimums(self) -> bool:
        """Whether something is subtracted from scaled values, group by group."""
        return self.factors is not None and self.scales.dtype != torch.int8

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [groups, n] each, or [n] without groups: what a value is multiplied by, and what is added to that."""
        scales, minimums = self._scales()
        added = torch.zeros_like(scales) if self.zeros is None else self.zeros.float() * -scales
        if minimums is not None:
            added = (8 * scales if self.form == "int4" else added) - minimums
        return scales, added

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """float32, as `_spread` takes them: the scales, and what is subtracted from scaled weights."""
        if self.factors is None:
            return self.scales.float() if self.scales.is_floating_point() else _powers(self.scales), None
        if self.scales.is_floating_point():
            return self.scales.float(), self.factors.float()
        if self.scales.dtype == torch.int8:
            of_groups = self.factors.float().repeat_interleave(SUPER_GROUP // self.group, 0)[: len(self.scales)]
            return self.scales.float() * of_groups, None
        n = self.scales.shape[1]
        low, middle, high = self.scales.view(-1, 3, 4, n).unbind(1)  # of super groups
        scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
        minimums = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
        factors = self.factors.float().view(-1, 2, 1, n)
        return (scales * factors[:, 0]).view(-1, n), (minimums * factors[:, 1]).view(-1, n)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n, k] or [n, 1]: the number of each weight."""
        return numbers.T.repeat_interleave(self.group, 1)[:, : self.values.shape[1]] if self.group else numbers[:, None]


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) of uint8 exponents."""
    return torch.where(exponents == 0, 2.0**-127, (exponents.int() << 23).view(torch.float32))


def quantize(weight: torch.Tensor, method: Method) -> QuantizedWeight:
    """Quantize `weight` [n, k] of any floating-point type.

    Temporary memory is bounded. An output row with a weight that is not finite gets a scale of NaN, and so outputs of NaN.
    """
    rows, columns = weight.shape
    values = torch.empty((rows, columns), dtype=torch.int8)
    size = (rows,) if method.quantization == "int8" else (-(-columns // GROUP), rows)
    scales = torch.empty(size, dtype=SCALES[method.quantization])
    step = max(1, _CHUNK_WEIGHTS // max(1, columns))
    for begin in range(0, rows, step):
        part = _scaled(weight[begin : begin + step].detach(), method.in_scales)
        if method.quantization == "int8":
            values[begin : begin + step], scales[begin : begin + step] = _int8(part)
        else:
            values[begin : begin + step], part_scales = _int4(part)
            scales[:, begin : begin + step] = part_scales.T
    return QuantizedWeight(method.quantization, values, scales, method.in_scales, GROUP if method.quantization == "int4" else 0)


def choose(weights: Sequence[torch.Tensor], x: torch.Tensor, quantization: Quantization) -> Method:
    """The method for layers with the common input `x`.

    Each method is tried on `x` and on a sample of the layers' outputs. Rows of inputs are quantized if that adds an error of at
    most MOST_ROW_ERROR; in_scales are used if they reduce the error.

    Args:
        weights: The layers' weights, [n, k] each.
        x: Inputs as they occur, [rows, k].
        quantization: "int8" or "int4".
    """
    x = x.detach().float()
    sample = torch.cat([w.detach()[:: -(-len(w) // _SAMPLED_ROWS)].float() for w in weights])
    largest = torch.stack([w.detach().abs().amax(0) for w in weights]).amax(0).float()
    right = x @ sample.T
    candidates = [None, *(_in_scales(x.abs().amax(0), largest, alpha) for alpha in _ALPHAS)]
    as_they_are, in_int8 = zip(*(_tried(sample, x, right, quantization, scales) for scales in candidates), strict=True)
    best, fastest = _best(as_they_are), _best(in_int8)
    fits = x.shape[1] <= 65536 and math.isfinite(fastest.error)  # of more columns, integer sums could overflow
    return fastest if fits and fastest.error <= math.hypot(best.error, MOST_ROW_ERROR) else best


def quantized_rows(x: torch.Tensor, group: int = 0) -> torch.Tensor:
    """float32 [rows, k]: what products take for `x` when they quantize its rows, or each group of a row by itself."""
    size = x.shape[-1]
    parts = torch.nn.functional.pad(x, (0, -size % group)).unflatten(-1, (-1, group)) if group else x.unsqueeze(-2)
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / _no_zeros(scale)).round() * scale).flatten(-2)[..., :size]


def _best(methods: Sequence[Method]) -> Method:
    """The method of the smallest error; the first one, without in_scales, unless another is clearly better."""
    plain, *others = methods
    best = min(others, key=lambda method: method.error)
    return best if best.error < _GAIN * plain.error else plain


def _tried(
    sample: torch.Tensor, x: torch.Tensor, right: torch.Tensor, quantization: Quantization, in_scales: torch.Tensor | None
) -> tuple[Method, Method]:
    """The methods without and with quantized rows. Errors are root mean squares over rows of x of |outputs - right outputs| /
    |right outputs|.
    """
    made = quantize(sample, Method(quantization, in_scales, False, math.inf))
    weight = replace(made, in_scales=None).dequantized()
    inputs = x if in_scales is None else x * in_scales

    def method(rows: torch.Tensor, rows_in_int8: bool) -> Method:
        square = (rows @ weight.T - right).square().sum(1) / _no_zeros(right.square().sum(1))
        error = float(square.mean().sqrt().nan_to_num(nan=math.inf))
        return Method(quantization, in_scales, rows_in_int8, error)

    return method(inputs, False), method(quantized_rows(inputs, made.group), True)


def _in_scales(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """float32 [k] from the largest inputs and weights of each channel.

    With alpha 0 all columns of the weight become equally large, and with 1 all channels of the input (SmoothQuant).
    """
    scales = weights ** (1 - alpha) / _no_zeros(inputs) ** alpha
    usable = scales.isfinite() & (scales > 0)
    mean = scales[usable].log().mean().exp()
    return torch.where(usable, scales / mean, 1.0).clamp(1e-6, 1e6)


def _scaled(weight: torch.Tensor, in_scales: torch.Tensor | None) -> torch.Tensor:
    return weight.float() if in_scales is None else weight / in_scales


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k], float32 [n]."""
    scales = weight.abs().amax(1) / 127
    return _integers(weight / _no_zeros(scales)[:, None], 127), _nan_where_infinite(scales)


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k], bfloat16 [n, groups]. Of a few scales of each group, the one with the smallest squared error.

    The largest weight of a group is a negative multiple of its scale, since there is one more negative value.
    """
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, least = largest / -_DIVISORS[0], torch.full_like(largest, math.inf)
    for divisor in _DIVISORS:
        scales = largest / -divisor
        rounded = (groups / _no_zeros(scales)).round_().clamp_(-8, 7)
        # The scale that suits these integers best.
        scales = (rounded * groups).sum(2, keepdim=True) / _no_zeros(rounded.square().sum(2, keepdim=True))
        scales = scales.to(SCALES["int4"]).float()
        error = (rounded.mul_(scales).sub_(groups)).square_().sum(2, keepdim=True)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    values = _integers((groups / _no_zeros(best)).clamp_(-8, 7), 8)
    return values.view(rows, -1)[:, :columns], _nan_where_infinite(best[:, :, 0])


def _integers(values: torch.Tensor, most: int) -> torch.Tensor:
    return values.round_().nan_to_num_(0.0).clamp_(-most, most).to(torch.int8)


def _nan_where_infinite(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales.isfinite(), scales, math.nan)


def _no_zeros(divisors: torch.Tensor) -> torch.Tensor:
    return torch.where(divisors == 0, 1.0, divisors)
