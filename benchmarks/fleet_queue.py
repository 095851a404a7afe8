"""The queue of a modelled fleet: what it knows of its workers, the policies that route, and the run of a trace.

The policies `prefix`, `least-loaded`, `round-robin` and `random` assign a request when it arrives, as a router in front of
engines does. They see what the queue sees: reports, and what was assigned since. `ours` is `fleet.routing`: the
workers ask for work while less than PULL_STEPS full steps of prompts are to be computed there. `prefix-or-load` takes the
longest match if it is AFFINE of the prompt, else the least load. `oracle` is the same with the state of all workers at the
time of assignment, without delay, and with endless patience: whatever the backlog, a prompt goes where most of it is cached.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.fleet_model import (
    FIRST_FORECAST_TOKENS,
    MAX_RUNNING,
    STEP_TOKENS,
    Ids,
    ModelRequest,
    ModelWorker,
    PrefixCache,
    StepClock,
    WorkerReport,
    leading,
)
from benchmarks.replay_clock import Roofline
from pagetide.fleet.routing import RequestNeed, Weights, Why, WorkerView, route

PULL_STEPS = 1  # a worker asks for work below so many full steps of prompts
HOLD_S = 0.005  # a request is held for a worker without room at most so long
OVERTAKING_S = 5.0  # a request that no worker can hold is overtaken at most so long
AFFINE = 0.3  # of a prompt: SGLang's default `cache_threshold`
SCANNED = 64  # waiting requests that one match looks at


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """A fleet: `workers` alike. The lease of each is `limit_blocks`, of which `mapped_share` are mapped at the start."""

    roofline: Roofline
    block_tokens: int
    limit_blocks: int
    workers: int = 8
    mapped_share: float = 0.5
    delay_s: float = 0.05
    recall_at_s: float | None = None  # half of the workers lose `recall_share` of their lease then
    recall_share: float = 0.4
    recall_first: int = 0  # every second worker from this one on
    seed: int = 0


class KnownWorker:
    """What the queue knows of one worker."""

    def __init__(self, name: str, worker: ModelWorker, num_ids: int) -> None:
        self.name = name
        self.report: WorkerReport = worker.report()
        self.unseen: list[ModelRequest] = []  # assigned, and not in the report
        self.assignments = 0
        self._have: npt.NDArray[np.int16] = np.zeros(num_ids, np.int16)  # reported, and promised by assigned prompts
        self._promised: dict[int, Ids] = {}

    def take(self, report: WorkerReport) -> None:
        """Take a report in."""
        self.report = report
        self.unseen = [request for request in self.unseen if request.assignment > report.assignment]
        for ids, change in report.changes:
            self._have[ids] += change
        for number in report.computed:
            if number in self._promised:
                self._have[self._promised.pop(number)] -= 1

    def assign(self, request: ModelRequest, cached_blocks: int, prompt_blocks: int) -> None:
        """Count a request, and its prompt as cached."""
        request.assignment, self.assignments = self.assignments, self.assignments + 1
        request.expected_blocks = prompt_blocks - cached_blocks
        self.unseen.append(request)
        self._have[request.ids] += 1
        self._promised[request.number] = request.ids

    def view(self, ids: Ids, pull_blocks: int, held_blocks: int) -> WorkerView:
        """As a request with these ids sees it. `held_blocks` are to be computed for requests held for it."""
        report, unseen = self.report, self.unseen
        expected = sum(request.expected_blocks for request in unseen)
        running = report.running + len(unseen)
        return WorkerView(
            self.name,
            leading(self._have[ids] > 0),
            report.free - expected,
            report.growable,
            running,
            MAX_RUNNING,
            report.backlog + expected + held_blocks,
            report.growth + sum(request.growth_blocks for request in unseen),
            report.backlog + expected < pull_blocks and running < MAX_RUNNING,
            max(0, report.unused - expected),
        )


class Policy(Protocol):
    """Names a worker for a request, and the worker that it is held for. A request without a worker waits in the queue."""

    def choose(self, need: RequestNeed, views: Sequence[WorkerView]) -> tuple[str | None, str | None, bool]:
        """(worker, held for, whether no worker can hold it)."""


class Ours:
    """`fleet.routing.route`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def choose(self, need: RequestNeed, views: Sequence[WorkerView]) -> tuple[str | None, str | None, bool]:
        chosen = route(need, views, self._weights)
        return chosen.worker, chosen.held_for, chosen.why is Why.FULL


class Ranked:
    """Assigns at once, to the worker with the lowest rank; ties are drawn."""

    def __init__(self, rank: Callable[[WorkerView, RequestNeed], tuple[int, ...]], seed: int) -> None:
        self._rank, self._random = rank, random.Random(seed)

    def choose(self, need: RequestNeed, views: Sequence[WorkerView]) -> tuple[str | None, str | None, bool]:
        ranks = [self._rank(view, need) for view in views]
        least = min(ranks)
        tied = [view for view, rank in zip(views, ranks, strict=True) if rank == least]
        return self._random.choice(tied).name, None, False


class RoundRobin:
    """Assigns at once, in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, need: RequestNeed, views: Sequence[WorkerView]) -> tuple[str | None, str | None, bool]:
        self._next += 1
        return views[self._next % len(views)].name, None, False


def _load(view: WorkerView, need: RequestNeed) -> tuple[int, ...]:
    return view.backlog_blocks, view.running


def _prefix(view: WorkerView, need: RequestNeed) -> tuple[int, ...]:
    return -view.cached_blocks, view.backlog_blocks, view.running


def _threshold(view: WorkerView, need: RequestNeed) -> tuple[int, ...]:
    """As SGLang's `cache_aware`: the longest match, if it is at least AFFINE of the prompt; else by load."""
    match = view.cached_blocks if view.cached_blocks >= AFFINE * need.prompt_blocks else 0
    return -match, view.backlog_blocks, view.running


def policy_named(name: str, weights: Weights, seed: int) -> Policy:
    """A new policy: see `POLICIES`."""
    if name == "ours":
        return Ours(weights)
    if name == "round-robin":
        return RoundRobin()
    ranks = {
        "prefix": _prefix,
        "prefix-or-load": _threshold,
        "oracle": _threshold,
        "least-loaded": _load,
        "random": lambda view, need: (0,),
    }
    return Ranked(ranks[name], seed)


POLICIES = ("ours", "prefix", "prefix-or-load", "least-loaded", "round-robin", "random", "oracle")


class ModelFleet:
    """One run of a trace through a fleet with a policy. `run` ends when all requests have ended."""

    def __init__(self, settings: FleetSettings, policy: Policy, requests: Sequence[ModelRequest], num_ids: int) -> None:
        block, limit = settings.block_tokens, settings.limit_blocks
        clock = StepClock(settings.roofline, block)
        mapped = int(limit * settings.mapped_share)
        self.workers = [ModelWorker(PrefixCache(limit, mapped, num_ids), clock, block) for _ in range(settings.workers)]
        self.known = [KnownWorker(f"worker-{i}", worker, num_ids) for i, worker in enumerate(self.workers)]
        self.num_returned = 0
        self.requests = requests
        self._index = {known.name: i for i, known in enumerate(self.known)}
        self._settings, self._policy = settings, policy
        self._waiting: list[ModelRequest] = []
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._arrived = 0
        self._left = len(requests)
        self._output_tokens = 0

    def run(self) -> None:
        """Serve all requests."""
        settings = self._settings
        if settings.recall_at_s is not None:
            self._at(settings.recall_at_s, self._recall)
        self._at(self.requests[0].at_s, self._arrive)
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, self._order, event))
        self._order += 1

    # -- events ------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self._waiting.append(self.requests[self._arrived])
        self._arrived += 1
        if self._arrived < len(self.requests):
            self._at(self.requests[self._arrived].at_s, self._arrive)
        self._match()

    def _start(self, i: int) -> None:
        worker = self.workers[i]
        if worker.is_stepping:
            return
        following = self.requests[self._arrived].at_s if self._arrived < len(self.requests) else self._now + 1.0
        end_s = worker.plan_step(self._now, following)
        if end_s is not None:
            self._at(end_s, lambda: self._end_step(i))
        self._report(i)

    def _end_step(self, i: int) -> None:
        self.workers[i].end_step(self._now)
        self._start(i)

    def _report(self, i: int) -> None:
        worker, delay_s = self.workers[i], self._settings.delay_s
        ended = [request for request in worker.left if request.end_s >= 0]
        returned = [request for request in worker.left if request.end_s < 0]
        worker.left = []
        self._left -= len(ended)
        self._output_tokens += sum(request.output_tokens for request in ended)
        self.num_returned += len(returned)
        report = worker.report()
        self._at(self._now + delay_s, lambda: self._take(i, report, returned))

    def _take(self, i: int, report: WorkerReport, returned: list[ModelRequest]) -> None:
        self.known[i].take(report)
        if returned:
            self._waiting = sorted([*returned, *self._waiting], key=lambda request: request.number)
        if self._waiting:
            self._match()

    def _recall(self) -> None:
        settings = self._settings
        for i in range(settings.recall_first, settings.workers, 2):
            self.workers[i].recall(int(settings.limit_blocks * (1 - settings.recall_share)))
            self._report(i)
            self._start(i)

    # -- routing -----------------------------------------------------------------------------------------------------

    def _forecast_blocks(self, request: ModelRequest) -> int:
        ended = len(self.requests) - self._left
        mean = self._output_tokens / ended if ended else FIRST_FORECAST_TOKENS
        return max(1, -(-int(mean - request.done_tokens) // self._settings.block_tokens))

    def _match(self) -> None:
        block = self._settings.block_tokens
        held_blocks = [0] * len(self.known)
        kept: list[ModelRequest] = []
        scanned = self._waiting[:SCANNED]
        for at, request in enumerate(scanned):
            waited_s = self._now - request.at_s
            prompt_blocks = -(-request.length() // block)
            need = RequestNeed(
                prompt_blocks,
                self._forecast_blocks(request),
                f"{self._settings.seed}/{request.number}",
                request.held_s < 0 or self._now - request.held_s < HOLD_S,
            )
            views = [
                known.view(request.ids, PULL_STEPS * STEP_TOKENS // block, held)
                for known, held in zip(self.known, held_blocks, strict=True)
            ]
            name, held_for, is_full = self._policy.choose(need, views)
            if name is not None:
                self._assign(request, self._index[name], views[self._index[name]].cached_blocks, need)
                continue
            kept.append(request)
            if held_for is not None:
                i = self._index[held_for]
                if request.held_s < 0 and any(view.pulls for view in views):
                    request.held_s = self._now
                held_blocks[i] += prompt_blocks - min(prompt_blocks, views[i].cached_blocks)
            elif is_full and waited_s > OVERTAKING_S:
                kept += scanned[at + 1 :]
                break
        self._waiting = kept + self._waiting[SCANNED:]

    def _assign(self, request: ModelRequest, i: int, cached_blocks: int, need: RequestNeed) -> None:
        request.growth_blocks = need.growth_blocks
        self.known[i].assign(request, min(cached_blocks, need.prompt_blocks), need.prompt_blocks)
        worker = self.workers[i]
        worker.last_assignment = request.assignment
        worker.waiting.append(request)
        self._start(i)


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """What a run came to."""

    hit_ratio: float  # cached tokens at first admission, of all prompt tokens
    ttft_s: npt.NDArray[np.float64]
    returned: int  # sequences that lost their blocks
    imbalance: float  # busy time of the busiest worker, over the mean


def run_fleet(
    settings: FleetSettings, name: str, weights: Weights, requests: Sequence[ModelRequest], num_ids: int
) -> FleetOutcome:
    """Serve fresh copies of the requests."""
    if name == "oracle":
        settings = replace(settings, delay_s=0.0)
    fleet = ModelFleet(settings, policy_named(name, weights, settings.seed), [replace(r) for r in requests], num_ids)
    fleet.run()
    served = fleet.requests
    prompt_tokens = sum(request.prompt_tokens for request in served)
    busy = [worker.busy_s for worker in fleet.workers]
    return FleetOutcome(
        sum(request.hit_blocks for request in served) * settings.block_tokens / prompt_tokens,
        np.array([request.first_token_s - request.at_s for request in served]),
        fleet.num_returned,
        max(busy) / (sum(busy) / len(busy)),
    )
