"""The bound on what stays cached: which blocks go, when, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World
from hypothesis import given
from hypothesis import strategies as st
from row_cache import BLOCK_SIZE as SIZE
from row_cache import A, B, C, RowCache

from pagetide.cache.eviction import Lru
from pagetide.cache.prefix_tree import Nodes, PrefixTree
from pagetide.cache.reuse_density import ReuseDensity


class CountedVictims(Lru):
    """Takes down how many victims it is asked for."""

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__(tree)
        self.asked: list[int] = []

    def victims(self, n: int) -> Nodes:
        self.asked.append(n)
        return super().victims(n)


class Cache(RowCache):
    """Rows begin, compute all their tokens, and end."""

    def __init__(self, bound: int | None, usable: int = 40, host_slots: int = 0, **more) -> None:
        self.policy: CountedVictims | None = None
        super().__init__(usable, host_slots, **{"eviction": self._policy, "max_cached_blocks": bound} | more)

    def _policy(self, tree: PrefixTree) -> CountedVictims:
        self.policy = CountedVictims(tree)
        return self.policy

    def found(self, tokens: list[int]) -> int:
        """Blocks of `tokens` that can be found."""
        return self.manager.lookup(self.chain(tokens), len(tokens)).num_tokens // SIZE

    def begin(self, row: int, tokens: list[int]) -> None:
        super().begin(row, tokens)
        self.manager.commit(row, self.chain(tokens), len(tokens))
        self.manager.check_invariants()

    def end(self, *rows: int) -> None:
        self.manager.release(np.array(rows))
        self.manager.check_invariants()

    def run(self, tokens: list[int]) -> None:
        self.begin(0, tokens)
        self.end(0)

    @property
    def cached(self) -> int:
        return self.manager.pool.counts().cached


def test_what_goes_is_what_the_policy_says() -> None:
    """By the default policy, of what was used once and what was used twice the first goes, though it is younger."""
    cache = Cache(6, eviction=ReuseDensity)
    for tokens in (A, A, B):
        cache.run(tokens)
    assert (cache.found(A), cache.found(B)) == (4, 2)


def test_rows_that_are_released_at_once() -> None:
    """The policy knows all of them when it is asked."""
    cache = Cache(5)
    cache.begin(0, A)
    cache.begin(1, B)
    cache.begin(2, A[:8] + C)
    cache.end(0, 1, 2)
    assert cache.cached == 5 and cache.policy is not None and len(cache.policy.asked) == 1


def test_it_costs_what_changes() -> None:
    """The policy is asked for what is too much, in one call, and not at all where nothing is; without a bound never."""
    for bound, asked in ((None, []), (100, []), (6, [2, 3])):
        cache = Cache(bound)
        assert cache.policy is not None
        for tokens in (A, B, C[:13]):
            cache.run(tokens)
        assert cache.policy.asked == asked


@pytest.mark.parametrize("worth_it", [True, False])
def test_with_a_host_tier_what_is_too_much_is_demoted_where_that_is_worth_it(worth_it: bool) -> None:
    cache = Cache(3, host_slots=20)
    cache.manager.set_swap_costs(least_chance=0.0 if worth_it else 1.0, promotes=True)
    cache.run(A)
    swaps = cache.manager.host.take_swaps()
    assert (0 if swaps is None else len(swaps.out_slots)) == worth_it
    assert (cache.cached, cache.found(A), cache.manager.swapping.evicted_blocks) == (3, 3 + worth_it, not worth_it)
    cache.begin(0, A)
    swaps = cache.manager.host.take_swaps()
    assert (0 if swaps is None else len(swaps.in_slots)) == worth_it


def test_an_elastic_pool_gives_back_what_the_bound_has_freed() -> None:
    """Without an eviction: what stays cached moves into holes."""
    world = World(31, 4, blocks_per_extent=4, caching=True, max_cached=3)
    for i in range(3):
        world.add(f"r{i}", 25, max_new=1)
    world.run()
    assert (world.cache.pool.counts().cached, world.cache.pool.num_free) == (3, 28)
    cache, evicted = world.cache, world.cache.swapping.evicted_blocks
    assert world.scheduler.pool.give_back(7) == 7
    world.step()
    assert (cache.pool.counts().cached, cache.swapping.evicted_blocks, cache.pool.usable) == (3, evicted, 3)


def test_a_renewed_manager_has_the_same_bound() -> None:
    cache = Cache(3)
    cache.manager = cache.manager.rebuilt()
    cache.run(A)
    assert cache.cached == cache.manager.swapping.max_cached_blocks == 3


class Naive:
    """What stays cached by the rule as it is written: prefixes, who holds them, and since when nobody does."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.holders: dict[tuple[int, ...], set[int]] = {}
        self.evictable: dict[tuple[int, ...], int] = {}
        self.calls = 0

    def begin(self, row: int, tokens: list[int]) -> None:
        for end in range(SIZE, len(tokens) + 1, SIZE):
            prefix = tuple(tokens[:end])
            self.holders.setdefault(prefix, set()).add(row)
            self.evictable.pop(prefix, None)

    def end(self, rows: list[int]) -> None:
        self.calls += 1
        for prefix, held in self.holders.items():
            if held and held <= set(rows):
                self.evictable[prefix] = self.calls
            held -= set(rows)
        while len(self.evictable) > self.bound:
            worst = min(self.evictable, key=lambda prefix: (self.evictable[prefix], -len(prefix)))
            del self.evictable[worst], self.holders[worst]

    def found(self, tokens: list[int]) -> int:
        return sum(tuple(tokens[:end]) in self.holders for end in range(SIZE, len(tokens) + 1, SIZE))


PROMPT = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5).map(
    lambda kinds: [k for k in kinds for _ in range(SIZE)] + [0]
)


@given(bound=st.integers(0, 8), events=st.lists(st.tuples(st.integers(0, 3), PROMPT), max_size=30))
def test_any_life_as_the_rule_is_written(bound: int, events: list[tuple[int, list[int]]]) -> None:
    """Rows of prompts that begin alike come and go: each time the same can be found as by a naive count.

    Of what was evictable at once the order of equals, of the same depth, is open: so a row's end is a call of its own.
    """
    cache, naive = Cache(bound, usable=60), Naive(bound)
    running: dict[int, list[int]] = {}
    prompts = [prompt for _, prompt in events]
    for row, prompt in events:
        if row in running:
            cache.end(row)
            naive.end([row])
            del running[row]
        else:
            cache.begin(row, prompt)
            naive.begin(row, prompt)
            running[row] = prompt
        assert [cache.found(p) for p in prompts] == [naive.found(p) for p in prompts]
        assert cache.cached == len(naive.evictable)
