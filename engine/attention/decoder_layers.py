"""Decoder layers of the usual form as one call of the native kernels: h = x + attention(norm(x)), then h + mlp(norm(h)).

A layer is a candidate if it has two norms, an attention and a gated MLP that `fuse` has replaced (`layers/fusion.py`), with
native products, and nothing else. While the model is probed over blocks its calls are noted. It is replaced if its own forward
and the one call then give the same bits for rows of several sizes: outputs, and K and V in the blocks
(docs/decisions/0078-layers-in-one-call.md).

The replacement is an attribute `forward` of the layer, as in `fusion.py`. It leaves calls of another kind to the layer's own.
"""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..layers.gated_mlps import FusedMlp
from ..layers.linears import TYPES, NativeLinear, is_changed, quantizes_rows
from ..layers.merged_linears import MergedLinears
from ..layers.norms import FusedNorm
from ..layers.rotary import FusedRotation
from .context import AttentionCall, StepContext, running, running_step
from .native_kernel import NativeKernel

log = logging.getLogger(__name__)

MOST_TOKENS = 512  # of a step; a gated MLP takes no more at once, and the calls that are saved are few beside so many rows
SCALES = (1e-4, 1e-2, 1.0, 30.0)  # of trial rows: among small ones eps shows, among large ones a bound


@cache
def _decoder_layer() -> Any:
    """The native layer. Looking it up takes as long as a small product."""
    return torch.ops.pagetide.decoder_layer.default


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The parts of a candidate, in the order in which they compute."""

    norms: tuple[FusedNorm, FusedNorm]  # of the input, and of the sum behind attention
    head_norms: tuple[FusedNorm | None, FusedNorm | None]  # of queries, and of keys
    qkv: NativeLinear
    starts: Sequence[int]  # the columns at which queries, keys and values begin; none: they follow each other
    out: NativeLinear
    rotation: FusedRotation
    mlp: FusedMlp

    @classmethod
    def of(cls, layer: nn.Module) -> list[LayerParts]:
        """What `layer` may be made of, in the orders that its norms may have; nothing if it has another form."""
        children = [child for child in layer.children() if not isinstance(child, nn.Dropout | nn.Identity)]
        forwards = [vars(child).get("forward") for child in children]
        norms = [one for one in forwards if isinstance(one, FusedNorm)]
        mlps = [one for one in forwards if isinstance(one, FusedMlp)]
        attentions = [child for child in children if FusedRotation.within(child) is not None]
        if is_changed(layer) or (len(norms), len(mlps), len(attentions), len(children)) != (2, 1, 1, 4) or _has_hooks(layer):
            return []
        found = cls._of_attention(attentions[0])
        if found is None or not all(map(_is_plain_product, (mlps[0].parts.whole, mlps[0].down))):
            return []
        return [cls(norms=(one, other), mlp=mlps[0], **found) for one, other in itertools.permutations(norms)]

    @staticmethod
    def _of_attention(module: nn.Module) -> dict[str, Any] | None:
        """The fields that describe attention; None if it has another form."""
        children = [child for child in module.children() if not isinstance(child, nn.Dropout | nn.Identity)]
        norms = [one for child in children if isinstance(one := vars(child).get("forward"), FusedNorm)]
        products = [child for child in children if isinstance(child, NativeLinear)]
        merged = [MergedLinears.around(one) for one in products]
        rest = [one for one, whole in zip(products, merged, strict=True) if whole is None]
        if len(norms) not in (0, 2) or len(norms) + len(products) != len(children):
            return None
        if len(products) == 4 and len(rest) == 1 and len({*merged}) == 2:
            whole: Any = next(one for one in merged if one is not None)
            qkv, starts, out = whole.whole, [start for start, _ in whole.ranges], rest[0]
        elif len(products) == len(rest) == 2:  # one layer for queries, keys and values
            out, qkv = sorted(rest, key=lambda one: one.out_features)
            starts = []
        else:
            return None
        if not _is_plain_product(qkv) or not _is_plain_product(out):
            return None
        head_norms, rotation = tuple(norms) if norms else (None, None), FusedRotation.within(module)
        return {"head_norms": head_norms, "qkv": qkv, "starts": starts, "out": out, "rotation": rotation}


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A call of a layer in the probe."""

    hidden: torch.Tensor
    kwargs: dict[str, Any]
    step: StepContext


class FusedLayer:
    """The function of a decoder layer by one native call; `own` is the layer's own forward, for calls of another kind.

    Args:
        call: Of its attention, over blocks.
        names: The keywords of a call like those that were tried.
    """

    def __init__(self, layer: nn.Module, parts: LayerParts, call: AttentionCall, layer_idx: int, names: set[str]) -> None:
        self.own = types.MethodType(type(layer).forward, layer)
        self._layer_idx, self._names = layer_idx, names
        self._hooks = _hooks_of(layer)
        self._dtype = call.query.dtype
        self._tensors, self._factors = _tensors_of(parts, call), _factors_of(parts, call)
        # By whether products quantize their rows.
        self._numbers = {quantizes: _numbers_of(parts, call, quantizes) for quantizes in (False, True)}

    def __call__(self, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> torch.Tensor:
        """hidden_states [1, T, hidden] -> the same shape."""
        step: StepContext | None = kwargs.get("step") or running_step()
        if (
            step is None
            or args
            or kwargs.keys() != self._names
            or kwargs.get("attention_mask") is not None
            or kwargs.get("past_key_values") is not None
            or not self._serves(step, hidden_states, position_embeddings)
        ):
            out: torch.Tensor = self.own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            return out
        step.beat()
        return self.compute(step, hidden_states, *position_embeddings)

    def compute(self, step: StepContext, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The one call: hidden_states [1, T, hidden], cos and sin [1, T, dims that rotate]."""
        cache = step.layers[self._layer_idx]
        result: torch.Tensor = _decoder_layer()(
            hidden_states, cos, sin, self._tensors, self._numbers[quantizes_rows()], self._factors,
            cache.key, cache.value, step.tables[cache.table], step.write_blocks[cache.table], step.write_offsets,
            step.bounds, step.lens, cache.key_scale, cache.value_scale,
        )  # fmt: skip
        return result

    def _serves(self, step: StepContext, hidden_states: torch.Tensor, position_embeddings: Any) -> bool:
        if type(step.kernel) is not NativeKernel or not isinstance(position_embeddings, tuple) or any(self._hooks):
            return False
        num_tokens, cos = hidden_states.shape[1], position_embeddings[0]
        if num_tokens > MOST_TOKENS or cos.dtype is not self._dtype or cos.shape[:2] != hidden_states.shape[:2]:
            return False
        if hidden_states.dtype is not self._dtype or not hidden_states.is_contiguous():
            return False
        if num_tokens != step.write_offsets.shape[0] or hidden_states.shape[0] != 1:
            return False
        cache = step.layers[self._layer_idx]
        if cache.chunk is not None or cache.aliased or cache.v_in_k:
            return False
        return cache.key.dtype is self._dtype or cache.key_scale is not None


class LayerWatch:
    """Notes the calls of candidates in a model that is probed, and then replaces what computes the same in one call."""

    def __init__(self, model: nn.Module) -> None:
        self._candidates = {layer: parts for layer in model.modules() if (parts := LayerParts.of(layer))}
        self._noted: dict[nn.Module, _Noted] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note calls inside."""
        with ExitStack() as undo:
            for layer in self._candidates:
                undo.callback(layer.register_forward_pre_hook(self._note, with_kwargs=True).remove)
            yield

    def fuse(self) -> int:
        """Replace layers. The model's attention must be pagetide's. Returns how many are replaced."""
        with torch.inference_mode():
            fused = [layer for layer, noted in self._noted.items() if self._fused(layer, noted)]
        self._noted.clear()
        log.info("%d of %d decoder layers run as one native call", len(fused), len(self._candidates))
        return len(fused)

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = kwargs.get("step") or running_step()
        if step is not None and len(args) == 1 and 0 < step.num_decodes < len(step.q_lens):  # chunks of both kinds
            self._noted[layer] = _Noted(args[0], kwargs, step)

    def _fused(self, layer: nn.Module, noted: _Noted) -> bool:
        try:
            trial = _LayerTrial(layer, noted)
            for parts in self._candidates[layer]:
                fused = trial.layer_of(parts)
                if fused is not None and trial.agrees(fused):
                    layer.forward = fused
                    return True
        except Exception as error:  # of a layer of another kind, or of the operator's checks
            log.debug("a layer stays as it is: %s: %s", type(error).__name__, error)
        return False


class _Recorder(NativeKernel):
    """Keeps the calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return super().attend(call)


class _LayerTrial:
    """What a layer computes of random rows in the place of noted ones."""

    def __init__(self, layer: nn.Module, noted: _Noted) -> None:
        generator, shape = torch.Generator().manual_seed(0), noted.hidden.shape
        scales = torch.tensor([SCALES[i % len(SCALES)] for i in range(shape[1])])
        self._layer, self._kwargs, kernel = layer, dict(noted.kwargs), _Recorder()
        self._x = (torch.randn(shape, generator=generator) * scales[:, None]).to(noted.hidden.dtype)
        self._step = replace(noted.step, kernel=kernel)
        if "step" in self._kwargs:
            self._kwargs["step"] = self._step
        with running(self._step):
            self._out = layer(self._x, **self._kwargs)
        self._calls = kernel.calls
        self._written = self._take_written()

    def layer_of(self, parts: LayerParts) -> FusedLayer | None:
        """The layer in one call, if it calls attention once, as one of `parts` can."""
        if len(self._calls) != 1 or not isinstance(self._kwargs.get("position_embeddings"), tuple):
            return None
        call, names = self._calls[0], self._kwargs.keys() - {"position_embeddings"}
        layer_idx = next(i for i, cache in enumerate(self._step.layers) if cache is call.cache)
        return FusedLayer(self._layer, parts, call, layer_idx, names)

    def agrees(self, fused: FusedLayer) -> bool:
        """Whether it gives the same bits, and writes them."""
        out = fused.compute(self._step, self._x, *self._kwargs["position_embeddings"])
        return isinstance(self._out, torch.Tensor) and all(
            map(_same, (out, *self._take_written()), (self._out, *self._written))
        )

    def _take_written(self) -> list[torch.Tensor]:
        """K and V of the step's tokens, which become zeros in the cache."""
        cache, taken = self._calls[0].cache, list[torch.Tensor]()
        places = self._step.write_blocks[cache.table], self._step.write_offsets
        for stored in (cache.key, cache.value):
            taken.append(stored[places])
            stored[places] = 0
        return taken


def fused_layers(model: nn.Module) -> int:
    """How many layers of `model` run as one native call."""
    return sum(isinstance(vars(one).get("forward"), FusedLayer) for one in model.modules())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _is_plain_product(layer: object) -> bool:
    """Whether `layer` multiplies by its packed weight as it lies, and does nothing else."""
    return isinstance(layer, NativeLinear) and not is_changed(layer) and layer.packed.order is None


def _has_hooks(layer: nn.Module) -> bool:
    return any(one._forward_hooks or one._forward_pre_hooks for one in layer.modules())


def _hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """Where hooks of the modules in `layer` are, and of all modules. Those of `layer` itself are called around its forward."""
    inside = [hooks for one in layer.modules() if one is not layer for hooks in (one._forward_hooks, one._forward_pre_hooks)]
    return (*inside, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


# The tensors, numbers and factors of a layer, in the order of `native/csrc/layer_ops.cpp`.


def _products_of(parts: LayerParts) -> list[NativeLinear]:
    return [parts.qkv, parts.out, parts.mlp.parts.whole, parts.mlp.down]  # type: ignore[list-item]  # see LayerParts.of


def _norms_of(parts: LayerParts) -> list[FusedNorm | None]:
    return [parts.norms[0], *parts.head_norms, parts.norms[1]]


def _besides(layer: NativeLinear) -> list[torch.Tensor | None]:
    """What belongs to a packed weight."""
    packed = layer.packed
    return [layer.bias, packed.scales, packed.in_scales, packed.zeros, packed.factors]


def _tensors_of(parts: LayerParts, call: AttentionCall) -> list[torch.Tensor]:
    weights = [None if norm is None else norm.weight for norm in _norms_of(parts)]
    of_products = [one for layer in _products_of(parts) for one in (layer.packed.packed, *_besides(layer))]
    sinks = None if call.sinks is None else call.sinks.float()
    return [one for one in (*weights, *of_products, sinks) if one is not None]


def _numbers_of(parts: LayerParts, call: AttentionCall, quantizes: bool) -> list[int]:
    (num_heads, dim), num_kv_heads = call.query.shape[1:], call.cache.key.shape[2]
    starts = parts.starts or (0, num_heads * dim, (num_heads + num_kv_heads) * dim)
    gate, kind = parts.mlp.parts, parts.mlp.kind
    numbers = [num_heads, *starts, parts.rotation.rotation, gate.n, kind, gate.gate_at, gate.up_at, call.window or 0]
    for norm in _norms_of(parts):
        numbers.append(0 if norm is None else 1 | 2 * (norm.weight is not None) | 4 * norm.rounds_first)
    for layer in _products_of(parts):
        packed, there = layer.packed, sum(1 << i for i, one in enumerate(_besides(layer)) if one is not None)
        numbers += [TYPES[packed.type], packed.n, packed.group, packed.rows_in_int8 and quantizes, there]
    return numbers


def _factors_of(parts: LayerParts, call: AttentionCall) -> list[float]:
    factors = [call.scaling, call.softcap or 0.0]
    for norm in _norms_of(parts):
        factors += [0.0, 0.0] if norm is None else [norm.eps, norm.offset]
    return factors
