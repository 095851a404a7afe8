"""Engine configuration: arguments are validated and resolved once into a frozen object. Imports no torch."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from ..api.sampling_params import SamplingParams
from ..common.units import parse_bytes
from .attention.backends import block_multiple
from .cpu import Quantization
from .errors import ConfigError
from .loading.models import (
    DTYPES,
    KvCacheDtype,
    ModelEntry,
    ModelSpec,
    check_attention,
    check_device,
    check_dtype,
    check_kv_cache_dtype,
    check_quantization,
    loaded_spec,
    read_models,
    resolve_model,
    resolve_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["DTYPES", "EngineArguments", "EngineConfig", "ModelEntry", "ModelSpec", "read_models", "resolve_model"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_SEQS = 256
DEFAULT_MAX_STEP_TOKENS = 2048
MOST_SHARDS = 64
MOST_SEQS = 1_048_576  # the scheduler's arrays for as many are still a few hundred MiB
DEFAULT_IDLE_S = 10.0
LEAST_SECRET_BYTES = 16  # shorter secrets can be guessed


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The bounds of the KV pool, and the engine's claim among other engines of its device.

    Args:
        min_bytes: Minimum size; None: what one sequence needs, at most a quarter of the largest pool.
        max_bytes: Maximum size; None: `planning.auto_kv_bytes`.
        weight: Of the engine's share if demand exceeds the memory: 0.001 to 1000.
        priority: Lower values are served first.
    """

    min_bytes: int | None = None
    max_bytes: int | None = None
    weight: float = 1.0
    priority: int = 0

    @classmethod
    def resolve(cls, given: object) -> KvMemory:
        """Parse the `kv_memory` argument. Raises ConfigError.

        It is None or "auto"; a size, which sets minimum and maximum; a mapping with the keys min, max, weight and priority; or
        a text such as "min=512MiB,max=4GiB".
        """
        if given is None or given == "auto":
            return cls()
        if isinstance(given, str) and "=" in given:
            parts = [(name.strip(), value) for name, _, value in (part.partition("=") for part in given.split(","))]
            given = dict(parts)
            if len(given) < len(parts):
                raise ConfigError(f"kv_memory names a key twice: {', '.join(name for name, _ in parts)}")
        if not isinstance(given, Mapping):
            size = _size("kv_memory", given)
            return cls(size, size)
        known = ("min", "max", "weight", "priority")
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                meant = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise ConfigError(f"kv_memory has an unknown key {key!r}{meant}")
        sizes = {name: None if given.get(name) is None else _size(f"kv_memory's {name}", given[name]) for name in known[:2]}
        if sizes["min"] is not None and sizes["max"] is not None and sizes["min"] > sizes["max"]:
            raise ConfigError(f"kv_memory's min of {sizes['min']:,} bytes is above its max of {sizes['max']:,} bytes")
        return cls(sizes["min"], sizes["max"], _weight(given.get("weight", 1.0)), _priority(given.get("priority", 0)))


class RecordArguments(TypedDict, total=False):
    """Those arguments of `LLM` that ask for a recording."""

    record: str | os.PathLike[str] | None
    record_text: bool


class WeightArguments(TypedDict, total=False):
    """Those arguments of `LLM` that determine the type of the weights."""

    dtype: str | torch.dtype
    quantization: Quantization | None


class PrefixArguments(TypedDict, total=False):
    """Those arguments of `LLM` that concern the prefix cache on the device."""

    prefix_caching: bool
    prefix_cache_memory: int | str | None
    prefix_hash_secret: bytes | None
    kv_events: bool


class DeviceArguments(TypedDict, total=False):
    """Those arguments of `LLM` that say where the model runs."""

    device: str | torch.device
    devices: str | Sequence[str | torch.device] | None
    tensor_parallel_size: int | None


class EngineArguments(RecordArguments, WeightArguments, PrefixArguments, DeviceArguments, total=False):
    """The arguments of `LLM` besides the model, for type checkers of calls that pass them on."""

    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None
    kv_cache_dtype: KvCacheDtype
    kv_memory: int | str | Mapping[str, Any]
    block_size: int | str
    max_seqs: int
    max_step_tokens: int
    max_model_len: int | None
    max_chunk_tokens: int | None
    host_kv_memory: int | str | None
    idle_s: float
    share: bool
    trust_remote_code: bool | None
    attention: str
    overlap: bool | None
    cuda_graphs: bool
    self_check: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine. Build it with `resolve`.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        devices: Of the shards of a model that is divided, one each; a device may be named several times. Empty: not divided.
        dtype: "auto", "float32", "float16" or "bfloat16".
        quantization: "int8" or "int4": weights of linear layers in fewer bits, on a CPU. See `loading/quantization`.
        kv_cache_dtype: "int8" or "fp8": K and V in one byte, with a scale for each token and head. "auto": the model's dtype.
        kv_memory: Bounds of the KV pool.
        block_size: Tokens per block; None is 16, or what the attention backend needs.
        max_seqs: Maximum number of running sequences.
        max_step_tokens: Maximum tokens of a step. It also bounds the running sequences, as each gets a token a step.
        max_model_len: Maximum tokens of a sequence, prompt and output; None is the model's context.
        max_chunk_tokens: Maximum tokens of one sequence in a step; None is `max_step_tokens`.
        prefix_caching: Compute common prefixes of prompts once.
        prefix_cache_memory: Maximum bytes of cached blocks that no running request holds; None is no bound.
        prefix_hash_secret: Key of the prefix hashes, at least 16 bytes; None is a random one. Not in the repr.
        kv_events: Keep a log of what the prefix cache comes to hold, for `AsyncLLM.cache_events`.
        host_kv_memory: Bytes of host memory to which K and V are swapped out when the pool is full; 0: none.
        idle_s: Seconds after which memory that no request needs is given back, cached prefixes included.
        share: Hold a lease of the device, so that other engines and `vram-monitor` can reclaim memory.
        attention: A backend of `attention.backends`, or "auto": the fastest of those that support blocks of 16 tokens, or the
            given block size.
        overlap: Launch the next decode step before the previous step's tokens reach the host. None: on CUDA only.
        cuda_graphs: Replay decode steps from CUDA graphs, if device, model and attention support it.
        self_check: On CUDA, switch off the parts of the engine that fail on this device. See `engine/self_check`.
        record: The file that the engine is recorded into; None: none. With `record_text`, with all token ids.
    """

    model: ModelSpec
    device: str = "auto"
    dtype: str = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_memory: KvMemory = field(default_factory=KvMemory)
    block_size: int | None = None
    max_seqs: int = DEFAULT_MAX_SEQS
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    max_model_len: int | None = None
    max_chunk_tokens: int | None = None
    prefix_caching: bool = True
    prefix_cache_memory: int | None = None
    prefix_hash_secret: bytes | None = field(default=None, repr=False)
    kv_events: bool = False
    host_kv_memory: int = 0
    idle_s: float = DEFAULT_IDLE_S
    share: bool = True
    attention: str = "auto"
    overlap: bool | None = None
    cuda_graphs: bool = True
    self_check: bool = True
    record: str | None = None
    record_text: bool = False
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("max_seqs", 1),
            ("max_step_tokens", 1),
            ("max_model_len", 2),
            ("max_chunk_tokens", 1),
        ):
            _check_integer(name, getattr(self, name), least)
        if self.max_seqs > MOST_SEQS:
            raise ConfigError(f"max_seqs must be at most {MOST_SEQS:,}, got {self.max_seqs:,}")
        idle: Any = self.idle_s
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not idle >= 0:
            raise ConfigError(f"idle_s must be a number of seconds of at least 0, got {idle!r}")
        check_attention(self.attention)
        check_quantization(self.quantization)
        check_kv_cache_dtype(self.kv_cache_dtype)
        for name in ("prefix_caching", "kv_events", "share", "cuda_graphs", "self_check", "record_text"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.overlap, bool | None):
            raise ConfigError(f"overlap must be True, False or None, got {self.overlap!r}")
        if self.host_kv_memory and not self.prefix_caching:
            raise ConfigError(
                "host_kv_memory keeps what the prefix cache finds again: leave prefix_caching on, or host_kv_memory out"
            )
        _check_secret(self.prefix_hash_secret, self.prefix_caching)
        if self.kv_events and not self.prefix_caching:
            raise ConfigError("kv_events tell what the prefix cache holds: leave prefix_caching on, or kv_events out")
        if self.prefix_cache_memory is not None and not self.prefix_caching:
            raise ConfigError(
                "prefix_cache_memory is a bound on the prefix cache: leave prefix_caching on, or prefix_cache_memory out"
            )

    @property
    def sampling(self) -> SamplingParams:
        """The models file's sampling defaults; `Checkpoint.default_sampling` merges them over the model's own."""
        return self.model.sampling

    @classmethod
    def resolve(
        cls, model: object, *, device: object = None, devices: object = None, tensor_parallel_size: object = None,
        dtype: object = None, quantization: object = None,
        kv_cache_dtype: object = None, kv_memory: int | str | Mapping[str, Any] | None = None,
        block_size: int | str | None = None, max_seqs: int = DEFAULT_MAX_SEQS,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS, max_model_len: int | None = None,
        max_chunk_tokens: int | None = None, prefix_caching: bool = True,
        prefix_cache_memory: int | str | None = None, prefix_hash_secret: bytes | None = None, kv_events: bool = False,
        host_kv_memory: int | str | None = None, idle_s: float = DEFAULT_IDLE_S, share: bool = True,
        trust_remote_code: bool | None = None, tokenizer: object = None, attention: str | None = None,
        overlap: bool | None = None, cuda_graphs: bool = True, self_check: bool = True, record: object = None,
        record_text: bool = False,
    ) -> EngineConfig:  # fmt: skip
        """Validate and resolve the arguments of an engine, as `LLM` describes them; `model` may be a ModelSpec too.

        None, or "auto" if applicable, leaves the choice to the models file and then to the engine.
        Raises ModelNotFound as `resolve_model` does, and ConfigError, which names the argument that is wrong.
        """
        spec = _resolve_spec(model, tokenizer, trust_remote_code)
        of_model = "auto" if devices is not None else spec.device or "auto"  # `devices` replaces it
        chosen = check_device(of_model if device in (None, "auto") else device)
        shards = _resolve_devices(chosen, devices, tensor_parallel_size)
        return cls(
            model=spec,
            device=shards[0] if len(shards) == 1 else chosen,
            devices=shards if len(shards) > 1 else (),
            dtype=check_dtype(spec.dtype or "auto" if dtype in (None, "auto") else dtype),
            quantization=check_quantization(quantization),
            kv_cache_dtype=check_kv_cache_dtype(kv_cache_dtype),
            kv_memory=KvMemory.resolve(kv_memory),
            block_size=None if block_size == "auto" else block_size,  # type: ignore[arg-type]  # checked in __post_init__
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            max_chunk_tokens=max_chunk_tokens,
            prefix_caching=prefix_caching,
            prefix_cache_memory=_size_or_0("prefix_cache_memory", prefix_cache_memory, "no bound"),
            prefix_hash_secret=prefix_hash_secret,
            kv_events=kv_events,
            host_kv_memory=_size_or_0("host_kv_memory", host_kv_memory, "none") or 0,
            idle_s=idle_s,
            share=share,
            attention=check_attention(spec.attention or "auto" if attention in (None, "auto") else attention),
            overlap=overlap,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
            record=_record_path(record),
            record_text=record_text,
        )

    def tokens_per_block(self) -> int:
        """The block size: the requested one, or the smallest from 16 on that the attention backend supports.

        Raises ConfigError if the requested backend does not support the requested block size.
        """
        multiple = block_multiple(self.attention)
        if self.block_size is None:
            return -(-DEFAULT_BLOCK_SIZE // multiple) * multiple
        if self.block_size % multiple:
            raise ConfigError(
                f"block_size {self.block_size} does not suit {self.attention}, which takes multiples of {multiple}; "
                f"use {-(-self.block_size // multiple) * multiple}, or block_size='auto'"
            )
        return self.block_size


def _resolve_devices(device: str, devices: object, tensor_parallel_size: object) -> tuple[str, ...]:
    """The devices of the shards, of which "cuda" and "auto" stay to be numbered; empty if nothing was asked for.

    Args:
        device: The one device that was asked for, or "auto".
        devices: A list of devices, or a text with commas between them, or None.
        tensor_parallel_size: The number of shards, or None.

    Raises ConfigError.
    """
    size = tensor_parallel_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_SHARDS):
        raise ConfigError(f"tensor_parallel_size must be an integer from 1 to {MOST_SHARDS}, got {size!r:.80}")
    if devices is None:
        if size in (None, 1):
            return ()
        assert isinstance(size, int)
        if device.startswith("cuda:"):
            raise ConfigError(
                f"device={device!r} is one device, and tensor_parallel_size is {size}: name them all, as in "
                "devices=['cuda:0', 'cuda:1']"
            )
        return (device,) * size
    if isinstance(devices, str):
        devices = [name.strip() for name in devices.split(",")]
    if not isinstance(devices, Sequence):
        raise ConfigError(f"devices must be a list such as ['cuda:0', 'cuda:1'], got {devices!r:.80}")
    names = tuple(check_device(one) for one in devices)
    if not 1 <= len(names) <= MOST_SHARDS:
        raise ConfigError(f"devices must name 1 to {MOST_SHARDS} devices, got {len(names)}")
    if size is not None and size != len(names):
        raise ConfigError(f"tensor_parallel_size is {size}, and devices names {len(names)}: leave one of them out")
    if "auto" in names or "cuda" in names:
        raise ConfigError(f"devices must name each device, as in 'cuda:0' or 'cpu', got {devices!r:.80}")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigError(f"devices must all be CUDA devices or all 'cpu', got {devices!r:.80}")
    if device not in ("auto", names[0].partition(":")[0]):
        raise ConfigError(f"give devices or device, not both: got devices={devices!r:.80} and device={device!r}")
    return names


def _resolve_spec(model: object, tokenizer: object, trust_remote_code: object) -> ModelSpec:
    """The model to load. An argument other than None replaces what the models file says. Raises as `EngineConfig.resolve`."""
    spec = model if isinstance(model, ModelSpec) else _resolve_source(model)
    if tokenizer is not None:
        spec = replace(spec, tokenizer_from=_resolve_tokenizer(tokenizer))
    if trust_remote_code is None:
        return spec
    if not isinstance(trust_remote_code, bool):
        raise ConfigError(f"trust_remote_code must be True or False, got {trust_remote_code!r}")
    return replace(spec, trust_remote_code=trust_remote_code)


def _resolve_source(model: object) -> ModelSpec:
    if isinstance(model, (str, os.PathLike)):
        return resolve_model(model)
    return loaded_spec(model)


def _resolve_tokenizer(tokenizer: object) -> Any:
    if isinstance(tokenizer, (str, os.PathLike)):
        return resolve_tokenizer(tokenizer)
    from .loading.loaded import checked_tokenizer

    return checked_tokenizer(tokenizer)


def _size(name: str, amount: Any) -> int:
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; or 'auto'") from error


def _size_or_0(name: str, amount: Any, none: str) -> int | None:
    """Parse a size that may be 0. None stays None; `none` is its meaning in the message. Raises ConfigError."""
    if amount is None:
        return None
    if amount == "0" or (amount == 0 and isinstance(amount, int) and not isinstance(amount, bool)):
        return 0
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; or 0, or None for {none}") from error


def _record_path(path: Any) -> str | None:
    """The path of a recording. Raises ConfigError, also where its folder is missing: before a model is loaded for it."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or not isinstance(os.fspath(path), str):
        raise ConfigError(f"record must be the path of a file, got {path!r:.80}")
    name = os.path.abspath(os.fspath(path))
    if not os.path.isdir(os.path.dirname(name)) or os.path.isdir(name):
        wrong = "is a folder" if os.path.isdir(name) else "lies in a folder that does not exist"
        raise ConfigError(f"record: {path} {wrong}: name a file in an existing folder")
    return name


def _check_secret(secret: object, prefix_caching: bool) -> None:
    """Raise ConfigError for an invalid secret. The message never contains the secret."""
    if secret is None:
        return
    if not isinstance(secret, bytes):
        raise ConfigError(f"prefix_hash_secret must be bytes, got {type(secret).__name__}; encode a text")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"prefix_hash_secret has {len(secret)} bytes, and can be guessed: make one of at least {LEAST_SECRET_BYTES}, as "
            f"secrets.token_bytes(32) does"
        )
    if not prefix_caching:
        raise ConfigError("prefix_hash_secret is the prefix cache's: leave prefix_caching on, or prefix_hash_secret out")


def _weight(weight: object) -> float:
    try:
        number = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(weight, bool) or not 0.001 <= number <= 1000:
        raise ConfigError(f"kv_memory's weight must be a number from 0.001 to 1000, got {weight!r}")
    return number


def _priority(priority: object) -> int:
    try:
        number = int(priority) if isinstance(priority, str) else priority
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(f"kv_memory's priority must be an integer, got {priority!r}")
    if not -1000 <= number <= 1000:
        raise ConfigError(f"kv_memory's priority must be -1000 to 1000, got {number:,}")
    return number


def _check_integer(name: str, value: object, least: int) -> None:
    if value is None and name not in ("max_seqs", "max_step_tokens"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
