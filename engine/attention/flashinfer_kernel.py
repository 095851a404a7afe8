"""Paged attention by FlashInfer: the host plans once per step and kind of layer, and every layer runs the plan.

https://docs.flashinfer.ai: pages of any size, as flat lists of page ids; K and V as a pair of views with equal strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .context import AttentionCall, StepContext
from .flash_attn_kernel import library
from .library_kernel import LibraryKernel, SequenceGroup

# As FlashInfer recommends; shared by the plans, as no two run at the same time
WORKSPACE_BYTES = 128 << 20

_Kind = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Planned:
    """A wrapper, and the step it is planned for. Mutated by the kernel."""

    wrapper: Any
    step: StepContext | None = None


class FlashInferKernel(LibraryKernel):
    """FlashInfer. Owns a workspace of 128 MiB, and 8 MiB per kind of layer and of chunk."""

    name = "flashinfer"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._workspace: torch.Tensor | None = None
        self._planned: dict[_Kind, _Planned] = {}

    @staticmethod
    def load() -> Any:
        """See `LibraryKernel.load`."""
        return library("flashinfer", "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")

    def release_buffers(self) -> None:
        """Drop the workspaces and plans. The next call recreates them."""
        super().release_buffers()
        self._planned.clear()
        self._workspace = None

    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """See `LibraryKernel.attend_part`."""
        cache, decodes = call.cache, part.max_q == 1
        kind = (decodes, cache.table, query.shape[1:], cache.key.shape[1:], query.dtype, *_settings(call).items())
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = _Planned(self._wrapper(decodes, query.device))
        if planned.step is not part.step:
            _plan(planned.wrapper, decodes, call, part)
            planned.step = part.step
        return planned.wrapper.run(query, (cache.key, cache.value))

    def _wrapper(self, decodes: bool, device: torch.device) -> Any:
        if self._workspace is None:
            with torch.inference_mode(False):
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if decodes:  # tensor cores: the query heads of a KV head share its loads
            return self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")


def _settings(call: AttentionCall) -> dict[str, Any]:
    """The scoring arguments of a plan."""
    return {
        "sm_scale": call.scaling,
        "window_left": -1 if call.left is None else call.left,
        "logits_soft_cap": call.softcap or 0.0,
    }


def _plan(wrapper: Any, decodes: bool, call: AttentionCall, part: SequenceGroup) -> None:
    """Plan a wrapper for each sequence's pages. Index arrays stay on the host; the wrapper would otherwise copy them back."""
    query, cache = call.query, call.cache
    block_size, num_kv_heads, head_dim = cache.key.shape[1:]
    kv_lens = np.asarray(part.kv_lens, np.int64)
    pages = -(-kv_lens // block_size)
    starts = np.concatenate(([0], np.cumsum(pages)))
    # no pages: FlashInfer's formula then gives 0 tokens
    last = np.where(pages > 0, kv_lens - (pages - 1) * block_size, block_size)
    rows = np.repeat(np.arange(len(pages)), pages)
    table = part.table(cache.table)
    flat = rows * table.shape[1] + np.arange(len(rows)) - starts[rows]
    ids = table.reshape(-1)[torch.from_numpy(flat).to(table.device, non_blocking=True)]
    lists = (torch.from_numpy(starts.astype(np.int32)), ids, torch.from_numpy(last.astype(np.int32)))
    sizes = (query.shape[1], num_kv_heads, head_dim, block_size)
    options = {"q_data_type": query.dtype, "kv_data_type": cache.key.dtype, **_settings(call)}
    if decodes:
        wrapper.plan(*lists, *sizes, **options)
        return
    q_starts = np.concatenate(([0], np.cumsum(part.q_lens))).astype(np.int32)
    wrapper.plan(torch.from_numpy(q_starts), *lists, *sizes, causal=True, **options)
