"""Fewer, larger calls in a model: modules replaced by kernels, native ones or Triton's, recognised by what they compute.

One forward pass over a few random tokens is watched. Linear layers that read the same tensor one after the other become one
product (`merged_linears`); RMS norms (`norms`), gated MLPs (`gated_mlps`) and rotary embeddings (`rotary`) become one
kernel each (`kernels`). No model is known by name: each replacement must equal its module on random inputs, and the logits of
the whole model must stay the same, or everything is undone (docs/decisions/0050-replaced-modules.md).

A replacement is an attribute `forward` of the module instance, so that classes, names and other instances stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..collectives.sharded_modules import Reduced
from ..process.log_suppression import quiet_transformers
from ..process.memory_usage import trim
from .gated_mlps import fused_mlp
from .kernels import RowKernels
from .linears import Linear, NativeLinear, is_changed, is_plain, uses_of_parameters
from .merged_linears import MergedLinears
from .norms import fused_norm
from .rotary import RotaryWatch, fused_attention_forward

log = logging.getLogger(__name__)

# The most that logits may change, relative to a token's: in float32 of any token, in 16-bit types, where rounding may route a
# token to other experts, of the median one.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(slots=True)
class Fused:
    """What was replaced in a model."""

    computes: bool = True  # False: a forward pass raises, or its logits are not finite
    products: list[MergedLinears] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    mlps: list[nn.Module] = field(default_factory=list)
    rotations: list[nn.Module] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        return {name: len(getattr(self, name)) for name in ("products", "norms", "mlps", "rotations")}

    def undo(self) -> None:
        """Let the modules compute as before. The weights of merged layers stay joined."""
        for module in (*self.norms, *self.mlps, *self.rotations):
            del module.forward
        for product in self.products:
            product.undo()
        self.products, self.norms, self.mlps, self.rotations = [], [], [], []


@dataclass(slots=True, eq=False)
class _ModuleCall:
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: nn.Module | None
    around: Reduced | None = None  # of a linear layer: what sums its outputs over the shards of the model
    linears: list[_ModuleCall] = field(default_factory=list)  # those inside, in order
    content: torch.Tensor | None = None  # of a linear layer: a copy of its input

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the module was called with; none if it got something else too."""
        return self.args if not self.kwargs and all(isinstance(one, torch.Tensor) for one in self.args) else ()

    @property
    def input(self) -> torch.Tensor | None:
        """The tensor that the module was called with, if it got nothing else."""
        return self.tensors[0] if len(self.tensors) == 1 else None


class _ForwardWatch:
    """The calls of modules in a forward pass. `linears` are those of them that may be merged."""

    def __init__(self, model: nn.Module, linears: Collection[nn.Module]) -> None:
        self.calls: list[_ModuleCall] = []
        self.linears = linears
        self.rotaries = [RotaryWatch(module) for module in model.modules()]
        self._model = model
        self._open: list[_ModuleCall] = []

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model over `tokens` [1, n], and note all calls. Returns the logits [n, vocabulary]."""
        hooks = []
        for module in self._model.modules():
            hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave))
        for rotary in self.rotaries:
            rotary.install()
        try:
            return _logits(self._model, tokens)
        finally:
            for rotary in self.rotaries:
                rotary.remove()
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around = self._open[-1].module if self._open and isinstance(self._open[-1].module, Reduced) else None
        parent = next((one.module for one in reversed(self._open) if not isinstance(one.module, Reduced)), None)
        call = _ModuleCall(module, args, kwargs, parent, around)
        if module in self.linears and call.input is not None:
            call.content = call.input.clone()
        self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open.pop()
        self.calls.append(call)
        if module in self.linears:
            for around in self._open:
                around.linears.append(call)


def fuse(model: Any, tokens: torch.Tensor, kernels: RowKernels | None) -> Fused:
    """Replace what kernels compute in `model`. Mutates the model; nothing without kernels.

    On a CPU, linear layers must be packed before. Costs a few forward passes.

    Args:
        tokens: int64 [n], random ones, on the model's device.
        kernels: Those of the device (`kernels_on`).
    """
    if kernels is None:
        return Fused()
    with quiet_transformers(), torch.inference_mode():
        try:
            watch = _ForwardWatch(model, _linears(model, kernels))
            before = watch.logits(tokens[None])
        except Exception as error:  # of a model that cannot be served either: the probe says why
            log.debug("the model is not changed: %s: %s", type(error).__name__, error)
            return Fused(computes=False)
        if not bool(before.isfinite().all()):
            return Fused(computes=False)
        fused = _replaced(watch, kernels)
        if (why := _difference(model, tokens[None], before)) is not None:
            fused.undo()
            log.warning("modules of this model compute something else by fused kernels (%s): they are not replaced", why)
    _shorten_lookups(model)
    log.info("replaced by fused kernels: %s", ", ".join(f"{n} {kind}" for kind, n in fused.counts.items()))
    return fused


def _linears(model: nn.Module, kernels: RowKernels) -> set[nn.Module]:
    """The linear layers with weights that may become parts of others."""
    packed: set[nn.Module] = {one for one in model.modules() if isinstance(one, NativeLinear)}
    if not kernels.merges_plain:
        return packed
    uses = uses_of_parameters(model)
    return packed | {one for one in model.modules() if is_plain(one) and uses[id(one.weight)] == 1}


class WholeList(nn.ModuleList):
    """A list of modules that is its own slice of all of them: models go through such a slice, which was made in each step."""

    def __getitem__(self, idx: Any) -> Any:
        """A module, or a list."""
        if isinstance(idx, slice) and idx.indices(len(self._modules)) == (0, len(self._modules), 1):
            return self
        return super().__getitem__(idx)


def _shorten_lookups(model: nn.Module) -> None:
    """Make children plain attributes of their modules: `nn.Module.__getattr__` is Python, and took 5 % of a small step.

    Assigning another module to such a name replaces both, as `nn.Module.__setattr__` does.
    """
    for module in model.modules():
        if type(module) is nn.ModuleList:
            module.__class__ = WholeList
        for name, child in module.named_children():
            if not hasattr(type(module), name):
                vars(module)[name] = child


def _replaced(watch: _ForwardWatch, kernels: RowKernels) -> Fused:
    fused, times = Fused(), Counter(call.module for call in watch.calls)
    for group in _groups([call for call in watch.calls if call.module in watch.linears], times):
        try:
            merged = MergedLinears.of(group)
        except torch.OutOfMemoryError:  # a group is held twice for a moment
            log.info("linear layers are not merged: no memory for another %d of them", len(group))
            break
        if merged is not None:
            fused.products.append(merged)
            if kernels.device.type == "cuda":
                trim(kernels.device)  # at most one group is held twice
    merged_as = {layer: merged for merged in fused.products for layer in merged.layers}
    for module in times:
        calls = [call for call in watch.calls if call.module is module]
        given = calls[0].tensors
        if len(given) not in (1, 2) or any(len(call.tensors) != len(given) for call in calls):
            continue
        if is_changed(module) or isinstance(module, Reduced):
            continue
        forward: Callable[..., Any] | None
        layers: list[Any] = [call.around or call.module for call in calls[0].linears]
        if not layers and (forward := fused_norm(module, given[0], kernels, *given[1:])) is not None:
            module.forward = forward
            fused.norms.append(module)
        elif (
            len(given) == 1
            and _like_an_mlp(calls, times)
            and (forward := fused_mlp(module, layers, merged_as.get(layers[0]), kernels)) is not None
        ):
            module.forward = forward
            fused.mlps.append(module)
    for rotary in watch.rotaries:
        if (forward := fused_attention_forward(rotary.module, rotary.calls, kernels)) is not None:
            rotary.module.forward = forward
            fused.rotations.append(rotary.module)
    return fused


def _groups(calls: list[_ModuleCall], times: Counter[nn.Module]) -> list[list[Linear]]:
    """Layers that read the same tensor with the same content one after the other, called by the same module, once each."""
    groups: list[list[Linear]] = []
    open_group = False
    for one, other in pairwise(calls):
        same = one.input is not None and one.input is other.input and one.parent is other.parent
        if not same or not _equal(one.content, other.content) or times[one.module] > 1 or times[other.module] > 1:
            open_group = False
            continue
        if not open_group:
            groups.append([one.module])  # type: ignore[list-item]
        groups[-1].append(other.module)  # type: ignore[arg-type]
        open_group = True
    return groups


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _like_an_mlp(calls: list[_ModuleCall], times: Counter[nn.Module]) -> bool:
    """Whether a module is called once, with a tensor, and calls two or three linear layers once, itself."""
    linears = calls[0].linears
    return (
        len(calls) == 1
        and len(linears) in (2, 3)
        and all(call.parent is calls[0].module and times[call.module] == 1 for call in linears)
    )


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits


def _difference(model: Any, tokens: torch.Tensor, before: torch.Tensor) -> str | None:
    """How the model's logits differ from `before` [n, vocabulary] by more than rounding; None if they do not."""
    try:
        after = _logits(model, tokens)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    right = before.double()
    errors = (after.double() - right).norm(dim=-1) / right.norm(dim=-1)
    worst = float(errors.max() if before.dtype == torch.float32 else errors.median())
    return None if worst <= TOLERANCES[before.dtype] else f"logits differ by {worst:.2g} of their size"
