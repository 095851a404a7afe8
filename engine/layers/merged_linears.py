"""Linear layers that read the same tensor, as one product.

The layers stay in the model, and each returns its columns of the product, which the first one computes. The product of packed
layers is the same to the bit: an output's sum depends on neither the other outputs nor the rows. CUDA's libraries may sum in
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from .linears import COLUMN_PARTS, Linear, NativeLinear, joined_plain


class MergedLinears:
    """Layers with outputs that are columns of one product. Keeps input and product until the last layer has its columns."""

    def __init__(self, layers: Sequence[Linear], whole: Linear, starts: Sequence[int]) -> None:
        self.layers, self.whole = tuple(layers), whole
        self.ranges = [(start, one.out_features) for start, one in zip(starts, layers, strict=True)]
        self._sizes: list[int] = []  # of the pieces of the product: columns of layers, and gaps
        places = dict[int, int]()  # of the piece at a column
        for start, width in sorted(self.ranges):
            if gap := start - sum(self._sizes):
                self._sizes.append(gap)
            places[start] = len(self._sizes)
            self._sizes.append(width)
        self._pieces = [places[start] for start in starts]
        self._input: torch.Tensor | None = None
        self._columns: dict[int, torch.Tensor] = {}  # by layer, until it returns them

    @classmethod
    def of(cls, layers: Sequence[Linear]) -> MergedLinears | None:
        """Merge `layers`, and free their own weights. None, and nothing changes, if they differ in form."""
        packed = [one for one in layers if isinstance(one, NativeLinear)]
        plain = [one for one in layers if isinstance(one, nn.Linear)]
        if (packed and plain) or any(one.shares_weight for one in packed):
            return None
        joined: tuple[Linear, list[int]] | None = joined_plain(plain) if plain else NativeLinear.joined(packed)
        if joined is None:
            return None
        merged = cls(layers, *joined)
        if isinstance(merged.whole, NativeLinear):
            merged._share(merged.whole)
        merged.install()
        return merged

    def move(self) -> None:
        """Let a packed product have memory of its own."""
        if isinstance(whole := self.whole, NativeLinear):
            whole.packed = replace(whole.packed, packed=whole.packed.packed.clone())
            self._share(whole)

    def _share(self, whole: NativeLinear) -> None:
        for layer, (start, width) in zip(self.layers, self.ranges, strict=True):
            if isinstance(layer, NativeLinear):
                layer.packed = whole.packed.outputs(start, width)

    def install(self) -> None:
        """Let the layers return their columns of the product."""
        for i, layer in enumerate(self.layers):
            layer.forward = partial(self._read, i)  # type: ignore[method-assign]

    def undo(self) -> None:
        """Let each layer compute its own product again, from its part of the joined weight."""
        for layer in self.layers:
            del layer.forward
            if isinstance(layer, NativeLinear):  # scales of groups lie between those of other layers
                one = layer.packed
                parts = {name: getattr(one, name) for name in COLUMN_PARTS if getattr(one, name) is not None}
                layer.packed = replace(one, **{name: part.contiguous() for name, part in parts.items()})

    @classmethod
    def around(cls, layer: nn.Module) -> MergedLinears | None:
        """The product that `layer` reads its outputs from; None if it computes them itself."""
        owner = getattr(getattr(vars(layer).get("forward"), "func", None), "__self__", None)
        return owner if isinstance(owner, cls) else None

    def _read(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features] of layer `i`, rows as far apart as those of the whole product."""
        if self._input is not x or i not in self._columns:
            pieces = self.whole.forward(x).split_with_sizes(self._sizes, -1)
            self._input, self._columns = x, {layer: pieces[at] for layer, at in enumerate(self._pieces)}
        out = self._columns.pop(i)
        if not self._columns:
            self._input = None
        return out
