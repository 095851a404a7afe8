"""What a router knows of a worker's cache: against a naive set, and single scenes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.fleet.cached_blocks import CachedBlocks

DIGESTS = st.lists(st.integers(0, 15), max_size=8)


class Life(RuleBasedStateMachine):
    """`cached` is a set, and `expected` a list of all expectations ever made, which are looked through each time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = CachedBlocks()
        self.now = 0.0
        self.cached: set[int] = set()
        self.expected: list[tuple[int, float]] = []

    @rule(stored=DIGESTS, removed=DIGESTS, cleared=st.integers(0, 9))
    def report(self, stored: list[int], removed: list[int], cleared: int) -> None:
        self.blocks.apply(stored, removed, not cleared)
        if not cleared:
            self.cached, self.expected = set(), []
        self.cached = self.cached - set(removed) | set(stored)
        self.expected = [(digest, until) for digest, until in self.expected if digest not in self.cached]

    @rule(digests=DIGESTS, ttl=st.integers(-1, 4))
    def expect(self, digests: list[int], ttl: int) -> None:
        self.blocks.expect(digests, self.now + ttl)
        self.expected += [(digest, self.now + ttl) for digest in digests if digest not in self.cached]

    @rule(passed=st.integers(0, 3))
    def wait(self, passed: int) -> None:
        self.now += passed

    @rule(digests=st.lists(st.integers(0, 15), max_size=16))
    def look(self, digests: list[int]) -> None:
        there = self.there()
        leading = next((i for i, digest in enumerate(digests) if digest not in there), len(digests))
        assert self.blocks.leading(digests, self.now) == leading
        assert self.blocks.num_expected == len(there - self.cached)

    def there(self) -> set[int]:
        return self.cached | {digest for digest, until in self.expected if until > self.now}

    @invariant()
    def counts_agree(self) -> None:
        assert self.blocks.num_cached == len(self.cached)
        assert self.blocks.num_expected >= len(self.there() - self.cached)


def test_a_random_life_is_what_sets_say() -> None:
    run_state_machine_as_test(Life, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))


def test_a_second_prompt_follows_the_first_before_anything_is_computed() -> None:
    blocks = CachedBlocks()
    blocks.expect([1, 2, 3], until=10.0)
    assert blocks.leading([1, 2, 3, 4], now=9.0) == 3
    blocks.apply(stored=[1, 2])  # confirmed: they stay
    assert blocks.leading([1, 2, 3, 4], now=11.0) == 2
    blocks.apply(removed=[2])
    assert blocks.leading([1, 2, 3, 4], now=11.0) == 1


def test_a_removal_that_is_older_than_the_expectation_ends_it_not() -> None:
    blocks = CachedBlocks()
    blocks.apply(stored=[1])
    blocks.apply(removed=[1])
    blocks.expect([1], until=5.0)
    blocks.apply(removed=[1])
    assert blocks.leading([1], now=4.0) == 1
    blocks.apply(cleared=True)
    assert blocks.leading([1], now=4.0) == 0


def test_the_later_expectation_holds_and_a_gap_counts() -> None:
    blocks = CachedBlocks()
    blocks.expect([1, 2, 3], until=10.0)
    blocks.expect([1, 2], until=5.0)
    blocks.expect([2], until=20.0)
    assert [blocks.leading([1, 2, 3], now) for now in (4.0, 9.9, 10.0)] == [3, 3, 0]
    assert blocks.leading([2, 1], 19.0) == 1 and blocks.leading([2], 20.0) == 0


@pytest.mark.parametrize("known", [0, 1, 1999, 2000])
def test_a_long_prompt(known: int) -> None:
    hasher = PrefixHasher(16, b"a secret of a fleet")
    tokens = np.random.default_rng(0).integers(0, 50_000, 32_000).astype(np.int32)
    digests = hasher.chain(tokens).digests(2000)[:, 0].tolist()
    blocks = CachedBlocks()
    blocks.apply(stored=digests[:known])
    assert blocks.leading(digests, 0.0) == known
    blocks.expect(digests, until=1.0)
    assert blocks.leading(digests, 0.0) == 2000 and blocks.num_expected == 2000 - known
    assert blocks.leading(digests, 1.0) == known and blocks.num_expected == 0
