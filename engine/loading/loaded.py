"""A model that the user has already loaded: the engine shares its tensors and does not modify it."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import build_glob_alternation

from ... import native
from ..attention.latent import expands_plainly, latent_projections
from ..errors import ConfigError, UnsupportedModel
from ..layers.linears import is_plain
from ..layers.packing import packs
from .text_model import has_other_parts, making_models, remove_modules, unused_modules, within
from .weight_files import StoredTensor

log = logging.getLogger(__name__)

_STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An engine's view of a loaded model. It does not keep the model alive."""

    config: PreTrainedConfig
    generation_config: GenerationConfig
    reference: weakref.ref[PreTrainedModel]
    unused_modules: tuple[str, ...] = ()  # by name: parts that text does not need

    @classmethod
    def of(cls, model: object) -> Self:
        """Wrap a transformers model that is entirely on one device.

        Raises ConfigError for anything else, UnsupportedModel for a model that does not generate text.
        """
        if not isinstance(model, PreTrainedModel):
            peft = "; merge the adapter first: model.merge_and_unload()" if hasattr(model, "merge_and_unload") else ""
            raise ConfigError(
                f"model must be a name, a folder, a hub id or a loaded transformers model, got {model!r:.80}{peft}"
            )
        if not model.can_generate() or model.generation_config is None:
            raise UnsupportedModel(f"a {type(model).__name__} does not continue text: load it as a causal LM")
        devices = sorted({str(tensor.device) for tensor in model.parameters()})
        if len(devices) != 1 or devices == ["meta"]:
            raise ConfigError(
                f"the loaded model lies on {', '.join(devices)}: an engine needs all of it on one device; load it without "
                f"device_map, or give its name or folder instead"
            )
        return cls(model.config, model.generation_config, weakref.ref(model), _unused_modules(model))

    @property
    def model(self) -> PreTrainedModel:
        """The model. Raises ConfigError if it has been freed."""
        model = self.reference()
        if model is None:
            raise ConfigError("the loaded model is gone: keep it until the engine is made of it")
        return model

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The parameters in the form of a weight file's listing; shared ones once."""
        return tuple(
            StoredTensor(name, _STORED.get(tensor.dtype, "other"), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in self.named_parameters()
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that an engine takes; shared ones once."""
        return (pair for pair in self.model.named_parameters() if not within(pair[0], self.unused_modules))

    @property
    def expands_plainly(self) -> bool:
        """Whether the model's latent attention, if it has such, is transformers' own, with unchanged projections."""
        return expands_plainly(self.model)

    def added_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Bytes that an engine takes on `device` besides the tensors shared with the model.

        They are the converted weights and, on a CPU, those of packed linear layers (`linears`), except one tied to an
        embedding that is kept: `planning` counts that one.
        """
        model, types = self.model, self._types(dtype)
        unpacked = latent_projections(model) if self.expands_plainly else frozenset()
        layers = (
            {f"{name}.weight": m.weight for name, m in model.named_modules() if is_plain(m) and m not in unpacked}
            if device.type == "cpu"
            else {}
        )
        kept = native.instructions() is None
        embedding = getattr(model.get_input_embeddings(), "weight", None) if kept else None
        own = {id(w) for name, w in layers.items() if w is not embedding and packs(w.numel(), types.get(name, w.dtype))}
        return sum(
            tensor.numel() * types.get(name, tensor.dtype).itemsize
            for name, tensor in self.named_parameters()
            if id(tensor) in own or tensor.device != device or tensor.dtype != types.get(name, tensor.dtype)
        )

    def copied(self, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
        """A copy of the model over the same tensors, in evaluation mode. Tensors of another device or type are converted.

        `dtype` None keeps the types.

        Changes to the copy, such as another attention or packed layers, do not affect the original.
        """
        shared: dict[int, Any] = {}
        types = self._types(dtype)
        for name, parameter in self.model.named_parameters():
            if within(name, self.unused_modules):
                shared[id(parameter)] = parameter
                continue
            tensor = parameter.detach().to(device, types.get(name))  # itself, if nothing changes
            plain = type(parameter) is nn.Parameter  # quantized parameters hold more than numbers
            shared[id(parameter)] = nn.Parameter(tensor, requires_grad=False) if plain else parameter
        for buffer in self.model.buffers():
            shared[id(buffer)] = buffer.to(device)  # keep their types: rotary frequencies stay float32
        try:
            made: PreTrainedModel = copy.deepcopy(self.model, shared)
        except Exception as error:  # the model's parts may raise anything
            raise UnsupportedModel(
                f"the loaded {type(self.model).__name__} cannot be copied ({type(error).__name__}: {error}); give its name "
                f"or folder instead"
            ) from error
        remove_modules(made, self.unused_modules)
        return made.eval()

    def _types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """As `parameter_types`; empty for a quantized model, which is never converted."""
        if dtype is None or getattr(self.config, "quantization_config", None) is not None:
            return {}
        return parameter_types(self.model, dtype)


def _unused_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """The parts of a loaded model that text does not need; none of a model that transformers would not make so."""
    if not has_other_parts(model.config) or model.is_custom_code():
        return ()
    with making_models(), torch.device("meta"):
        try:
            twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
            names = unused_modules(twin)
        except Exception as error:  # of the model's code
            log.info("all parts of the %s are kept: %s", type(model).__name__, error)
            return ()
    there = {name for name, _ in model.named_modules()}
    return tuple(name for name in names if name in there)


def parameter_types(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each floating-point parameter, by its names, once `model` is converted to `dtype`.

    Parameters that transformers keeps in float32 for this type have float32, as have all that are float32 in a model whose own
    type is `dtype` already.
    """
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0].search if plan else lambda name: None
    is_own = model.dtype == dtype
    return {
        name: torch.float32 if (parameter.dtype == torch.float32 if is_own else kept(name) is not None) else dtype
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point()
    }


def checked_tokenizer(tokenizer: object) -> PreTrainedTokenizerBase:
    """The tokenizer itself. Raises ConfigError if it is not a transformers tokenizer."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer must be a name, a folder, a hub id or a loaded transformers tokenizer, got {tokenizer!r:.80}"
        )
    return tokenizer
