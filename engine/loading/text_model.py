"""The text of models that have other parts too, such as vision: their class, the modules that text needs, the tensors of these.

Such a model has a decoder and an output head, and beside them, in the modules that hold these, towers and projectors. Its own
code computes text with the decoder and the head, scaling of logits included, so its class is kept, and modules beside those two
that a forward pass over text does not touch are removed before weights are read. No list of families says which they are.
See docs/decisions/0059-text-of-multimodal-models.md.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..errors import CheckpointError, EngineError
from ..process.log_suppression import quiet_transformers

# In this order. Those of causal language models include some that have other parts.
_AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
_NUM_TOKENS = 4  # of the forward pass
# Heads for multi-token prediction, in the names of tensors that models without such a part lack.
_PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")

_making = threading.RLock()


def auto_class(config: Any) -> Any | None:
    """transformers' class of models with this configuration that continue text; None if it has none."""
    found = [one for one in _AUTO_CLASSES if type(config) in one._model_mapping]
    whole = (one for one in found if _reads_the_whole(one._model_mapping[type(config)], config))
    return next(whole, found[0] if found else None)


def _reads_the_whole(kind: Any, config: Any) -> bool:
    """Whether a model class finds its tensors in checkpoints of `config`, which may have other parts too.

    Of a class of the text alone (Emu3's) transformers has to know how their names differ.
    """
    text = getattr(kind, "config_class", None)
    return (
        text is None
        or text is type(config)
        or kind.base_model_prefix != "model"
        or get_checkpoint_conversion_mapping(text.model_type) is not None
    )


def continuing_part(config: Any) -> Any:
    """The part of a configuration with the model that continues text, where the whole only holds several models, such as the
    thinker and the talker of Qwen-Omni; else `config`. transformers reads such a part from the files of the whole.
    """
    auto = auto_class(config)
    if auto is None or getattr(auto._model_mapping[type(config)], "forward", None) is not nn.Module.forward:
        return config
    parts = (getattr(config, name, None) for name in config.sub_configs)
    part = next((one for one in parts if one is not None and auto_class(one) is not None), config)
    for name in ("quantization_config", "dtype"):
        if getattr(part, name, None) is None and getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    return part


def has_other_parts(config: Any) -> bool:
    """Whether the model has parts besides its language model."""
    return config.get_text_config(decoder=True) is not config


def may_have_more(config: Any, names: Iterable[str]) -> bool:
    """Whether some stored tensors, by their names, may be of no use for text: of other parts, or of heads that predict further
    tokens, which are stored as such or as layers behind the last one.
    """
    if has_other_parts(config):
        return True
    layers = getattr(config, "num_hidden_layers", None)
    return any(
        _PREDICTION.search(name)
        or (isinstance(layers, int) and (found := _LAYER.search(name)) is not None and int(found[1]) >= layers)
        for name in names
    )


class _Absent(nn.Module):
    """In place of a part that needs a library that is not installed."""

    def __init__(self, error: ImportError) -> None:
        super().__init__()
        self.error = error


@contextmanager
def _absent_parts() -> Iterator[None]:
    """A context in which models are made without the parts that need a library that is not installed.

    `unused_modules` raises the library's error if text needs such a part.
    """

    def make(config: Any, *args: Any, **options: Any) -> Any:
        try:
            return original(config, *args, **options)
        except ImportError as error:
            return _Absent(error)

    before, original = AutoModel.__dict__["from_config"], AutoModel.from_config
    AutoModel.from_config = staticmethod(make)
    try:
        yield
    finally:
        AutoModel.from_config = before


@contextmanager
def making_models() -> Iterator[list[str]]:
    """A context in which one thread makes or reads models, since transformers changes process-wide settings meanwhile.

    Parts other than text may lack a library that they need. Yields the list that collects transformers' warnings.
    """
    with _making, quiet_transformers() as said, _absent_parts():
        yield said


def whole_model(config: Any, path: Path, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False) -> Any:
    """transformers' model of this configuration, which is in the folder `path`, without memory and with all parts.

    It has `dtype`, or the configuration's. Raises CheckpointError if there is none.
    """
    config = copy.deepcopy(config)  # transformers notes the type in it
    of: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with making_models(), torch.device("meta"):
        try:
            return (auto_class(config) or AutoModelForCausalLM).from_config(
                config, attn_implementation="eager", trust_remote_code=trust_remote_code, **of
            )
        except (MemoryError, EngineError):
            raise
        except Exception as error:  # transformers and torch raise whatever sizes and names make them raise
            raise CheckpointError(
                f"{path / 'config.json' if path.is_dir() else path} describes no model that transformers can make "
                f"({type(error).__name__}: {error}); fetch or save it again"
            ) from error


def unused_modules(model: Any) -> tuple[str, ...]:
    """The names of the modules beside decoder and output head that text does not need. `model` has no memory.

    Modules without parameters are none of these. Raises ImportError as `making_models` says.
    """
    used = (model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings())
    paths = {name for name, module in model.named_modules() if any(module is one for one in used)}
    if "" in paths:  # the model is its own decoder
        return ()
    holders = _holders(paths)
    beside = {
        f"{holder}.{child}" if holder else child
        for holder in holders
        for child, module in model.get_submodule(holder).named_children()
        if isinstance(module, _Absent) or any(True for _ in module.parameters())
    } - holders - paths  # fmt: skip
    unused = beside - _touched(model, beside)
    for name, module in model.named_modules():
        if isinstance(module, _Absent) and name not in unused:
            raise module.error
    return tuple(sorted(unused))


def _holders(paths: Iterable[str]) -> set[str]:
    """The names of the modules that hold those at `paths`, and are not in one of them. The model's own is ""."""
    parts = [path.split(".") for path in paths if path]
    found = {"", *(".".join(part[:length]) for part in parts for length in range(1, len(part)))}
    return {name for name in found if not any(name == path or name.startswith(f"{path}.") for path in paths if path)}


def _touched(model: Any, names: Iterable[str]) -> set[str]:
    """Which modules a forward pass over text uses, if only by an attribute.

    The pass ends early where a model's code asks for the values of tensors, which have none: for a mask, and by then models
    have embedded their tokens.
    """
    touched: set[str] = set()
    removed = []
    for name in names:
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        removed.append((module, leaf, module._modules.pop(leaf)))
        module.__dict__[leaf] = _TouchRecorder(removed[-1][2], name, touched)
    try:
        tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except Exception:  # of the model's code, see above
        pass
    finally:
        for module, leaf, child in removed:
            del module.__dict__[leaf]
            module._modules[leaf] = child
    return touched


class _TouchRecorder:
    """Stands for a module, and notes that it is used."""

    def __init__(self, module: nn.Module, name: str, touched: set[str]) -> None:
        self._module, self._name, self._touched = module, name, touched

    def __getattr__(self, name: str) -> Any:
        self._touched.add(self._name)
        return getattr(self._module, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._touched.add(self._name)
        return self._module(*args, **options)


def remove_modules(model: Any, names: Iterable[str]) -> None:
    """Set the modules of these names to None. Mutates `model`."""
    names = tuple(names)
    for name in names:
        holder, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(holder), leaf, None)
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        model.all_tied_weights_keys = {key: source for key, source in tied.items() if not within(key, names)}


def within(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter or a module is in one of `modules`, or is it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def without_place(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Of the tensors in files, those that are of no module of `model`, by name, and the names that transformers gives them.

    A tensor with a place has a parameter, or lies in a module below the decoder: quantized weights are stored with more tensors
    than the model has parameters. Other tensors are of other parts, or of layers that the model lacks.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    modules = dict(model.named_modules())
    decoder = model.get_decoder()
    ends = _holders(name for name, module in modules.items() if module is decoder)
    lost = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
        if renamed in state or name in state:
            continue
        place = renamed
        while place and modules.get(place) is None:
            place = place.rpartition(".")[0]
        if place in ends or isinstance(modules[place], nn.ModuleList) or modules[place] is decoder:
            lost[name] = renamed
    return lost


def config_of(kind: type[Any], config: Any) -> Any:
    """The part of `config` that a model of class `kind` takes: a class of the text alone takes the text's."""
    if getattr(kind, "config_class", None) != config.sub_configs.get("text_config", None) or type(config) is kind.config_class:
        return config
    text = copy.copy(config.get_text_config())
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text
