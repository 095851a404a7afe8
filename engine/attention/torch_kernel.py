"""Paged attention in plain torch, for any device: the reference for the other kernels, and the fallback.

Decodes are gathered one tile of rows at a time into buffers that stay in the processor's cache. Rows are sorted by length; a
tile takes as many as fit its bytes with little padding. In a tile of several rows, slots that a row may not see are
zeroed, because a mask over NaN still gives NaN.

Prefill goes sequence by sequence, in query tiles if a mask is needed. Queries that share a KV head are placed on the query
length (decode) or on a dimension of stride 0 in K and V (prefill), so K and V are never repeated. An attention sink is one more
key, of zeros, with the sink's logit as its mask entry. Where V is the first part of K, K is gathered once and multiplied whole,
so that both are equally wide; outputs are cut to V's width.

Quantized K and V are dequantized as they are gathered, into the query's type. Attention then reads what is stored of a chunk's
own tokens too, so that results do not depend on how a prompt is cut into chunks.

In half precision on a CPU, torch compiles and keeps a kernel for each number of queries and of keys: 50 MiB over a thousand
random chunks. There both are padded to multiples, with positions that no query sees.

The first layer of each shape makes a step's tiles, gather indices and masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .context import AttentionCall, LayerCache, StepContext
from .quantized_kv import gather, store

MAX_PADDING = 1.3  # slots of a decode tile, relative to visible slots
FREE_PADDING = 128  # slots of padding that cost less than another tile
CPU_TILE_BYTES = 2 << 20  # K and V of a decode tile, per thread: fits a core's own cache
DEVICE_TILE_BYTES = 128 << 20
QUERY_TILE = 512  # queries of a masked prefill tile; keys after its last query are not read
SCORE_BYTES = 32 << 20  # per tensor of scores or of masks; an explicit softmax holds two
KEY_STEP, QUERY_STEP = 64, 32  # multiples for keys and queries, in half precision on a CPU
KEPT_MASK_BYTES = 32 << 20  # prefill masks shared by the layers of a step

Ints = npt.NDArray[np.int64]


class _Shape(NamedTuple):
    """What a step's tiles depend on besides the step: a layer's shape and kind of attention."""

    table: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    window: int | None
    softcap: bool
    # As one more key; with a softcap they are part of the explicit scores instead
    sinks: bool
    stepped: bool = False  # key and query counts are multiples of KEY_STEP and QUERY_STEP
    v_in_k: bool = False

    @classmethod
    def of(cls, call: AttentionCall) -> _Shape:
        """The shape of a layer's calls."""
        (_, num_heads, head_dim), (_, num_kv_heads, v_head_dim) = call.query.shape, call.value.shape
        dtype, softcap = call.query.dtype, call.softcap is not None
        sinks = call.sinks is not None and not softcap
        stepped = not softcap and dtype.itemsize < 4 and call.query.device.type == "cpu"
        table, window = call.cache.table, call.window
        v_in_k = call.cache.v_in_k
        return cls(table, num_heads, num_kv_heads, head_dim, v_head_dim, dtype, window, softcap, sinks, stepped, v_in_k)

    @property
    def gathered_dim(self) -> int:
        """Elements that are gathered for a token and KV head."""
        return self.head_dim if self.v_in_k else self.head_dim + self.v_head_dim

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def filled_keys(self, count: int) -> int:
        """`count` keys, including the sink's, after padding."""
        return -(-count // KEY_STEP) * KEY_STEP if self.stepped else count

    def filled_queries(self, count: int) -> int:
        """`count` queries of a chunk after padding. A single query is not padded."""
        return -(-count // QUERY_STEP) * QUERY_STEP if self.stepped and count > 1 else count


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Some decode rows that are gathered and attended together. The views are of the kernel's buffers."""

    rows: slice  # of the step's decodes, sorted
    blocks: torch.Tensor  # int64 [rows * blocks a row]
    key_blocks: torch.Tensor  # [rows * blocks a row, block_size, num_kv_heads, head_dim], gather target
    value_blocks: torch.Tensor
    key: torch.Tensor  # [rows, num_kv_heads, span, head_dim], the same memory, visible part
    value: torch.Tensor  # with `v_in_k` the key
    stale: torch.Tensor | None  # int64, gathered slots that their row does not see: to be zeroed
    mask: torch.Tensor | None  # 0 or -inf [rows, 1, 1, span]; with sinks [rows, num_kv_heads, group_size, span]


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """The tiles of all decodes of a step, for layers of one shape."""

    places: torch.Tensor  # int64 [num_decodes], batch tokens in tile order
    tiles: list[_Tile]


@dataclass(slots=True, eq=False)
class _TorchPlan:
    """Cached data of one step. Mutated by the kernel."""

    step: StepContext
    decodes: dict[_Shape, _Decodes] = field(default_factory=dict)
    masks: dict[tuple[int, int, int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    mask_bytes: int = 0


class TorchKernel:
    """An `AttentionKernel` that gathers blocks and calls torch's attention. Owns two buffers, which grow and never shrink.

    Args:
        tile_bytes: K and V gathered at once for decodes of more than one row. By default what fits the threads' caches (CPU) or
            128 MiB (other devices).
    """

    name = "torch"
    captures = False  # the host cuts tiles by row lengths

    def __init__(self, tile_bytes: int | None = None) -> None:
        self._tile_bytes = tile_bytes
        self._buffers: dict[str, torch.Tensor] = {}
        self._plan: _TorchPlan | None = None

    @property
    def buffer_bytes(self) -> int:
        """Current bytes of the gather buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def release_buffers(self) -> None:
        """Drop the buffers and the last step's data."""
        self._buffers.clear()
        self._plan = None

    def write(self, call: AttentionCall) -> None:
        """See `AttentionKernel.write`."""
        cache, step = call.cache, call.step
        places = (step.write_blocks[cache.table], step.write_offsets)
        store(call.key, cache.key, cache.key_scale, places)
        if not cache.v_in_k:
            store(call.value, cache.value, cache.value_scale, places)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        query, step = call.query, call.step
        if self._plan is None or self._plan.step is not step:
            self._plan = _TorchPlan(step)
        shape = _Shape.of(call)
        num_tokens = query.shape[0]
        full = int(step.q_lens.sum()) == num_tokens  # else padding gets zeros
        out = (query.new_empty if full else query.new_zeros)(num_tokens, shape.num_heads, shape.v_head_dim)
        if step.num_decodes:
            self._attend_decodes(call, self._plan, shape, out)
        for chunk in range(step.num_decodes, len(step.q_lens)):
            tokens = slice(int(step.q_starts[chunk]), int(step.q_starts[chunk] + step.q_lens[chunk]))
            out[tokens] = self._attend_chunk(call, chunk, tokens, self._plan, shape)
        return out

    def _attend_decodes(self, call: AttentionCall, plan: _TorchPlan, shape: _Shape, out: torch.Tensor) -> None:
        """Fill the decodes' places in `out` [T, num_heads, v_head_dim]."""
        cache = call.cache
        decodes = plan.decodes.get(shape)
        if decodes is None:
            decodes = plan.decodes[shape] = self._plan_decodes(plan.step, shape, call.query.device)
        sinks = _grouped_sinks(call, shape)
        packed = call.query.index_select(0, decodes.places)
        packed = packed.view(-1, shape.num_kv_heads, shape.group_size, shape.head_dim)
        outs = []
        for tile in decodes.tiles:
            gather(cache.key, cache.key_scale, tile.blocks, tile.key_blocks)
            if tile.stale is not None:
                tile.key_blocks.flatten(0, 1).index_fill_(0, tile.stale, 0)
            if not shape.v_in_k:
                gather(cache.value, cache.value_scale, tile.blocks, tile.value_blocks)
                if tile.stale is not None:
                    tile.value_blocks.flatten(0, 1).index_fill_(0, tile.stale, 0)
            q = packed[tile.rows]  # [rows, Hk, G, D]
            if call.softcap is not None:  # tiles of one row
                outs.append(_explicit(q[0].unsqueeze(2), tile.key[0], tile.value[0], None, call).permute(2, 0, 1, 3))
                continue
            if sinks is not None:
                assert tile.mask is not None
                tile.mask[..., -1] = sinks
            outs.append(_fused(q, tile.key, tile.value, tile.mask, call.scaling))
        merged = torch.cat([o.reshape(-1, shape.num_heads, o.shape[-1])[..., : shape.v_head_dim] for o in outs])
        out.index_copy_(0, decodes.places, merged)

    def _plan_decodes(self, step: StepContext, shape: _Shape, device: torch.device) -> _Decodes:
        """Sort the decode rows by visible length, and cut them into tiles."""
        n, block_size = step.num_decodes, step.block_size
        ends = step.kv_lens[:n].astype(np.int64)
        starts = np.zeros_like(ends) if shape.window is None else np.maximum(ends - shape.window, 0)
        first_blocks = starts // block_size  # blocks before a window are not gathered
        starts -= first_blocks * block_size
        stops = ends - first_blocks * block_size  # a row sees slots starts .. stops of its gathered blocks
        order = np.argsort(-stops, kind="stable")
        starts, stops, first_blocks = starts[order], stops[order], first_blocks[order]
        extents = stops + shape.sinks  # a sink takes the last slot
        if shape.stepped:
            extents += -extents % KEY_STEP
        blocks = _gathered_blocks(step, shape, order, first_blocks, -(-int(extents[0]) // block_size), device)
        bounds = self._cut(extents, shape, block_size, device)
        buffers = self._decode_buffers(bounds, extents, shape, block_size, device)
        tiles = []
        for low, high in bounds:
            per_row = -(-int(extents[low]) // block_size)
            rows = slice(low, high)
            row_blocks = blocks[rows, :per_row]
            tiles.append(_make_tile(rows, starts[rows], stops[rows], row_blocks, shape, block_size, *buffers))
        return _Decodes(torch.from_numpy(step.q_starts[:n][order].astype(np.int64)).to(device), tiles)

    def _cut(self, extents: Ints, shape: _Shape, block_size: int, device: torch.device) -> list[tuple[int, int]]:
        """Rows of descending extent as tiles `low .. high`, within a tile's bytes and with little padding."""
        limit = self._tile_bytes
        if limit is None:
            limit = CPU_TILE_BYTES * torch.get_num_threads() if device.type == "cpu" else DEVICE_TILE_BYTES
        token_bytes = shape.num_kv_heads * shape.gathered_dim * shape.dtype.itemsize
        lengths: list[int] = extents.tolist()
        bounds, low, seen = [], 0, lengths[0]
        for row in range(1, len(lengths)):
            padded = (row + 1 - low) * lengths[low]
            seen += lengths[row]
            wasteful = padded > seen * MAX_PADDING + FREE_PADDING
            if shape.softcap or wasteful or (padded + block_size) * token_bytes > limit:
                bounds.append((low, row))
                low, seen = row, lengths[row]
        return [*bounds, (low, len(lengths))]

    def _decode_buffers(
        self, bounds: list[tuple[int, int]], extents: Ints, shape: _Shape, block_size: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V buffers for the largest tile."""
        slots = max((high - low) * -(-int(extents[low]) // block_size) * block_size for low, high in bounds)
        return self._take_both(slots, shape, device)

    def _attend_chunk(
        self, call: AttentionCall, chunk: int, tokens: slice, plan: _TorchPlan, shape: _Shape
    ) -> torch.Tensor:  # [n, num_heads, v_head_dim]
        """Attend for one chunk of several tokens of one sequence. `tokens` are its n tokens in the batch."""
        query = call.query[tokens]
        n, end, window = len(query), int(plan.step.kv_lens[chunk]), shape.window
        start = end - n
        if start == 0 and not call.cache.aliased and call.cache.key_scale is None:
            base, key, value = 0, call.key[tokens], (call.key if shape.v_in_k else call.value)[tokens]
        else:
            base, key, value = self._gather_chunk(chunk, start, end, call.cache, plan.step, shape)
        q = query.view(n, shape.num_kv_heads, shape.group_size, -1).permute(1, 2, 0, 3)  # [Hk, G, n, D]
        explicit = shape.softcap or shape.sinks
        if start == 0 and not explicit and (window is None or n <= window):
            filled = _grouped(*_with_keys(shape.filled_keys(n), key, value), shape)
            out = _fused(_with_queries(shape.filled_queries(n), q), *filled, None, call.scaling, is_causal=True)
            return out[:, :, :n, : shape.v_head_dim].permute(2, 0, 1, 3).reshape(n, shape.num_heads, -1)
        if shape.softcap:
            key, value = key.float(), value.float()
        sinks = _grouped_sinks(call, shape)
        out = query.new_empty(n, shape.num_heads, shape.v_head_dim)
        for low, high in _query_tiles(n, end - base, shape):
            first = max(base, start + low - window + 1) if window is not None else base
            keys = slice(first - base, start + high - base)
            mask = _mask(plan, start + low - first, high - low, start + high - first, shape, query.device)
            k, v, tile = key[keys], value[keys], q[:, :, low:high]
            if call.softcap is not None:
                got = _explicit(tile, k.transpose(0, 1), v.transpose(0, 1), mask, call)
            else:
                tile = _with_queries(shape.filled_queries(high - low), tile)
                k, v = _with_keys(shape.filled_keys(len(k) + shape.sinks), k, v)
                if sinks is not None:
                    mask = _with_sinks(mask, sinks, tile.shape[2], len(k))
                got = _fused(tile, *_grouped(k, v, shape), mask, call.scaling)
            out[low:high] = got[:, :, : high - low, : shape.v_head_dim].permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def _gather_chunk(
        self, chunk: int, start: int, end: int, cache: LayerCache, step: StepContext, shape: _Shape
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """`base`, and K and V [tokens, num_kv_heads, dim] of positions `base` .. `end` of a sequence."""
        size = step.block_size
        first = 0 if shape.window is None else max(0, start - shape.window + 1) // size
        blocks = step.tables[cache.table][chunk, first : -(-end // size)]
        buffers = self._take_both(len(blocks) * size, shape, blocks.device)
        views = []
        stored = ((cache.key, cache.key_scale), (cache.value, cache.value_scale))
        for (source, scales), buffer in zip(stored[:1] if shape.v_in_k else stored, buffers, strict=False):
            view = buffer.view(len(blocks), *source.shape[1:])
            gather(source, scales, blocks, view)
            views.append(view.flatten(0, 1)[: end - first * size])
        return first * size, views[0], views[-1]

    def _take_both(self, slots: int, shape: _Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and the V buffer, cut to `slots` tokens, flat. With `v_in_k` both are one."""
        key = self._take("key", slots * shape.num_kv_heads * shape.head_dim, shape.dtype, device)
        if shape.v_in_k:
            return key, key
        return key, self._take("value", slots * shape.num_kv_heads * shape.v_head_dim, shape.dtype, device)

    def _take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first `numel` elements of buffer `name`, which grows as needed."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.device != device or buffer.numel() < numel:
            self._buffers.pop(name, None)  # free it first, so that two are never held at once
            del buffer
            with torch.inference_mode(False):  # such tensors can be written in either mode
                buffer = self._buffers[name] = torch.empty(numel + numel // 4, dtype=dtype, device=device)
        return buffer[:numel]


def _gathered_blocks(
    step: StepContext, shape: _Shape, order: Ints, first_blocks: Ints, width: int, device: torch.device
) -> torch.Tensor:
    """int64 [num_decodes, width]: the blocks to gather for the rows, in the given order, padded with block 0."""
    tables = step.tables[shape.table].index_select(0, torch.from_numpy(order).to(device))
    if not first_blocks.any():
        return F.pad(tables, (0, max(0, width - tables.shape[1])))
    columns = torch.from_numpy(first_blocks[:, None] + np.arange(width)).to(device)
    known = columns < tables.shape[1]
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1)) * known


def _make_tile(
    rows: slice,
    starts: Ints,
    stops: Ints,
    blocks: torch.Tensor,  # [rows, blocks a row]
    shape: _Shape,
    block_size: int,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> _Tile:
    num_rows, per_row = blocks.shape
    low = int(starts.min())
    if shape.stepped:
        low -= low % KEY_STEP
    high = shape.filled_keys(int(stops.max()) + shape.sinks)
    gathered, cut = [], []
    for buffer, dim in ((key_buffer, shape.head_dim), (value_buffer, shape.head_dim if shape.v_in_k else shape.v_head_dim)):
        flat = buffer[: num_rows * per_row * block_size * shape.num_kv_heads * dim]
        gathered.append(flat.view(num_rows * per_row, block_size, shape.num_kv_heads, dim))
        by_row = flat.view(num_rows, per_row * block_size, shape.num_kv_heads, dim)
        cut.append(by_row[:, low:high].transpose(1, 2))
    slots = np.arange(low, high)
    unseen = (slots < starts[:, None]) | (slots >= stops[:, None])  # [rows, span]
    stale = mask = None
    if unseen.any():
        row, slot = np.nonzero(unseen)
        stale = torch.from_numpy(row * (per_row * block_size) + slot + low).to(blocks.device)
        lows = torch.zeros(unseen.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(unseen), float("-inf"))
        mask = lows.to(blocks.device)[:, None, None]
        if shape.sinks:
            mask = mask.repeat(1, shape.num_kv_heads, shape.group_size, 1)
    return _Tile(rows, blocks.reshape(-1), gathered[0], gathered[1], cut[0], cut[1], stale, mask)


def _query_tiles(n: int, num_keys: int, shape: _Shape) -> list[tuple[int, int]]:
    """A chunk's queries as tiles `low .. high`, so that masks and scores stay within SCORE_BYTES."""
    most = QUERY_TILE
    if shape.window is not None:
        most = min(most, max(shape.window, 64))
        num_keys = min(num_keys, shape.window + most)
    heads = shape.num_heads if shape.softcap or shape.sinks else 1
    size = max(1, min(most, SCORE_BYTES // (4 * heads * (num_keys + 1))))
    return [(low, min(low + size, n)) for low in range(0, n, size)]


def _mask(
    plan: _TorchPlan, offset: int, num_queries: int, num_keys: int, shape: _Shape, device: torch.device
) -> torch.Tensor | None:
    """0 or -inf [queries, keys], both padded, where query i is at key `offset + i`. Excludes a sink.

    None if nothing is masked.
    """
    keys = shape.filled_keys(num_keys + shape.sinks) - shape.sinks
    if num_queries == 1 and keys == num_keys:
        return None
    dtype = torch.float32 if shape.softcap else shape.dtype
    name = (offset, num_queries, num_keys, shape.window, dtype)
    mask = plan.masks.get(name)
    if mask is None:
        query = torch.arange(offset, offset + shape.filled_queries(num_queries), device=device)[:, None]
        query = query.clamp(max=num_keys - 1)  # padding sees what the last query sees
        key = torch.arange(keys, device=device)
        hidden = key > query if shape.window is None else (key > query) | (key <= query - shape.window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        if plan.mask_bytes + mask.nbytes <= KEPT_MASK_BYTES:
            plan.masks[name] = mask
            plan.mask_bytes += mask.nbytes
    return mask


def _with_keys(count: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [span, Hk, dim], zero-padded to `count` keys."""
    more = count - len(key)
    return (F.pad(key, (0, 0, 0, 0, 0, more)), F.pad(value, (0, 0, 0, 0, 0, more))) if more else (key, value)


def _with_queries(count: int, query: torch.Tensor) -> torch.Tensor:
    """`query` [Hk, G, n, dim], zero-padded to `count` queries."""
    return F.pad(query, (0, 0, 0, count - query.shape[2])) if count > query.shape[2] else query


def _grouped_sinks(call: AttentionCall, shape: _Shape) -> torch.Tensor | None:
    """The call's sinks, [num_kv_heads, group_size]."""
    return None if call.sinks is None else call.sinks.view(shape.num_kv_heads, shape.group_size)


def _with_sinks(mask: torch.Tensor | None, sinks: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """A mask [num_queries, num_keys - 1] expanded per head, with the sinks' logits in the last key's column."""
    if mask is None:
        wide = sinks.new_zeros(*sinks.shape, num_queries, num_keys)
    else:
        wide = F.pad(mask, (0, 1)).repeat(*sinks.shape, 1, 1)
    wide[..., -1] = sinks[..., None]
    return wide


def _grouped(key: torch.Tensor, value: torch.Tensor, shape: _Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [span, Hk, dim] as [Hk, G, span, dim], with stride 0 over the group."""
    size = (-1, shape.group_size, -1, -1)
    return key.transpose(0, 1)[:, None].expand(size), value.transpose(0, 1)[:, None].expand(size)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """Torch's attention over [B, H, tokens, dim]. Its fast kernels need equal K and V widths: the narrower is padded.

    `mask` broadcasts to [B, H, queries, keys].
    """
    dim, v_dim = query.shape[-1], value.shape[-1]
    if dim < v_dim:
        query, key = F.pad(query, (0, v_dim - dim)), F.pad(key, (0, v_dim - dim))
    elif v_dim < dim:
        value = F.pad(value, (0, dim - v_dim))
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scaling)
    return out[..., :v_dim]


def _explicit(
    query: torch.Tensor,  # [Hk, G, n, D]
    key: torch.Tensor,  # [Hk, span, D]
    value: torch.Tensor,  # [Hk, span, Dv]
    mask: torch.Tensor | None,  # [n, span]
    call: AttentionCall,  # its parameters of scores
) -> torch.Tensor:  # [Hk, G, n, Dv]
    """Attention with explicit scores in float32, because a softcap applies to scores before the mask."""
    assert call.softcap is not None
    num_kv_heads, group_size, n, _ = query.shape
    q = (query.float() * call.scaling).flatten(1, 2)  # [Hk, G * n, D]
    logits = torch.bmm(q, key.float().transpose(1, 2)).div_(call.softcap).tanh_().mul_(call.softcap)
    logits = logits.view(num_kv_heads, group_size, n, -1)
    if mask is not None:
        logits += mask
    if call.sinks is not None:
        sinks = call.sinks.view(num_kv_heads, group_size, 1, 1).float().expand(-1, -1, n, 1)
        weights = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    out = torch.bmm(weights.flatten(1, 2), value.float())
    return out.view(num_kv_heads, group_size, n, -1).to(query.dtype)
