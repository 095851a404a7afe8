"""The CUDA arena on a real device: the contract, the bytes as the driver counts them, torch's kernels, and what calls cost."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from arena_contract import ArenaContract, Rig
from extent_core import core_in_extents
from scripted_lease import ScriptedLease

from pagetide.allocator.arena import Arena
from pagetide.allocator.cuda_arena import CudaArena, CudaBuffer
from pagetide.allocator.cuda_driver import CudaBindings, CudaDevice
from pagetide.allocator.errors import BlockMisuse, OutOfDeviceMemory
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.scheduler.request import Request, Sampling

try:
    import cuda.bindings.driver  # noqa: F401

    HAS_BINDINGS = True
except ImportError:
    HAS_BINDINGS = False

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not HAS_BINDINGS, reason="needs cuda-bindings: pip install 'pagetide[cuda]'"),
]

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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute in vain"
        time.sleep(0.001)


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
    num_examples = 10
    num_rounds = 30

    @pytest.fixture
    def rig(self, ready_limit_bytes: int) -> Rig:
        extent_bytes = CudaArena.granule_bytes(INDEX)
        fence = threading.RLock()
        return Rig(
            extent_bytes,
            lambda n, budget=None: CudaArena(
                n, extent_bytes, INDEX, budget=budget, ready_limit_bytes=ready_limit_bytes
            ),
            lambda arena, extent: piece(arena, extent).cpu().numpy().tobytes(),
            fill,
            lambda: fence,
        )


# --- bytes


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


def test_memory_that_was_written_comes_back_as_zeros() -> None:
    for ready_limit_bytes in (0, GIB):
        arena = CudaArena(8, 32 * MIB, INDEX, ready_limit_bytes=ready_limit_bytes)
        for _ in range(5):
            arena.map(range(8))
            assert all(not bool(piece(arena, extent).any()) for extent in range(8))
            for extent in range(8):
                fill(arena, extent, 0xEE)
            arena.unmap(range(8))
        arena.close()


# --- torch


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


def test_wrapping_again_and_again_leaves_no_reference() -> None:
    arena = CudaArena(1, 2 * MIB, INDEX)
    arena.map([0])
    buffer = arena.buffer
    before = sys.getrefcount(buffer)
    for _ in range(1000):
        whole(arena)
    assert sys.getrefcount(buffer) == before
    arena.close()


def test_what_is_not_mapped_cannot_be_wrapped() -> None:
    arena = CudaArena(2, 2 * MIB, INDEX)
    arena.map([1])
    with pytest.raises(BlockMisuse, match="map extent 0"):
        arena.buffer  # noqa: B018
    arena.close()


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


# --- a pool


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


def test_an_engines_extents_are_made_ahead_of_need_and_what_is_held_is_what_the_driver_says() -> None:
    extent_bytes, base = 64 * MIB, GIB
    before, driver, now = free_bytes(), Told(), [0.0]
    lease: Any = ScriptedLease(base + 40 * extent_bytes, base + 2 * extent_bytes, base)
    inner = CudaArena(32, extent_bytes, INDEX, driver=driver, ready_limit_bytes=8 * extent_bytes)
    arena = LeasedArena(inner, lease)
    arena.map([0, 1])
    core = core_in_extents(arena)
    core.memory = EngineMemory(
        lambda: core.scheduler, arena, min_extents=2, base_bytes=lambda: base, reserve_bytes=0, weights_bytes=0,
        trim=lambda: None, lease=lease, idle_s=5.0, clock=lambda: now[0],
    )  # fmt: skip
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


# --- what calls cost: printed, not judged; what is judged is that all of it happened, and that the memory is back


def _microseconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - begin) / 1000


@pytest.mark.parametrize("mib", [2, 32, 64, 128])
def test_what_the_calls_of_one_extent_cost(mib: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = free_bytes()
    driver, size = CudaBindings(), mib * MIB
    call = driver.call
    device = CudaDevice(driver, INDEX)
    count = max(7, GIB // size)
    names = ("create", "map", "set access", "zero", "unmap", "release")
    costs: dict[str, list[float]] = {name: [] for name in names}
    with device.current():
        (base,) = call("cuMemAddressReserve", count * size, 0, 0, 0)
        (stream,) = call("cuStreamCreate", 1)
        handles = []
        addresses = [base + index * size for index in range(count)]

        def zero(address: int) -> None:
            call("cuMemsetD32Async", address, 0, size // 4, stream)
            call("cuStreamSynchronize", stream)

        for address in addresses:
            costs["create"].append(_microseconds(lambda: handles.extend(call("cuMemCreate", size, device.number, 0))))
            costs["map"].append(_microseconds(lambda at=address: call("cuMemMap", at, size, 0, handles[-1], 0)))
            costs["set access"].append(
                _microseconds(lambda at=address: call("cuMemSetAccess", at, size, device.number))
            )
            costs["zero"].append(_microseconds(lambda at=address: zero(at)))
        assert abs(before - free_bytes() - count * size) < NOISE
        for address in addresses:
            costs["unmap"].append(_microseconds(lambda at=address: call("cuMemUnmap", at, size)))
        for handle in handles:
            costs["release"].append(_microseconds(lambda h=handle: call("cuMemRelease", h)))
        call("cuStreamDestroy", stream)
        call("cuMemAddressFree", base, count * size)
    device.close()
    assert abs(before - free_bytes()) < NOISE
    assert all(len(values) == count and min(values) > 0 for values in costs.values())
    medians = {name: statistics.median(values) for name, values in costs.items()}
    with capsys.disabled():
        print(
            f"\n{mib:4d} MiB extents on {torch.cuda.get_device_name(DEVICE)}, medians of {count}, µs per call:", end=""
        )
        print("".join(f"  {name} {value:.1f}" for name, value in medians.items()), end="")
        print(f"  -> {sum(medians.values()) / mib:.2f} µs/MiB")


@pytest.mark.parametrize("mib", [2, 32, 64, 128])
def test_what_a_gib_costs(mib: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = free_bytes()
    count = GIB // (mib * MIB)
    names = ("map", "unmap", "trim", "map what is prepared", "unmap in background")
    costs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(7):
        arena = CudaArena(count, mib * MIB, INDEX, ready_limit_bytes=0)
        costs["map"].append(_microseconds(lambda a=arena: a.map(range(count))))
        assert arena.mapped_bytes == arena.held.upper_bytes == GIB
        costs["unmap"].append(_microseconds(lambda a=arena: a.unmap(range(count))))  # and release
        assert arena.held.upper_bytes == 0
        arena.close()
        arena = CudaArena(count, mib * MIB, INDEX, ready_limit_bytes=GIB)
        arena.prepare(count)
        arena._range.pool._thread.join()  # type: ignore[union-attr]
        assert ready(arena) == GIB
        costs["map what is prepared"].append(_microseconds(lambda a=arena: a.map(range(count))))
        assert (arena.mapped_bytes, ready(arena)) == (GIB, 0)
        costs["unmap in background"].append(_microseconds(lambda a=arena: a.unmap(range(count))))
        assert arena.mapped_bytes == 0
        costs["trim"].append(_microseconds(arena.trim))
        assert arena.held.upper_bytes == 0
        arena.close()
    assert abs(before - free_bytes()) < NOISE
    with capsys.disabled():
        print(f"\n   1 GiB in {mib} MiB extents, medians of 7, ms:", end="")
        print("".join(f"  {name} {statistics.median(values) / 1000:.2f}" for name, values in costs.items()))


def test_an_arena_gives_zeros_whether_the_driver_does_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The driver promises nothing. What it does is printed, so that nobody has to guess."""
    before = free_bytes()
    driver, size = CudaBindings(), 64 * MIB
    call = driver.call
    device = CudaDevice(driver, INDEX)
    found = []
    with device.current():
        (base,) = call("cuMemAddressReserve", size, 0, 0, 0)
        for _ in range(5):
            (handle,) = call("cuMemCreate", size, device.number, 0)
            call("cuMemMap", base, size, 0, handle, 0)
            call("cuMemSetAccess", base, size, device.number)
            tensor = torch.as_tensor(_At(base, size), device=DEVICE)
            found.append(int(tensor.count_nonzero()))
            tensor.fill_(0xEE)
            torch.cuda.synchronize(DEVICE)
            del tensor
            call("cuMemUnmap", base, size)
            call("cuMemRelease", handle)
        call("cuMemAddressFree", base, size)
    device.close()
    arena = CudaArena(1, size, INDEX)
    arena.map([0])  # the same memory again, as far as the driver likes
    assert int(piece(arena, 0).count_nonzero()) == 0
    arena.close()
    assert abs(before - free_bytes()) < NOISE
    with capsys.disabled():
        print(f"\n   of {size:,} bytes just created, after the same were written and released, not zero: {found}")


class _At:
    """Bytes at an address, for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "strides": None,
            "data": (address, False),
        }
