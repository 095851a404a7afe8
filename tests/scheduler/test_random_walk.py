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
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_seed(variant, seed):
    walk(seed, variant, events=120)


def test_the_walks_really_swap():
    stats = [walk(seed, v, events=300).scheduler.stats for seed in range(4) for v in of("host", "alternate")]
    assert sum(s.demoted_blocks for s in stats) > 200
    assert sum(s.promoted_blocks for s in stats) > 50
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_find_prefixes():
    stats = [walk(seed, v, events=300).scheduler.stats for seed in range(3) for v in of("prefixes", "alternate")]
    assert sum(s.prefix_hit_tokens for s in stats) > 100
    assert sum(s.resumed_hit_tokens for s in stats) > 500
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_bound_what_stays_cached():
    caches = [walk(seed, "fixed-prefixes-alternate", events=150).cache for seed in range(6)]
    evicted = [cache.evicted_blocks for cache in caches if cache.max_cached_blocks is not None]
    assert 0 < len(evicted) < len(caches)
    assert sum(evicted) > 20


@pytest.mark.parametrize("pool", ["fixed", "elastic"])
def test_the_walks_really_go_ahead(pool):
    worlds = [walk(seed, f"{pool}-{kept}-ahead-sound", events=200) for seed in range(4) for kept in ("bare", "host")]
    assert sum(len(world.planned_ahead) for world in worlds) > 400
    assert sum(world.num_left for world in worlds) > 10, "sequences that ended with a plan out behind them"
    assert sum(plan.swaps is not None for world in worlds for plan in world.planned_ahead) > 20


@pytest.mark.parametrize("seed", range(6))
def test_fixed_seeds_meet_pressure(seed):
    walk(seed, "fixed-bare-alternate-sound", events=400)


def test_the_walks_really_preempt():
    worlds = [walk(seed, "fixed-bare-alternate-sound", events=300) for seed in range(14)]
    assert sum(world.scheduler.stats.preemptions for world in worlds) > 20


def test_the_elastic_walks_really_move_and_refuse():
    stats = [walk(seed, "elastic-bare-alternate-sound", events=400).scheduler.stats for seed in range(12)]
    for counter, least in {
        "preemptions": 30, "grown_extents": 100, "given_back_extents": 100, "moved_blocks": 30, "refused_resizes": 10
    }.items():  # fmt: skip
        assert sum(getattr(s, counter) for s in stats) > least, counter
