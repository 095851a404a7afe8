"""Prevents transformers from downloading compiled kernels while an engine is built."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UnsupportedModel


@contextmanager
def no_hub_kernels() -> Iterator[None]:
    """A context in which transformers, in this thread, gets an UnsupportedModel instead of a kernel from the hub.

    The `kernels` package downloads compiled code. transformers calls it for attention, experts and some quantizations
    if the model's configuration names them. The replaced function is process-wide; calls from other threads are passed
    on.
    """
    from transformers.integrations import hub_kernels

    fetch = getattr(hub_kernels, "get_kernel_hub", None)
    if fetch is None:
        yield
        return
    owner = threading.get_ident()

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return fetch(name, *arguments, **options)
        raise UnsupportedModel(
            f"the model needs the kernel {name!r:.80} from the hub, and pagetide never downloads code; use a version of the "
            "model without it, such as one with another quantization or with none"
        )

    hub_kernels.get_kernel_hub = refuse
    try:
        yield
    finally:
        hub_kernels.get_kernel_hub = fetch
