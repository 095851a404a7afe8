"""Steps over a cache of int8 with scales: a case of `triton_checks` in memory once more, and the format in torch's terms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton_checks import Built

from pagetide.engine.attention.context import LayerCache

POISON = 0x7F  # bytes that no token owns: elements 127, scales NaN
LARGEST_SCALE = 65504.0


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [..., dim], float16 scales [...]) of `x` [..., dim]: what a cache holds of it."""
    scales = (x.float().abs().amax(-1) / 127).clamp(max=LARGEST_SCALE).half()
    divisors = scales.float()[..., None]
    values = (x.float() / divisors).clamp(-127, 127).round()
    return torch.where(divisors > 0, values, 0.0).to(torch.int8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales.float()[..., None]


def stored(x: torch.Tensor) -> torch.Tensor:
    """`x` as it is read back, float32."""
    return dequantize(*quantize(x))


@dataclass(frozen=True, eq=False)
class Scaled:
    """A case over int8."""

    built: Built  # its keys and values are what is read back
    memory: torch.Tensor  # uint8 [num_blocks, bytes], of which elements and scales have a part


def scaled_cache(memory: torch.Tensor, cache: LayerCache, v_in_k: bool) -> LayerCache:
    """Views of `memory`, uint8 [num_blocks, bytes], with the shapes of `cache`: 16 bytes, K, V, scales of K, scales of V."""
    at, views = 16, []
    for view in (cache.key, cache.value):
        _, size, heads, dim = view.shape
        strides = (memory.stride(0), heads * dim, dim, 1)
        views.append(memory.view(torch.int8).as_strided((len(memory), size, heads, dim), strides, at))
        at += size * heads * dim
    at += at % 2
    for _ in range(2):
        strides = (memory.stride(0) // 2, heads, 1)
        views.append(memory.view(torch.float16).as_strided((len(memory), size, heads), strides, at // 2))
        at += size * heads * 2
    key, value, key_scale, value_scale = views
    if v_in_k:
        value, value_scale = key[..., : value.shape[-1]], key_scale
    return LayerCache(key, value, cache.table, cache.aliased, v_in_k, None, key_scale, value_scale)


def block_bytes(cache: LayerCache) -> int:
    """What a block of `scaled_cache` has, with something behind it."""
    _, size, heads, dim = cache.key.shape
    return (16 + size * heads * (dim + cache.value.shape[-1] + 4) + 48) // 4 * 4


def scaled(built: Built, *, v_in_k: bool = False, memory: torch.Tensor | None = None) -> Scaled:
    """`built` with a cache of int8 instead. What no token owns has scales that are NaN, in `memory` too if it is given."""
    old = built.call.cache
    if memory is None:
        memory = torch.empty(len(built.arena), block_bytes(old), dtype=torch.uint8)
    memory[: len(built.arena), : block_bytes(old)] = POISON
    cache = scaled_cache(memory, old, v_in_k)
    for view, (to, scales) in (
        (old.key, (cache.key, cache.key_scale)),
        (old.value, (cache.value, cache.value_scale)),
    ):
        if v_in_k and view is old.value:
            continue
        places = ~view.isnan().any(-1)
        values, of_rows = quantize(view.nan_to_num())
        to[: len(view)][places], scales[: len(view)][places] = values[places], of_rows[places]
    keys = [stored(k) for k in built.keys]
    values = [k[..., : built.case.dims[1]] if v_in_k else stored(v) for k, v in zip(keys, built.values, strict=True)]
    return Scaled(replace(built, call=replace(built.call, cache=cache), keys=keys, values=values), memory)


def check_scaled_write(kernel, scaled: Scaled) -> None:
    """The batch's own K and V arrive as `quantize` has them; not a bit of anything else changes."""
    call, step, cache = scaled.built.call, scaled.built.call.step, scaled.built.call.cache
    expected = scaled.memory.clone()
    other = scaled_cache(expected, cache, cache.v_in_k)
    real = step.write_blocks[1] != 0
    places = step.write_blocks[1][real], step.write_offsets[real]
    for rows, to, scales in (
        (call.key, other.key, other.key_scale),
        (call.value, other.value, other.value_scale),
    ):
        if cache.v_in_k and rows is call.value:
            continue
        values, of_rows = quantize(rows[real])
        to.index_put_(places, values)
        scales.index_put_(places, of_rows)
    kernel.write(call)
    assert torch.equal(scaled.memory, expected)
