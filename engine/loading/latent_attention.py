"""Attention over cached latents, for models with multi-head latent attention (MLA).

Such a layer computes a latent for each token, and from it K and V of all heads by one projection, but for a rotated part of K
that the heads share. transformers caches latent and rotated part, and expands them in `expand_kv` for its attention function. A
layer with `v_in_k` caches them too, as one head: K is the latent and the rotated part, V the latent.

K and V of the heads are linear in the latent, so that the heads' weights move to the other side of the products: queries are
multiplied by those of K, and what a head attends to, a mean of latents, by those of V (the absorbed form). In between is
attention of all heads to one KV head, which every kernel computes (docs/decisions/0052-latent-attention.md).

`expand_kv` of each layer must equal these products on random latents.
"""

from __future__ import annotations

import logging
import types
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...cache.geometry import Geometry, LayerShape
from ..attention.context import AttentionCall
from ..attention.interface import LATENT_ATTENTION, NAME
from ..errors import UnsupportedModel
from .latent_projections import latent_attention_modules
from .linears import divided

log = logging.getLogger(__name__)

ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # of elements around 1
_TRIAL_TOKENS = 5


class LatentAttention:
    """One layer's weights of K and V by head: views of the projection's weight.

    Args:
        weight: [num_heads, nope_dim + v_dim, rank], each head's K without the rotated part, then its V.
        nope_dim: Elements of K without the rotated part.
        rope_dim: Elements of the rotated part.
    """

    def __init__(self, weight: torch.Tensor, nope_dim: int, rope_dim: int) -> None:
        self.key = weight[:, :nope_dim]  # [num_heads, nope_dim, rank]
        self.value = weight[:, nope_dim:].transpose(1, 2)  # [num_heads, rank, v_dim]
        self.expanded = LayerShape(len(weight), nope_dim + rope_dim, weight.shape[1] - nope_dim)

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [T, num_heads, v_dim]
        """Attend by the step's kernel. The query of `call` is the model's, [T, num_heads, nope_dim + rope_dim]."""
        latents = call.step.kernel.attend(replace(call, query=self._absorbed(call.query)))
        return _products(latents.transpose(0, 1), self.value).transpose(0, 1)

    def _absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """The queries of cached keys, [T, num_heads, rank + rope_dim]."""
        nope, rope = query.transpose(0, 1).split_with_sizes(
            (self.key.shape[1], query.shape[-1] - self.key.shape[1]), -1
        )
        return torch.cat((_products(nope, self.key), rope), -1).transpose(0, 1)


def _products(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[H, T, k] x [H, k, n] -> [H, T, n]. On a CPU in 16 bits in pieces of few sizes, as oneDNN keeps a primitive for each."""
    if rows.device.type != "cpu" or rows.dtype == torch.float32:
        return torch.bmm(rows, weights)
    num_rows, sizes = rows.shape[1], divided(rows.shape[1])
    pieces = F.pad(rows, (0, 0, 0, sum(sizes) - num_rows)).split(sizes, 1)
    return torch.cat([torch.bmm(piece, weights) for piece in pieces], 1)[:, :num_rows]


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
        torch.randn((1, 1, _TRIAL_TOKENS, dim), generator=generator).to(weight.device, weight.dtype)
        for dim in (rank, rope_dim)
    )
    try:
        key, value = type(module).expand_kv(module, latents, rotated)
        nope_dim = key.shape[-1] - rope_dim
        found = LatentAttention(weight.view(key.shape[1], nope_dim + value.shape[-1], rank), nope_dim, rope_dim)
        right = (
            latents[0] @ found.key.transpose(1, 2),
            rotated[0].expand(key.shape[1], -1, -1),
            latents[0] @ found.value,
        )
        computed = (*key[0].split_with_sizes((nope_dim, rope_dim), -1), value[0])
        agrees = all(map(_agree, computed, right))
    except Exception as error:  # a module of another kind may raise anything on such inputs
        log.debug("%s is left as it is: %s: %s", type(module).__name__, type(error).__name__, error)
        return None
    return found if agrees else None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    bound = ERRORS[other.dtype] * (other.float().abs() + other.float().square().mean().sqrt())
    return one.shape == other.shape and bool(((one.float() - other.float()).abs() <= bound).all())
