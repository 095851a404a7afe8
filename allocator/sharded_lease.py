"""The leases of several devices, those of a divided model's shards, as the one lease that the engine's memory works with.

Each shard has a lease on its own device, held by the driver, which decides what all of them map. Every lease is told what the
largest shard holds, and together they allow what the scarcest does: the pool has the same extents everywhere. So a recall of
any of them shrinks all shards in the same step.

A device may grant what another one does not: the pool cannot use it. Two engines that grow over the same devices could then
wait for each other for ever, each with what the other lacks. So what is granted beyond the others' goes back after a moment,
and is asked for again after another one, of random length: one of the engines gets all it asked for.
"""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from .errors import LeaseClosed
from .lease import Lease
from .lease_events import Denied, Event, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn

SURPLUS_S = 0.3  # mean time that a grant may exceed the others'
# Most that is waited before the next ask, doubled as long as asking gains nothing
FIRST_PAUSE_S = 0.6
LAST_PAUSE_S = 5.0
_LOOK_S = 0.25


class _Turns:
    """When a surplus goes back, and when the next ask is passed on. Times are random, so that engines do not stay in step."""

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._return_at: float | None = None
        self._ask_at = clock()
        self._pause_s = FIRST_PAUSE_S

    @property
    def may_ask(self) -> bool:
        """Whether no other engine has its turn."""
        return self._clock() >= self._ask_at

    def must_return(self, *, has_surplus: bool) -> bool:
        """Whether there has been a surplus for too long. Call it often."""
        now = self._clock()
        if not has_surplus:
            self._return_at = None
        elif self._return_at is None:
            self._return_at = now + SURPLUS_S * (0.5 + self._chance())
        return self._return_at is not None and now >= self._return_at

    def pause(self) -> None:
        """Let other engines ask first: what was granted was of no use."""
        self._return_at = None
        self._ask_at = self._clock() + self._pause_s * self._chance()
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def gain(self) -> None:
        """All devices have granted more: the next pause is short again."""
        self._pause_s = FIRST_PAUSE_S


class ShardedLease:
    """See `Lease`. Thread-safe in the same way, but only one thread may call anything else than `wait` and `close`.

    Args:
        leases: One for each shard.
        granule_bytes: Of an extent: smaller surpluses stay.
        extra: What the first lease has to cover besides its shard: the driver's own memory, if that is on the same device.
        clock: Seconds, monotonic.
        chance: A random number from 0 to 1.
    """

    def __init__(
        self,
        leases: Sequence[Lease],
        granule_bytes: int,
        extra: Callable[[], int] = int,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.leases = tuple(leases)
        self._granule_bytes = granule_bytes
        self._extra = extra
        self._extra_bytes = extra()
        self._turns = _Turns(clock, chance)
        self._common_bytes = self.granted_bytes  # at the last poll
        self._returns_unused = False  # with the next report of a settled pool
        self._was_connected = self.connected  # and `_recalled`: by the events so far
        self._recalled: Recalled | None = None
        self._closed = False
        self._waiters = 0
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # ---- what is allowed -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The first shard's name."""
        return self.leases[0].name

    @property
    def device_uuid(self) -> str:
        """The first shard's device."""
        return self.leases[0].device_uuid

    @property
    def connected(self) -> bool:
        """Whether every lease has a broker."""
        return all(lease.connected for lease in self.leases)

    @property
    def min_bytes(self) -> int:
        """The largest minimum."""
        return max(lease.min_bytes - extra for lease, extra in self._each())

    @property
    def max_bytes(self) -> int | None:
        """The smallest max."""
        return min((most - extra for lease, extra in self._each() if (most := lease.max_bytes) is not None), default=None)

    @property
    def granted_bytes(self) -> int:
        """The smallest grant."""
        return min(lease.granted_bytes - extra for lease, extra in self._each())

    @property
    def held_bytes(self) -> int:
        """The most that a shard holds."""
        return max(lease.held_bytes - extra for lease, extra in self._each())

    @property
    def recall(self) -> Recalled | None:
        """The recall with the lowest target."""
        recalls = [
            Recalled(recall.target_bytes - extra, recall.due, recall.spares_requests)
            for lease, extra in self._each()
            if (recall := lease.recall) is not None
        ]
        return min(recalls, key=lambda one: one.target_bytes, default=None)

    def _each(self) -> list[tuple[Lease, int]]:
        return [(lease, 0 if i else self._extra_bytes) for i, lease in enumerate(self.leases)]

    # ---- messages to the brokers -----------------------------------------------------------------

    def report(
        self,
        held: Mapping[str, int],
        free_bytes: int,
        kept_bytes: int = 0,
        *,
        moving_bytes: int = 0,
        num_waiting: int = 0,
        reused: bool = True,
    ) -> None:
        """Report what the largest shard holds to every broker."""
        self._extra_bytes = self._extra()
        for lease, extra in self._each():
            own = {**held, "other": held.get("other", 0) + extra} if extra else held
            lease.report(own, free_bytes, kept_bytes, moving_bytes=moving_bytes, num_waiting=num_waiting, reused=reused)
        if self._returns_unused and not moving_bytes:
            self._returns_unused = False
            self._return_to(self.held_bytes)

    def ask(self, target_bytes: int, *, expires_s: float = 1.0, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
        """Ask every broker for `target_bytes`. An ask for more than is held waits while other engines have their turn."""
        if self._turns.may_ask or max(target_bytes, keep_bytes) <= self.held_bytes:
            for lease, extra in self._each():
                keep = keep_bytes + extra if keep_bytes else 0
                lease.ask(target_bytes + extra, expires_s=expires_s, waiting_s=waiting_s, keep_bytes=keep)

    def lower_min(self, min_bytes: int) -> None:
        """Lower every minimum to `min_bytes`."""
        for lease, extra in self._each():
            lease.lower_min(min(lease.min_bytes, min_bytes + extra))

    def answer_unmapped(self, keep_bytes: int) -> None:
        """Declare that each shard holds at most `keep_bytes`. What a shard has to unmap still stays granted.

        A lease that has no recall and no more granted says nothing: it would only withdraw its ask.
        """
        for lease, extra in self._each():
            if lease.recall is not None or lease.granted_bytes > keep_bytes + extra:
                lease.answer_unmapped(max(keep_bytes + extra, lease.held_bytes))

    def return_unused(self) -> None:
        """Return what is granted and not held, once all shards hold the same: one could not map what its lease allows."""
        self._returns_unused = True

    def close(self) -> None:
        """End all leases. A thread in `wait` gets LeaseClosed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            forked = all(lease.closed for lease in self.leases)
            self._closed = True
            for lease in self.leases:
                lease.close()
            if not self._waiters:
                os.close(self._wake)
            elif not forked:  # the last waiting thread closes it; a fork has none, and would wake its parent's
                os.eventfd_write(self._wake, 1)

    # ---- messages from the brokers ---------------------------------------------------------------

    def poll(self) -> tuple[Event, ...]:
        """The events of all leases since the last call, as those of one lease. Never blocks. Raises LeaseClosed.

        It also returns what one device has granted beyond the others for too long.
        """
        events = self._receive()
        self._return_surplus()
        return events

    def wait(self, timeout_s: float) -> tuple[Event, ...]:
        """Wait for an event; () after `timeout_s` without one. Raises LeaseClosed."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            self._waiters += 1
        try:
            while True:
                if events := self._receive():
                    return events
                left = until - time.monotonic()
                if left <= 0:
                    return ()
                poller = select.poll()
                poller.register(self._wake, select.POLLIN)
                for lease in self.leases:
                    with suppress(ValueError):  # closed meanwhile: the next turn raises
                        poller.register(lease.fileno(), select.POLLIN)
                poller.poll(1000 * min(left, _LOOK_S))
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    os.close(self._wake)

    def _receive(self) -> tuple[Event, ...]:
        with self._lock:
            self._check_open()
            found = {type(event): event for lease in self.leases for event in lease.poll()}
            return tuple(self._joined(found)) if found else ()

    def _joined(self, found: Mapping[type[Event], Event]) -> Iterator[Event]:
        """The events of several leases, by type, as those of one: with what all of them allow now, and each only once."""
        was_connected, self._was_connected = self._was_connected, self.connected
        before, self._recalled = self._recalled, self.recall
        lost = found.get(Lost)
        if isinstance(lost, Lost) and (was_connected or lost.refused):
            yield lost
        if Rejoined in found and self._was_connected:
            yield Rejoined(self.granted_bytes)
        if Granted in found:
            yield Granted(self.granted_bytes)
        if Limited in found and (most := self.max_bytes) is not None:
            yield Limited(most)
        if Recalled in found and self._recalled not in (None, before):
            assert self._recalled is not None
            yield self._recalled
        if Withdrawn in found and self._recalled is None:
            yield Withdrawn()
        if Denied in found:
            yield found[Denied]

    def _return_surplus(self) -> None:
        """Return what one device grants beyond the others, once that has lasted."""
        common = self.granted_bytes
        if common >= self._common_bytes + self._granule_bytes:
            self._turns.gain()
        self._common_bytes = common
        has_surplus = any(
            lease.connected
            and lease.granted_bytes - max(common + extra, lease.held_bytes, lease.min_bytes) >= self._granule_bytes
            for lease, extra in self._each()
        )
        if self._turns.must_return(has_surplus=has_surplus):
            self._return_to(common)

    def _return_to(self, keep_bytes: int) -> None:
        """Return what is granted beyond `keep_bytes` and not held. This withdraws all asks, and other engines ask first."""
        for lease, extra in self._each():
            lease.answer_unmapped(max(keep_bytes + extra, lease.held_bytes))
        self._common_bytes = self.granted_bytes
        self._turns.pause()

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseClosed(f"the leases of {self.name!r} have ended; make a new engine")
