"""The order in which waiting requests are assigned: by priority, then by the tenants' shares, then by arrival."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_LEVELS = 64  # priorities without waiting requests of which the tenants' shares are remembered
MOST_WAITING = 40_000
MOST_WAITING_TOKENS = 32 << 20  # of their prompts: some 40 bytes each in the queue's process


class _Place(NamedTuple):
    """A waiting request.

    Attributes:
        is_returned: It comes back from a worker.
        tokens: Of its prompt.
    """

    priority: int
    tenant: str
    is_returned: bool
    tokens: int


@dataclass(slots=True)
class _Tenant:
    """The waiting requests of one tenant and the work that it has received, in tokens divided by its weight."""

    weight: float
    virtual_time: float = 0.0
    numbers: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class _Level:
    """The waiting requests of one priority.

    Attributes:
        virtual_time: Of the tenant that was assigned a request last, before it was charged.
        returned: Requests that come back from workers, sorted.
    """

    virtual_time: float = 0.0
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)

    @property
    def virtual_now(self) -> float:
        """The virtual time at which a tenant begins that had no waiting requests."""
        waiting = (one.virtual_time for one in self.tenants.values() if one.numbers)
        return min(waiting, default=self.virtual_time)

    @property
    def is_empty(self) -> bool:
        return not self.returned and not any(one.numbers for one in self.tenants.values())

    def __iter__(self) -> Iterator[int]:
        yield from self.returned
        tenants = sorted((one for one in self.tenants.values() if one.numbers), key=lambda one: one.virtual_time)
        if len(tenants) == 1:
            yield from tenants[0].numbers
            return
        depth = 0
        while tenants:
            for one in tenants:
                yield one.numbers[depth]
            depth += 1
            tenants = [one for one in tenants if len(one.numbers) > depth]


class WaitingOrder:
    """Numbers of waiting requests in their fair order (start-time fair queueing, Goyal et al. 1996).

    Requests of a lower `priority` number go first. Among those, the tenant that has received the least work for its weight is
    next. A tenant without waiting requests saves no credit: it begins at the virtual time of those that have some, or of the
    last assignment. Requests that come back from a worker go before all others of their priority, the oldest first.

    Places, and tokens of prompts, are shared with a dynamic threshold (Choudhury and Hahne 1998): a tenant may hold as many as
    are free, times its weight. One tenant alone gets half of them, two get a third each, and a tenant with nothing waiting
    finds a place however much the others have sent.

    Args:
        weights: Of tenants; others have 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._levels: dict[int, _Level] = {}  # by priority
        self._places: dict[int, _Place] = {}
        self._num_places: Counter[str] = Counter()  # by tenant, as the next one
        self._num_tokens: Counter[str] = Counter()
        self._sum_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            if len(self._levels) >= MOST_LEVELS:  # priorities are chosen by clients
                self._levels = {name: one for name, one in self._levels.items() if not one.is_empty}
            level = self._levels[priority] = _Level()
        return level

    def num_waiting(self, tenant: str) -> int:
        """Waiting requests of a tenant."""
        return self._num_places[tenant]

    def refusal(self, tenant: str, tokens: int) -> str | None:
        """Why a new request with a prompt of `tokens` may not wait here for its tenant; None if it may."""
        weight = self._weights.get(tenant, 1.0)
        for what, held, new, free, most in (
            ("requests", self._num_places[tenant], 1, MOST_WAITING - len(self), MOST_WAITING),
            ("prompt tokens", self._num_tokens[tenant], tokens, MOST_WAITING_TOKENS - self._sum_tokens, MOST_WAITING_TOKENS),
        ):
            if new > free or (held and held + new > weight * free):
                share = "" if weight == 1.0 else f", times its share of {weight:g}"
                return (
                    f"{held:,} {what} of this key wait in the fleet, and {max(free, 0):,} of {most:,} places are free. A key "
                    f"may hold as many as are free{share}: wait until some have run, or cancel some"
                )
        return None

    def add(self, number: int, priority: int, tenant: str, tokens: int = 0) -> None:
        """Append a new request. `tokens`: of its prompt."""
        level = self._level(priority)
        one = level.tenants.get(tenant)
        if one is None:
            one = level.tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
        if not one.numbers:
            one.virtual_time = max(one.virtual_time, level.virtual_now)
        one.numbers.append(number)
        self._occupy(number, _Place(priority, tenant, False, tokens))

    def put_back(self, number: int, priority: int, tenant: str = "", tokens: int = 0) -> None:
        """Add a request that a worker did not finish."""
        insort(self._level(priority).returned, number)
        self._occupy(number, _Place(priority, tenant, True, tokens))

    def _occupy(self, number: int, place: _Place) -> None:
        self._places[number] = place
        self._num_places[place.tenant] += 1
        self._num_tokens[place.tenant] += place.tokens
        self._sum_tokens += place.tokens

    def remove(self, number: int, work: float = 0.0) -> None:
        """Remove a request that was assigned, and charge its tenant with `work` tokens; or one that was cancelled."""
        place = self._places.pop(number)
        tenant = place.tenant
        self._num_places[tenant] -= 1
        self._num_tokens[tenant] -= place.tokens
        self._sum_tokens -= place.tokens
        if not self._num_places[tenant]:
            del self._num_places[tenant], self._num_tokens[tenant]
        level = self._levels[place.priority]
        if place.is_returned:
            level.returned.remove(number)
            return
        one = level.tenants[tenant]
        one.numbers.remove(number)  # near the left end
        if work:
            level.virtual_time = max(level.virtual_time, one.virtual_time)
            one.virtual_time += work / one.weight

    def __iter__(self) -> Iterator[int]:
        """The waiting requests in order, as if each were charged equally. Do not change the order meanwhile."""
        for priority in sorted(self._levels):
            yield from self._levels[priority]
