"""The experts of a mixture by the native kernels: each expert's weights are packed, and multiply the rows routed to it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .linears import PackedWeight, placeholder

FIRST = ("gate_up_proj", "up_proj")  # the weights that multiply first, by whether experts have a gate
LAST = "down_proj"


def is_plain_experts(module: nn.Module) -> bool:
    """Whether `module` computes as transformers' `use_experts_implementation` says."""
    if "forward" in vars(module) or not hasattr(type(module).forward, "__wrapped__"):  # by the decorator of that name
        return False
    said = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")]
    return all(isinstance(one, bool) for one in said) and not said[-1] and hasattr(module, "_apply_gate")


class PackedExperts(nn.Module):
    """What experts become by their class (`pack`), so that their own gate stays. Their weights are placeholders."""

    _first: Sequence[Sequence[PackedWeight]]  # of each expert: one, or parts with outputs one behind the other
    _last: Sequence[PackedWeight]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Rows [T, hidden], experts of each int64 [T, k], their weights [T, k] -> [T, hidden]."""
        if kwargs:  # families differ in the names
            args = inspect.signature(super().forward).bind(*args, **kwargs).args
        rows, experts, weights = args
        if experts.shape != weights.shape:
            raise RuntimeError(f"experts {list(experts.shape)} of each row, and weights {list(weights.shape)}")
        out, chosen = torch.zeros_like(rows), experts.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self._last)).tolist()
        begin = 0
        for expert, packed in enumerate(self._last):
            end = begin + counts[expert]
            if begin < end:
                places = order[begin:end]
                tokens = places // experts.shape[-1]
                hidden = self._hidden(expert, rows[tokens])
                of_expert = packed.product(hidden, self._bias(LAST, expert)) * weights.reshape(-1)[places, None]
                out.index_add_(0, tokens, of_expert.to(out.dtype))
            begin = end
        return out

    def _hidden(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        name = FIRST[0] if self.has_gate else FIRST[1]
        parts = [one.product(x, None) for one in self._first[expert]]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if (bias := self._bias(name, expert)) is not None:
            both = both + bias
        gate: Any = self._apply_gate if self.has_gate else self.act_fn
        hidden: torch.Tensor = gate(both)
        return hidden

    def _bias(self, name: str, expert: int) -> torch.Tensor | None:
        if not self.has_bias:
            return None
        biases: torch.Tensor = getattr(self, f"{name}_bias")
        return biases[expert]

    @classmethod
    def pack(
        cls, module: nn.Module, first: Sequence[Sequence[PackedWeight]], last: Sequence[PackedWeight], dtype: torch.dtype
    ) -> None:
        """Let `module`, which `is_plain_experts` and has no weights, compute with these. Mutates it."""
        kind = type(module)
        module._first, module._last = first, last  # type: ignore[assignment]
        name = FIRST[0] if module.has_gate else FIRST[1]
        for leaf, n, k in ((name, sum(one.n for one in first[0]), first[0][0].k), (LAST, last[0].n, last[0].k)):
            shape = (k, n) if module.is_transposed else (n, k)
            setattr(module, leaf, placeholder((len(last), *shape), dtype))
        module.__class__ = type(kind.__name__, (cls, kind), {"__module__": kind.__module__})
