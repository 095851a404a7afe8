"""The lease policy: computes the grants and recalls of one device from the leases' demand and its measured memory. Pure.

    | capacity                                                                                |
    | headroom | band | foreign, reserved | leases that are overdue | shares of all other leases |
               ^ low mark: grants beyond it are recalled
                      ^ high mark: grants above the minimums and recalls both stop here

**Grants** need room by the worst-case view of the last measurement: all used memory that no engine's lower bound covers
counts as foreign. So grants, foreign memory and headroom together never exceed the capacity. **Recalls** for foreign
memory need the best-case view in two measurements: memory that no engine's upper bound explains. So an ordinary map is
not mistaken for an external process.

Above the minimums memory goes, within a priority, to these uses in turn; lower priority numbers are served first:

    used within a fair share          and what requests ask for within it that have waited for memory for `patience_s`
    used                              memory of running requests
    asked for within a fair share     for waiting requests
    held for prefixes                 that are reused, within a fair share, beside leases of lower priority too
    asked for beyond it               those that have waited longest first, equal ones by shares
    kept for prefixes                 of all priorities: first within a fair share, then beyond

A fair share is one by weighted max-min fairness over all that the leases could use. Free blocks in a pool do not count, so they
are recalled first when other leases need memory. docs/decisions/0064-memory-by-value.md, 0085-fair-shares-before-age.md and
0086-prefixes-beside-other-prefixes.md have the reasons and figures.

Times are monotonic nanoseconds, amounts are bytes. docs/decisions/0014-leases.md gives the reasons.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import TypeAlias

KEEP_REST_S = 1.0  # least time between two recalls of kept memory from one lease for what another one would keep
_WEIGHT_STEPS = 1000  # weights are resolved to a thousandth, so that shares are whole numbers


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits and delays that the device's owner sets for leasing."""

    headroom_bytes: int  # never granted to any lease
    band_bytes: int  # between the low and the high mark: changes within it trigger no order
    cooldown_s: float = 2.0  # how long memory that external processes used is withheld from growth
    patience_s: float = 10.0  # a request that memory was asked for this long ago may take memory in use, up to a fair share
    rest_s: float = 0.25  # least time between two recalls of used memory from one lease for another's growth
    recall_deadline_s: float = 1.0
    idle_s: float = 10.0  # beside external processes, an engine that is idle for this long gives back unneeded memory
    reaping_limit_s: float = 5.0  # after this, unreturned memory of an ended lease counts as foreign

    @classmethod
    def of(cls, capacity_bytes: int, headroom_bytes: int | None = None) -> Rules:
        """The default rules of a device: 1/16 headroom, and a 2 % band between the marks, so that ±1 % triggers no order."""
        return cls(capacity_bytes // 16 if headroom_bytes is None else headroom_bytes, capacity_bytes // 50)


@dataclass(frozen=True, slots=True)
class LeaseDemand:
    """The amount that a lease asked for."""

    target_bytes: int  # for requests: the total, not an increment
    expires_ns: int
    since_ns: int = 0  # since when the oldest of these requests waits
    keep_bytes: int = 0  # the total with which cached prefixes would be kept too
    lacking_ns: int = 0  # since when the lease has asked for more than it is granted: the account sets it

    def has_waited(self, seconds: float, now_ns: int) -> bool:
        """Whether its oldest request waits, and memory has been asked for, for so long."""
        return now_ns - max(self.since_ns, self.lacking_ns) >= seconds * 1e9


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A temporary upper limit on a lease, set when the user recalls memory from it."""

    max_bytes: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class PendingRecall:
    """A recall that the engine has not served yet."""

    target_bytes: int
    issued_ns: int
    deadline_ns: int
    by_hand: bool = False
    spares_requests: bool = False  # any answer ends it


@dataclass(slots=True)
class LeaseState:
    """One lease. Only its `DeviceAccount` changes it."""

    lease_id: int
    name: str
    min_bytes: int
    max_bytes: int | None  # None: as much as the device has
    granule_bytes: int
    weight: float
    priority: int  # a lower number is served first
    held_bytes: int = 0  # what it holds now, upper bound
    granted_bytes: int = 0  # what it may hold, by the account
    registered_max_bytes: int | None = field(init=False)  # its max before any limit
    free_bytes: int = 0  # of these, what it can give back without affecting a request or a cached prefix
    kept_bytes: int = 0  # of these, what holds cached prefixes that no request uses
    reused: bool = True  # prompts find half of their tokens or more in its prefixes: they stay beside waiting requests
    reported_bytes: int = 0  # what it held when it reported both
    lower_bytes: int = 0  # bounds of what it held at the last measurement: lower
    upper_bytes: int = 0  # and upper
    demand: LeaseDemand | None = None
    ceiling: Ceiling | None = None
    recalls: tuple[PendingRecall, ...] = ()  # targets fall strictly; each has its own deadline
    heard_ns: int = 0  # its last report or ask: an idle engine sends none
    gave_for_growth_ns: int | None = None  # the last recall for another lease's growth
    withheld: bool = False  # at its last answer, memory that its report calls unneeded: the next recall spares no requests
    ended: bool = False  # reaping: its memory is not back yet

    def __post_init__(self) -> None:
        self.registered_max_bytes = self.max_bytes

    @property
    def expected_bytes(self) -> int:
        """The grant once all pending recalls are served."""
        return self.recalls[-1].target_bytes if self.recalls else self.granted_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes that the lease holds for requests, and besides its pool."""
        return self.filled_bytes - min(self.kept_bytes, self.filled_bytes)

    @property
    def filled_bytes(self) -> int:
        """Bytes that the lease holds and that are not free in its pool: in use, or with cached prefixes."""
        return max(0, min(self.granted_bytes, self.held_bytes) - self.free_bytes)

    @property
    def unneeded_bytes(self) -> int:
        """Bytes granted above the minimum that no request uses."""
        return max(0, self.expected_bytes - max(self.min_bytes, self.in_use_bytes))

    @property
    def hoarded_bytes(self) -> int:
        """Bytes granted above the minimum that are neither in use nor hold cached prefixes."""
        return max(0, self.expected_bytes - max(self.min_bytes, self.filled_bytes))

    def demand_at(self, now_ns: int) -> LeaseDemand | None:
        """The demand, unless it has expired."""
        return self.demand if self.demand is not None and self.demand.expires_ns > now_ns else None

    def lacks_for_ns(self, now_ns: int) -> int | None:
        """How long its oldest request has waited for memory that it asks for, and that is not granted; None: it lacks none, or
        may not have more.
        """
        demand = self.demand_at(now_ns)
        if demand is None or self.recalls:
            return None
        most = self.bounded(demand.target_bytes, now_ns)
        return None if most < self.granted_bytes + self.granule_bytes else now_ns - max(demand.since_ns, demand.lacking_ns)

    def bounded(self, num_bytes: int, now_ns: int) -> int:
        """As many of these bytes as the lease may hold by its max, and by a limit that a user's recall has set."""
        if self.max_bytes is not None:
            num_bytes = min(num_bytes, self.max_bytes)
        if self.ceiling is not None and self.ceiling.until_ns > now_ns:
            num_bytes = min(num_bytes, self.ceiling.max_bytes)
        return num_bytes

    def overdue(self, now_ns: int) -> bool:
        """Whether the deadline of a pending recall has passed."""
        return any(recall.deadline_ns < now_ns for recall in self.recalls)


@dataclass(slots=True)
class ReservedBytes:
    """Bytes kept free for an external process. Those that it wants beyond `held_bytes` wait until they are free."""

    reservation_id: int
    priority: int  # a lower number is served first
    arrival: int  # of the reservation, or of its last growth
    wanted_bytes: int
    held_bytes: int = 0  # free for the process, or used by it

    @property
    def missing_bytes(self) -> int:
        """Bytes that are not free yet."""
        return self.wanted_bytes - self.held_bytes


@dataclass(slots=True)
class SharedDevice:
    """One device. Only `DeviceAccount` changes it.

    `used_bytes` is None until the device has been measured. `foreign_bytes` is the amount that the last two
    measurements agree on; `peaks` holds the amounts they agreed on during the cool-down, as (time, bytes).
    """

    rules: Rules
    capacity_bytes: int
    used_bytes: int | None = None
    foreign_bytes: int = 0
    peaks: Sequence[tuple[int, int]] = ()
    leases: dict[int, LeaseState] = field(default_factory=dict)
    reservations: dict[int, ReservedBytes] = field(default_factory=dict)
    base_bytes: int = 0  # foreign memory outside the reservations

    @property
    def reserved_bytes(self) -> int:
        """Bytes that reservations hold."""
        return sum(reservation.held_bytes for reservation in self.reservations.values())

    def next_reservations(self) -> list[ReservedBytes]:
        """The waiting reservations for which leases give memory back, in order of priority, then arrival.

        They fit beside the minimums and what external processes have. The first one that does not fit ends the list: a small
        reservation does not overtake a larger one, and leases give nothing for one that they cannot serve.
        """
        waiting = [(one.priority, one.arrival, one) for one in self.reservations.values() if one.wanted_bytes > one.held_bytes]
        if not waiting:
            return []
        heapq.heapify(waiting)  # most often only the first is looked at
        minimums = sum(lease.min_bytes for lease in self.living())
        left = self.capacity_bytes - self.rules.headroom_bytes - minimums - self.external_bytes(self.foreign_bytes)
        found = []
        while waiting:
            _, _, reservation = heapq.heappop(waiting)
            left -= reservation.missing_bytes
            if left < 0:
                break
            found.append(reservation)
        return found

    @property
    def foreign_at_most_bytes(self) -> int:
        """Bytes held by external processes if every engine holds only its lower bound. Needs a measurement."""
        assert self.used_bytes is not None
        return max(0, self.used_bytes - sum(lease.lower_bytes for lease in self.living()))

    def living(self) -> list[LeaseState]:
        """The leases that have not ended."""
        return [lease for lease in self.leases.values() if not lease.ended]

    @property
    def promised_bytes(self) -> int:
        """Bytes granted to living leases, plus those that ended leases may still map before they notice their end."""
        living = sum(lease.granted_bytes for lease in self.living())
        return living + sum(max(0, t.granted_bytes - t.lower_bytes) for t in self.leases.values() if t.ended)

    def external_bytes(self, foreign_bytes: int) -> int:
        """What external processes have: foreign memory, and what is reserved. Memory used under a reservation counts once."""
        reserved = self.reserved_bytes
        return max(foreign_bytes, self.base_bytes + reserved if reserved else 0)

    def off_the_top(self, foreign_bytes: int) -> int:
        """What leases may not have: `external_bytes`, and what the next reservations wait for."""
        return self.external_bytes(foreign_bytes) + sum(one.missing_bytes for one in self.next_reservations())

    def peak_bytes(self, now_ns: int) -> int:
        """The most that external processes held during the cool-down."""
        since_ns = now_ns - int(self.rules.cooldown_s * 1e9)
        return max((at_most for at_ns, at_most in self.peaks if at_ns >= since_ns), default=0)

    def room_bytes(self) -> int:
        """Bytes that may be granted up to the minimums; negative if too much is granted. Needs a measurement."""
        foreign = self.off_the_top(self.foreign_at_most_bytes)
        return self.capacity_bytes - self.rules.headroom_bytes - self.promised_bytes - foreign

    def growth_room_bytes(self, now_ns: int) -> int:
        """Bytes that may be granted above the minimums, within the high mark and with foreign memory at its recent peak."""
        more = self.off_the_top(max(self.foreign_at_most_bytes, self.peak_bytes(now_ns)))
        return self.room_bytes() - self.rules.band_bytes - (more - self.off_the_top(self.foreign_at_most_bytes))


@dataclass(frozen=True, slots=True)
class Grant:
    """The lease may hold `granted_bytes` in all. `added_bytes` of them are new: whole granules, or up to its minimum."""

    lease_id: int
    granted_bytes: int
    added_bytes: int


@dataclass(frozen=True, slots=True)
class Recall:
    """The lease must be at or under `target_bytes` within `deadline_s`."""

    lease_id: int
    target_bytes: int
    deadline_s: float
    for_growth: bool = False  # only for another lease's growth
    by_hand: bool = False  # ordered by the user: never withdrawn
    spares_requests: bool = False  # only as far as running requests do not need the memory: any answer ends it


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The overdue recalls of the lease are no longer needed."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The bytes that the reservation waits for are free."""

    reservation_id: int


Order: TypeAlias = Grant | Recall | Withdraw | Ready


def decide(state: SharedDevice, now_ns: int) -> tuple[Order, ...]:
    """Compute the orders for the current state; none until the device is measured.

    A lease with a pending recall gets no grant. A lease with an overdue recall counts as immovable, and the other
    leases are served from the rest. Its recalls are withdrawn once no lease waits and there is room for the memory it
    kept. A lease gives memory in use for another lease's growth at most once per `rest_s`; for foreign memory,
    reservations and minimums it gives whenever needed. No recall goes below a minimum.
    """
    if state.used_bytes is None:
        return ()
    targets = fair_targets(state, now_ns)
    grants = tuple(_grants(state, targets, now_ns))
    recalls = tuple(_recalls(state, targets, now_ns))
    ordered = {grant.lease_id for grant in grants} | {recall.lease_id for recall in recalls}
    return (*_ready(state), *grants, *recalls, *_releases(state, ordered, now_ns), *_withdrawals(state, grants, now_ns))


def fair_targets(state: SharedDevice, now_ns: int) -> dict[int, int]:
    """The target of each movable lease: its share, in whole granules from its current grant.

    Bytes left by rounding down go, one granule each, to the leases that could use them, least served first. So the
    targets depend on what the leases could use and not on arrival order.
    """
    movable = _movable(state, now_ns)
    uses = {lease.lease_id: _uses(state, lease, now_ns) for lease in movable}
    targets, left = _shares(state, movable, uses, now_ns), _available(state, now_ns)
    for lease in movable:
        stands = lease.expected_bytes
        level = stands + _floor(targets[lease.lease_id] - stands, lease.granule_bytes)
        targets[lease.lease_id] = max(lease.min_bytes, level)
        left -= targets[lease.lease_id]
    for use in ("asked_bytes", "kept_bytes"):
        for lease in sorted(movable, key=lambda lease: _order_of_growth(lease, targets[lease.lease_id])):
            more = targets[lease.lease_id] + lease.granule_bytes
            if lease.granule_bytes <= left and more <= getattr(uses[lease.lease_id], use):
                targets[lease.lease_id] = more
                left -= lease.granule_bytes
    return targets


def _shares(state: SharedDevice, movable: list[LeaseState], uses: dict[int, _Uses], now_ns: int) -> dict[int, int]:
    """The share of each movable lease, to the byte and never below its minimum."""
    shares = {lease.lease_id: lease.min_bytes for lease in movable}
    left = _available(state, now_ns) - sum(shares.values())

    def fill(leases: list[LeaseState], use: str) -> None:
        """Raise the shares of `leases` to this use, as far as what is left allows."""
        nonlocal left
        caps = [max(0, getattr(uses[lease.lease_id], use) - shares[lease.lease_id]) for lease in leases]
        if not any(caps):
            return
        for lease, more in zip(leases, water_fill(left, caps, [lease.weight for lease in leases]), strict=True):
            shares[lease.lease_id] += more
            left -= more

    def fair_more(leases: list[LeaseState]) -> dict[int, int]:
        """Of what is left, the fair share of each of `leases`, above its minimum."""
        caps = [max(0, uses[lease.lease_id].kept_bytes - shares[lease.lease_id]) for lease in leases]
        filled = water_fill(left, caps, [lease.weight for lease in leases])
        return {lease.lease_id: more for lease, more in zip(leases, filled, strict=True)}

    for priority in sorted({lease.priority for lease in movable}):
        tier = [lease for lease in movable if lease.priority == priority]
        fair = fair_more(tier)
        # An idle engine's prefixes keep less than all from requests of lower priority.
        others = [lease for lease in movable if lease.priority >= priority]
        beside = fair_more(others) if len(others) > len(tier) else fair
        for lease in tier:
            least, lease_id = lease.min_bytes, lease.lease_id
            uses[lease_id] = uses[lease_id].within(least + fair[lease_id], least + beside[lease_id])
        fill(tier, "fair_used_bytes")
        patient = [lease for lease in tier if _has_waited(state, lease, now_ns)]
        fill(patient, "fair_asked_bytes")
        fill(tier, "used_bytes")
        fill(tier, "fair_asked_bytes")
        fill(tier, "fair_held_bytes")
        for since_ns in sorted({uses[lease.lease_id].since_ns for lease in tier}):
            fill([lease for lease in tier if uses[lease.lease_id].since_ns == since_ns], "asked_bytes")
    fill(movable, "fair_kept_bytes")
    fill(movable, "kept_bytes")
    return shares


def water_fill(amount: int, caps: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split `amount` by weighted max-min fairness: no share exceeds its cap, and uncapped shares are equal per weight.

    Exact to the byte; indivisible rests go to the highest caps per weight. Either all of `amount` is given or all caps
    are met.
    """
    if sum(caps) <= amount:
        return list(caps)
    steps = [max(1, round(weight * _WEIGHT_STEPS)) for weight in weights]
    shares = [0] * len(caps)
    left, weight_left = max(0, amount), sum(steps)
    for i in sorted(range(len(caps)), key=lambda i: Fraction(caps[i], steps[i])):
        shares[i] = min(caps[i], left * steps[i] // weight_left)
        left -= shares[i]
        weight_left -= steps[i]
    return shares


# ---- capacity and demand ------------------------------------------------------------------------


def _movable(state: SharedDevice, now_ns: int) -> list[LeaseState]:
    """The leases that may receive orders: neither ended nor overdue."""
    return [lease for lease in state.living() if not lease.overdue(now_ns)]


def _below_low_mark(state: SharedDevice, foreign_bytes: int, now_ns: int) -> int:
    """Bytes that movable leases may hold before the headroom is touched, with `foreign_bytes` of foreign memory.

    Memory of ended leases is about to return: it causes no recall, and grants wait for it.
    """
    overdue = sum(lease.granted_bytes for lease in state.living() if lease.overdue(now_ns))
    return state.capacity_bytes - state.rules.headroom_bytes - state.off_the_top(foreign_bytes) - overdue


def _available(state: SharedDevice, now_ns: int) -> int:
    """Bytes that movable leases may hold in the long run: up to the high mark, with foreign memory at its peak."""
    foreign = max(state.foreign_bytes, state.peak_bytes(now_ns))
    return _below_low_mark(state, foreign, now_ns) - state.rules.band_bytes


@dataclass(frozen=True, slots=True)
class _Uses:
    """What a lease could use in all, each at least its minimum, in whole granules from its grant; `fair_...`: within its
    fair share.
    """

    used_bytes: int  # what it has in use
    held_bytes: int  # and what it holds for cached prefixes that are reused
    asked_bytes: int  # what it has in use and what its requests ask for
    kept_bytes: int  # all of it, and what cached prefixes could take
    since_ns: int  # since when the oldest request waits
    fair_used_bytes: int = 0
    fair_held_bytes: int = 0
    fair_asked_bytes: int = 0
    fair_kept_bytes: int = 0

    def within(self, share_bytes: int, prefix_share_bytes: int) -> _Uses:
        """The same, with these fair shares: of its requests, and with its prefixes."""
        return replace(
            self,
            fair_used_bytes=min(share_bytes, self.used_bytes),
            fair_asked_bytes=min(share_bytes, self.asked_bytes),
            fair_held_bytes=min(prefix_share_bytes, self.held_bytes),
            fair_kept_bytes=min(prefix_share_bytes, self.kept_bytes),
        )


def _uses(state: SharedDevice, lease: LeaseState, now_ns: int) -> _Uses:
    most = lease.bounded(state.capacity_bytes if lease.max_bytes is None else lease.max_bytes, now_ns)
    stands = max(lease.min_bytes, lease.expected_bytes)

    def whole(wanted: int) -> int:
        wanted = stands + _ceil(wanted - stands, lease.granule_bytes)
        if wanted > most:
            wanted = stands + _floor(most - stands, lease.granule_bytes)
        return max(lease.min_bytes, wanted)

    demand = lease.demand_at(now_ns)
    used = max(lease.min_bytes, lease.in_use_bytes)
    asked = used if demand is None else max(used, demand.target_bytes)
    kept = max(asked, lease.filled_bytes, 0 if demand is None else demand.keep_bytes)
    held = max(used, lease.filled_bytes) if lease.reused else used
    return _Uses(whole(used), whole(held), whole(asked), whole(kept), now_ns if demand is None else demand.since_ns)


def _has_waited(state: SharedDevice, lease: LeaseState, now_ns: int) -> bool:
    demand = lease.demand_at(now_ns)
    return demand is not None and demand.has_waited(state.rules.patience_s, now_ns)


def _order_of_growth(lease: LeaseState, has_bytes: int) -> tuple[int, float, int]:
    """Sort key: lowest priority number first, then the least served by weight, then the oldest."""
    return lease.priority, (has_bytes - lease.min_bytes) / lease.weight, lease.lease_id


# ---- orders -------------------------------------------------------------------------------------


def _ready(state: SharedDevice) -> Iterable[Ready]:
    """The next reservations that fit now. A process that waits has no part in what is reserved: its bytes come on top."""
    left = state.capacity_bytes - state.rules.headroom_bytes - state.promised_bytes
    left -= state.external_bytes(state.foreign_at_most_bytes)
    for reservation in state.next_reservations():
        left -= reservation.missing_bytes
        if left < 0:
            return
        yield Ready(reservation.reservation_id)


def _grants(state: SharedDevice, targets: dict[int, int], now_ns: int) -> Iterable[Grant]:
    """Grants up to the minimums first, then growth up to the targets, each within the room there is."""
    takers = [lease for lease in _movable(state, now_ns) if not lease.recalls]
    granted = {lease.lease_id: lease.granted_bytes for lease in takers}
    room, growth_room = state.room_bytes(), state.growth_room_bytes(now_ns)
    for lease in sorted(takers, key=lambda lease: (lease.priority, lease.lease_id)):
        missing = max(0, lease.min_bytes - lease.granted_bytes)
        added = missing if missing <= room else _floor(max(0, room), lease.granule_bytes)
        granted[lease.lease_id] += added
        room -= added
        growth_room -= missing  # also what is still missing: minimums come before growth
    for lease in sorted(takers, key=lambda lease: _order_of_growth(lease, lease.granted_bytes)):
        missing = min(targets[lease.lease_id] - granted[lease.lease_id], growth_room)
        if granted[lease.lease_id] >= lease.min_bytes and missing > 0:
            added = _floor(missing, lease.granule_bytes)
            granted[lease.lease_id] += added
            growth_room -= added
    for lease in takers:
        if (total := granted[lease.lease_id]) > lease.granted_bytes:
            yield Grant(lease.lease_id, total, total - lease.granted_bytes)


def _recalls(state: SharedDevice, targets: dict[int, int], now_ns: int) -> Iterable[Recall]:
    """The recalls of leases above their targets."""
    movable = _movable(state, now_ns)
    expected = sum(lease.expected_bytes for lease in movable)
    takers = [lease for lease in movable if not lease.recalls]
    to_minimums = sum(max(0, lease.min_bytes - lease.granted_bytes) for lease in takers)
    to_targets = sum(max(0, targets[lease.lease_id] - max(lease.min_bytes, lease.granted_bytes)) for lease in takers)
    low = _below_low_mark(state, state.foreign_bytes, now_ns)
    must = expected + to_minimums - low
    if expected > low:
        must = max(must, expected - low + state.rules.band_bytes)
    should = expected + to_minimums + to_targets - _available(state, now_ns) if to_targets else 0
    if max(must, should) <= 0:
        return
    asked = {lease.lease_id: _uses(state, lease, now_ns).asked_bytes for lease in takers}
    to_keep = sum(max(0, targets[lease.lease_id] - max(lease.granted_bytes, asked[lease.lease_id])) for lease in takers)

    surplus = {lease.lease_id: max(0, lease.expected_bytes - targets[lease.lease_id]) for lease in movable}
    taken = _take(movable, surplus, must)
    for lease in movable:
        if lease.lease_id in taken:
            yield _recall(state, lease, taken[lease.lease_id], for_growth=False)
    givers = [lease for lease in movable if lease.lease_id not in taken]
    for lease in givers:  # `rest_s` protects memory in use; other memory may be recalled for requests at any time
        if not _rested(lease, state.rules.rest_s, now_ns):
            surplus[lease.lease_id] = min(surplus[lease.lease_id], lease.unneeded_bytes)
    more = _take(givers, surplus, should - to_keep - sum(taken.values()))
    for lease in givers:  # for prefixes nothing that is kept goes before the lease has rested
        if not _rested(lease, KEEP_REST_S, now_ns):
            surplus[lease.lease_id] = max(more.get(lease.lease_id, 0), min(surplus[lease.lease_id], lease.hoarded_bytes))
    more = _take(givers, surplus, should - sum(taken.values()))
    for lease in givers:
        if lease.lease_id in more:
            spares = more[lease.lease_id] <= lease.unneeded_bytes and not lease.withheld
            yield _recall(state, lease, more[lease.lease_id], for_growth=True, spares_requests=spares)


def _releases(state: SharedDevice, ordered: set[int], now_ns: int) -> Iterable[Recall]:
    """The recalls of what idle engines do not need, where external processes use the device: they read its free memory, and
    do not ask.
    """
    if state.foreign_bytes <= state.rules.band_bytes:
        return
    for lease in _movable(state, now_ns):
        if (
            (unneeded := lease.unneeded_bytes)
            and not lease.recalls
            and lease.lease_id not in ordered
            and now_ns - lease.heard_ns >= state.rules.idle_s * 1e9
        ):
            yield _recall(state, lease, unneeded, for_growth=False, spares_requests=not lease.withheld)


def _withdrawals(state: SharedDevice, grants: Iterable[Grant], now_ns: int) -> Iterable[Withdraw]:
    """Withdraw overdue recalls once there is room for the kept memory and no other lease could use more."""
    overdue = [lease for lease in state.living() if lease.overdue(now_ns)]
    if not overdue or state.next_reservations():
        return
    added = {grant.lease_id: grant.added_bytes for grant in grants}
    if state.growth_room_bytes(now_ns) < sum(added.values()):
        return
    for lease in _movable(state, now_ns):
        if _uses(state, lease, now_ns).asked_bytes > lease.granted_bytes + added.get(lease.lease_id, 0):
            return
    for lease in overdue:
        if not any(recall.by_hand for recall in lease.recalls):
            yield Withdraw(lease.lease_id)


def _take(leases: Iterable[LeaseState], surplus: dict[int, int], needed: int) -> dict[int, int]:
    """How much of each lease's surplus to take for `needed` bytes: whole granules, or the whole surplus.

    Idle bytes (free in a pool or never mapped) go first, then of the lowest-priority leases what only cached prefixes hold, and
    bytes in use.
    """
    taken: dict[int, int] = {}

    def take(lease: LeaseState, at_most: int) -> None:
        nonlocal needed
        already = taken.get(lease.lease_id, 0)
        wanted = min(at_most - already, needed)
        if wanted > 0:
            whole = already + _ceil(wanted, lease.granule_bytes)
            taken[lease.lease_id] = min(surplus[lease.lease_id], whole)
            needed -= taken[lease.lease_id] - already

    givers = [lease for lease in leases if surplus[lease.lease_id] > 0]
    for lease in sorted(givers, key=lambda lease: (-lease.hoarded_bytes, lease.lease_id)):
        take(lease, min(lease.hoarded_bytes, surplus[lease.lease_id]))
    givers.sort(key=lambda lease: (-lease.priority, -surplus[lease.lease_id] / lease.weight, lease.lease_id))
    for _, group in groupby(givers, key=lambda lease: lease.priority):
        of_priority = list(group)
        for lease in of_priority:
            take(lease, min(lease.unneeded_bytes, surplus[lease.lease_id]))
        for lease in of_priority:
            take(lease, surplus[lease.lease_id])
    return taken


def _recall(
    state: SharedDevice, lease: LeaseState, num_bytes: int, *, for_growth: bool, spares_requests: bool = False
) -> Recall:
    target, deadline_s = lease.expected_bytes - num_bytes, state.rules.recall_deadline_s
    return Recall(lease.lease_id, target, deadline_s, for_growth=for_growth, spares_requests=spares_requests)


def _rested(lease: LeaseState, rest_s: float, now_ns: int) -> bool:
    return lease.gave_for_growth_ns is None or now_ns - lease.gave_for_growth_ns >= rest_s * 1e9


def _floor(num_bytes: int, granule_bytes: int) -> int:
    return num_bytes // granule_bytes * granule_bytes


def _ceil(num_bytes: int, granule_bytes: int) -> int:
    return -(-num_bytes // granule_bytes) * granule_bytes
