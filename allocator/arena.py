"""The contract of an arena: one reserved address range of a device, backed extent by extent.

Addresses never move. Physical memory comes with `map` and goes with `unmap`, in whole extents; a newly mapped extent
contains zeros. On devices where this is slow, part of it runs in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from typing import Protocol

from .errors import BlockMisuse, DriverError
from .lease_record import HeldBounds


class Arena(Protocol):
    """The interface of every arena: `HostArena`, `CudaArena`, `LeasedArena`. tests/arena_contract.py tests the contract."""

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
        """The extents with memory now."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory behind the range now."""
        ...

    @property
    def held(self) -> HeldBounds:
        """Bounds on the device bytes that the arena holds, valid until the next call.

        They count memory that is mapped, prepared, or being created or released in the background. After `trim`, only
        mapped memory is held.
        """
        ...

    @property
    def buffer(self) -> object:
        """The owner of the whole range, `num_extents * extent_bytes` long.

        It has the buffer protocol (host) or `__cuda_array_interface__` (CUDA, once extent 0 is mapped). Any reference
        to it, or to a view of it, keeps the address range alive; touching an unmapped extent is undefined.
        """
        ...

    def map(self, extents: Sequence[int]) -> None:
        """Put memory behind `extents`, all or none.

        Raises OutOfDeviceMemory; DriverError on a device with a driver; BlockMisuse if an extent is already mapped.
        """
        ...

    def unmap(self, extents: Sequence[int]) -> None:
        """Return the memory of `extents` to the device. Raises BlockMisuse if one is not mapped."""
        ...

    def prepare(self, num_extents: int) -> None:
        """Prepare memory for the next `num_extents` extents in the background, if the arena supports that.

        Memory prepared beyond that is released. Raises ValueError for a negative number.
        """
        ...

    def trim(self) -> None:
        """Release memory that is held but not mapped, and wait until the device has it back. Raises DriverError."""
        ...

    def drain_failures(self) -> list[DriverError]:
        """Background failures, oldest first, each returned once."""
        ...

    def close(self) -> None:
        """Unmap everything and refuse further calls; the address range lives until its last view is gone. Idempotent."""
        ...


class ExtentSet:
    """An arena's extents, and which of them have memory. It holds nothing else, and does nothing in the background.

    Attributes:
        num_extents: See `Arena`, as for `extent_bytes`.
    """

    def __init__(self, num_extents: int, extent_bytes: int, mapped: Iterable[int] = ()) -> None:
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self._mapped = frozenset(mapped)

    @property
    def mapped_extents(self) -> frozenset[int]:
        """The extents with memory now."""
        return self._mapped

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory behind the range now."""
        return len(self._mapped) * self.extent_bytes

    @property
    def held(self) -> HeldBounds:
        """The mapped bytes, and nothing else."""
        return HeldBounds(self.mapped_bytes, self.mapped_bytes)

    def prepare(self, num_extents: int) -> None:
        """Do nothing: `map` makes memory. Raises ValueError for a negative number."""
        if num_extents < 0:
            raise ValueError(f"num_extents must not be negative, got {num_extents}")

    def trim(self) -> None:
        """Do nothing: only mapped memory is held."""

    def drain_failures(self) -> list[DriverError]:
        """Always empty: nothing runs in the background."""
        return []


def extents_to_map(extents: Sequence[int], num_extents: int, mapped: AbstractSet[int]) -> frozenset[int]:
    """`extents` as a set. Raises BlockMisuse unless they are distinct, inside the arena and not mapped."""
    wanted = _distinct(extents, num_extents)
    if wrong := wanted & mapped:
        raise BlockMisuse(f"extents {sorted(wrong)} are mapped already")
    return wanted


def extents_to_unmap(extents: Sequence[int], num_extents: int, mapped: AbstractSet[int]) -> frozenset[int]:
    """`extents` as a set. Raises BlockMisuse unless they are distinct, inside the arena and mapped."""
    wanted = _distinct(extents, num_extents)
    if wrong := wanted - mapped:
        raise BlockMisuse(f"extents {sorted(wrong)} are not mapped")
    return wanted


def _distinct(extents: Sequence[int], num_extents: int) -> frozenset[int]:
    wanted = frozenset(map(index, extents))  # accepts numpy integers, rejects floats
    if len(wanted) != len(extents):
        raise BlockMisuse(f"an extent is named twice in {list(extents)}")
    if outside := [extent for extent in wanted if not 0 <= extent < num_extents]:
        raise BlockMisuse(f"extents {sorted(outside)} are outside the arena of {num_extents}")
    return wanted


def runs(extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Merge neighbours in ascending extents: [1, 2, 5] -> (1, 3), (5, 6)."""
    start = 0
    for end in range(1, len(extents) + 1):
        if end == len(extents) or extents[end] != extents[end - 1] + 1:
            yield extents[start], extents[end - 1] + 1
            start = end
