"""Recognises RMS norms by their outputs, with and without a gate behind them, and computes them by one kernel."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from .agreement import agrees
from .kernels import RowKernels

# What the weight is added to, and whether the normalised row is rounded before it is multiplied.
FORMS = ((0.0, True), (0.0, False), (1.0, False), (1.0, True))
SCALES = (1e-4, 1e-2, 1.0, 1e3)  # of trial inputs: among small ones eps shows, among large ones a bound
ERROR = 1e-5  # in float32: sums of another order
_ROWS = 13


@dataclass(frozen=True, slots=True, eq=False)
class FusedNorm:
    """The function of an RMS norm by a kernel."""

    kernels: RowKernels
    weight: torch.Tensor | None
    eps: float
    offset: float  # added to the weight
    rounds_first: bool  # the normalised row is rounded before it is multiplied

    def __call__(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states [..., n], and perhaps a gate of that shape -> the same shape."""
        if gate is None or (gated_norm := self.kernels.gated_norm) is None:
            return self.kernels.rms_norm(hidden_states, self.weight, self.eps, self.offset, self.rounds_first)
        return gated_norm(hidden_states, gate, self.weight, self.eps, self.offset, self.rounds_first)


def fused_norm(module: nn.Module, x: torch.Tensor, kernels: RowKernels, gate: torch.Tensor | None = None) -> FusedNorm | None:
    """A function that equals `module` on rows like those of `x` [..., n]; None if `module` is not known to be an RMS norm.

    With a `gate` like x, of its rows and those of a gate: the SiLU of the gate times the norm.

    A norm has one parameter [n], or none, and the numbers among its attributes are tried as its eps. In float32 its outputs
    must be the same but for the order of sums, and in the type of `x` but for the last bit.
    """
    weights = list(module.parameters())
    if any(module.children()) or any(True for _ in module.buffers()) or len(weights) > 1:
        return None
    weight = weights[0] if weights else None
    if gate is not None and (kernels.gated_norm is None or (gate.shape, gate.dtype) != (x.shape, x.dtype)):
        return None
    if weight is not None and (weight.shape != x.shape[-1:] or weight.dtype != x.dtype):
        return None
    numbers = {value for value in vars(module).values() if type(value) is float and 0 < value < 1e-2}
    forms = [(eps, *form) for eps in sorted(numbers) for form in FORMS]
    try:
        wide = copy.deepcopy(module).float()
        inputs = [tuple(part.to(x.device) for part in one) for one in _trial_inputs(x.shape[-1], gate is not None)]
        right = [wide(*one) for one in inputs]
        known = None if weight is None else weight.float()
        forms = [form for form in forms if _agrees(FusedNorm(kernels, known, *form), inputs, right, ERROR)]
        inputs = [tuple(part.to(x.dtype) for part in one) for one in inputs]
        right = [module(*one) for one in inputs] if forms else []
    except Exception:  # a module of another kind may raise anything on such inputs
        return None
    error = max(ERROR, 2 * torch.finfo(x.dtype).eps)
    norms = [one for form in forms if _agrees(one := FusedNorm(kernels, weight, *form), inputs, right, error)]
    return max(norms, key=lambda norm: _same_bits(norm, inputs, right), default=None)


def _trial_inputs(n: int, gated: bool) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((_ROWS, n), generator=generator)
    gates = (torch.randn((_ROWS, n), generator=generator) * 3,) if gated else ()
    return [(one, *gates) for one in (*(noise * scale for scale in SCALES), noise + 3)]


def _agrees(norm: FusedNorm, inputs: list[tuple[torch.Tensor, ...]], right: list[object], relative: float) -> bool:
    floor = torch.finfo(inputs[0][0].dtype).tiny
    return all(agrees(norm(*one), to, relative, floor) for one, to in zip(inputs, right, strict=True))


def _same_bits(norm: FusedNorm, inputs: list[tuple[torch.Tensor, ...]], right: list[torch.Tensor]) -> int:
    return sum(int((norm(*one) == to).sum()) for one, to in zip(inputs, right, strict=True))
