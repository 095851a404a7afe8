"""An arena within a lease: its memory counts in the lease's record and never exceeds the grant."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .arena import Arena
from .errors import DriverError
from .lease import Lease
from .lease_record import HeldBounds


class LeasedArena:
    """Wraps `arena` and counts its extents against `lease`; see `Arena`.

    With `answers_at_bytes` a recall is answered where memory is unmapped, when the lease holds no more: the step that follows
    may be long. The lease must already count what the arena holds now. `map` and `prepare` raise GrantExceeded, with nothing
    changed, if the lease does not allow the extents. `close` leaves the lease open.
    """

    def __init__(self, arena: Arena, lease: Lease) -> None:
        self._arena = arena
        self._lease = lease
        self._counted = arena.held  # the arena's part of the lease's bounds
        self.answers_at_bytes: int | None = None
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
        """Extents with memory now."""
        return self._arena.mapped_extents

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory behind the range now."""
        return self._arena.mapped_bytes

    @property
    def held(self) -> HeldBounds:
        """The arena's bounds. Reading them updates the lease's count for changes made in the background."""
        with self._lock:
            self._count(self._arena.held)
            return self._counted

    @property
    def buffer(self) -> object:
        """The owner of the whole range."""
        return self._arena.buffer

    def map(self, extents: Sequence[int]) -> None:
        """Map `extents`; see `Arena`. Raises GrantExceeded too."""
        with self._bounded(coming=len(extents)):
            self._arena.map(extents)

    def unmap(self, extents: Sequence[int]) -> None:
        """Unmap `extents`; see `Arena`. Answers the recall once no more than `answers_at_bytes` are held."""
        with self._bounded(going=len(extents)):
            self._arena.unmap(extents)
        if self.answers_at_bytes is None or self._lease.recall is None:
            return
        with suppress(DriverError):  # what is not released stays counted; it is tried again after the step
            self.trim()
        if (recall := self._lease.recall) is not None and self._lease.held_bytes <= self.answers_at_bytes:
            self._lease.answer_unmapped(max(self._lease.held_bytes, recall.target_bytes))

    def prepare(self, num_extents: int) -> None:
        """Prepare memory for `num_extents` extents; see `Arena`. Raises GrantExceeded too."""
        with self._bounded(coming=num_extents):
            self._arena.prepare(num_extents)

    def trim(self) -> None:
        """Release memory that is not mapped; see `Arena`."""
        with self._bounded():
            self._arena.trim()

    def drain_failures(self) -> list[DriverError]:
        """The arena's background failures."""
        return self._arena.drain_failures()

    def close(self) -> None:
        """Unmap everything and refuse further calls. Idempotent."""
        with self._bounded(going=self.num_extents):
            self._arena.close()

    @contextmanager
    def _bounded(self, coming: int = 0, going: int = 0) -> Iterator[None]:
        """Widen the lease's bounds before a change by these numbers of mapped extents, and narrow them after it."""
        with self._lock:
            least, most = self._arena.held
            mapped_bytes, extent_bytes = self.mapped_bytes, self.extent_bytes
            least = min(least, max(0, mapped_bytes - going * extent_bytes))  # prepared memory may go too
            self._count(HeldBounds(least, max(most, mapped_bytes + coming * extent_bytes)))
            try:
                yield
            finally:
                self._count(self._arena.held)

    def _count(self, held: HeldBounds) -> None:
        """Shift the lease's bounds by the change of the arena's."""
        if held != (before := self._counted):
            self._lease.shift(held.lower_bytes - before.lower_bytes, held.upper_bytes - before.upper_bytes)
            self._counted = held
