"""What a router knows of one worker's prefix cache: the digests of its findable blocks, and of blocks that it computes soon.

A digest is the first 64 bits of a block's prefix hash, which covers all tokens before the block too. So a prompt is a chain of
digests, and the worker can reuse the leading ones that it has. Two prefixes with equal 64 bits cost a wrong estimate, and
nothing else: the worker compares tokens.

Blocks of a prompt that was just assigned are *expected*: a second prompt with the same prefix follows the first one before
any block of it is computed. An expected block becomes a cached one when the worker reports it, or expires.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count, takewhile

_CACHED = float("inf")
_NEVER = float("-inf")


class CachedBlocks:
    """The cached and the expected blocks of one worker. It has no clock: times are the caller's, in any unit.

    A plain scan finds the leading blocks, since a search that skips blocks may miss one that is gone: blocks that are expected
    behind it stay. It takes less than 0.1 us for each block that is there, and stops at the first one that is not, which for
    most workers is the first block of the prompt.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # _CACHED, or the time at which the expectation ends
        self._num_cached = 0
        self._ends: list[tuple[float, int, tuple[int, ...]]] = []  # a heap of the calls of `expect`, by their `until`
        self._numbers = count()

    @property
    def num_cached(self) -> int:
        """The number of blocks that the worker has reported."""
        return self._num_cached

    def apply(self, stored: Iterable[int] = (), removed: Iterable[int] = (), cleared: bool = False) -> None:
        """Follow the worker's report, in the order `cleared`, `removed`, `stored`. Repeated reports change nothing.

        A block that is expected stays so when it is removed: the report may be older than the expectation. `cleared` ends
        expectations too: what the worker computes for running requests is not findable afterwards.
        """
        until = self._until
        if cleared:
            until.clear()
            self._ends.clear()
            self._num_cached = 0
        for digest in removed:
            if until.get(digest) == _CACHED:
                del until[digest]
                self._num_cached -= 1
        for digest in stored:
            if until.get(digest) != _CACHED:
                until[digest] = _CACHED
                self._num_cached += 1

    def expect(self, digests: Sequence[int], until: float) -> None:
        """Count the blocks of a prompt that was assigned as cached before the time `until`. The later expectation holds."""
        known = self._until
        ours = tuple(digest for digest in digests if known.get(digest, _NEVER) < until)
        if ours:
            known.update(dict.fromkeys(ours, until))
            heapq.heappush(self._ends, (until, next(self._numbers), ours))

    def leading(self, digests: Sequence[int], now: float) -> int:
        """The number of leading blocks of a prompt, by their digests in order, that are cached or expected at `now`."""
        self._expire(now)
        return len(list(takewhile(self._until.__contains__, digests)))

    def _expire(self, now: float) -> None:
        """Forget the expectations that end at `now` or before."""
        while self._ends and self._ends[0][0] <= now:
            ended, _, digests = heapq.heappop(self._ends)
            for digest in digests:
                if self._until.get(digest) == ended:  # neither cached nor expected for longer
                    del self._until[digest]
