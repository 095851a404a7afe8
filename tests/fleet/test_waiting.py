"""The order of waiting requests: priorities, shares of tenants without saved credit, and returned requests first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pagetide.fleet.waiting import MOST_LEVELS, WaitingOrder


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

    def first(self) -> int | None:
        """The next request."""
        found: list[tuple[int, int, float, int]] = [(priority, 0, 0.0, number) for number, priority in self.returned]
        found += [(priority, 1, self.received[priority, tenant], number) for number, priority, tenant in self.waiting]
        least = min((one[:3] for one in found), default=None)
        tied = [one for one in found if one[:3] == least]
        return tied[0][3] if tied and least is not None and least[1] else min((one[3] for one in tied), default=None)


STEP = st.tuples(st.integers(0, 9), st.integers(-1, 1), st.sampled_from("xyz"), st.floats(0.0, 100.0))


@given(st.lists(STEP, max_size=60))
@hypothesis_settings(derandomize=True, max_examples=150)
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
            tied = tied_with_first(naive)
            assert every[0] in tied


def tied_with_first(naive: NaiveOrder) -> list[int]:
    """Requests that may go first: tenants of the same virtual time are in any order."""
    first = naive.first()
    of = {number: (priority, tenant) for number, priority, tenant in naive.waiting}
    if first not in of:
        return [first] if first is not None else []
    priority, tenant = of[first]
    level = naive.received[priority, tenant]
    heads: dict[str, int] = {}
    for number, at, other in naive.waiting:
        if at == priority and naive.received[at, other] == level:
            heads.setdefault(other, number)
    return list(heads.values())


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


def test_a_tenant_with_one_request_at_a_time_gets_no_more_than_its_share() -> None:
    order, owner, received = WaitingOrder(), {}, {"many": 0.0, "one": 0.0}
    for number in range(500):
        owner[number] = "many"
        order.add(number, 0, "many")
    next_number = 500
    for _ in range(400):
        if not any(owner[number] == "one" for number in order):
            owner[next_number] = "one"
            order.add(next_number, 0, "one")
            next_number += 1
        first = next(iter(order))
        order.remove(first, 100.0)
        received[owner[first]] += 100.0
    assert abs(received["many"] - received["one"]) <= 200.0


def test_returned_requests_go_before_others_of_their_priority_the_oldest_first() -> None:
    order = WaitingOrder()
    for number, priority in ((5, 0), (6, -1), (7, 0)):
        order.add(number, priority, "x")
    for number in (3, 1, 2):
        order.put_back(number, 0)
    assert list(order) == [6, 1, 2, 3, 5, 7]
    order.remove(2, 100.0)
    assert list(order) == [6, 1, 3, 5, 7] and 2 not in order


def test_a_cancelled_request_costs_its_tenant_nothing() -> None:
    order = WaitingOrder()
    for number, tenant in ((1, "x"), (2, "y"), (3, "x")):
        order.add(number, 0, tenant)
    order.remove(1)
    assert list(order) == [3, 2]


def test_priorities_that_clients_make_up_are_forgotten() -> None:
    order = WaitingOrder()
    for number in range(100 * MOST_LEVELS):
        order.add(number, number, "x")
        if number % 10:
            order.remove(number, 1.0)
        elif number:
            order.remove(number - 10, 1.0)
    assert len(order) == 1 and len(order._levels) <= MOST_LEVELS + 1


def test_many_returned_requests_are_put_back_quickly_and_in_order() -> None:
    order = WaitingOrder()
    for number in range(20_000, 0, -1):
        order.put_back(number, 0)
    assert list(itertools.islice(order, 3)) == [1, 2, 3] and len(order) == 20_000
