"""Compares a divided model with an undivided run of its first layers, before it is served.

The undivided run comes first, on the first shard's device, with as many layers as fit into what that shard will hold later.
Then all shards compute the same tokens with as many of theirs.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..collectives.group import CollectiveAborted, ShardGroup
from ..errors import CheckpointError, UnsupportedModel
from ..layers import Quantization
from ..layers.linears import NativeLinear
from ..layers.torch_linears import TorchLinear
from ..process.log_suppression import quiet_transformers
from .checkpoint import Checkpoint
from .meta_models import class_to_read, meta_model
from .probe import random_tokens
from .stored_model import StoredModel, one_by_one
from .text_model import making_models

log = logging.getLogger(__name__)

NUM_TOKENS = 12
# The most that a token's logits may differ by, relative to their size.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
# Of quantized models, which differ anyway: only coarse faults show. `load_model` can check before it quantizes.
_QUANTIZED: dict[Quantization, float] = {"int8": 0.15, "int4": 0.7}


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The logits float32 [tokens, vocabulary] after `tokens` of the model's first `num_layers` layers, undivided."""

    num_layers: int
    tokens: torch.Tensor
    logits: torch.Tensor
    dtype: torch.dtype  # that the model was computed in
    stored: bool = False  # of weights that are stored quantized: both runs have the same numbers


def reference_logits(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, budget_bytes: int) -> Reference:
    """Run the model undivided, with as many layers as take `budget_bytes`; at least one. Other layers are not read.

    Raises CheckpointError if the weights cannot be read, UnsupportedModel if the model does not compute.
    """
    whole = meta_model(checkpoint)
    num_layers = _layers_within(whole, dtype, budget_bytes)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.spec.path)}
    as_stored = bool(checkpoint.stored) or checkpoint.weights.gguf
    if as_stored:
        stored = StoredModel(checkpoint, dtype, change=lambda made: _keep_first(made, num_layers))
        kind, config = stored.kind, stored.config
        source = {"pretrained_model_name_or_path": None, "state_dict": stored.tensors}
    else:
        kind, config = class_to_read(checkpoint, lambda made: _keep_first(made, num_layers))
    config = copy.deepcopy(config)  # which models change
    with making_models() as said, torch.inference_mode(), one_by_one() if as_stored else nullcontext():
        try:
            model: Any = kind.from_pretrained(
                **source,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                attn_implementation="eager",
                experts_implementation=None,
            )
        except MemoryError:
            raise
        except Exception as error:  # safetensors, torch or transformers
            details = "; ".join([f"{type(error).__name__}: {error}", *said])
            raise CheckpointError(f"the weights in {checkpoint.spec.path} cannot be loaded: {details}") from error
        model = model.eval().to(device)
        tokens = random_tokens(config, NUM_TOKENS)[None].to(device)
        try:
            logits = model(input_ids=tokens, use_cache=False).logits[0].float().cpu()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model's code
            raise UnsupportedModel(
                f"{checkpoint.spec.name} ({type(model).__name__}) cannot be checked before it is divided: a forward pass of "
                f"its first {num_layers} layers fails ({type(error).__name__}: {error})"
            ) from error
    return Reference(num_layers, tokens.cpu(), logits, dtype, bool(checkpoint.stored))


def check_against(model: Any, reference: Reference | None, name: str, group: ShardGroup) -> None:
    """Raises UnsupportedModel, on all shards, if `model`, cut to as many layers, gives other logits than the `reference` of
    shard 0.
    """
    plain = None if reference is None else (reference.num_layers, reference.tokens.numpy())
    num_layers, tokens = pickle.loads(group.exchange(pickle.dumps(plain))[0])
    with quiet_transformers(), _cut_to(model, num_layers), torch.inference_mode():
        device = model.get_input_embeddings().weight.device
        device = next((one.device for one in model.parameters() if not one.is_meta), device)
        try:
            logits = model(input_ids=torch.from_numpy(tokens).to(device), use_cache=False).logits[0]
        except (CollectiveAborted, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UnsupportedModel(
                f"{name} ({type(model).__name__}) cannot be divided over {group.size} shards: a forward pass of a shard fails "
                f"({type(error).__name__}: {error})"
            ) from error
    why = None
    if reference is not None:
        types = {one.packed.type for one in model.modules() if isinstance(one, NativeLinear)}
        quantized = [bound for form, bound in _QUANTIZED.items() if form in types and not reference.stored]
        # torch's kernel for fp8 quantizes its rows
        quantized += [_QUANTIZED["int8"]] * any(
            isinstance(one, TorchLinear) and one.packed.form == "fp8" for one in model.modules()
        )
        exact = not quantized and {logits.dtype, reference.dtype} == {torch.float32}
        bound = max(TOLERANCES[logits.dtype], TOLERANCES[reference.dtype], *quantized)
        why = _difference(logits.float().cpu(), reference.logits, bound, exact)
        log.info("%s: divided and undivided logits of %d layers agree: %s", name, num_layers, why is None)
    why = pickle.loads(group.exchange(pickle.dumps(why))[0])
    if why is not None:
        raise UnsupportedModel(
            f"{name} ({type(model).__name__}) cannot be divided over {group.size} shards: {why}, so transformers' plan leaves "
            "out a part of it, or a part depends on the number of heads in a way that the plan does not say"
        )


def _difference(found: torch.Tensor, right: torch.Tensor, bound: float, exact: bool) -> str | None:
    """How logits [tokens, vocabulary] differ by more than rounding; None if they do not.

    Unless results are `exact`, rounding may route a token to other experts: then the median token counts.
    """
    if found.shape != right.shape:
        return f"its logits have shape {list(found.shape)}, and {list(right.shape)} undivided"
    errors = (found - right).norm(dim=-1) / right.norm(dim=-1)
    worst = float(errors.max() if exact else errors.median())
    if not worst <= bound:
        return f"its logits differ from those of an undivided run by {worst:.2g} of their size"
    best = right.topk(2, -1)
    sure = (best.values[:, 0] - best.values[:, 1]) > 2 * bound * right.abs().amax(-1)
    if exact and bool((found.argmax(-1) != best.indices[:, 0])[sure].any()):
        return "its most likely tokens are others than those of an undivided run"
    return None


def _layers_within(model: Any, dtype: torch.dtype, budget_bytes: int) -> int:
    """How many of the first layers of `model`, and what is outside of layers, take at most `budget_bytes` as `dtype`."""
    inside = [sum(one.numel() for one in layer.parameters()) * dtype.itemsize for layer in layers_of(model)]
    num, total = 0, sum(one.numel() for one in model.parameters()) * dtype.itemsize - sum(inside)
    while num < len(inside) and total + inside[num] <= budget_bytes:
        total += inside[num]
        num += 1
    return max(1, num)


def _keep_first(model: Any, num_layers: int) -> None:
    """Drop the layers of `model` from `num_layers` on. Mutates it."""
    layers = layers_of(model)
    for module, name in _holders(model, layers):
        setattr(module, name, layers[:num_layers])
    model.config.get_text_config(decoder=True).num_hidden_layers = num_layers


def _holders(model: nn.Module, layers: nn.ModuleList) -> list[tuple[nn.Module, str]]:
    """The modules that have `layers`, and under which names."""
    return [(module, name) for module in model.modules() for name, child in module.named_children() if child is layers]


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers: the longest list of modules; none without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    own = getattr(decoder, "layers", None)
    return own if isinstance(own, nn.ModuleList) else max(lists, key=len, default=nn.ModuleList())


@contextmanager
def _cut_to(model: Any, num_layers: int) -> Iterator[None]:
    """Within the context, `model` has its first `num_layers` layers."""
    layers, text = layers_of(model), model.config.get_text_config(decoder=True)
    holders, whole = _holders(model, layers), text.num_hidden_layers
    _keep_first(model, num_layers)
    try:
        yield
    finally:
        text.num_hidden_layers = whole
        for module, name in holders:
            setattr(module, name, layers)
