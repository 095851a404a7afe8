"""Writes a packed batch's K and V into the blocks of a strided arena, in one launch.

Elements of one byte are quantized symmetrically for each token and head: the scale is the largest magnitude over 127, or over
448 for float8_e4m3fn. Elements are divided by the scale as stored, in float16, so that its rounding adds no error.
"""

from __future__ import annotations

from .context import AttentionCall
from .triton_base import on_device, padded, tl, triton, views_and_strides

TILE_ITEMS = 4096  # elements of K per program, and as many of V
MAX_FLOAT16 = tl.constexpr(65504.0)
# Added and subtracted, it leaves float32 of up to 2 ** 22 rounded to even
ROUNDING = tl.constexpr(1.5 * 2**23)


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
    views, strides = views_and_strides(cache, reads=False)
    heads = max(1, min(triton.next_power_of_2(num_heads), TILE_ITEMS // max(dim_pad, v_dim_pad)))
    with on_device(key):
        _write[(num_tokens, triton.cdiv(num_heads, heads))](
            key, value, *views, step.write_blocks[cache.table], step.write_offsets,
            *key.stride()[:2], *value.stride()[:2], *strides, num_heads,
            HEADS=heads, DIM=dim, DIM_PAD=dim_pad, V_DIM=v_dim, V_DIM_PAD=v_dim_pad,
        )  # fmt: skip


@triton.jit
def _write(
    key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, blocks: tl.tensor, offsets: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,  # strides, by name
    key_cache_block: tl.tensor, key_cache_token: tl.tensor, key_cache_head: tl.tensor,
    value_cache_block: tl.tensor, value_cache_token: tl.tensor, value_cache_head: tl.tensor,
    key_scales_block: tl.tensor, key_scales_token: tl.tensor, key_scales_head: tl.tensor,
    value_scales_block: tl.tensor, value_scales_token: tl.tensor, value_scales_head: tl.tensor,
    num_heads: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """One program: HEADS heads of one token. `value_cache` None: V is a part of K."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + token)
    offset = tl.load(offsets + token)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    real = (heads < num_heads) & (block != 0)
    if key_scales is not None:
        key_scales += block * key_scales_block + offset * key_scales_token
    _store(
        key + token * key_token, key_head, key_cache, block, offset, key_cache_block, key_cache_token, key_cache_head,
        key_scales, key_scales_head, heads, real, DIM, DIM_PAD,
    )  # fmt: skip
    if value_cache is not None:
        if value_scales is not None:
            value_scales += block * value_scales_block + offset * value_scales_token
        _store(
            value + token * value_token, value_head, value_cache, block, offset, value_cache_block, value_cache_token,
            value_cache_head, value_scales, value_scales_head, heads, real, V_DIM, V_DIM_PAD,
        )  # fmt: skip


@triton.jit
def _store(
    source: tl.tensor, source_head: tl.tensor, target: tl.tensor, block: tl.tensor, offset: tl.tensor,
    target_block: tl.tensor, target_token: tl.tensor, target_head: tl.tensor,
    scales: tl.tensor, scales_head: tl.tensor, heads: tl.tensor, real: tl.tensor, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Write the `real` heads of one token, with scales that begin at `scales`."""
    dims = tl.arange(0, DIM_PAD)
    mask = real[:, None] & (dims < DIM)[None, :]
    source = source + heads[:, None] * source_head + dims[None, :]
    target = target + block * target_block + offset * target_token
    target = target + heads[:, None] * target_head + dims[None, :]
    if scales is None:
        tl.store(target, tl.load(source, mask=mask), mask=mask)
    else:
        rows = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        elements, row_scales = _quantized(rows, target.dtype.scalar.element_ty)
        tl.store(target, elements, mask=mask)
        tl.store(scales + heads * scales_head, row_scales, mask=real)


@triton.jit
def _quantized(rows: tl.tensor, TYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Elements of one byte, and each row's scale in float16. A scale that rounds to zero makes its row zeros."""
    most: tl.constexpr = 127.0 if TYPE == tl.int8 else 448.0
    highest = tl.max(tl.abs(rows), 1)
    scales = tl.minimum(tl.div_rn(highest, tl.full(highest.shape, most, tl.float32)), MAX_FLOAT16).to(tl.float16)
    divisors = tl.where(scales > 0, scales.to(tl.float32), 1.0)
    quotients = tl.div_rn(rows, tl.broadcast_to(divisors[:, None], rows.shape))
    quotients = tl.maximum(tl.minimum(quotients, most), -most)
    if TYPE == tl.int8:
        quotients = (quotients + ROUNDING) - ROUNDING
    return quotients.to(TYPE), scales
