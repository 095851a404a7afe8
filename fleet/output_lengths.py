"""A forecast of output lengths, for the blocks that assigned requests are going to need."""

from __future__ import annotations

from collections import deque


class OutputLengths:
    """The mean of the last `memory` outputs. Until some have ended, half of what a request may generate is expected."""

    PRIOR_WEIGHT = 4

    def __init__(self, memory: int = 512) -> None:
        self._lengths: deque[int] = deque(maxlen=memory)
        self._sum = 0

    def observe(self, num_tokens: int) -> None:
        """Learn from an output that has ended."""
        if len(self._lengths) == self._lengths.maxlen:
            self._sum -= self._lengths[0]
        self._lengths.append(num_tokens)
        self._sum += num_tokens

    def expected(self, generated: int, allowed: int) -> int:
        """The expected length of an output that has `generated` tokens and may get `allowed`. Longer ones go on longer."""
        prior = self.PRIOR_WEIGHT * allowed / 2
        mean = (self._sum + prior) / (len(self._lengths) + self.PRIOR_WEIGHT)
        return min(allowed, max(int(mean), generated + generated // 2 + 1))
