"""Recognises gated MLPs, down(activation(gate(x)) * up(x)), by their outputs, and computes them in three calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..collectives.sharded_modules import Reduced
from .agreement import ERRORS, agrees
from .kernels import RowKernels
from .linears import Linear
from .merged_linears import MergedLinears

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
SCALES = (0.05, 1.0, 30.0)  # of trial inputs: among large ones a bound shows
_ROWS = 5


@dataclass(frozen=True, slots=True, eq=False)
class GateParts:
    """The product that holds gate and up, and the columns at which they begin."""

    whole: Linear
    gate_at: int
    up_at: int
    n: int


@dataclass(frozen=True, slots=True, eq=False)
class FusedMlp:
    """The function of a gated MLP by two products and a kernel."""

    parts: GateParts
    kind: int  # one of KINDS
    down: Linear | Reduced  # in a divided model what sums the outputs of all shards
    kernels: RowKernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., tokens, hidden] -> the same shape.

        As many collectives as the module itself has: another shard's may not be replaced.
        """
        return self.down.total(self._local(x)) if isinstance(self.down, Reduced) else self._local(x)

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        most_rows, parts = self.kernels.most_rows, self.parts
        if most_rows is not None and x.shape[-2] > most_rows:
            return torch.cat([self._local(piece) for piece in x.split(most_rows, -2)], -2)
        down = self.down.layer if isinstance(self.down, Reduced) else self.down
        out: torch.Tensor = down(self.kernels.gated(parts.whole.forward(x), parts.n, parts.gate_at, parts.up_at, self.kind))
        return out


def fused_mlp(module: nn.Module, layers: list[Linear], merged: MergedLinears | None, kernels: RowKernels) -> FusedMlp | None:
    """A function that equals `module`; None if it is not known to be a gated MLP.

    Args:
        module: Gets one tensor, and has called `layers`, and no other linear layers, in this order.
        layers: Two or three; the last one gives the result. In a divided model it is what sums the outputs of all shards.
        merged: All but the last one, if they are merged.
    """
    down, x = layers[-1], _trial_input(layers[0], kernels.device)
    try:
        hidden, result, out = _hidden(module, x, down)
        if hidden is None or out is not result:
            return None
        for parts in _places(layers, merged):
            both = parts.whole(x)
            for kind in KINDS.values():
                if _agrees(kernels.gated(both, parts.n, parts.gate_at, parts.up_at, kind), hidden):
                    return FusedMlp(parts, kind, down, kernels)
    except Exception:  # of a module of another kind on such an input, or of a compiler
        pass
    return None


def _places(layers: list[Linear], merged: MergedLinears | None) -> Iterator[GateParts]:
    """Where gate and up may be: two layers of a product, or the halves of one layer."""
    n = layers[-1].in_features
    if len(layers) == 2 and layers[0].out_features == 2 * n:
        yield GateParts(layers[0], 0, n, n)
        yield GateParts(layers[0], n, 0, n)
    if len(layers) == 3 and merged is not None and [width for _, width in merged.ranges] == [n, n]:
        (first, _), (second, _) = merged.ranges
        yield GateParts(merged.whole, first, second, n)
        yield GateParts(merged.whole, second, first, n)


def _trial_input(layer: Linear, device: torch.device) -> torch.Tensor:
    """[1, rows, in_features], some rows of each scale."""
    noise = torch.randn((1, _ROWS, layer.in_features), generator=torch.Generator().manual_seed(0))
    return torch.cat([noise * scale for scale in SCALES], 1).to(device, layer.weight.dtype)


def _hidden(module: nn.Module, x: torch.Tensor, down: Linear) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The input and output of the last layer, and the module's output; None if that layer is not called exactly once."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    with _noted(down, calls):
        out = module(x)
    hidden, result = calls[0] if len(calls) == 1 else (None, None)
    return hidden, result, out


@contextmanager
def _noted(layer: nn.Module, calls: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    try:
        yield
    finally:
        handle.remove()


def _agrees(out: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Where an activation nearly cancels, its error counts relative to its row."""
    relative, info = ERRORS[out.dtype], torch.finfo(out.dtype)
    floor = 1e-1 * hidden.float().abs().mean(-1, keepdim=True) + 4 * info.tiny * info.eps / relative
    return agrees(out, hidden, relative, floor)
