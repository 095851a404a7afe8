"""What a lease holds and what it may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from . import wire
from .errors import GrantExceeded, ProtocolViolation
from .lease_events import Event, Granted, Limited, Recalled, Withdrawn
from .lease_record import LeaseRecordWriter

Order: TypeAlias = wire.GrantMessage | wire.RecallMessage | wire.WithdrawMessage | wire.LimitMessage


class LeaseBalance:
    """Bounds of a lease's held bytes against its grant, recall and max. Not thread-safe; `Lease` has a lock.

    Without a broker, what is held is granted.

    Args:
        broker: Names the broker in errors.
        clock: Seconds, for the recall's deadline.
    """

    def __init__(self, held_bytes: int, max_bytes: int | None, broker: str, clock: Callable[[], float]) -> None:
        self.lower_bytes = self.upper_bytes = self.granted_bytes = held_bytes
        self.max_bytes = max_bytes
        self.recall: Recalled | None = None
        self._broker, self._clock = broker, clock
        self._record: LeaseRecordWriter | None = None
        self._newest: Order = wire.GrantMessage(-1, wire.OrderGeneration(0, 0), 0)  # the newest order applied

    @property
    def generation(self) -> wire.OrderGeneration:
        """The generation of the newest order applied."""
        return self._newest.generation

    def allows(self, total_bytes: int) -> bool:
        """Whether so much may be held in all, also once the recall is answered: the grant falls with the answer only."""
        return total_bytes <= self.granted_bytes and (self.recall is None or total_bytes <= self.recall.target_bytes)

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        """Move the bounds by these amounts. Raises GrantExceeded, with nothing changed, if the upper one would rise above
        the grant.
        """
        upper = self.upper_bytes + upper_bytes
        if upper_bytes > 0 and upper > self.granted_bytes:
            raise GrantExceeded(upper, self.granted_bytes)
        self.set_bounds(self.lower_bytes + lower_bytes, upper)

    def set_bounds(self, lower_bytes: int, upper_bytes: int) -> None:
        """Set the bounds, also in the lease's record."""
        self.lower_bytes, self.upper_bytes = lower_bytes, upper_bytes
        if self._record is not None:
            self._record.set(lower_bytes, upper_bytes)

    def reduce(self, keep_bytes: int, min_bytes: int) -> None:
        """Lower the grant to `keep_bytes`, but not below the minimum. The recall ends if its target is met, or if it spares
        requests.

        Raises ValueError if more than `keep_bytes` are held.
        """
        if keep_bytes < self.upper_bytes:
            raise ValueError(f"{self.upper_bytes:,} bytes are held still, not {keep_bytes:,}; unmap first, and shift")
        self.granted_bytes = min(self.granted_bytes, max(keep_bytes, min_bytes))
        if self.recall is not None and (self.recall.spares_requests or self.granted_bytes <= self.recall.target_bytes):
            self.recall = None

    def register(self, message: wire.RegisteredMessage, record: LeaseRecordWriter, max_bytes: int | None) -> None:
        """Begin with a broker that has registered the lease: its grant, its record, and the max as registered."""
        record.set(self.lower_bytes, self.upper_bytes)
        self._record = record
        self._newest = wire.GrantMessage(message.lease_id, message.generation, message.granted_bytes)
        self.granted_bytes, self.max_bytes, self.recall = message.granted_bytes, max_bytes, None

    def lose_broker(self) -> None:
        """Take no more than is held, and owe nothing."""
        self.granted_bytes, self.recall = self.upper_bytes, None

    def end(self) -> None:
        """End the grant. The bounds may still fall."""
        self.granted_bytes, self.recall = 0, None

    def leave_to_parent(self) -> None:
        """In a fork of the process that holds the lease: end, and leave the record alone."""
        self._record = None
        self.end()

    def apply(self, order: Order) -> Event | None:
        """Apply an order of the broker; None if it is superseded, or not for this lease.

        Raises ProtocolViolation if it contradicts the newest one.
        """
        if not self._is_newer(order):
            return None
        match order:
            case wire.GrantMessage(_, _, granted_bytes):
                self.granted_bytes = granted_bytes
                return Granted(granted_bytes)
            case wire.RecallMessage(_, _, target_bytes, deadline_ms, spares_requests):
                # behind one that does not spare them, the account's targets only fall
                spares = spares_requests and (self.recall is None or self.recall.spares_requests)
                self.recall = Recalled(target_bytes, self._clock() + deadline_ms / 1000, spares)
                return self.recall
            case wire.WithdrawMessage():
                self.recall = None
                return Withdrawn()
            case wire.LimitMessage(_, max_bytes):
                self.max_bytes = max_bytes
                return Limited(max_bytes)

    def _is_newer(self, order: Order) -> bool:
        """Whether an order is for this lease and newer than the last one; if so, record it as the newest.

        Raises ProtocolViolation for a different order of the same generation: one of the two is wrong, and only a new
        registration shows which.
        """
        newest, known = self._newest, self.generation
        if order.lease_id != newest.lease_id:
            return False
        if order.generation == known and order != newest:
            raise ProtocolViolation(f"{self._broker} sent two orders of generation {tuple(known)}, {newest} and {order}")
        if order.generation.epoch != known.epoch or order.generation.counter <= known.counter:
            return False
        self._newest = order
        return True
