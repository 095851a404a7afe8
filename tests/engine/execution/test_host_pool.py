"""The host pool with a CUDA device that is not there: which stream waits for what, who waits for the device, and the bytes.

torch's streams and events are stand-ins that write down what is asked of them; the driver is the fake one, whose copies are
made when its stream is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fake_cuda_driver import OUT_OF_MEMORY, FakeCudaDriver, Fault

from pagetide.allocator.cuda_driver import CudaDevice
from pagetide.allocator.errors import DriverUnavailable
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage
from pagetide.engine.execution import host_pool
from pagetide.engine.execution.host_pool import NONE, HostPool

GEOMETRY = Geometry((LayerShape(3, 5, 7),), 16, "float16").with_extents(8 << 10)
CUDA = torch.device("cuda", 0)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


class Cuda:
    """What of torch.cuda a host pool uses. `log` says what was asked for, in order."""

    def __init__(self, driver: FakeCudaDriver, context: CudaDevice) -> None:
        self.driver = driver
        self.context = context
        self.log: list[str] = []
        self.now_ms = 0.0
        self.compute = Stream(self, "compute")
        self.current = self.compute

    def Stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        return Stream(self, "swaps")

    def Event(self, enable_timing: bool) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before


class Stream:
    """A stream of torch's over one of the driver's."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name, self.device = cuda, name, CUDA
        with cuda.context.current():
            (self.cuda_stream,) = cuda.driver.call("cuStreamCreate", 1)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"the host waits for {self.name}")
        with self.cuda.context.current():
            self.cuda.driver.call("cuStreamSynchronize", self.cuda_stream)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.stream = self.cuda.current
        self.cuda.log.append(f"an event in {self.stream.name}")
        self.cuda.now_ms += 8.0
        self.at_ms = self.cuda.now_ms

    def synchronize(self) -> None:
        self.stream.synchronize()

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


class Rig:
    """A pool of 60 blocks, which says that it is a device's, and a host pool of eight extents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = FakeCudaDriver()
        self.context = CudaDevice(self.driver, 0)
        self.cuda = Cuda(self.driver, self.context)
        for name in "Stream", "Event", "stream", "current_stream":
            monkeypatch.setattr(torch.cuda, name, getattr(self.cuda, name))
        monkeypatch.setattr(host_pool, "CudaBindings", lambda: self.driver)
        self.arena = HostArena(GEOMETRY.extents_for_blocks(60), GEOMETRY.extent_bytes)
        self.arena.map(range(self.arena.num_extents))
        self.storage = Storage(GEOMETRY, self.arena)
        self.storage.device = CUDA
        with self.context.current():
            for i in range(self.arena.num_extents):
                address = self.storage.blocks.data_ptr() + i * GEOMETRY.extent_bytes
                self.driver.call("cuMemHostRegister", address, GEOMETRY.extent_bytes, 3)
        self.of_device = set(self.driver.locked)
        self.pool = HostPool(GEOMETRY, 8 * GEOMETRY.extent_bytes)

    def batches(self) -> None:
        """Let every swap be a batch."""
        fastest = self.pool._cuda_of(self.storage).fastest
        fastest.out = fastest.back = ((1, fastest.ways[1]),)

    def payloads(self, blocks: np.ndarray) -> np.ndarray:
        return self.storage.blocks.numpy()[blocks, : GEOMETRY.payload_bytes]

    def slots(self, slots: np.ndarray) -> np.ndarray:
        return self.pool.storage.blocks.numpy()[slots, : GEOMETRY.payload_bytes]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.pool.close()
    rig.pool.close()
    assert rig.pool.mapped_bytes == 0 and set(rig.driver.locked) == rig.of_device
    assert rig.driver.violations == []
    assert rig.driver._retained[0] == 1, "the test's own"


def test_copies_begin_behind_what_is_queued_and_nobody_waits_before_the_end(rig: Rig) -> None:
    rig.batches()
    rig.storage.blocks.random_(256)
    content = rig.storage.blocks.numpy().copy()
    blocks, slots, back = ids(9, 3, 4), ids(1, 20, 21), ids(40, 41, 50)
    rig.cuda.log.clear()
    copies = rig.pool.begin(rig.storage, blocks, slots, slots, back)
    begun = ["swaps waits for compute", "an event in swaps", "an event in swaps"]
    assert rig.cuda.log == begun
    assert not rig.slots(slots).any(), "the driver has not come to it"
    copies.fence()
    assert rig.cuda.log == [*begun, "compute waits for an event of swaps"], "the host goes on"
    swapped = copies.wait()
    assert rig.cuda.log[4:] == ["compute waits for an event of swaps", "the host waits for swaps"]
    assert (len(swapped.lost_slots), swapped.num_timed, swapped.seconds) == (0, 6, 0.008)
    payload = GEOMETRY.payload_bytes
    assert (rig.slots(slots) == content[blocks, :payload]).all()
    assert (rig.payloads(back) == content[blocks, :payload]).all(), "in behind out"
    others = np.setdiff1d(np.arange(60), back)
    assert (rig.storage.blocks.numpy()[others] == content[others]).all()
    assert rig.driver.calls.count("cuMemcpyBatchAsync") == 2


def test_ways_are_measured_and_leave_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Every copy takes as long by the stand-in's clock, so the first way stays; the kernel has no device, and is left out."""
    assert rig.pool.measure(rig.storage, 30) == pytest.approx(30 * GEOMETRY.payload_bytes / 0.008)
    fastest = rig.pool._cuda_of(rig.storage).fastest
    assert [(least, way.name) for least, way in fastest.out] == [(1, "runs")]
    assert rig.driver.calls.count("cuMemcpyBatchAsync") == 2 * 3 * (1 + 3), "out and in, thrice: checked; 1, 8 and 30"
    assert "batch is left out" not in caplog.text
    assert rig.pool.mapped_bytes == 0 and not rig.storage.blocks[1:31].any()
    assert rig.pool.measure(rig.storage, 0) is None


def test_memory_that_is_not_locked_goes_by_runs(rig: Rig) -> None:
    rig.driver.faults.append(Fault(0, 1 << 30, OUT_OF_MEMORY, "cuMemHostRegister"))
    rig.driver.faults[0].first = rig.driver.calls.count("cuMemHostRegister")
    rig.batches()
    rig.storage.blocks.random_(256)
    assert not len(rig.pool.swap(rig.storage, ids(1, 2), ids(7, 9)).lost_slots)
    assert "cuMemcpyBatchAsync" not in rig.driver.calls
    assert (rig.slots(ids(7, 9)) == rig.payloads(ids(1, 2))).all()
    assert rig.pool.measure(rig.storage, 8) is not None
    assert "cuMemcpyBatchAsync" not in rig.driver.calls


def test_a_pool_that_pins_nothing_leaves_the_driver_alone(rig: Rig) -> None:
    before = list(rig.driver.calls)
    plain = HostPool(GEOMETRY, 8 * GEOMETRY.extent_bytes, pins=False)
    assert plain.measure(rig.storage, 20) is not None
    rig.storage.blocks.random_(256)
    content = rig.payloads(ids(3, 4)).copy()
    assert not len(plain.swap(rig.storage, ids(3, 4), ids(1, 30)).lost_slots)
    rig.storage.blocks.zero_()
    plain.swap(rig.storage, NONE, NONE, ids(1, 30), ids(3, 4))
    assert (rig.payloads(ids(3, 4)) == content).all()
    assert [way.name for way in plain._cuda_of(rig.storage).fastest.ways] == ["runs"]
    plain.close()
    assert {*rig.driver.calls[len(before) :]} <= {
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuStreamCreate",
        "cuStreamSynchronize",
    }, "its streams are the stand-in's"


def test_without_a_driver_to_call_copies_go_by_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> FakeCudaDriver:
        raise DriverUnavailable("an elastic pool needs the package cuda-bindings")

    monkeypatch.setattr(host_pool, "CudaBindings", missing)
    rig.storage.blocks.random_(256)
    for slot in 7, 9:
        rig.pool.swap(rig.storage, ids(3), ids(slot))
        assert (rig.slots(ids(slot)) == rig.payloads(ids(3))).all()
    assert caplog.text.count("not pinned") == 1 and "cuda-bindings" in caplog.text


def test_a_copy_that_cannot_be_made_leaves_none_on_its_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears of it gives these blocks to others."""
    rig.batches()
    rig.storage.blocks.random_(256)

    def broken(*given: object) -> None:
        raise RuntimeError("lost the host")

    monkeypatch.setattr(rig.storage, "copy_pieces", broken)
    rig.pool.swap(rig.storage, ids(1), ids(1))
    fastest = rig.pool._cuda_of(rig.storage).fastest
    fastest.back = ((1, fastest.ways[0]),)
    rig.cuda.log.clear()
    with pytest.raises(RuntimeError, match="lost the host"):
        rig.pool.begin(rig.storage, ids(2), ids(2), ids(1), ids(50))
    assert rig.cuda.log[-1] == "the host waits for swaps"
    assert (rig.slots(ids(2)) == rig.payloads(ids(2))).all(), "what had begun is done"
    assert rig.cuda.current is rig.cuda.compute
    rig.pool.swap(rig.storage, NONE, NONE)


def test_a_pool_that_is_drained_frees_each_extent_once_it_was_read() -> None:
    pool = HostPool(GEOMETRY, 64 << 10)
    arena = HostArena(8, GEOMETRY.extent_bytes)
    arena.map(range(8))
    device = Storage(GEOMETRY, arena, "cpu")
    blocks = np.arange(1, 1 + pool.num_slots, dtype=np.int32)
    rng = np.random.default_rng(0)
    device.put(blocks, rng.integers(0, 256, (len(blocks), GEOMETRY.payload_bytes), np.uint8))
    pool.swap(device, blocks, blocks)
    slots = rng.permutation(blocks)[: len(blocks) // 2]
    expected, most, read_bytes = device.read(slots), pool.mapped_bytes, 0
    found = np.empty_like(expected)
    for places, part in pool.drain(slots):
        found[places] = part
        read_bytes += part.nbytes
        assert read_bytes + pool.mapped_bytes <= most + GEOMETRY.extent_bytes
    assert (found == expected).all() and pool.mapped_bytes == 0
    pool.close()
