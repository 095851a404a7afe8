"""What is done about the pool in each situation: a table, and random situations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagetide.engine.memory.decision import (
    ASK_S,
    LOOK_S,
    REFUSED_S,
    DecisionState,
    LeaseSnapshot,
    MemoryView,
    PoolAction,
    PoolBounds,
    decide,
    needs_step,
    wants_turn,
)

NOW = 1000.0
MIN, TOTAL, EXTENT, IDLE_S = 2, 16, 100, 5.0
BASE = 1000  # bytes besides the pool
STATE = DecisionState(needed_at=NOW)
UNNEEDED = replace(STATE, needed_at=NOW - IDLE_S)


@dataclass
class Use:
    """A pool whose numbers are given; counts how often forecasts were read."""

    num_extents: int = 8
    has_requests: bool = False
    has_running: bool = False
    waiting_s: float = 0.0
    cached_extents: int = 0
    is_short: bool = False
    idle_extents: int = 8
    running: int = 3
    wanted: int = 4
    forecasts: int = 0

    @property
    def running_extents(self) -> int:
        self.forecasts += 1
        return self.running

    @property
    def wanted_extents(self) -> int:
        self.forecasts += 1
        return self.wanted


def busy(**given: Any) -> Use:
    """A pool on which a request runs."""
    return Use(**{"has_requests": True, "has_running": True} | given)


def short(wanted: int, **given: Any) -> Use:
    """A pool on which a request runs that lacks blocks."""
    return busy(is_short=True, wanted=wanted, **given)


def total(extents: int) -> int:
    """What the process holds with so many extents."""
    return BASE + extents * EXTENT


def lease(granted: int = TOTAL, held: int = 8, **given: Any) -> LeaseSnapshot:
    """A lease in extents: `limit` and `recall` too."""
    for name, field in (("limit", "max_bytes"), ("recall", "recall_bytes")):
        if name in given:
            given[field] = total(given.pop(name))
    return LeaseSnapshot(total(granted), total(held), **given)


def view(pool: Use, lease: LeaseSnapshot | None = None, state: DecisionState = STATE, **given: Any) -> MemoryView:
    """A situation: by default callers wait for steps, and four extents are a slice."""
    bounds = PoolBounds(TOTAL, MIN, EXTENT, given.pop("idle_s", IDLE_S), given.pop("host_is_device", False))
    fields = {"map_slice": 4, "is_alone": False, "base_bytes": BASE, "host_bytes": 0, "used_at": NOW} | given
    return MemoryView(bounds, state, pool, lease=lease, **fields)


def when(situation: MemoryView, **done: Any) -> tuple[MemoryView, dict[str, Any]]:
    """What is done in a situation, and what changes in its state."""
    return situation, done


def action_of(situation: MemoryView, **changes: Any) -> PoolAction:
    noted = {name: changes.pop(name) for name in DecisionState.__dataclass_fields__ if name in changes}
    return PoolAction(replace(situation.state, **noted), **changes)


def state(**changes: Any) -> DecisionState:
    return replace(STATE, **changes)


RELIEVING = state(relieving=True)
RELIEVED = {"relieving": False, "map_refused_at": NOW, "prepare_refused_at": NOW, "at_once": True, "prepare": 0}
ASKS_12 = {"asked_extents": 12, "asked_at": NOW, "ask": 12, "keep": 12}
TAKES_3 = {"make_idle": 3, "give_back": 3, "prepare": 0}
NEEDED = {"looked_at": NOW, "needed_at": NOW}
RECALLED_TO_5 = state(trimmed_for=total(5))
ASKED_12 = state(asked_extents=12, asked_at=NOW - ASK_S / 2)
NOT_LATELY = state(needed_at=NOW - 1.0)
A_MOMENT_AGO = NOW - REFUSED_S / 2

NOTHING = {
    "nothing runs, nothing waits": view(Use()),
    "requests have enough": view(busy()),
    "enough, with a lease": view(busy(), lease()),
    "short, but demand was forecast a moment ago": view(short(12), state=state(looked_at=NOW - LOOK_S / 2)),
    "unneeded for less than idle_s": view(Use(), state=state(needed_at=NOW - IDLE_S + 0.1)),
    "unneeded for long, but demand was forecast a moment ago": view(Use(), state=replace(UNNEEDED, looked_at=NOW - LOOK_S / 2)),
    "a recall that spares requests, which need all": view(busy(running=8), lease(recall=5, spares_requests=True)),
    "unneeded for long, while a broker recalls": view(busy(wanted=4), lease(), state=UNNEEDED, idle_s=None),
    "a recall that is met": view(busy(), lease(recall=8)),
    "a limit above the pool": view(busy(), lease(limit=9)),
    "a limit below what running requests need": view(busy(running=8), lease(limit=6)),
    "a limit below the pool, of which nothing is idle": view(busy(idle_extents=0), lease(limit=6)),
    "the process has outgrown the grant by less than an extent": view(busy(), LeaseSnapshot(total(8), total(8) + EXTENT - 1)),
    "the process has outgrown the grant of a broker that is gone": view(busy(), lease(granted=6, connected=False)),
    "a host tier that was used lately": view(Use(), host_bytes=1, used_at=NOW - IDLE_S + 0.1),
    "a host tier while a request waits": view(Use(has_requests=True), host_bytes=1, used_at=0.0),
}


# Demand is looked at, and is noted as such.
GROWTH = {
    "alone: all at once, and nothing is left to prepare": when(view(short(14), is_alone=True), grow=7, prepare=7),
    "no request runs: all at once": when(view(Use(has_requests=True, is_short=True, wanted=14)), grow=7, prepare=7),
    "while requests run: a slice, and the next is prepared": when(view(short(14), map_slice=2), grow=2, prepare=4),
    "a slice and a part of the next": when(view(short(14), map_slice=4), grow=4, prepare=7),
    "one more than the forecast": when(view(short(9)), grow=2, prepare=2),
    "never more than there is": when(view(short(TOTAL, num_extents=15)), grow=1, prepare=1),
    "less is wanted than there is": when(view(short(4), state=NOT_LATELY), prepare=0),
    "exactly what there is": when(view(short(7), state=NOT_LATELY), needed_at=NOW, prepare=0),
    "short before unneeded": when(view(short(9), state=UNNEEDED), needed_at=NOW, grow=2, prepare=2),
    "a limit below the need": when(view(short(14), lease(limit=9)), grow=1, prepare=1),
    "the device has refused to map": when(view(short(14), state=state(map_refused_at=A_MOMENT_AGO)), prepare=0),
    "the device has refused to map, half a second ago": when(
        view(short(9), state=state(map_refused_at=NOW - REFUSED_S)), grow=2, prepare=2
    ),
    "the device has refused to prepare": when(view(short(9), state=state(prepare_refused_at=A_MOMENT_AGO)), grow=2, prepare=0),
    "within the grant nothing is asked": when(view(short(9), lease(granted=10)), grow=2, prepare=2),
    "beyond the grant: what is granted, and an ask": when(view(short(11), lease(granted=10)), **ASKS_12, grow=2, prepare=2),
    "what the process holds besides counts": when(
        view(short(11), lease(granted=10), base_bytes=BASE + EXTENT), **ASKS_12, grow=1, prepare=1
    ),
    "the same was asked a moment ago": when(view(short(11), lease(granted=8), ASKED_12), prepare=0),
    "the same was asked some time ago": when(
        view(short(11), lease(granted=8), replace(ASKED_12, asked_at=NOW - ASK_S)), asked_at=NOW, prepare=0, ask=12, keep=12
    ),
    "more than was asked a moment ago": when(
        view(short(13), lease(granted=8), ASKED_12), asked_extents=14, asked_at=NOW, prepare=0, ask=14, keep=14
    ),
    "what prefixes hold is kept, within the grant": when(
        view(short(7, cached_extents=4), lease(granted=10), state=NOT_LATELY),
        needed_at=NOW,
        grow=2,
        prepare=2,
        asked_at=NOW,
        ask=8,
        keep=12,
    ),
    "what prefixes hold is kept, if it is granted": when(
        view(short(7, cached_extents=2), lease(granted=10), state=NOT_LATELY), needed_at=NOW, grow=2, prepare=2
    ),
    "without a lease prefixes cause no growth": when(
        view(short(7, cached_extents=4), state=NOT_LATELY), needed_at=NOW, prepare=0
    ),
    "enough, but a request waits": when(
        view(short(6, waiting_s=ASK_S), lease(), state=NOT_LATELY), asked_extents=7, asked_at=NOW, prepare=0, ask=7, keep=7
    ),
    "less than was asked, and it is granted": when(
        view(short(7), lease(granted=8), ASKED_12), asked_extents=0, prepare=0, withdraw_ask=True
    ),
    "a grant arrived since demand was forecast": when(
        view(short(9), lease(granted_at=NOW - 0.001), state(looked_at=NOW - 0.002)), grow=2, prepare=2
    ),
    "during a recall that is met, up to its target": when(
        view(short(14), lease(recall=9)), asked_extents=15, asked_at=NOW, grow=1, prepare=1, ask=15, keep=15
    ),
}

RETURN = {
    "a recall empties caches first": when(view(busy(), lease(recall=5)), trimmed_for=total(5), trim=True),
    "the next target empties them again": when(view(busy(), lease(recall=4), RECALLED_TO_5), trimmed_for=total(4), trim=True),
    "then extents go, used ones too": when(view(busy(idle_extents=0), lease(recall=5), RECALLED_TO_5), **TAKES_3),
    "a recall goes below the minimum, down to one extent": when(
        view(busy(), lease(recall=0), state(trimmed_for=total(0))), make_idle=7, give_back=7, prepare=0
    ),
    "a recall before growth": when(view(short(14), lease(recall=5), RECALLED_TO_5), **TAKES_3),
    "the host tier in recalled memory goes with it": when(
        view(busy(), lease(recall=5), RECALLED_TO_5, host_bytes=1, host_is_device=True), rest_host=True, **TAKES_3
    ),
    "not one in other memory": when(view(busy(), lease(recall=5), RECALLED_TO_5, host_bytes=1), **TAKES_3),
    "a recall that spares requests: without a preemption": when(
        view(busy(running=6), lease(recall=5, spares_requests=True), RECALLED_TO_5), give_back=2, prepare=0
    ),
    "a recall that spares requests, of idle extents only": when(
        view(busy(idle_extents=1), lease(recall=5, spares_requests=True), RECALLED_TO_5), give_back=1, prepare=0
    ),
    "above a limit: without a preemption": when(view(Use(), lease(limit=5)), give_back=3, prepare=0),
    "above a limit, as far as running requests do not need it": when(
        view(busy(running=6), lease(limit=5)), give_back=2, prepare=0
    ),
    "an outgrown grant": when(view(busy(), lease(granted=8, held=11)), give_back=3, prepare=0),
    "an outgrown grant, down to the minimum": when(view(Use(), lease(granted=8, held=30)), give_back=6, prepare=0),
    "above a limit before growth": when(view(short(14), lease(limit=5)), give_back=3, prepare=0),
    "unneeded for idle_s": when(view(busy(wanted=4), state=UNNEEDED), looked_at=NOW, give_back=3),
    "unneeded for idle_s, without requests: down to the minimum": when(
        view(Use(wanted=0), state=UNNEEDED), looked_at=NOW, give_back=6
    ),
    "unneeded for long, and the broker is gone": when(
        view(busy(wanted=4), lease(connected=False), replace(STATE, needed_at=NOW - 10.0), idle_s=None),
        looked_at=NOW,
        give_back=3,
    ),
    "unneeded, but needed again": when(view(busy(wanted=7), state=UNNEEDED), **NEEDED),
    "unneeded, but nothing is idle": when(view(busy(wanted=4, idle_extents=0), state=UNNEEDED), **NEEDED),
    "a step lacked memory": when(view(busy(), state=RELIEVING), **RELIEVED, give_back=5),
    "a step lacked memory: the minimum stays": when(view(busy(running=1), state=RELIEVING), **RELIEVED, give_back=6),
    "a step lacked memory, and all is needed": when(view(busy(running=9), state=RELIEVING), **RELIEVED),
    "a step lacked memory, before a recall": when(view(busy(), lease(recall=2), state=RELIEVING), **RELIEVED, give_back=5),
    "a host tier unused for idle_s": when(view(Use(), host_bytes=1, used_at=NOW - IDLE_S), rest_host=True),
    "a host tier unused for idle_s, with the pool": when(
        view(Use(wanted=0), state=UNNEEDED, host_bytes=1, used_at=NOW - IDLE_S), looked_at=NOW, rest_host=True, give_back=6
    ),
}


def test_the_action_in_each_situation() -> None:
    nothing = {name: (situation, {}) for name, situation in NOTHING.items()}
    growth = {name: (situation, {"looked_at": NOW, **done}) for name, (situation, done) in GROWTH.items()}
    for name, (situation, done) in (nothing | growth | RETURN).items():
        assert decide(situation, NOW) == action_of(situation, **done), name


TURNS = {name: (situation, True) for name, (situation, _) in (GROWTH | RETURN).items()}
TURNS |= {name: (situation, False) for name, situation in NOTHING.items()}
TURNS["short, and all of the pool is mapped"] = view(busy(is_short=True, num_extents=TOTAL)), False
TURNS["short, all of it mapped, and unneeded"] = view(busy(is_short=True, num_extents=TOTAL), state=UNNEEDED), True

OWN_STEPS = {name for name in RETURN if not name.startswith("a step lacked memory")}
OWN_STEPS -= {"unneeded, but nothing is idle"}
OWN_STEPS |= {"short before unneeded", "unneeded for long, but demand was forecast a moment ago"}
OWN_STEPS |= {"a step lacked memory, before a recall", "short, all of it mapped, and unneeded"}


def test_a_turn_is_wanted_for_each_action_and_a_step_only_to_give_back() -> None:
    for name, (situation, wanted) in TURNS.items():
        assert wants_turn(situation, NOW) is wanted, name
        assert needs_step(situation, NOW) is (name in OWN_STEPS), name
    assert not needs_step(view(Use(num_extents=MIN), state=UNNEEDED), NOW), "the minimum stays"


def test_forecasts_are_made_for_the_task_at_hand_only() -> None:
    def forecasts(situation: MemoryView, *asked: Callable[[MemoryView, float], object]) -> int:
        assert isinstance(situation.pool, Use)
        situation.pool.forecasts = 0
        for ask in asked:
            ask(situation, NOW)
        return situation.pool.forecasts

    for name, situation in NOTHING.items():
        assert forecasts(situation, decide) == ("a limit below" in name or "spares requests" in name), name
    for name, (situation, _) in (GROWTH | RETURN).items():
        assert forecasts(situation, decide) <= 1, name
        assert name in RETURN or forecasts(situation, wants_turn, needs_step) == 0, name


times = st.sampled_from([-math.inf, 0.0, NOW - IDLE_S, NOW - REFUSED_S, NOW - ASK_S, NOW - LOOK_S, NOW - 0.01, NOW])
counts = st.integers(0, TOTAL)
amounts = st.integers(0, total(2 * TOTAL))
pools = st.builds(
    Use, num_extents=st.integers(1, TOTAL), has_requests=st.booleans(), has_running=st.booleans(),
    is_short=st.booleans(), idle_extents=counts, running=counts, wanted=counts,
    cached_extents=counts, waiting_s=st.sampled_from([0.0, ASK_S]),
)  # fmt: skip
leases = st.builds(
    LeaseSnapshot, amounts, amounts, times, st.none() | amounts, st.none() | amounts, st.booleans(), st.booleans()
)
states = st.builds(DecisionState, times, times, times, times, counts, times, st.none() | amounts, st.booleans())
bounds = st.builds(
    PoolBounds, st.just(TOTAL), st.integers(1, TOTAL), st.just(EXTENT), st.sampled_from([IDLE_S, None]), st.booleans()
)
views = st.builds(
    MemoryView, bounds,
    states, pools, st.integers(1, TOTAL), st.booleans(), st.integers(0, total(1)), st.none() | leases,
    st.integers(0, 1), times,
)  # fmt: skip


@given(views)
def test_any_action_keeps_its_bounds(view: MemoryView) -> None:
    action, size = decide(view, NOW), view.pool.num_extents
    assert action == decide(view, NOW)
    after = size + action.grow - action.give_back
    recalled = view.lease is not None and view.lease.recall_bytes is not None
    if action.grow:
        assert not action.give_back
        assert after <= min(view.allowed_extents, view.limit_extents, TOTAL)
    if action.prepare:
        assert size + action.prepare <= min(view.allowed_extents, view.limit_extents)
        assert action.prepare >= action.grow
    if action.give_back:
        least = 1 if action.make_idle else min(view.bounds.min_extents, view.limit_extents)
        assert 1 <= least <= after
    if action.make_idle or action.trim:
        assert recalled
        assert after >= view.allowed_extents
    if view.pool.has_running and action.give_back and not action.make_idle and not view.is_idle(NOW):
        assert view.pool.running_extents <= after, "what running requests need stays"
    assert action.rest_host <= bool(view.host_bytes)
    assert not (action.ask or action.withdraw_ask) or view.lease is not None
    if action.state != view.state or action != PoolAction(view.state):
        assert wants_turn(view, NOW) or view.pool.is_short
    if needs_step(view, NOW) and not view.state.relieving:
        later = NOW + LOOK_S
        acted = decide(view, later)
        assert acted != PoolAction(view.state)
