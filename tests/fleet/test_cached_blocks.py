"""What a router knows of a worker's cache: against a naive set."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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

    def there(self) -> set[int]:
        return self.cached | {digest for digest, until in self.expected if until > self.now}

    @invariant()
    def counts_agree(self) -> None:
        assert self.blocks.num_cached == len(self.cached)


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=50)
