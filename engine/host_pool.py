"""The host tier's memory: blocks of the pool's layout in host memory, and the copies from and to the device.

Slot i is block i of a second pool; block 0, the null block, is no slot. Memory is reserved at the start and taken extent by
extent when a slot of it is first written, so an engine that never runs short takes none; it goes back when nobody has needed
the tier for long, by `give_back`, and at `close`. Copies run beside the caller (`begin`): between host pools in a thread, from
and to a CUDA device in a stream of their own, out of memory that is pinned.
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

from ..allocator.errors import OutOfDeviceMemory
from ..allocator.host_arena import HostArena
from ..cache.block_table import Int32
from ..cache.geometry import Geometry
from ..cache.storage import Storage
from ..monitor.units import format_bytes

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
    """Copies that have begun. `wait` returns when they are done, and raises what they raised."""

    def wait(self) -> Swapped: ...


class HostPool:
    """As many slots as whole extents of `geometry` fit into `num_bytes`, less the null block. Not thread-safe.

    Raises ValueError where that is none.
    """

    def __init__(self, geometry: Geometry, num_bytes: int) -> None:
        least = geometry.bytes_for_blocks(2)
        if num_bytes < least:
            raise ValueError(
                f"{num_bytes:,} bytes of host memory hold no block: the least that do are {format_bytes(least)}"
            )
        self._arena = HostArena(num_bytes // geometry.extent_bytes, geometry.extent_bytes)
        self._storage = Storage(geometry, self._arena, "cpu")
        self._blocks_per_extent = geometry.blocks_per_extent
        self._thread = ThreadPoolExecutor(1, "pagetide-swaps")  # which begins with the first copy
        self._stream: torch.cuda.Stream | None = None
        self._pinned: set[int] = set()

    @property
    def num_slots(self) -> int:
        """Slots there are, with memory or without."""
        return self._storage.num_blocks - 1

    @property
    def mapped_bytes(self) -> int:
        """Host memory that is taken now."""
        return self._arena.mapped_bytes

    def swap(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32 = NONE, in_blocks: Int32 = NONE
    ) -> Swapped:  # fmt: skip
        """Copy `out_blocks` of the device to `out_slots`, then `in_slots`, which were written before, to `in_blocks`. Waits."""
        copy = partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks)
        return _InStream(copy, self._stream_of(device)).wait() if device.device.type == "cuda" else _timed(copy)

    def begin(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32
    ) -> Copies:  # fmt: skip
        """Begin what `swap` does, behind what is queued on the device now. Until it is done nobody may touch these blocks."""
        copy = partial(self._copy, device, out_blocks, out_slots, in_slots, in_blocks)
        return (
            _InStream(copy, self._stream_of(device)) if device.device.type == "cuda" else _InThread(copy, self._thread)
        )

    def measure(self, device: Storage, num_blocks: int) -> float | None:
        """Bytes a second of copies from the device, whose first `num_blocks` blocks have memory and no content yet.

        The tier is empty before and after. None where the host has no memory for it.
        """
        num_measured = min(num_blocks, self.num_slots, max(1, _MEASURED_BYTES // device.geometry.payload_bytes))
        blocks = np.arange(1, num_measured + 1, dtype=np.int32)
        if not num_measured or len(self.swap(device, blocks, blocks).lost_slots):
            return None
        seconds = self.swap(device, blocks, blocks).seconds  # what is touched first takes longer
        self.give_back(self.mapped_bytes)
        return num_measured * device.geometry.payload_bytes / max(seconds, 1e-9)

    def give_back(self, num_bytes: int) -> None:
        """Give up to so much memory back, an extent at least, the highest slots' first. Nothing may lie there any more, and
        all copies must be done.
        """
        mapped = sorted(self._arena.mapped_extents)
        num_extents = max(1, num_bytes // self._arena.extent_bytes)
        self._unpin(mapped[-num_extents:])
        self._arena.unmap(mapped[-num_extents:])

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._thread.shutdown()
        self._unpin(sorted(self._pinned))
        self._arena.close()

    def _copy(
        self, device: Storage, out_blocks: Int32, out_slots: Int32, in_slots: Int32, in_blocks: Int32
    ) -> tuple[Int32, int]:  # fmt: skip
        """Returns the slots that got no memory, and how many copies their time may be measured by."""
        mapped_bytes = self.mapped_bytes
        lost = self._populate(out_slots)
        kept = ~np.isin(out_slots, lost)
        self._storage.copy_from(device, out_blocks[kept], out_slots[kept])
        device.copy_from(self._storage, in_slots, in_blocks)
        num = int(np.count_nonzero(kept)) + len(in_slots)
        return lost, num if self.mapped_bytes == mapped_bytes else 0

    def _populate(self, slots: Int32) -> Int32:
        """Take memory for `slots`. Returns those that got none."""
        extents = np.unique(slots // self._blocks_per_extent)
        missing = np.setdiff1d(extents, list(self._arena.mapped_extents))
        if not len(missing):
            return slots[:0]
        try:
            self._arena.map(missing.tolist())
        except OutOfDeviceMemory as error:
            log.warning("the host tier stays at %s: %s", format_bytes(self.mapped_bytes), error)
            return slots[np.isin(slots // self._blocks_per_extent, missing)]
        if self._stream is not None:
            self._pin(missing.tolist())
        return slots[:0]

    def _stream_of(self, device: Storage) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device.device)
        return self._stream

    def _pin(self, extents: list[int]) -> None:
        """Lock these extents' pages, so that copies run beside everything else; where the driver does not, they take longer."""
        for extent in extents:
            if error := int(torch.cuda.cudart().cudaHostRegister(self._address(extent), self._arena.extent_bytes, 0)):
                log.warning("host memory for swaps is not pinned (CUDA error %d): copies to it take longer", error)
                return
            self._pinned.add(extent)

    def _unpin(self, extents: list[int]) -> None:
        """The copies of these extents must be done."""
        for extent in self._pinned.intersection(extents):
            torch.cuda.cudart().cudaHostUnregister(self._address(extent))
            self._pinned.remove(extent)

    def _address(self, extent: int) -> int:
        return self._storage.blocks.data_ptr() + extent * self._arena.extent_bytes


def _timed(copy: Callable[[], tuple[Int32, int]]) -> Swapped:
    began = time.perf_counter()
    lost, num = copy()
    return Swapped(lost, num, time.perf_counter() - began if num else 0.0)


class _InThread:
    """Copies between host pools, in a thread: they let go of the interpreter's lock."""

    def __init__(self, copy: Callable[[], tuple[Int32, int]], thread: ThreadPoolExecutor) -> None:
        self._future = thread.submit(_timed, copy)

    def wait(self) -> Swapped:
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

    def __init__(self, copy: Callable[[], tuple[Int32, int]], stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._began, self._ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._began.record()
            self._lost, self._num = copy()
            self._ended.record()

    def wait(self) -> Swapped:
        self._ended.synchronize()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return Swapped(self._lost, self._num, self._began.elapsed_time(self._ended) / 1e3 if self._num else 0.0)
