"""Engine configuration: arguments are validated and resolved once into a frozen object. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ..api.sampling_params import SamplingParams
from ..common.settings import (
    Kind,
    checked,
    described,
    integer,
    number,
    seconds,
    setting,
    settings_of,
    size,
    switch,
    unknown_setting,
)
from ..common.units import parse_bytes
from .attention.backends import NAMES as ATTENTION
from .attention.backends import block_multiple
from .errors import ConfigError
from .layers import Quantization
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DTYPES", "EngineArguments", "EngineConfig", "ModelEntry", "ModelSpec", "read_models", "resolve_model"]

DEFAULT_BLOCK_SIZE = 16
MOST_SHARDS = 64
MOST_SEQS = 1_048_576  # the scheduler's arrays for as many are still a few hundred MiB
LEAST_SECRET_BYTES = 16  # shorter secrets can be guessed


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The bounds of the KV pool, and the engine's claim among other engines of its device.

    Args:
        min_bytes: Minimum size; None: what one sequence needs, at most a quarter of the largest pool.
        max_bytes: Maximum size; None: `memory_plan.auto_pool`.
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

        It is "auto"; a size, which sets minimum and maximum; a mapping with the keys min, max, weight and priority; or a text
        such as "min=512MiB,max=4GiB".
        """
        if isinstance(given, KvMemory):
            return given
        if given == "auto":
            return cls()
        if isinstance(given, str) and "=" in given:
            parts = [(name.strip(), value) for name, _, value in (part.partition("=") for part in given.split(","))]
            given = dict(parts)
            if len(given) < len(parts):
                raise ConfigError(f"kv_memory names a key twice: {', '.join(name for name, _ in parts)}")
        if not isinstance(given, Mapping):
            try:
                return cls(parse_bytes(given), parse_bytes(given))  # type: ignore[arg-type]  # refused by it
            except ValueError as error:
                raise ConfigError(f"kv_memory: {error}; or 'auto'") from error
        if unknown := next((str(key) for key in given if key not in _BOUNDS), None):
            raise ConfigError(f"kv_memory: {unknown_setting(unknown, _BOUNDS)}")
        found: dict[str, Any] = {}
        for name, value in given.items():
            kind = _BOUNDS[name]
            try:
                found[name] = None if value is None else kind.check(kind.read(value) if isinstance(value, str) else value)
            except ValueError as error:
                joint = " " if str(error).startswith("must ") else ": "
                raise ConfigError(f"kv_memory's {name}{joint}{error}") from error
        least, most = found.get("min"), found.get("max")
        if least is not None and most is not None and least > most:
            raise ConfigError(f"kv_memory's min of {least:,} bytes is above its max of {most:,} bytes")
        return cls(least, most, found.get("weight", 1.0), found.get("priority", 0))


_BOUNDS = {"min": size(), "max": size(), "weight": number(0.001, 1000), "priority": integer(-1000, 1000)}


def _resolve_model(model: object) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    return resolve_model(model) if isinstance(model, str | os.PathLike) else loaded_spec(model)


def _resolve_tokenizer(tokenizer: object) -> Any:
    if isinstance(tokenizer, (str, os.PathLike)):
        return resolve_tokenizer(tokenizer)
    from .loading.loaded import checked_tokenizer

    return checked_tokenizer(tokenizer)


def _check_devices(devices: Any) -> tuple[str, ...]:
    names = [name.strip() for name in devices.split(",")] if isinstance(devices, str) else devices
    if not isinstance(names, Sequence):
        raise ConfigError(f"devices must be a list such as ['cuda:0', 'cuda:1'], got {devices!r:.80}")
    names = tuple(check_device(one) for one in names)
    if not 1 <= len(names) <= MOST_SHARDS:
        raise ConfigError(f"devices must name 1 to {MOST_SHARDS} devices, got {len(names)}")
    if "auto" in names or "cuda" in names:
        raise ConfigError(f"devices must name each device, as in 'cuda:0' or 'cpu', got {devices!r:.80}")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigError(f"devices must all be CUDA devices or all 'cpu', got {devices!r:.80}")
    return names


def _warm_prompts(path: Any) -> str | None:
    """The path of a file of prompts. Raises ConfigError."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.path.isfile(path):
        raise ConfigError(f"warm_prompts: {path!r:.80} is no file: name one with a prompt in JSON on each line")
    return os.path.abspath(os.fspath(path))


def _disk_path(path: Any) -> str | None:
    """The folder of the disk tiers. Raises ConfigError."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise ConfigError(f"disk_kv_path must be the path of a folder, got {path!r:.80}")
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


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


def _check_secret(secret: object) -> object:
    """Raise ConfigError for a secret that is invalid. The message never contains the secret."""
    if not isinstance(secret, bytes):
        raise ConfigError(f"prefix_hash_secret must be bytes, got {type(secret).__name__}; encode a text")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"prefix_hash_secret has {len(secret)} bytes, and can be guessed: make one of at least {LEAST_SECRET_BYTES}, as "
            f"secrets.token_bytes(32) does"
        )
    return secret


class Scope(IntEnum):
    """Where a setting of an engine can be given; each place has the settings of those before it too."""

    PLAN = 0  # `pagetide plan`, so everywhere
    SERVER = 1  # for all models of a server, for the workers of a fleet
    MODEL = 2  # for one model: `pagetide generate` and `run`
    ENTRY = 3  # in a model's entry of a server's file
    API = 4  # in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The arguments of `LLM`. None or "auto" leaves the choice to the models file and then to the engine."""

    # fmt: off
    model: str | os.PathLike[str] | PreTrainedModel | ModelSpec = field(kw_only=False, metadata=described(
        Kind("MODEL", _resolve_model), "a name (see `pagetide models`), a folder, a GGUF file, or a hub id in the local cache",
        doc='A name of a models file (`pagetide models` lists them; "demo" is always available), a folder in transformers\' '
        "format, a GGUF file, or a hub id in the local cache. Nothing is ever downloaded. Or a loaded transformers model, "
        "which keeps its device and dtype, is not changed and shares its weights: do not modify these meanwhile.",
        scope=Scope.API,
    ))
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = setting(
        None, Kind("NAME", _resolve_tokenizer), "a name, a folder or a hub id of a tokenizer", unset="the model's",
        doc="A name, a folder or a hub id, or a loaded tokenizer; None is the model's own.", scope=Scope.ENTRY,
    )
    device: str | torch.device = setting(
        "auto", Kind("DEVICE", check_device), "cpu, cuda or cuda:1", unset="cuda if available",
        doc='"cpu", "cuda", "cuda:1"; "auto" is CUDA if there is a device.',
    )
    devices: str | Sequence[str | torch.device] | None = setting(
        None, Kind("D,D", _check_devices), "divide the model over these devices, e.g. cuda:0,cuda:1",
        doc='Divide the model over these devices, one shard each, such as ["cuda:0", "cuda:1"]. A shard is a process with its '
        "part of the weights and of every block; sizes in bytes, such as `kv_memory`, are then of one shard.",
    )
    tensor_parallel_size: int | None = setting(
        None, integer(1, MOST_SHARDS), "divide the model over N devices; sizes are then per device",
        doc='Divide the model over so many devices: "cuda:0", "cuda:1", ..., or as many processes on the CPU.',
    )
    dtype: str | torch.dtype = setting(
        "auto", Kind("DTYPE", check_dtype), "float32, bfloat16 or float16", unset="the checkpoint's",
        doc='"float32" (or "float"), "bfloat16", "float16" (or "half"), or a torch dtype; "auto" is that of the checkpoint, '
        "but float32 instead of float16 on a CPU.",
    )
    quantization: Quantization | None = setting(
        None, Kind("FORM", check_quantization), "int8 or int4 weights, CPU only", unset="not quantized",
        doc='"int8" or "int4": hold the weights of linear layers in 8 or about 4.25 bits, on a CPU with the native kernels. '
        "They are made of any checkpoint at the first load, and kept on disk. None: as `dtype` says.",
    )
    kv_cache_dtype: KvCacheDtype = setting(
        "auto", Kind("FORM", check_kv_cache_dtype), "int8 or fp8: one byte per element of K and V", unset="the model's dtype",
        doc='"int8" or "fp8": hold K and V in one byte, with a scale for each token and head, so that about twice as many '
        'tokens fit. "auto": in the dtype of the model. The model is checked at load; see docs/quantization.md.',
    )
    kv_memory: int | str | Mapping[str, Any] | KvMemory = setting(
        "auto", Kind("SIZE", KvMemory.resolve), "a size, e.g. 2GiB, or bounds: min=1GiB,max=4GiB,weight=2,priority=0",
        unset="see `pagetide plan`",
        doc='Bytes of the KV cache. A number, or a text like "2GiB", is the exact size. With a mapping {"min", "max", '
        '"weight", "priority"} the pool grows and shrinks between the bounds; with "auto", up to the size that `pagetide '
        "plan` shows.",
    )
    block_size: int | str | None = setting(
        "auto", integer(1, also="auto"), "tokens per block, or auto", unset="",
        doc='Tokens per block; "auto" is 16, or the smallest larger size that the given `attention` supports.',
    )
    attention: str = setting(
        "auto", Kind("NAME", check_attention), ", ".join(ATTENTION), unset="the fastest available",
        doc='The attention backend: "torch", "native" (CPUs), "triton", "flash-attn" (block sizes that are multiples of 256 '
        'tokens), "flash-attn-3", "flash-attn-4", "flashinfer" or "varlen" (of torch). "auto" is native on a CPU, or torch '
        "without the native kernels. On CUDA it benchmarks the installed backends that support model and block size, except "
        '"flash-attn-4" and "flashinfer", and picks the fastest. `stats()` names the backend in use.',
    )
    max_seqs: int = setting(256, integer(1, MOST_SEQS), "maximum number of running sequences")
    max_step_tokens: int = setting(
        2048, integer(1), "maximum tokens per step",
        doc="Maximum tokens computed in a step. It also bounds the running sequences, as each gets a token a step.",
    )
    max_model_len: int | None = setting(
        None, integer(2), "maximum total tokens of prompt and output",
        doc="Maximum tokens of prompt and output together; None is the model's limit.",
    )
    max_chunk_tokens: int | None = setting(
        None, integer(1), "maximum tokens of one prompt per step", unset="only the step's limit",
        doc="Maximum tokens of one prompt in a step; None is no limit but the step's.", scope=Scope.SERVER,
    )
    prefix_caching: bool = setting(
        True, switch(), "reuse common prefixes of prompts", scope=Scope.SERVER,
        doc="Keep computed blocks, so that common prefixes of prompts are computed once.",
    )
    prefix_cache_memory: int | str | None = setting(
        None, size("no bound"), "maximum memory of cached blocks that no request uses, e.g. 2GiB, or 0", unset="no limit",
        doc='Maximum memory, such as "2GiB", of cached blocks that no running request holds. Beyond it the least valuable are '
        "evicted at once, or copied to the host tier. None: no bound. 0: requests share blocks while they run at the same "
        "time, and nothing stays cached after they end.", scope=Scope.SERVER,
    )
    host_kv_memory: int | str | None = setting(
        None, size("none"), "host memory for swapped-out blocks, e.g. 8GiB", unset="none",
        doc='Host memory, such as "8GiB", for blocks swapped out when the pool is full, instead of computing them again. None: '
        "none. Allocated as needed; freed after `idle_s` without a request and by `close`.", scope=Scope.SERVER,
    )
    disk_kv_memory: int | str | None = setting(
        None, size("none"), "disk space for computed prefixes, e.g. 64GiB", unset="none",
        doc='Disk space, such as "64GiB", for computed prefixes: they outlive eviction, unloading and restarts. They are read '
        "where that takes less time than computing, into memory of the plan (2 GiB at most). Shards share it. "
        "None: none.", scope=Scope.SERVER,
    )
    disk_kv_path: str | os.PathLike[str] | None = setting(
        None, Kind("FOLDER", _disk_path), "folder of the prefixes on disk", unset="~/.cache/pagetide/kv",
        doc="The folder for `disk_kv_memory`; each model has a folder in it, which one engine at a time uses. None: "
        "`pagetide/kv` in the user's cache folder.", scope=Scope.SERVER,
    )
    warm_prompts: str | os.PathLike[str] | None = setting(
        None, Kind("FILE", _warm_prompts), "prompts to compute at the start, one JSON value a line",
        doc="A file of prompts to compute, or to read from disk, before the engine is ready. Each line is one in JSON: a text, "
        'token ids, or an object with `prompt`, `prompt_token_ids` or `messages`, perhaps `cache_salt`, and `"pin": true` for '
        "one to keep in memory as `LLM.pin_prefix` does. A prompt that fails is a warning.", scope=Scope.SERVER,
    )
    prefix_hash_secret: bytes | None = setting(
        None, Kind("BYTES", _check_secret), "key of the prefix hashes", secret=True, scope=Scope.API,
        doc="Key of the prefix hashes, at least 16 bytes. Engines with equal secret and block size have equal hashes of the "
        "same tokens and `cache_salt`. None: a random one. Keep it secret (`pagetide.cache.prefix_hash`).",
    )
    kv_events: bool = setting(
        False, switch(), "log what the prefix cache comes to hold", scope=Scope.ENTRY,
        doc="Keep a log of the blocks that the prefix cache comes to hold and evicts, for `cache_events`.",
    )
    idle_s: float | None = setting(
        None, seconds(0), "idle time after which unneeded memory is returned", unset="10, or by recalls", scope=Scope.SERVER,
        doc="Seconds after which memory that no request needs is given back, cached prefixes included. None: 10; with a lease "
        "the broker recalls it when another process needs it, or after 10 s without a request beside external processes.",
    )
    share: bool = setting(
        True, switch(), "hold a lease, and share memory with other engines", scope=Scope.SERVER,
        doc="Hold a lease of the device, so that memory can move between engines. False: do not share memory.",
    )
    overlap: bool | None = setting(
        None, switch(), "launch the next decode step before the previous step's tokens reach the host", unset="on CUDA",
        doc="Launch the next decode step before the previous step's tokens reach the host (asynchronous scheduling), so the "
        "device need not wait for the host. None: on CUDA only.", scope=Scope.SERVER,
    )
    cuda_graphs: bool = setting(
        True, switch(), "replay decode steps from CUDA graphs, on CUDA", scope=Scope.SERVER,
        doc="On CUDA, replay decode steps from CUDA graphs captured at startup, if model and attention support it.",
    )
    self_check: bool = setting(
        True, switch(), "on CUDA, test the device, and disable parts of the engine that fail", scope=Scope.SERVER,
        doc="On CUDA, test the elastic pool, each attention kernel, CUDA graphs and swaps, once for each combination of "
        "device, driver and versions. Parts that fail are switched off with a warning. The result is stored. False: use all.",
    )
    trust_remote_code: bool | None = setting(
        None, switch(), "run Python code that comes with the model's files", unset="no", scope=Scope.MODEL,
        doc="Run Python code from the model's files; None is the models file's setting (default: no).",
    )
    record: str | os.PathLike[str] | None = setting(
        None, Kind("FILE", _record_path), "record the cache's activity in this file, for `pagetide replay`",
        doc="A file to record the engine into: its blocks, requests and decisions, without prompts and outputs. `pagetide "
        "replay` shows it. A recording that exists is continued. It ends at 256 MiB, and with an error of the file.",
        scope=Scope.MODEL,
    )
    record_text: bool = setting(
        False, switch(), "also record token ids of prompts and outputs", scope=Scope.MODEL,
        doc="Record the token ids of prompts and outputs too.",
    )
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineArguments):
    """The configuration of an engine: its arguments, checked and resolved. Build it with `resolve`.

    `model` holds `tokenizer` and `trust_remote_code`, `devices` are as many as `tensor_parallel_size`: these three are None.

    Args:
        devices: Of the shards of a model that is divided, one each; a device may be named several times. Empty: not divided.
        block_size: None is 16, or what the attention backend needs.
        host_kv_memory, disk_kv_memory: 0: none.
        sleeps: Whether the engine may be put to sleep, by its API.
    """

    model: ModelSpec
    device: str
    devices: tuple[str, ...]
    dtype: str
    kv_memory: KvMemory
    block_size: int | None
    prefix_cache_memory: int | None
    host_kv_memory: int
    disk_kv_memory: int
    disk_kv_path: str | None
    warm_prompts: str | None
    record: str | None
    sleeps: bool = False

    def __post_init__(self) -> None:
        of_the_cache = {
            "host_kv_memory keeps what the prefix cache finds again": self.host_kv_memory > 0,
            "disk_kv_memory keeps what the prefix cache finds again": self.disk_kv_memory > 0,
            "warm_prompts are kept by the prefix cache": self.warm_prompts is not None,
            "prefix_hash_secret is the prefix cache's": self.prefix_hash_secret is not None,
            "kv_events tell what the prefix cache holds": self.kv_events,
            "prefix_cache_memory is a bound on the prefix cache": self.prefix_cache_memory is not None,
        }
        for said, is_given in of_the_cache.items():
            if is_given and not self.prefix_caching:
                raise ConfigError(f"{said}: leave prefix_caching on, or {said.partition(' ')[0]} out")
        if self.disk_kv_memory and not hasattr(os, "posix_fadvise"):
            raise ConfigError(
                "disk_kv_memory needs Linux: files of other systems would take memory for what is on disk; leave it out"
            )
        if self.disk_kv_memory and self.model.loaded is not None:
            raise ConfigError(
                "disk_kv_memory keeps no prefixes of a model that was passed as an object: its content has no name; leave it "
                "out"
            )

    @property
    def sampling(self) -> SamplingParams:
        """The models file's sampling defaults; `Checkpoint.default_sampling` merges them over the model's own."""
        return self.model.sampling

    @classmethod
    def resolve(cls, model: Any, **settings: Any) -> EngineConfig:
        """Validate and resolve the arguments of an engine. Raises as `of`."""
        return cls.of(EngineArguments(model, **settings))

    @classmethod
    def of(cls, arguments: EngineArguments) -> EngineConfig:
        """Validate and resolve `arguments`.

        Raises ModelNotFound as `resolve_model` does, and ConfigError, which names the argument that is wrong.
        """
        settings = settings_of(EngineArguments)
        values = {name: getattr(arguments, name) for name in settings}
        unset = {name: "auto" for name, one in settings.items() if one.default == "auto" and values[name] is None}
        given = checked(EngineArguments, values | unset, ConfigError)
        spec = given.pop("model")
        if (tokenizer := given.pop("tokenizer")) is not None:
            spec = replace(spec, tokenizer_from=tokenizer)
        if (trusted := given.pop("trust_remote_code")) is not None:
            spec = replace(spec, trust_remote_code=trusted)
        of_model = {"device": None if given["devices"] else spec.device, "dtype": spec.dtype, "attention": spec.attention}
        given |= {name: value for name, value in of_model.items() if value is not None and given[name] == "auto"}
        shards = _resolve_devices(given["device"], given["devices"], given.pop("tensor_parallel_size"))
        given["device"] = shards[0] if len(shards) == 1 else given["device"]
        given["devices"] = shards if len(shards) > 1 else ()
        given["block_size"] = None if given["block_size"] == "auto" else given["block_size"]
        given |= {name: given[name] or 0 for name in ("host_kv_memory", "disk_kv_memory")}
        return cls(model=spec, **given)

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


def _resolve_devices(device: str, devices: tuple[str, ...] | None, size: int | None) -> tuple[str, ...]:
    """The devices of the shards, of which "cuda" and "auto" stay to be numbered; empty if nothing was asked for.

    Args:
        device: The one device that was asked for, or "auto".
        devices: Those that were asked for, or None.
        size: The number of shards, or None.

    Raises ConfigError.
    """
    if devices is None:
        if size in (None, 1):
            return ()
        assert size is not None
        if device.startswith("cuda:"):
            raise ConfigError(
                f"device={device!r} is one device, and tensor_parallel_size is {size}: name them all, as in "
                "devices=['cuda:0', 'cuda:1']"
            )
        return (device,) * size
    if size is not None and size != len(devices):
        raise ConfigError(f"tensor_parallel_size is {size}, and devices names {len(devices)}: leave one of them out")
    if device not in ("auto", devices[0].partition(":")[0]):
        raise ConfigError(f"give devices or device, not both: got devices={list(devices)} and device={device!r}")
    return devices
