"""One replay: the real scheduler and cache manager serve a trace, timed by a modelled clock.

    arrivals up to now ──► add          co-tenant's schedule ──► grow, or make_idle and give_back, between steps
    schedule ──► plan ──► seconds by the roofline; tokens by the trace ──► apply ──► latencies

Only the stub that stands in for the model knows where an output ends.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.replay_clock import ReplayClock, Roofline
from benchmarks.replay_stub import ReplayStub, Seconds
from benchmarks.replay_traces import STOP, Trace
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.errors import RequestRejected
from pagetide.scheduler.outcome import Stats
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Limits, Scheduler

EXTENTS = 100  # that the pool consists of, about: the grain of what a co-tenant takes
SAMPLES = 200  # of the state that are taken while requests arrive, about


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The share of the pool that a co-tenant holds: `shares[i]` from `times_s[i]` on."""

    times_s: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> PoolShare:
        """From "0:0,300:0.4,600:0.1". Raises ValueError, with a sentence."""
        try:
            steps = [(float(at), float(share)) for at, share in (step.split(":") for step in text.split(","))]
        except ValueError:
            raise ValueError(f"a co-tenant's schedule is SECONDS:SHARE,SECONDS:SHARE,..., got {text!r}") from None
        times, shares = zip(*sorted(steps), strict=True)
        known = all(0 <= share < 1 for share in shares) and all(0 <= at_s < np.inf for at_s in times)
        if not known or len(set(times)) < len(times):
            raise ValueError(
                f"a co-tenant takes a share in [0, 1) of the pool, once at a time from 0 s on, got {text!r}"
            )
        return cls(times, shares)

    def __str__(self) -> str:
        steps = zip(self.times_s, self.shares, strict=True)
        return ", ".join(f"from {at_s:g} s on {share:.0%} of the pool" for at_s, share in steps)

    def share(self, now: float) -> float:
        """What it has at `now`."""
        place = bisect.bisect_right(self.times_s, now)
        return self.shares[place - 1] if place else 0.0

    def next_change_s(self, now: float) -> float:
        """When that changes next; infinite where it does not."""
        place = bisect.bisect_right(self.times_s, now)
        return self.times_s[place] if place < len(self.times_s) else np.inf


UNSHARED = PoolShare((0.0,), (0.0,))


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is replayed on."""

    num_blocks: int  # at most, of the pool
    block_size: int
    roofline: Roofline
    limits: Limits
    ask_tokens: int  # max_new_tokens of every request, unless its output is longer still
    tenant: PoolShare = UNSHARED
    caching: bool = True
    host_slots: int = 0  # blocks that the host tier holds
    sample_s: float = 1.0
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    page_bytes: int | None = None  # of a block; None: K and V of all layers, as a single group has them

    @property
    def block_bytes(self) -> int:
        """K and V of a block."""
        return self.page_bytes or self.roofline.block_bytes(self.block_size)

    @property
    def blocks_per_extent(self) -> int:
        """Blocks that a co-tenant takes together."""
        return max(1, self.num_blocks // EXTENTS)

    @property
    def pool_blocks(self) -> int:
        """Blocks of whole extents, the null block among them."""
        return self.num_blocks // self.blocks_per_extent * self.blocks_per_extent

    def parameters(self) -> dict[str, Any]:
        """What tells this replay from others."""
        return {
            "block_size_tokens": self.block_size,
            "block_bytes": self.block_bytes,
            "pool_blocks": self.pool_blocks,
            "pool_bytes": self.pool_blocks * self.block_bytes,
            "blocks_per_extent": self.blocks_per_extent,
            "host_tier_blocks": self.host_slots,
            "host_tier_bytes": self.host_slots * self.block_bytes,
            "prefix_caching": self.caching,
            "seats": self.limits.max_seqs,
            "step_token_budget": self.limits.max_step_tokens,
            "max_model_len": self.limits.max_model_len,
            "max_new_tokens": self.ask_tokens,
            "co_tenant": [
                {"from_s": at_s, "share_of_pool": share}
                for at_s, share in zip(self.tenant.times_s, self.tenant.shares, strict=True)
            ],
        }


def settings_for(trace: Trace, roofline: Roofline, block_size: int) -> ReplaySettings:
    """All of the GPU for a pool; 256 sequences, 8,192 tokens a step; every request asks for as much as the longest output."""
    ask = max(turn.output_tokens for turn in trace.turns)
    span_s = trace.turns[-1].at_s
    longest = max(turn.prompt_tokens for turn in trace.turns) + ask
    limits = Limits(max_seqs=256, max_step_tokens=8_192, max_model_len=longest + 1)
    num_blocks = roofline.blocks_that_fit(block_size)
    return ReplaySettings(num_blocks, block_size, roofline, limits, ask, sample_s=max(0.1, span_s / SAMPLES))


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The state at one time."""

    at_s: float
    running: int
    waiting: int
    live: int  # blocks
    cached: int
    usable: int
    lookup_tokens: int  # since the start
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the scheduler's statistics what a replay reports. The one place that knows their names."""

    steps: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    lookup_tokens: int
    hit_tokens: int
    moved_blocks: int
    given_back_extents: int
    demoted_bytes: int  # copied to the host tier
    promoted_bytes: int  # copied back

    @classmethod
    def of(cls, stats: Stats, block_bytes: int) -> Counters:
        return cls(
            steps=stats.steps,
            computed_tokens=stats.computed_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            preemptions=stats.preemptions,
            lookup_tokens=stats.prefix_lookups.tokens,
            hit_tokens=stats.prefix_lookups.hit_tokens,
            moved_blocks=stats.moved_blocks,
            given_back_extents=stats.given_back_extents,
            demoted_bytes=stats.demoted_blocks * block_bytes,
            promoted_bytes=stats.promoted_blocks * block_bytes,
        )


@dataclass(slots=True)
class ReplayOutcome:
    """What a replay saw. Filled by `replay`; latencies by request, NaN where there is none."""

    counters: Counters
    modelled_s: float
    busy_s: float  # all steps
    copy_s: float  # copies to and from the host, by themselves
    wall_s: float
    cpu_s: float
    refused: int
    unserved: int
    cut_short: int
    ended: npt.NDArray[np.bool_]
    ttft_s: Seconds
    tpot_s: Seconds  # the mean time between tokens of each request
    gaps_s: Seconds  # all times between tokens
    samples: list[PoolSample] = field(default_factory=list)

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """The share of all requests with a first token and tokens in time; one not served to its end is not good."""
        good = self.ended & (self.ttft_s <= ttft_s) & (np.isnan(self.tpot_s) | (self.tpot_s <= tpot_s))
        return float(np.count_nonzero(good)) / len(good)


def build(settings: ReplaySettings) -> Scheduler:
    """A scheduler over an elastic pool, all of it mapped."""
    cache = CacheManager(
        settings.pool_blocks,
        settings.block_size,
        settings.limits.num_rows,
        settings.limits.max_model_len,
        groups=settings.groups,
        blocks_per_extent=settings.blocks_per_extent,
        hasher=PrefixHasher(settings.block_size, b"replay") if settings.caching else None,
        host_slots=settings.host_slots,
    )
    # With the link's rate for a guess: what is thought too slow is never tried, and so never measured.
    cost = SwapCost(settings.block_bytes, settings.block_size, bytes_per_s=settings.roofline.host_bytes_per_s)
    return Scheduler(cache, settings.limits, cost)


def replay(trace: Trace, settings: ReplaySettings) -> ReplayOutcome:
    """Serve all of `trace`. Wall and processor seconds are those of the loop: prompts, stub and clock are in them."""
    run = Replay(trace, settings)
    wall, cpu = time.perf_counter(), time.process_time()
    run.serve()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    run.scheduler.check_invariants()
    outcome = run.outcome(wall, cpu)
    if outcome.ended.all() and not outcome.counters.preemptions:
        needed = sum(turn.prompt_tokens + turn.output_tokens - 1 for turn in trace.turns)
        assert outcome.counters.computed_tokens + outcome.counters.hit_tokens == needed, "tokens are lost, or too many"
    return outcome


class Replay:
    """The loop over one trace."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self.trace = trace
        self.settings = settings
        self.scheduler = build(settings)
        self.stub = ReplayStub(trace, settings.limits.num_rows)
        self.clock = ReplayClock(settings.roofline, settings.block_size, settings.block_bytes)
        self.now = self.busy_s = self.copy_s = 0.0
        self.refused = 0
        self.samples: list[PoolSample] = []
        self._pool_extents = self.scheduler.pool.num_extents
        self._change_s = -np.inf  # when the pool's size is to be looked at
        self._arrivals = [turn.at_s for turn in trace.turns] + [np.inf]
        self._arrived = 0

    def serve(self) -> None:
        """Until every request has ended, or nothing will ever happen again."""
        scheduler, sample_s = self.scheduler, 0.0
        while True:
            self.listen()
            if scheduler.has_work and not scheduler.starving:
                self.step()
                if self.now >= sample_s:
                    self._sample()
                    sample_s = self.now + self.settings.sample_s
                continue
            arrival_s = self._arrivals[self._arrived]
            if arrival_s == np.inf and not scheduler.has_work:
                return
            self.now = min(arrival_s, self.settings.tenant.next_change_s(self.now))
            if self.now == np.inf:
                return

    def listen(self) -> None:
        """Add the requests that have arrived by now, and apply the co-tenant's current share of the pool."""
        while self._arrivals[self._arrived] <= self.now:
            self.add(self._arrived)
            self._arrived += 1
        if self.now >= self._change_s:
            self._resize()

    def step(self) -> None:
        """One step; the clock goes on."""
        plan = self.scheduler.schedule(self.now)
        seconds = compute_s = self.clock.step_s(plan)
        swapped, copy_s = 0, 0.0
        if plan.swaps is not None:
            swapped = len(plan.swaps.out_slots) + len(plan.swaps.in_slots)
            before_s, beside_s = self.clock.copy_s(plan)
            seconds = before_s + max(compute_s, beside_s)
            copy_s = before_s + beside_s
            self.copy_s += copy_s
        self.now += seconds
        self.busy_s += seconds
        emissions = self.scheduler.apply(plan, self.stub.execute(plan, self.now, swapped, copy_s, compute_s))
        for finished in emissions.finished:
            self.stub.end(finished)

    def add(self, number: int) -> None:
        """Request `number` of the trace arrives."""
        turn = self.trace.turns[number]
        tokens = self.trace.tokens(turn)
        sampling = Sampling(max(self.settings.ask_tokens, turn.output_tokens), stop_token_ids=(STOP,))
        request = Request(str(number), tokens[: turn.prompt_tokens], sampling, arrival=turn.at_s)
        try:
            self.scheduler.add(request)
        except RequestRejected:
            self.refused += 1
            return
        self.stub.expect(number, tokens[turn.prompt_tokens :])

    def _resize(self) -> None:
        """Bring the pool to what the co-tenant leaves, preempting for it; what falls short is asked for again next step."""
        scheduler = self.scheduler
        share = self.settings.tenant.share(self.now)
        over = scheduler.pool.num_extents - max(1, round(self._pool_extents * (1 - share)))
        if over > 0:
            scheduler.pool.make_idle(over)
            over -= scheduler.pool.give_back(over)
        elif over < 0:
            over += scheduler.pool.grow(-over)
        self._change_s = self.now if over else self.settings.tenant.next_change_s(self.now)

    def _sample(self) -> None:
        scheduler = self.scheduler
        counts, stats = scheduler.cache.pool.counts(), scheduler.stats
        self.samples.append(
            PoolSample(
                self.now, scheduler.num_running, scheduler.num_waiting, counts.live, counts.cached,
                scheduler.cache.pool.usable, stats.prefix_lookups.tokens, stats.prefix_lookups.hit_tokens,
            )
        )  # fmt: skip

    def outcome(self, wall_s: float, cpu_s: float) -> ReplayOutcome:
        """What was seen."""
        turns, last_s = self.trace.turns, self.stub.last_s()
        between = np.array([turn.output_tokens - 1 for turn in turns], np.float64)
        between[between == 0] = np.nan
        arrived = np.array([turn.at_s for turn in turns])
        return ReplayOutcome(
            counters=Counters.of(self.scheduler.stats, self.settings.block_bytes),
            modelled_s=float(last_s.max()),
            busy_s=self.busy_s,
            copy_s=self.copy_s,
            wall_s=wall_s,
            cpu_s=cpu_s,
            refused=self.refused,
            unserved=self.scheduler.num_waiting,
            cut_short=self.stub.cut_short,
            ended=self.stub.ended,
            ttft_s=self.stub.ttft_s,
            tpot_s=(last_s - arrived - self.stub.ttft_s) / between,
            gaps_s=self.stub.gaps_s(),
            samples=self.samples,
        )
