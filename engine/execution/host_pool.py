"""The host tier's memory: blocks of the pool's layout in host memory, and the copies from and to the device.

Slot i is block i of a second pool; block 0, the null block, is no slot. Memory is reserved at the start and taken extent by
extent when a slot of it is first written, so an engine that never runs short takes none; it goes back when nobody has needed
the tier for long, by `give_back`, and at `close`. Copies run beside the caller (`begin`): between host pools in a thread, from
and to a CUDA device in a stream of their own, out of memory that is pinned, by the way that is the fastest (`swap_ways`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ...allocator.cuda_driver import CudaBindings, CudaDevice
from ...allocator.errors import DriverError, DriverUnavailable, OutOfDeviceMemory
from ...allocator.host_arena import HostArena
from ...cache.block_table import Int32
from ...cache.geometry import Geometry
from ...cache.storage import Storage
from ...monitor.units import format_bytes
from .host_extents import HostExtents
from .swap_methods import ContiguousCopies, FastestSwapMethod, ways_on

log = logging.getLogger(__name__)

NONE: Int32 = np.empty(0, np.int32)
_MEASURED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """What became of some copies: slots for which the host had no memory, and how long `num_timed` copies took; 0, where
    something else than the copies took the time.
    """

    lost_slots: Int32
    num_timed: int
    seconds: float


class Copies(Protocol):
    """Copies that have begun. They raise what went wrong from either call."""

    def fence(self) -> None:
        """What is queued on the device's current stream from here on runs behind them. The host waits only on a CPU."""
        ...

    def wait(self) -> Swapped:
        """Wait until they are done; a `fence` too."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Cuda:
    """What copies from and to a CUDA device go by."""

    stream: torch.cuda.Stream
    fastest: FastestSwapMethod
    device: CudaDevice | None  # whose context locks pages; None where its driver cannot be called


class HostPool:
    """As many slots as whole extents of `geometry` fit into `num_bytes`, less the null block. Not thread-safe.

    It serves one device: the one of its first copies. With CUDA and not `pins`, its memory is not pinned and copies are torch's
    own, one by one. Raises ValueError where `num_bytes` hold no slot.
    """

    def __init__(self, geometry: Geometry, num_bytes: int, *, pins: bool = True) -> None:
        least = geometry.bytes_for_blocks(2)
        if num_bytes < least:
            raise ValueError(
                f"{num_bytes:,} bytes of host memory hold no block: the least that do are {format_bytes(least)}"
            )
        arena = HostArena(num_bytes // geometry.extent_bytes, geometry.extent_bytes)
        self._storage = Storage(geometry, arena, "cpu")
        self._blocks_per_extent = geometry.blocks_per_extent
        self._thread = ThreadPoolExecutor(1, "pagetide-swaps")  # which begins with the first copy
        self._extents = HostExtents(arena, self._storage.blocks.data_ptr(), self._thread)
        self._cuda: _Cuda | None = None
        self._pins = pins

    @property
    def num_slots(self) -> int:
        """Slots there are, with memory or without."""
        return self._storage.num_blocks - 1

    @property
    def mapped_bytes(self) -> int:
        """Host memory that is taken now."""
        return self._extents.mapped_bytes

    @property
    def storage(self) -> Storage:
        """Where the slots lie: slot i is block i."""
        return self._storage

    @property
    def fastest(self) -> FastestSwapMethod | None:
        """How copies from and to a CUDA device are made. None before the first of them, and on a CPU."""
        return None if self._cuda is None else self._cuda.fastest

    def swap(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32 = NONE, in_blocks: Int32 = NONE
    ) -> Swapped:  # fmt: skip
        """Copy `out_blocks` of the device to `out_slots`, then `in_slots`, which were written before, to `in_blocks`. Waits."""
        if device.device.type == "cuda":
            return self.begin(device, out_blocks, out_slots, in_slots, in_blocks).wait()
        return _timed(partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks))

    def begin(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32
    ) -> Copies:  # fmt: skip
        """Begin what `swap` does, behind what is queued on the device's current stream now, and without waiting for that.

        Until it is done nobody may touch these blocks, but behind a `fence`.
        """
        if device.device.type != "cuda":
            return _InThread(partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks), self._thread)
        cuda = self._cuda_of(device)
        lost = self._populate(out_slots)
        kept = ~np.isin(out_slots, lost)
        out = self._storage.pieces_from(device, out_blocks[kept], out_slots[kept])
        back = device.pieces_from(self._storage, in_slots, in_blocks)

        def copy() -> None:
            cuda.fastest.copy_out(self._storage, device, out, self._extents.all_locked)
            cuda.fastest.copy_back(device, self._storage, back, self._extents.all_locked)

        return _InStream(copy, cuda.stream, lost, int(np.count_nonzero(kept)) + len(in_slots))

    def measure(self, device: Storage, num_blocks: int) -> float | None:
        """Bytes a second of copies from and to the device, whose first `num_blocks` blocks have memory and no content yet.

        With CUDA it finds out which way is the fastest for how many. The tier is empty before and after. None where the host
        has no memory for it.
        """
        num_measured = min(num_blocks, self.num_slots, max(1, _MEASURED_BYTES // device.geometry.payload_bytes))
        blocks = np.arange(1, num_measured + 1, dtype=np.int32)
        if not num_measured or len(self.swap(device, blocks, blocks).lost_slots):
            return None
        if device.device.type == "cuda":
            cuda = self._cuda_of(device)
            timer = partial(_seconds_in, cuda.stream)
            locked = self._extents.all_locked
            seconds = cuda.fastest.measure(device, self._storage, num_measured, locked, timer) / 2
        else:
            seconds = self.swap(device, blocks, blocks).seconds  # what is touched first takes longer
        self.give_back(self.mapped_bytes)
        return num_measured * device.geometry.payload_bytes / max(seconds, 1e-9)

    def give_back(self, num_bytes: int) -> None:
        """Give up to so much memory back, an extent at least, the highest slots' first. Nothing may lie there any more, and
        all copies must be done.
        """
        self._extents.give_back(num_bytes)

    def close(self) -> None:
        """Give the memory back; all copies must be done. Idempotent."""
        self._thread.shutdown()
        try:
            self._extents.close()
        finally:
            if self._cuda is not None and self._cuda.device is not None:
                self._cuda.device.close()
            self._cuda = None

    def _copy(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32
    ) -> tuple[Int32, int]:  # fmt: skip
        """Between hosts. Returns the slots that got no memory, and how many copies their time may be measured by."""
        mapped_bytes = self.mapped_bytes
        lost = self._populate(out_slots)
        kept = ~np.isin(out_slots, lost)
        self._storage.copy_from(device, out_blocks[kept], out_slots[kept])
        device.copy_from(self._storage, in_slots, in_blocks)
        num = int(np.count_nonzero(kept)) + len(in_slots)
        return lost, num if self.mapped_bytes == mapped_bytes else 0

    def _populate(self, slots: Int32) -> Int32:
        """Take memory for `slots`. Returns those that got none."""
        extents = slots // self._blocks_per_extent
        try:
            self._extents.take(np.unique(extents).tolist())
        except OutOfDeviceMemory as error:
            log.warning("the host tier stays at %s: %s", format_bytes(self.mapped_bytes), error)
            return slots[~np.isin(extents, list(self._extents.mapped))]
        return slots[:0]

    def _cuda_of(self, device: Storage) -> _Cuda:
        """Made when it is first needed, as are stream and context."""
        if self._cuda is not None:
            return self._cuda
        where = device.device
        index = torch.cuda.current_device() if where.index is None else where.index
        stream = torch.cuda.Stream(where)
        plain = _Cuda(stream, FastestSwapMethod([ContiguousCopies()]), None)
        if not self._pins:
            self._cuda = plain
            return plain
        try:
            driver = CudaBindings()
            context = CudaDevice(driver, index)
        except (DriverUnavailable, DriverError) as error:
            log.warning("host memory for swaps is not pinned, copies to it take longer: %s", error)
            self._cuda = plain
        else:
            self._extents.lock_for(context)
            self._cuda = _Cuda(stream, FastestSwapMethod(ways_on(driver, where, index)), context)
        return self._cuda


def _timed(copy: Callable[[], tuple[Int32, int]]) -> Swapped:
    began = time.perf_counter()
    lost, num = copy()
    return Swapped(lost, num, time.perf_counter() - began if num else 0.0)


class _InThread:
    """Copies between host pools, in a thread: they let go of the interpreter's lock."""

    def __init__(self, copy: Callable[[], tuple[Int32, int]], thread: ThreadPoolExecutor) -> None:
        self._future = thread.submit(_timed, copy)

    def fence(self) -> None:
        """See `Copies`."""
        self.wait()

    def wait(self) -> Swapped:
        """See `Copies`."""
        interrupt: BaseException | None = None
        while not self._future.done():  # whoever goes on before would give these blocks to others
            try:
                futures.wait([self._future])
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return self._future.result()


class _InStream:
    """Copies from and to a CUDA device, in a stream of their own, behind what the current one had to do when they began."""

    def __init__(self, copy: Callable[[], None], stream: torch.cuda.Stream, lost: Int32, num: int) -> None:
        self._stream = stream
        self._lost, self._num = lost, num
        self._began, self._ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            try:
                self._began.record()
                copy()
                self._ended.record()
            except BaseException:
                stream.synchronize()  # some may be on their way, to or from blocks that others are given now
                raise

    def fence(self) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._ended)

    def wait(self) -> Swapped:
        """See `Copies`."""
        self.fence()
        self._ended.synchronize()
        return Swapped(self._lost, self._num, self._began.elapsed_time(self._ended) / 1e3)


def _seconds_in(stream: torch.cuda.Stream, copy: Callable[[], None]) -> float:
    """The best of three, as the device counts."""
    copies = (_InStream(copy, stream, NONE, 0) for _ in range(3))
    return min(one.wait().seconds for one in copies)
