"""The host tier's memory: blocks of the pool's layout in host memory, and the copies from and to the device.

Slot i is block i of a second pool; block 0, the null block, is no slot. Memory is reserved at the start and taken extent by
extent when a slot of it is first written, so an engine that never runs short takes none; it goes back when nobody has needed
the tier for long, by `give_back`, and at `close`. Between host pools the caller copies. From and to a device copies stand in
the device's current stream.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from ..allocator.errors import OutOfDeviceMemory
from ..allocator.host_arena import HostArena
from ..cache.block_table import Int32
from ..cache.geometry import Geometry
from ..cache.storage import Storage
from ..monitor.units import format_bytes

log = logging.getLogger(__name__)

_MEASURED_BYTES = 32 << 20


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

    @property
    def num_slots(self) -> int:
        """Slots there are, with memory or without."""
        return self._storage.num_blocks - 1

    @property
    def mapped_bytes(self) -> int:
        """Host memory that is taken now."""
        return self._arena.mapped_bytes

    def swap_out(self, device: Storage, blocks: Int32, slots: Int32) -> Int32:
        """Copy `blocks` of the device to `slots`. Returns those for which the host had no memory: nothing was copied there."""
        lost = self._populate(slots)
        kept = ~np.isin(slots, lost)
        self._storage.copy_from(device, blocks[kept], slots[kept])
        return lost

    def swap_in(self, device: Storage, slots: Int32, blocks: Int32) -> None:
        """Copy `slots`, which were written, to `blocks` of the device."""
        device.copy_from(self._storage, slots, blocks)

    def measure(self, device: Storage, num_blocks: int) -> float | None:
        """Bytes a second of copies from the device, whose first `num_blocks` blocks have memory and no content yet.

        The tier is empty before and after. None where the host has no memory for it.
        """
        num_measured = min(num_blocks, self.num_slots, max(1, _MEASURED_BYTES // device.geometry.payload_bytes))
        blocks = np.arange(1, num_measured + 1, dtype=np.int32)
        if not num_measured or len(self.swap_out(device, blocks, blocks)):
            return None
        _fence(device)  # what is touched first takes longer: the copies after it count
        began = time.perf_counter()
        self.swap_out(device, blocks, blocks)
        _fence(device)
        seconds = time.perf_counter() - began
        self._arena.unmap(sorted(self._arena.mapped_extents))
        return num_measured * device.geometry.payload_bytes / max(seconds, 1e-9)

    def give_back(self, num_bytes: int) -> None:
        """Give up to so much memory back, an extent at least, the highest slots' first. Nothing may lie there any more, and
        all copies must be done.
        """
        mapped = sorted(self._arena.mapped_extents)
        num_extents = max(1, num_bytes // self._arena.extent_bytes)
        self._arena.unmap(mapped[-num_extents:])

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._arena.close()

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
        return slots[:0]


def _fence(device: Storage) -> None:
    """Wait until everything queued on the device is done. A CPU has done it."""
    if device.device.type == "cuda":
        torch.cuda.synchronize(device.device)
