"""Stand-ins for attention libraries, written in torch: what their documents promise, and that they refuse all else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

INT = torch.int32


def _ragged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, q_starts: list[int], lens: list[int],
    *, scale: float, left: int, softcap: float, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention in float64 with the mask at the bottom right; a left bound of -1 is none. Reads only pages with tokens.

    The query is [tokens, heads, dim], the key [pages, page size, KV heads, dim].
    """
    page_size, kv_heads = key.shape[1:3]
    group = query.shape[1] // kv_heads
    out = query.new_zeros(len(query), query.shape[1], value.shape[-1])
    for row, (start, stop, length) in enumerate(zip(q_starts[:-1], q_starts[1:], lens, strict=True)):
        pages = table[row, : -(-length // page_size)].long()
        k, v = (c[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for c in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].double(), k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (stop - start), length)[:, None]
        seen = torch.arange(length) <= at
        if left >= 0:
            seen &= torch.arange(length) >= at - left
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, stop - start, 1)), -1)
        if length:
            out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v).to(out.dtype)
    return out


class Library:
    """All of them, in float32 and 16-bit types. `called` are the functions, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.planned = 0

    def _checked(self, query: torch.Tensor, caches: tuple[torch.Tensor, ...], ints: dict[str, Any], page: int) -> None:
        assert query.stride(-1) == 1
        for cache in caches:
            assert cache.dtype == query.dtype and cache.stride(-1) == 1 and cache.dim() == 4
            assert cache.shape[1] % page == 0 and cache.shape[-1] == query.shape[-1] <= 256
            assert query.shape[-1] % 8 == 0 and query.shape[-2] % cache.shape[2] == 0
        for name, (tensor, shape) in ints.items():
            assert tensor.dtype == INT and tensor.stride(-1) == 1 and tensor.device == query.device, name
            assert all(want in (None, got) for got, want in zip(tensor.shape, shape, strict=True)), name
            assert tensor.storage_offset() % 4 == 0, f"{name} begins at no multiple of 16 bytes"

    def flash2(self) -> SimpleNamespace:
        """The module flash_attn 2.8."""

        def with_kvcache(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
            block_table: torch.Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
        ) -> torch.Tensor:  # fmt: skip
            self.called.append("with_kvcache")
            n, q_len = q.shape[:2]
            assert causal and window_size in ((-1, -1), (window_size[0], 0))
            ints = {"cache_seqlens": (cache_seqlens, (n,)), "block_table": (block_table, (n, None))}
            self._checked(q, (k_cache, v_cache), ints, 256)
            starts = [i * q_len for i in range(n + 1)]
            out = _ragged(
                q.flatten(0, 1), k_cache, v_cache, block_table, starts, cache_seqlens.tolist(), scale=softmax_scale,
                left=window_size[0], softcap=softcap,
            )  # fmt: skip
            return out.unflatten(0, (n, q_len))

        def varlen(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
            max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int],
            softcap: float, block_table: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            self.called.append("varlen")
            n = len(cu_seqlens_q) - 1
            assert causal and window_size in ((-1, -1), (window_size[0], 0))
            ints = {"cu_seqlens_q": (cu_seqlens_q, (n + 1,)), "cu_seqlens_k": (cu_seqlens_k, (n + 1,))}
            self._checked(q, (k, v), ints | {"block_table": (block_table, (n, None))}, 256)
            lens = cu_seqlens_k.diff().tolist()
            assert max_seqlen_k == max(lens) and max_seqlen_q == max(cu_seqlens_q.diff().tolist())
            assert int(cu_seqlens_q[-1]) == len(q)
            return _ragged(
                q, k, v, block_table, cu_seqlens_q.tolist(), lens, scale=softmax_scale, left=window_size[0], softcap=softcap
            )

        return SimpleNamespace(flash_attn_with_kvcache=with_kvcache, flash_attn_varlen_func=varlen)

    def flash3(self) -> SimpleNamespace:
        """The module flash_attn_interface."""

        def with_kvcache(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
            page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
            window_size: tuple[int, int], softcap: float,
        ) -> torch.Tensor:  # fmt: skip
            self.called.append("with_kvcache")
            n = len(cache_seqlens)
            assert causal and max_seqlen_q == max(cu_seqlens_q.diff().tolist())
            ints = {"cache_seqlens": (cache_seqlens, (n,)), "cu_seqlens_q": (cu_seqlens_q, (n + 1,))}
            self._checked(q, (k_cache, v_cache), ints | {"page_table": (page_table, (n, None))}, 1)
            return _ragged(
                q, k_cache, v_cache, page_table, cu_seqlens_q.tolist(), cache_seqlens.tolist(), scale=softmax_scale,
                left=window_size[0], softcap=softcap,
            )  # fmt: skip

        return SimpleNamespace(flash_attn_with_kvcache=with_kvcache)

    def flash4(self) -> SimpleNamespace:
        """The module flash_attn.cute."""

        def varlen(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor,
            max_seqlen_q: int, max_seqlen_k: int, page_table: torch.Tensor, softmax_scale: float, causal: bool,
            window_size: tuple[int | None, int | None], learnable_sink: torch.Tensor | None, softcap: float,
        ) -> tuple[torch.Tensor, None]:  # fmt: skip
            self.called.append("varlen")
            n = len(seqused_k)
            left, right = window_size
            assert causal and (left, right) in ((None, None), (left, 0))
            assert max_seqlen_q == max(cu_seqlens_q.diff().tolist()) and max_seqlen_k == max(seqused_k.tolist())
            ints = {"seqused_k": (seqused_k, (n,)), "cu_seqlens_q": (cu_seqlens_q, (n + 1,))}
            self._checked(q, (k, v), ints | {"page_table": (page_table, (n, None))}, 1)
            assert learnable_sink is None or learnable_sink.shape == q.shape[1:2]
            return _ragged(
                q, k, v, page_table, cu_seqlens_q.tolist(), seqused_k.tolist(), scale=softmax_scale,
                left=-1 if left is None else left, softcap=softcap, sinks=learnable_sink,
            ), None  # fmt: skip

        return SimpleNamespace(flash_attn_varlen_func=varlen)

    def varlen(self) -> SimpleNamespace:
        """The module torch.nn.attention.varlen."""

        def varlen_attn(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: None,
            max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
            seqused_k: torch.Tensor, block_table: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            self.called.append("varlen_attn")
            n = len(seqused_k)
            assert cu_seq_k is None and enable_gqa == (query.shape[1] != key.shape[2]) and window_size[1] == 0
            assert max_q == max(cu_seq_q.diff().tolist()) and max_k == max(seqused_k.tolist())
            ints = {"seqused_k": (seqused_k, (n,)), "cu_seq_q": (cu_seq_q, (n + 1,))}
            self._checked(query, (key, value), ints | {"block_table": (block_table, (n, None))}, 1)
            return _ragged(
                query, key, value, block_table, cu_seq_q.tolist(), seqused_k.tolist(), scale=scale, left=window_size[0],
                softcap=0.0,
            )  # fmt: skip

        return SimpleNamespace(varlen_attn=varlen_attn)

    def flashinfer(self) -> SimpleNamespace:
        """The module flashinfer."""
        outer = self

        class Wrapper:
            decodes: bool

            def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
                assert workspace.dtype == torch.uint8 and not workspace.any() and layout == "NHD"
                assert options == ({"use_tensor_cores": True} if self.decodes else {})

            def _plan(self, q_starts: list[int], indptr: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
                outer.planned += 1
                for host in (indptr, last):
                    assert host.dtype == INT and host.device.type == "cpu"
                assert indices.dtype == INT and len(indices) == indptr[-1]
                self.sizes, self.options, self.q_starts = sizes, options, q_starts
                num_pages, page_size = indptr.diff(), sizes[3]
                assert ((last >= 1) & (last <= page_size)).all()
                self.lens = ((num_pages - 1) * page_size + last).tolist()
                self.table = torch.zeros(len(last), int(num_pages.max()), dtype=torch.int64)
                for row, count in enumerate(num_pages.tolist()):
                    self.table[row, :count] = indices[indptr[row] : indptr[row + 1]]

            def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
                key, value = paged_kv_cache
                outer._checked(q, (key, value), {}, 1)
                assert key.stride() == value.stride()
                assert (q.shape[1], key.shape[2], q.shape[2], key.shape[1]) == self.sizes
                assert self.options.pop("q_data_type", q.dtype) == q.dtype
                assert self.options.pop("kv_data_type", q.dtype) == key.dtype
                assert set(self.options) == {"sm_scale", "window_left", "logits_soft_cap"}
                return _ragged(
                    q, key, value, self.table, self.q_starts, self.lens, scale=self.options["sm_scale"],
                    left=self.options["window_left"], softcap=self.options["logits_soft_cap"],
                )  # fmt: skip

        class Decode(Wrapper):
            decodes = True

            def plan(self, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **options: Any) -> None:
                self._plan(list(range(len(last_page_len) + 1)), indptr, indices, last_page_len, *sizes, **options)

        class Prefill(Wrapper):
            decodes = False

            def plan(self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
                assert options.pop("causal") is True and qo_indptr.dtype == INT and qo_indptr.device.type == "cpu"
                self._plan(qo_indptr.tolist(), indptr, indices, last, *sizes, **options)

        return SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill)
