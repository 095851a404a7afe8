"""The gated delta rule of recurrent layers by the native kernel, in steps.

Models call functions of their module by name, one for several tokens and one for single ones. `install` puts others in their
place, which compute token by token, so that a sequence has the same results however it is cut, and leave all other calls to
the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ... import native

_NAMES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")  # as transformers names them
_CLOSE = 1e-4  # relative error of the functions that are replaced

Rule = Callable[..., Any]  # of transformers: (output, states or None)


def install(module: ModuleType, in_step: Callable[[], bool]) -> None:
    """Replace the functions of the gated delta rule in `module`, if it has them and they compute it, for calls while `in_step`.

    Does nothing without native kernels. Idempotent.
    """
    if native.instructions() is None:
        return
    for name in _NAMES:
        rule = getattr(module, name, None)
        if rule is not None and not isinstance(rule, _GatedDelta) and _computes(rule):
            setattr(module, name, _GatedDelta(rule, in_step))


class _GatedDelta:
    """A function of transformers, and what goes before it in a step."""

    def __init__(self, original: Rule, in_step: Callable[[], bool]) -> None:
        self._original = original
        self._in_step = in_step

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if args or query.device.type != "cpu" or not self._in_step():
            more = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **kwargs}
            return self._original(
                query, key, value, *args, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                **more,
            )  # fmt: skip
        states = None if initial_state is None else initial_state.float().contiguous()
        return _native(query, key, value, g, beta, states, use_qk_l2norm_in_kernel)


def _native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor | None,
    normalizes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, states behind the last token) in query's type and float32. `states` changes."""
    batch, _, heads, dim = value.shape
    if states is None:
        states = torch.zeros((batch, heads, key.shape[3], dim))
    rows = [one.float().contiguous() for one in (query, key, value, g, beta)]
    out = torch.ops.pagetide.gated_delta(*rows, states, normalizes, key.shape[3] ** -0.5)
    return out.to(query.dtype), states


def _computes(rule: Rule) -> bool:
    """Whether `rule` gives what the kernel does, for random rows with and without a state before them."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((2, 3, heads, dim), generator=random) for heads, dim in ((2, 8), (2, 8), (4, 6)))
    g, beta = -torch.rand((2, 3, 4), generator=random), torch.rand((2, 3, 4), generator=random)
    for states in (None, torch.randn((2, 4, 8, 6), generator=random)):
        try:
            wanted = rule(
                query, key, value, g=g, beta=beta, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        except Exception:  # another signature
            return False
        got = _native(query, key, value, g, beta, None if states is None else states.clone(), normalizes=True)
        for one, other in zip(got, wanted, strict=True):
            if other is None or one.shape != other.shape or not (one - other).abs().max() < _CLOSE * other.abs().max():
                return False
    return True
