"""The order in which waiting requests are assigned: by priority, then by the tenants' shares, then by arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Tenant:
    """The waiting requests of one tenant and the work that it has received, in tokens divided by its weight."""

    weight: float
    virtual_time: float = 0.0
    numbers: deque[int] = field(default_factory=deque)


class WaitingOrder:
    """Numbers of waiting requests in their fair order (start-time fair queueing, Goyal et al. 1996).

    Requests of a lower `priority` number go first. Among those, the tenant that has received the least work for its weight is
    next. A tenant without waiting requests saves no credit: it begins at the virtual time of those that have some. Requests
    that come back from a worker go before all others of their priority, the oldest first.

    Args:
        weights: Of tenants; others have 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._by_priority: dict[int, dict[str, _Tenant]] = {}
        self._returned: dict[int, list[int]] = {}  # by priority, sorted
        self._places: dict[int, tuple[int, str | None]] = {}  # priority and tenant; no tenant: returned

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int, priority: int, tenant: str) -> None:
        """Append a new request."""
        tenants = self._by_priority.setdefault(priority, {})
        one = tenants.get(tenant)
        if one is None:
            one = tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
        if not one.numbers:
            one.virtual_time = max(one.virtual_time, self._virtual_now(tenants))
        one.numbers.append(number)
        self._places[number] = priority, tenant

    def put_back(self, number: int, priority: int) -> None:
        """Add a request that a worker did not finish."""
        numbers = self._returned.setdefault(priority, [])
        numbers.append(number)
        numbers.sort()
        self._places[number] = priority, None

    def remove(self, number: int, work: float = 0.0) -> None:
        """Remove a request that was assigned, and charge its tenant with `work` tokens; or one that was cancelled."""
        priority, tenant = self._places.pop(number)
        if tenant is None:
            self._returned[priority].remove(number)
            if not self._returned[priority]:
                del self._returned[priority]
            return
        one = self._by_priority[priority][tenant]
        one.numbers.remove(number)  # near the left end
        one.virtual_time += work / one.weight

    def __iter__(self) -> Iterator[int]:
        """The waiting requests in order, as if each were charged equally. Do not change the order meanwhile."""
        for priority in sorted(self._by_priority.keys() | self._returned.keys()):
            yield from self._returned.get(priority, ())
            tenants = [one for one in self._by_priority.get(priority, {}).values() if one.numbers]
            tenants.sort(key=lambda one: one.virtual_time)
            if len(tenants) == 1:
                yield from tenants[0].numbers
                continue
            depth = 0
            while tenants:
                for one in tenants:
                    yield one.numbers[depth]
                depth += 1
                tenants = [one for one in tenants if len(one.numbers) > depth]

    @staticmethod
    def _virtual_now(tenants: Mapping[str, _Tenant]) -> float:
        return min((one.virtual_time for one in tenants.values() if one.numbers), default=0.0)
