"""The errors of the allocator.

AllocatorError
├── OutOfDeviceMemory   the device refuses the bytes (map)
├── NoFreeBlocks        the pool has no such number of free blocks (allocate)
└── BlockMisuse         a caller's mistake: a block freed twice, the null block, an id outside the pool
"""

from __future__ import annotations


class AllocatorError(Exception):
    """Root of everything the allocator raises on purpose."""


class OutOfDeviceMemory(AllocatorError):
    """The device has not the bytes asked for. Nothing was mapped."""

    def __init__(self, asked_bytes: int, free_bytes: int, what: str = "memory") -> None:
        super().__init__(f"asked for {asked_bytes:,} bytes of {what}, {free_bytes:,} bytes are free")
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class NoFreeBlocks(AllocatorError):
    """Fewer blocks are free than were asked for. Nothing was allocated."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(f"asked for {asked:,} blocks, {available:,} are available")
        self.asked = asked
        self.available = available


class BlockMisuse(AllocatorError, ValueError):
    """A block id was used in a way its state forbids. Nothing was changed."""
