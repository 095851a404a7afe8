"""Recognises the function by which an attention module rotates queries and keys, and computes it by one kernel.

The function is a global of the module's code, such as `apply_rotary_pos_emb`. It is replaced for one instance only: its
`forward` becomes the same code with other globals.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .agreement import agrees
from .kernels import RowKernels

ROTATIONS = (0, 1, 2)  # halves, halves with a cos for each pair, neighbours
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}  # of elements around 1


@dataclass(frozen=True, slots=True, eq=False)
class RotaryCall:
    """A call of a global function with queries, keys, cos and sin."""

    name: str
    tensors: tuple[torch.Tensor, ...]  # q, k [batch, heads, tokens, dim] or [batch, tokens, heads, dim]; cos, sin
    rest: tuple[Any, ...]  # further arguments
    more: dict[str, Any]


class RotaryWatch:
    """Notes calls by `module` of global functions with tensors of 4, 4, 3 and 3 dimensions."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, list[RotaryCall]()
        self._names = global_functions(module)

    def install(self) -> None:
        """Note calls from now on."""
        if self._names:
            noting = {name: self._noting(name, function) for name, function in self._names.items()}
            self.module.forward = with_globals(self.module, noting)

    def remove(self) -> None:
        """Undo `install`."""
        if self._names:
            del self.module.forward

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            if [getattr(one, "ndim", None) for one in args[:4]] == [4, 4, 3, 3]:
                self.calls.append(RotaryCall(name, args[:4], args[4:], kwargs))
            return function(*args, **kwargs)

        return note


def global_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """The global functions in Python that the code of `module.forward` names, if that code can be given other globals."""
    forward = type(module).forward
    if type(forward) is not types.FunctionType or hasattr(forward, "__wrapped__") or "forward" in vars(module):
        return {}
    there = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name: value for name, value in there.items() if type(value) is types.FunctionType}


def with_globals(module: nn.Module, replaced: dict[str, Callable[..., Any]]) -> types.MethodType:
    """`module.forward` with some global functions replaced."""
    forward = type(module).forward
    assert isinstance(forward, types.FunctionType)
    everything = {**forward.__globals__, **replaced}
    function = types.FunctionType(forward.__code__, everything, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(function, module)


@dataclass(frozen=True, slots=True, eq=False)
class FusedRotation:
    """The kernel's rotation for calls with the same further arguments; for others, `function`."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    more: dict[str, Any]
    kernels: RowKernels
    token_dim: int
    rotation: int  # one of ROTATIONS

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The rotated (q, k)."""
        if args == self.rest and kwargs == self.more and cos.dtype == q.dtype == k.dtype:
            return self.kernels.rotate(q, k, cos, sin, self.token_dim, self.rotation)
        return self.function(q, k, cos, sin, *args, **kwargs)

    @classmethod
    def within(cls, module: nn.Module) -> FusedRotation | None:
        """That of a module with the forward of `fused_attention_forward`; None for another."""
        known = getattr(getattr(vars(module).get("forward"), "__func__", None), "__globals__", {})
        return next((one for one in known.values() if isinstance(one, cls)), None)


def fused_attention_forward(module: nn.Module, calls: list[RotaryCall], kernels: RowKernels) -> Callable[..., Any] | None:
    """The module's forward with a kernel in place of the function that it called; None if that does something else."""
    if len(calls) != 1:
        return None
    call = calls[0]
    if any(isinstance(one, torch.Tensor) for one in (*call.rest, *call.more.values())):
        return None  # it may depend on their content
    function = global_functions(module)[call.name]
    for token_dim in (1, 2):
        for rotation in ROTATIONS:
            if _agrees(function, call, kernels, token_dim, rotation):
                found = FusedRotation(function, call.rest, call.more, kernels, token_dim, rotation)
                return with_globals(module, {call.name: found})
    return None


def _agrees(function: Callable[..., Any], call: RotaryCall, kernels: RowKernels, token_dim: int, rotation: int) -> bool:
    """Whether the kernel's rotation equals `function` on random tensors like those of `call`, cos and sin among them."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(one.shape, generator=generator).to(one) for one in call.tensors)
    if cos.shape[1] == 1 or not q.shape[token_dim] == k.shape[token_dim] == cos.shape[1]:
        return False
    try:
        right = function(q, k, cos, sin, *call.rest, **call.more)
        out = kernels.rotate(q, k, cos, sin, token_dim, rotation)
    except Exception:  # not such a function, or not such tensors
        return False
    pair = right if isinstance(right, (tuple, list)) else ()
    return len(pair) == 2 and all(agrees(one, to, ERRORS.get(q.dtype, 0.0), 1.0) for one, to in zip(out, pair, strict=True))
