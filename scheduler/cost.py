"""Costs of swapping and computing in seconds, from rates measured at run time.

A demoted block is copied out now, and in when it is needed again. An evicted block is recomputed:

    copy = block bytes / bandwidth    compute = tokens of a block x seconds of a prefill token

    demoting is worth it    copy + chance x copy  <  chance x compute, for the chance that the block is needed again
    promoting is worth it                   copy  <  compute

Both rates start at a guess, which a millisecond of measurement outweighs. Prefill is measured in steps that mostly do
prefill, because a decode token takes many times longer. Measurements fade with every step. A rate that is no longer
measured (copying looked too expensive) thus returns to the guess, and is tried again.
"""

from __future__ import annotations

import math

import numpy as np

from .plan import Plan, Result

# About the rate of a PCIe 3.0 card, or of a copy within host memory
START_BYTES_PER_S = 8e9
START_TOKENS_PER_S = 10e3  # of prefill: a model of 8 billion parameters on an older card

_GUESS_S = 1e-3  # weight of the guess, as measured time
_RECENT = 0.95  # factor on earlier measurements at each measurement
_FADE = 0.999  # factor on measurements at each step
_LEAST_TOKENS = 16  # fewest tokens of a step that measures prefill


class SwapCost:
    """Rates of one model on one device. Swapping a block of `block_size` tokens copies `block_bytes`."""

    def __init__(
        self,
        block_bytes: int,
        block_size: int,
        *,
        bytes_per_s: float = START_BYTES_PER_S,
        tokens_per_s: float = START_TOKENS_PER_S,
    ) -> None:
        if block_bytes < 1 or block_size < 1:
            raise ValueError(f"a block has bytes and tokens, got {block_bytes} and {block_size}")
        self.block_bytes = block_bytes
        self.block_size = block_size
        self._bandwidth = _Rate(bytes_per_s)
        self._prefill = _Rate(tokens_per_s)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of copies between device and host."""
        return self._bandwidth.value

    @property
    def tokens_per_s(self) -> float:
        """Prefill rate."""
        return self._prefill.value

    @property
    def least_chance(self) -> float:
        """Least probability of reuse at which demoting a block beats evicting it; 1 or more if none does."""
        copy_s, compute_s = self.swap_s(1) / 2, self.compute_s(self.block_size)
        return copy_s / (compute_s - copy_s) if compute_s > copy_s else math.inf

    @property
    def promotes(self) -> bool:
        """Whether copying a block in from the host beats recomputing it."""
        return self.swap_s(1) < 2 * self.compute_s(self.block_size)

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to copy `num_blocks` out and in again."""
        return 2 * num_blocks * self.block_bytes / self.bytes_per_s

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` of a prompt."""
        return num_tokens / self.tokens_per_s

    def observe(self, plan: Plan, result: Result) -> None:
        """Record how long a step took, if its runner measured it."""
        self._bandwidth.fade()
        self._prefill.fade()
        if result.swap_s > 0:
            self._bandwidth.observe(result.swapped * self.block_bytes, result.swap_s)
        if result.compute_s > 0:
            tokens = plan.num_tokens
            if tokens == len(plan.rows):  # decodes only
                return
            if tokens >= max(_LEAST_TOKENS, 2 * int(np.count_nonzero(plan.lengths == 1))):
                self._prefill.observe(tokens, result.compute_s)


class _Rate:
    """Amount per second: a guess, combined with recent measurements."""

    def __init__(self, guess: float) -> None:
        if not guess > 0:
            raise ValueError(f"a rate is above 0, got {guess}")
        self._guess = guess
        self._amount = self._seconds = 0.0

    @property
    def value(self) -> float:
        return (self._guess * _GUESS_S + self._amount) / (_GUESS_S + self._seconds)

    def observe(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _RECENT + amount
        self._seconds = self._seconds * _RECENT + seconds

    def fade(self) -> None:
        self._amount *= _FADE
        self._seconds *= _FADE
