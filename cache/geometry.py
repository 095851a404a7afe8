"""Sizes of a model's KV cache: conversions between model shape, bytes, blocks and extents.

A block holds `block_size` tokens of K and V of all layers, contiguously. If some layers read only a part of a sequence
(layer_groups.py), it holds those of the layers of one table, and all tables' blocks have one stride. With equal layers it is

    [num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]

    | layer 0: K | layer 0: V | layer 1: K | layer 1: V | ... | padding |
    |<- 16 x 8 x 128 ->|                                      |
    |<------------------- payload_bytes --------------------->|
    |<------------------------- block_stride ------------------------->|

With unequal layers it is the concatenation of each layer's K piece and V piece: `[block_size, num_kv_heads, k_dim]` and
`[block_size, num_kv_heads, v_dim]`. A layer that reads another's K and V (`shares`) has no pieces; one whose V is a part of
its K (`v_in_k`) has only a K piece. Elements of one byte (`SCALED`) come with a float16 scale for each token and head; the
scales of all layers lie behind the pieces: `[block_size, num_kv_heads]` of each layer's K, then of its V.

Recurrent and convolution layers have states instead, of a fixed size for each sequence. All states of a sequence lie in
`state_blocks` blocks of the same pool: each state is cut along its first dimension into parts that fit into a block, and the
parts fill the blocks, the largest first (docs/decisions/0060-states.md).

Pieces begin at multiples of 64 bytes: a cache line, and the alignment of vector loads. The end of a block is padded so
that `blocks_per_extent` strides are a whole number of granules. An extent thus holds whole blocks, and block `i` lies
at byte `i * block_stride` of the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, Self

from .layer_groups import LayerGroup, blocks_to_hold, most_columns_in, split_into_tables, state_group

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED = ("int8", "float8_e4m3fn")  # element types that stand for themselves times a scale
SCALE_BYTES = 2  # a float16
ALIGNMENT = 64  # bytes; where a piece may begin
PAGE_BYTES = 4096
EXTENT_TARGET_BYTES = 32 << 20
MOST_WINDOW = 1 << 40  # tokens; more than any sequence has
MOST_LAYERS = 4096  # of a model; the deepest models have a few hundred
_MOST_SIZE = 1 << 20  # of heads, and of their elements


class GeometryError(ValueError):
    """The shape of a KV cache cannot be derived from a config, or is invalid."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a layer for one sequence: the last inputs of a convolution, or what a recurrence keeps.

    `kind` is "conv" or "recurrent"; `index` tells the layer's states of one kind apart.
    """

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of the first dimension."""
        return prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return self.shape[0] * self.item_bytes


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a layer's state lies in the blocks of all states of a sequence: its parts, equal cuts of its first dimension.

    Part i begins at byte `offsets[i]` of block `blocks[i]` of these.
    """

    layer: int
    state: StateShape
    blocks: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """What a layer hands to the cache in a forward pass: its states, and the shape of K and V for a token, if it attends."""

    states: tuple[StateShape, ...] = ()
    kv: tuple[int, int, int] | None = None  # num_kv_heads, k_dim, v_dim
    index_dim: int = 0  # elements of a key for each token by which the layer chooses those that it attends to


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's K and V for one token: `[num_kv_heads, k_dim]` and `[num_kv_heads, v_dim]`, and its states.

    `shares` is the layer from which this one reads K and V instead of having its own. 0 heads: a layer without attention.
    `v_in_k` says that V is the first `v_dim` elements of K, so that only K is stored. `window` and `chunked` are those of the
    layer's group, `table` the number of the block table with its blocks, among those of all groups. A layer that `chooses` the
    tokens that it attends to keeps a key for this in a layer behind all others, half of its elements as K and half as V.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    table: int = 0
    shares: int | None = None
    v_in_k: bool = False
    window: int | None = None
    chunked: bool = False
    states: tuple[StateShape, ...] = ()
    chooses: bool = False

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The dimensions of what is stored for each token and head: K and V, or K alone."""
        return (self.k_dim,) if self.v_in_k else (self.k_dim, self.v_dim)


@dataclass(frozen=True)  # no slots: the derived numbers are computed once and kept in the instance's dict
class Geometry:
    """Bytes and blocks of one KV pool. `block_size` is in tokens; names that end in `bytes` or `stride` are in bytes.

    `granule_bytes` is the least that the device maps, a power of two (4 KiB of host memory, 2 MiB of CUDA memory). An
    extent has at most `extent_target_bytes`, but holds at least one block. `shard` is (rank, ranks) of the KV heads. With
    `gathers`, K and V are gathered for attention of the model's own (docs/decisions/0061-attention-of-its-own.md).
    Block 0, the null block, is counted but never handed out. Raises GeometryError.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: str
    granule_bytes: int = PAGE_BYTES
    extent_target_bytes: int = EXTENT_TARGET_BYTES
    shard: tuple[int, int] = (0, 1)
    gathers: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise GeometryError(f"block_size must be at least 1 token, got {self.block_size}")
        if self.dtype not in ITEM_BYTES:
            raise GeometryError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        if self.granule_bytes < ALIGNMENT or self.granule_bytes & (self.granule_bytes - 1):
            raise GeometryError(f"granule_bytes must be a power of two from {ALIGNMENT}, got {self.granule_bytes}")
        for index, layer in enumerate(self.layers):
            _check_layer(self.layers, index, layer)
        if not self.kv_bytes_per_token and not self.state_bytes:
            raise GeometryError("no layer has K and V of its own, or a state: there is nothing to cache")
        _check_tables(self._own)

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        block_size: int,
        dtype: str,
        granule_bytes: int = PAGE_BYTES,
        extent_target_bytes: int = EXTENT_TARGET_BYTES,
        latents: bool = True,
        max_tokens: int | None = None,
        found: Sequence[FoundLayer] = (),
    ) -> Self:
        """The geometry of the model described by `config`, a transformers config. Raises GeometryError.

        `latents` and `found` as for `layer_shapes`. `max_tokens` are the most tokens of a sequence: windows that hold them are
        none.
        """
        layers = layer_shapes(config, latents=latents, found=found)
        tables = in_tables(layers, block_size, max_tokens)
        gathers = bool(found) and not any(layer.states for layer in found)
        return cls(tables, block_size, dtype, granule_bytes, extent_target_bytes, gathers=gathers)

    def with_extents(self, target_bytes: int) -> Self:
        """The same blocks in extents of at most `target_bytes` (or of one block). The stride may differ."""
        return replace(self, extent_target_bytes=target_bytes)

    # --- one block

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def has_scales(self) -> bool:
        """Whether elements come with scales."""
        return self.dtype in SCALED

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, with their scales."""
        return sum(map(self.token_bytes, self._own))

    def token_bytes(self, layer: LayerShape) -> int:
        """Bytes of one token's K and V in one layer of its own, with their scales."""
        scales = len(layer.stored_dims) * SCALE_BYTES if self.has_scales else 0
        return layer.num_kv_heads * (sum(layer.stored_dims) * self.itemsize + scales)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of K and V in a block, without padding; if tables differ, in one of the table with the most; without K and V
        those of a state's part.
        """
        if not self.num_tables:
            return self.payload_bytes
        of_tables = [0] * self.num_tables
        for layer in self._own:
            of_tables[layer.table] += self.token_bytes(layer)
        return self.block_size * max(of_tables)

    @cached_property
    def _own(self) -> tuple[LayerShape, ...]:
        """The layers with K and V of their own."""
        return tuple(layer for layer in self.layers if layer.shares is None and layer.num_kv_heads)

    # --- groups of layers

    @cached_property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers with K and V, in the order of their tables."""
        tables = {layer.table: (layer.window, layer.chunked) for layer in self._own}
        kinds = groupby(tables[table] for table in sorted(tables))
        return tuple([LayerGroup(len(list(run)), *kind) for kind, run in kinds])

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """All groups of layers: that of states, if there is one, comes last."""
        return (*self.kv_groups, state_group(self.state_blocks)) if self.state_bytes else self.kv_groups

    @cached_property
    def num_tables(self) -> int:
        """Block tables of a sequence for K and V: those of all groups, but that of states."""
        return 1 + max((layer.table for layer in self._own), default=-1)

    @property
    def payload_bytes(self) -> int:
        """Bytes from a block's start to the end of its last piece, in the longest table, or of its last part of a state: what a
        copy has to transfer.
        """
        ends = (self._scale_layout if self.has_scales else self._layout)[1]
        states = [state for layer in self.layers for state in layer.states]
        least = (state.item_bytes if ends else state.num_bytes for state in states)  # parts, or whole states
        return max([*ends, *(_align(size, ALIGNMENT) for size in least)])

    # --- states

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all states of a sequence."""
        return sum(state.num_bytes for layer in self.layers for state in layer.states)

    @property
    def state_blocks(self) -> int:
        """Blocks with the states of a sequence."""
        return 1 + max((max(place.blocks) for place in self.state_places), default=-1)

    @cached_property
    def state_places(self) -> tuple[StatePlace, ...]:
        """Where the states of all layers lie, in the order of layers.

        The parts of the largest fill blocks first; smaller ones go where room is left.
        """
        states = [(index, state) for index, layer in enumerate(self.layers) for state in layer.states]
        cuts = [_num_parts(state, self.payload_bytes) for _, state in states]
        sizes = [_align(state.num_bytes // parts, ALIGNMENT) for (_, state), parts in zip(states, cuts, strict=True)]
        places: dict[int, StatePlace] = {}
        used: list[int] = []  # bytes of each block
        first, last_size = 0, 0  # blocks before `first` have no room for parts of this size
        for number in sorted(range(len(states)), key=lambda number: -sizes[number]):
            size, parts = sizes[number], []
            first, last_size = (first if size == last_size else 0), size
            for _ in range(cuts[number]):
                while first < len(used) and used[first] + size > self.payload_bytes:
                    first += 1
                if first == len(used):
                    used.append(0)
                parts.append((first, used[first]))
                used[first] += size
            blocks, offsets = zip(*parts, strict=True)
            places[number] = StatePlace(*states[number], blocks, offsets)
        return tuple([places[number] for number in range(len(states))])

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self._packing[0]

    def piece(self, layer: int) -> tuple[int, int]:
        """(K, V) offsets of a layer's pieces from the start of the block, in elements."""
        return self._layout[0][layer]

    def scale_piece(self, layer: int) -> tuple[int, int]:
        """(K, V) offsets of a layer's scales from the start of the block, in float16 elements.

        Raises GeometryError if the elements have no scales.
        """
        if not self.has_scales:
            raise GeometryError(f"elements of type {self.dtype} have no scales")
        return self._scale_layout[0][layer]

    @cached_property
    def layout_id(self) -> str:
        """A description of the layout. Two pools with equal ids can exchange a block's first `payload_bytes`.

        It omits the stride, which depends on the arena's granule, as the padding is not copied.
        """
        runs = [(f"{len(list(run))}*", layer) for layer, run in groupby(self.layers)]
        layers = ",".join((count if count != "1*" else "") + _layer_name(layer) for count, layer in runs)
        rank, ranks = self.shard
        return f"block-major-1/{self.dtype}/{self.block_size}/{layers}/{rank}of{ranks}"

    # --- many blocks

    @property
    def blocks_per_extent(self) -> int:
        """Blocks of one extent."""
        return self._packing[1]

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent: a whole number of granules."""
        return self.block_stride * self.blocks_per_extent

    def columns_for_tokens(self, num_tokens: int) -> int:
        """Entries of a block table for `num_tokens`."""
        return _ceil(num_tokens, self.block_size)

    def blocks_for_tokens(self, num_tokens: int) -> int:
        """Blocks that one sequence of `num_tokens` holds in all tables, once its last token is computed."""
        return blocks_to_hold(self.groups, self.columns_for_tokens(num_tokens), self.block_size)

    def tokens_in_blocks(self, num_blocks: int, most: int) -> int:
        """Tokens, up to `most`, of the longest sequence that `num_blocks` hold, in whole blocks."""
        columns = most_columns_in(self.groups, num_blocks, self.block_size, self.columns_for_tokens(most))
        return min(most, columns * self.block_size)

    def extents_for_blocks(self, num_blocks: int) -> int:
        """The fewest extents that hold `num_blocks`, including the null block."""
        return _ceil(num_blocks, self.blocks_per_extent)

    def bytes_for_blocks(self, num_blocks: int) -> int:
        """Bytes of the fewest extents that hold `num_blocks`, including the null block."""
        return self.extents_for_blocks(num_blocks) * self.extent_bytes

    def blocks_for_bytes(self, num_bytes: int) -> int:
        """Blocks of the whole extents that fit into `num_bytes`, including the null block.

        The inverse of `bytes_for_blocks` up to whole extents.
        """
        return max(0, num_bytes) // self.extent_bytes * self.blocks_per_extent

    def usable_blocks(self, num_blocks: int) -> int:
        """The blocks of a pool of `num_blocks` that sequences can use: all but the null block."""
        return max(0, num_blocks - 1)

    @cached_property
    def _layout(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """((K, V) offsets per layer in elements, bytes to the end of each table's last piece)."""
        dims = [layer.stored_dims for layer in self.layers]
        return self._laid_out((0,) * self.num_tables, ALIGNMENT, self.itemsize, dims)

    @cached_property
    def _scale_layout(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """((K, V) offsets per layer of the scales in float16 elements, bytes to the end of each table's last)."""
        dims = [(1,) * len(layer.stored_dims) for layer in self.layers]
        return self._laid_out(self._layout[1], SCALE_BYTES, SCALE_BYTES, dims)

    def _laid_out(
        self, starts: tuple[int, ...], alignment: int, itemsize: int, dims: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """((K, V) offsets per layer in items, bytes to the end of each table's last), for pieces one after the other from byte
        `starts[table]` on. `dims` are the items of each layer's pieces for a token and head.
        """
        pieces: list[tuple[int, int]] = []
        ends = list(starts)
        for layer, sizes in zip(self.layers, dims, strict=True):
            if layer.shares is not None or not ends:  # no layer has K and V
                pieces.append(pieces[layer.shares] if layer.shares is not None else (0, 0))
                continue
            offsets = []
            for size in sizes:
                start = _align(ends[layer.table], alignment)
                ends[layer.table] = start + self.block_size * layer.num_kv_heads * size * itemsize
                offsets.append(start // itemsize)
            pieces.append((offsets[0], offsets[-1]))
        return tuple(pieces), tuple(ends)

    @cached_property
    def _packing(self) -> tuple[int, int]:
        """(block stride, blocks per extent): the least stride that fits the target, then the most blocks.

        2^k blocks make whole granules if the stride is a multiple of granule / 2^k. Only the power of two in the number
        of blocks matters, so trying each k finds the optimum.
        """
        target = max(self.extent_target_bytes, self.granule_bytes)
        stride = _align(self.payload_bytes, self.granule_bytes)
        count = max(1, target // stride)
        blocks, unit = 2, self.granule_bytes // 2
        while unit >= ALIGNMENT and blocks * (candidate := _align(self.payload_bytes, unit)) <= target:
            if candidate < stride:
                stride, count = candidate, target // (blocks * candidate) * blocks
            blocks, unit = blocks * 2, unit // 2
        return stride, count


# Model types with latent attention (MLA) as transformers computes it in DeepSeek's models: K and V of all heads are linear in a
# latent that the heads share, but for a rotated part of K, which they share too.
LATENT_TYPES = frozenset(
    {
        *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3"),
        "youtu",
    }
)


def layer_shapes(config: Any, *, latents: bool = True, found: Sequence[FoundLayer] = ()) -> tuple[LayerShape, ...]:
    """The K and V that each layer of a transformers model passes to its attention function.

    `config` is a text config, or one that has one (`get_text_config`). Attribute names differ between families:
    aliases, per-layer lists, `per_layer_config` and `block_configs` are understood. With `latents`, layers of LATENT_TYPES
    have one head: its K is the latent and the rotated part, its V the latent. All are of one table; `in_tables` splits them.

    `found`, what the model's layers were seen to hand to the cache, goes before the config's words for a model that has states.
    Raises GeometryError naming the missing attribute, or a layer that keeps a state other than K and V.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    num_layers = _need(config, "num_hidden_layers")
    if not 1 <= num_layers <= MOST_LAYERS:
        raise GeometryError(f"num_hidden_layers must be from 1 to {MOST_LAYERS:,}, got {num_layers:,}")
    if found:
        return _found_shapes(config, found, num_layers, latents)
    types = _layer_types(config, num_layers)
    views = _layer_configs(config, num_layers)
    sources = _sources(config, num_layers, types)
    latents = latents and _caches_latents(config)
    shapes = [
        replace(_shape(view, index, kind, latents), **_window(view, index, kind))
        for index, (view, kind) in enumerate(zip(views, types, strict=True))
    ]
    return tuple(
        shape if source is None else replace(shapes[source], shares=source)
        for shape, source in zip(shapes, sources, strict=True)
    )


def _caches_latents(config: Any) -> bool:
    return getattr(config, "model_type", None) in LATENT_TYPES


def _found_shapes(config: Any, found: Sequence[FoundLayer], num_layers: int, latents: bool) -> tuple[LayerShape, ...]:
    """The layers as they were seen. The config tells their windows, and K and V where the cache is given latents."""
    types = _first(config, "layer_types") or [""] * num_layers
    if not len(found) == len(types) == num_layers:
        raise GeometryError(f"the model has {len(found)} layers with a cache, {len(types)} types and {num_layers} layers")
    shapes = []
    for index, (layer, kind) in enumerate(zip(found, types, strict=True)):
        kind = "sliding_attention" if "sliding" in kind else kind
        window = _window(config, index, kind) if layer.kv else {}
        told = layer.kv is not None and _caches_latents(config)
        shape = _shape(config, index, kind, latents) if told else LayerShape(*(layer.kv or (0, 0, 0)))
        shapes.append(replace(shape, **window, states=layer.states, chooses=layer.index_dim > 0))
    keys = [LayerShape(1, dim - dim // 2, dim // 2) for layer in found if (dim := layer.index_dim)]
    return (*shapes, *keys)


def in_tables(layers: tuple[LayerShape, ...], block_size: int, max_tokens: int | None = None) -> tuple[LayerShape, ...]:
    """`layers` with the tables that hold their K and V, those of the widest group first.

    A window that holds `max_tokens` is none, nor is a chunked one that is not of whole blocks.
    """
    layers = tuple(
        replace(layer, window=None, chunked=False)
        if layer.window is not None
        and ((max_tokens is not None and layer.window >= max_tokens) or (layer.chunked and layer.window % block_size))
        else layer
        for layer in layers
    )
    own = [index for index, layer in enumerate(layers) if layer.shares is None and layer.num_kv_heads]
    by_group: dict[tuple[int | None, bool], list[int]] = {}
    for index in own:
        by_group.setdefault((layers[index].window, layers[index].chunked), []).append(index)
    if not by_group:
        return layers
    groups = [by_group[kind] for kind in sorted(by_group, key=lambda kind: (-(kind[0] or MOST_WINDOW), kind[1]))]
    sizes = [[layers[index].num_kv_heads * sum(layers[index].stored_dims) for index in group] for group in groups]
    tables, first = dict.fromkeys(range(len(layers)), 0), 0
    for group, of_group in zip(groups, split_into_tables(sizes), strict=True):
        tables |= {index: first + table for index, table in zip(group, of_group, strict=True)}
        first += of_group[-1] + 1
    return tuple(
        replace(layer, table=tables[index if layer.shares is None else layer.shares]) for index, layer in enumerate(layers)
    )


# Layer types with plain attention over K and V, and types without attention; all others keep another kind of state.
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_EMPTY_TYPES = {"moe", "mlp"}


def _layer_types(config: Any, num_layers: int) -> Sequence[str]:
    types = _first(config, "layer_types", "layers_block_type")
    if types is None:
        return ["full_attention"] * num_layers
    for index, kind in enumerate(types):
        if kind not in _ATTENTION_TYPES | _EMPTY_TYPES:
            raise GeometryError(f"layer {index} is of type {kind!r}: its state is not K and V of each token")
    if len(types) != num_layers:
        raise GeometryError(f"layer_types names {len(types)} layers, num_hidden_layers is {num_layers}")
    return list(types)


def _layer_configs(config: Any, num_layers: int) -> Sequence[Any]:
    """The config as each layer sees it. Attributes that differ by layer cannot be read from the config itself."""
    views = getattr(config, "per_layer_config", None)
    if views is None or len(views) != num_layers:
        return [config] * num_layers
    return [views[index] for index in range(num_layers)]


def _sources(config: Any, num_layers: int, types: Sequence[str]) -> Iterator[int | None]:
    """The layer from which each layer reads K and V, or None. For gemma 3n and 4: the last unshared layer of the same type."""
    sources = getattr(config, "kv_source_layers", None)
    first_shared = num_layers - (_size(config, "num_kv_shared_layers", index=0) or 0)
    for index in range(num_layers):
        if sources is not None:
            source = _of_layer("kv_source_layers", sources, index)
            if not isinstance(source, int) or not 0 <= source <= index:
                raise GeometryError(f"kv_source_layers: layer {index} cannot read K and V of layer {source!r:.40}")
            yield None if source == index else source
        elif index < first_shared:
            yield None
        else:
            like = [other for other in range(first_shared) if types[other] == types[index]]
            if not like:
                raise GeometryError(f"num_kv_shared_layers: layer {index} shares, but no {types[index]} layer has K and V")
            yield like[-1]


def _shape(config: Any, index: int, kind: str, latents: bool) -> LayerShape:
    """One layer's shape; `config` is the layer's own view."""
    block = _block_attention(config, index)
    if kind in _EMPTY_TYPES or _first(block, "no_op") or _first(block, "replace_with_linear"):
        return LayerShape(0, 0, 0)
    nope, rope = (_size(config, f"qk_{part}_head_dim", index=index) for part in ("nope", "rope"))
    if nope is not None and rope is not None:  # latent attention
        if latents and (rank := _size(config, "kv_lora_rank", index=index)):
            return LayerShape(1, rank + rope, rank, v_in_k=True)
        # K and V expanded to all heads
        heads = _need(config, "num_attention_heads", index=index)
        return LayerShape(heads, nope + rope, _need(config, "v_head_dim", index=index))
    head_dim = _head_dim(config, index, kind)
    v_dim = _by_kind(config, "v_head_dim", index, kind) or head_dim
    return LayerShape(_kv_heads(config, index, kind, block), head_dim, v_dim)


# Model types without layer types that pass their `sliding_window` to the attention of all layers.
_WINDOWED_TYPES = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})


def _window(config: Any, index: int, kind: str) -> dict[str, Any]:
    """`window` and `chunked` of a layer. None where the config does not plainly say: more than a window is kept then."""
    chunked = kind == "chunked_attention"
    window = None
    if chunked or kind == "sliding_attention" or getattr(config, "model_type", None) in _WINDOWED_TYPES:
        window = _first(config, "attention_chunk_size" if chunked else "sliding_window", index=index)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:  # some say -1 or 0 for none
        return {"window": None, "chunked": False}
    return {"window": window, "chunked": chunked}


def _kv_heads(config: Any, index: int, kind: str, block: Any) -> int:
    model_type = getattr(config, "model_type", None)
    if _first(config, "new_decoder_architecture") or model_type == "jetmoe":
        return _need(config, "num_attention_heads", index=index)  # falcon and jetmoe repeat K and V for each query head
    if _first(config, "multi_query"):
        return 1
    if (queries_per_kv := _first(block, "n_heads_in_group")) is not None:
        if not isinstance(queries_per_kv, int) or queries_per_kv < 1:
            raise GeometryError(f"n_heads_in_group must be an integer of at least 1, got {queries_per_kv!r:.40}")
        return _need(config, "num_attention_heads", index=index) // queries_per_kv
    if kind == "full_attention" and getattr(config, "attention_k_eq_v", True):  # gemma 4 before it had per_layer_config
        shared = _size(config, "num_global_key_value_heads", index=index)
        if shared is not None:
            return shared
    heads = _by_kind(config, "num_key_value_heads", index, kind) or _size(config, "num_kv_heads", index=index)
    if heads is None:
        return _need(config, "num_attention_heads", "num_key_value_heads", index=index)
    if kind == "sliding_attention" and model_type == "mimo_v2_flash":
        return 2 * heads  # only its attention class says so
    return heads


def _head_dim(config: Any, index: int, kind: str) -> int:
    if kind == "full_attention" and (size := _size(config, "global_head_dim", index=index)) is not None:
        return size
    if (size := _by_kind(config, "head_dim", index, kind)) is not None:
        return size
    hidden = _need(config, "hidden_size", "head_dim", index=index)
    heads = _need(config, "num_attention_heads", "head_dim", index=index)
    if not heads:
        raise GeometryError("num_attention_heads is 0: the size of a head cannot be told")
    return hidden // heads


def _block_attention(config: Any, index: int) -> Any:
    """The attention part of `block_configs` (Nemotron-NAS: one record or dict per layer), or None."""
    blocks = getattr(config, "block_configs", None)
    return None if blocks is None else _get(_of_layer("block_configs", blocks, index), "attention")


def _by_kind(config: Any, name: str, index: int, kind: str) -> int | None:
    """The attribute; for a sliding layer, the variant `swa_{name}` first, which some families have."""
    names = (f"swa_{name}", name) if kind == "sliding_attention" else (name,)
    return _size(config, *names, index=index)


def _need(config: Any, name: str, *instead: str, index: int = 0) -> int:
    """The attribute as an int. Raises GeometryError naming it and the alternatives in `instead`."""
    if (value := _size(config, name, index=index)) is None:
        wanted = " or ".join((*instead, name))
        raise GeometryError(f"{type(config).__name__} has no {wanted}: the size of its K and V cannot be told")
    return value


def _size(config: Any, *names: str, index: int) -> int | None:
    """The first of the attributes that is present and not None, as an int; of a per-layer list, the layer's item."""
    for name in names:
        value = _first(config, name, index=index)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_SIZE:
            raise GeometryError(f"{name} must be an integer from 0 to {_MOST_SIZE:,}, got {value!r:.40}")
        return value
    return None


def _first(config: Any, *names: str, index: int = 0) -> Any:
    """The first of the attributes that is present and not None; of a per-layer list, the layer's item."""
    for name in names:
        if (value := _get(config, name)) is not None:
            by_layer = isinstance(value, (list, tuple)) and name not in ("layer_types", "layers_block_type")
            return _of_layer(name, value, index) if by_layer else value
    return None


def _of_layer(name: str, values: Sequence[Any], index: int) -> Any:
    """The layer's item of a per-layer list."""
    if index >= len(values):
        raise GeometryError(f"{name} has {len(values)} items, and there is a layer {index}")
    return values[index]


def _get(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else getattr(record, name, None)


def _check_layer(layers: Sequence[LayerShape], index: int, layer: LayerShape) -> None:
    if min(layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.table) < 0:
        raise GeometryError(f"layer {index} has a negative size: {layer}")
    if layer.v_in_k and layer.v_dim > layer.k_dim:
        raise GeometryError(f"layer {index} has V of {layer.v_dim} elements within K of {layer.k_dim}")
    if layer.shares is None:
        return
    if not 0 <= layer.shares < index or layers[layer.shares].shares is not None:
        raise GeometryError(f"layer {index} shares K and V of layer {layer.shares}, which is no earlier layer with its own")
    if replace(layer, shares=None) != layers[layer.shares]:
        raise GeometryError(f"layer {index} differs from layer {layer.shares}, but shares its K and V")


def _num_parts(state: StateShape, block_bytes: int) -> int:
    """The equal parts of `state`, along its first dimension, that waste the least of a block; of some like these the fewest."""

    def waste(parts: int) -> float:
        size = _align(state.num_bytes // parts, ALIGNMENT)
        return round(1 - block_bytes // size * (state.num_bytes // parts) / block_bytes, 2)

    cuts = [n for n in range(1, state.shape[0] + 1) if state.shape[0] % n == 0 and state.num_bytes // n <= block_bytes]
    return min(cuts, key=lambda parts: (waste(parts), parts))


def _check_tables(own: tuple[LayerShape, ...]) -> None:
    tables: dict[int, tuple[int | None, bool]] = {}
    for layer in own:
        if tables.setdefault(layer.table, (layer.window, layer.chunked)) != (layer.window, layer.chunked):
            raise GeometryError(f"table {layer.table} has layers of different windows: {own}")
    if sorted(tables) != list(range(len(tables))):
        raise GeometryError(f"the tables are numbered from 0 on without a gap, got {sorted(tables)}")
    kinds = [kind for kind, _ in groupby(tables[table] for table in range(len(tables)))]
    if len(set(kinds)) < len(kinds) or (None, False) in kinds[1:]:
        raise GeometryError(f"the tables of a group follow one another, those without a window come first; got {kinds}")


def _layer_name(layer: LayerShape) -> str:
    if layer.shares is not None:
        return f"={layer.shares}"
    name = f"{layer.num_kv_heads}x({layer.k_dim}{'>' if layer.v_in_k else '+'}{layer.v_dim})"
    for state in layer.states:
        name += f"+{state.kind}{state.index}:{'x'.join(map(str, state.shape))}:{state.dtype}"
    return f"{name}@{layer.table}" if layer.table else name


def _ceil(amount: int, unit: int) -> int:
    return -(-max(0, amount) // unit)


def _align(amount: int, unit: int) -> int:
    return _ceil(amount, unit) * unit
