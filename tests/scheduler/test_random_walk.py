"""Many short random lives of a scheduler; `make stress` has the long ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_walk import VARIANTS, walk


def of(*words: str) -> list[str]:
    """The variants that have all of `words`."""
    return [variant for variant in VARIANTS if set(words) <= set(variant.split("-"))]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_seed(variant, seed):
    walk(seed, variant, events=100)


def test_the_walks_really_swap():
    stats = [walk(seed, v, 300, check_every=16).scheduler.stats for seed in range(2) for v in of("host", "alternate")]
    assert sum(s.demoted_blocks for s in stats) > 100
    assert sum(s.promoted_blocks for s in stats) > 50
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_find_prefixes():
    stats = [
        walk(seed, v, 300, check_every=16).scheduler.stats for seed in range(3) for v in of("prefixes", "alternate")
    ]
    assert sum(s.prefix_lookups.hit_tokens for s in stats) > 100
    assert sum(s.resumed_lookups.hit_tokens for s in stats) > 500
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_bound_what_stays_cached():
    caches = [walk(seed, "fixed-prefixes-alternate-sound-full", 150, check_every=16).cache for seed in range(6)]
    evicted = [cache.swapping.evicted_blocks for cache in caches if cache.swapping.max_cached_blocks is not None]
    assert 0 < len(evicted) < len(caches)
    assert sum(evicted) > 20


@pytest.mark.parametrize("pool", ["fixed", "elastic"])
def test_the_walks_really_go_ahead(pool):
    variants = [f"{pool}-{kept}-ahead-sound-full" for kept in ("bare", "host")]
    worlds = [walk(seed, variant, 300, check_every=16) for seed in range(4) for variant in variants]
    assert sum(len(world.planned_ahead) for world in worlds) > 400
    assert sum(world.num_left for world in worlds) > 10, "sequences that ended with a plan out behind them"
    assert sum(plan.swaps is not None for world in worlds for plan in world.planned_ahead) > 20


def test_the_walks_really_fail():
    stats = [walk(seed, v, 200, check_every=16).scheduler.stats for seed in range(2) for v in of("faulty", "alternate")]
    assert sum(s.recomputed_tokens for s in stats) > 100


def test_the_walks_really_preempt():
    worlds = [walk(seed, "fixed-bare-alternate-sound-full", 300, check_every=16) for seed in range(14)]
    assert sum(world.scheduler.stats.preemptions for world in worlds) > 20


def test_the_elastic_walks_really_move_and_refuse():
    stats = [walk(seed, "elastic-bare-alternate-sound-full", 400, check_every=16).scheduler.stats for seed in range(12)]
    for counter, least in {
        "preemptions": 30, "grown_extents": 100, "given_back_extents": 100, "moved_blocks": 30, "refused_resizes": 10
    }.items():  # fmt: skip
        assert sum(getattr(s, counter) for s in stats) > least, counter
