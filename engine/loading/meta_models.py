"""Models made by transformers: without memory, and one at a time in a process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..errors import CheckpointError, EngineError
from ..process.log_suppression import quiet_transformers
from .checkpoint import Checkpoint, read_config
from .models import ModelSpec
from .weight_files import StoredTensor, WeightFiles

_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors spells them
_making = threading.RLock()


@contextmanager
def making_models() -> Iterator[list[str]]:
    """A context in which one thread makes or reads models, since transformers changes process-wide settings meanwhile.

    Yields the list that collects its warnings.
    """
    with _making, quiet_transformers() as said:
        yield said


def meta_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Any:
    """The checkpoint's model without memory, of `dtype`, or the configuration's. Raises CheckpointError if there is none."""
    config = copy.deepcopy(checkpoint.config)  # transformers notes the type in it
    of: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with making_models(), torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=checkpoint.spec.trust_remote_code, **of
            )
        except (MemoryError, EngineError):
            raise
        except Exception as error:  # transformers and torch raise whatever sizes and names make them raise
            raise CheckpointError(
                f"{checkpoint.spec.path / 'config.json'} describes no model that transformers can make "
                f"({type(error).__name__}: {error}); fetch or save it again"
            ) from error


def outlined(spec: ModelSpec) -> Checkpoint:
    """The checkpoint of a configuration without its weights, with the tensors that transformers makes of it.

    Raises what `Checkpoint.open` raises for a configuration.
    """
    bare = Checkpoint(spec, read_config(spec), WeightFiles((), safetensors=True), (), {})
    model = meta_model(bare)
    kept = model.state_dict().keys()
    tensors = [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if name in kept)]
    return replace(
        bare,
        tensors=tuple(
            StoredTensor(name, _STORED.get(one.dtype, str(one.dtype)), tuple(one.shape), one.numel() * one.element_size())
            for name, one in tensors
        ),
    )


def changed_class(kind: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """A subclass of the model class `kind`. `change` gets each new model, before weights are read into it."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        change(self)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__init__": init, **names})
