"""Compares a divided model with an undivided run of its first layers, before it is served.

The undivided run comes first, on the first shard's device, with as many layers as fit into what that shard will hold later.
Then all shards compute the same tokens with as many of theirs.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..collectives.group import Group
from ..errors import UnsupportedModel
from .checkpoint import Checkpoint
from .division import meta_model
from .log_suppression import quiet_transformers
from .probe import random_tokens

log = logging.getLogger(__name__)

NUM_TOKENS = 12
TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 8e-2,
    torch.float16: 2e-2,
}  # of a token's logits, relative to their size
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "sliding_window_pattern_list")


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The logits float32 [tokens, vocabulary] after `tokens` of the model's first `num_layers` layers, undivided."""

    num_layers: int
    tokens: torch.Tensor
    logits: torch.Tensor


def reference_logits(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, budget_bytes: int) -> Reference:
    """Run the model undivided, with as many layers as take `budget_bytes`; at least one."""
    num_layers = _layers_within(checkpoint, dtype, budget_bytes)
    config = _truncated(checkpoint.config, num_layers)
    with quiet_transformers(), torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.spec.path), config=config, dtype=dtype, local_files_only=True, attn_implementation="eager",
            use_safetensors=True, experts_implementation=None,
        )  # fmt: skip
        model = model.eval().to(device)
        tokens = random_tokens(config.get_text_config(decoder=True), NUM_TOKENS)[None].to(device)
        logits = model(input_ids=tokens, use_cache=False).logits[0].float().cpu()
    return Reference(num_layers, tokens.cpu(), logits)


def check_against(model: Any, reference: Reference | None, name: str, group: Group) -> None:
    """Raises UnsupportedModel, on all shards, if `model`, cut to as many layers, gives other logits than the `reference` of
    shard 0.
    """
    plain = None if reference is None else (reference.num_layers, reference.tokens.numpy())
    num_layers, tokens = pickle.loads(group.exchange(pickle.dumps(plain))[0])
    with quiet_transformers(), _cut_to(model, num_layers), torch.inference_mode():
        device = model.get_input_embeddings().weight.device
        device = next((one.device for one in model.parameters() if not one.is_meta), device)
        logits = model(input_ids=torch.from_numpy(tokens).to(device), use_cache=False).logits[0]
    why = None
    if reference is not None:
        why = _difference(logits.float().cpu(), reference.logits, logits.dtype)
        log.info("%s: divided and undivided logits of %d layers agree: %s", name, num_layers, why is None)
    why = pickle.loads(group.exchange(pickle.dumps(why))[0])
    if why is not None:
        raise UnsupportedModel(
            f"{name} ({type(model).__name__}) cannot be divided over {group.size} shards: {why}, so transformers' plan leaves "
            "out a part of it, or a part depends on the number of heads in a way that the plan does not say"
        )


def _difference(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> str | None:
    """How logits [tokens, vocabulary] differ by more than rounding; None if they do not.

    In 16-bit types rounding may route a token to other experts: there the median token counts.
    """
    if found.shape != right.shape:
        return f"its logits have shape {list(found.shape)}, and {list(right.shape)} undivided"
    errors = (found - right).norm(dim=-1) / right.norm(dim=-1)
    worst = float(errors.max() if dtype == torch.float32 else errors.median())
    if not worst <= TOLERANCES[dtype]:
        return f"its logits differ from those of an undivided run by {worst:.2g} of their size"
    best = right.topk(2, -1)
    sure = (best.values[:, 0] - best.values[:, 1]) > 2 * TOLERANCES[dtype] * right.abs().amax(-1)
    if dtype == torch.float32 and bool((found.argmax(-1) != best.indices[:, 0])[sure].any()):
        return "its most likely tokens are others than those of an undivided run"
    return None


def _layers_within(checkpoint: Checkpoint, dtype: torch.dtype, budget_bytes: int) -> int:
    model = meta_model(checkpoint)
    layers = _layers_of(model)
    inside = [sum(one.numel() for one in layer.parameters()) * dtype.itemsize for layer in layers]
    outside = sum(one.numel() for one in model.parameters()) * dtype.itemsize - sum(inside)
    num, total = 0, outside
    while num < len(inside) and total + inside[num] <= budget_bytes:
        total += inside[num]
        num += 1
    return max(1, num)


def _truncated(config: Any, num_layers: int) -> Any:
    """A copy of `config` with the first `num_layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    for name in _BY_LAYER:
        if isinstance(values := getattr(text, name, None), list):
            setattr(text, name, values[:num_layers])
    text.num_hidden_layers = num_layers
    return config


def _layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers: the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    own = getattr(decoder, "layers", None)
    return own if isinstance(own, nn.ModuleList) else max(lists, key=len)


@contextmanager
def _cut_to(model: Any, num_layers: int) -> Iterator[None]:
    """Within the context, `model` has its first `num_layers` layers."""
    layers = _layers_of(model)
    holders = [
        (module, name) for module in model.modules() for name, child in module.named_children() if child is layers
    ]
    text = model.config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    cut = layers[:num_layers]
    for module, name in holders:
        setattr(module, name, cut)
    text.num_hidden_layers = num_layers
    try:
        yield
    finally:
        text.num_hidden_layers = whole
        for module, name in holders:
            setattr(module, name, layers)
