"""The arguments of a pipeline and of its calls: recognizes supported, harmless and refused ones, and groups them by use."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api.arguments import unknown_argument

log = logging.getLogger(__name__)

TEXT = (
    "prefix", "add_special_tokens", "truncation", "handle_long_generation", "continue_final_message",
    "tokenizer_encode_kwargs", "tools", "documents", "clean_up_tokenization_spaces", "skip_special_tokens", "streamer",
    "look_ahead",
)  # fmt: skip
FORM = ("return_full_text", "return_tensors", "return_text", "return_type")
OTHERS = ("stop_sequence", "generate_kwargs", "tokenizer")

Form = Literal["tensors", "new text", "full text"]
_FORMS: Mapping[Any, Form] = {0: "tensors", 1: "new text", 2: "full text"}  # the values of transformers' ReturnType

# Accepted without effect: name and reason.
HARMLESS: Mapping[str, str] = {
    "batch_size": "batches form by themselves, of whatever is there to be computed",
    "num_workers": "prompts are read in the caller's thread",
    "padding": "nothing is padded here",
    "framework": "there is one framework",
    "binary_output": "text is text",
    "use_fast": "the tokenizer is loaded as its files say",
    "token": "nothing is downloaded",
    "attn_implementation": "attention is the engine's own",
    "low_cpu_mem_usage": "weights are always read as they are needed",
    "use_safetensors": "safetensors are taken where they are there",
    "local_files_only": "nothing is ever downloaded",
}
# Refused by `pipeline`: name and reason.
REFUSED: Mapping[str, str] = {
    "config": "the model's own configuration is used; change it in its folder, or give a loaded model",
    "feature_extractor": "only text is served",
    "image_processor": "only text is served",
    "video_processor": "only text is served",
    "processor": "only text is served; give its tokenizer",
    "pipeline_class": "there is one pipeline, for text generation",
    "args_parser": "there is one pipeline, for text generation",
    "code_revision": "nothing is downloaded; fetch that revision and name its folder",
    "cache_dir": "set HF_HUB_CACHE for another cache, or name the model's folder",
    "quantization_config": 'write quantization="int8" or "int4" (on a CPU), or give a model that is saved in quantized form',
    "load_in_4bit": 'write quantization="int8" or "int4" (on a CPU), or give a model that is saved in quantized form',
    "load_in_8bit": 'write quantization="int8" or "int4" (on a CPU), or give a model that is saved in quantized form',
}

CALL = frozenset({*TEXT, *FORM, *OTHERS, *HARMLESS})  # arguments of a call besides generation's settings

_noted: set[str] = set()  # names already logged in this process


@dataclass(frozen=True, slots=True)
class Arguments:
    """The given arguments for generation, and for texts (input and output). Holds only arguments that were given."""

    generation: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)  # the names of TEXT, and "form"

    def over(self, base: Arguments) -> Arguments:
        """These arguments over those of `base`. A `generation_config` here replaces all generation settings of `base`."""
        beneath = base.generation
        if self.generation.get("generation_config") is not None:
            stay = ("logits_processor", "prefix_allowed_tokens_fn", "seed")  # not part of any generation config
            beneath = {name: beneath[name] for name in stay if name in beneath}
        return Arguments({**beneath, **self.generation}, {**base.text, **self.text})


def sort_arguments(given: Mapping[str, Any], generation_names: Collection[str], harmless: Collection[str]) -> Arguments:
    """Sort a call's arguments. `generation_names` are generation's own; the `harmless` ones of them have no effect.

    Raises ValueError for an unknown argument, naming the nearest known one, and for a contradiction.
    """
    given = dict(given)
    if (nested := given.pop("generate_kwargs", None)) is not None:
        given = _merged(given, nested, "generate_kwargs")
    refuse_unknown(given, CALL | set(generation_names), "a pipeline's call")
    for name in given:
        if given[name] is not None and (name in HARMLESS or name in harmless):
            note(name)
    generation = {name: given[name] for name in generation_names if name in given and name not in harmless}
    if given.get("stop_sequence") is not None:
        if generation.get("stop_strings") is not None:
            raise ValueError("stop_sequence and stop_strings mean the same: give one of them")
        generation["stop_strings"] = given["stop_sequence"]
    text = {name: given[name] for name in TEXT if given.get(name) is not None}
    if (form := _form(given)) is not None:
        text["form"] = form
    return Arguments(generation, text)


def flatten_model_kwargs(given: Mapping[str, Any], model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `pipeline` merged with `model_kwargs`. Raises ValueError for refused arguments and contradictions."""
    flat = _merged(given, model_kwargs or {}, "model_kwargs")
    for name, why in REFUSED.items():
        if flat.pop(name, None) is not None:
            raise ValueError(f"{name} is not served: {why}")
    revision = flat.pop("revision", None)
    if revision not in (None, "main"):
        raise ValueError(f"revision {revision!r} is not served: nothing is downloaded; fetch that revision and name its folder")
    if flat.get("torch_dtype") is not None:
        if flat.get("dtype") not in (None, flat["torch_dtype"]):
            raise ValueError("dtype and torch_dtype mean the same: give one of them")
        flat["dtype"] = flat["torch_dtype"]
    flat.pop("torch_dtype", None)
    flat["device"] = _device(flat.pop("device", None), flat.pop("device_map", None))
    return flat


def refuse_unknown(given: Iterable[str], known: Collection[str], call: str) -> None:
    """Raise UnknownArgument for the first unknown name, with what to write instead or the nearest known name."""
    for name in given:
        if name not in known:
            raise unknown_argument(call, name, known)


def note(name: str) -> None:
    """Log once that an argument has no effect."""
    if name not in _noted:
        _noted.add(name)
        why = HARMLESS.get(name, "the engine computes in its own way, with the same result")
        log.warning("%s has no effect: %s", name, why)


def _merged(given: Mapping[str, Any], nested: Any, where: str) -> dict[str, Any]:
    if not isinstance(nested, Mapping):
        raise ValueError(f"{where} must map names to values, got {type(nested).__name__}")
    twice = [name for name in nested if given.get(name) is not None]
    if twice:
        raise ValueError(f"{twice[0]} is given twice, once in {where}")
    return {**given, **nested}


def _form(given: Mapping[str, Any]) -> Form | None:
    """The output form, or None if no argument sets it.

    `return_tensors` selects token ids whatever its value, as in transformers.
    """
    full, tensors, text = (given.get(name) for name in ("return_full_text", "return_tensors", "return_text"))
    if given.get("return_type") is not None:
        kind = getattr(given["return_type"], "value", given["return_type"])
        if kind not in _FORMS:
            raise ValueError(f"return_type must be one of transformers' ReturnType, got {given['return_type']!r}")
        return _FORMS[kind]
    if full is not None:
        if text is not None or tensors is not None:
            raise ValueError("return_full_text cannot be given together with return_text or return_tensors")
        return "full text" if full else "new text"
    if tensors is None:
        return None
    if text is not None:
        raise ValueError("return_text cannot be given together with return_tensors")
    return "tensors"


def _device(device: Any, device_map: Any) -> Any:
    """The device in the engine's notation. transformers' numbers are CUDA devices, and -1 is the CPU."""
    if device is not None and device_map is not None:
        raise ValueError("device and device_map cannot be given together")
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        if len(places) != 1:
            raise ValueError(
                f"device_map {dict(device_map)} is not served: a model is divided within its layers, not by modules; use "
                "devices=['cuda:0', 'cuda:1'] or tensor_parallel_size=2"
            )
        device_map = places.pop()
    chosen = device if device_map is None else device_map
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        return "cpu" if chosen < 0 else f"cuda:{chosen}"
    return chosen
