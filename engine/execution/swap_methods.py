"""Methods that copy blocks between a CUDA device and pinned host memory. The fastest is chosen for each number of pieces.

    runs     one torch copy per contiguous run               always available
    batch    cuMemcpyBatchAsync, one call for all runs       drivers from CUDA 12.8 on
    kernel   one launch that reads or writes host memory     with Triton, where kernels use the host's own addresses

Each is tested and timed at the start. See docs/decisions/0026-ways-to-swap.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ...allocator.cuda_driver import CudaDriver, uses_host_pointers
from ...allocator.errors import DriverError
from ...cache.storage import BlockIds, Pieces, Storage

log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]  # runs a copy to completion, perhaps repeatedly; returns seconds


class SwapMethod(Protocol):
    """One of the methods above."""

    @property
    def name(self) -> str: ...

    def copy(self, target: Storage, source: Storage, pieces: Pieces) -> None:
        """Copy `pieces`, from `target.pieces_from(source, ...)`, asynchronously in the order of the device's current stream."""
        ...


Chosen = tuple[tuple[int, SwapMethod], ...]  # (minimum number of pieces, method), ascending from 1


class ContiguousCopies:
    """One copy per contiguous run."""

    name = "runs"

    def copy(self, target: Storage, source: Storage, pieces: Pieces) -> None:
        """See `Storage.copy_pieces`."""
        target.copy_pieces(source, pieces)


class BatchedCopies:
    """One driver call for all runs: cuMemcpyBatchAsync. `stream()` is the current stream's handle.

    The device's context must be current, and all copied host memory must be locked.
    """

    name = "batch"

    def __init__(self, driver: CudaDriver, stream: Callable[[], int]) -> None:
        self._driver = driver
        self._stream = stream

    def copy(self, target: Storage, source: Storage, pieces: Pieces) -> None:
        """Raises DriverError, also if the driver lacks this call."""
        writes = pieces.writes + target.blocks.data_ptr()
        reads = pieces.reads + source.blocks.data_ptr()
        addresses = (array.ctypes.data for array in (writes, reads, pieces.sizes))
        self._driver.call("cuMemcpyBatchAsync", *addresses, len(writes), self._stream())


class CopyKernel:
    """One kernel launch for all blocks: see `triton_gather`. `device` is where it runs.

    Raises ImportError if Triton is missing.
    """

    name = "kernel"

    def __init__(self, device: torch.device) -> None:
        from ..attention.triton_gather import copy_blocks

        self._copy_blocks = copy_blocks
        self._device = device

    def copy(self, target: Storage, source: Storage, pieces: Pieces) -> None:
        """Raises what Triton raises."""
        ids = torch.from_numpy(np.stack([pieces.sources, pieces.targets]).astype(np.int64))
        if self._device.type == "cuda":
            ids = ids.pin_memory().to(self._device, non_blocking=True)
        self._copy_blocks(source.blocks, target.blocks, ids, target.geometry.payload_bytes)


def ways_on(driver: CudaDriver, device: torch.device, index: int) -> list[SwapMethod]:
    """All methods that may work on a CUDA device with torch's `index`. Unsupported ones are found by trying them."""
    ways: list[SwapMethod] = [ContiguousCopies(), BatchedCopies(driver, lambda: torch.cuda.current_stream(device).cuda_stream)]
    try:
        if uses_host_pointers(driver, index):
            ways.append(CopyKernel(device))
        else:
            log.info("swaps: no kernel, as host memory has other addresses on %s", device)
    except (ImportError, DriverError) as error:
        log.info("swaps: no kernel: %s", error)
    return ways


class FastestSwapMethod:
    """Copies by the method measured as the fastest for the number of pieces; by the first method before any measurement.

    `ways` are the candidates. The first needs no locked memory, and its exceptions propagate. Another method that raises is
    dropped from then on, and the first one repeats its copies. Not thread-safe.
    """

    def __init__(self, ways: Sequence[SwapMethod]) -> None:
        self.ways = tuple(ways)
        self.out: Chosen = ((1, ways[0]),)
        self.back: Chosen = self.out

    def copy_out(self, host: Storage, device: Storage, pieces: Pieces, locked: bool) -> None:
        """Copy to the host. `locked` says whether all of its memory is locked."""
        self._copy(self.out, host, device, pieces, locked)

    def copy_back(self, device: Storage, host: Storage, pieces: Pieces, locked: bool) -> None:
        """Copy from the host."""
        self._copy(self.back, device, host, pieces, locked)

    def measure(self, device: Storage, host: Storage, num_blocks: int, locked: bool, timer: Timer) -> float:
        """Time every method on blocks 1 to `num_blocks` of both pools, in an order without contiguous runs.

        Their contents are lost, and zero on the device. A method that raises or copies wrong bytes is dropped; without
        `locked`, only the first is tried. Returns the seconds to copy all blocks out and back by the fastest methods. Raises
        what the first raises.
        """
        blocks = np.arange(1, num_blocks + 1)
        counts = [n for n in (8**k for k in range(10)) if n < num_blocks] + [num_blocks]
        out, back = dict[SwapMethod, list[float]](), dict[SwapMethod, list[float]]()
        for way in self.ways if locked else self.ways[:1]:
            try:
                _check(way, device, host, blocks, timer)
                parts = [(blocks[:n], blocks[::-1][:n]) for n in counts]
                times = (
                    [timer(_copying(way, host, device, *part)) for part in parts],
                    [timer(_copying(way, device, host, *reversed(part))) for part in parts],
                )
            except Exception as error:
                if way is self.ways[0]:
                    raise
                log.warning("swaps: the %s is left out: %s: %s", way.name, type(error).__name__, error)
            else:
                out[way], back[way] = times
        device.blocks[1 : num_blocks + 1].zero_()
        self.out, self.back = thresholds(counts, out), thresholds(counts, back)
        log.info("swaps out of the device go %s; back they go %s", _format_choice(self.out), _format_choice(self.back))
        return min(times[-1] for times in out.values()) + min(times[-1] for times in back.values())

    def _copy(self, chosen: Chosen, target: Storage, source: Storage, pieces: Pieces, locked: bool) -> None:
        num, first = len(pieces.sizes), self.ways[0]
        if not num:
            return
        way = next(way for least, way in reversed(chosen) if num >= least) if locked else first
        if way is first:
            return way.copy(target, source, pieces)
        try:
            way.copy(target, source, pieces)
        except Exception as error:
            log.warning("swaps no longer use the %s, which failed: %s: %s", way.name, type(error).__name__, error)
            self.out, self.back = (
                tuple((least, first if other is way else other) for least, other in those) for those in (self.out, self.back)
            )
            first.copy(target, source, pieces)  # may repeat copies: the bytes are the same


def thresholds(counts: Sequence[int], seconds: Mapping[SwapMethod, Sequence[float]]) -> Chosen:
    """The fastest method from each number of pieces on. `seconds[way][i]` is for `counts[i]`; the first of equals wins."""
    found: list[tuple[int, SwapMethod]] = []
    for i in range(len(counts)):
        way = min(seconds, key=lambda way: seconds[way][i])
        if not found or found[-1][1] is not way:
            found.append((counts[i] if found else 1, way))
    return tuple(found)


def _copying(way: SwapMethod, target: Storage, source: Storage, sources: BlockIds, targets: BlockIds) -> Callable[[], None]:
    return lambda: way.copy(target, source, target.pieces_from(source, sources, targets))


def _check(way: SwapMethod, device: Storage, host: Storage, blocks: BlockIds, timer: Timer) -> None:
    """Raises ValueError unless the method copies the right bytes, out and back."""
    payload = device.geometry.payload_bytes
    pattern = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (len(blocks), payload), dtype=np.uint8))
    ours, theirs = (pool.blocks[1 : len(blocks) + 1, :payload] for pool in (device, host))
    ours.copy_(pattern)
    theirs.zero_()
    timer(_copying(way, host, device, blocks, blocks[::-1]))
    if not torch.equal(theirs, pattern.flip(0)):
        raise ValueError("what it copied to the host differs")
    ours.zero_()
    timer(_copying(way, device, host, blocks[::-1], blocks))
    if not torch.equal(ours.cpu(), pattern):
        raise ValueError("what it copied from the host differs")


def _format_choice(chosen: Chosen) -> str:
    (_, first), *others = chosen
    return "".join([f"by {first.name}", *(f", from {least:,} pieces on by {way.name}" for least, way in others)])
