"""The contract of an arena: one reserved address range of a device, backed extent by extent.

Addresses never move. Physical memory comes with `map` and goes with `unmap`, a whole extent at a time; what lies in an
extent after it was mapped is zero bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from typing import Protocol

from .errors import BlockMisuse


class Arena(Protocol):
    """What every arena offers: `HostArena` and `CudaArena`. tests/arena_contract.py says it as tests."""

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

        It has the buffer protocol (host) or `__cuda_array_interface__` (CUDA, once extent 0 is mapped). Whoever holds
        it, or a view of it, keeps the address range alive; touching an unmapped extent is undefined.
        """
        ...

    def map(self, extents: Sequence[int]) -> None:
        """Put memory behind `extents`, all or none.

        Raises OutOfDeviceMemory; DriverError where there is a driver; BlockMisuse if one is mapped already.
        """
        ...

    def unmap(self, extents: Sequence[int]) -> None:
        """Give the memory behind `extents` back to the device. Raises BlockMisuse if one is not mapped."""
        ...

    def close(self) -> None:
        """Unmap everything and refuse further calls; the address range goes with its last view. Idempotent."""
        ...


def extents_to_map(extents: Sequence[int], num_extents: int, mapped: AbstractSet[int]) -> frozenset[int]:
    """`extents` as a set. Raises BlockMisuse unless each is named once, inside the arena and not mapped."""
    wanted = _distinct(extents, num_extents)
    if wrong := wanted & mapped:
        raise BlockMisuse(f"extents {sorted(wrong)} are mapped already")
    return wanted


def extents_to_unmap(extents: Sequence[int], num_extents: int, mapped: AbstractSet[int]) -> frozenset[int]:
    """`extents` as a set. Raises BlockMisuse unless each is named once, inside the arena and mapped."""
    wanted = _distinct(extents, num_extents)
    if wrong := wanted - mapped:
        raise BlockMisuse(f"extents {sorted(wrong)} are not mapped")
    return wanted


def _distinct(extents: Sequence[int], num_extents: int) -> frozenset[int]:
    wanted = frozenset(map(index, extents))  # numpy's integers too, but no floats
    if len(wanted) != len(extents):
        raise BlockMisuse(f"an extent is named twice in {list(extents)}")
    if outside := [extent for extent in wanted if not 0 <= extent < num_extents]:
        raise BlockMisuse(f"extents {sorted(outside)} are outside the arena of {num_extents}")
    return wanted


def runs(extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours merged, of extents in rising order: [1, 2, 5] -> (1, 3), (5, 6)."""
    start = 0
    for end in range(1, len(extents) + 1):
        if end == len(extents) or extents[end] != extents[end - 1] + 1:
            yield extents[start], extents[end - 1] + 1
            start = end
