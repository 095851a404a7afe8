"""Loads models and tokenizers from local files, and chooses their device and type.

Global settings of torch and transformers are unchanged after a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

from ...common.host_memory import free_address_bytes, free_host_bytes, host_memory
from ...common.units import format_bytes
from ..attention.latent import keep_projections
from ..collectives.group import ALONE, ShardGroup
from ..errors import Attempt, CheckpointError, DeviceNotFound, EngineError, NotEnoughMemory, UnsupportedModel, format_error
from ..layers import Quantization
from ..layers.torch_linears import has_kernels
from ..process.cpu_threads import mend_threads_of_a_fork
from ..process.log_suppression import quiet_transformers
from ..text.tokenizer_bounds import is_panic
from .checkpoint import Checkpoint
from .division import Division
from .gguf.file import is_gguf, read_gguf
from .gguf.tokenizer import write_tokenizer
from .meta_models import class_to_read, meta_model
from .model_config import check_counts, check_files, read_json
from .models import DTYPES, TOKENIZER_FILES, ModelSpec, check_device, check_dtype
from .packed_model import give_back_unused, pack_model, stored_dtype
from .quantized_model import quantize_model, quantized_bytes, refuse_quantized
from .slices import divide_modules, slices_of
from .stored_model import StoredModel, one_by_one, stored_sizes
from .text_model import auto_class, making_models, within
from .tokenizer_trial import try_tokenizer
from .weight_cache import WeightCache
from .weight_files import shorten

__all__ = ["Checkpoint", "choose_device", "choose_dtype", "free_bytes", "load_model", "load_tokenizer"]

log = logging.getLogger(__name__)

_SPARE_ELEMENTS = 1 << 24  # that weights may lack and be told by name
_Part = tuple[Division, int]  # how a model is divided, and the shard that is read


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """The device to run on: "cpu", "cuda" (torch's current one) or "cuda:1". "auto" is CUDA if there is such a device.

    Raises ConfigError for another kind of device, and DeviceNotFound for one that this machine lacks.
    """
    name = check_device(device)
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device() if count else 0
    if index < count:
        return torch.device("cuda", index)
    if torch.version.cuda is None and torch.version.hip is None:
        there = f"this torch ({torch.__version__}) was built without CUDA; install one with it, or use device='cpu'"
    elif not count:
        there = "torch sees no CUDA device here (driver, CUDA_VISIBLE_DEVICES?); use device='cpu'"
    else:
        there = f"torch sees {', '.join(f'cuda:{i}' for i in range(count))} and cpu; use one of these"
    raise DeviceNotFound(f"device {name!r} is not available; {there}")


def choose_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The type of weights and KV cache. Raises ConfigError for an unknown one.

    "auto" is the checkpoint's own type, except that float16 becomes float32 on a CPU (where float16 is slow and
    overflows in sums) and, of quantized checkpoints, bfloat16 on a GPU with kernels for them, and that an unsupported type
    (float64, 8-bit floats) becomes float32.
    """
    name = check_dtype(dtype)
    if name == "auto":
        name = checkpoint.dtype if checkpoint.dtype in DTYPES else "float32"
        if name == "float16" and device.type == "cpu":
            name = "float32"
            log.info("%s: float16 weights run as float32 on a CPU", checkpoint.spec.name)
        if name == "float16" and checkpoint.stored and has_kernels(device):
            name = "bfloat16"
            log.info("%s runs as bfloat16: torch's kernels for quantized weights take rows of that type", checkpoint.spec.name)
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can allocate on `device` now. On CUDA this creates the context if needed."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    addresses = free_address_bytes()
    return free_host_bytes() if addresses is None else min(free_host_bytes(), addresses)


def address_remedy(asked_bytes: int, device: torch.device) -> str | None:
    """What to do if this process's limit of address space is what leaves less than `asked_bytes` on `device`; else None."""
    left = free_address_bytes() if device.type == "cpu" else None
    if left is None or left >= asked_bytes:
        return None
    return (
        f"the address space of this process is limited (ulimit -v), and {format_bytes(left)} of it are left: raise or remove "
        "that limit, or use less"
    )


def total_bytes(device: torch.device) -> int:
    """The total memory of `device`, used or free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_memory().total_bytes or free_host_bytes()


def check_weights_fit(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    free: Callable[[torch.device], int] = free_bytes,
    quantization: Quantization | None = None,
    division: Division | None = None,
) -> int:
    """The bytes of the weights, from their headers; with `division`, of the largest shard.

    Raises NotEnoughMemory if `free` reports too little memory, ConfigError if quantized weights are to be quantized.

    Weights to be converted for CUDA are converted on the host, which must have room for them too. For a loaded model only the
    additional bytes count.
    """
    loaded = checkpoint.spec.loaded
    if quantization is not None:
        refuse_quantized(checkpoint, quantization)
        asked = quantized_bytes(checkpoint, quantization, dtype, division)
    elif checkpoint.stored:
        asked = stored_sizes(checkpoint, device, dtype, division).weights_bytes
    elif division is not None:
        asked = division.weights_bytes(dtype)
    else:
        asked = checkpoint.weights_bytes(dtype) if loaded is None else loaded.added_bytes(device, dtype)
    there = free(device)
    if loaded is None and device.type != "cpu" and asked <= there and checkpoint.converts(dtype):
        device, there = torch.device("cpu"), free(torch.device("cpu"))
    if asked <= there:
        return asked
    half = checkpoint.weights_bytes(torch.bfloat16) if division is None else division.weights_bytes(torch.bfloat16)
    remedy = f"dtype='bfloat16' would need {format_bytes(half)}; or " if half < asked and half <= there else ""
    remedy += f"free {format_bytes(asked - there)} on {device}, or take a smaller model or another device"
    what = f"the weights of {checkpoint.spec.name} as {_name(dtype)} on {device}"
    raise NotEnoughMemory(asked, there, what, address_remedy(asked, device) or remedy)


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: Quantization | None = None,
    pack: bool = False,
    free: Callable[[torch.device], int] = free_bytes,
    division: Division | None = None,
    group: ShardGroup = ALONE,
    check: Callable[[Any], None] | None = None,
) -> PreTrainedModel:
    """The model with exactly the checkpoint's weights, or quantized ones, in evaluation mode, without gradients.

    On a CPU, weights that need no conversion stay mapped from their files. They are read on first use and belong to the page
    cache, so free memory falls by less than their size.

    Args:
        pack: On a CPU, pack the linear layers (`linears`). Weights are converted and packed one by one, and the pages of
            their files are given back, so that little more is held than stays. On CUDA, keep quantized weights so where torch
            has kernels for them.
        division: Read only the part of this shard, and let the shards of `group` compute together.
        check: Called with the model before it is quantized, in the checkpoint's type, and packed.

    Raises:
        NotEnoughMemory: the weights do not fit; nothing was read.
        CheckpointError: a file is broken, or weights are missing; says which.
        ConfigError: the model cannot be quantized.
    """
    check_weights_fit(checkpoint, device, dtype, free, quantization, division)
    part = None if division is None else (division, group.rank)
    packs = pack and device.type == "cpu"
    entry = WeightCache().entry(checkpoint, quantization, dtype, group) if packs or quantization is not None else None
    try:
        stored = None
        if (checkpoint.stored or checkpoint.weights.gguf) and quantization is None:
            _refuse_other_sizes(checkpoint, meta_model(checkpoint, dtype))
            stored = StoredModel(checkpoint, dtype, device=device if pack else None, part=part)
            stored.warn()
        module, packed = _read_stored(checkpoint, device, dtype, quantization, packs, part, stored)
        if checkpoint.caches_latents:
            keep_projections(module)
        if stored is not None:
            if packs:
                pack_model(module, checkpoint, packed)
            stored.install(module)
        if division is not None:
            divide_modules(module, division, group)
        if check is not None:
            check(module)
        if quantization is not None:
            quantize_model(module, checkpoint, quantization, dtype, entry, group)
        if packs and stored is None:
            pack_model(module, checkpoint, packed, entry if quantization is None else None)
        if packs:
            give_back_unused(module, checkpoint)
        return cast(PreTrainedModel, module)
    except torch.OutOfMemoryError as error:  # another process took the memory since
        asked = checkpoint.weights_bytes(dtype) if division is None else division.weights_bytes(dtype)
        what = f"the weights of {checkpoint.spec.name} as {_name(dtype)} on {device}"
        raise NotEnoughMemory(asked, free(device), what, "another process took memory meanwhile: try again") from error


def _read_stored(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    packs: bool,
    part: _Part | None,
    stored: StoredModel | None,
) -> tuple[Any, torch.dtype | None]:
    """The model on its device, and the type to which `pack_model` converts it: None for a model that has its types.

    What is packed or quantized afterwards has the types of the files, and is converted then, layer by layer. Raises
    CheckpointError.
    """
    packed = None if checkpoint.quantized or quantization is not None else dtype
    module: Any
    if checkpoint.spec.loaded is not None:
        return checkpoint.spec.loaded.copied(device, None if packs else dtype).to(device), packed
    wanted = None if checkpoint.quantized or checkpoint.has_own_code else meta_model(checkpoint, dtype)
    if wanted is not None:
        _refuse_other_sizes(checkpoint, wanted)
    if quantization is not None:
        module = _read(checkpoint, getattr(torch, checkpoint.dtype, dtype), part)
    elif packs:
        module, packed = _read_to_pack(checkpoint, dtype, wanted, part, stored)
    else:
        module = _read(checkpoint, dtype, part, stored)
    return module.to(device), packed


def _read_to_pack(
    checkpoint: Checkpoint, dtype: torch.dtype, wanted: Any, part: _Part | None, stored: StoredModel | None
) -> tuple[torch.nn.Module, torch.dtype | None]:
    """The model with weights as they are stored, mapped from their files, and the type to which `pack_model` converts them.

    If that is not all that has to be done, the model has its types already, and `pack_model` keeps them: if the files have
    several types, if some parameters have another type than `dtype`, or if buffers, which are computed, have the model's type.
    """
    in_files = stored_dtype(checkpoint.tensors if stored is None else stored.read)
    if in_files is None or in_files == dtype or (checkpoint.quantized and stored is None):
        return _read(checkpoint, dtype, part, stored), None
    wanted = meta_model(checkpoint, dtype) if wanted is None else wanted
    if wanted._get_dtype_plan(dtype) or any(p.is_floating_point() and p.dtype != dtype for p in wanted.parameters()):
        return _read(checkpoint, dtype, part, stored), None
    module = _read(checkpoint, in_files, part, stored)
    types = {name: buffer.dtype for name, buffer in module.named_buffers()}
    same = types == {name: buffer.dtype for name, buffer in wanted.named_buffers()}
    return (module, dtype) if same else (_read(checkpoint, dtype, part, stored), None)


def _read(
    checkpoint: Checkpoint, dtype: torch.dtype, part: _Part | None = None, stored: StoredModel | None = None
) -> torch.nn.Module:
    """The model from the checkpoint's files, on the host; or a shard's part of it; or all but what `stored` packs."""
    mend_threads_of_a_fork()
    if checkpoint.weights.gguf and stored is None:
        stored = StoredModel(checkpoint, dtype, part=part)
    with making_models() as said, torch.device("cpu"), nullcontext() if stored is None else one_by_one():
        try:
            source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.spec.path)}
            config = checkpoint.config
            kind: Any = auto_class(config) or AutoModelForCausalLM
            if stored is not None:
                kind, config = stored.kind, stored.config
                source = {"pretrained_model_name_or_path": None, "state_dict": stored.tensors}
            elif part is not None:
                kind, config, slices = slices_of(checkpoint, *part)
                source = {"pretrained_model_name_or_path": None, "state_dict": slices}
            elif checkpoint.unused_modules:
                kind, config = class_to_read(checkpoint)
            loaded: Any = kind.from_pretrained(
                **source,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=checkpoint.spec.trust_remote_code,
                use_safetensors=checkpoint.weights.safetensors,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                # The configuration may name others, which transformers may download from the hub: repositories, or
                # "flash_attention_2" if that package is not installed. The engine replaces both anyway.
                attn_implementation="eager",
                experts_implementation=None,
            )
        except (MemoryError, EngineError):
            raise
        except Exception as error:  # safetensors, pickle, torch, transformers or the folder's code
            details = "; ".join([f"{type(error).__name__}: {error}", *said])
            raise CheckpointError(f"the weights in {checkpoint.spec.path} cannot be loaded: {details}") from error
    if part is not None:
        _refuse_other_names(checkpoint, part[0], loaded[1])
    _refuse_holes(checkpoint, loaded[1])
    module: torch.nn.Module = loaded[0].eval().requires_grad_(False)
    return module


def _refuse_other_names(checkpoint: Checkpoint, division: Division, info: dict[str, Any]) -> None:
    """Raises UnsupportedModel if tensors were read whole because nothing tells which parameter they become."""
    names = sorted({name for name, *_ in info["mismatched_keys"]} & division.cuts.keys())
    if names:
        raise UnsupportedModel(
            f"{checkpoint.spec.name} cannot be divided over {division.size} shards: transformers makes {shorten(names)} of "
            "other tensors as it reads whole files, and parts of these cannot be told; serve it on one device"
        )


def _refuse_other_sizes(checkpoint: Checkpoint, wanted: Any) -> None:
    """Raises CheckpointError if `config.json` describes a much larger model than its weights, which would be allocated."""
    described = sum(parameter.numel() for parameter in wanted.parameters())
    stored = sum(tensor.num_elements for tensor in checkpoint.tensors) or checkpoint.weights.file_bytes
    if described > 2 * stored + _SPARE_ELEMENTS:
        raise CheckpointError(
            f"{checkpoint.spec.config_file} describes a model of {described:,} parameters, and its weights "
            f"have {stored:,}: one of them is of another model; fetch or save it again"
        )


def _refuse_holes(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    path = checkpoint.spec.path
    missing, mismatched = sorted(info["missing_keys"]), sorted(info["mismatched_keys"], key=str)
    if mismatched:
        shapes = [f"{name} is {list(there)}, the model has {list(wanted)}" for name, there, wanted in mismatched]
        what = "metadata" if checkpoint.weights.gguf else "config.json"
        raise CheckpointError(f"the weights in {path} do not fit its {what}: {shorten(shapes)}")
    if missing:
        raise CheckpointError(
            f"the weights in {path} are not the whole model: {len(missing)} tensors are missing: {shorten(missing)}; "
            f"fetch or save the model again"
        )
    unexpected = {*info["unexpected_keys"]} - {*checkpoint.unread, *checkpoint.unread.values()}
    names = sorted(name for name in unexpected if not within(name, checkpoint.unused_modules))
    if names := _without_zero_biases(checkpoint, names):
        if checkpoint.weights.gguf:  # the metadata alone does not tell that the model computes something else
            raise UnsupportedModel(
                f"{path} has tensors for which a {checkpoint.config.model_type} has no place: {shorten(names)}"
            )
        log.warning("%s: the model has no place for %d tensors: %s", path, len(names), shorten(names))


def _without_zero_biases(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """Tensors without a place, but for biases of zeros: writers of GPTQ give these to all layers.

    Raises UnsupportedModel for another bias of a quantized layer, without which the model would compute something else.
    """
    biases = [name for name in names if name.endswith(".bias") and f"{name[:-5]}.weight" in checkpoint.stored]
    files: Any = checkpoint.read_tensors() if biases else {}
    if wrong := [name for name in biases if bool(files[name][...].any())]:
        raise UnsupportedModel(
            f"{checkpoint.spec.path} has {shorten(wrong)}, and a {checkpoint.config.model_type} with its config.json has no "
            "place for biases there; take another version of the model"
        )
    return [name for name in names if name not in biases]


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `spec`'s folder or GGUF file with `spec.tokenizer`'s options, or None if there is none.
    `spec.tokenizer_from` takes precedence: a folder or file, or the tokenizer itself.

    Raises CheckpointError if the tokenizer cannot be loaded.
    """
    given = spec.tokenizer_from
    if given is not None and not isinstance(given, Path):
        return given
    if given is None and spec.loaded is not None:
        return None
    path, options = (spec.path, spec.tokenizer) if given is None else (given, {})
    if not is_gguf(path):
        return _read_tokenizer(spec, path, options)
    with TemporaryDirectory() as folder:
        if not write_tokenizer(read_gguf(path), Path(folder)):
            return None
        try:
            tokenizer = _read_tokenizer(spec, Path(folder), options)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder, str(path))) from error
    if tokenizer is not None:
        tokenizer.name_or_path = str(path)
    return tokenizer


def _read_tokenizer(spec: ModelSpec, folder: Path, options: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder. Raises CheckpointError."""
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        return None
    check_files(folder)
    config = folder / "config.json"  # transformers may read it to find the tokenizer's class
    if config.is_file():
        check_counts(config, read_json(config))
    if (why := try_tokenizer(folder, options, spec.trust_remote_code)) is not None:
        raise CheckpointError(_broken_tokenizer(folder, options, found, why))
    with Attempt() as attempt, quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=spec.trust_remote_code, **options
        )
        usable = len(tokenizer) > len(tokenizer.all_special_tokens)
    if (error := attempt.error) is not None:  # of tokenizers, sentencepiece, transformers or the folder's code
        if not isinstance(error, Exception) and not is_panic(error):
            raise error
        raise CheckpointError(_broken_tokenizer(folder, options, found, format_error(error))) from error
    if not usable:
        raise CheckpointError(_broken_tokenizer(folder, options, found, "it has no vocabulary"))
    _take_processor_template(tokenizer, folder)
    return tokenizer


def _take_processor_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Give a tokenizer without a chat template that of the folder's processor of images and text. Mutates `tokenizer`.

    Older multimodal checkpoints have it in a file that transformers reads for processors alone.
    """
    file = folder / LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
    if not tokenizer.chat_template and file.is_file() and isinstance(source := read_json(file).get("chat_template"), str):
        tokenizer.chat_template = source


def _broken_tokenizer(folder: Path, options: Mapping[str, Any], found: list[str], why: str) -> str:
    given = f" with the options {dict(options)}" if options else ""
    return (
        f"the tokenizer in {folder} ({', '.join(found)}) cannot be loaded{given}: {why}; fetch it again, or "
        f"remove its files to serve token ids only"
    )
