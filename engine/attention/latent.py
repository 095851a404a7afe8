"""Attention over cached latents, for models with multi-head latent attention (MLA).

Such a layer computes a latent for each token, and from it K and V of all heads by one projection, but for a rotated part of K
that the heads share. transformers caches latent and rotated part, and expands them in `expand_kv` for its attention function. A
layer with `v_in_k` caches them too, as one head: K is the latent and the rotated part, V the latent.

K and V of the heads are linear in the latent, so that the heads' weights move to the other side of the products: queries are
multiplied by those of K, and what a head attends to, a mean of latents, by those of V (the absorbed form). In between is
attention of all heads to one KV head, which every kernel computes. It has three times as many products as attention to the
heads' own K and V, so that a long chunk expands those of its sequence, some heads at a time.
docs/decisions/0052-latent-attention.md has the figures.

The projection is neither packed nor quantized: its weight is used by head, which neither form allows.

`expand_kv` of each layer must equal these products on random latents.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...cache.geometry import Geometry, LayerShape
from ..errors import UnsupportedModel
from ..layers.agreement import ERRORS, agrees
from ..layers.linears import KeptLinear, is_plain
from ..layers.onednn import divided
from .backends import EXPANDED_BYTES, EXPANDED_FROM
from .context import AttentionCall, LayerCache
from .interface import LATENT_ATTENTION, NAME
from .quantized_kv import gather

log = logging.getLogger(__name__)

_TRIAL_TOKENS = 5


def latent_attention_modules(model: nn.Module) -> Iterator[Any]:
    """The attention modules of `model` that have such a projection."""
    return (module for module in model.modules() if isinstance(getattr(module, "kv_b_proj", None), nn.Module))


def latent_projections(model: nn.Module) -> frozenset[nn.Module]:
    """The projections of `model`."""
    return frozenset(module.kv_b_proj for module in latent_attention_modules(model))


def expands_plainly(model: nn.Module) -> bool:
    """Whether all of these modules expand latents by transformers' method, `expand_kv`, with an unchanged projection."""
    return all(hasattr(type(one), "expand_kv") and is_plain(one.kv_b_proj) for one in latent_attention_modules(model))


def keep_projections(model: nn.Module) -> None:
    """Exclude the projections of `model` from packing and quantization. Mutates it."""
    for projection in latent_projections(model):
        if is_plain(projection):
            projection.__class__ = KeptLinear


class LatentAttention:
    """One layer's weights of K and V by head: views of the projection's weight.

    Args:
        weight: [num_heads, nope_dim + v_dim, rank], each head's K without the rotated part, then its V.
        nope_dim: Elements of K without the rotated part.
        rope_dim: Elements of the rotated part.
    """

    def __init__(self, weight: torch.Tensor, nope_dim: int, rope_dim: int) -> None:
        self.weight = weight
        self.key = weight[:, :nope_dim]  # [num_heads, nope_dim, rank]
        self.value = weight[:, nope_dim:].transpose(1, 2)  # [num_heads, rank, v_dim]
        self.k_dims = (nope_dim, rope_dim)
        self.expanded = LayerShape(len(weight), nope_dim + rope_dim, weight.shape[1] - nope_dim)

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [T, num_heads, v_dim]
        """Attend by the step's kernel. The query of `call` is the model's, [T, num_heads, nope_dim + rope_dim]."""
        step, query = call.step, call.query
        if (step.q_lens < EXPANDED_FROM).all():
            return self._absorbed(call)
        out = query.new_zeros(len(query), len(self.weight), self.expanded.v_dim)
        begin = 0  # of the short chunks before chunk i
        for i in [*np.flatnonzero(step.q_lens >= EXPANDED_FROM).tolist(), len(step.q_lens)]:
            if begin < i:
                part, tokens = _part(call, begin, i)
                out[tokens] = self._absorbed(part)
            if i < len(step.q_lens):
                self._attend_expanded(call, i, out)
            begin = i + 1
        return out

    def _absorbed(self, call: AttentionCall) -> torch.Tensor:  # [T, num_heads, v_dim]
        """Attention to the cached latents, between two products by head."""
        nope, rope = call.query.transpose(0, 1).split_with_sizes(self.k_dims, -1)
        query = torch.cat((_products(nope, self.key), rope), -1).transpose(0, 1)
        latents = call.step.kernel.attend(replace(call, query=query))
        return _products(latents.transpose(0, 1), self.value).transpose(0, 1)

    def _attend_expanded(self, call: AttentionCall, chunk: int, out: torch.Tensor) -> None:
        """Fill the chunk's places in `out` [T, num_heads, v_dim], by K and V of its sequence that are expanded now.

        They are a cache of their own for the kernel, made for as many heads at a time as fit EXPANDED_BYTES.
        """
        part, tokens = _part(call, chunk, chunk + 1)
        length, table = int(part.step.kv_lens[0]), call.cache.table
        blocks = part.step.tables[table][0, : -(-length // part.step.block_size)]
        # [blocks, block_size, 1, rank + rope_dim]
        cached = call.query.new_empty(len(blocks), *call.cache.key.shape[1:])
        gather(call.cache.key, call.cache.key_scale, blocks, cached)
        latents, rotated = cached.split_with_sizes((self.key.shape[2], self.k_dims[1]), -1)
        rows, own = latents.flatten(0, 2), slice(length - int(part.step.q_lens[0]), length)
        step = replace(part.step, tables=(torch.arange(len(blocks), device=rows.device)[None],))
        num_heads, shape = len(self.weight), self.expanded
        at_a_time = max(1, EXPANDED_BYTES // (len(rows) * (shape.k_dim + shape.v_dim) * rows.itemsize))
        for first in range(0, num_heads, at_a_time):
            heads = slice(first, min(first + at_a_time, num_heads))
            both = _projected(rows, self.weight[heads]).unflatten(0, cached.shape[:2])
            nope, value = both.split_with_sizes((self.k_dims[0], shape.v_dim), -1)
            key = torch.cat((nope, rotated.expand(-1, -1, nope.shape[2], -1)), -1)
            out[tokens, heads] = step.kernel.attend(
                replace(
                    part,
                    query=part.query[:, heads],
                    key=key.flatten(0, 1)[own],
                    value=value.flatten(0, 1)[own],
                    cache=LayerCache(key, value),
                    step=step,
                    sinks=None if call.sinks is None else call.sinks[heads],
                )
            )


def _part(call: AttentionCall, begin: int, end: int) -> tuple[AttentionCall, slice]:
    """The chunks `begin .. end` of a call, as a call of their own, and their tokens."""
    step = call.step
    first, last = int(step.q_starts[begin]), int(step.q_starts[end - 1] + step.q_lens[end - 1])
    tokens = slice(first, last)
    part = replace(
        step,
        q_starts=step.q_starts[begin:end] - first,
        q_lens=step.q_lens[begin:end],
        kv_lens=step.kv_lens[begin:end],
        num_decodes=max(0, min(step.num_decodes, end) - begin),
        lens=step.lens[begin:end],
        bounds=step.bounds[begin : end + 1] - first,
        tables=tuple(table[begin:end] for table in step.tables),
    )
    return replace(call, query=call.query[tokens], key=call.key[tokens], value=call.value[tokens], step=part), tokens


def _products(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[H, T, k] x [H, k, n] -> [H, T, n], in pieces of few sizes if oneDNN computes them: it keeps a primitive for each."""
    if not _by_onednn(rows):
        return torch.bmm(rows, weights)
    num_rows, sizes = rows.shape[1], divided(rows.shape[1])
    pieces = F.pad(rows, (0, 0, 0, sum(sizes) - num_rows)).split(sizes, 1)
    return torch.cat([torch.bmm(piece, weights) for piece in pieces], 1)[:, :num_rows]


def _projected(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[S, rank] by [H, n, rank] -> [S, H, n]. By head if oneDNN computes it: few shapes."""
    if not _by_onednn(rows):
        return F.linear(rows, weights.flatten(0, 1)).unflatten(-1, weights.shape[:2])
    return torch.stack([_products(rows[None], weight.T[None])[0] for weight in weights], 1)


def _by_onednn(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype != torch.float32


def attend_to_latents(model: Any, geometry: Geometry) -> None:
    """Let the layers of `model` that have `v_in_k` hand latents to paged attention. Mutates it; nothing if there are none.

    Attention of other implementations gets expanded K and V as before. Raises UnsupportedModel if a layer does not compute what
    its configuration says.
    """
    missing = {index: shape for index, shape in enumerate(geometry.layers) if shape.v_in_k}
    for module in latent_attention_modules(model) if missing else ():
        shape = missing.get(module.layer_idx)
        if shape is not None and (found := _recognised(module, shape)) is not None:
            setattr(module, LATENT_ATTENTION, found)
            module.expand_kv = types.MethodType(_expand_kv, module)
            del missing[module.layer_idx]
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served out of paged blocks: layer {min(missing)} does not expand latents to K "
            f"and V as its configuration says. Use transformers' generate for this model, or serve another"
        )


def _expand_kv(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_kv` of an attention module, for latents [1, 1, T, rank] and rotated parts [1, 1, T, rope_dim]."""
    if module.config._attn_implementation == NAME:
        return torch.cat((kv_nope, k_rot), -1), kv_nope
    return type(module).expand_kv(module, kv_nope, k_rot)  # type: ignore[no-any-return]


def _recognised(module: Any, shape: LayerShape) -> LatentAttention | None:
    """The module's weights by head, if `expand_kv` is known to compute these products."""
    projection, rank, rope_dim = module.kv_b_proj, shape.v_dim, shape.k_dim - shape.v_dim
    if not isinstance(projection, nn.Linear) or projection.bias is not None or projection.in_features != rank:
        return None
    weight, generator = projection.weight.detach(), torch.Generator().manual_seed(0)
    latents, rotated = (
        torch.randn((1, 1, _TRIAL_TOKENS, dim), generator=generator).to(weight.device, weight.dtype) for dim in (rank, rope_dim)
    )
    try:
        key, value = type(module).expand_kv(module, latents, rotated)
        nope_dim = key.shape[-1] - rope_dim
        found = LatentAttention(weight.view(key.shape[1], nope_dim + value.shape[-1], rank), nope_dim, rope_dim)
        right = (latents[0] @ found.key.transpose(1, 2), rotated[0].expand(key.shape[1], -1, -1), latents[0] @ found.value)
        computed = (*key[0].split_with_sizes((nope_dim, rope_dim), -1), value[0])
        equal = all(
            agrees(one, to, ERRORS[weight.dtype], to.float().square().mean().sqrt())
            for one, to in zip(computed, right, strict=True)
        )
    except Exception as error:  # a module of another kind may raise anything on such inputs
        log.debug("%s is left as it is: %s: %s", type(module).__name__, type(error).__name__, error)
        return None
    return found if equal else None
