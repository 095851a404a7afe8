"""A paged KV cache that rises and falls with the free memory of the GPU, and an engine on top of it.

    from pagetide import LLM, SamplingParams

The names below are imported when they are first asked for (PEP 562): importing a part of pagetide, such as
`pagetide.allocator`, runs this file, and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.outputs import RequestOutput
    from .scheduler.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_MODULE_OF = {"LLM": ".engine.llm", "RequestOutput": ".engine.outputs", "SamplingParams": ".scheduler.request"}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
