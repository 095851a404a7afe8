"""Random lives of a scheduler in all variants, whose frames and cache events are compared too; they meet everything."""

from __future__ import annotations

from itertools import combinations

import pytest
from fakes import World
from frame_watcher import Watcher
from hypothesis import given
from hypothesis import strategies as st
from prefix_fakes import EventWatcher
from random_walk import PAIRWISE, VARIANTS, walk


def of(*words: str) -> list[str]:
    """The variants that have all of `words`."""
    return [variant for variant in VARIANTS if set(words) <= set(variant.split("-"))]


def walk_watched(seed: int, variant: str) -> None:
    frames, events = Watcher(seed), EventWatcher()

    def look(world: World) -> None:
        frames(world)
        if "bare" not in variant:
            events(world)

    frames.check_ends(walk(seed, variant, events=100, look=look))


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_variant(variant: str) -> None:
    walk_watched(100, variant)


@given(variant=st.sampled_from(VARIANTS), seed=st.integers(0, 2**32))
def test_any_seed(variant: str, seed: int) -> None:
    walk_watched(seed, variant)


def test_the_quick_variants_have_every_pair_of_words() -> None:
    def pairs(variants: tuple[str, ...]) -> set[tuple[str, str]]:
        return {pair for variant in variants for pair in combinations(variant.split("-"), 2)}

    assert pairs(PAIRWISE) == pairs(VARIANTS)


def test_the_walks_show_every_state_in_frames() -> None:
    kinds: set[int] = set()
    for seed in range(3):
        for variant in ("elastic-host-alternate-sound-full", "elastic-prefixes-ahead-sound-full"):
            watcher = Watcher(seed)
            watcher.check_ends(walk(seed, variant, events=150, look=watcher))
            kinds |= watcher.kinds
    assert kinds == {0, 1, 2, 3, 4, 5, 16, 17}


@pytest.mark.parametrize(
    ("variants", "seeds", "least"),
    [
        (of("host", "alternate"), 2, {"demoted_blocks": 100, "promoted_blocks": 50, "preemptions": 25}),
        (of("faulty", "alternate"), 2, {"recomputed_tokens": 100}),
        (["fixed-bare-alternate-sound-full"], 14, {"preemptions": 20}),
        (
            ["elastic-bare-alternate-sound-full"],
            16,
            {"preemptions": 30, "grown_extents": 100, "given_back_extents": 100, "moved_blocks": 30, "refused_resizes": 10},
        ),
    ],
    ids=["swap", "fail", "preempt", "move and refuse"],
)
def test_the_walks_really(variants: list[str], seeds: int, least: dict[str, int]) -> None:
    stats = [walk(seed, variant, 300, check_every=16).scheduler.stats for seed in range(seeds) for variant in variants]
    for counter, number in least.items():
        assert sum(getattr(s, counter) for s in stats) > number, counter


def test_the_walks_really_find_prefixes() -> None:
    stats = [walk(seed, v, 300, check_every=16).scheduler.stats for seed in range(3) for v in of("prefixes", "alternate")]
    assert sum(s.prefix_lookups.hit_tokens for s in stats) > 100
    assert sum(s.resumed_lookups.hit_tokens for s in stats) > 500
    assert sum(s.preemptions for s in stats) > 25


def test_the_walks_really_bound_what_stays_cached() -> None:
    caches = [walk(seed, "fixed-prefixes-alternate-sound-full", 150, check_every=16).cache for seed in range(6)]
    evicted = [cache.swapping.evicted_blocks for cache in caches if cache.swapping.max_cached_blocks is not None]
    assert 0 < len(evicted) < len(caches)
    assert sum(evicted) > 20


@pytest.mark.parametrize("pool", ["fixed", "elastic"])
def test_the_walks_really_go_ahead(pool: str) -> None:
    variants = [f"{pool}-{kept}-ahead-sound-full" for kept in ("bare", "host")]
    worlds = [walk(seed, variant, 300, check_every=16) for seed in range(6) for variant in variants]
    assert sum(len(world.planned_ahead) for world in worlds) > 400
    assert sum(world.num_left for world in worlds) > 10, "sequences that ended with a plan out behind them"
    assert sum(plan.swaps is not None for world in worlds for plan in world.planned_ahead) > 20
