"""Many short random lives of a scheduler; `make stress` has the long ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_walk import elastic_walk, walk


@settings(max_examples=24, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans())
def test_any_seed(seed, ahead):
    walk(seed, events=120, ahead=ahead)


@pytest.mark.parametrize("kept", [{"caching": True}, {"host": True}], ids=["prefixes cached", "a host tier"])
@pytest.mark.parametrize("live", [walk, elastic_walk])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans())
def test_any_seed_with_what_was_computed_kept(live, kept, seed, ahead):
    live(seed, events=120, ahead=ahead, **kept)


def test_the_walks_really_swap():
    worlds = [some(seed, events=300, host=True) for seed in range(4) for some in (walk, elastic_walk)]
    stats = [world.scheduler.stats for world in worlds]
    assert sum(s.demoted_blocks for s in stats) > 200
    assert sum(s.promoted_blocks for s in stats) > 50
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_find_prefixes():
    worlds = [some(seed, events=300, caching=True) for seed in range(3) for some in (walk, elastic_walk)]
    assert sum(world.scheduler.stats.prefix_hit_tokens for world in worlds) > 500
    assert sum(world.scheduler.stats.preemptions for world in worlds) > 25


@pytest.mark.parametrize("live", [walk, elastic_walk])
def test_the_walks_really_go_ahead(live):
    worlds = [live(seed, events=200, host=host, ahead=True) for seed in range(4) for host in (False, True)]
    assert sum(len(world.planned_ahead) for world in worlds) > 400
    assert sum(world.num_left for world in worlds) > 10, "sequences that ended with a plan out behind them"
    assert sum(plan.swaps is not None for world in worlds for plan in world.planned_ahead) > 20


@pytest.mark.parametrize("seed", range(6))
def test_fixed_seeds_meet_pressure(seed):
    walk(seed, events=400)


def test_the_walks_really_preempt():
    assert sum(walk(seed, events=300).scheduler.stats.preemptions for seed in range(14)) > 20


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans())
def test_any_seed_in_an_elastic_pool(seed, ahead):
    elastic_walk(seed, events=150, ahead=ahead)


def test_the_elastic_walks_really_move_and_refuse():
    stats = [elastic_walk(seed, events=400).scheduler.stats for seed in range(12)]
    for counter, least in {
        "preemptions": 30, "grown_extents": 100, "given_back_extents": 100, "moved_blocks": 30, "refused_resizes": 10
    }.items():  # fmt: skip
        assert sum(getattr(s, counter) for s in stats) > least, counter
