"""Writes a packed batch's K and V into the blocks of a strided arena, in one launch."""

from __future__ import annotations

from .context import AttentionCall
from .triton_base import on_device, padded, tl, triton

TILE_ITEMS = 4096  # elements of K per program, and as many of V


def write(call: AttentionCall) -> None:
    """See `AttentionKernel.write`. Tokens for block 0 are padding and are not written."""
    key, value, cache, step = call.key, call.value, call.cache, call.step
    num_tokens, num_heads, dim = key.shape
    v_dim = value.shape[-1]
    if not num_tokens:
        return
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    dim_pad, v_dim_pad = padded(dim), padded(v_dim)
    heads = max(1, min(triton.next_power_of_2(num_heads), TILE_ITEMS // max(dim_pad, v_dim_pad)))
    with on_device(key):
        _write[(num_tokens, triton.cdiv(num_heads, heads))](
            key, value, cache.key, cache.value, step.write_blocks[cache.group], step.write_offsets,
            *key.stride()[:2], *value.stride()[:2], *cache.key.stride()[:3], *cache.value.stride()[:3],
            num_heads, HEADS=heads, DIM=dim, DIM_PAD=dim_pad, V_DIM=v_dim, V_DIM_PAD=v_dim_pad,
        )  # fmt: skip


@triton.jit
def _write(
    key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, blocks: tl.tensor, offsets: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,  # strides, by name
    key_cache_block: tl.tensor, key_cache_token: tl.tensor, key_cache_head: tl.tensor,
    value_cache_block: tl.tensor, value_cache_token: tl.tensor, value_cache_head: tl.tensor,
    num_heads: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """One program: HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + token)
    offset = tl.load(offsets + token)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    real = (heads < num_heads) & (block != 0)
    dims = tl.arange(0, DIM_PAD)
    mask = real[:, None] & (dims < DIM)[None, :]
    source = key + token * key_token + heads[:, None] * key_head + dims[None, :]
    target = key_cache + block * key_cache_block + offset * key_cache_token
    tl.store(target + heads[:, None] * key_cache_head + dims[None, :], tl.load(source, mask=mask), mask=mask)
    dims = tl.arange(0, V_DIM_PAD)
    mask = real[:, None] & (dims < V_DIM)[None, :]
    source = value + token * value_token + heads[:, None] * value_head + dims[None, :]
    target = value_cache + block * value_cache_block + offset * value_cache_token
    tl.store(target + heads[:, None] * value_cache_head + dims[None, :], tl.load(source, mask=mask), mask=mask)
