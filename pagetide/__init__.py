"""A paged KV cache that grows and shrinks with the GPU's free memory, and an engine on top of it.

    from pagetide import LLM, SamplingParams

The names below are imported on first access (PEP 562): importing a part of pagetide, such as `pagetide.allocator`, runs
this file and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from .allocator.errors import MemoryNotFree
    from .allocator.reservation import Reservation, reserve
    from .api.sampling_params import SamplingParams
    from .engine.async_llm import AsyncLLM
    from .engine.errors import ConfigError, EngineClosed, ModelNotFound, NotEnoughMemory, ShardLost, UnsupportedModel
    from .engine.llm import LLM, generate
    from .engine.requests.outputs import Completion, RequestOutput, StreamChunk, TokenLogprobs
    from .fleet.api import Fleet
    from .fleet.errors import FleetError
    from .pipelines import pipeline
    from .scheduler.request import RequestRejected

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "ConfigError",
    "EngineClosed",
    "Fleet",
    "FleetError",
    "MemoryNotFree",
    "ModelNotFound",
    "NotEnoughMemory",
    "RequestOutput",
    "RequestRejected",
    "Reservation",
    "SamplingParams",
    "ShardLost",
    "StreamChunk",
    "TokenLogprobs",
    "UnsupportedModel",
    "__version__",
    "generate",
    "pipeline",
    "reserve",
]

_NAMES_OF = {
    ".allocator.errors": ("MemoryNotFree",),
    ".allocator.reservation": ("Reservation", "reserve"),
    ".api.sampling_params": ("SamplingParams",),
    ".engine.async_llm": ("AsyncLLM",),
    ".engine.errors": ("ConfigError", "EngineClosed", "ModelNotFound", "NotEnoughMemory", "ShardLost", "UnsupportedModel"),
    ".engine.llm": ("LLM", "generate"),
    ".engine.requests.outputs": ("Completion", "RequestOutput", "StreamChunk", "TokenLogprobs"),
    ".fleet.api": ("Fleet",),
    ".fleet.errors": ("FleetError",),
    ".pipelines": ("pipeline",),
    ".scheduler.request": ("RequestRejected",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value  # cached for the next access
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
