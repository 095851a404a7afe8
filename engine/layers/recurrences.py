"""Causal convolutions and the gated delta rule by native kernels, over a packed row and states in blocks.

Models call functions of their module by name. `install` puts others in their place, if these compute the same. While a mixer is
called `over` its states, they read them and change them where they lie, token by token, so that a sequence has the same results
however it is cut; all other calls go to the model's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ... import native

CONV, RECURRENT = "conv", "recurrent"  # kinds of states
KERNELS = range(2, 5)  # columns of a convolution
_CLOSE = 1e-4  # relative error of the functions that are replaced


@dataclass(slots=True, eq=False)
class StatesInBlocks:
    """The states of a layer for the chunks of a packed row [1, T, ...], which change where they are.

    Args:
        memory: uint8 [blocks, bytes of one].
        tables: int64 [chunks, columns], the blocks of each chunk's sequence.
        chunks: int64 [3, chunks]: of each its first token in the row, its tokens, and whether it continues a sequence. What
            is computed for tokens of no chunk is 0.
        places: By the kind of state, int64 [2, parts]: the table's column of each of its parts, and the byte in that block.
            Each is used once.
    """

    memory: torch.Tensor
    tables: torch.Tensor
    chunks: torch.Tensor
    places: dict[str, torch.Tensor]

    def take(self, kind: str) -> tuple[torch.Tensor, ...]:
        """The arguments of a kernel. Raises RuntimeError if the layer has no such state, or it was taken before."""
        if kind not in self.places:
            raise RuntimeError(f"a layer computes with a {kind} state that it has not, or twice with the same")
        return self.memory, self.tables, self.places.pop(kind), self.chunks


_running: ContextVar[StatesInBlocks | None] = ContextVar("pagetide_states", default=None)


@contextmanager
def over(states: StatesInBlocks) -> Iterator[None]:
    """A context in which the thread's calls of replaced functions compute over `states`.

    Raises RuntimeError at its end if some were not used.
    """
    token = _running.set(states)
    try:
        yield
    finally:
        _running.reset(token)
    if states.places:
        raise RuntimeError(
            f"a layer does not compute with its states ({', '.join(states.places)}) by the functions of its module"
        )


def install(module: ModuleType) -> frozenset[str]:
    """Replace the functions of `module` that compute with states, if it has them and the kernels compute the same. Idempotent.

    Returns the kinds of states of those that are replaced; none without native kernels.
    """
    if native.instructions() is None:
        return frozenset()
    kinds = set()
    for replacement in (_Conv, _GatedDelta):
        function = getattr(module, replacement.name, None)
        if function is not None and not isinstance(function, replacement) and replacement.computes(function):
            function = replacement(function)
            setattr(module, replacement.name, function)
        if isinstance(function, replacement):
            kinds.add(replacement.kind)
    return frozenset(kinds)


class _Conv:
    """transformers' `causal_conv1d_fn`, and what goes before it."""

    name, kind = "causal_conv1d_fn", CONV

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if (states := _running.get()) is None:
            out: torch.Tensor = self._original(hidden_states, weight, bias, activation, **kwargs)
            return out
        if activation not in (None, "silu", "swish"):
            raise RuntimeError(f"no kernel computes a convolution and {activation}")
        rows = hidden_states[0].t()  # [T, channels]
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.ops.pagetide.causal_conv(rows, weight.contiguous(), bias, activation is not None, *states.take(CONV))
        return out.t()[None]

    @staticmethod
    @lru_cache
    def computes(function: Callable[..., Any]) -> bool:
        """Whether `function` gives what the kernel does."""
        ours, random = _Conv(function), torch.Generator().manual_seed(0)
        for kernel in KERNELS:
            x, weight, bias = (torch.randn(shape, generator=random) for shape in ((1, 12, 9), (12, kernel), (12,)))
            for more in ((None, None), (bias, None), (bias, "silu")):
                if not _agrees(function, ours, 12 * kernel, x, weight, *more):
                    return False
        return True


class _GatedDelta:
    """transformers' `torch_chunk_gated_delta_rule`, and what goes before it."""

    name, kind = "torch_chunk_gated_delta_rule", RECURRENT

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *args: Any,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (states := _running.get()) is None:
            kwargs |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            found: tuple[torch.Tensor, torch.Tensor | None] = self._original(query, key, value, g, beta, *args, **kwargs)
            return found
        out = torch.ops.pagetide.gated_delta(
            _dense(query), _dense(key), _dense(value), g[0].float().contiguous(), beta[0].float().contiguous(),
            *states.take(RECURRENT), use_qk_l2norm_in_kernel, key.shape[3] ** -0.5,
        )  # fmt: skip
        return out[None], None

    @staticmethod
    @lru_cache
    def computes(function: Callable[..., Any]) -> bool:
        """Whether `function` gives what the kernel does."""
        ours, random = _GatedDelta(function), torch.Generator().manual_seed(0)
        query, key, value = (torch.randn((1, 9, *shape), generator=random) for shape in ((2, 8), (2, 8), (4, 6)))
        gates = -torch.rand((1, 9, 4), generator=random), torch.rand((1, 9, 4), generator=random)
        how = ({"use_qk_l2norm_in_kernel": on} for on in (True, False))
        return all(_agrees(function, ours, 4 * 8 * 6, query, key, value, *gates, **more) for more in how)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x [1, T, heads, n] as [T, heads, n], dense within a token."""
    rows = x[0]
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _agrees(function: Callable[..., Any], ours: _Conv | _GatedDelta, state_items: int, *args: Any, **more: Any) -> bool:
    """Whether `function` and `ours`, which is called for two chunks of a sequence, give the same nine tokens."""
    memory, tables = torch.zeros((1, 4 * state_items), dtype=torch.uint8), torch.zeros((1, 1), dtype=torch.int64)
    places = torch.zeros((2, 1), dtype=torch.int64)
    parts: list[Any] = []
    try:
        wanted = function(*args, **more)
    except Exception:  # another signature
        return False
    for chunk in ([0, 4, 0], [4, 5, 1]):
        with over(StatesInBlocks(memory, tables, torch.tensor(chunk)[:, None], {ours.kind: places})):
            parts.append(ours(*args, **more))
    wanted, one, two = (found[0] if isinstance(found, tuple) else found for found in (wanted, *parts))
    got = one + two
    return got.shape == wanted.shape and bool((got - wanted).abs().max() < _CLOSE * wanted.abs().max())
