"""Paged attention of chunks of several tokens, with variable lengths and causal masks over the cached tokens.

A program attends with one tile of a chunk's queries, for all query heads of one KV head, to the keys they see. All K and V,
including the chunk's own, are read through the block table. Tiles are listed once per step, longest first.
"""

from __future__ import annotations

import numpy as np
import torch

from .context import LayerCache, StepContext
from .triton_base import (
    LOG2_E,
    ScoreTransform,
    Tiling,
    add_values,
    key_scores,
    load_rows,
    load_scales,
    logits,
    on_device,
    padded,
    split_dims,
    split_heads,
    tl,
    triton,
    views_and_strides,
)


def queries_per_tile(tiling: Tiling, group: int) -> int:
    """Queries per tile: their `group` heads fit its rows. At least one; then the tile has more rows."""
    return max(1, tiling.rows // group)


def list_tiles(step: StepContext, size: int) -> torch.Tensor:
    """int32 [tiles, 4] on the device: chunk, first token in the batch, its position in the sequence, number of queries.

    A tile has at most `size` queries. Computed from the step's device tensors; the host computes only the number of tiles.
    """
    low = step.num_decodes
    num_tiles = int((-(-np.asarray(step.q_lens[low:], np.int64) // size)).sum())
    lens, starts = step.lens[low:], step.bounds[low:-1]
    q_lens = step.bounds[low + 1 :] - starts
    counts = (q_lens + (size - 1)) // size
    chunk = torch.repeat_interleave(counts, output_size=num_tiles)
    within = torch.arange(num_tiles, device=lens.device) - (counts.cumsum(0) - counts)[chunk]
    skipped = within * size
    queries = (q_lens[chunk] - skipped).clamp(max=size)
    positions = (lens - q_lens)[chunk] + skipped
    tiles = torch.stack((chunk + low, starts[chunk] + skipped, positions, queries), 1)
    return tiles[torch.argsort(positions + queries, descending=True, stable=True)].int()


def prefill(
    query: torch.Tensor,  # [T, num_heads, head_dim]
    cache: LayerCache,
    table: torch.Tensor,  # int64 [chunks, W]
    tiles: torch.Tensor,  # int32 [tiles, 4], on the device: see `list_tiles`
    out: torch.Tensor,  # [T, num_heads, v_head_dim], contiguous
    scores: ScoreTransform,
    tiling: Tiling,
) -> None:
    """Fill the tiles' places in `out`."""
    num_heads = query.shape[1]
    block_size, num_kv_heads = cache.key.shape[1:3]
    (dim, further), v_dim = split_dims(cache), cache.value.shape[-1]
    group = num_heads // num_kv_heads
    heads, programs = split_heads(group, v_dim, tiling.rows)
    views, strides = views_and_strides(cache, reads=True)
    with on_device(query):
        _prefill[(num_kv_heads * programs, len(tiles))](
            out, query, *views, table, tiles, scores.sinks,
            *query.stride()[:2], *strides, table.stride(0), scores.reach, scores.inner, scores.outer,
            GROUP=group, HEADS=heads, PROGRAMS=programs, ROWS=max(tiling.rows, padded(heads)), DIM=dim,
            DIM_PAD=padded(dim), FURTHER=further, FURTHER_PAD=padded(further), V_DIM=v_dim, V_DIM_PAD=padded(v_dim),
            BLOCK_SIZE=block_size, KEYS=tiling.keys, SOFTCAP=scores.has_softcap,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "reach"])
def _prefill(
    out: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, table: tl.tensor, tiles: tl.tensor, sinks: tl.tensor,
    query_token: tl.tensor, query_head: tl.tensor,  # strides, by name
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor, key_scales_head: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor, value_scales_head: tl.tensor,
    table_row: tl.tensor, reach: tl.tensor, inner: tl.tensor, outer: tl.tensor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one tile of queries, for HEADS query heads of one KV head. Row r is query r // HEADS, head r % HEADS.

    `value` None: V is the keys' leading elements, and has their scales.
    """
    kv_head = tl.program_id(0)
    tiles += tl.program_id(1) * 4
    chunk = tl.load(tiles).to(tl.int64)
    token = tl.load(tiles + 1).to(tl.int64)
    position = tl.load(tiles + 2)
    num_queries = tl.load(tiles + 3)
    rows = tl.arange(0, ROWS)
    queries = rows // HEADS
    group = rows % HEADS
    real = queries < num_queries
    if PROGRAMS > 1:
        group += kv_head % PROGRAMS * HEADS
        kv_head = kv_head // PROGRAMS
        real = real & (group < GROUP)
    heads = (kv_head * GROUP + group).to(tl.int64)
    offsets = (token + queries) * query_token + heads * query_head
    q = load_rows(query, offsets, real, DIM, DIM_PAD)
    q_further = None
    if FURTHER:
        q_further = load_rows(query + DIM, offsets, real, FURTHER, FURTHER_PAD)
    table += chunk * table_row
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:  # a sink is a key with a given logit and a value of zero
        highest = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros((ROWS, V_DIM_PAD), tl.float32)
    highest, total, mixed = _attend(
        highest, total, mixed, q, q_further, key, value, key_scales, value_scales, table, kv_head, position, position + queries,
        position + num_queries, key_block, key_token, key_head, value_block, value_token, value_head,
        key_scales_block, key_scales_token, key_scales_head, value_scales_block, value_scales_token, value_scales_head,
        reach, inner, outer, DIM, DIM_PAD, FURTHER, FURTHER_PAD, V_DIM, V_DIM_PAD, BLOCK_SIZE, KEYS, SOFTCAP,
    )  # fmt: skip
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    places = (token + queries) * (tl.num_programs(0) // PROGRAMS * GROUP) + heads
    v_dims = tl.arange(0, V_DIM_PAD)
    o_mask = real[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out + places[:, None] * V_DIM + v_dims[None, :], mixed.to(out.dtype.element_ty), mask=o_mask)


@triton.jit
def _attend(
    highest: tl.tensor, total: tl.tensor, mixed: tl.tensor,  # so far
    q: tl.tensor, q_further: tl.tensor, key: tl.tensor, value: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    table: tl.tensor, kv_head: tl.tensor, position: tl.tensor, at: tl.tensor, last: tl.tensor,
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor, key_scales_head: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor, value_scales_head: tl.tensor,
    reach: tl.tensor, inner: tl.tensor, outer: tl.tensor,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend to all keys that the queries from `position` to `last` see. `at` is each row's position."""
    key += kv_head * key_head
    if value is not None:
        value += kv_head * value_head
    if key_scales is not None:
        key_scales += kv_head * key_scales_head
    if value_scales is not None:
        value_scales += kv_head * value_scales_head
    # Some query sees keys first .. last. All queries see the whole tiles middle .. right, which need no mask.
    first = tl.maximum(position - reach + 1, 0)
    middle = first + tl.cdiv(tl.maximum(last - reach, 0) - first, KEYS) * KEYS
    right = tl.maximum(first + (position + 1 - first) // KEYS * KEYS, middle)
    for part in tl.static_range(3):
        start, stop = first, tl.minimum(middle, last)
        if part == 1:
            start, stop = middle, right
        if part == 2:
            start, stop = right, last
        highest, total, mixed = _attend_part(
            highest, total, mixed, q, q_further, key, value, key_scales, value_scales, table, at, start, stop, last,
            key_block, key_token, value_block, value_token, key_scales_block, key_scales_token,
            value_scales_block, value_scales_token, reach, inner, outer,
            DIM, DIM_PAD, FURTHER, FURTHER_PAD, V_DIM, V_DIM_PAD, BLOCK_SIZE, KEYS, SOFTCAP, part != 1,
        )  # fmt: skip
    return highest, total, mixed


@triton.jit
def _attend_part(
    highest: tl.tensor, total: tl.tensor, mixed: tl.tensor,  # so far
    q: tl.tensor, q_further: tl.tensor, key: tl.tensor, value: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    table: tl.tensor, at: tl.tensor, start: tl.tensor, stop: tl.tensor, last: tl.tensor,
    key_block: tl.tensor, key_token: tl.tensor, value_block: tl.tensor, value_token: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor,
    reach: tl.tensor, inner: tl.tensor, outer: tl.tensor,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend to the tiles of keys from `start` to `stop`. Without MASKED, tiles are whole and visible to all rows."""
    end = stop
    if MASKED:
        end = last
    keys = start + tl.arange(0, KEYS)  # block ids are loaded one iteration ahead: see triton_decode.py
    next_blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)
    for tile in range(start, stop, KEYS):
        keys = tile + tl.arange(0, KEYS)
        blocks = next_blocks  # int64, as are all pointer offsets
        next_blocks = tl.load(table + (keys + KEYS) // BLOCK_SIZE, mask=keys + KEYS < end, other=0)
        slots = keys % BLOCK_SIZE
        real = None
        if MASKED:
            real = keys < last
        scales = None
        if key_scales is not None:
            scales = load_scales(key_scales, blocks * key_scales_block + slots * key_scales_token, real)
        places = blocks * key_block + slots * key_token
        scores, v = key_scores(q, q_further, key, places, real, scales, DIM, DIM_PAD, FURTHER, FURTHER_PAD)
        scores = logits(scores, inner, outer, SOFTCAP)
        if MASKED:
            seen = (keys[None, :] <= at[:, None]) & (keys[None, :] > (at - reach)[:, None]) & (keys < last)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        if value is not None:
            v = load_rows(value, blocks * value_block + slots * value_token, real, V_DIM, V_DIM_PAD)
        if value_scales is not None:
            scales = load_scales(value_scales, blocks * value_scales_block + slots * value_scales_token, real)
        new = tl.maximum(highest, tl.max(scores, 1))
        base = new
        if MASKED:  # a row without a visible key so far
            base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = add_values(mixed, shrink, weights, v, scales, q.dtype)
        highest = new
    return highest, total, mixed
