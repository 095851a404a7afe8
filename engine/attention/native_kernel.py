"""Paged attention by the native kernels for CPUs, which read K and V where they lie."""

from __future__ import annotations

import torch

from ... import native
from .context import AttentionCall


class NativeKernel:
    """An `AttentionKernel` over `torch.ops.pagetide`. Keeps nothing between calls.

    Raises ImportError if the library of native kernels is not there or does not serve this processor.
    """

    name = "native"
    captures = False  # there are no graphs on a CPU

    def __init__(self) -> None:
        if native.instructions() is None:
            raise ImportError("the native kernels do not serve; the log says why, and PAGETIDE_NATIVE=0 switches them off")
        self._write = torch.ops.pagetide.write_kv.default
        self._attend = torch.ops.pagetide.attend.default

    def release_buffers(self) -> None:
        """See `AttentionKernel.release_buffers`."""

    def write(self, call: AttentionCall) -> None:
        """See `AttentionKernel.write`."""
        cache, step = call.cache, call.step
        key = call.key if call.key.stride(-1) == 1 else call.key.contiguous()
        value = call.value if call.value.stride(-1) == 1 else call.value.contiguous()
        self._write(
            key,
            None if cache.v_in_k else value,
            cache.key,
            cache.value,
            step.write_blocks[cache.table],
            step.write_offsets,
            cache.key_scale,
            cache.value_scale,
        )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        cache, step = call.cache, call.step
        sinks = None if call.sinks is None else call.sinks.float()
        result: torch.Tensor = self._attend(
            call.dense_query, cache.key, cache.value, step.tables[cache.table], step.bounds, step.lens,
            call.scaling, call.window or 0, call.softcap or 0.0, sinks,
            cache.key_scale, cache.value_scale,
        )  # fmt: skip
        return result
