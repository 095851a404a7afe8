"""Linear layers with weights that stay quantized on CUDA, by torch's own kernels.

    int4   _weight_int4pack_mm: weight = value * scale + zero, both bfloat16 numbers of a group of 32, 64, 128 or 256 inputs
    fp8    _scaled_mm: a scale for each output. Rows of inputs are quantized to fp8 too, each by its largest element

Rows are bfloat16. A kernel is used on a device once its product agrees there with that of the dequantized weight (`obstacle`).
Torch has the same operators for CPUs, with another layout of int4, by which this is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from . import WeightForm, torch_bytes, torch_group
from .linears import as_parameter, placeholder
from .quantization import QuantizedWeight

_INNER_TILES = (8, 4, 2)  # of 16 inputs, that lie together
_LARGEST_FP8 = 448.0
# Of a product's norm: scales and zeros are rounded to bfloat16; rows to three bits.
_ERRORS: dict[WeightForm, float] = {"int4": 2**-6, "fp8": 2**-4}
_TRIAL_ROWS = (1, 17, 130)
_TRIAL_OUTPUTS, _TRIAL_INPUTS = 256, 1024


def obstacle(form: WeightForm, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a weight [n, k] with a scale for each `group` inputs is not multiplied as it is on `device`; None: it is."""
    if form not in _ERRORS:
        return f"torch multiplies no {form} weights"
    if dtype != torch.bfloat16:
        return f"torch's kernels multiply rows of bfloat16, not {str(dtype).removeprefix('torch.')}"
    if torch_bytes(form, n, k, group) is None:
        return f"torch's kernel for {form} takes no {n} by {k} weights in groups of {group or k}"
    return _fault(form, (torch_group(k, group) or 0) if form == "int4" else 0, device)


def has_kernels(device: torch.device) -> bool:
    """Whether one of the kernels works on a CUDA `device`, as far as a few small products tell."""
    return device.type == "cuda" and (_fault("int4", 128, device) is None or _fault("fp8", 0, device) is None)


@lru_cache
def _fault(form: WeightForm, group: int, device: torch.device) -> str | None:
    """How products on `device` differ from those of dequantized weights, or what they raise; None if they agree."""
    drawn = torch.Generator().manual_seed(group)
    n, k = _TRIAL_OUTPUTS, _TRIAL_INPUTS
    if form == "fp8":
        values, zeros = torch.randn((n, k), generator=drawn).to(torch.float8_e4m3fn).view(torch.int8), None
        scales = torch.rand(n, generator=drawn) + 0.5
    else:
        values = torch.randint(-8, 8, (n, k), generator=drawn, dtype=torch.int8)
        scales = torch.rand((k // group, n), generator=drawn) + 0.5
        zeros = torch.randint(-8, 8, (k // group, n), generator=drawn, dtype=torch.int8)
    weight = QuantizedWeight(form, values, scales, group=group, zeros=zeros)
    try:
        return difference(TorchWeight.of(form, (n, k), group, [(0, weight)], device), weight)
    except Exception as error:  # of a device that is too old, or of another layout in another torch
        return f"torch's kernel for {form} fails on {device}: {type(error).__name__}: {' '.join(str(error).split()):.200}"


def difference(made: TorchWeight, weight: QuantizedWeight) -> str | None:
    """How products of a few random rows differ from those of `weight`, which is that or its first outputs; None if little."""
    right = weight.dequantized()
    for rows in _TRIAL_ROWS:
        x = torch.randn((rows, made.k), generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected = x.float() @ right.T
        found = made.product(x.to(made.packed.device), None)[:, : len(right)].float().cpu()
        error = float((found - expected).norm() / expected.norm())
        if not error <= _ERRORS[made.form]:
            return f"torch's kernel for {made.form} differs from the dequantized product by {error:.2g} of its size"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class TorchWeight:
    """A weight [n, k] as torch's kernels take it, on a device."""

    form: WeightForm
    n: int
    k: int
    group: int
    packed: torch.Tensor  # fp8 [n, k]; int4: the operators' own layout
    scales: torch.Tensor  # fp8: float32 [1, n]; int4: bfloat16 [k / group, n, 2], scales and zeros
    order: torch.Tensor | None  # as in QuantizedWeight

    @classmethod
    def of(
        cls,
        form: WeightForm,
        shape: tuple[int, int],
        group: int,
        pieces: Iterable[tuple[int, QuantizedWeight]],
        device: torch.device,
    ) -> TorchWeight:
        """The weight from its pieces, of which one is held on the host at a time: the output at which each begins, and it.

        Args:
            group: Inputs of a scale of the pieces; 0: all.
        """
        (n, k), size, order = shape, torch_group(shape[1], group) or 0, None
        as_bytes = form == "fp8" or device.type == "cpu"
        codes = torch.empty((n, k if as_bytes else k // 2), dtype=torch.uint8, device=device)
        scales = torch.empty((1, n) if form == "fp8" else (k // size, n, 2), device=device)
        for begin, piece in pieces:
            end, order = begin + len(piece.values), piece.order
            of, added = (one.reshape(-1, one.shape[-1]) for one in piece.affine())
            if form == "fp8":
                codes[begin:end], scales[:, begin:end] = piece.values.view(torch.uint8).to(device), of.to(device)
                continue
            from_zero = (piece.values + 8).view(torch.uint8)
            codes[begin:end] = (from_zero if as_bytes else _pairs(from_zero)).to(device)
            both = torch.stack([of, added], -1).repeat_interleave((group or k) // size, 0)[: k // size]
            scales[:, begin:end] = both.to(device)
        order = None if order is None else order.to(device)
        if form == "fp8":
            return cls(form, n, k, 0, codes.view(torch.float8_e4m3fn), scales, order)
        return cls(form, n, k, size, _converted(codes), scales.bfloat16(), order)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weight, and what belongs to it."""
        return [part for part in (self.packed, self.scales, self.order) if part is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(part.nbytes for part in self.tensors)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x bfloat16 [..., k] -> [..., n]."""
        rows = x if self.order is None else x.index_select(-1, self.order)
        rows = rows.reshape(-1, self.k)
        if self.form == "fp8":
            scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST_FP8
            small = (rows / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
            out = torch._scaled_mm(small, self.packed.t(), scale_a=scale, scale_b=self.scales, out_dtype=torch.bfloat16)
        else:
            ops = torch.ops.aten
            multiply = ops._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else ops._weight_int4pack_mm
            out = multiply(rows.contiguous(), self.packed, self.group, self.scales)
        out = out.view(*x.shape[:-1], self.n)
        return out if bias is None else out + bias


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k / 2]: codes of four bits, each two in a byte, the first one high."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def _converted(codes: torch.Tensor) -> torch.Tensor:
    """The operators' layout of int4: from codes uint8 [n, k] on a CPU, else from `_pairs` of them."""
    ops = torch.ops.aten
    if codes.device.type == "cpu":
        made: torch.Tensor = ops._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return made
    tiles = next(one for one in _INNER_TILES if codes.shape[1] * 2 % (16 * one) == 0)
    made = ops._convert_weight_to_int4pack(codes, tiles)
    return made


class TorchLinear(nn.Module):
    """`nn.Linear` by torch's kernels for quantized weights. Its `weight` has the shape of the plain one, but no memory."""

    def __init__(self, packed: TorchWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.weight = placeholder((packed.n, packed.k), torch.bfloat16)
        self.bias = as_parameter(bias, torch.bfloat16)
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.packed.product(x, self.bias)
