"""The projections of latent attention from latents to K and V of all heads.

They are neither packed nor quantized: their weight is used by head (`latent_attention`), which neither form allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .linears import is_plain


class LatentProjection(nn.Linear):
    """An `nn.Linear` that is neither packed nor quantized. One becomes such by its class."""


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
            projection.__class__ = LatentProjection
