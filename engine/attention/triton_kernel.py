"""Paged attention by Triton kernels. Launch data is made once per step on the device, and shared by the layers.

Needs the package triton (ImportError says how to install it) and a CUDA device. With TRITON_INTERPRET=1 in the environment
before the first import it runs on a CPU, slowly, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from .context import AttentionCall, LayerCache, StepContext
from .triton_base import DECODE_TILINGS, DEFAULT_NUM_SMS, PREFILL_TILINGS, ScoreTransform, Tiling, cache_tiling, split_heads
from .triton_decode import choose_splits, decode, partial_items, splits_of_unknown
from .triton_prefill import list_tiles, prefill, queries_per_tile
from .triton_write import write

PARTIAL_BYTES = 32 << 20  # the most for partial results of splits


@dataclass(slots=True, eq=False)
class _TritonPlan:
    """Cached data of one step. Mutated by the kernel."""

    step: StepContext
    is_full: bool  # no padding after the chunks
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)  # by queries per tile: int32 [tiles, 4]
    # By heads, KV heads, width of V and reach: splits, and minimum tiles per split.
    splits: dict[tuple[int, int, int, int], tuple[int, int]] = field(default_factory=dict)


class TritonKernel:
    """An `AttentionKernel` by Triton, for blocks of any size, float16, bfloat16 and float32, and head dims up to 512.

    Caches have elements of these types, or of one byte with scales. Keys may have up to 576 elements, and V may be a part of K.

    It keeps only the last step's launch data. Partial results of decodes (up to 32 MiB) come from torch's cache in each call.

    Args:
        decode, prefill: Replace the tiles of the tables in `triton_base.py`.
        num_sms: Multiprocessors to fill; by default all of the device.
    """

    name = "triton"
    captures = True

    def __init__(self, *, decode: Tiling | None = None, prefill: Tiling | None = None, num_sms: int | None = None) -> None:
        self._decode_tiling = decode
        self._prefill_tiling = prefill
        self._num_sms = num_sms
        self._plan: _TritonPlan | None = None

    def release_buffers(self) -> None:
        """Drop the last step's data."""
        self._plan = None

    def write(self, call: AttentionCall) -> None:
        """See `AttentionKernel.write`. Padding, which is for block 0, is not written."""
        write(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionKernel.attend`. Reads K and V only from the arena.

        Raises ValueError for keys of more than 576 elements, and for V of more than 512.
        """
        query, cache, step = call.dense_query, call.cache, call.step
        if self._plan is None or self._plan.step is not step:
            self._plan = _planned(step)
        plan, table = self._plan, step.tables[cache.table]
        scores = ScoreTransform.of(call)
        num_tokens, num_heads, _ = query.shape
        v_dim = cache.value.shape[-1]
        out = (query.new_empty if plan.is_full else query.new_zeros)(num_tokens, num_heads, v_dim)
        if step.num_decodes:
            cut = self._decode_tiling or cache_tiling(DECODE_TILINGS, query, cache)
            num_splits, least_tiles = self._splits(plan, num_heads, cache, scores.reach, cut)
            partials = None
            if num_splits > 1:
                items = num_splits * partial_items(step.num_decodes, num_heads, v_dim)
                partials = torch.empty(items, dtype=torch.float32, device=query.device)
            decode(query, cache, table, step.lens[: step.num_decodes], out, partials, num_splits, scores, cut, least_tiles)
        if step.num_decodes < len(step.q_lens):
            cut = self._prefill_tiling or cache_tiling(PREFILL_TILINGS, query, cache)
            size = queries_per_tile(cut, num_heads // cache.key.shape[2])
            if size not in plan.tiles:
                plan.tiles[size] = list_tiles(step, size)
            prefill(query, cache, table, plan.tiles[size], out, scores, cut)
        return out

    def _splits(self, plan: _TritonPlan, num_heads: int, cache: LayerCache, reach: int, cut: Tiling) -> tuple[int, int]:
        """The number of splits for layers of this shape, and the minimum tiles per split."""
        num_kv_heads, v_dim = cache.value.shape[2:]
        shape = (num_heads, num_kv_heads, v_dim, reach)
        if shape not in plan.splits:
            step, sms = plan.step, self._sms(plan.step.lens.device)
            programs = num_kv_heads * split_heads(num_heads // num_kv_heads, v_dim)[1]  # of one split of a row
            seen = np.minimum(step.kv_lens[: step.num_decodes], reach).astype(np.int64)
            most = PARTIAL_BYTES // (4 * partial_items(len(seen), num_heads, v_dim))
            if step.bounded:
                plan.splits[shape] = splits_of_unknown(len(seen), int(seen.max()), programs, cut, sms, most)
            else:
                plan.splits[shape] = choose_splits(seen, programs, cut, sms, most), 1
        return plan.splits[shape]

    def _sms(self, device: torch.device) -> int:
        if self._num_sms is None:
            cuda = device.type == "cuda"
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else DEFAULT_NUM_SMS
        return self._num_sms


def _planned(step: StepContext) -> _TritonPlan:
    """The plan of a step. Raises ValueError if a decode's token is not at its row's place in the batch."""
    n = step.num_decodes
    if not np.array_equal(step.q_starts[:n], np.arange(n)):
        raise ValueError(f"the first {n} tokens of a batch must be its decodes', in order")
    return _TritonPlan(step, int(step.q_lens.sum()) == len(step.write_offsets))
