"""Paged attention by the flash-attn libraries 2, 3 and 4, alone or within torch, directly on the arena's strided views.

Their sources (github.com/Dao-AILab/flash-attention) define the arguments: `flash_attn/flash_attn_interface.py`,
`hopper/flash_attn_interface.py`, `flash_attn/cute/interface.py`. As in pagetide, a causal mask is aligned to the last key, a
window counts the keys before and after a query's own, and a softcap applies to scaled scores. Requirements: `backends.py`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from .context import AttentionCall, LayerCache
from .library_kernel import LibraryKernel, SequenceGroup


class FlashKernel(LibraryKernel):
    """flash-attn 2: blocks of multiples of 256 tokens."""

    name = "flash-attn"
    captures = True

    @staticmethod
    def load() -> Any:
        """See `LibraryKernel.load`."""
        return library("flash_attn", "flash_attn_with_kvcache", "flash_attn_varlen_func")

    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """See `LibraryKernel.attend_part`. The KV-cache function splits long rows, for decodes; the varlen function
        takes chunks."""
        cache = call.cache
        options = flash_options(call) | {"block_table": part.table(cache.table)}
        if part.max_q == 1:
            out = self._library.flash_attn_with_kvcache(
                query[:, None], cache.key, cache.value, cache_seqlens=part.lens, **options
            )
            return out[:, 0]
        return self._library.flash_attn_varlen_func(
            query,
            cache.key,
            cache.value,
            cu_seqlens_q=part.q_starts,
            cu_seqlens_k=part.kv_starts,
            max_seqlen_q=part.max_q,
            max_seqlen_k=part.max_kv,
            **options,
        )


class Flash3Kernel(LibraryKernel):
    """flash-attn 3: blocks of any size."""

    name = "flash-attn-3"
    captures = True

    @staticmethod
    def load() -> Any:
        """See `LibraryKernel.load`."""
        return library("flash_attn_interface", "flash_attn_with_kvcache")

    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """See `LibraryKernel.attend_part`."""
        cache = call.cache
        return self._library.flash_attn_with_kvcache(
            query,
            cache.key,
            cache.value,
            cache_seqlens=part.lens,
            page_table=part.table(cache.table),
            cu_seqlens_q=part.q_starts,
            max_seqlen_q=part.max_q,
            **flash_options(call),
        )


class Flash4Kernel(LibraryKernel):
    """flash-attn 4: blocks of any size with strides of multiples of 16 bytes. It would copy all other K and V."""

    name = "flash-attn-4"

    @staticmethod
    def load() -> Any:
        """See `LibraryKernel.load`."""
        return library("flash_attn.cute", "flash_attn_varlen_func")

    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """See `LibraryKernel.attend_part`. Raises ValueError for K and V that the library would copy."""
        cache = call.cache
        refuse_unaligned(cache, self.name)
        out, *_ = self._library.flash_attn_varlen_func(
            query, cache.key, cache.value,
            cu_seqlens_q=part.q_starts, seqused_k=part.lens, max_seqlen_q=part.max_q, max_seqlen_k=part.max_kv,
            page_table=part.table(cache.table), softmax_scale=call.scaling, causal=True,
            window_size=(call.left, None if call.left is None else 0),
            learnable_sink=call.sinks, softcap=call.softcap or 0.0,
        )  # fmt: skip
        return out


class VarlenKernel(LibraryKernel):
    """torch.nn.attention.varlen, by the flash-attn 3 or 4 that is active in torch."""

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


def library(module: str, *functions: str) -> Any:
    """Import a module. Raises ImportError if it is missing or lacks one of these functions."""
    found = importlib.import_module(module)
    for function in functions:
        if not hasattr(found, function):
            raise ImportError(f"{module} has no {function}", name=module)
    return found


def flash_options(call: AttentionCall) -> dict[str, Any]:
    """The scoring arguments of flash-attn 2 and 3."""
    return {
        "softmax_scale": call.scaling,
        "causal": True,
        "window_size": (-1, -1) if call.left is None else (call.left, 0),
        "softcap": call.softcap or 0.0,
    }


def refuse_unaligned(cache: LayerCache, name: str) -> None:
    """Raises ValueError unless all rows of K and V begin at multiples of 16 bytes."""
    for view in (cache.key, cache.value):
        strides = [stride * view.itemsize for stride in view.stride()[:-1]]
        if view.data_ptr() % 16 or any(stride % 16 for stride in strides) or view.stride(-1) != 1:
            raise ValueError(
                f"{name} takes K and V in rows that begin at multiples of 16 bytes; these have strides of {strides} bytes"
            )
