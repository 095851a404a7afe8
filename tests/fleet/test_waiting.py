"""The order of waiting requests: priorities, shares of tenants without saved credit, and returned requests first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.fleet.waiting import MOST_LEVELS, MOST_WAITING, MOST_WAITING_TOKENS, WaitingOrder


@dataclass
class NaiveOrder:
    """The same order, from a list that is sorted anew for each question."""

    weights: dict[str, float]
    waiting: list[tuple[int, int, str]] = field(default_factory=list)  # number, priority, tenant
    returned: list[tuple[int, int]] = field(default_factory=list)
    received: dict[tuple[int, str], float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)

    def add(self, number: int, priority: int, tenant: str) -> None:
        key = priority, tenant
        if not any(one[1:] == key for one in self.waiting):
            others = [self.received[one[1:]] for one in self.waiting if one[1] == priority]
            now = min(others) if others else self.last.get(priority, 0.0)
            self.received[key] = max(self.received.get(key, 0.0), now)
        self.waiting.append((number, priority, tenant))

    def put_back(self, number: int, priority: int) -> None:
        self.returned.append((number, priority))

    def remove(self, number: int, work: float) -> None:
        for one in self.waiting:
            if one[0] == number and work:
                key = one[1:]
                self.last[key[0]] = max(self.last.get(key[0], 0.0), self.received[key])
                self.received[key] += work / self.weights.get(key[1], 1.0)
        self.waiting = [one for one in self.waiting if one[0] != number]
        self.returned = [one for one in self.returned if one[0] != number]

    def firsts(self) -> list[int]:
        """Requests that may go first: tenants of the same virtual time are in any order."""
        found: list[tuple[tuple[float, ...], int]] = [((at, 0, 0.0, number), number) for number, at in self.returned]
        heads: dict[tuple[int, str], int] = {}
        for number, priority, tenant in self.waiting:
            heads.setdefault((priority, tenant), number)
        found += [((key[0], 1, self.received[key], 0), number) for key, number in heads.items()]
        least = min(place for place, _ in found)
        return [number for place, number in found if place == least]


STEP = st.tuples(st.integers(0, 9), st.integers(-1, 1), st.sampled_from("xyz"), st.floats(0.0, 100.0))


@given(st.lists(STEP, max_size=60))
def test_the_order_is_that_of_a_list_sorted_anew(steps: list[tuple[int, int, str, float]]) -> None:
    weights = {"x": 3.0, "y": 0.5}
    order, naive, numbers = WaitingOrder(weights), NaiveOrder(weights), itertools.count()
    for what, priority, tenant, work in steps:
        if what < 5:
            number = next(numbers)
            order.add(number, priority, tenant)
            naive.add(number, priority, tenant)
        elif what == 5:
            number = next(numbers)
            order.put_back(number, priority)
            naive.put_back(number, priority)
        elif len(order):
            every = list(order)
            number = every[0] if what < 9 else every[len(every) // 2]
            order.remove(number, work)
            naive.remove(number, work)
        every = list(order)
        assert len(order) == len(every) == len(set(every)) == len(naive.waiting) + len(naive.returned)
        assert all(number in order for number in every)
        by_tenant = {key: [n for n, *rest in naive.waiting if tuple(rest) == key] for key in naive.received}
        for numbers_of in by_tenant.values():  # requests of a tenant keep their order
            assert [number for number in every if number in numbers_of] == numbers_of
        priorities = {number: priority for number, priority, _ in naive.waiting} | dict(naive.returned)
        assert [priorities[number] for number in every] == sorted(priorities.values())
        if every:
            assert every[0] in naive.firsts()


@pytest.mark.parametrize("weights", [{}, {"x": 3.0}, {"x": 5.0, "y": 0.5, "z": 2.0}])
def test_backlogged_tenants_get_work_by_their_weights(weights: dict[str, float]) -> None:
    order, owner, received = WaitingOrder(weights), {}, dict.fromkeys("xyz", 0.0)
    work = {"x": 700.0, "y": 90.0, "z": 333.0}  # tokens of a request
    numbers = itertools.count()
    for tenant in list("xyz") * 4:
        owner[number := next(numbers)] = tenant
        order.add(number, 0, tenant)
    for _ in range(4000):
        first = next(iter(order))
        tenant = owner[first]
        order.remove(first, work[tenant])
        received[tenant] += work[tenant]
        owner[number := next(numbers)] = tenant
        order.add(number, 0, tenant)
        normal = [received[one] / weights.get(one, 1.0) for one in "xyz"]
        # start-time fair queueing: the difference is bounded by the largest requests of the two, whatever the time
        bound = max(work[one] / weights.get(one, 1.0) for one in "xyz")
        assert max(normal) - min(normal) <= 2 * bound


def test_priorities_that_clients_make_up_are_forgotten() -> None:
    order = WaitingOrder()
    for number in range(100 * MOST_LEVELS):
        order.add(number, number, "x")
        if number % 10:
            order.remove(number, 1.0)
        elif number:
            order.remove(number - 10, 1.0)
    assert len(order) == 1 and len(order._levels) <= MOST_LEVELS + 1


def test_a_tenant_that_was_idle_saves_no_credit_even_if_nothing_waits_when_it_comes() -> None:
    order = WaitingOrder()
    for number in range(1000):  # one tenant alone: each request is assigned at once
        order.add(number, 0, "busy")
        order.remove(number, 500.0)
    order.add(1000, 0, "idle")
    order.remove(1000, 500.0)
    owner = {}
    for number in range(1001, 1101):
        owner[number] = "busy" if number % 2 else "idle"
        order.add(number, 0, owner[number])
    served = []
    for _ in range(20):
        first = next(iter(order))
        order.remove(first, 500.0)
        served.append(owner[first])
    assert served.count("busy") in (9, 10)


def test_a_tenant_holds_as_many_places_and_tokens_as_are_free_times_its_weight() -> None:
    for size, most in ((1, MOST_WAITING), (1 << 20, MOST_WAITING_TOKENS >> 20)):  # tokens of a prompt
        order, numbers, held = WaitingOrder({"small": 0.25}), itertools.count(), {}
        for tenant in ("greedy", "greedier", "small", "modest"):
            while order.refusal(tenant, size) is None:
                order.add(next(numbers), 0, tenant, size)
            held[tenant] = order.num_waiting(tenant)
        shares = {"greedy": most / 2, "greedier": most / 4, "small": most / 20, "modest": most / 10}
        assert all(abs(held[tenant] - share) <= 1 for tenant, share in shares.items())
        order.remove(0)
        order.put_back(0, 0, "greedy", size)
        assert order.num_waiting("greedy") == most // 2
        assert "of this key wait in the fleet" in (order.refusal("greedy", size) or "")
        assert order.refusal("greedy", MOST_WAITING_TOKENS) and order.refusal("new", 1) is None
