"""The contract of an arena: one reserved address range of a device, backed extent by extent.

Addresses never move. Physical memory comes with `map` and goes with `unmap`, a whole extent at a time; what lies in an
extent after it was mapped is zero bytes. Where that takes a device long, a part of it goes on in the background: memory is
made before `map` needs it, and given back after `unmap`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from typing import Protocol

from .errors import BlockMisuse, DriverError
from .lease_record import HeldBounds


class Arena(Protocol):
    """What every arena offers: `HostArena`, `CudaArena`, `LeasedArena`. tests/arena_contract.py says it as tests."""

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
    def held(self) -> HeldBounds:
        """Bytes between which what the arena holds of the device lies, from now until the next call.

        That is what is mapped, what is ready to be mapped, and what is on its way in the background: it counts from
        before it comes until after it has gone. What is mapped is all that is held after `trim`.
        """
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

    def prepare(self, num_extents: int) -> None:
        """Have memory for the next `num_extents` to be mapped made ready in the background, as far as the arena does that.

        What was made ready for more goes again. Raises ValueError for less than 0.
        """
        ...

    def trim(self) -> None:
        """Give up what is held though not mapped, and wait until the device has it back. Raises DriverError."""
        ...

    def drain_failures(self) -> list[DriverError]:
        """What failed in the background, oldest first, each told once."""
        ...

    def close(self) -> None:
        """Unmap everything and refuse further calls; the address range goes with its last view. Idempotent."""
        ...


class NoPreparedExtents:
    """The part of the contract that is nothing to do where memory comes with `map` and is gone after `unmap`."""

    def prepare(self, num_extents: int) -> None:
        """Nothing: `map` makes memory. Raises ValueError for less than 0."""
        if num_extents < 0:
            raise ValueError(f"num_extents must not be negative, got {num_extents}")

    def trim(self) -> None:
        """Nothing: what is not mapped is not held."""

    def drain_failures(self) -> list[DriverError]:
        """None: nothing goes on in the background."""
        return []


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
