"""Who may hold how much of one device: from what the leases want and what was measured to grants and recalls. Pure.

    | capacity                                                                                |
    | headroom | band | foreign, reserved | leases that are overdue | shares of all other leases |
               ^ low mark: what is granted beyond it is recalled
                      ^ high mark: what is granted above the minimums ends here, and so does a recall

**Grants** need room by the worst view of the last measurement: all that was used and is not surely an engine's counts as
foreign. So what is granted, foreign memory and headroom together never exceed the capacity, though some engine may be
mapping just now. **Recalls** for foreign memory need the best view, in two measurements: what no engine's upper bound
explains. An ordinary map does not look like a stranger.

Above its minimum every lease gets its share: by weighted max-min fairness of what it could use, leases of a lower
priority number first. What a lease could use is what it has in use, or asks for. What lies free in its pool it could not
use, so that goes first when others want it.

Times are monotonic nanoseconds, amounts bytes. `decide` changes nothing and asks no clock; the same state gives the same
orders. The reasons stand in docs/decisions/0014-leases.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

_WEIGHT_STEPS = 1000  # weights are told apart to a thousandth, so that shares are whole numbers


@dataclass(frozen=True, slots=True)
class Rules:
    """What the owner of a device has laid down for it."""

    headroom_bytes: int  # nobody who holds a lease may touch these
    band_bytes: int  # between the low and the high mark: what may come and go without an order
    cooldown_s: float = 2.0  # memory that strangers took is not given out again sooner
    rest_s: float = 0.25  # a lease that gave so that another may grow does not give for that again sooner
    recall_deadline_s: float = 1.0
    reaping_limit_s: float = 5.0  # what an ended lease has not given back by then is foreign

    @classmethod
    def of(cls, capacity_bytes: int, headroom_bytes: int | None = None) -> Rules:
        """The usual rules of a device: a sixteenth for headroom, and 2 % between the marks, so that ±1 % moves nothing."""
        return cls(capacity_bytes // 16 if headroom_bytes is None else headroom_bytes, capacity_bytes // 50)


@dataclass(frozen=True, slots=True)
class LeaseDemand:
    """What a lease asked for."""

    target_bytes: int  # in all
    expires_ns: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a lease may not grow above for a while, since somebody wanted it smaller."""

    max_bytes: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class PendingRecall:
    """A recall that is not served yet."""

    target_bytes: int
    issued_ns: int
    deadline_ns: int
    by_hand: bool = False


@dataclass(slots=True)
class LeaseState:
    """One lease. Changed by `Ledger` alone."""

    lease_id: int
    name: str
    min_bytes: int
    max_bytes: int | None  # None: as much as the device has
    granule_bytes: int
    weight: float = 1.0
    priority: int = 0  # a lower number goes first
    registered_max_bytes: int | None = None  # its max before anybody limited it
    granted_bytes: int = 0  # the ledger: what it may hold
    held_bytes: int = 0  # what it holds now, at most
    free_bytes: int = 0  # of these, free in its pool
    lower_bytes: int = 0  # what it held when the device was measured last: at least,
    upper_bytes: int = 0  # and at most
    demand: LeaseDemand | None = None
    ceiling: Ceiling | None = None
    recalls: tuple[PendingRecall, ...] = ()  # ever lower targets, each with its own deadline
    gave_for_growth_ns: int | None = None  # when something was recalled last so that another may grow
    ended: bool = False  # and its memory is not back: reaping

    @property
    def expected_bytes(self) -> int:
        """What it is granted once its recalls are served."""
        return self.recalls[-1].target_bytes if self.recalls else self.granted_bytes

    @property
    def in_use_bytes(self) -> int:
        """What it holds and has in use."""
        return max(0, min(self.granted_bytes, self.held_bytes) - self.free_bytes)

    def overdue(self, now_ns: int) -> bool:
        """Whether it has not served a recall in time."""
        return any(recall.deadline_ns < now_ns for recall in self.recalls)


@dataclass(slots=True)
class ReservedBytes:
    """Bytes kept free for a stranger who will come."""

    reservation_id: int
    num_bytes: int
    ready: bool = False  # they are free


@dataclass(slots=True)
class SharedDevice:
    """One device. Changed by `Ledger` alone.

    `used_bytes` is None until the device was measured. `foreign_bytes` is what the last two measurements agree on;
    `peaks` what they agreed on during the cool-down, as (time, bytes).
    """

    rules: Rules
    capacity_bytes: int
    used_bytes: int | None = None
    foreign_bytes: int = 0
    peaks: Sequence[tuple[int, int]] = ()
    tenants: dict[int, LeaseState] = field(default_factory=dict)
    reservations: dict[int, ReservedBytes] = field(default_factory=dict)
    base_bytes: int = 0  # foreign memory that the reservations are not for

    @property
    def reserved_bytes(self) -> int:
        """What is reserved, free already or not yet."""
        return sum(reservation.num_bytes for reservation in self.reservations.values())

    @property
    def foreign_at_most_bytes(self) -> int:
        """What strangers hold if every engine holds as little as its record allows. Needs a measurement."""
        assert self.used_bytes is not None
        return max(0, self.used_bytes - sum(tenant.lower_bytes for tenant in self.living()))

    def living(self) -> list[LeaseState]:
        """The leases that have not ended."""
        return [tenant for tenant in self.tenants.values() if not tenant.ended]

    @property
    def promised_bytes(self) -> int:
        """What is granted: to the living, and of the ended what they may still map, not having seen that they ended."""
        living = sum(tenant.granted_bytes for tenant in self.living())
        return living + sum(max(0, t.granted_bytes - t.lower_bytes) for t in self.tenants.values() if t.ended)

    def off_the_top(self, foreign_bytes: int) -> int:
        """What strangers hold, and what is reserved for them; memory that a reservation was made for counts once."""
        return max(foreign_bytes, self.base_bytes + self.reserved_bytes if self.reservations else 0)

    def peak_bytes(self, now_ns: int) -> int:
        """The most that strangers have held during the cool-down."""
        since_ns = now_ns - int(self.rules.cooldown_s * 1e9)
        return max((at_most for at_ns, at_most in self.peaks if at_ns >= since_ns), default=0)

    def room_bytes(self) -> int:
        """What may be granted on the way to a minimum; negative where too much is granted. Needs a measurement."""
        foreign = self.off_the_top(self.foreign_at_most_bytes)
        return self.capacity_bytes - self.rules.headroom_bytes - self.promised_bytes - foreign

    def growth_room_bytes(self, now_ns: int) -> int:
        """What may be granted above the minimums: it stays below the high mark, and below the strangers' peak."""
        more = self.off_the_top(max(self.foreign_at_most_bytes, self.peak_bytes(now_ns)))
        return self.room_bytes() - self.rules.band_bytes - (more - self.off_the_top(self.foreign_at_most_bytes))


@dataclass(frozen=True, slots=True)
class Grant:
    """The lease may hold `granted_bytes` in all; `added_bytes` of them are new: whole granules, or up to its minimum."""

    lease_id: int
    granted_bytes: int
    added_bytes: int


@dataclass(frozen=True, slots=True)
class Recall:
    """The lease shall be at or under `target_bytes` within `deadline_s`."""

    lease_id: int
    target_bytes: int
    deadline_s: float
    for_growth: bool = False  # for nothing but another lease's growth
    by_hand: bool = False  # somebody ordered it, for reasons of his own: it is not withdrawn


@dataclass(frozen=True, slots=True)
class Withdraw:
    """What was recalled of the lease, and is overdue, nobody needs any more."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """What was reserved is free."""

    reservation_id: int


Order: TypeAlias = Grant | Recall | Withdraw | Ready


def decide(state: SharedDevice, now_ns: int) -> tuple[Order, ...]:
    """What to do now; nothing while the device is not measured. Read-only.

    A lease with a pending recall gets nothing. One whose recall is overdue counts as immovable: the others are served
    from what it leaves; once nobody waits and there is room for what it kept, its recalls are withdrawn. So that another may
    grow a lease gives once, and then rests; for strangers, reservations and minimums it gives whenever it must. No recall
    goes below a minimum.
    """
    if state.used_bytes is None:
        return ()
    targets = fair_targets(state, now_ns)
    grants = tuple(_grants(state, targets, now_ns))
    return (
        *_ready(state),
        *grants,
        *_recalls(state, targets, now_ns),
        *_withdrawals(state, grants, now_ns),
    )


def fair_targets(state: SharedDevice, now_ns: int) -> dict[int, int]:
    """What each movable lease should have: its share, on the grid of whole granules from where it stands.

    What rounding down leaves goes, a granule each, to those who could use it, the least served first. So the targets
    follow from what the leases could use, and not from who came first: once there, nothing moves.
    """
    movable = _movable(state, now_ns)
    could_use = {tenant.lease_id: _could_use(state, tenant, now_ns) for tenant in movable}
    targets, left = _shares(state, movable, could_use, now_ns), _available(state, now_ns)
    for tenant in movable:
        stands = tenant.expected_bytes
        level = stands + _floor(targets[tenant.lease_id] - stands, tenant.granule_bytes)
        targets[tenant.lease_id] = max(tenant.min_bytes, level)
        left -= targets[tenant.lease_id]
    for tenant in sorted(movable, key=lambda tenant: _order_of_growth(tenant, targets[tenant.lease_id])):
        more = targets[tenant.lease_id] + tenant.granule_bytes
        if tenant.granule_bytes <= left and more <= could_use[tenant.lease_id]:
            targets[tenant.lease_id] = more
            left -= tenant.granule_bytes
    return targets


def _shares(state: SharedDevice, movable: list[LeaseState], could_use: dict[int, int], now_ns: int) -> dict[int, int]:
    """The bytes that each movable lease should have, to the byte: never less than its minimum."""
    shares = {tenant.lease_id: tenant.min_bytes for tenant in movable}
    left = _available(state, now_ns) - sum(shares.values())
    for priority in sorted({tenant.priority for tenant in movable}):
        tier = [tenant for tenant in movable if tenant.priority == priority]
        caps = [could_use[tenant.lease_id] - tenant.min_bytes for tenant in tier]
        for tenant, more in zip(tier, water_fill(left, caps, [tenant.weight for tenant in tier]), strict=True):
            shares[tenant.lease_id] += more
            left -= more
    return shares


def water_fill(amount: int, caps: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Weighted max-min fairness: nobody above his cap, and nobody has less per weight than one who is not at his cap.

    To the byte; what does not divide goes to those with the highest caps. All of `amount` is given, or all caps are met.
    """
    steps = [max(1, round(weight * _WEIGHT_STEPS)) for weight in weights]
    shares = [0] * len(caps)
    left, weight_left = max(0, amount), sum(steps)
    for i in sorted(range(len(caps)), key=lambda i: Fraction(caps[i], steps[i])):
        shares[i] = min(caps[i], left * steps[i] // weight_left)
        left -= shares[i]
        weight_left -= steps[i]
    return shares


# ---- what there is, and what is wanted ----------------------------------------------------------


def _movable(state: SharedDevice, now_ns: int) -> list[LeaseState]:
    """The leases that orders may go to: neither ended nor overdue."""
    return [tenant for tenant in state.living() if not tenant.overdue(now_ns)]


def _below_low_mark(state: SharedDevice, foreign_bytes: int, now_ns: int) -> int:
    """What movable leases may hold with strangers at `foreign_bytes` before the headroom is touched.

    What ended leases have not given back is on its way: nobody is recalled for it, and what is granted waits for it.
    """
    overdue = sum(tenant.granted_bytes for tenant in state.living() if tenant.overdue(now_ns))
    return state.capacity_bytes - state.rules.headroom_bytes - state.off_the_top(foreign_bytes) - overdue


def _available(state: SharedDevice, now_ns: int) -> int:
    """What movable leases may hold in the long run: up to the high mark, strangers at their peak."""
    foreign = max(state.foreign_bytes, state.peak_bytes(now_ns))
    return _below_low_mark(state, foreign, now_ns) - state.rules.band_bytes


def _could_use(state: SharedDevice, tenant: LeaseState, now_ns: int) -> int:
    """What a lease has in use or asks for, reached from its grant by whole granules; its minimum at least."""
    most = state.capacity_bytes if tenant.max_bytes is None else tenant.max_bytes
    if tenant.ceiling is not None and tenant.ceiling.until_ns > now_ns:
        most = min(most, tenant.ceiling.max_bytes)
    wanted = max(tenant.min_bytes, tenant.in_use_bytes)
    if tenant.demand is not None and tenant.demand.expires_ns > now_ns:
        wanted = max(wanted, tenant.demand.target_bytes)
    stands = max(tenant.min_bytes, tenant.expected_bytes)
    wanted = stands + _ceil(wanted - stands, tenant.granule_bytes)
    if wanted > most:
        wanted = stands + _floor(most - stands, tenant.granule_bytes)
    return max(tenant.min_bytes, wanted)


def _order_of_growth(tenant: LeaseState, has_bytes: int) -> tuple[int, float, int]:
    """Higher priority first, then the least served by weight, then the oldest."""
    return tenant.priority, (has_bytes - tenant.min_bytes) / tenant.weight, tenant.lease_id


# ---- orders -------------------------------------------------------------------------------------


def _ready(state: SharedDevice) -> Iterable[Ready]:
    """Those for which there is room, in the order in which they came: a small one does not pass a big one."""
    left = state.capacity_bytes - state.rules.headroom_bytes - state.promised_bytes
    reserved = sum(reservation.num_bytes for reservation in state.reservations.values() if reservation.ready)
    for reservation in state.reservations.values():
        if not reservation.ready:
            reserved += reservation.num_bytes
            if left < max(state.foreign_at_most_bytes, state.base_bytes + reserved):
                return
            yield Ready(reservation.reservation_id)


def _grants(state: SharedDevice, targets: dict[int, int], now_ns: int) -> Iterable[Grant]:
    """First what is missing to minimums, then growth up to the targets, each from the room there is."""
    takers = [tenant for tenant in _movable(state, now_ns) if not tenant.recalls]
    granted = {tenant.lease_id: tenant.granted_bytes for tenant in takers}
    room, growth_room = state.room_bytes(), state.growth_room_bytes(now_ns)
    for tenant in sorted(takers, key=lambda tenant: (tenant.priority, tenant.lease_id)):
        missing = max(0, tenant.min_bytes - tenant.granted_bytes)
        added = missing if missing <= room else _floor(max(0, room), tenant.granule_bytes)
        granted[tenant.lease_id] += added
        room -= added
        growth_room -= missing  # also what it still waits for: nobody grows past a minimum
    for tenant in sorted(takers, key=lambda tenant: _order_of_growth(tenant, tenant.granted_bytes)):
        missing = min(targets[tenant.lease_id] - granted[tenant.lease_id], growth_room)
        if granted[tenant.lease_id] >= tenant.min_bytes and missing > 0:
            added = _floor(missing, tenant.granule_bytes)
            granted[tenant.lease_id] += added
            growth_room -= added
    for tenant in takers:
        if (total := granted[tenant.lease_id]) > tenant.granted_bytes:
            yield Grant(tenant.lease_id, total, total - tenant.granted_bytes)


def _recalls(state: SharedDevice, targets: dict[int, int], now_ns: int) -> Iterable[Recall]:
    """What must come back, from those above their targets."""
    movable = _movable(state, now_ns)
    expected = sum(tenant.expected_bytes for tenant in movable)
    takers = [tenant for tenant in movable if not tenant.recalls]
    to_minimums = sum(max(0, tenant.min_bytes - tenant.granted_bytes) for tenant in takers)
    to_targets = sum(
        max(0, targets[tenant.lease_id] - max(tenant.min_bytes, tenant.granted_bytes)) for tenant in takers
    )
    low = _below_low_mark(state, state.foreign_bytes, now_ns)
    must = expected + to_minimums - low
    if expected > low:
        must = max(must, expected - low + state.rules.band_bytes)
    should = expected + to_minimums + to_targets - _available(state, now_ns) if to_targets else 0

    surplus = {tenant.lease_id: max(0, tenant.expected_bytes - targets[tenant.lease_id]) for tenant in movable}
    taken = _take(movable, surplus, must)
    for tenant in movable:
        if tenant.lease_id in taken:
            yield _recall(state, tenant, taken[tenant.lease_id], for_growth=False)
    givers = [tenant for tenant in movable if tenant.lease_id not in taken]
    for tenant in givers:  # rest is from giving what is in use; what lies idle goes whenever somebody wants it
        if not _rested(tenant, state.rules.rest_s, now_ns):
            surplus[tenant.lease_id] = min(surplus[tenant.lease_id], _hoarded(tenant))
    more = _take(givers, surplus, should - sum(taken.values()))
    for tenant in givers:
        if tenant.lease_id in more:
            yield _recall(state, tenant, more[tenant.lease_id], for_growth=True)


def _withdrawals(state: SharedDevice, grants: Iterable[Grant], now_ns: int) -> Iterable[Withdraw]:
    """For those who kept what was recalled, when there is room for it and nobody waits for more than he has."""
    overdue = [tenant for tenant in state.living() if tenant.overdue(now_ns)]
    if not overdue or not all(reservation.ready for reservation in state.reservations.values()):
        return
    added = {grant.lease_id: grant.added_bytes for grant in grants}
    if state.growth_room_bytes(now_ns) < sum(added.values()):
        return
    for tenant in _movable(state, now_ns):
        if _could_use(state, tenant, now_ns) > tenant.granted_bytes + added.get(tenant.lease_id, 0):
            return
    for tenant in overdue:
        if not any(recall.by_hand for recall in tenant.recalls):
            yield Withdraw(tenant.lease_id)


def _take(tenants: Iterable[LeaseState], surplus: dict[int, int], needed: int) -> dict[int, int]:
    """How much of each lease's surplus to take for `needed` bytes, in whole granules or all of it.

    What lies free in a pool, or was never mapped, goes first; then what lower priorities have in use.
    """
    taken: dict[int, int] = {}

    def take(tenant: LeaseState, at_most: int) -> None:
        nonlocal needed
        already = taken.get(tenant.lease_id, 0)
        wanted = min(at_most - already, needed)
        if wanted > 0:
            whole = already + _ceil(wanted, tenant.granule_bytes)
            taken[tenant.lease_id] = min(surplus[tenant.lease_id], whole)
            needed -= taken[tenant.lease_id] - already

    givers = [tenant for tenant in tenants if surplus[tenant.lease_id] > 0]
    for tenant in sorted(givers, key=lambda tenant: (-_hoarded(tenant), tenant.lease_id)):
        take(tenant, min(_hoarded(tenant), surplus[tenant.lease_id]))
    for tenant in sorted(
        givers, key=lambda tenant: (-tenant.priority, -surplus[tenant.lease_id] / tenant.weight, tenant.lease_id)
    ):
        take(tenant, surplus[tenant.lease_id])
    return taken


def _hoarded(tenant: LeaseState) -> int:
    """What a lease was granted, above its minimum, and does not have in use."""
    return max(0, tenant.expected_bytes - max(tenant.min_bytes, tenant.in_use_bytes))


def _recall(state: SharedDevice, tenant: LeaseState, num_bytes: int, *, for_growth: bool) -> Recall:
    return Recall(
        tenant.lease_id, tenant.expected_bytes - num_bytes, state.rules.recall_deadline_s, for_growth=for_growth
    )


def _rested(tenant: LeaseState, rest_s: float, now_ns: int) -> bool:
    return tenant.gave_for_growth_ns is None or now_ns - tenant.gave_for_growth_ns >= rest_s * 1e9


def _floor(num_bytes: int, granule_bytes: int) -> int:
    return num_bytes // granule_bytes * granule_bytes


def _ceil(num_bytes: int, granule_bytes: int) -> int:
    return -(-num_bytes // granule_bytes) * granule_bytes
