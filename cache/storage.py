"""Tensors over an arena: views of each layer's K and V, and copies of whole blocks. The only module of cache with torch.

    arena.buffer -> bytes [num_blocks, block_stride] -> layer i: key   [num_blocks, block_size, num_kv_heads, k_dim]
                                                                 value [num_blocks, block_size, num_kv_heads, v_dim]

All are views of one address range, strided by the block. They keep the range alive after `arena.close()`, where a host
arena reads as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..allocator.arena import Arena, ExtentSet
from ..allocator.errors import BlockMisuse, OutOfDeviceMemory
from ..common.host_memory import free_host_bytes
from .geometry import ITEM_BYTES, Geometry, StatePlace

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_NULL_BLOCK = 0

BlockIds = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's K and V in the arena, as strided views: `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Elements of one byte (int8, float8_e4m3fn) stand for themselves times the scale of their token and head, float16
    `[num_blocks, block_size, num_kv_heads]`; other elements have no scales.
    """

    key: torch.Tensor
    value: torch.Tensor  # its head_dim may differ from the key's
    table: int = 0  # the number of the block table with its blocks
    aliased: bool = False  # the layer reads another layer's K and V and writes none
    v_in_k: bool = False  # `value` is the first part of `key`, and is not written by itself
    # A token reads those since the last multiple of so many; None: it may read all
    chunk: int | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None  # with `v_in_k` that of the key


class StateCache:
    """One state of a layer in the arena: for each sequence `shape`, in parts that lie in blocks of the sequence.

    Attributes:
        memory: The arena, uint8 [num_blocks, block_stride].
        parts: int64 [2, parts], on the host: the place of each part's block among those of the sequence, and its byte there.
    """

    def __init__(self, memory: torch.Tensor, geometry: Geometry, place: StatePlace) -> None:
        self.place = place
        self.shape, self.dtype = place.state.shape, _DTYPES[place.state.dtype]
        self._part_bytes = place.state.num_bytes // len(place.blocks)
        self.memory = memory.view(-1, geometry.block_stride)
        self.parts = torch.tensor((place.blocks, place.offsets), dtype=torch.int64)
        self._on_host = self.memory.numpy() if memory.device.type == "cpu" else None

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """The states `[n, *shape]` of sequences with `blocks`, int64 [n, state_blocks]: a copy. `blocks` on the host, as for
        `write`, need no wait for the device.
        """
        found = torch.empty((len(blocks), *self.shape), dtype=self.dtype, device=self.memory.device)
        for part, where in self._parts(found, blocks):
            part[:] = where
        return found

    def write(self, blocks: torch.Tensor, states: torch.Tensor) -> None:
        """Write the states `[n, *shape]` of sequences with `blocks`, int64 [n, state_blocks], distinct."""
        for part, where in self._parts(states.to(self.dtype).contiguous(), blocks):
            where[:] = part

    def _parts(self, states: torch.Tensor, blocks: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        """The bytes of each part of `states`, and where they lie in the arena. On a host as arrays: torch indexes slowly."""
        rows: Any = states.view(len(blocks), -1).view(torch.uint8)
        memory: Any = self.memory if self._on_host is None else self._on_host
        rows = rows if self._on_host is None else rows.numpy()
        for row, of_row in zip(rows, blocks.tolist(), strict=True):
            for number, (block, offset) in enumerate(zip(self.place.blocks, self.place.offsets, strict=True)):
                begin = number * self._part_bytes
                yield row[begin : begin + self._part_bytes], memory[of_row[block], offset : offset + self._part_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Copies of blocks `sources` of one pool to `targets` of another, merged into byte ranges where blocks are adjacent.

    Piece i is `sizes[i]` bytes from offset `reads[i]` to offset `writes[i]`.
    """

    sources: BlockIds
    targets: BlockIds
    reads: npt.NDArray[np.int64]
    writes: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


class Storage:
    """The blocks of `arena` as tensors on `device`. Construction touches and maps no memory.

    The arena's extents must have the geometry's size. Access to a block in an unmapped extent is undefined. Block 0,
    the null block, must always be mapped: it starts as zeros, and only `clear` writes to it here. Raises ValueError if
    arena and geometry differ, or if the arena holds no block beside the null block.
    """

    staging_bytes = 64 << 20  # device memory that a copy of blocks may use for staging

    def __init__(self, geometry: Geometry, arena: Arena, device: torch.device | str = "cpu") -> None:
        if arena.extent_bytes != geometry.extent_bytes:
            raise ValueError(f"the arena's extents have {arena.extent_bytes:,} bytes, not {geometry.extent_bytes:,}")
        num_blocks = arena.num_extents * geometry.blocks_per_extent
        if num_blocks < 2:
            raise ValueError(
                f"the arena's {arena.num_extents * arena.extent_bytes:,} bytes hold the null block alone: "
                f"{geometry.bytes_for_blocks(2):,} bytes are the least that hold another"
            )
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        with torch.inference_mode(False):  # they are written in and out of inference mode
            memory = as_bytes(arena.buffer, self.device)  # [num_blocks * block_stride]
            self.blocks = memory.view(num_blocks, geometry.block_stride)  # uint8
            self._words = memory.view(torch.int64).view(num_blocks, -1)  # the same, in the widest items that copy fast
            self._layers = tuple(self._views(memory, layer) for layer in range(len(geometry.layers)))
            self.states = tuple(StateCache(memory, geometry, place) for place in geometry.state_places)

    def layer(self, layer: int) -> LayerCache:
        """The views of one layer. A layer that shares another's K and V has the same memory, and `aliased` set."""
        return self._layers[layer]

    def block_bytes(self, block: int) -> torch.Tensor:
        """The bytes of one block that a swap copies, without padding: a view, uint8 [payload_bytes]."""
        self._check(np.asarray([block]))
        return self.blocks[block, : self.geometry.payload_bytes]

    def bytes_of(self, blocks: BlockIds) -> torch.Tensor:
        """A copy of the `block_bytes` of `blocks`, uint8 [n, payload_bytes], in the order of the device's current stream."""
        self._check(blocks)
        size = self.geometry.payload_bytes
        if self.device.type == "cpu":
            return torch.from_numpy(self.blocks.numpy()[:, :size][blocks])
        return self.blocks.index_select(0, self._index(blocks))[:, :size].contiguous()

    def read(self, blocks: BlockIds) -> npt.NDArray[np.uint8]:
        """`bytes_of` on the host, in parts that take little memory of the device."""
        step = max(1, self.staging_bytes // max(1, self.geometry.payload_bytes))
        data = np.empty((len(blocks), self.geometry.payload_bytes), np.uint8)
        for start in range(0, len(blocks), step):
            data[start : start + step] = self.bytes_of(blocks[start : start + step]).cpu().numpy()
        return data

    def put(self, blocks: BlockIds, data: npt.NDArray[np.uint8]) -> None:
        """Copy `data` [n, payload_bytes] to the `block_bytes` of `blocks`, in the order of the device's current stream."""
        self._check(blocks)
        if (blocks == _NULL_BLOCK).any() or data.shape != (len(blocks), self.geometry.payload_bytes):
            raise BlockMisuse(f"bytes of the shape {data.shape} cannot be put into the blocks {blocks.tolist():.80}")
        if self.device.type == "cpu":
            self.blocks.numpy()[blocks, : data.shape[1]] = data
            return
        step = max(1, self.staging_bytes // max(1, data.shape[1]))
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            self.blocks[self._index(blocks[part]), : data.shape[1]] = torch.from_numpy(data[part]).to(self.device)

    def copy(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy block `sources[i]` to block `targets[i]`, all as if at once: a target may be the source of another copy.

        Copies whole blocks, in the order of the device's current stream. Needs `staging_bytes` of device memory, or the
        sources' own size if a target is a source too. Raises BlockMisuse, with nothing copied, for the null block or a
        repetition among the targets and for ids outside the pool.
        """
        self._check_copies(self, sources, targets)
        apart = not np.isin(targets, sources).any()
        if apart and self.device.type == "cpu":  # five times as fast as staging, which exceeds the caches
            blocks = self.blocks.numpy()
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                blocks[target] = blocks[source]
            return
        step = max(1, self.staging_bytes // self.geometry.block_stride) if apart else max(1, len(sources))
        read, write = self._index(sources), self._index(targets)
        for start in range(0, len(sources), step):
            part = slice(start, start + step)
            self._words.index_copy_(0, write[part], self._words.index_select(0, read[part]))

    def copy_from(self, other: Storage, sources: BlockIds, targets: BlockIds) -> None:
        """Copy block `sources[i]` of another pool to block `targets[i]` of this one: a swap, in or out.

        Copies the `block_bytes`. If the strides are equal, blocks adjacent on both sides are one copy, including the
        padding between them. Between host pools the calling thread copies, without the GIL, and is done on return. With
        a device, the copies are enqueued on its current stream, and run asynchronously if the host memory is pinned.
        Raises, with nothing copied, BlockMisuse as `copy` does; ValueError if the layouts differ or the pool is the
        same.
        """
        self.copy_pieces(other, self.pieces_from(other, sources, targets))

    def copy_pieces(self, other: Storage, pieces: Pieces) -> None:
        """Do the copies of `copy_from`, given pieces that `pieces_from` made of the same pools."""
        theirs, ours = other.blocks.view(-1), self.blocks.view(-1)
        places = [
            (slice(first, first + num_bytes), slice(second, second + num_bytes))
            for first, second, num_bytes in zip(
                pieces.reads.tolist(), pieces.writes.tolist(), pieces.sizes.tolist(), strict=True
            )
        ]
        if self.device.type == other.device.type == "cpu":
            from_bytes, to_bytes = theirs.numpy(), ours.numpy()
            for source_bytes, target_bytes in places:
                to_bytes[target_bytes] = from_bytes[source_bytes]
        else:
            for source_bytes, target_bytes in places:
                ours[target_bytes].copy_(theirs[source_bytes], non_blocking=True)

    def pieces_from(self, other: Storage, sources: BlockIds, targets: BlockIds) -> Pieces:
        """The copies that `copy_from` would do, sorted by source. Copies nothing. Raises what `copy_from` raises."""
        if other.blocks.data_ptr() == self.blocks.data_ptr():
            raise ValueError("blocks of one pool are copied by `copy`, which minds targets that are sources too")
        if other.geometry.layout_id != self.geometry.layout_id:
            raise ValueError(f"blocks laid out as {other.geometry.layout_id} are none of {self.geometry.layout_id}")
        self._check_copies(other, sources, targets)
        read, write = other.geometry.block_stride, self.geometry.block_stride
        starts, ends = sources, targets
        lengths: BlockIds = np.ones(len(sources), np.int64)
        # A driver rejects copies across the end of a range that was pinned at once: an extent of the host's.
        if read == write:
            between_hosts = self.device.type == other.device.type == "cpu"
            per_extent = None if between_hosts else self.geometry.blocks_per_extent
            starts, ends, lengths = _runs(sources, targets, per_extent)
        sizes = (lengths - 1) * read + self.geometry.payload_bytes
        offsets = starts.astype(np.int64) * read, ends.astype(np.int64) * write
        return Pieces(sources, targets, *offsets, sizes.astype(np.int64))

    def clear(self, blocks: Sequence[int] | BlockIds) -> None:
        """Fill whole blocks with zero bytes; also the null block, if padding was written to it."""
        ids = np.asarray(blocks)
        self._check(ids)
        self._words.index_fill_(0, self._index(ids), 0)

    def _views(self, memory: torch.Tensor, index: int) -> LayerCache:
        geometry, layer = self.geometry, self.geometry.layers[index]
        rows = (self.num_blocks, geometry.block_size, layer.num_kv_heads)

        def view(dtype: torch.dtype, offset: int, size: int) -> torch.Tensor:
            strides = (geometry.block_stride // dtype.itemsize, layer.num_kv_heads * size, size, 1)
            return memory.view(dtype).as_strided((*rows, size), strides, offset)

        k_offset, v_offset = geometry.piece(index)
        dtype, scales = _DTYPES[geometry.dtype], geometry.scale_piece(index) if geometry.has_scales else ()
        key = view(dtype, k_offset, layer.k_dim)
        return LayerCache(
            key,
            key[..., : layer.v_dim] if layer.v_in_k else view(dtype, v_offset, layer.v_dim),
            layer.table,
            layer.shares is not None,
            layer.v_in_k,
            layer.window if layer.chunked else None,
            *(view(torch.float16, offset, 1)[..., 0] for offset in scales),
        )

    def _index(self, ids: BlockIds) -> torch.Tensor:
        return torch.from_numpy(np.array(ids, np.int64)).to(self.device)

    def _check_copies(self, other: Storage, sources: BlockIds, targets: BlockIds) -> None:
        if sources.shape != targets.shape or sources.ndim != 1:
            raise BlockMisuse(f"{sources.shape} sources cannot be copied to {targets.shape} targets")
        other._check(sources)
        self._check(targets)
        if (targets == _NULL_BLOCK).any():
            raise BlockMisuse("the null block is no target of copies")
        if len(np.unique(targets)) != len(targets):
            raise BlockMisuse("a block is the target of two copies")

    def _check(self, ids: BlockIds) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            outside = ids[(ids < 0) | (ids >= self.num_blocks)]
            raise BlockMisuse(f"blocks {outside.tolist()} are outside the pool of {self.num_blocks:,}")


class TensorArena(ExtentSet):
    """An arena of one torch allocation, mapped as a whole while it lives: for devices without an elastic arena.

    All extents are mapped from the start until `close`, so `map` and `unmap` refuse everything but an empty list. The
    memory is freed with the last view of `buffer`. Raises OutOfDeviceMemory, with nothing allocated.
    """

    def __init__(self, num_extents: int, extent_bytes: int, device: torch.device | str) -> None:
        if num_extents < 1 or extent_bytes < 1:
            raise ValueError(f"num_extents and extent_bytes must be at least 1, got {num_extents} and {extent_bytes}")
        super().__init__(num_extents, extent_bytes, range(num_extents))
        self._buffer: torch.Tensor | None = _allocate(num_extents * extent_bytes, torch.device(device))

    @property
    def buffer(self) -> torch.Tensor:
        """The allocation: uint8 [num_extents * extent_bytes], zeros at first. Raises BlockMisuse once closed."""
        if self._buffer is None:
            raise BlockMisuse("the arena is closed")
        return self._buffer

    def map(self, extents: Sequence[int]) -> None:
        """Raises BlockMisuse for any extent: all are mapped."""
        self._refuse(extents, "mapped already")

    def unmap(self, extents: Sequence[int]) -> None:
        """Raises BlockMisuse for any extent: memory is freed only as a whole, by `close`."""
        self._refuse(extents, "parts of one allocation, which goes back as a whole")

    def close(self) -> None:
        """Drop the allocation; torch frees it with its last view. Idempotent."""
        self._buffer, self._mapped = None, frozenset()

    def _refuse(self, extents: Sequence[int], why: str) -> None:
        if self._buffer is None:
            raise BlockMisuse("the arena is closed")
        if len(extents):
            raise BlockMisuse(f"extents {list(extents)} are {why}")


def _runs(sources: BlockIds, targets: BlockIds, per_extent: int | None) -> tuple[BlockIds, BlockIds, BlockIds]:
    """The copies as runs that are adjacent on both sides, by source: first source, first target and length of each run.

    With `per_extent`, no run crosses the end of an extent of that many blocks, on either side.
    """
    order = np.argsort(sources, kind="stable")
    sources, targets = sources[order], targets[order]
    apart = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    if per_extent is not None:
        apart |= (np.diff(sources // per_extent) != 0) | (np.diff(targets // per_extent) != 0)
    starts = np.flatnonzero(np.concatenate(([True], apart)))[: len(sources)]
    return sources[starts], targets[starts], np.diff(starts, append=len(sources))


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zero bytes on the device. Raises OutOfDeviceMemory with the memory that is actually free."""
    if device.type == "cpu" and num_bytes > (free := free_host_bytes()):
        # Else the kernel overcommits, and kills the process later.
        raise OutOfDeviceMemory(num_bytes, free, "host memory")
    try:
        with torch.inference_mode(False):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise OutOfDeviceMemory(num_bytes, free, f"memory on {device}") from error


def as_bytes(buffer: object, device: torch.device) -> torch.Tensor:
    """`buffer` as uint8 over the same memory, which the tensor keeps alive. Raises ValueError if it is on another device."""
    if isinstance(buffer, torch.Tensor):
        tensor = buffer.view(torch.uint8)
    elif hasattr(buffer, "__cuda_array_interface__"):
        tensor = torch.as_tensor(buffer, device=device).view(torch.uint8)
        if tensor.data_ptr() != buffer.__cuda_array_interface__["data"][0]:
            raise ValueError(f"the arena's memory is not on {device}: torch copied it there")
    else:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise ValueError(f"the arena's memory is on {tensor.device}, not on {device}")
    return tensor.flatten()
