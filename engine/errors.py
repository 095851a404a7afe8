"""The errors of the engine.

EngineError
├── ModelNotFound      no such model, or its folder lacks the configuration or the weights
├── CheckpointError    the model's files are there and broken: truncated, unreadable, tensors missing
├── UnsupportedModel   the engine cannot run this kind of model out of paged blocks, and why
├── ConfigError        an engine argument or a models file is wrong        (is a ValueError too)
│   └── DeviceNotFound the device asked for is not there
├── NotEnoughMemory    the device has not the bytes; says how many are free and what to do
└── EngineClosed       the engine was closed: it takes nothing more

A request that cannot be served is the scheduler's RequestRejected, wherever it is noticed.
"""

from __future__ import annotations

from ..monitor.units import format_bytes


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is meant for the whole process: KeyboardInterrupt, or SystemExit, as signal handlers raise it.

    Every other exception is a failure of the code that raised it, also where it is no Exception: asyncio.CancelledError out of
    a logits processor, or a panic of a library in Rust.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit)


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class ModelNotFound(EngineError):
    """The model asked for is not on this machine, or not all of it. Nothing is ever downloaded."""


class CheckpointError(EngineError):
    """A file of the model cannot be read, or the weights in it are not the whole model."""


class UnsupportedModel(EngineError):
    """The model is of a kind that the engine does not serve. `reason` says why in one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(EngineError, ValueError):
    """An argument or an entry of a models file has a wrong name, type or value. Nothing was loaded."""


class DeviceNotFound(ConfigError):
    """The device asked for is unknown, or not on this machine."""


class NotEnoughMemory(EngineError):
    """A device has fewer bytes free than something needs. Raised before anything was read or mapped.

    Args:
        asked_bytes: What is needed.
        free_bytes: What the device has.
        what: What the bytes are for, as in "the weights of demo on cpu".
        remedy: What the user can do, as a clause.
    """

    def __init__(self, asked_bytes: int, free_bytes: int, what: str, remedy: str) -> None:
        super().__init__(asked_bytes, free_bytes, what, remedy)  # all of them, so that it survives pickling
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        asked = f"{format_bytes(self.asked_bytes)} ({self.asked_bytes:,} bytes)"
        free = f"{format_bytes(self.free_bytes)} ({self.free_bytes:,} bytes)"
        return f"{self.what}: asked for {asked}, {free} are free; {self.remedy}"


class EngineClosed(EngineError):
    """The engine was closed and its memory given back."""
