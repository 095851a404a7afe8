"""What the engine's memory needs of a lease, and of a host tier: of one device, or of all devices that the model is divided
over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...allocator.lease_events import Event, Recalled


class EngineLease(Protocol):
    """See `Lease`, and `ShardedLease`."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    @property
    def device_uuid(self) -> str:
        """The device, or the first of them."""
        ...

    @property
    def connected(self) -> bool:
        """Whether a broker has registered the lease."""
        ...

    @property
    def min_bytes(self) -> int:
        """The minimum."""
        ...

    @property
    def max_bytes(self) -> int | None:
        """The max; None: the whole device."""
        ...

    @property
    def granted_bytes(self) -> int:
        """Bytes that may be held in all."""
        ...

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes held."""
        ...

    @property
    def recall(self) -> Recalled | None:
        """The recall that is still to be answered."""
        ...

    def report(self, held: Mapping[str, int], free_bytes: int, kept_bytes: int = 0, *, moving_bytes: int = 0) -> None:
        """Report the held bytes by class, and how many of them are free, or only keep prefixes."""
        ...

    def ask(self, target_bytes: int, *, expires_s: float = 1.0, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
        """Ask for `target_bytes` in all for requests, and for `keep_bytes` so that cached prefixes stay."""
        ...

    def lower_min(self, min_bytes: int) -> None:
        """Lower the minimum."""
        ...

    def answer_unmapped(self, keep_bytes: int) -> None:
        """Declare that at most `keep_bytes` are held until a new grant."""
        ...

    def poll(self) -> tuple[Event, ...]:
        """The events since the last call. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> tuple[Event, ...]:
        """Like `poll`, but wait for an event; () after `timeout_s` without one."""
        ...


class HostMemory(Protocol):
    """The memory of a host tier. See `HostPool`."""

    @property
    def mapped_bytes(self) -> int:
        """Host memory allocated now."""
        ...

    def give_back(self, num_bytes: int) -> None:
        """Free up to `num_bytes`, which must be unused."""
        ...
