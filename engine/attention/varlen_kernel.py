"""Paged attention by torch's `varlen_attn`, which takes block tables if flash-attn 3 or 4 is activated in torch."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .context import AttentionCall
from .flash_attn_kernel import library
from .library_kernel import LibraryKernel, SequenceGroup


class VarlenKernel(LibraryKernel):
    """torch.nn.attention.varlen. The process's active flash-attn implementation applies."""

    name = "varlen"

    @staticmethod
    def load() -> Any:
        """See `LibraryKernel.load`. Torch's own flash-attn 2 refuses block tables, so flash-attn 3 or 4 must be
        active."""
        found = library("torch.nn.attention.varlen", "varlen_attn")
        if "block_table" not in inspect.signature(found.varlen_attn).parameters:
            raise ImportError(f"the varlen_attn of torch {torch.__version__} takes no block tables", name="torch")
        active = torch.nn.attention.current_flash_attention_impl()
        if active is None:
            raise ImportError("no flash-attn 3 or 4 is active in torch", name="torch")
        return found

    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """See `LibraryKernel.attend_part`. A left bound of -1 means none; (-1, 0) means causal."""
        cache = call.cache
        return self._library.varlen_attn(
            query, cache.key, cache.value, part.q_starts, None, part.max_q, part.max_kv,
            scale=call.scaling, window_size=(-1 if call.left is None else call.left, 0),
            enable_gqa=query.shape[1] != cache.key.shape[2], seqused_k=part.lens, block_table=part.table(cache.table),
        )  # fmt: skip
