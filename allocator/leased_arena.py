"""An arena within a lease: what it holds is counted in the lease's record, and never more than is granted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .arena import Arena
from .errors import DriverError
from .lease import Lease
from .lease_record import HeldBounds


class LeasedArena:
    """`arena`, whose extents count against `lease`, which counts what it holds now already; see `Arena` for the contract.

    `map` and `prepare` raise GrantExceeded where the lease does not allow it; then nothing has changed. Closing it leaves
    the lease open.
    """

    def __init__(self, arena: Arena, lease: Lease) -> None:
        self._arena = arena
        self._lease = lease
        self._counted = arena.held  # what of the lease's bounds is the arena's
        self._lock = threading.Lock()

    @property
    def num_extents(self) -> int:
        """Extents in the reserved range."""
        return self._arena.num_extents

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent."""
        return self._arena.extent_bytes

    @property
    def mapped_extents(self) -> frozenset[int]:
        """The extents that have memory behind them now."""
        return self._arena.mapped_extents

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory behind the range now."""
        return self._arena.mapped_bytes

    @property
    def held(self) -> HeldBounds:
        """As the arena says. From now on the lease counts that: what came or went in the background since the last call."""
        with self._lock:
            self._count(self._arena.held)
            return self._counted

    @property
    def buffer(self) -> object:
        """The owner of the whole range."""
        return self._arena.buffer

    def map(self, extents: Sequence[int]) -> None:
        """As the arena does. Raises GrantExceeded too."""
        with self._bounded(coming=len(extents)):
            self._arena.map(extents)

    def unmap(self, extents: Sequence[int]) -> None:
        """As the arena does."""
        with self._bounded(going=len(extents)):
            self._arena.unmap(extents)

    def prepare(self, num_extents: int) -> None:
        """As the arena does. Raises GrantExceeded too."""
        with self._bounded(coming=num_extents):
            self._arena.prepare(num_extents)

    def trim(self) -> None:
        """As the arena does."""
        with self._bounded():
            self._arena.trim()

    def drain_failures(self) -> list[DriverError]:
        """As the arena's."""
        return self._arena.drain_failures()

    def close(self) -> None:
        """Unmap everything and refuse further calls. Idempotent."""
        with self._bounded(going=self.num_extents):
            self._arena.close()

    @contextmanager
    def _bounded(self, coming: int = 0, going: int = 0) -> Iterator[None]:
        """Around a change by so many mapped extents, before which the lease counts all that it may come to."""
        with self._lock:
            least, most = self._arena.held
            mapped_bytes, extent_bytes = self.mapped_bytes, self.extent_bytes
            least = min(least, max(0, mapped_bytes - going * extent_bytes))  # what is ready may go too
            self._count(HeldBounds(least, max(most, mapped_bytes + coming * extent_bytes)))
            try:
                yield
            finally:
                self._count(self._arena.held)

    def _count(self, held: HeldBounds) -> None:
        """Move the lease's bounds by as much as the arena's."""
        if held != (before := self._counted):
            self._lease.shift(held.lower_bytes - before.lower_bytes, held.upper_bytes - before.upper_bytes)
            self._counted = held
