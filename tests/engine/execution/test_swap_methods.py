"""Ways to copy blocks to and from host memory, over a driver without a device: the bytes, and which way is taken when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from fake_cuda_driver import NOT_FOUND, FakeCudaDriver, Fault

from pagetide.allocator.cuda_driver import CudaDevice
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Pieces, Storage
from pagetide.engine.execution.swap_methods import BatchedCopies, FastestSwapMethod, SwapMethod, ways_on

GEOMETRY = Geometry((LayerShape(3, 5, 7),), 16, "float16").with_extents(8 << 10)  # 1,152 bytes, and padding
SENTINEL = 0xAB
ALWAYS = 1 << 30


class Rig:
    """Two pools of host memory, one of which says that it is a device's, locked extent by extent; a stream of a driver's."""

    def __init__(self) -> None:
        self.driver = FakeCudaDriver()
        self.context = CudaDevice(self.driver, 0)
        arenas = [HostArena(GEOMETRY.extents_for_blocks(60), GEOMETRY.extent_bytes) for _ in range(2)]
        for arena in arenas:
            arena.map(range(arena.num_extents))
        self.device, self.host = (Storage(GEOMETRY, arena) for arena in arenas)
        self.device.device = torch.device("cuda", 0)
        self.extents = [
            pool.blocks.data_ptr() + i * arena.extent_bytes
            for pool, arena in zip((self.device, self.host), arenas, strict=True)
            for i in range(arena.num_extents)
        ]
        with self.context.current():
            (self.stream,) = self.driver.call("cuStreamCreate", 1)
            for address in self.extents:
                self.driver.call("cuMemHostRegister", address, GEOMETRY.extent_bytes, 3)

    def batch(self) -> BatchedCopies:
        return BatchedCopies(self.driver, lambda: self.stream)

    def finish(self) -> None:
        with self.context.current():
            self.driver.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        with self.context.current():
            self.driver.call("cuStreamDestroy", self.stream)
            for address in self.extents:
                self.driver.call("cuMemHostUnregister", address)
        self.context.close()
        assert self.driver.violations == [] and self.driver.leaks() == []


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


class Made:
    """A way of a given speed: `seconds` of each launch, and of each piece. It may fail, or copy other bytes."""

    def __init__(self, name: str, launch: float, piece: float, *, fails: bool = False, wrong: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.wrong = wrong
        self.launch, self.piece = launch, piece
        self.copied: list[int] = []

    def copy(self, target: Storage, source: Storage, pieces: Pieces) -> None:
        if self.fails:
            raise RuntimeError("it is broken")
        self.copied.append(len(pieces.sizes))
        target.copy_pieces(source, pieces)
        target.blocks[pieces.targets[0], 0] ^= int(self.wrong)


def timer_of(*ways: Made) -> Callable[[Callable[[], None]], float]:
    """Runs the copy; seconds as the ways say."""

    def timed(copy: Callable[[], None]) -> float:
        before = [len(way.copied) for way in ways]
        copy()
        new = [(way, n) for way, many in zip(ways, before, strict=True) for n in way.copied[many:]]
        return sum(way.launch + n * way.piece for way, n in new)

    return timed


def random_blocks(pool: Storage, seed: int) -> np.ndarray:
    """Bytes for the whole pool, which it has now."""
    content = np.random.default_rng(seed).integers(0, 256, pool.blocks.shape, dtype=np.uint8)
    pool.blocks.copy_(torch.from_numpy(content))
    return content


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_is_one_call_that_copies_these_bytes_and_no_others(rig: Rig, seed: int) -> None:
    """With neighbours, which travel as one up to the end of an extent: the driver refuses what goes beyond."""
    rng = np.random.default_rng(seed)
    for target, source in (rig.host, rig.device), (rig.device, rig.host):
        content = random_blocks(source, seed)
        target.blocks.fill_(SENTINEL)
        num = int(rng.integers(1, 40))
        sources = np.sort(rng.permutation(np.arange(1, 59))[:num]) if seed % 2 else np.arange(3, 3 + num)
        targets = sources + 1 if seed % 3 else rng.permutation(np.arange(1, 60))[:num]
        rig.driver.calls.clear()
        pieces = target.pieces_from(source, sources, targets)
        rig.batch().copy(target, source, pieces)
        assert rig.driver.calls == ["cuMemcpyBatchAsync"]
        assert (target.blocks == SENTINEL).all(), "not before the stream comes to it"
        rig.finish()
        payload = GEOMETRY.payload_bytes
        expected = np.full(target.blocks.shape, SENTINEL, np.uint8)
        expected[targets, :payload] = content[sources, :payload]
        ours = target.blocks.numpy()
        assert (ours[:, :payload] == expected[:, :payload]).all()
        others = np.setdiff1d(np.arange(len(ours)), targets)
        assert (ours[others] == SENTINEL).all(), "padding travels between neighbours alone"


def test_the_fastest_way_is_taken_by_the_number_of_pieces(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    runs, batch, kernel = Made("runs", 0, 8), Made("batch", 20, 2), Made("kernel", 60, 1)
    fastest = FastestSwapMethod([runs, batch, kernel])
    with caplog.at_level(logging.INFO):
        seconds = fastest.measure(rig.device, rig.host, 50, True, timer_of(runs, batch, kernel))
    assert seconds == 2 * (60 + 50)
    assert fastest.out == fastest.back == ((1, runs), (8, batch), (50, kernel))
    assert "go by runs, from 8 pieces on by batch, from 50 pieces on by kernel; back they" in caplog.text
    assert not rig.device.blocks[1:51].any(), "nothing is left there"
    assert not rig.device.blocks[51:].any() and not rig.device.blocks[0].any()
    for num, way in (1, runs), (7, runs), (8, batch), (49, batch), (50, kernel), (59, kernel):
        for copy, target, source in ((fastest.copy_out, rig.host, rig.device), (fastest.copy_back, rig.device, rig.host)):
            blocks = np.arange(1, num + 1)
            made = len(way.copied)
            copy(target, source, target.pieces_from(source, blocks, blocks[::-1]), locked=True)
            assert way.copied[made:] == [num]
    made = len(runs.copied)
    neighbours = rig.host.pieces_from(rig.device, np.arange(1, 20), np.arange(1, 20))
    fastest.copy_out(rig.host, rig.device, neighbours, locked=True)
    fastest.copy_out(rig.host, rig.device, rig.host.pieces_from(rig.device, blocks, blocks[::-1]), locked=False)
    assert len(neighbours.sizes) < 8, "neighbours are one piece as far as an extent goes"
    assert runs.copied[made:] == [len(neighbours.sizes), 59], "what is not locked goes by runs"
    nothing = np.arange(0)
    fastest.copy_back(rig.device, rig.host, rig.device.pieces_from(rig.host, nothing, nothing), locked=True)
    assert len(runs.copied) == made + 2


def test_a_way_that_raises_or_gives_other_bytes_is_left_out(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    runs, broken, wrong = Made("runs", 9, 9), Made("batch", 1, 1, fails=True), Made("kernel", 1, 1, wrong=True)
    fastest = FastestSwapMethod([runs, broken, wrong])
    fastest.measure(rig.device, rig.host, 3, True, timer_of(runs, broken, wrong))
    assert fastest.out == fastest.back == ((1, runs),)
    assert "the batch is left out: RuntimeError: it is broken" in caplog.text
    assert "the kernel is left out: ValueError: what it copied to the host differs" in caplog.text
    broken.fails = False
    fastest.measure(rig.device, rig.host, 3, False, timer_of(runs, broken, wrong))
    assert broken.copied == [], "memory that is not locked"
    broken.fails = True
    with pytest.raises(RuntimeError, match="it is broken"):
        FastestSwapMethod([broken, runs]).measure(rig.device, rig.host, 3, True, timer_of(runs, broken))


def test_a_way_that_fails_later_is_left_out_and_its_copies_are_made(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    runs, batch = Made("runs", 9, 9), Made("batch", 1, 1)
    fastest = FastestSwapMethod([runs, batch])
    fastest.measure(rig.device, rig.host, 20, True, timer_of(runs, batch))
    assert fastest.out == ((1, batch),)
    content = random_blocks(rig.device, 1)
    batch.fails, runs.copied = True, []
    blocks = np.arange(1, 21)
    for _ in range(2):
        pieces = rig.host.pieces_from(rig.device, blocks, blocks[::-1])
        fastest.copy_out(rig.host, rig.device, pieces, locked=True)
    payload = GEOMETRY.payload_bytes
    assert (rig.host.blocks.numpy()[blocks[::-1], :payload] == content[blocks, :payload]).all()
    assert runs.copied == [20, 20]
    assert caplog.text.count("swaps no longer use the batch, which failed: RuntimeError: it is broken") == 1


def test_what_the_driver_lacks_is_left_out(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A driver from before CUDA 12.8, and a device with other addresses for host memory."""
    rig.driver.host_pointers = False
    rig.driver.faults.append(Fault(0, ALWAYS, NOT_FOUND, "cuMemcpyBatchAsync"))
    with caplog.at_level(logging.INFO):
        ways = ways_on(rig.driver, torch.device("cuda", 0), 0)
        assert [way.name for way in ways] == ["runs", "batch"]
        runs: list[SwapMethod] = [ways[0], rig.batch()]
        fastest = FastestSwapMethod(runs)
        fastest.measure(rig.device, rig.host, 5, True, lambda copy: (copy(), rig.finish(), 1.0)[-1])
    assert fastest.out == ((1, ways[0]),)
    assert "no kernel, as host memory has other addresses on cuda:0" in caplog.text
    assert "the batch is left out: DriverError" in caplog.text


def test_the_kernel_is_there_with_triton(rig: Rig) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")
    assert [way.name for way in ways_on(rig.driver, torch.device("cuda", 0), 0)] == ["runs", "batch", "kernel"]
