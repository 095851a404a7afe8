"""The arguments of an engine, checked at the door and resolved once into a frozen object. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ..monitor.units import parse_bytes
from ..scheduler.request import SamplingParams
from .errors import ConfigError
from .models import DTYPES, ModelEntry, ModelSpec, check_device, check_dtype, read_models, resolve_model

__all__ = ["DTYPES", "EngineConfig", "ModelEntry", "ModelSpec", "read_models", "resolve_model"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_SEQS = 256
DEFAULT_MAX_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine runs, where, and with how much. Build it with `resolve`.

    Args:
        model: The model and its own options.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "float16" or "bfloat16".
        kv_memory_bytes: Size of the KV pool; None is as `planning.auto_kv_bytes` works it out.
        block_size: Tokens of a block; None is 16, or what the attention backend needs.
        max_seqs: Most sequences that run at a time.
        max_step_tokens: Most tokens a step computes. No more sequences run than this, as each gets a token a step.
        max_model_len: Most tokens of a sequence, prompt and output; None is the model's context.
        max_chunk_tokens: Most tokens of one sequence in a step; None is `max_step_tokens`.
    """

    model: ModelSpec
    device: str = "auto"
    dtype: str = "auto"
    kv_memory_bytes: int | None = None
    block_size: int | None = None
    max_seqs: int = DEFAULT_MAX_SEQS
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    max_model_len: int | None = None
    max_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("kv_memory_bytes", 1), ("block_size", 1), ("max_seqs", 1),
            ("max_step_tokens", 1), ("max_model_len", 2), ("max_chunk_tokens", 1),
        ):  # fmt: skip
            _check_integer(name, getattr(self, name), least)

    @property
    def sampling(self) -> SamplingParams:
        """The models file's sampling defaults; `Checkpoint.default_sampling` has the model's own beneath them."""
        return self.model.sampling

    @classmethod
    def resolve(
        cls,
        model: str | os.PathLike[str] | ModelSpec,
        *,
        device: object = None,
        dtype: object = None,
        kv_memory: int | str | None = None,
        block_size: int | str | None = None,
        max_seqs: int = DEFAULT_MAX_SEQS,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        max_model_len: int | None = None,
        max_chunk_tokens: int | None = None,
        trust_remote_code: bool | None = None,
    ) -> EngineConfig:
        """Arguments as the user gives them; None, and "auto" where it makes sense, leaves the choice to the models file
        and then to the engine. `kv_memory` is bytes or text ("2GiB"), `device` and `dtype` may be torch's objects.

        Raises:
            ModelNotFound: see `resolve_model`.
            ConfigError: an argument of a wrong type or out of its range; the message names it.
        """
        spec = model if isinstance(model, ModelSpec) else resolve_model(_checked_reference(model))
        if trust_remote_code is not None:
            if not isinstance(trust_remote_code, bool):
                raise ConfigError(f"trust_remote_code must be True or False, got {trust_remote_code!r}")
            spec = replace(spec, trust_remote_code=trust_remote_code)
        return cls(
            model=spec,
            device=check_device(spec.device or "auto" if device in (None, "auto") else device),
            dtype=check_dtype(spec.dtype or "auto" if dtype in (None, "auto") else dtype),
            kv_memory_bytes=_kv_memory(kv_memory),
            block_size=None if block_size == "auto" else block_size,  # type: ignore[arg-type]  # checked in __post_init__
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            max_chunk_tokens=max_chunk_tokens,
        )

    def tokens_per_block(self, multiple_of: int = 1) -> int:
        """The block size for an attention backend that takes multiples of `multiple_of` tokens only.

        Raises ConfigError when the block size asked for is none.
        """
        if self.block_size is None:
            return -(-DEFAULT_BLOCK_SIZE // multiple_of) * multiple_of
        if self.block_size % multiple_of:
            raise ConfigError(
                f"block_size {self.block_size} does not suit the attention backend, which takes multiples of "
                f"{multiple_of}; use {-(-self.block_size // multiple_of) * multiple_of}, or block_size='auto'"
            )
        return self.block_size


def _checked_reference(model: object) -> str | os.PathLike[str]:
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model must be a name, a folder or a hub id, got {model!r}")
    return model


def _kv_memory(amount: int | str | None) -> int | None:
    if amount is None or amount == "auto":
        return None
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise ConfigError(f"kv_memory: {error}; or 'auto'") from error


def _check_integer(name: str, value: object, least: int) -> None:
    if value is None and name not in ("max_seqs", "max_step_tokens"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
