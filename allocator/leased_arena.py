"""An arena within a lease: every map and unmap is bracketed in the lease's record, and none goes beyond the grant."""

from __future__ import annotations

from collections.abc import Sequence

from .arena import Arena
from .lease import Lease


class LeasedArena:
    """`arena`, whose extents count against `lease`; see `Arena` for the contract.

    `map` raises GrantExceeded where the lease does not allow it; then nothing has changed. Closing it leaves the lease open.
    """

    def __init__(self, arena: Arena, lease: Lease) -> None:
        self._arena = arena
        self._lease = lease

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
    def buffer(self) -> object:
        """The owner of the whole range."""
        return self._arena.buffer

    def map(self, extents: Sequence[int]) -> None:
        """As the arena does. Raises GrantExceeded too."""
        with self._lease.bracket(self._lease.held_bytes + len(extents) * self.extent_bytes):
            self._arena.map(extents)

    def unmap(self, extents: Sequence[int]) -> None:
        """As the arena does."""
        with self._lease.bracket(self._lease.held_bytes - len(extents) * self.extent_bytes):
            self._arena.unmap(extents)

    def close(self) -> None:
        """Unmap everything and refuse further calls. Idempotent."""
        if self._lease.closed:  # as in a fork of the process that holds it
            self._arena.close()
            return
        with self._lease.bracket(self._lease.held_bytes - self.mapped_bytes):
            self._arena.close()
