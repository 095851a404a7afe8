"""The account of one device: grants and recalls of its leases, and the memory of external processes, by measurement.

    register ─► lives ── end: released, died, or its socket was cut ─► reaping ── its memory is back, or is foreign ─► gone
                 │ ▲
       decide: grants, recalls    unmapped: the only way in which a grant falls

`lease_policy.decide` computes the orders; this class applies them to its numbers and returns them. Times are in
monotonic nanoseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..common.units import format_bytes
from .errors import InvalidLease, LeaseRefused, MinimumsExceedCapacity
from .lease_policy import (
    Ceiling,
    Grant,
    LeaseDemand,
    LeaseState,
    Order,
    PendingRecall,
    Ready,
    Recall,
    ReservedBytes,
    Rules,
    SharedDevice,
    Withdraw,
    decide,
)
from .lease_record import HeldBounds

# of an ended process: if nothing has come back for this long, nothing more will
_SETTLED_NS = 100_000_000
_UNAWARE_NS = 1_000_000_000  # after its socket is cut, an engine may map its grant for this long


@dataclass(slots=True)
class _Reaping:
    """An ended lease with memory that is not back yet."""

    ended_ns: int
    may_return: bool  # the engine may still be alive and continue the lease
    level_bytes: int  # what it held when memory last came back
    level_ns: int  # when that was


class DeviceAccount:
    """The leases of one device. `state` is for reading."""

    def __init__(self, rules: Rules, capacity_bytes: int) -> None:
        """`capacity_bytes` is the measured size of the device."""
        self.state = SharedDevice(rules, capacity_bytes)
        self._measured_ns = 0
        self._previous_foreign: int | None = None  # the lower estimate of the last measurement alone
        self._reaping: dict[int, _Reaping] = {}
        self._arrivals = itertools.count()

    # ---- requests of engines and users ----------------------------------------------------------

    def register(self, lease: LeaseState) -> None:
        """Add a lease, granted what it already holds as far as the device has room; `decide` grants more.

        Raises InvalidLease or MinimumsExceedCapacity, with nothing changed.
        """
        self._check_bounds(lease)
        others = sum(lease.granted_bytes for lease in self.state.living())
        held_bytes = min(lease.held_bytes, max(0, self.state.capacity_bytes - others))  # the engine's own claim is bounded
        lease.granted_bytes = lease.held_bytes = lease.upper_bytes = held_bytes
        self.state.leases[lease.lease_id] = lease
        self._not_foreign(held_bytes)

    def ask(self, lease_id: int, demand: LeaseDemand, now_ns: int) -> None:
        """Record the lease's demand, in place of the last one. While each exceeds the grant, memory lacks all along."""
        lease = self.state.leases[lease_id]
        former = lease.demand_at(now_ns)
        lacked = former is not None and former.target_bytes > lease.granted_bytes
        lease.demand = replace(demand, lacking_ns=former.lacking_ns if former is not None and lacked else now_ns)
        lease.heard_ns = now_ns

    def report(self, lease_id: int, free_bytes: int, kept_bytes: int, now_ns: int, *, reused: bool = True) -> None:
        """Record how many bytes are free in the lease's pool, and how many hold cached prefixes; see `ReportMessage`."""
        lease = self.state.leases[lease_id]
        lease.reused = reused
        lease.free_bytes, lease.kept_bytes, lease.heard_ns = free_bytes, kept_bytes, now_ns
        lease.reported_bytes = lease.held_bytes
        lease.withheld = lease.withheld and lease.unneeded_bytes >= lease.granule_bytes

    def unmapped(self, lease_id: int, held_bytes: int) -> None:
        """Lower the grant to `held_bytes`, though not below the minimum; the lease takes no more until a new grant.

        Returning memory without a recall cancels the lease's demand. An engine reports before it answers a recall short of
        its target: what it then calls unneeded is withheld. It may report later what it gave back: free memory goes first.
        """
        lease = self.state.leases[lease_id]
        given = max(0, lease.reported_bytes - held_bytes)
        lease.reported_bytes -= given
        of_free = min(given, lease.free_bytes)
        lease.free_bytes -= of_free
        lease.kept_bytes -= min(given - of_free, lease.kept_bytes)
        if not lease.recalls:
            lease.demand = None
        is_short = any(recall.spares_requests and held_bytes > recall.target_bytes for recall in lease.recalls)
        lease.granted_bytes = min(lease.granted_bytes, max(held_bytes, lease.min_bytes))
        lease.held_bytes = min(lease.held_bytes, lease.granted_bytes)
        lease.recalls = tuple(
            recall for recall in lease.recalls if recall.target_bytes < lease.granted_bytes and not recall.spares_requests
        )
        lease.withheld = is_short and lease.unneeded_bytes >= lease.granule_bytes

    def lower_min(self, lease_id: int, min_bytes: int) -> None:
        """Lower the minimum. Raises InvalidLease if `min_bytes` is above the current one."""
        lease = self.state.leases[lease_id]
        if min_bytes > lease.min_bytes:
            raise InvalidLease(
                f"{lease.name!r} was promised {format_bytes(lease.min_bytes)}; its min can be lowered, not raised to "
                f"{format_bytes(min_bytes)}. Start it again with a higher min"
            )
        lease.min_bytes = min_bytes

    def limit(self, lease_id: int, max_bytes: int) -> int:
        """Set the max of the lease, at most the registered one.

        Returns the bytes granted above it, which the lease keeps until it unmaps. Raises InvalidLease below its
        minimum.
        """
        lease = self.state.leases[lease_id]
        if max_bytes < max(1, lease.min_bytes):
            raise InvalidLease(
                f"{lease.name!r} was promised {format_bytes(lease.min_bytes)}; its max cannot be "
                f"{format_bytes(max_bytes)}. Start it again with a lower min"
            )
        lease.max_bytes = max_bytes if (most := lease.registered_max_bytes) is None else min(max_bytes, most)
        return max(0, lease.granted_bytes - lease.max_bytes)

    def recall(self, lease_id: int, num_bytes: int, now_ns: int) -> Recall:
        """Recall `num_bytes` of what the lease holds, down to its minimum at most.

        For one cool-down it does not grow again, and no lease gets these bytes. Raises LeaseRefused if there is nothing
        to recall above its minimum.
        """
        lease = self.state.leases[lease_id]
        held = min(lease.held_bytes, lease.expected_bytes)
        target = max(lease.min_bytes, held - num_bytes)
        if target >= lease.expected_bytes:
            raise LeaseRefused(
                f"{lease.name!r} holds {format_bytes(held)}, and {format_bytes(lease.min_bytes)} is its minimum: "
                "there is nothing to recall"
            )
        freed = max(0, held - target)
        lease.ceiling = Ceiling(target, now_ns + int(self.state.rules.cooldown_s * 1e9))
        self._add_peak(now_ns, max(self.state.foreign_bytes, self.state.peak_bytes(now_ns)) + freed)
        order = Recall(lease_id, target, self.state.rules.recall_deadline_s, by_hand=True)
        self._apply(order, now_ns)
        return order

    def reserve(self, reservation_id: int, num_bytes: int, priority: int = 0, *, held: bool = False) -> None:
        """Reserve bytes for an external process; `decide` reports them free. Raises LeaseRefused if they can never be.

        With `held` they were reserved before, and the process may use them already.
        """
        self._check_reservable(num_bytes, 0)
        reservation = ReservedBytes(reservation_id, priority, next(self._arrivals), num_bytes)
        self.state.reservations[reservation_id] = reservation
        if held:
            reservation.held_bytes = num_bytes

    def resize_reservation(self, reservation_id: int, num_bytes: int) -> None:
        """Change what a reservation wants: less is free for others at once, more waits as a new reservation does.

        Raises LeaseRefused, with nothing changed, if it can never be free.
        """
        reservation = self.state.reservations[reservation_id]
        self._check_reservable(num_bytes, reservation.held_bytes)
        reservation.arrival = next(self._arrivals)
        reservation.wanted_bytes = num_bytes
        reservation.held_bytes = min(reservation.held_bytes, num_bytes)

    def keep_reservation(self, reservation_id: int) -> None:
        """Want no more than the reservation holds."""
        reservation = self.state.reservations[reservation_id]
        reservation.wanted_bytes = reservation.held_bytes

    def unreserve(self, reservation_id: int) -> None:
        """End the reservation; memory used under it is foreign from now on. Idempotent."""
        self.state.reservations.pop(reservation_id, None)

    def end(self, lease_id: int, now_ns: int, *, may_return: bool = False) -> None:
        """End the lease. It stays, reaping, until `reaped` returns it.

        With `may_return` the engine may still be alive: its memory is awaited up to the reaping limit, and its grant
        counts for as long as it may not have noticed. Call again without it once the process is known to have ended.
        """
        lease = self.state.leases[lease_id]
        if not lease.ended:
            lease.ended = True
            lease.demand, lease.recalls = None, ()
            self._reaping[lease_id] = _Reaping(now_ns, may_return, lease.granted_bytes, now_ns)
        reaping = self._reaping[lease_id]
        if reaping.may_return and not may_return:
            reaping.may_return, reaping.level_ns = False, now_ns
        if not reaping.may_return:
            lease.granted_bytes = min(lease.granted_bytes, lease.held_bytes)  # it can never map the rest

    def drop(self, lease_id: int) -> None:
        """Remove the lease: it continues under another id, or is reaped."""
        del self.state.leases[lease_id]
        self._reaping.pop(lease_id, None)

    # ---- measurements ---------------------------------------------------------------------------

    def set_rules(self, rules: Rules) -> None:
        """Set the rules that go with the device's new size."""
        self.state.rules = rules

    def measured(self, capacity_bytes: int, free_bytes: int, bounds: Mapping[int, HeldBounds], at_ns: int) -> None:
        """Apply a measurement of the device at `at_ns`, with the bounds of each lease at that instant."""
        state = self.state
        state.capacity_bytes, state.used_bytes = capacity_bytes, capacity_bytes - free_bytes
        for lease in state.leases.values():
            bound = bounds.get(lease.lease_id, HeldBounds(0, lease.granted_bytes))
            # Memory beyond the grant counts as foreign, so that it is accounted for.
            lease.upper_bytes = min(bound.upper_bytes, lease.granted_bytes)
            lease.lower_bytes = min(bound.lower_bytes, lease.upper_bytes)
        self._measured_ns = at_ns
        self._shrink_reaped()
        foreign = max(0, state.used_bytes - sum(lease.upper_bytes for lease in state.leases.values()))
        state.foreign_bytes = min(foreign, self._previous_foreign or 0)
        self._previous_foreign = foreign
        state.base_bytes = min(state.base_bytes, foreign)
        self._add_peak(at_ns, state.foreign_bytes)

    def unmeasured(self) -> None:
        """Mark the device as unmeasured: nothing is decided until the next measurement."""
        self.state.used_bytes = None
        self._previous_foreign = None

    def hold(self, lease_id: int, held_bytes: int) -> None:
        """Set the current upper bound from the lease's record."""
        self.state.leases[lease_id].held_bytes = held_bytes

    def reaped(self, now_ns: int) -> tuple[int, ...]:
        """The ended leases to `drop`; memory they still hold is foreign from then on."""
        limit_ns = int(self.state.rules.reaping_limit_s * 1e9)
        return tuple(
            lease_id
            for lease_id, reaping in self._reaping.items()
            if self.state.leases[lease_id].granted_bytes == 0
            or now_ns - reaping.ended_ns > limit_ns
            or (not reaping.may_return and self._measured_ns - reaping.level_ns > _SETTLED_NS)
        )

    def decide(self, now_ns: int) -> tuple[Order, ...]:
        """Compute the orders, apply them here and return them for the broker to send."""
        orders = decide(self.state, now_ns)
        for order in orders:
            self._apply(order, now_ns)
        return orders

    # ---- internal -------------------------------------------------------------------------------

    def _apply(self, order: Order, now_ns: int) -> None:
        match order:
            case Grant(lease_id, granted_bytes):
                self.state.leases[lease_id].granted_bytes = granted_bytes
            case Recall(lease_id, target_bytes, deadline_s, for_growth, by_hand, spares_requests):
                lease = self.state.leases[lease_id]
                recall = PendingRecall(target_bytes, now_ns, now_ns + int(deadline_s * 1e9), by_hand, spares_requests)
                lease.recalls = (*lease.recalls, recall)
                if for_growth:
                    lease.gave_for_growth_ns = now_ns
            case Withdraw(lease_id):
                self.state.leases[lease_id].recalls = ()
            case Ready(reservation_id):
                state, reservation = self.state, self.state.reservations[reservation_id]
                state.base_bytes = max(state.base_bytes, state.foreign_at_most_bytes - state.reserved_bytes)
                reservation.held_bytes = reservation.wanted_bytes

    def _check_bounds(self, new: LeaseState) -> None:
        """Raise InvalidLease if a new lease's numbers contradict each other, MinimumsExceedCapacity if its min does not fit."""
        state = self.state
        if new.max_bytes is not None and new.max_bytes < max(1, new.min_bytes):
            raise InvalidLease(
                f"the max of {new.name!r} ({format_bytes(new.max_bytes)}) must be at least 1 byte and not below its "
                f"min ({format_bytes(new.min_bytes)})"
            )
        promised = sum(lease.min_bytes for lease in state.living())
        room = state.capacity_bytes - state.rules.headroom_bytes
        if promised + new.min_bytes > room:
            raise MinimumsExceedCapacity(
                f"a min of {format_bytes(new.min_bytes)} for {new.name!r} makes {format_bytes(promised + new.min_bytes)} "
                f"with what is promised to others ({format_bytes(promised)}); the device has {format_bytes(room)} for "
                f"leases ({format_bytes(state.capacity_bytes)} less {format_bytes(state.rules.headroom_bytes)} headroom). "
                f"Lower the min to {format_bytes(max(0, room - promised))} or less"
            )
        if new.held_bytes > state.capacity_bytes:
            raise InvalidLease(
                f"{new.name!r} cannot hold {format_bytes(new.held_bytes)} of a device that has "
                f"{format_bytes(state.capacity_bytes)}"
            )

    def _check_reservable(self, num_bytes: int, held_bytes: int) -> None:
        state = self.state
        most = max(0, state.capacity_bytes - state.rules.headroom_bytes)
        if num_bytes > max(most, held_bytes):
            raise LeaseRefused(
                f"{format_bytes(num_bytes)} cannot be reserved: the device has {format_bytes(state.capacity_bytes)}, of which "
                f"{format_bytes(state.capacity_bytes - most)} are headroom. Ask for {format_bytes(most)} or less"
            )

    def _not_foreign(self, held_bytes: int) -> None:
        """Subtract memory now known to be an engine's from the foreign amounts, so that others need not give it."""
        if held_bytes:
            if self._previous_foreign is not None:
                self._previous_foreign = max(0, self._previous_foreign - held_bytes)
            self.state.foreign_bytes = max(0, self.state.foreign_bytes - held_bytes)
            self.state.peaks = tuple((at_ns, max(0, peak - held_bytes)) for at_ns, peak in self.state.peaks)

    def _shrink_reaped(self) -> None:
        """Bound what ended leases still hold by the used bytes that no living lease surely holds.

        Until these leases are gone, foreign memory may count as theirs: how much they returned before their end was
        noticed is unknown.
        """
        left = self.state.foreign_at_most_bytes
        for lease_id, reaping in self._reaping.items():
            lease = self.state.leases[lease_id]
            remains = min(lease.granted_bytes, left)
            left -= remains
            lease.lower_bytes = remains
            if reaping.may_return and self._measured_ns - reaping.ended_ns < _UNAWARE_NS:
                continue
            lease.granted_bytes = lease.upper_bytes = remains
            if remains <= reaping.level_bytes - lease.granule_bytes:
                reaping.level_bytes, reaping.level_ns = remains, self._measured_ns

    def _add_peak(self, at_ns: int, num_bytes: int) -> None:
        """Record a peak for the cool-down. Earlier, lower peaks are dropped."""
        since_ns = at_ns - int(self.state.rules.cooldown_s * 1e9)
        kept = [(then_ns, peak) for then_ns, peak in self.state.peaks if then_ns >= since_ns and peak > num_bytes]
        self.state.peaks = (*kept, (at_ns, num_bytes))
