"""Routing: which worker of a fleet gets a request, by the prefixes and the memory that each worker has. Pure.

The cost of a worker for a request is in blocks, each worth the time to compute one block of a prompt:

      compute   x blocks of the prompt that the worker has not cached
    + backlog   x blocks of prompts that are still to be computed there
    + growth    x blocks that its running sequences are forecast to need
    + lack      x blocks beyond its free ones, which growth of the lease, or other sequences that end, must give
    + displaced x blocks with cached prefixes that the request would evict

A block to wait for costs less than a block to compute: computing a cached prefix again takes the fleet's time and displaces
other prefixes, waiting takes neither. The cheapest worker that asks for work and can hold the request gets it. Three rules go
with this:

- **Bound on imbalance.** A worker with a backlog of more than `imbalance_blocks` above the least one is left out, however
  much of the prompt it has cached. All others keep their discount for cached blocks: a hot prefix goes to the least loaded of
  the workers that have it, and, if all of these are beyond the bound, to a further worker, which has it from then on too.
- **Hold.** If a worker that does not ask for work now, or has no room now, is cheaper by more than `hold_blocks`, the request
  waits for it. A backlog shrinks by itself, so the wait for a busy worker needs no limit. When a worker has room again is
  unknown: the caller bounds this wait, from the first hold on, by `RequestNeed.may_hold`.
- **Ties** go to the worker with the least load, then by a hash of the request and the worker's name.

The views are each worker's own: routing a request elsewhere takes no prefix from the workers that have it. A request without a
cached prefix goes by load and by memory, never by the size of a cache. Other routers failed here: SGLang's numbers 14532
(misses go to the worker with the smallest cache, however loaded), 32195 (an imbalance switches prefix affinity off) and 32983
(ties go to the same replica).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

_REFERENCE_BLOCK_TOKENS = 512  # `Weights` are tuned for blocks of this size
_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """What a request needs, in blocks, and its identity for ties."""

    prompt_blocks: int
    growth_blocks: int  # forecast growth while it runs
    key: str = ""  # the request's id: ties of different requests go to different workers
    # False: it waits no longer for a worker without room, if another one has room
    may_hold: bool = True


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state of a worker as one request sees it. Requests that are assigned to it and not yet admitted there count.

    Of the pool's blocks, those of running sequences are not in `free_blocks`, and those that assigned prompts will take are
    not either.
    """

    name: str
    # Leading blocks of this prompt that the worker has, or computes for an earlier request
    cached_blocks: int
    free_blocks: int  # mapped, and free or evictable
    growable_blocks: int  # by which the lease may still grow
    running: int  # sequences
    max_running: int
    backlog_blocks: int  # of prompts that are still to be computed
    growth_blocks: int  # forecast growth of what runs
    pulls: bool  # it asks for work now
    unused_blocks: int = 0  # of the free ones, those without a cached prefix


@dataclass(frozen=True, slots=True)
class Weights:
    """The worth of each part of the cost, and two limits in blocks. The limits depend on the block size: `of`."""

    compute: float = 1.0
    backlog: float = 0.25
    growth: float = 0.1
    lack: float = 0.2
    displaced: float = 0.25
    imbalance_blocks: float = 512.0
    hold_blocks: float = 4.0

    @classmethod
    def of(cls, block_tokens: int) -> Weights:
        """The default weights, with limits of as many tokens in blocks of this size."""
        scale = _REFERENCE_BLOCK_TOKENS / block_tokens
        return cls(imbalance_blocks=cls().imbalance_blocks * scale, hold_blocks=cls().hold_blocks * scale)


class Why(StrEnum):
    """The reason of a route. The first three assign the request, the others leave it in the queue."""

    CHEAPEST = "cheapest"
    BOUND = "bound"  # a cheaper worker is beyond the bound on imbalance
    HOLD = "hold"  # a cheaper worker is worth a wait
    BUSY = "busy"  # no worker that can hold the request asks for work
    FULL = "full"  # no worker can hold the request


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. Without a `worker` it stays in the queue, for `held_for` if that is known.

    `cost` is that of `worker`, or of `held_for`, or infinite.
    """

    worker: str | None
    why: Why
    cost: float
    held_for: str | None = None


def route(need: RequestNeed, workers: Sequence[WorkerView], weights: Weights) -> Route:
    """The worker for a request, the worker that it is held for, or why it stays in the queue. Names are unique."""
    able = [worker for worker in workers if can_hold(need, worker)]
    if not able:
        return Route(None, Why.FULL, _INFINITE)
    costs = {worker.name: cost(need, worker, weights) for worker in workers}
    asking = [worker for worker in able if worker.pulls]
    bound = min(worker.backlog_blocks for worker in asking or able) + weights.imbalance_blocks
    # A worker without room frees blocks as its sequences end, unless it runs none.
    targets = [*able, *(worker for worker in workers if worker.running)] if need.may_hold else able
    best = _cheapest(need, [worker for worker in targets if worker.backlog_blocks <= bound], costs)
    if not asking:
        return Route(None, Why.BUSY, costs[best.name], best.name)
    now = _cheapest(need, [worker for worker in asking if worker.backlog_blocks <= bound], costs)
    if costs[best.name] + weights.hold_blocks < costs[now.name]:
        return Route(None, Why.HOLD, costs[best.name], best.name)
    beyond = any(costs[worker.name] < costs[now.name] and worker.backlog_blocks > bound for worker in able)
    return Route(now.name, Why.BOUND if beyond else Why.CHEAPEST, costs[now.name])


def can_hold(need: RequestNeed, worker: WorkerView) -> bool:
    """Whether prompt and growth fit beside the growth of what runs; an empty worker needs room for the prompt alone."""
    if worker.running >= worker.max_running:
        return False
    room_blocks = worker.free_blocks + worker.growable_blocks
    if not worker.running and not worker.backlog_blocks:
        return need.prompt_blocks <= room_blocks
    return need.prompt_blocks + need.growth_blocks + worker.growth_blocks <= room_blocks


def cost(need: RequestNeed, worker: WorkerView, weights: Weights) -> float:
    """The cost of the request on this worker, in blocks. It does not rise with `cached_blocks`."""
    missing = need.prompt_blocks - min(worker.cached_blocks, need.prompt_blocks)
    lack = max(0, need.prompt_blocks + need.growth_blocks + worker.growth_blocks - worker.free_blocks)
    displaced = max(0, missing + need.growth_blocks - worker.unused_blocks - worker.growable_blocks)
    return (
        weights.compute * missing
        + weights.backlog * worker.backlog_blocks
        + weights.growth * worker.growth_blocks
        + weights.lack * lack
        + weights.displaced * displaced
    )


def _cheapest(need: RequestNeed, workers: Sequence[WorkerView], costs: dict[str, float]) -> WorkerView:
    """By cost, then by load, then by a hash that orders the workers differently for each request."""
    least = min(costs[worker.name] for worker in workers)
    tied = [worker for worker in workers if costs[worker.name] == least]
    if len(tied) == 1:
        return tied[0]
    load = min((worker.backlog_blocks, worker.running) for worker in tied)
    tied = [worker for worker in tied if (worker.backlog_blocks, worker.running) == load]
    return min(tied, key=lambda worker: _place(need.key, worker.name))


def _place(key: str, name: str) -> bytes:
    """Rendezvous hashing: the same in each process, and without a pattern over requests."""
    return blake2b(f"{len(key)} {key} {name}".encode(), digest_size=8).digest()
