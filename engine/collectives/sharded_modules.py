"""The modules of a divided model at which shards meet. Each holds the local layer, which is packed, merged or quantized like
any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .group import ShardGroup


class _Around(nn.Module):
    """A module around `layer`. What it has not itself is the layer's: weight, in_features, ..."""

    def __init__(self, layer: nn.Module, group: ShardGroup) -> None:
        super().__init__()
        self.layer = layer
        self.group = group

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class Reduced(_Around):
    """Sums the layer's outputs over the shards: a linear layer with some of the inputs, or experts with a part of their
    width.
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output, summed."""
        return self.total(self.layer(*args, **kwargs))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all shards' x, the layer's output."""
        return self.group.all_reduce(x)


class GatheredHead(_Around):
    """Gathers the logits of the shards, on the first one; on all while the model is loaded and checked."""

    def __init__(self, layer: nn.Module, group: ShardGroup, widths: tuple[int, ...]) -> None:
        super().__init__(layer, group)
        self.everywhere = True
        self._widths = widths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> [..., vocabulary]; the local columns where they are not gathered."""
        return self.group.gather(self.layer(x), self._widths, everywhere=self.everywhere)


class DividedEmbedding(_Around):
    """An embedding with the rows from `first` on; those of other shards come from there."""

    def __init__(self, layer: nn.Module, group: ShardGroup, first: int, num_rows: int) -> None:
        super().__init__(layer, group)
        self._first, self._num_rows = first, num_rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input int [...] -> [..., hidden]."""
        local = input - self._first
        inside = (local >= 0) & (local < self._num_rows)
        rows = self.layer(torch.where(inside, local, 0))
        return self.group.all_reduce(rows.masked_fill(~inside[..., None], 0))


def gather_on_first(model: nn.Module) -> None:
    """From now on only the first shard gets all logits."""
    for module in model.modules():
        if isinstance(module, GatheredHead):
            module.everywhere = False
