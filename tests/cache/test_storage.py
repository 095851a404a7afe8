"""Where K and V really lie: every test fills the pool with a sentinel, acts, and compares all bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagetide.allocator.arena import Arena
from pagetide.allocator.errors import BlockMisuse, OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage, TensorArena

SENTINEL = 0xAB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALED = ("int8", "float8_e4m3fn")
MIXED = (LayerShape(2, 8, 8), LayerShape(1, 24, 16), LayerShape(2, 8, 8, shares=0), LayerShape(0, 0, 0), LayerShape(3, 5, 7))


def _mapped(arena: Arena) -> Arena:
    arena.map([extent for extent in range(arena.num_extents) if extent not in arena.mapped_extents])
    return arena


# name -> (extents, bytes) -> arena with all of it mapped
ARENAS: dict[str, Callable[[int, int], Arena]] = {
    "cpu host": lambda n, size: _mapped(HostArena(n, size)),
    "cpu tensor": lambda n, size: TensorArena(n, size, "cpu"),
    "cuda tensor": lambda n, size: TensorArena(n, size, "cuda"),
}
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[pytest.param(name, marks=on_cuda if "cuda" in name else []) for name in ARENAS])
def pool(request: pytest.FixtureRequest) -> Callable[..., Storage]:
    """pool(layers, block_size, dtype, num_blocks): a storage of at least so many blocks, a small extent each."""

    def make(layers: tuple[LayerShape, ...], block_size: int, dtype: str, num_blocks: int) -> Storage:
        geometry = Geometry(layers, block_size, dtype).with_extents(0)
        arena = ARENAS[request.param](geometry.extents_for_blocks(num_blocks), geometry.extent_bytes)
        return Storage(geometry, arena, request.param.split()[0])

    return make


def _numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().copy()


def _expected(storage: Storage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All bytes of the pool as they are now, to be changed as the act should have: [num_blocks, block_stride]."""
    return _bytes(storage.blocks)


def _place(storage: Storage, layer: int, which: int, block: int, offset: int) -> tuple[int, int]:
    """(first, last) byte within the block of one token's K (0) or V (1), by the drawing in the geometry's docstring."""
    geometry, shape = storage.geometry, storage.geometry.layers[layer]
    token = shape.num_kv_heads * (shape.k_dim, shape.v_dim)[which] * geometry.itemsize
    start = geometry.piece(layer)[which] * geometry.itemsize + offset * token
    return start, start + token


def _scale_place(storage: Storage, layer: int, which: int, block: int, offset: int) -> tuple[int, int]:
    """(first, last) byte within the block of the scales of one token's K (0) or V (1)."""
    heads = storage.geometry.layers[layer].num_kv_heads
    start = 2 * (storage.geometry.scale_piece(layer)[which] + offset * heads)
    return start, start + 2 * heads


def test_a_new_pool_is_zeros_and_its_null_block_too(pool: Callable[..., Storage]) -> None:
    storage = pool((LayerShape(2, 8, 8),) * 2, 4, "float32", 6)
    assert storage.num_blocks >= 6
    assert not storage.blocks.any()
    assert not storage.layer(1).key[0].any()


@pytest.mark.parametrize("dtype", [*DTYPES, *SCALED])
def test_values_and_scales_land_in_their_slots_and_nowhere_else(pool: Callable[..., Storage], dtype: str) -> None:
    storage = pool(MIXED, 4, dtype, 7)
    storage.blocks.fill_(SENTINEL)
    expected = _expected(storage)
    for index, shape in enumerate(MIXED):
        layer, heads = storage.layer(index), (storage.num_blocks, 4, shape.num_kv_heads)
        assert layer.aliased == (index == 2)
        assert layer.key.dtype == layer.value.dtype == getattr(torch, dtype)
        assert (layer.key.shape, layer.value.shape) == ((*heads, shape.k_dim), (*heads, shape.v_dim))
        scales = [scale for scale in (layer.key_scale, layer.value_scale) if scale is not None]
        assert [(scale.dtype, scale.shape) for scale in scales] == [(torch.float16, heads)] * (2 * (dtype in SCALED))
        if layer.aliased or not shape.num_kv_heads:
            continue
        written = [(layer.key, _place), (layer.value, _place), *((scale, _scale_place) for scale in scales)]
        for number, (view, place) in enumerate(written):
            for block, offset in ((3, 2), (3, 3), (6, 0)):
                value = 50 * index + 10 * offset + number
                view.view(torch.uint8)[block, offset] = value
                start, end = place(storage, index, number % 2, block, offset)
                expected[block, start:end] = value
    assert np.array_equal(_bytes(storage.blocks), expected)


@pytest.mark.parametrize("dtype", ["float32", *SCALED])
def test_v_within_k_is_a_view_of_it(pool: Callable[..., Storage], dtype: str) -> None:
    storage = pool((LayerShape(2, 8, 8), LayerShape(1, 24, 16, v_in_k=True)), 4, dtype, 3)
    plain, layer = storage.layer(0), storage.layer(1)
    assert (plain.v_in_k, layer.v_in_k) == (False, True)
    assert layer.value.shape == (storage.num_blocks, 4, 1, 16)
    assert layer.value.data_ptr() == layer.key.data_ptr() and layer.value.stride() == layer.key.stride()
    if layer.key_scale is not None and layer.value_scale is not None:
        assert layer.value_scale.data_ptr() == layer.key_scale.data_ptr()


def test_a_layer_that_shares_reads_what_its_source_wrote(pool: Callable[..., Storage]) -> None:
    storage = pool(MIXED, 4, "float16", 5)
    source, reader = storage.layer(0), storage.layer(2)
    source.key[4, 3], source.value[4, 3] = 2.0, 3.0
    assert (reader.key[4, 3] == 2.0).all()
    assert (reader.value[4, 3] == 3.0).all()
    assert reader.key.data_ptr() == source.key.data_ptr()


def test_offsets_beyond_two_to_the_31_elements() -> None:
    geometry = Geometry((LayerShape(8, 128, 128),) * 2, 16, "float16", extent_target_bytes=1 << 20)
    arena = HostArena((9 << 30) // geometry.extent_bytes, geometry.extent_bytes)  # 9 GiB of addresses
    arena.map([0, arena.num_extents - 1])  # and 2 MiB of memory
    storage = Storage(geometry, arena)
    last = storage.num_blocks - 1
    layer = storage.layer(1)
    assert last * geometry.block_stride // geometry.itemsize > 1 << 32

    where = torch.tensor([last, last]), torch.tensor([3, 15])
    new = _numbers(2, 8, 128, dtype=torch.float16, device=storage.device)
    layer.value[where] = new
    assert torch.equal(layer.value[where], new)
    start, end = _place(storage, 1, 1, last, 15)
    base = last * geometry.block_stride
    assert bytes(arena.buffer[base + start : base + end]) == _bytes(new[1]).tobytes()
    storage.copy(np.array([last]), np.array([1]))
    assert torch.equal(layer.value[1, [3, 15]], new)
    storage.layer(0).key[1, 0] = new[0]
    storage.copy(np.array([1]), np.array([last - 1]))
    assert torch.equal(storage.layer(0).key[last - 1, 0], new[0])
    assert arena.mapped_bytes == 2 << 20


class OneByOne(Storage):
    """No room to stage more than a block at a time."""

    staging_bytes = 1


@given(st.data(), st.sampled_from([Storage, OneByOne]))
def test_any_copies_are_as_if_at_once(data: st.DataObject, kind: type[Storage]) -> None:
    geometry = Geometry((LayerShape(1, 4, 4),), 2, "float16").with_extents(0)
    arena = _mapped(HostArena(1, geometry.extent_bytes))
    storage = kind(geometry, arena)
    targets = data.draw(st.lists(st.integers(1, storage.num_blocks - 1), unique=True, max_size=12))
    block = st.integers(0, storage.num_blocks - 1)
    sources = data.draw(st.lists(block, min_size=len(targets), max_size=len(targets)))
    storage.blocks.random_(256)
    expected = _expected(storage)
    expected[targets] = expected[sources]
    storage.copy(np.array(sources, np.int32), np.array(targets, np.int32))
    assert np.array_equal(_bytes(storage.blocks), expected)


WRONG = [([1], [0], "null block"), ([1, 2], [3, 3], "two copies"), ([-1], [1], "outside"), ([1, 2], [3], "cannot be copied")]


@pytest.mark.parametrize(("sources", "targets", "says"), [*WRONG, ([1], [1000], "outside")])
def test_wrong_copies_change_nothing(pool: Callable[..., Storage], sources: list[int], targets: list[int], says: str) -> None:
    storage = pool((LayerShape(1, 8, 8),), 4, "float32", 6)
    storage.blocks.fill_(SENTINEL)
    with pytest.raises(BlockMisuse, match=says):
        storage.copy(np.array(sources), np.array(targets))
    assert (storage.blocks == SENTINEL).all()


def test_clear_zeroes_whole_blocks(pool: Callable[..., Storage]) -> None:
    storage = pool((LayerShape(1, 8, 8),), 4, "float32", 6)
    storage.blocks.fill_(SENTINEL)
    storage.clear([0, 4])
    assert storage.blocks.any(1).tolist() == [block not in (0, 4) for block in range(storage.num_blocks)]


def _dense(storage: Storage) -> Storage:
    """A host pool of the same layout and another stride: more blocks share an extent's padding."""
    geometry = storage.geometry.with_extents(1 << 20)
    assert geometry.block_stride != storage.geometry.block_stride
    assert geometry.layout_id == storage.geometry.layout_id
    return Storage(geometry, _mapped(HostArena(1, geometry.extent_bytes)))


def _alike(storage: Storage) -> Storage:
    """A host pool of the same layout and stride."""
    geometry = storage.geometry
    return Storage(geometry, _mapped(HostArena(geometry.extents_for_blocks(storage.num_blocks), geometry.extent_bytes)))


@given(st.data(), st.sampled_from([_alike, _dense]), st.sampled_from([*DTYPES, *SCALED]))
def test_any_swap_copies_each_block_and_no_other(
    data: st.DataObject, other_pool: Callable[[Storage], Storage], dtype: str
) -> None:
    """Scenario D 33: the blocks of a table go to the slots of another pool, and come back elsewhere, bit by bit."""
    geometry = Geometry(MIXED, 4, dtype).with_extents(0)
    ours = Storage(geometry, _mapped(HostArena(geometry.extents_for_blocks(16), geometry.extent_bytes)))
    theirs = other_pool(ours)
    targets = data.draw(st.lists(st.integers(1, 15), unique=True))
    shift = data.draw(st.integers(-1, 2))  # many neighbours go to neighbours
    block = st.integers(0, 15)
    sources = [data.draw(block) if data.draw(st.integers(0, 4)) == 0 else max(0, min(15, t + shift)) for t in targets]
    ours.blocks.random_(256)
    theirs.blocks.random_(256)
    expected, payload = _expected(ours)[:, : geometry.payload_bytes], _expected(theirs)[:, : geometry.payload_bytes]
    expected[targets] = payload[sources]
    ours.copy_from(theirs, np.array(sources, np.int32), np.array(targets, np.int32))
    assert np.array_equal(_bytes(ours.blocks)[:, : geometry.payload_bytes], expected)


@pytest.mark.parametrize(
    ("sources", "targets", "says"),
    [
        *WRONG,
        ([99], [1], r"blocks \[99\] are outside the pool of 64"),
        ([1], [200], r"blocks \[200\] are outside the pool of 128"),
    ],
)
def test_wrong_swaps_change_nothing(sources: list[int], targets: list[int], says: str) -> None:
    geometry = Geometry((LayerShape(1, 8, 8),), 4, "float32").with_extents(0)
    ours, theirs = (Storage(geometry, _mapped(HostArena(n, geometry.extent_bytes))) for n in (8, 4))
    assert (ours.num_blocks, theirs.num_blocks) == (128, 64)
    ours.blocks.fill_(SENTINEL)
    with pytest.raises(BlockMisuse, match=says):
        ours.copy_from(theirs, np.array(sources), np.array(targets))
    assert (ours.blocks == SENTINEL).all()


def test_pools_of_different_layouts_exchange_nothing() -> None:
    def storage(dtype: str) -> Storage:
        geometry = Geometry((LayerShape(1, 8, 8),), 4, dtype).with_extents(0)
        return Storage(geometry, _mapped(HostArena(4, geometry.extent_bytes)))

    ours, one = storage("float32"), np.array([1])
    with pytest.raises(ValueError, match=r"float16/.* are none of .*float32/"):
        ours.copy_from(storage("float16"), one, one)
    with pytest.raises(ValueError, match="copied by `copy`"):
        ours.copy_from(ours, one, one + 1)


def test_block_bytes_of_no_block_is_refused(pool: Callable[..., Storage]) -> None:
    storage = pool((LayerShape(1, 8, 8),), 4, "float32", 6)
    with pytest.raises(BlockMisuse, match="outside"):
        storage.block_bytes(-1)


# a host arena's memory goes back at once, and its addresses read as zeros; a tensor's stays while it is seen
@pytest.mark.parametrize(("name", "left"), [("cpu host", 0.0), ("cpu tensor", 3.0)])
def test_views_outlive_arena_and_storage(name: str, left: float) -> None:
    geometry = Geometry((LayerShape(1, 8, 8),), 4, "float32").with_extents(0)
    arena = ARENAS[name](4, geometry.extent_bytes)
    key = Storage(geometry, arena).layer(0).key
    key.fill_(3.0)
    arena.close()
    del arena
    gc.collect()
    assert (key == left).all()
    key.fill_(5.0)
    assert (key == 5.0).all()


def test_an_arena_of_another_shape_is_refused() -> None:
    geometry = Geometry((LayerShape(8, 128, 128),) * 32, 16, "bfloat16").with_extents(0)
    with pytest.raises(ValueError, match="4,096 bytes, not 2,097,152"):
        Storage(geometry, HostArena(1, 4096))
    with pytest.raises(ValueError, match=r"2,097,152 bytes hold the null block alone: 4,194,304"):
        Storage(geometry, HostArena(1, geometry.extent_bytes))
    with pytest.raises(ValueError, match="on cpu, not on cuda"):
        Storage(geometry, HostArena(2, geometry.extent_bytes), "cuda")


def test_a_tensor_arena_is_mapped_as_a_whole_until_closed() -> None:
    for extents, size in ((0, 4096), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            TensorArena(extents, size, "cpu")
    arena = TensorArena(3, 4096, "cpu")
    assert (arena.num_extents, arena.extent_bytes) == (3, 4096)
    assert arena.mapped_extents == {0, 1, 2}
    assert arena.mapped_bytes == 3 * 4096
    assert not arena.buffer.any()
    arena.map([])
    arena.unmap([])
    for call in (arena.map, arena.unmap):
        with pytest.raises(BlockMisuse):
            call([1])
    arena.close()
    arena.close()
    assert (arena.mapped_extents, arena.mapped_bytes) == (frozenset(), 0)
    for act in (lambda: arena.buffer, lambda: arena.map([0]), lambda: arena.unmap([0])):
        with pytest.raises(BlockMisuse, match="closed"):
            act()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_more_than_the_device_has_is_refused_with_both_numbers(device: str) -> None:
    """Scenario J 72."""
    with pytest.raises(OutOfDeviceMemory) as refusal:
        TensorArena(1 << 14, 1 << 30, device)
    assert refusal.value.asked_bytes == 1 << 44
    assert 0 < refusal.value.free_bytes < 1 << 44


class Foreign:
    """Device memory of someone else: what an arena on the driver's virtual-memory API hands out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__
        self._owner = tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_cuda_array_interface_is_not_copied() -> None:
    geometry = Geometry((LayerShape(1, 8, 8),), 4, "float32").with_extents(0)
    arena = TensorArena(4, geometry.extent_bytes, "cuda")
    memory = arena.buffer
    arena._buffer = Foreign(memory)  # type: ignore[assignment]
    storage = Storage(geometry, arena, "cuda")
    storage.layer(0).value[3] = 1.0
    assert storage.blocks.data_ptr() == memory.data_ptr()
    assert memory.any()


def test_pieces_are_what_a_copy_copies() -> None:
    """Neighbours as one where the pools have one stride; else each by itself. With a device they end with its extents."""
    geometry = Geometry((LayerShape(1, 8, 8),), 4, "float32").with_extents(0)  # 256 bytes, 16 to an extent
    ours, theirs = (Storage(geometry, _mapped(HostArena(n, geometry.extent_bytes))) for n in (8, 4))
    sources, targets = np.array([30, 31, 32, 9]), np.array([98, 99, 100, 1], np.int32)
    pieces = ours.pieces_from(theirs, sources, targets)
    assert (pieces.sources is sources, pieces.targets is targets) == (True, True)
    assert pieces.reads.tolist() == [9 * 256, 30 * 256]
    assert pieces.writes.tolist() == [256, 98 * 256]
    assert pieces.sizes.tolist() == [256, 3 * 256]
    assert {array.dtype for array in (pieces.reads, pieces.writes, pieces.sizes)} == {np.dtype(np.int64)}
    ours.device = torch.device("cuda")  # as far as copies are concerned
    assert ours.pieces_from(theirs, sources, targets).sizes.tolist() == [256, 2 * 256, 256]
    nothing = ours.pieces_from(theirs, sources[:0], targets[:0])
    assert [len(array) for array in (nothing.reads, nothing.writes, nothing.sizes)] == [0, 0, 0]
