"""Linear layers that read the same tensor, as one product.

The layers stay in the model, and each returns its columns of the product, which the first one computes. The product is the same
to the bit: an output's sum depends on neither the other outputs nor the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...native import panel_columns
from .linears import NativeLinear
from .quantized_linears import QuantizedLinear

PackedLayer = NativeLinear | QuantizedLinear


class MergedLinears:
    """Layers with outputs that are columns of one product. Keeps input and product until the last layer has its columns."""

    def __init__(self, layers: Sequence[PackedLayer], whole: PackedLayer, starts: Sequence[int]) -> None:
        self.layers, self.whole = tuple(layers), whole
        self.ranges = [(start, one.out_features) for start, one in zip(starts, layers, strict=True)]
        self._sizes: list[int] = []  # of the pieces of the product: columns of layers, and gaps
        self._pieces: list[int] = []  # those of the layers
        for start, width in self.ranges:
            if gap := start - sum(self._sizes):
                self._sizes.append(gap)
            self._pieces.append(len(self._sizes))
            self._sizes.append(width)
        self._input: torch.Tensor | None = None
        self._columns: dict[int, torch.Tensor] = {}  # by layer, until it returns them

    @classmethod
    def of(cls, layers: Sequence[PackedLayer]) -> MergedLinears | None:
        """Merge `layers`, and free their own weights. None, and nothing changes, if they differ in kind or form."""
        native = [one for one in layers if type(one) is NativeLinear and not one.shares_weight]
        quantized = [one for one in layers if type(one) is QuantizedLinear]
        if len(native) == len(layers):
            if (joined := NativeLinear.joined(native)) is None:
                return None
            for one, start in zip(native, joined[1], strict=True):
                one.share_weight(joined[0], start)
            merged = cls(layers, *joined)
        elif len(quantized) == len(layers):
            if (whole := QuantizedLinear.joined(quantized)) is None:
                return None
            starts = [sum(one.out_features for one in layers[:i]) for i in range(len(layers))]
            for layer, start in zip(quantized, starts, strict=True):
                _share_quantized(layer, whole, start)
            merged = cls(layers, whole, starts)
        else:
            return None
        merged.install()
        return merged

    def install(self) -> None:
        """Let the layers return their columns of the product."""
        for i, layer in enumerate(self.layers):
            layer.forward = self._reader(i)  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        """Let each layer compute its own product again, from its part of the joined weight."""
        for layer in self.layers:
            del layer.forward

    def _reader(self, i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def read(x: torch.Tensor) -> torch.Tensor:
            """x [..., in_features] -> [..., out_features], rows as far apart as those of the whole product."""
            if self._input is not x or i not in self._columns:
                pieces = self.whole.forward(x).split_with_sizes(self._sizes, -1)
                self._input, self._columns = x, {layer: pieces[at] for layer, at in enumerate(self._pieces)}
            out = self._columns.pop(i)
            if not self._columns:
                self._input = None
            return out

        return read


def _share_quantized(layer: QuantizedLinear, whole: QuantizedLinear, start: int) -> None:
    """Let `layer` hold views of the weight and scales of `whole`, in which its outputs begin at `start`."""
    one, both, columns = layer.packed, whole.packed, panel_columns()
    first = start // columns * (both.packed.numel() // -(-both.n // columns))
    packed = both.packed[first : first + one.packed.numel()]
    layer.packed = replace(one, packed=packed, scales=both.scales.narrow(-1, start, one.n))
