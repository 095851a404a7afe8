"""How the cost of a replay grows: with requests, with running sequences, with the pool. Processor time, nothing modelled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.figures import Figure
from benchmarks.replay_clock import Roofline
from benchmarks.replay_run import Replay, settings_for
from benchmarks.replay_traces import Trace, distinct, synthetic

REQUESTS = (500, 1_000, 2_000, 4_000, 8_000)
RUNNING = (10, 100, 1_000, 4_000, 10_000)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
_STEPS = 200  # that are timed with so many running
_NEWCOMERS = 20  # that come one by one
_PROMPT = 8_192  # tokens
_EVICTING = 100  # requests that are timed in a full pool
LOADS = {
    "requests": "the synthetic load at 3 requests/s, blocks of 512 tokens; the mean from the first arrival to the last end",
    "running sequences": "all queued at once, 96 tokens each in blocks of 16; the median of "
    f"{_STEPS} steps in which each gains a token, and of {_NEWCOMERS} in which one more is admitted",
    "blocks of the pool": "blocks of 16 tokens, all of them cached; the median of "
    f"{_EVICTING} new prompts of {_PROMPT:,} tokens that evict others, making and looking up the "
    "prompt included; building and resizing the pool once",
}


@dataclass(frozen=True, slots=True)
class Series:
    """What one cost came to at each size of what grows."""

    grows: str
    cost: str
    unit: str
    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    def figures(self) -> list[Figure]:
        """One a size."""
        pairs = zip(self.sizes, self.costs, strict=True)
        return [Figure(f"{self.cost}, {size:,} {self.grows}", cost, self.unit) for size, cost in pairs]


def measure(roofline: Roofline, say: Callable[[str], None], up_to: int | None = None) -> list[Series]:
    """All of it; half a minute or so. With `up_to` the sizes up to that; it is a size itself where all are larger."""
    series: list[Series] = []
    for grows, sizes, least, cost in (
        ("requests", REQUESTS, 1, _requests),
        ("running sequences", RUNNING, 1, _running),
        ("blocks of the pool", POOLS, POOLS[0], _pool),
    ):
        say(f"scaling with the number of {grows} ...")
        some = sizes if up_to is None else tuple(n for n in sizes if n <= up_to) or (max(up_to, least),)
        series += _series(grows, some, [cost(roofline, size) for size in some])
    return series


def _series(grows: str, sizes: tuple[int, ...], measured: list[dict[tuple[str, str], float]]) -> list[Series]:
    return [Series(grows, *name, sizes, tuple(costs[name] for costs in measured)) for name in measured[0]]


def _requests(roofline: Roofline, num_requests: int) -> dict[tuple[str, str], float]:
    trace = synthetic(num_requests)
    run = Replay(trace, settings_for(trace, roofline, 512))
    began = time.process_time()
    run.serve()
    took = time.process_time() - began
    return {("a request", "us"): took / num_requests * 1e6, ("a step", "us"): took / run.scheduler.stats.steps * 1e6}


def _running(roofline: Roofline, num_running: int) -> dict[tuple[str, str], float]:
    """Of a step with so many, of getting them there, and of one more."""
    # The outputs are so long that no sequence ends before all steps are timed.
    trace = distinct(num_running + _NEWCOMERS, 96, 3 * _STEPS)
    settings = settings_for(trace, roofline, 16)
    limits = replace(settings.limits, max_seqs=num_running + _NEWCOMERS, max_step_tokens=65_536)
    run = Replay(trace, replace(settings, limits=limits, num_blocks=45 * (num_running + _NEWCOMERS)))
    began = time.process_time()
    for number in range(num_running):
        run.add(number)
    while run.scheduler.num_waiting:
        run.step()
    run.step()
    admitted = time.process_time()
    newcomers: list[float] = []
    steps = [_timed(run.step) for _ in range(_STEPS)]
    assert run.scheduler.num_running == num_running, "a sequence ended early"
    for number in range(num_running, num_running + _NEWCOMERS):
        run.add(number)
        newcomers.append(_timed(run.step))
        run.step()
    assert run.scheduler.num_running == num_running + _NEWCOMERS, "a newcomer was not admitted"
    return {
        ("a step", "us"): statistics.median(steps) * 1e6,
        ("a step that admits one more", "us"): statistics.median(newcomers) * 1e6,
        ("to queue and admit a request, all at once", "us"): (admitted - began) / num_running * 1e6,
    }


def _pool(roofline: Roofline, num_blocks: int) -> dict[tuple[str, str], float]:
    """Of a request that drives others out of a full pool, and of a co-tenant's coming and going."""
    filling = num_blocks * 16 // _PROMPT + 4
    trace = distinct(filling + _EVICTING, _PROMPT, 2)
    settings = settings_for(Trace(trace.source, trace.id_tokens, trace.turns[:filling]), roofline, 16)
    limits = replace(settings.limits, max_seqs=4)
    settings = replace(settings, limits=limits, num_blocks=num_blocks)
    began = time.process_time()
    run = Replay(trace, settings)
    built = time.process_time()
    scheduler = run.scheduler
    requests = []
    for number in range(len(trace.turns)):
        requests.append(_timed(lambda: _serve_one(run, number)))  # noqa: B023
    assert scheduler.cache.pool.num_free < _PROMPT // 16, "the pool is not full"
    taken = scheduler.pool.num_extents * 4 // 10
    resize = _timed(lambda: _take_and_return(run, taken))  # once: the pool is not full after it
    return {
        ("a request of 512 new blocks, the pool full", "us"): statistics.median(requests[filling:]) * 1e6,
        ("40 % of the pool taken and returned", "us"): resize * 1e6,
        ("to build the pool", "us"): (built - began) * 1e6,
    }


def _serve_one(run: Replay, number: int) -> None:
    run.add(number)
    while run.scheduler.has_work:
        run.step()


def _take_and_return(run: Replay, extents: int) -> None:
    run.scheduler.pool.make_idle(extents)
    assert run.scheduler.pool.give_back(extents) == extents, "not all could be given back"
    run.step()
    run.scheduler.pool.grow(extents)
    run.step()


def _timed(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began
