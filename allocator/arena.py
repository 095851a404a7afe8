"""The contract of an arena: one reserved address range of a device, backed extent by extent.

Addresses never move. Physical memory comes with `map` and goes with `unmap`, a whole extent at a time; what lies in an
extent after it was mapped is zero bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Arena(Protocol):
    """What every arena offers; `HostArena` is one."""

    @property
    def num_extents(self) -> int:
        """Extents in the reserved range."""
        ...

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent; a whole number of the device's granules."""
        ...

    @property
    def mapped_extents(self) -> frozenset[int]:
        """The extents that have memory behind them now."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory behind the range now."""
        ...

    @property
    def buffer(self) -> object:
        """The owner of the whole range, `num_extents * extent_bytes` long.

        It has the buffer protocol (host) or `__cuda_array_interface__` (CUDA). Whoever holds it, or a view of it, keeps
        the address range alive; touching an unmapped extent is undefined.
        """
        ...

    def map(self, extents: Sequence[int]) -> None:
        """Put memory behind `extents`, all or none. Raises OutOfDeviceMemory; BlockMisuse if one is mapped already."""
        ...

    def unmap(self, extents: Sequence[int]) -> None:
        """Give the memory behind `extents` back to the device. Raises BlockMisuse if one is not mapped."""
        ...

    def close(self) -> None:
        """Unmap everything and refuse further calls; the address range goes with its last view. Idempotent."""
        ...
