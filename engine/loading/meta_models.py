"""The model of a checkpoint without memory, and the class that its weights are read into."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...cache.geometry import FoundLayer
from ..attention.gathered import attends_by_itself, find_cached, may_attend_by_itself
from ..attention.states import find_layers, may_have_states
from ..errors import UnsupportedModel
from ..process.log_suppression import quiet_transformers
from .checkpoint import Checkpoint, read_config, take_quantization
from .models import ModelSpec
from .text_model import config_of, remove_modules, whole_model
from .weight_files import StoredTensor, WeightFiles

log = logging.getLogger(__name__)

SPELLED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors spells them
_TOKENS = 4
_SEEN_AS = torch.bfloat16  # the type of models without memory: torch's product of experts takes no other there


def meta_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Any:
    """The checkpoint's model without memory, of `dtype`, or the configuration's, without parts that text does not need.

    Raises CheckpointError if there is none.
    """
    spec = checkpoint.spec
    model = whole_model(checkpoint.config, spec.path, dtype, trust_remote_code=spec.trust_remote_code)
    remove_modules(model, checkpoint.unused_modules)
    return model


def class_to_read(
    checkpoint: Checkpoint, change: Callable[[Any], None] = lambda model: None, kind: type[Any] | None = None
) -> tuple[type[Any], Any]:
    """The class of the checkpoint's model, which is a subclass of `kind` if that is known, and the configuration that it takes.

    New models lack the parts that text does not need, and `change` gets each, before weights are read into it.
    """
    kind = kind or type(meta_model(checkpoint))

    def changed(model: Any) -> None:
        remove_modules(model, checkpoint.unused_modules)
        change(model)

    return changed_class(kind, changed), config_of(kind, checkpoint.config)


def outlined(spec: ModelSpec) -> Checkpoint:
    """The checkpoint of a configuration without its weights, with the tensors that transformers makes of it.

    Raises what `Checkpoint.open` raises for a configuration.
    """
    config = read_config(spec)
    given = take_quantization(config)
    if given is not None and config.dtype is None and config.get_text_config().dtype is None:
        config.dtype = torch.bfloat16  # what is not quantized: see `Checkpoint.open`
    bare = Checkpoint(spec, config, WeightFiles((), safetensors=True), (), {}).of_text()
    model = meta_model(bare)
    kept = model.state_dict().keys()
    tensors = [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if name in kept)]
    return replace(
        bare,
        stored_as=None if given is None else str(given["quant_method"]),
        tensors=tuple(
            StoredTensor(name, SPELLED.get(one.dtype, str(one.dtype)), tuple(one.shape), one.numel() * one.element_size())
            for name, one in tensors
        ),
    )


def found_layers(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[FoundLayer, ...]:
    """What each layer of the checkpoint's model hands to the cache in a forward pass; () if none of them has states, and the
    configuration tells their K and V.

    Nothing is allocated or read. Raises CheckpointError, and UnsupportedModel if the pass fails.
    """
    kinds = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(one), ()) for one in (checkpoint.config, checkpoint.text_config)]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    may_have, tokens = any(map(may_have_states, kinds)), torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    if not may_have and not may_attend_by_itself(kinds, checkpoint.config):
        return ()
    model = meta_model(checkpoint, _SEEN_AS)
    if not may_have:
        return _found_cached(model, tokens) if attends_by_itself(model) else ()
    try:
        with quiet_transformers(), torch.inference_mode():
            layers, _ = find_layers(model, tokens)
    except Exception as error:  # of the model's code
        raise UnsupportedModel(
            f"{checkpoint.spec.name}: the states of its layers cannot be told, since a forward pass without memory fails "
            f"({type(error).__name__}: {error})"
        ) from error
    if not any(layer.states for layer in layers):
        return ()
    name, of_model = (str(one).removeprefix("torch.") for one in (_SEEN_AS, dtype))
    return tuple(
        replace(one, states=tuple([replace(state, dtype=of_model) if state.dtype == name else state for state in one.states]))
        for one in layers
    )


def _found_cached(model: Any, tokens: torch.Tensor) -> tuple[FoundLayer, ...]:
    """As `find_cached`; () if the pass fails, since the probe says why the model cannot be served."""
    try:
        with quiet_transformers(), torch.inference_mode():
            return find_cached(model, tokens)
    except Exception as error:  # of the model's code
        log.debug("%s: a pass without memory fails: %s: %s", type(model).__name__, type(error).__name__, error)
        return ()


def changed_class(kind: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """A subclass of the model class `kind`. `change` gets each new model, before weights are read into it."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        change(self)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__init__": init, **names})
