"""Keeps transformers from fetching code: while an engine is built, the `kernels` package gives it none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import UnsupportedModel


@contextmanager
def no_hub_kernels() -> Iterator[None]:
    """Within, and in this thread, each kernel that transformers asks the `kernels` package for raises UnsupportedModel.

    That package downloads compiled code by the name of a repository, and transformers asks it on behalf of what a model's
    configuration says: for attention, for experts, for some kinds of quantization. `kernels` need not be installed; then there
    is nothing to keep back. The function is the process's while this lasts: other threads still reach the real one.
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
            f"the model wants the kernel {name!r:.80} from the hub, and nothing is ever downloaded: its code would run unseen; "
            "use a model without it, such as one in another form of quantization, or in none"
        )

    hub_kernels.get_kernel_hub = refuse
    try:
        yield
    finally:
        hub_kernels.get_kernel_hub = fetch
