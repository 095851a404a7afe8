"""The errors of the engine.

EngineError
├── ModelNotFound      no such model, or its folder lacks the configuration or the weights
├── CheckpointError    the model's files are broken: truncated, unreadable, tensors missing
├── UnsupportedModel   the engine cannot run this kind of model on paged blocks; says why
├── ConfigError        an engine argument or a models file is wrong        (also a ValueError)
│   └── DeviceNotFound the requested device does not exist
├── NotEnoughMemory    the device lacks memory; says how much is free and what to do
├── ShardLost          a process with a part of the model is gone, and the engine with it
└── EngineClosed       the engine is closed

A request that cannot be served raises the scheduler's RequestRejected.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..common.units import format_bytes


class Attempt:
    """Within the context, an exception ends the block and is kept as `error`. None: the block has run to its end.

    For code that may raise anything: a user's, or a library's in Rust (a panic is no `Exception`). It runs in the engine's
    thread, which gets no KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return True


def format_error(error: BaseException) -> str:
    """The error as text, for `RequestOutput.error`."""
    return f"{type(error).__name__}: {error}"


class EngineError(Exception):
    """Base class of the engine's errors."""


class ModelNotFound(EngineError):
    """The model is missing on this machine, wholly or in part. Nothing is ever downloaded."""


class CheckpointError(EngineError):
    """A file of the model cannot be read, or weights are missing."""


class UnsupportedModel(EngineError):
    """The engine does not support this kind of model. `reason` says why in one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(EngineError, ValueError):
    """An argument or an entry of a models file has a wrong name, type or value, or does not suit the model or device."""


class DeviceNotFound(ConfigError):
    """The requested device is unknown, or not on this machine."""


class NotEnoughMemory(EngineError):
    """A device has fewer free bytes than needed.

    Args:
        what: The purpose of the bytes, as in "the weights of demo on cpu".
        remedy: What the user can do, as a clause.
    """

    def __init__(self, asked_bytes: int, free_bytes: int, what: str, remedy: str) -> None:
        super().__init__(asked_bytes, free_bytes, what, remedy)  # all arguments, for pickling
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        asked = f"{format_bytes(self.asked_bytes)} ({self.asked_bytes:,} bytes)"
        free = f"{format_bytes(self.free_bytes)} ({self.free_bytes:,} bytes)"
        return f"{self.what}: asked for {asked}, {free} are free; {self.remedy}"


class ShardLost(EngineError):
    """A process that holds a part of a divided model has ended or hangs. The engine has ended with it."""


class EngineClosed(EngineError):
    """The engine is closed, or being drained, or belongs to the parent of a forked process."""
