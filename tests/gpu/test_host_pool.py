"""The host tier's copies from and to a CUDA device, by every way: exact, out of locked pages, in the order of the streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything has kernels: there they are interpreted
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install pagetide[cuda]")

from pagetide.allocator.cuda_arena import CudaArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage
from pagetide.engine.execution.host_pool import NONE, HostPool

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SENTINEL = 0xAB
SHAPES = [  # bytes of a block: 20 KiB, 2 MiB, and few
    Geometry((LayerShape(4, 40, 40),) * 2, 16, "float16"),
    Geometry((LayerShape(8, 128, 128),) * 32, 16, "bfloat16"),
    Geometry((LayerShape(1, 15, 20),), 3, "float16"),
]
WAYS = ["runs", "batch", "kernel"]


class Rig:
    """An arena of extents whose even ones alone are mapped, full of a sentinel, and a host pool."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = replace(geometry, granule_bytes=2 * MIB).with_extents(4 * MIB)
        self.arena = CudaArena(8, self.geometry.extent_bytes)
        self.arena.map(range(0, 8, 2))
        self.storage = Storage(self.geometry, self.arena, "cuda")
        per = self.geometry.blocks_per_extent
        self.blocks = np.concatenate([np.arange(i * per, (i + 1) * per) for i in range(0, 8, 2)])[1:].astype(np.int32)
        self.storage.blocks[torch.from_numpy(self.blocks).long().cuda()] = SENTINEL
        self.pool = HostPool(self.geometry, 8 * self.geometry.extent_bytes)

    def by(self, name: str) -> None:
        """Swap by one way, or skip where the device does not have it."""
        fastest = self.pool._cuda_of(self.storage).fastest
        way = next((way for way in fastest.ways if way.name == name), None)
        if way is None:
            pytest.skip(f"there is no {name} here")
        fastest.out = fastest.back = ((1, way),)

    def took(self, name: str) -> bool:
        """Whether that way did it: one that fails is replaced."""
        return self.pool._cuda_of(self.storage).fastest.out[0][1].name == name

    def fill(self, blocks: np.ndarray, seed: int) -> torch.Tensor:
        """Give them bytes: uint8 [n, payload_bytes] on the host."""
        shape = len(blocks), self.geometry.payload_bytes
        content = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
        index = torch.from_numpy(blocks).long().cuda()
        self.storage.blocks[index, : self.geometry.payload_bytes] = content.cuda()
        return content

    def read(self, blocks: np.ndarray) -> torch.Tensor:
        return self.storage.blocks[torch.from_numpy(blocks).long().cuda(), : self.geometry.payload_bytes].cpu()

    def close(self) -> None:
        self.pool.close()
        torch.cuda.synchronize()
        self.arena.close()


@pytest.fixture(params=SHAPES, ids=["20 KiB", "2 MiB", "248 B"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def small() -> Iterator[Rig]:
    rig = Rig(SHAPES[0])
    yield rig
    rig.close()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_go_out_and_come_back_and_nothing_else_is_written(rig: Rig, name: str, seed: int) -> None:
    """With neighbours and without, over the borders of what is locked and mapped at a time; holes on the device."""
    rng = np.random.default_rng(seed)
    rig.by(name)
    num = min(len(rig.blocks) // 3, 300)
    drawn = rig.blocks[: 2 * num] if seed == 0 else rng.permutation(rig.blocks)[: 2 * num]
    blocks, back = drawn[:num], drawn[num:]
    slots = np.arange(1, rig.pool.num_slots + 1, dtype=np.int32)
    slots = slots[:num] if seed == 0 else rng.permutation(slots)[:num]
    content = rig.fill(blocks, seed)
    assert not len(rig.pool.swap(rig.storage, blocks, slots).lost_slots)
    rig.storage.clear(blocks)
    rig.pool._extents._settle()
    assert rig.pool._extents.all_locked
    timed = rig.pool.swap(rig.storage, NONE, NONE, slots, back)
    assert timed.num_timed == num and timed.seconds > 0
    assert torch.equal(rig.read(back), content)
    others = np.setdiff1d(rig.blocks, drawn)
    assert (rig.read(others) == SENTINEL).all()
    assert not rig.read(blocks).any()
    host = rig.pool.storage.blocks
    assert torch.equal(host[torch.from_numpy(slots).long(), : rig.geometry.payload_bytes], content)
    per = rig.geometry.blocks_per_extent
    mapped = np.concatenate([np.arange(e * per, (e + 1) * per) for e in rig.pool._extents.mapped])
    assert not host[torch.from_numpy(np.setdiff1d(mapped, slots)), : rig.geometry.payload_bytes].any()
    assert rig.took(name)


@pytest.mark.parametrize("name", WAYS)
def test_copies_see_what_was_queued_before_and_not_what_is_queued_behind_their_fence(small: Rig, name: str) -> None:
    """The host waits for nothing between: a long computation, then the blocks are written, swapped, and overwritten."""
    small.by(name)
    half = len(small.blocks) // 2
    blocks, back = small.blocks[:half], small.blocks[half : 2 * half]
    slots = np.arange(1, half + 1, dtype=np.int32)
    small.pool.swap(small.storage, blocks, slots, slots, back)  # takes the memory, and compiles
    small.pool._extents._settle()
    content = small.fill(blocks, 1).cuda()
    contents = [content ^ turn for turn in range(5)]  # now: a kernel that is loaded may wait for those that run
    index, target = (torch.from_numpy(ids).long().cuda() for ids in (blocks, back))
    payload = small.geometry.payload_bytes
    torch.cuda.synchronize()
    for content in contents:
        busy = torch.cuda.Event()
        torch.cuda._sleep(50_000_000)
        small.storage.blocks[index, :payload] = content
        copies = small.pool.begin(small.storage, blocks, slots, slots, back)
        busy.record()
        assert not busy.query(), "nobody has waited for the device"
        copies.fence()
        small.storage.blocks[index, :payload] = 0  # an owner to come
        came = small.storage.blocks[target, :payload].clone()
        assert len(copies.wait().lost_slots) == 0
        assert torch.equal(came, content)
        assert not small.read(blocks).any()
    assert small.took(name)


def test_copies_run_beside_a_computation_that_is_queued_behind_them(small: Rig) -> None:
    blocks = small.blocks[:8]
    slots = np.arange(1, 9, dtype=np.int32)
    content = small.fill(blocks, 2)
    small.pool.swap(small.storage, blocks, slots)
    torch.cuda.synchronize()
    copies = small.pool.begin(small.storage, blocks, slots, NONE, NONE)
    torch.cuda._sleep(2_000_000_000)  # about a second, of the compute stream
    computed = torch.cuda.Event()
    computed.record()
    copies._ended.synchronize()  # what `wait` does beside the fence
    assert not computed.query(), "they ended first"
    copies.wait()
    small.storage.clear(blocks)
    small.pool.swap(small.storage, NONE, NONE, slots, blocks)
    assert torch.equal(small.read(blocks), content)


def test_ways_are_measured_at_the_start_and_leave_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        measured = rig.pool.measure(rig.storage, rig.geometry.blocks_per_extent - 1)
    assert measured is not None and measured > 1e6
    assert rig.pool.mapped_bytes == 0
    fastest = rig.pool._cuda_of(rig.storage).fastest
    for chosen in fastest.out, fastest.back:
        assert chosen[0][0] == 1 and [least for least, _ in chosen] == sorted({least for least, _ in chosen})
    print([record.getMessage() for record in caplog.records])
    assert "swaps out of the device go by" in caplog.text
    assert "left out" not in caplog.text


def test_memory_is_given_back_unlocked(small: Rig) -> None:
    slots = np.arange(1, 9, dtype=np.int32)
    small.pool.swap(small.storage, small.blocks[:8], slots)
    small.pool._extents._settle()
    assert small.pool._extents._locked == small.pool._extents.mapped and len(small.pool._extents.mapped) == 2
    small.pool.give_back(small.pool.mapped_bytes)
    assert not small.pool._extents._locked and small.pool.mapped_bytes == 0
    small.pool.swap(small.storage, small.blocks[:8], slots)
    assert torch.equal(small.pool.storage.blocks[1:9, :4], torch.full((8, 4), SENTINEL, dtype=torch.uint8))
