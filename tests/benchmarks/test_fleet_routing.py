"""The modelled fleet of `benchmarks.fleet_routing`: its clock, its caches against naive ones, its books, and its outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fleet_model import ModelRequest, ModelWorker, PrefixCache, StepClock, leading, requests_of
from benchmarks.fleet_queue import POLICIES, FleetSettings, ModelFleet, policy_named, run_fleet
from benchmarks.replay_clock import GPUS, MODELS, ReplayClock, Roofline
from benchmarks.replay_traces import synthetic
from pagetide.fleet.routing import Weights
from pagetide.scheduler.plan import Plan

ROOFLINE = Roofline(GPUS["h200"], MODELS["llama-3.1-8b"], 1, 0.5)


def load(num_requests: int, speed: float = 1.0) -> tuple[list[ModelRequest], int]:
    return requests_of(synthetic(num_requests=num_requests).taken(None, speed), 512)


def fresh(requests: Sequence[ModelRequest]) -> list[ModelRequest]:
    return [replace(request) for request in requests]


def test_a_step_takes_what_the_replay_says() -> None:
    starts, lengths = [1_000, 0, 300], [512, 2_000, 1]
    plan = Plan(0, np.arange(3), np.array(starts), np.array(lengths), np.array([True, False, True]))
    attended = sum(start * n + n * n // 2 for start, n in zip(starts, lengths, strict=True))
    ours = StepClock(ROOFLINE, 512).step_s(sum(lengths), 2, attended, sum(starts))
    assert ours == pytest.approx(ReplayClock(ROOFLINE, 512).step_s(plan), rel=1e-4)


def test_leading() -> None:
    for flags in ([], [True], [False], [True, True, False, True], [True] * 5):
        array = np.array(flags, np.bool_)
        assert leading(array) == next((i for i, flag in enumerate(flags) if not flag), len(flags))


def test_a_cache_against_a_list_in_order_of_use() -> None:
    """Random chains, one at a time: hits, and what is evicted, in order."""
    rng = np.random.default_rng(0)
    cache, order = PrefixCache(30, 10, 100), list[int]()
    for _ in range(300):
        root, n = 20 * int(rng.integers(5)), int(rng.integers(1, 21))
        ids = np.arange(root, root + n)
        hit = cache.found(ids)
        assert hit == next((i for i, block in enumerate(ids.tolist()) if block not in order), n)
        cache.hold(ids[:hit])
        before = [block for block in order if block not in ids[:hit].tolist()]
        cache.allocate(n - hit)
        cache.register(ids[hit:])
        cache.check_invariants(0)
        cache.release(ids, 0)
        gone = max(0, len(before) + n - 30)
        order = before[gone:] + ids[::-1].tolist()  # the deepest block of a chain leaves first
        assert cache.evictable == len(order) and all(cache.found(np.array([block])) for block in order)
    cache.recall(12)
    assert cache.mapped == 12 and all(cache.found(np.array([block])) for block in order[-12:])


class Checked(ModelFleet):
    """Counts all books anew at each match."""

    def _match(self) -> None:
        for worker in self.workers:
            worker.check_invariants()
        super()._match()


@pytest.mark.parametrize("name", ["ours", "prefix-or-load", "random"])
def test_books_and_ends_under_a_recall(name: str) -> None:
    """Memory is short: sequences are returned, and all requests end with all their tokens."""
    requests, num_ids = load(150, 12.0)
    settings = FleetSettings(ROOFLINE, 512, 260, workers=2, recall_at_s=requests[-1].at_s / 2, recall_share=0.05)
    fleet = Checked(settings, policy_named(name, Weights(), 0), fresh(requests), num_ids)
    fleet.run()
    for request in fleet.requests:
        assert request.done_tokens == request.output_tokens
        assert request.at_s < request.first_token_s <= request.end_s
        assert 0 <= request.hit_blocks <= len(request.ids)
    for worker in fleet.workers:
        assert not worker.running and not worker.waiting and worker.cache.held == 0


def test_a_recall_returns_sequences() -> None:
    """The sequences admitted last are returned, with the output that they have."""
    requests, num_ids = load(40)
    worker = ModelWorker(PrefixCache(400, 400, num_ids), StepClock(ROOFLINE, 512), 512)
    worker.waiting.extend(requests[:12])
    now: float = 0
    for _ in range(20):
        end_s = worker.plan_step(now, now)
        assert end_s is not None and end_s > now
        worker.end_step(now := end_s)
    running = list(worker.running.values())
    worker.recall(worker.cache.held // 2)
    worker.check_invariants()
    returned = [request for request in worker.left if request.end_s < 0]
    assert returned == running[::-1][: len(returned)] and returned
    assert worker.cache.held <= worker.cache.limit


def test_a_run_alone_by_hand() -> None:
    """One request without a hit: its time to first token is that of its steps."""
    requests, num_ids = load(1)
    tokens = requests[0].prompt_tokens
    outcome = run_fleet(FleetSettings(ROOFLINE, 512, 500), "ours", Weights(), requests, num_ids)
    mapped_s = StepClock(ROOFLINE, 512).map_s_per_block * max(0, -(-tokens // 512) - 250)
    expected = StepClock(ROOFLINE, 512).step_s(tokens, 1, tokens * tokens // 2, 0) + mapped_s
    assert tokens < 8_192 and outcome.hit_ratio == 0
    assert outcome.ttft_s == pytest.approx([expected])


def test_policies_are_repeatable_and_differ() -> None:
    requests, num_ids = load(300, 4.0)
    settings = FleetSettings(ROOFLINE, 512, 600, workers=4)
    hits = {}
    for name in POLICIES:
        first, second = (run_fleet(settings, name, Weights(), requests, num_ids) for _ in range(2))
        assert first.hit_ratio == second.hit_ratio and (first.ttft_s == second.ttft_s).all()
        hits[name] = first.hit_ratio
    assert hits["ours"] > hits["least-loaded"] and hits["ours"] > hits["round-robin"]
