"""Decides before a step what to map, what to give back, and what and how often to ask the broker for. Pure.

The first of these tasks that is due determines the action:

    RELIEVE  a step lacked memory                        give back all that running requests do not need
    RECALL   the pool is above a recall's target         empty caches; then make extents idle, and give them back
    SHED     it is above the lease's limit, or its       give back idle extents that running requests do not need
             process above the grant
    GROW     blocks are short                            map up to the forecast, within grant and limit; ask for the rest
    REST     not all extents were needed for `idle_s`    give back what requests do not need, down to the minimum; without
                                                         a setting, and with a broker, only by its recalls

Amounts are extents, unless a name says bytes; times are monotonic seconds. Forecasts cost about as much as planning a
step: they are computed only for the task at hand, and for GROW and REST at most every LOOK_S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

LOOK_S = 0.02  # interval of demand forecasts; a new grant ends it early
IDLE_S = 10.0  # until unneeded memory is given back, where no other time is set
ASK_S = 0.25  # interval of repeated asks
ASK_EXPIRES_S = 4 * ASK_S
REFUSED_S = 0.5  # pause of mapping, or preparing, after the device refused memory

_NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """The sizes and the patience of one pool."""

    total_extents: int  # of the arena
    min_extents: int  # only a recall or a lower limit takes these
    extent_bytes: int
    # After this, unneeded extents, and without requests the host tier's memory, are given back. None: IDLE_S; while there is a
    # broker, extents only when it recalls them.
    idle_s: float | None
    host_is_device: bool = False  # the host tier is in the pool's memory

    @property
    def unneeded_s(self) -> float:
        """`idle_s`, or its default."""
        return IDLE_S if self.idle_s is None else self.idle_s


@dataclass(frozen=True, slots=True)
class DecisionState:
    """What one decision passes on to the next."""

    needed_at: float  # the last time that all extents were needed
    looked_at: float = _NEVER  # the last forecast
    map_refused_at: float = _NEVER
    prepare_refused_at: float = _NEVER
    asked_extents: int = 0  # in the last ask; 0 once it is withdrawn
    asked_at: float = _NEVER
    trimmed_for: int | None = None  # target of the recall for which caches were emptied
    relieving: bool = False  # a step lacked memory


class LeaseSnapshot(NamedTuple):
    """A lease, as far as decisions depend on it."""

    granted_bytes: int
    held_bytes: int
    granted_at: float = _NEVER  # the last message with a grant
    max_bytes: int | None = None
    recall_bytes: int | None = None  # target of the recall to be served
    spares_requests: bool = False  # the recall: only as far as running requests do not need the memory
    connected: bool = True


class PoolUse(Protocol):
    """The pool's size, and what requests need of it. Each property is computed when it is read."""

    @property
    def num_extents(self) -> int:
        """Extents with memory after the next plan."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        ...

    @property
    def has_running(self) -> bool:
        """Whether any request is running."""
        ...

    @property
    def waiting_s(self) -> float:
        """Seconds for which the first request in the queue has waited; 0 without one."""
        ...

    @property
    def is_short(self) -> bool:
        """Whether blocks may soon be short."""
        ...

    @property
    def cached_extents(self) -> int:
        """Extents for the cached blocks that no request uses."""
        ...

    @property
    def idle_extents(self) -> int:
        """Extents that could be given back now, without a preemption."""
        ...

    @property
    def running_extents(self) -> int:
        """Extents that running requests are forecast to need."""
        ...

    @property
    def wanted_extents(self) -> int:
        """Extents that running and waiting requests are forecast to need; 0 without any."""
        ...


class MemoryView(NamedTuple):
    """Everything that a decision depends on, at one time."""

    bounds: PoolBounds
    state: DecisionState
    pool: PoolUse
    map_slice: int  # the most to map in a step while requests run
    is_alone: bool  # no steps ran recently: no caller is waiting for one
    base_bytes: int  # held by the process besides KV
    lease: LeaseSnapshot | None
    host_bytes: int  # held by the host tier
    used_at: float  # the last time that a request was here

    @property
    def allowed_extents(self) -> int:
        """Extents that the lease allows now; without one, all."""
        lease = self.lease
        if lease is None:
            return self.bounds.total_extents
        if lease.recall_bytes is None:
            return self._extents_in(lease.granted_bytes)
        return self._extents_in(min(lease.granted_bytes, lease.recall_bytes))

    @property
    def limit_extents(self) -> int:
        """Extents within the lease's limit; without one, all."""
        if self.lease is None or self.lease.max_bytes is None:
            return self.bounds.total_extents
        return self._extents_in(self.lease.max_bytes)

    @property
    def over_recall(self) -> int:
        """Extents to give back for a recall; 0 or less if there is none, or if they are already being given back."""
        if self.lease is None or self.lease.recall_bytes is None:
            return 0
        num_extents = self.pool.num_extents
        over = num_extents - self._extents_in(self.lease.recall_bytes)
        if over <= 0 or not self.lease.spares_requests:
            return over
        needed = self.pool.running_extents if self.pool.has_running else 0
        return min(over, num_extents - needed, self.pool.idle_extents)

    def excess_extents(self) -> int:
        """Extents above a limit, or above the grant if the process has outgrown it by whole extents; 0 or less if none.

        Excludes extents that running requests are forecast to need: without these they would be preempted.
        """
        lease, bounds, limit, outgrown = self.lease, self.bounds, self.limit_extents, 0
        if lease is not None and lease.connected:
            outgrown = (lease.held_bytes - lease.granted_bytes) // bounds.extent_bytes
        if limit == bounds.total_extents and outgrown <= 0:
            return 0
        num_extents = self.pool.num_extents
        excess = max(0, num_extents - limit, min(outgrown, num_extents - bounds.min_extents))
        if excess and self.pool.has_running:
            excess = min(excess, num_extents - self.pool.running_extents)
        return excess

    def is_idle(self, now: float) -> bool:
        """Whether some extents are to be given back because they have been unneeded for `idle_s`."""
        if self.bounds.idle_s is None and self.lease is not None and self.lease.connected:
            return False
        return now - self.state.needed_at >= self.bounds.unneeded_s

    def host_is_idle(self, now: float) -> bool:
        """Whether the host tier has memory and there has been no request for `idle_s`."""
        return bool(self.host_bytes) and not self.pool.has_requests and now - self.used_at >= self.bounds.unneeded_s

    def may_look(self, now: float) -> bool:
        """Whether demand may be forecast again."""
        looked_at = self.state.looked_at
        return now >= looked_at + LOOK_S or (self.lease is not None and self.lease.granted_at > looked_at)

    def _extents_in(self, total_bytes: int) -> int:
        """Extents of the largest pool with which the process holds at most `total_bytes`; at least the null block's."""
        bounds = self.bounds
        return min(bounds.total_extents, max(1, (total_bytes - self.base_bytes) // bounds.extent_bytes))


class PoolTask(Enum):
    """A reason to change the pool; see the module docstring."""

    RELIEVE = "relieve"
    RECALL = "recall"
    SHED = "shed"
    GROW = "grow"
    REST = "rest"


class PoolAction(NamedTuple):
    """What to do before the next plan, in this order."""

    state: DecisionState  # for the next decision
    trim: bool = False  # empty the caches of libraries, measure, and decide again
    rest_host: bool = False  # give back a slice of the host tier's memory
    make_idle: int = 0  # preempt requests until so many extents are idle
    give_back: int = 0  # in slices while requests run, unless `at_once`
    at_once: bool = False
    grow: int = 0
    # Memory that the arena should have ready, for `grow` and for the step after it
    prepare: int | None = None
    ask: int | None = None  # the pool's size to ask the broker for
    keep: int = 0  # and the size with which cached prefixes would stay
    withdraw_ask: bool = False


class DueTask(NamedTuple):
    """A task that is due."""

    task: PoolTask
    num_extents: int = 0  # for RECALL and SHED, the most to give back


def due_tasks(view: MemoryView, now: float) -> Iterator[DueTask]:
    """The tasks that are due, most urgent first. GROW and REST also need `may_look`."""
    if view.state.relieving:
        yield DueTask(PoolTask.RELIEVE)
    if (over := view.over_recall) > 0:
        yield DueTask(PoolTask.RECALL, over)
    if (excess := view.excess_extents()) > 0 and view.pool.idle_extents:
        yield DueTask(PoolTask.SHED, excess)
    if view.pool.is_short:
        yield DueTask(PoolTask.GROW)
    if view.is_idle(now):
        yield DueTask(PoolTask.REST)


def decide(view: MemoryView, now: float) -> PoolAction:
    """The action for the first task that is due."""
    action = PoolAction(view.state)
    for task, num_extents in due_tasks(view, now):
        if task is PoolTask.RELIEVE:
            action = _relieve(view, now)
        elif task is PoolTask.RECALL:
            action = _recall(view, num_extents)
        elif task is PoolTask.SHED:
            action = PoolAction(view.state, give_back=num_extents, prepare=0)
        elif view.may_look(now):
            action = _grow(view, now) if task is PoolTask.GROW else _rest(view, now)
        break
    return action._replace(rest_host=True) if view.host_is_idle(now) else action


def wants_turn(view: MemoryView, now: float) -> bool:
    """Whether an action is needed before another step is planned."""
    if view.host_is_idle(now):
        return True
    for task, _ in due_tasks(view, now):
        if task is PoolTask.GROW:
            if view.may_look(now) and view.pool.num_extents < view.bounds.total_extents:
                return True
        elif task is not PoolTask.REST or view.may_look(now):
            return True
    return False


def needs_step(view: MemoryView, now: float) -> bool:
    """Whether an action needs a step although no request does. Growing and relieving serve requests' steps only."""
    if view.host_is_idle(now):
        return True
    for task, _ in due_tasks(view, now):
        if task in (PoolTask.RECALL, PoolTask.SHED):
            return True
        if task is PoolTask.REST and view.pool.num_extents > view.bounds.min_extents and view.pool.idle_extents:
            return True
    return False


def _relieve(view: MemoryView, now: float) -> PoolAction:
    """Give back what running requests do not need, and neither map nor prepare for a while."""
    spare = view.pool.num_extents - max(view.pool.running_extents, view.bounds.min_extents)
    state = replace(view.state, relieving=False, map_refused_at=now, prepare_refused_at=now)
    return PoolAction(state, give_back=max(0, spare), at_once=True, prepare=0)


def _recall(view: MemoryView, over: int) -> PoolAction:
    """Empty caches first, once for each target: that costs no request. Then take extents, used ones too."""
    assert view.lease is not None
    if view.state.trimmed_for != view.lease.recall_bytes:
        return PoolAction(replace(view.state, trimmed_for=view.lease.recall_bytes), trim=True)
    if view.lease.spares_requests:
        return PoolAction(view.state, give_back=over, prepare=0)
    rest_host = view.bounds.host_is_device and view.host_bytes > 0
    return PoolAction(view.state, rest_host=rest_host, make_idle=over, give_back=over, prepare=0)


def _grow(view: MemoryView, now: float) -> PoolAction:
    """Map a slice of what is forecast to be needed, have the next slice prepared, and ask for what is not granted.

    With a lease the pool also grows so that cached prefixes stay: what is granted and not mapped is of no use to others.
    """
    state, num_extents = view.state, view.pool.num_extents
    wanted = _wanted(view)
    keep = wanted if view.lease is None else min(wanted + view.pool.cached_extents, view.bounds.total_extents)
    allowed = view.allowed_extents
    coming = grow = 0
    if now >= state.map_refused_at + REFUSED_S:
        coming = max(0, min(keep, allowed, view.limit_extents) - num_extents)
        grow = min(coming, view.map_slice) if view.pool.has_running and not view.is_alone else coming
    prepare = min(coming, 2 * grow) if now >= state.prepare_refused_at + REFUSED_S else 0
    state = replace(state, looked_at=now, needed_at=now if wanted >= num_extents else state.needed_at)
    if view.lease is None:
        return PoolAction(state, grow=grow, prepare=prepare)
    lacking = wanted > max(allowed, num_extents)
    # What waiting requests need is asked for although it is there: those of another lease may have waited for less long.
    waits = view.pool.waiting_s >= ASK_S
    if lacking or waits or keep > max(allowed, num_extents):
        asked = wanted if lacking or waits else 0
        if asked == state.asked_extents and now < state.asked_at + ASK_S:
            return PoolAction(state, grow=grow, prepare=prepare)
        state = replace(state, asked_extents=asked, asked_at=now)
        return PoolAction(state, grow=grow, prepare=prepare, ask=wanted, keep=keep)
    withdraw = state.asked_extents > wanted
    if withdraw:
        state = replace(state, asked_extents=0)
    return PoolAction(state, grow=grow, prepare=prepare, withdraw_ask=withdraw)


def _rest(view: MemoryView, now: float) -> PoolAction:
    """Give back extents that no request has needed for `idle_s`; if none can go, try again after another `idle_s`."""
    state = replace(view.state, looked_at=now)
    spare = view.pool.num_extents - max(view.bounds.min_extents, _wanted(view))
    if spare <= 0 or not view.pool.idle_extents:
        return PoolAction(replace(state, needed_at=now))
    return PoolAction(state, give_back=spare)


def _wanted(view: MemoryView) -> int:
    """Extents for the forecast demand, plus one; without demand the minimum."""
    wanted = view.pool.wanted_extents
    return min(wanted + 1 if wanted else view.bounds.min_extents, view.bounds.total_extents)
