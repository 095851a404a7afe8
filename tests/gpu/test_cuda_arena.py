"""The CUDA arena on a real device: the contract, the bytes as the driver counts them, and torch's kernels."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from arena_contract import ArenaContract, Rig
from extent_core import core_in_extents
from monitors import wait_until
from scripted_lease import ScriptedLease

from pagetide.allocator.arena import Arena
from pagetide.allocator.cuda_arena import CudaArena, CudaBuffer
from pagetide.allocator.cuda_driver import CudaBindings
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.scheduler.request import Request, Sampling

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings: pip install 'pagetide[cuda]'", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
GIB = 1 << 30
INDEX = 0
DEVICE = torch.device("cuda", INDEX)
NOISE = 64 * MIB  # page tables, and whatever else the driver keeps


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Every test begins with a device at rest, and ends without arenas or their threads."""
    torch.zeros(1, device=DEVICE)  # torch's own share is taken before anything is counted
    torch.cuda.synchronize(DEVICE)
    yield
    torch.cuda.synchronize(DEVICE)  # a fault on the device is reported by the test it came from
    gc.collect()
    wait_until(lambda: not any(thread.name == "pagetide-extents" for thread in threading.enumerate()))


def free_bytes() -> int:
    """What nobody holds, when the device has nothing to do any more."""
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def ready(arena: CudaArena) -> int:
    """Bytes that it holds though not mapped, at most."""
    return arena.held.upper_bytes - arena.mapped_bytes


class Piece:
    """One extent for torch: it keeps the whole range alive, as a view of it would."""

    def __init__(self, arena: CudaArena, extent: int) -> None:
        self.owner = arena._buffer
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (arena.extent_bytes,),
            "strides": None,
            "data": (arena._range._address(extent), False),
        }


def piece(arena: Arena, extent: int) -> torch.Tensor:
    """uint8 [extent_bytes]: one mapped extent, extent 0 mapped or not."""
    assert isinstance(arena, CudaArena)
    return torch.as_tensor(Piece(arena, extent), device=DEVICE)


def fill(arena: Arena, extent: int, value: int) -> None:
    piece(arena, extent).fill_(value)
    torch.cuda.synchronize(DEVICE)  # the fence


def whole(arena: CudaArena) -> torch.Tensor:
    """uint8 [num_extents * extent_bytes]: all addresses. Extent 0 must be mapped."""
    tensor = torch.as_tensor(arena.buffer, device=DEVICE)
    assert tensor.data_ptr() == arena._range.base
    return tensor


@pytest.mark.parametrize("ready_limit_bytes", [0, 1 << 30], ids=["nothing ready", "all ready"])
class TestContract(ArenaContract):
    num_rounds = 30

    @pytest.fixture
    def rig(self, ready_limit_bytes: int) -> Rig:
        granule = CudaArena.granule_bytes(INDEX)
        fence = threading.RLock()
        return Rig(
            granule,
            lambda n, budget=None: CudaArena(n, granule, INDEX, budget=budget, ready_limit_bytes=ready_limit_bytes),
            lambda arena, extent: piece(arena, extent).cpu().numpy().tobytes(),
            fill,
            lambda: fence,
        )


def test_the_granule_is_a_power_of_two() -> None:
    granule = CudaArena.granule_bytes(INDEX)
    assert granule >= 64 << 10 and granule & (granule - 1) == 0


def nvml_used_bytes() -> int:
    """What NVML says is used of the same device."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML does not tell of this device: {error}")
    return int(memory.total - memory.free)


@pytest.mark.parametrize("used", [lambda: -free_bytes(), nvml_used_bytes], ids=["cuMemGetInfo", "NVML"])
def test_the_devices_memory_goes_with_map_and_comes_back_with_unmap(used: Callable[[], int]) -> None:
    before = used()
    arena = CudaArena(64, 64 * MIB, INDEX, ready_limit_bytes=GIB)  # 4 GiB of addresses

    def more() -> int:
        return used() - before

    assert more() < NOISE
    arena.map(range(8))
    assert 512 * MIB <= more() < 512 * MIB + NOISE
    arena.unmap([1, 2, 3, 4])
    arena.trim()
    assert 256 * MIB <= more() < 256 * MIB + NOISE
    assert (arena.mapped_bytes, arena.held.upper_bytes) == (256 * MIB, 256 * MIB)
    arena.map([60, 61])
    assert 384 * MIB <= more() < 384 * MIB + NOISE
    arena.prepare(4)
    wait_until(lambda: more() >= 640 * MIB)
    assert more() < 640 * MIB + NOISE  # held ready, though not mapped
    assert ready(arena) == 256 * MIB
    arena.trim()
    assert 384 * MIB <= more() < 384 * MIB + NOISE
    arena.close()
    assert more() < NOISE


@pytest.mark.parametrize("asks_first", [True, False])
def test_more_than_the_device_has_is_refused_and_nothing_is_lost(asks_first: bool) -> None:
    before = free_bytes()
    extents = before // GIB + 2
    lies = iter([] if asks_first else [1 << 60, 1 << 60])  # before each of two maps: the driver itself must refuse then
    arena = CudaArena(extents, GIB, INDEX, budget=lambda: next(lies, None) or free_bytes())
    arena.map([0])
    fill(arena, 0, 7)
    with pytest.raises(OutOfDeviceMemory, match=f"memory on cuda:{INDEX}") as refusal:
        arena.map(range(1, extents))
    assert refusal.value.asked_bytes == (extents - 1) * GIB
    assert before - GIB - NOISE < refusal.value.free_bytes <= before
    assert (arena.mapped_extents, arena.held.upper_bytes) == ({0}, GIB)
    assert abs(before - GIB - free_bytes()) < NOISE
    assert bool((piece(arena, 0) == 7).all())
    arena.map([1])
    assert bool((piece(arena, 1) == 0).all())
    arena.close()
    assert abs(before - free_bytes()) < NOISE


def test_kernels_write_and_read_through_one_view_across_extents() -> None:
    arena = CudaArena(8, 2 * MIB, INDEX)
    arena.map([0, 1, 2, 3])
    numbers = whole(arena).view(torch.float32)  # [8 * 2 MiB / 4]
    mapped = numbers[: 8 * MIB // 4]
    mapped.copy_(torch.arange(len(mapped), dtype=torch.float32))
    torch.cuda.synchronize(DEVICE)
    arena.map([4, 7])
    assert torch.equal(mapped.cpu(), torch.arange(len(mapped), dtype=torch.float32))
    seam = mapped[MIB // 2 - 512 : MIB // 2 + 512].view(32, 32)  # half of it in extent 0, half in extent 1
    expected = seam.cpu().double() @ seam.cpu().double()
    assert torch.allclose((seam.double() @ seam.double()).cpu(), expected)
    mapped.mul_(2)
    assert float(numbers[MIB]) == 2.0 * MIB
    torch.cuda.synchronize(DEVICE)
    arena.close()


def test_a_tensor_owns_the_addresses() -> None:
    arena = CudaArena(4, 2 * MIB, INDEX)
    arena.map([0])
    owner: weakref.ref[CudaBuffer] = weakref.ref(arena.buffer)
    tensor = whole(arena)[MIB:].view(torch.float16).view(-1, 128)  # a view of a view
    arena.close()
    del arena
    gc.collect()
    assert owner() is not None
    del tensor
    gc.collect()
    assert owner() is None


def test_an_arena_that_nobody_closed_ends_behind_the_last_kernel() -> None:
    before = free_bytes()
    arena = CudaArena(16, 64 * MIB, INDEX)
    arena.map(range(16))
    tensor = whole(arena)
    for value in range(200):  # some tens of milliseconds of work, still running when the arena goes
        tensor.fill_(value)
    del arena, tensor
    gc.collect()
    torch.cuda.synchronize(DEVICE)  # no fault
    assert abs(before - free_bytes()) < NOISE


def test_the_callers_device_and_context_are_left_alone() -> None:
    current = torch.cuda.current_device()
    arena = CudaArena(2, 2 * MIB, torch.cuda.device_count() - 1)
    arena.map([0, 1])
    arena.unmap([1])
    arena.trim()
    assert torch.cuda.current_device() == current
    assert float(torch.ones(4, device=DEVICE).sum()) == 4
    arena.close()


@pytest.mark.parametrize("first", ["arena", "torch"])
def test_torch_and_the_arena_share_one_context_whoever_comes_first(first: str) -> None:
    program = f"""
from pagetide.allocator.cuda_arena import CudaArena
def make():
    arena = CudaArena(4, {2 * MIB}, {INDEX})
    arena.map([0, 1])
    return arena
if {first!r} == "arena":
    arena = make()
import torch
torch.ones(1, device="cuda:{INDEX}")
if {first!r} == "torch":
    arena = make()
tensor = torch.as_tensor(arena.buffer, device="cuda:{INDEX}")[:{4 * MIB}]
tensor.fill_(3)
assert int(tensor.sum()) == 3 * {4 * MIB}
del tensor
arena.close()
del arena
assert float(torch.ones(4, device="cuda:{INDEX}").sum()) == 4  # the context is still torch's
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_a_process_that_ends_with_everything_in_use_ends_well() -> None:
    program = f"""
import torch
from pagetide.allocator.cuda_arena import CudaArena
arena = CudaArena(64, {2 * MIB}, {INDEX}, ready_limit_bytes={GIB})
arena.map(range(8))
tensor = torch.as_tensor(arena.buffer, device="cuda:{INDEX}")[:{16 * MIB}]
arena.prepare(50)
for _ in range(100):
    tensor.add_(1)
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "Exception" not in run.stderr


def test_offsets_beyond_two_to_the_31_elements() -> None:
    granule = CudaArena.granule_bytes(INDEX)
    geometry = Geometry((LayerShape(8, 128, 128),) * 2, 16, "float16", granule, 32 * MIB)
    arena = CudaArena((9 * GIB) // geometry.extent_bytes, geometry.extent_bytes, INDEX)  # 9 GiB of addresses
    arena.map([0, arena.num_extents - 1])  # and 64 MiB of memory
    storage = Storage(geometry, arena, DEVICE)
    last = storage.num_blocks - 1
    layer = storage.layer(1)
    assert last * geometry.block_stride // geometry.itemsize > 1 << 32

    where = torch.tensor([last, last], device=DEVICE), torch.tensor([3, 15], device=DEVICE)
    new = torch.randn(2, 8, 128, device=DEVICE).to(torch.float16)
    layer.value[where] = new
    assert torch.equal(layer.value[where], new)
    storage.copy(np.array([last]), np.array([1]))
    assert torch.equal(layer.value[1, [3, 15]], new)
    storage.layer(0).key[1, 0] = new[0]
    storage.copy(np.array([1]), np.array([last - 1]))
    assert torch.equal(storage.layer(0).key[last - 1, 0], new[0])
    storage.clear([last])
    assert not bool(storage.blocks[last].any())
    assert arena.held.upper_bytes == 2 * geometry.extent_bytes
    torch.cuda.synchronize(DEVICE)
    arena.close()


def test_resizing_between_kernels_keeps_what_lives() -> None:
    extent_bytes, num_extents = 8 * MIB, 24
    arena = CudaArena(num_extents, extent_bytes, INDEX, ready_limit_bytes=64 * MIB)
    arena.map([0])
    extents = whole(arena).view(torch.int32).view(num_extents, -1)
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    generator = np.random.default_rng(7)
    model = {0: 0}
    for _ in range(150):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(DEVICE))
        for extent in model:  # kernels on two streams
            with torch.cuda.stream(streams[extent % 2]):
                extents[extent].add_(extent + 1)
            model[extent] += extent + 1
        arena.prepare(int(generator.integers(0, 4)))  # beside them
        torch.cuda.synchronize(DEVICE)  # the fence
        going = [extent for extent in model if extent and generator.random() < 0.3]
        arena.unmap(going)
        for extent in going:
            del model[extent]
        coming = [extent for extent in range(num_extents) if extent not in model and generator.random() < 0.3]
        arena.map(coming)
        model |= dict.fromkeys(coming, 0)
    for extent, value in model.items():
        assert bool((extents[extent] == value).all()), extent
    assert arena.drain_failures() == []
    torch.cuda.synchronize(DEVICE)
    arena.close()


def test_a_captured_graph_survives_every_resize() -> None:
    arena = CudaArena(16, 8 * MIB, INDEX, ready_limit_bytes=64 * MIB)
    arena.map([0, 3, 4])
    numbers = whole(arena).view(torch.int32).view(16, -1)
    live = numbers[3:5]
    live.add_(1)  # warm
    torch.cuda.synchronize(DEVICE)
    arena.trim()  # nothing in the background while it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        live.add_(1)
    for turn in range(20):
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        if turn % 2:
            arena.unmap([1, 2, 9])
        else:
            arena.map([1, 2, 9])
    assert bool((live == 21).all())
    torch.cuda.synchronize(DEVICE)
    del graph
    arena.close()


class Told:
    """The driver, and who called it."""

    def __init__(self) -> None:
        self.driver, self.called = CudaBindings(), Counter[tuple[str, str]]()  # (call, thread)

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        self.called[name, threading.current_thread().name] += 1
        return self.driver.call(name, *args)

    def pause(self, seconds: float) -> None:
        self.driver.pause(seconds)


def test_an_engines_extents_are_made_ahead_of_need_and_what_is_held_is_what_the_driver_says() -> None:
    extent_bytes, base = 64 * MIB, GIB
    before, driver, now = free_bytes(), Told(), [0.0]
    lease: Any = ScriptedLease(base + 40 * extent_bytes, base + 2 * extent_bytes, base)
    inner = CudaArena(32, extent_bytes, INDEX, driver=driver, ready_limit_bytes=8 * extent_bytes)
    arena = LeasedArena(inner, lease)
    arena.map([0, 1])
    core = core_in_extents(arena)
    held = BaseMemory(lambda: base, weights_bytes=0, reserve_bytes=0, trim=lambda: None)
    pool = SchedulerPoolUse(lambda: core.scheduler, PoolBounds(32, 2, extent_bytes, idle_s=5.0))
    core.memory = EngineMemory(pool, arena, held, lease=lease, clock=lambda: now[0])
    core.memory._timer.mapping.num_bytes = 2 * extent_bytes
    core.memory._timer.mapping.record = lambda *_: None  # type: ignore[method-assign]

    def step() -> None:
        now[0] += 0.025
        torch.cuda.synchronize(DEVICE)  # the fence
        core.step()
        wait_until(lambda: not inner._range.pool._working)
        assert abs(lease.held_bytes - base - (before - free_bytes())) < extent_bytes + NOISE

    for number in range(4):
        core.add(Request(f"r{number}", np.arange(400, dtype=np.int32), Sampling(20), 0, float(number)))
        step()
    while core.scheduler.has_work:
        step()
    grown = arena.mapped_bytes // extent_bytes - 2
    assert grown >= 16
    assert driver.called["cuMemCreate", "pagetide-extents"] >= grown // 3, "all but the first of each request's"
    lease.recall_to(base + 4 * extent_bytes)
    step()
    assert lease.answered == [base + 4 * extent_bytes]
    assert abs(before - free_bytes() - 4 * extent_bytes) < NOISE
    core.memory.close()
    arena.close()
    assert lease.held_bytes == base and abs(before - free_bytes()) < NOISE
