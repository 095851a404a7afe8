"""Paged attention of decode rows, split over the context if the batch alone does not fill the card.

A program attends with the query heads of one KV head to one split of a row's keys, so K and V are read once; only if results of
all heads exceed the registers (MLA), several programs share them. It iterates over tiles of keys, gathered from blocks token by
token, so blocks may have any size. Splits store partial results in float32, which a second kernel merges; the only split of a
short row stores the result. Lengths are read on
the device, and launches depend only on the number of rows and splits, so a captured CUDA graph serves any lengths. Rows of
length 0 are padding and get zeros. Scales of one-byte elements multiply scores (K) and weights (V), once per token and head.

    partials   float32   [rows, num_heads, splits, v_head_dim] divided by their sums | [rows, num_heads, splits] log2 of these
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .context import LayerCache
from .triton_base import (
    LEAST_SPLIT_TILES,
    LOG2_E,
    PROGRAMS_PER_SM,
    UNKNOWN_SPLIT_KEYS,
    UNKNOWN_SPLITS,
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

MERGED_AT_ONCE = 16  # splits


def partial_items(num_rows: int, num_heads: int, v_dim: int) -> int:
    """Floats in the partial results of one split of all rows."""
    return num_rows * num_heads * (v_dim + 1)


def choose_splits(seen: npt.NDArray[np.int64], num_kv_heads: int, tiling: Tiling, num_sms: int, most: int) -> int:
    """The number of splits for rows with these numbers of visible keys: 1 if the batch fills the card, at most `most`.

    A split of the longest row takes as long as each of the card's programs needs for its share.
    """
    share = max(int(seen.sum()) * num_kv_heads / (num_sms * PROGRAMS_PER_SM), LEAST_SPLIT_TILES * tiling.keys)
    return max(1, min(most, round(int(seen.max(initial=0)) / share)))


def splits_of_unknown(num_rows: int, reach: int, num_kv_heads: int, tiling: Tiling, num_sms: int, most: int) -> tuple[int, int]:
    """(splits, minimum tiles per split) for rows of unknown lengths that see at most `reach` keys.

    A batch that fills the card with rows of equal length is still split a little, so that one long row among short ones does
    not occupy few programs for long. Short rows stay whole.
    """
    alike = choose_splits(np.full(num_rows, reach), num_kv_heads, tiling, num_sms, most)
    if alike >= UNKNOWN_SPLITS or reach <= UNKNOWN_SPLIT_KEYS or most < UNKNOWN_SPLITS:
        return alike, 1
    return UNKNOWN_SPLITS, max(1, UNKNOWN_SPLIT_KEYS // tiling.keys) if alike == 1 else LEAST_SPLIT_TILES


def num_warps(tiling: Tiling, heads: int) -> int:
    """Warps per program: more than in the table if it has many query heads, as their results are kept in registers."""
    return max(tiling.warps, padded(heads) // 16)


def decode(
    query: torch.Tensor,  # [T, num_heads, head_dim]; row i is token i
    cache: LayerCache,
    table: torch.Tensor,  # int64 [>= rows, W]
    lens: torch.Tensor,  # int32 [rows], on the device; 0 is padding
    out: torch.Tensor,  # [T, num_heads, v_head_dim], contiguous
    partials: torch.Tensor | None,  # float32, `partial_items` per split; None: no splits
    num_splits: int,
    scores: ScoreTransform,
    tiling: Tiling,
    least_tiles: int = 1,  # per split
) -> None:
    """Fill the rows' places in `out`."""
    num_rows, num_heads = len(lens), query.shape[1]
    block_size, num_kv_heads = cache.key.shape[1:3]
    (dim, further), v_dim = split_dims(cache), cache.value.shape[-1]
    group = num_heads // num_kv_heads
    heads, programs = split_heads(group, v_dim)
    views, strides = views_and_strides(cache, reads=True)
    mixes, sums = None, None
    if partials is not None:
        mixes = partials[: num_rows * num_heads * num_splits * v_dim]
        sums = partials[len(mixes) :]
    with on_device(query):
        _decode[(num_kv_heads * programs, num_rows, num_splits)](
            out, mixes, sums, query, *views, table, lens, scores.sinks,
            *query.stride()[:2], *strides, table.stride(0), num_splits, least_tiles, scores.reach, scores.inner, scores.outer,
            GROUP=group, GROUP_PAD=padded(heads), PROGRAMS=programs, DIM=dim, DIM_PAD=padded(dim),
            FURTHER=further, FURTHER_PAD=padded(further), V_DIM=v_dim, V_DIM_PAD=padded(v_dim),
            BLOCK_SIZE=block_size, KEYS=tiling.keys, SOFTCAP=scores.has_softcap,
            num_warps=num_warps(tiling, heads), num_stages=tiling.stages,
        )  # fmt: skip
        if sums is not None:
            _merge[(num_heads, num_rows)](
                out, mixes, sums, lens, scores.sinks, num_splits, least_tiles, scores.reach,
                V_DIM=v_dim, V_DIM_PAD=padded(v_dim), KEYS=tiling.keys, SPLITS=MERGED_AT_ONCE, num_warps=4,
            )  # fmt: skip


@triton.jit
def _keys_per_split(num_keys: tl.tensor, num_splits: tl.tensor, least_tiles: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Keys per split, in whole tiles. Short rows use fewer than `num_splits` splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, KEYS), num_splits), least_tiles) * KEYS


@triton.jit
def _add_tile(
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scores: tl.tensor,
    v: tl.tensor,
    scales: tl.tensor,
    TYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile of keys, at least one of them visible to each row, to the running softmax and its weighted values."""
    new = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(highest - new)
    total = total * shrink + tl.sum(weights, 1)
    return new, total, add_values(mixed, shrink, weights, v, scales, TYPE)


@triton.jit(do_not_specialize=["table_row", "num_splits", "least_tiles", "reach"])
def _decode(
    out: tl.tensor, partials: tl.tensor, sums: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, table: tl.tensor, lens: tl.tensor, sinks: tl.tensor,
    query_token: tl.tensor, query_head: tl.tensor,  # strides, by name
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor, key_scales_head: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor, value_scales_head: tl.tensor, table_row: tl.tensor,
    num_splits: tl.tensor, least_tiles: tl.tensor, reach: tl.tensor, inner: tl.tensor, outer: tl.tensor,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PROGRAMS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one split of one row, for GROUP_PAD query heads of one KV head. `sums` None: no splits.

    `value` None: V is the keys' leading elements, and has their scales.
    """
    kv_head = tl.program_id(0)  # fastest dimension: neighbours read the same blocks concurrently
    row = tl.program_id(1).to(tl.int64)
    last = tl.load(lens + row)
    first = tl.maximum(last - reach, 0)
    alone = True  # the row's only split: its result is final
    if sums is not None:
        share = _keys_per_split(last - first, num_splits, least_tiles, KEYS)
        alone = share >= last - first
        first += tl.program_id(2) * share
        last = tl.minimum(first + share, last)
        if first >= last:
            return
    group = tl.arange(0, GROUP_PAD)
    if PROGRAMS > 1:
        group += kv_head % PROGRAMS * GROUP_PAD
        kv_head = kv_head // PROGRAMS
    heads = (kv_head * GROUP + group).to(tl.int64)
    q = load_rows(query + row * query_token, heads * query_head, group < GROUP, DIM, DIM_PAD)
    q_further = None
    if FURTHER:
        q_further = load_rows(query + row * query_token + DIM, heads * query_head, group < GROUP, FURTHER, FURTHER_PAD)
    table += row * table_row
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    if sinks is not None:  # noqa: SIM102  `and` takes no tensors; a sink is a key with a given logit and a value of zero
        if alone:
            highest = tl.load(sinks + heads, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    mixed = tl.zeros((GROUP_PAD, V_DIM_PAD), tl.float32)
    highest, total, mixed = _attend(
        highest, total, mixed, q, q_further, key, value, key_scales, value_scales, table, kv_head,
        first, last, key_block, key_token, key_head, value_block, value_token, value_head,
        key_scales_block, key_scales_token, key_scales_head, value_scales_block, value_scales_token, value_scales_head,
        inner, outer, DIM, DIM_PAD, FURTHER, FURTHER_PAD, V_DIM, V_DIM_PAD, BLOCK_SIZE, KEYS, SOFTCAP,
    )  # fmt: skip
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    places = row * (tl.num_programs(0) // PROGRAMS * GROUP) + heads
    v_dims = tl.arange(0, V_DIM_PAD)
    o_mask = (group < GROUP)[:, None] & (v_dims < V_DIM)[None, :]
    if sums is not None:  # noqa: SIM102  without it the rest must not be compiled, and `alone` is known to a program only
        if not alone:
            places = places * num_splits + tl.program_id(2)
            tl.store(sums + places, highest + tl.log2(total), mask=group < GROUP)
            tl.store(partials + places[:, None] * V_DIM + v_dims[None, :], mixed, mask=o_mask)
            return
    tl.store(out + places[:, None] * V_DIM + v_dims[None, :], mixed.to(out.dtype.element_ty), mask=o_mask)


@triton.jit
def _attend(
    highest: tl.tensor, total: tl.tensor, mixed: tl.tensor,  # so far
    q: tl.tensor, q_further: tl.tensor, key: tl.tensor, value: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, table: tl.tensor, kv_head: tl.tensor, first: tl.tensor, last: tl.tensor,
    key_block: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor, key_scales_head: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor, value_scales_head: tl.tensor,
    inner: tl.tensor, outer: tl.tensor,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, FURTHER: tl.constexpr, FURTHER_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend to the keys from `first` to `last`."""
    key += kv_head * key_head
    if value is not None:
        value += kv_head * value_head
    if key_scales is not None:
        key_scales += kv_head * key_scales_head
    if value_scales is not None:
        value_scales += kv_head * value_scales_head
    # Block ids are loaded one iteration ahead. The compiler pipelines K and V loads fully only if their addresses do not
    # depend on a load of the same iteration.
    at = first + tl.arange(0, KEYS)
    next_blocks = tl.load(table + at // BLOCK_SIZE, mask=at < last, other=0)
    for start in range(first, last, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = at < last
        blocks = next_blocks  # int64, as are all pointer offsets
        next_blocks = tl.load(table + (at + KEYS) // BLOCK_SIZE, mask=at + KEYS < last, other=0)
        slots = at % BLOCK_SIZE
        scales = None
        if key_scales is not None:
            scales = load_scales(key_scales, blocks * key_scales_block + slots * key_scales_token, seen)
        places = blocks * key_block + slots * key_token
        scores, v = key_scores(q, q_further, key, places, seen, scales, DIM, DIM_PAD, FURTHER, FURTHER_PAD)
        scores = tl.where(seen[None, :], logits(scores, inner, outer, SOFTCAP), float("-inf"))
        if value is not None:
            v = load_rows(value, blocks * value_block + slots * value_token, seen, V_DIM, V_DIM_PAD)
        if value_scales is not None:
            scales = load_scales(value_scales, blocks * value_scales_block + slots * value_scales_token, seen)
        highest, total, mixed = _add_tile(highest, total, mixed, scores, v, scales, q.dtype)
    return highest, total, mixed


@triton.jit(do_not_specialize=["num_splits", "least_tiles", "reach"])
def _merge(
    out: tl.tensor, partials: tl.tensor, sums: tl.tensor, lens: tl.tensor, sinks: tl.tensor,
    num_splits: tl.tensor, least_tiles: tl.tensor, reach: tl.tensor,
    V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one head of one row of several splits, or of none. Reads only the splits that were written."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_keys = tl.minimum(tl.load(lens + row), reach)
    used = tl.cdiv(num_keys, _keys_per_split(num_keys, num_splits, least_tiles, KEYS))
    if used == 1:
        return
    place = row * tl.num_programs(0) + head
    dims = tl.arange(0, V_DIM_PAD)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros((V_DIM_PAD,), tl.float32)
    for start in range(0, used, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        written = splits < used
        at = place * num_splits + splits
        logs = tl.load(sums + at, mask=written, other=float("-inf"))
        parts = tl.load(
            partials + at[:, None] * V_DIM + dims[None, :], mask=written[:, None] & (dims < V_DIM)[None, :], other=0.0
        )
        new = tl.maximum(highest, tl.max(logs, 0))
        weights = tl.exp2(logs - new)
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(parts * weights[:, None], 0)
        highest = new
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + place * V_DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < V_DIM)
