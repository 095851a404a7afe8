"""Forecast of output lengths, and of the most blocks that running sequences will need at one time.

A request that fits now, while others are about to grow, would only cause a preemption. A request is therefore admitted
only if its prompt fits and the pool would also hold the peak of the expected growth of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.block_table import Index

Float = npt.NDArray[np.float64]

_MOST = 2**17  # tokens: longer outputs count as this long


def _steps(dense: int, per_octave: int) -> Index:
    """0, then every `dense` / `per_octave` tokens up to `dense`, then `per_octave` numbers an octave, up to _MOST."""
    numbers = [np.arange(0, dense, dense // per_octave)]
    while dense < _MOST:
        numbers.append(np.arange(dense, 2 * dense, dense // per_octave))
        dense *= 2
    return np.append(np.concatenate(numbers), _MOST)


EDGES = _steps(256, 16)  # lower edges of the bins of generated tokens
_TIMES = _steps(32, 8)  # forecast times, in steps from now
_NUM_BINS = len(EDGES)  # the last one begins at _MOST
_BIN_OF = (np.searchsorted(EDGES, np.arange(_MOST + 1), side="right") - 1).astype(np.int64)
_WIDTHS = np.append(np.diff(EDGES), _MOST)
# For a sequence in the middle of a bin, at each time: its index in EDGES, and its position between that edge and the
# next.
_THEN = np.minimum((EDGES + np.minimum(_WIDTHS, 2 * _MOST) // 2)[:, None] + _TIMES, _MOST - 1)
_AHEAD = _BIN_OF[_THEN]
_PART = (_THEN - EDGES[_AHEAD]) / _WIDTHS[_AHEAD]


def _bins_of(tokens: Index) -> Index:
    """The bin of each number of generated tokens."""
    bins: Index = _BIN_OF[np.minimum(tokens, _MOST)]
    return bins


@dataclass(frozen=True, slots=True)
class ForecastPeak:
    """Peak of the blocks that some sequences are expected to hold, `in_steps` steps from now.

    `blocks` is mean plus margin, rounded up, and at most what all need if they reach their last allowed token.
    """

    blocks: int
    expected_blocks: float
    margin_blocks: float
    in_steps: int


class LengthForecast:
    """Learns output lengths, and forecasts the peak of blocks that running sequences will hold.

    Lengths are learned as a life table: for each bin, the share of sequences that ended in it among those that reached
    it (Kaplan and Meier 1958; the prior as in Susarla and Van Ryzin 1976). Running sequences count as having reached
    their length, so short early finishers do not bias the estimate. A sequence cut at its own `max_new_tokens` says
    nothing about where it would have ended. The prior makes every allowed length equally likely, with the weight of
    PRIOR_WEIGHT sequences.

    For future times, the forecast gives mean and variance of the blocks held if no request is added. The peak is the
    maximum of mean plus `deviations` standard deviations.
    """

    PRIOR_WEIGHT = 4.0

    def __init__(self, deviations: float = 2.0, memory: int = 512) -> None:
        self.deviations = deviations
        self._memory = memory
        self._ended = np.zeros(_NUM_BINS)  # sequences that ended by themselves in a bin
        self._reached = np.zeros(_NUM_BINS)  # ended sequences that reached a bin, less half of those cut in it
        self._tokens = 0  # of ended sequences
        self._weight = 0  # of all sequences in these; all four are halved when it reaches the memory
        self._num_ended = 0

    def observe(self, generated: int, allowed: int) -> None:
        """Record a sequence that ended after `generated` tokens: by itself if fewer than `allowed`."""
        if self._weight >= self._memory:
            self._ended /= 2
            self._reached /= 2
            self._tokens //= 2
            self._weight //= 2
        at = int(_bins_of(np.array([generated]))[0])
        self._reached[: at + 1] += 1
        if generated < allowed:
            self._ended[at] += 1
        else:
            self._reached[at] -= 0.5
        self._tokens += generated
        self._weight += 1
        self._num_ended += 1

    def expected(self, generated: int, allowed: int) -> int:
        """A quick estimate of the length of an output that has `generated` tokens and may get `allowed`: the mean of those that
        have ended, at first half of what is allowed; at least half as much again as there is.
        """
        mean = (self._tokens + self.PRIOR_WEIGHT * allowed / 2) / (self._weight + self.PRIOR_WEIGHT)
        return min(allowed, max(int(mean), generated + generated // 2 + 1))

    def survival(self, running: Index, longest: int) -> Float:
        """Share of outputs longer than each of EDGES: [len(EDGES) + 1], the last entry for any greater length.

        `running` are the generated tokens of running sequences, `longest` the most that any output may have.
        """
        here = np.bincount(_bins_of(running), minlength=_NUM_BINS)
        # The more sequences have ended, the less the running ones count: they would look endless.
        weight = min(1.0, len(running) / max(1, self._num_ended))
        guess = np.append(np.maximum(1 - EDGES / longest, 0.0), 0.0)
        reached = self._reached + weight * (here[::-1].cumsum()[::-1] - 0.5 * here) + self.PRIOR_WEIGHT * guess[:-1]
        ended = self._ended - self.PRIOR_WEIGHT * np.diff(guess)
        hazard = np.divide(ended, reached, out=np.ones(_NUM_BINS), where=reached > ended)
        return np.concatenate(([1.0], np.cumprod(1 - hazard)))

    def peak(self, known: Index, generated: Index, allowed: Index, block_size: int) -> ForecastPeak:
        """The peak of sequences with `known` tokens, of which `generated` (at most `allowed`) are generated.

        The arrays are [n] each, n >= 1.
        """
        survival = self.survival(generated, int(allowed.max()))
        bins = _bins_of(generated)
        left = np.minimum(allowed - generated, _MOST)
        num_bins, num_times = int(bins.max()) + 1, int(np.searchsorted(_TIMES, left.max())) + 1
        cells = bins * num_times + np.minimum(np.searchsorted(_TIMES, left), num_times - 1)
        # [num_bins, num_times]: of the sequences of a bin that may still run at a time: count, tokens, squared tokens
        count, tokens, squares = (
            np.bincount(cells, weights, num_bins * num_times).reshape(num_bins, -1)[:, ::-1].cumsum(axis=1)[:, ::-1]
            for weights in (None, known, known * known)
        )
        at, part = _AHEAD[:num_bins, :num_times], _PART[:num_bins, :num_times]
        alive = survival[at] + (survival[at + 1] - survival[at]) * part
        alive /= np.maximum(alive[:, :1], 1e-12)
        more = _TIMES[:num_times] + (block_size - 1) / 2  # blocks are rounded up: half a block on average
        expected = (alive * (tokens + count * more)).sum(axis=0) / block_size
        spread = squares + 2 * tokens * more + count * more * more
        margin = self.deviations * np.sqrt((alive * (1 - alive) * spread).sum(axis=0)) / block_size
        high = int(np.argmax(expected + margin))
        blocks = int(np.ceil(expected[high] + margin[high]))
        most = int((-(-(known + allowed - generated) // block_size)).sum())
        return ForecastPeak(min(blocks, most), float(expected[high]), float(margin[high]), int(_TIMES[high]))
