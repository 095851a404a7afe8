"""The host tier's memory: blocks of the pool's layout in host memory, and copies between them and the device.

Slot i is block i of a second pool; block 0, the null block, is not a slot. Memory is reserved at the start and allocated per
extent when a slot is first written. `give_back` (after long disuse) and `close` free it. Copies run concurrently with
the caller (`begin`): between host pools in a thread; between host and CUDA device in a separate stream, with pinned
memory, by the fastest method (`swap_methods.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...allocator.cuda_driver import CudaBindings, CudaDevice
from ...allocator.errors import DriverError, DriverUnavailable, OutOfDeviceMemory
from ...allocator.host_arena import HostArena
from ...allocator.host_extents import HostExtents
from ...cache.block_table import Index, Int32
from ...cache.geometry import Geometry
from ...cache.storage import Storage
from ...common.on_error import OnError
from ...common.units import format_bytes
from .swap_methods import ContiguousCopies, FastestSwapMethod, ways_on

log = logging.getLogger(__name__)

NONE: Int32 = np.empty(0, np.int32)
_MEASURED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """The result of some copies: slots for which the host had no memory, and the seconds that `num_timed` copies took. Both
    numbers are 0 if the time would include more than copying.
    """

    lost_slots: Int32
    num_timed: int
    seconds: float


class Copies(Protocol):
    """Copies that have begun. Either method raises their errors."""

    def fence(self) -> None:
        """Order work queued on the device's current stream from here on after the copies. Blocks the host only on a CPU."""
        ...

    def wait(self) -> Swapped:
        """Wait until the copies are done. Also acts as `fence`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Cuda:
    """State for copies to and from a CUDA device."""

    stream: torch.cuda.Stream
    fastest: FastestSwapMethod
    device: CudaDevice | None  # its context locks pages; None: the driver cannot be called


class HostPool:
    """As many slots as whole extents of `geometry` fit into `num_bytes`, less the null block. Not thread-safe.

    The pool serves one device: that of its first copies. On CUDA without `pins`, its memory is not pinned, and torch copies the
    runs one by one. Raises ValueError if `num_bytes` hold no slot.
    """

    def __init__(self, geometry: Geometry, num_bytes: int, *, pins: bool = True) -> None:
        least = geometry.bytes_for_blocks(2)
        if num_bytes < least:
            raise ValueError(f"{num_bytes:,} bytes of host memory hold no block: the least that do are {format_bytes(least)}")
        arena = HostArena(num_bytes // geometry.extent_bytes, geometry.extent_bytes)
        self.storage = Storage(geometry, arena, "cpu")  # of the slots: slot i is block i
        self._blocks_per_extent = geometry.blocks_per_extent
        self._thread = ThreadPoolExecutor(1, "pagetide-swaps")  # starts with the first copy
        self._extents = HostExtents(arena, self.storage.blocks.data_ptr(), self._thread)
        self._cuda: _Cuda | None = None
        self._pins = pins

    @property
    def num_slots(self) -> int:
        """The number of slots, with or without memory."""
        return self.storage.num_blocks - 1

    @property
    def mapped_bytes(self) -> int:
        """Host memory allocated now."""
        return self._extents.mapped_bytes

    @property
    def fastest(self) -> FastestSwapMethod | None:
        """The method choice for copies to and from a CUDA device. None before the first copy, and on a CPU."""
        return None if self._cuda is None else self._cuda.fastest

    def swap(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32 = NONE, in_blocks: Int32 = NONE
    ) -> Swapped:
        """Copy `out_blocks` of the device to `out_slots`, then `in_slots`, written before, to `in_blocks`. Waits."""
        if device.device.type == "cuda":
            return self.begin(device, out_blocks, out_slots, in_slots, in_blocks).wait()
        return _timed(partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks))

    def begin(self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32) -> Copies:
        """Begin the copies of `swap`, ordered after the work queued on the device's current stream, without waiting for it.

        Until they are done, use these blocks only after a `fence`.
        """
        if device.device.type != "cuda":
            return _InThread(partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks), self._thread)
        cuda = self._cuda_of(device)
        lost = self._populate(out_slots)
        kept = ~np.isin(out_slots, lost)
        out = self.storage.pieces_from(device, out_blocks[kept], out_slots[kept])
        back = device.pieces_from(self.storage, in_slots, in_blocks)

        def copy() -> None:
            cuda.fastest.copy_out(self.storage, device, out, self._extents.all_locked)
            cuda.fastest.copy_back(device, self.storage, back, self._extents.all_locked)

        return _InStream(copy, cuda.stream, lost, int(np.count_nonzero(kept)) + len(in_slots))

    def measure(self, device: Storage, num_blocks: int) -> float | None:
        """Bytes per second of copies to and from the device. Blocks 1 to `num_blocks` must have memory and no content yet.

        On CUDA it also selects the fastest method per number of pieces. None if the host has no memory for it.
        """
        num_measured = min(num_blocks, self.num_slots, max(1, _MEASURED_BYTES // device.geometry.payload_bytes))
        blocks = np.arange(1, num_measured + 1, dtype=np.int32)
        if not num_measured or len(self.swap(device, blocks, blocks).lost_slots):
            return None
        if device.device.type == "cuda":
            cuda = self._cuda_of(device)
            timer = partial(_seconds_in, cuda.stream)
            locked = self._extents.all_locked
            seconds = cuda.fastest.measure(device, self.storage, num_measured, locked, timer) / 2
        else:
            seconds = self.swap(device, blocks, blocks).seconds  # the first touch takes longer
        self.give_back(self.mapped_bytes)
        return num_measured * device.geometry.payload_bytes / max(seconds, 1e-9)

    def give_back(self, num_bytes: int) -> None:
        """Free up to `num_bytes`, at least one extent, the highest slots first. They must be unused, and all copies done."""
        self._extents.give_back(num_bytes)

    def drain(self, slots: Int32) -> Iterator[tuple[Index, npt.NDArray[np.uint8]]]:
        """Places in `slots`, and the bytes [n, payload_bytes] there, extent by extent. Each is freed once it was read, and all
        memory at the end, so that the bytes and the pool together take no more than the pool did. All copies must be done.
        """
        extents = slots // self._blocks_per_extent
        for extent in sorted(set(extents.tolist()), reverse=True):
            places = np.flatnonzero(extents == extent)
            yield places, self.storage.read(slots[places])
            num_read = sum(one >= extent for one in self._extents.mapped)
            self.give_back(num_read * self.storage.geometry.extent_bytes)
        self.give_back(self.mapped_bytes)

    def close(self) -> None:
        """Free the memory. All copies must be done. Idempotent."""
        self._thread.shutdown()
        try:
            self._extents.close()
        finally:
            if self._cuda is not None and self._cuda.device is not None:
                self._cuda.device.close()
            self._cuda = None

    def _copy(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32
    ) -> tuple[Int32, int]:
        """Copy between host pools. Returns the slots without memory, and how many copies their time may be attributed to."""
        mapped_bytes = self.mapped_bytes
        lost = self._populate(out_slots)
        kept = ~np.isin(out_slots, lost)
        self.storage.copy_from(device, out_blocks[kept], out_slots[kept])
        device.copy_from(self.storage, in_slots, in_blocks)
        num = int(np.count_nonzero(kept)) + len(in_slots)
        return lost, num if self.mapped_bytes == mapped_bytes else 0

    def _populate(self, slots: Int32) -> Int32:
        """Allocate memory for `slots`. Returns the slots that got none."""
        extents = slots // self._blocks_per_extent
        try:
            self._extents.take(np.unique(extents).tolist())
        except OutOfDeviceMemory as error:
            log.warning("the host tier cannot grow beyond %s: %s", format_bytes(self.mapped_bytes), error)
            return slots[~np.isin(extents, list(self._extents.mapped))]
        return slots[:0]

    def _cuda_of(self, device: Storage) -> _Cuda:
        """The CUDA state, created with its stream and context at the first use."""
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
            log.warning("host memory for swaps is not pinned, so copies take longer: %s", error)
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
    """Copies between host pools in a thread. They release the GIL."""

    def __init__(self, copy: Callable[[], tuple[Int32, int]], thread: ThreadPoolExecutor) -> None:
        self._future = thread.submit(_timed, copy)

    def fence(self) -> None:
        """See `Copies`."""
        self.wait()

    def wait(self) -> Swapped:
        """See `Copies`."""
        return self._future.result()


class _InStream:
    """Copies to and from a CUDA device in a separate stream, ordered after the work queued on the current stream."""

    def __init__(self, copy: Callable[[], None], stream: torch.cuda.Stream, lost: Int32, num: int) -> None:
        self._stream = stream
        self._lost, self._num = lost, num
        self._began, self._ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        # If it raises, some copies may still run, and these blocks are reused.
        with torch.cuda.stream(stream), OnError(stream.synchronize):
            self._began.record()
            copy()
            self._ended.record()

    def fence(self) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._ended)

    def wait(self) -> Swapped:
        """See `Copies`."""
        self.fence()
        self._ended.synchronize()
        return Swapped(self._lost, self._num, self._began.elapsed_time(self._ended) / 1e3)


def _seconds_in(stream: torch.cuda.Stream, copy: Callable[[], None]) -> float:
    """The shortest of three runs, in device time."""
    copies = (_InStream(copy, stream, NONE, 0) for _ in range(3))
    return min(one.wait().seconds for one in copies)
