"""The interface to transformers: pagetide's attention function under the name "pagetide".

No mask function is registered under that name, so transformers creates None as the mask of every layer
(`masking_utils._preprocess_mask_arguments` returns early). Visibility follows from the step, causality and the layer's
`sliding_window`; anything beyond is refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .context import AttentionCall, LayerCache, StepContext, current

NAME = "pagetide"
# The attribute of modules that hand over latents: an object with `attend(call)` in place of the kernel's.
LATENT_ATTENTION = "latent_attention"


@lru_cache(maxsize=1)
def register() -> str:
    """Register the function with transformers, once per process. Returns the name for `set_attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, head_dim], rotated
    value: torch.Tensor,  # [1, num_kv_heads, T, v_head_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, T, num_heads, v_head_dim]
    """Write this batch's K and V to the arena, then attend through the block tables.

    Raises RuntimeError outside a step, and NotImplementedError for what a paged layer does not support.
    """
    if attention_mask is not None or position_bias is not None or dropout or is_causal is not True:
        _refuse(module, attention_mask, position_bias, dropout, is_causal)
    step = current(kwargs)
    step.beat()
    cache = _layer_cache(module, step, query, key)
    if cache.chunk is not None:
        step = step.in_chunks(cache.chunk)
    # The arena's, or with scales the model's: that of V, as a model may rotate in a wider type.
    dtype = cache.key.dtype if cache.key_scale is None else value.dtype
    call = AttentionCall(
        query[0].transpose(0, 1).to(dtype),
        key[0].transpose(0, 1).to(dtype),
        value[0].transpose(0, 1).to(dtype),
        cache,
        step,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        softcap,
        s_aux,
    )
    if not cache.aliased:
        step.kernel.write(call)
    attending = module.__dict__.get(LATENT_ATTENTION, step.kernel)
    return attending.attend(call)[None], None


def _refuse(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
) -> None:
    """Raise for a call that needs more than causal attention within each sequence."""
    layer = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if attention_mask is not None:
        raise NotImplementedError(
            f"{layer} was handed an attention mask of shape {tuple(attention_mask.shape)}: paged attention knows only"
            " causality and sliding windows; call the model without attention_mask"
        )
    if position_bias is not None:
        raise NotImplementedError(f"{layer} adds a position bias to its scores, which paged attention does not support")
    if dropout and module.training:
        raise NotImplementedError(f"{layer} is in training mode with dropout {dropout}: call model.eval() first")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise NotImplementedError(f"{layer} is not causal: paged attention serves decoders only")


def _layer_cache(module: torch.nn.Module, step: StepContext, query: torch.Tensor, key: torch.Tensor) -> LayerCache:
    """The layer's cache, after checking that the call covers exactly this step's tokens."""
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None or layer_idx >= len(step.layers):
        raise NotImplementedError(
            f"{type(module).__name__} says it is layer {layer_idx}, and there are caches for {len(step.layers)} layers"
        )
    num_tokens = step.write_offsets.shape[0]
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        raise NotImplementedError(
            f"layer {layer_idx} attends with queries {tuple(query.shape)} to keys {tuple(key.shape)} in a step of"
            f" {num_tokens} tokens: one packed batch [1, heads, tokens, dim] is expected"
        )
    return step.layers[layer_idx]
