"""Routing: a table of decisions, the failures of other routers, and properties over random fleets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.fleet.routing import RequestNeed, Route, Weights, Why, WorkerView, can_hold, cost, route

PLAIN = Weights(compute=1.0, backlog=0.5, growth=0.0, lack=0.0, displaced=0.0, imbalance_blocks=100.0, hold_blocks=2.0)
NEED = RequestNeed(prompt_blocks=20, growth_blocks=4, key="r")


def worker(
    name: str, cached: int = 0, backlog: int = 0, *, free: int = 1_000, growable: int = 0, running: int = 1, growth: int = 0,
    pulls: bool = True, unused: int = 0,
) -> WorkerView:  # fmt: skip
    return WorkerView(name, cached, free, growable, running, 8, backlog, growth, pulls, unused)


TABLE = {
    "the longest prefix": ([worker("a", 5), worker("b", 15), worker("c")], "b", Why.CHEAPEST, 5.0),
    "the prefix is worth a backlog": ([worker("a", 15, 20), worker("b")], "a", Why.CHEAPEST, 15.0),
    "the prefix is not worth the backlog": ([worker("a", 15, 40), worker("b")], "b", Why.CHEAPEST, 20.0),
    "the least loaded of those that have the prefix": (
        [worker("a", 18, 30), worker("b", 18, 10), worker("c", 0, 8)], "b", Why.CHEAPEST, 7.0
    ),
    "a shorter prefix with less load": ([worker("a", 18, 30), worker("b", 10, 2)], "b", Why.CHEAPEST, 11.0),
    "without a prefix by load": ([worker("a", 0, 9), worker("b", 0, 3), worker("c", 0, 7)], "b", Why.CHEAPEST, 21.5),
    "ties by load": ([worker("a", running=3), worker("b", running=1), worker("c", running=2)], "b", Why.CHEAPEST, 20.0),
    "no room": ([worker("a", free=23), worker("b", 0, 3, free=24)], "b", Why.CHEAPEST, 21.5),
    "room by growth of the lease": ([worker("a", 15, free=10, growable=14)], "a", Why.CHEAPEST, 5.0),
    "the growth of what runs counts": ([worker("a", 19, free=33, growth=10), worker("b")], "a", Why.HOLD, 1.0),
    "an empty worker needs room for the prompt": ([worker("a", running=0, free=20)], "a", Why.CHEAPEST, 20.0),
    "an empty worker without it": ([worker("a", running=0, free=19)], None, Why.FULL, None),
    "sequences are full": ([worker("a", running=8)], None, Why.FULL, None),
    "none": ([], None, Why.FULL, None),
    "held for a worker that is busy": ([worker("a", 15, 10, pulls=False), worker("b")], "a", Why.HOLD, 10.0),
    "not held for little": ([worker("a", 5, 6, pulls=False), worker("b")], "b", Why.CHEAPEST, 20.0),
    "held for a worker that is full": ([worker("a", 15, free=5), worker("b")], "a", Why.HOLD, 5.0),
    "never held for an empty worker without room": ([worker("a", 15, free=5, running=0), worker("b")], "b", Why.CHEAPEST, 20.0),
    "none asks": ([worker("a", pulls=False), worker("b", 3, pulls=False)], "b", Why.BUSY, 17.0),
    "one hot worker switches no affinity off (SGLang's 32195)": (
        [worker("hot", 0, 10_000, pulls=False), worker("a", 15, 12), worker("b"), worker("c", 15, 30)], "a", Why.CHEAPEST, 11.0
    ),
    "beyond the bound": ([worker("a", 20, 101), worker("b", 0, 0)], "b", Why.CHEAPEST, 20.0),
}  # fmt: skip


def test_decisions() -> None:
    for case, (workers, name, why, blocks) in TABLE.items():
        stays, total = why not in (Why.CHEAPEST, Why.BOUND), float("inf") if blocks is None else blocks
        expected = Route(None if stays else name, why, total, name if stays else None)
        assert route(NEED, workers, PLAIN) == route(NEED, workers[::-1], PLAIN) == expected, case


def test_the_bound_on_imbalance() -> None:
    """A long prompt that one worker has cached is worth any backlog by cost alone. The bound is not exceeded."""
    need = replace(NEED, prompt_blocks=500)
    assert route(need, [worker("a", 500, 100), worker("b")], PLAIN) == Route("a", Why.CHEAPEST, 50.0)
    assert route(need, [worker("a", 500, 101), worker("b")], PLAIN) == Route("b", Why.BOUND, 500.0)
    both = [worker("a", 500, 151), worker("b", 0, 51)]  # it is relative to the least backlog
    assert route(need, both, PLAIN) == Route("a", Why.CHEAPEST, 75.5)


def test_the_end_of_patience() -> None:
    """A request that may not be held goes elsewhere if its worker has no room, and still waits for one that is busy."""
    need = replace(NEED, may_hold=False)
    assert route(need, [worker("a", 15, free=5), worker("b")], PLAIN) == Route("b", Why.CHEAPEST, 20.0)
    assert route(need, [worker("a", 15, 10, pulls=False), worker("b")], PLAIN).why is Why.HOLD


def test_each_part_of_the_cost() -> None:
    weights = Weights(compute=1.0, backlog=0.5, growth=0.25, lack=2.0, displaced=0.125)
    view = worker("a", 5, 6, free=30, growable=2, growth=8, unused=1)
    #      missing     backlog   growth     lack: 20 + 4 + 8 - 30   displaced: 15 + 4 - 1 - 2
    assert cost(NEED, view, weights) == 15 + 0.5 * 6 + 0.25 * 8 + 2.0 * 2 + 0.125 * 16


def test_limits_scale_with_the_block_size() -> None:
    assert Weights.of(512) == Weights()
    assert Weights.of(64).imbalance_blocks == 8 * Weights().imbalance_blocks
    assert Weights.of(64).hold_blocks == 8 * Weights().hold_blocks


class Fleet:
    """Workers with endless caches: each computes `speed` blocks between two requests of one prefix."""

    def __init__(self, names: str, speed: int, prefix_blocks: int) -> None:
        self.speed, self.prefix_blocks = speed, prefix_blocks
        self.views = {name: worker(name, running=0) for name in names}
        self.computed = 0

    def serve(self, need: RequestNeed, weights: Weights) -> str:
        """Route one request, after time for `speed` blocks. All views pull, so that it is never held."""
        for name, view in self.views.items():
            self.views[name] = replace(view, backlog_blocks=max(0, view.backlog_blocks - self.speed))
        chosen = route(need, list(self.views.values()), weights).worker
        assert chosen is not None
        view = self.views[chosen]
        missing = need.prompt_blocks - view.cached_blocks
        self.computed += missing
        cached = max(view.cached_blocks, self.prefix_blocks)
        self.views[chosen] = replace(view, cached_blocks=cached, backlog_blocks=view.backlog_blocks + missing)
        return chosen


@pytest.mark.parametrize("speed", [0, 2, 5])
def test_no_spiral_of_misses(speed: int) -> None:
    """A hot prefix that overloads its worker is computed once for each worker at most: no worker loses it by a route."""
    fleet = Fleet("abcd", speed, prefix_blocks=90)
    need = RequestNeed(100, 0)
    for number in range(200):
        had = [name for name, view in fleet.views.items() if view.cached_blocks]
        fleet.serve(replace(need, key=str(number)), PLAIN)
        assert all(fleet.views[name].cached_blocks == 90 for name in had)
    assert fleet.computed <= 200 * 10 + 4 * 90


def test_misses_go_by_load_and_not_by_the_size_of_a_cache() -> None:
    """SGLang's 14532: a stuck worker with a small cache got all prompts without a match."""
    stuck, idle = worker("stuck", backlog=50, unused=900), worker("idle", unused=0)
    assert route(NEED, [stuck, idle], Weights()).worker == "idle"


def test_ties_and_a_cold_start_spread() -> None:
    """SGLang's 32983: always the same replica. Requests differ, and a request's place does not depend on the order."""
    workers = [worker(f"worker-{i}", running=0) for i in range(8)]
    places = Counter(route(replace(NEED, key=f"request-{i}"), workers, Weights()).worker for i in range(4_000))
    assert len(places) == 8
    assert min(places.values()) > 400 and max(places.values()) < 600
    assert route(NEED, workers, Weights()) == route(NEED, workers[3:] + workers[:3], Weights())


def test_a_hot_prefix_is_replicated() -> None:
    """Its workers share the load; the more load there is, the more workers have it."""
    copies = []
    for speed in (20, 6, 2):
        fleet = Fleet("abcd", speed, prefix_blocks=90)
        places = Counter(fleet.serve(RequestNeed(100, 0, str(i)), PLAIN) for i in range(100))
        copies.append(sum(view.cached_blocks > 0 for view in fleet.views.values()))
        backlogs = [view.backlog_blocks for view in fleet.views.values() if view.cached_blocks]
        assert max(backlogs) - min(backlogs) <= 100 + 10
        assert set(places) == {name for name, view in fleet.views.items() if view.cached_blocks}
    assert copies == sorted(copies) and copies[0] < copies[-1]


blocks = st.integers(0, 300)
weight = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])
needs = st.builds(RequestNeed, st.integers(1, 200), st.integers(0, 50), st.text(max_size=3), st.booleans())
views = st.builds(
    WorkerView, st.just(""), blocks, blocks, blocks, st.integers(0, 4), st.integers(1, 4), blocks, blocks, st.booleans(), blocks
)
weights_ = st.builds(
    Weights, weight, weight, weight, weight, weight, st.sampled_from([0.0, 20.0, 200.0]), st.sampled_from([0.0, 5.0])
)
fleets = st.lists(views, max_size=6).map(lambda some: [replace(view, name=f"w{i}") for i, view in enumerate(some)])


@given(needs, fleets, weights_, st.data())
def test_a_worker_asks_can_hold_it_and_is_within_the_bound_in_any_order(
    need: RequestNeed, fleet: list[WorkerView], weights: Weights, data: st.DataObject
) -> None:
    chosen = route(need, fleet, weights)
    assert route(need, data.draw(st.permutations(fleet)), weights) == chosen
    by_name = {view.name: view for view in fleet}
    able = [view for view in fleet if can_hold(need, view)]
    assert (chosen.why is Why.FULL) == (not able)
    assert (chosen.worker is not None) == (chosen.why in (Why.CHEAPEST, Why.BOUND))
    if chosen.why is Why.BUSY:
        assert not any(view.pulls for view in able)
    if chosen.worker is None:
        return
    view = by_name[chosen.worker]
    assert view.pulls and view.running < view.max_running
    room_blocks = view.free_blocks + view.growable_blocks
    assert need.prompt_blocks <= room_blocks
    if view.running or view.backlog_blocks:
        assert need.prompt_blocks + need.growth_blocks + view.growth_blocks <= room_blocks
    least = min(other.backlog_blocks for other in able if other.pulls)
    assert view.backlog_blocks <= least + weights.imbalance_blocks
    assert chosen.cost == cost(need, view, weights)


@given(needs, fleets.filter(bool), weights_, st.integers(1, 300))
def test_more_cached_blocks_never_make_a_worker_less_attractive(
    need: RequestNeed, fleet: list[WorkerView], weights: Weights, more: int
) -> None:
    before = route(need, fleet, weights)
    for i, view in enumerate(fleet):
        better = replace(view, cached_blocks=view.cached_blocks + more)
        assert cost(need, better, weights) <= cost(need, view, weights)
        after = route(need, [*fleet[:i], better, *fleet[i + 1 :]], weights)
        if before.worker == view.name:
            assert after.worker == view.name
        elif before.held_for == view.name:
            assert view.name in (after.held_for, after.worker)
